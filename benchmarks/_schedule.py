"""From cycles of a step to the time of a call: which tiles a mask leaves, how they share the SMs, memory and launches."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from dataclasses import dataclass

from benchmarks import _feeds
from benchmarks._feeds import Machine, Tile

#: Cycles of a program in which its SM does nothing for it: the first loads, each behind the other (queries, then keys, then
#: the first product), and the store at the end. ASSUMED: three times a global load's latency of about 600 cycles (published
#: microbenchmarks of A100 and H100 agree on 450 to 700).
LATENCY = 1800
#: Share of the datasheet's memory bandwidth that a copy reaches: 4.3 of 4.8 TB/s on an H200.
MEMORY_SHARE = 0.9
#: Seconds between two kernels of one stream. ASSUMED.
LAUNCH = 3e-6
#: Registers of one SM, and of a thread at most (CUDA C++ programming guide, "Technical Specifications per Compute Capability").
REGISTERS, THREAD_REGISTERS = 65536, 255


@dataclass(frozen=True)
class Shape:
    """One call. ``causal``: key <= query; ``window``: and the nearest so many keys only. Lengths of queries and keys equal."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    dim: int
    causal: bool = False
    window: int | None = None

    @property
    def kept(self) -> float:
        """Scores of one head that the mask keeps."""
        n = self.length
        if self.window is not None:
            w = min(self.window, n)
            return w * (w + 1) / 2 + (n - w) * w
        return n * n / 2 if self.causal else float(n * n)

    def flops(self, backward: bool) -> float:
        forward = 4.0 * self.batch * self.heads * self.kept * self.dim
        return 2.5 * forward if backward else forward

    @property
    def tensor(self) -> float:
        """Bytes of one tensor of the queries' shape."""
        return 2.0 * self.batch * self.heads * self.length * self.dim

    @property
    def key_tensor(self) -> float:
        return self.tensor * self.kv_heads / self.heads


@dataclass(frozen=True)
class Factors:
    """What is fitted to measurements, the same for all kernels, shapes and, but for the clock, GPUs.

    Attributes:
        general, gluon: by family of kernels, the share of the parts of a step that are not the longest which is not hidden
            behind it (0: all run side by side, 1: one after the other).
        clock: of the datasheet's clock, what the tensor cores sustain (power).
    """

    general: float
    gluon: float
    clock: float


@dataclass(frozen=True)
class Kernel:
    """One kernel of a pass.

    Attributes:
        gluon: whether it is warp-specialised. persistent: whether its loads run on from one tile to the next.
        loops: loops over tiles, each of which starts its loads anew.
    """

    which: str
    tile: Tile
    gluon: bool = False
    persistent: bool = False
    loops: int = 1


def programs(shape: Shape, kernel: Kernel) -> Counter[int]:
    """How many programs there are by their number of steps."""
    m, n, length = kernel.tile.rows, kernel.tile.keys, shape.length
    by_queries = kernel.which in ("forward", "dq")
    block, other = (m, n) if by_queries else (n, m)
    found: Counter[int] = Counter()
    for first in range(0, length, block):
        last = min(first + block, length) - 1
        low, high = 0, length
        if shape.causal and by_queries:
            low, high = (0 if shape.window is None else max(0, first - shape.window + 1)), last + 1
        elif shape.causal:
            low, high = first, (length if shape.window is None else min(length, last + shape.window))
        found[-(-high // other) - low // other] += 1
    heads = shape.heads if by_queries else shape.kv_heads
    group = 1 if by_queries else shape.heads // shape.kv_heads
    return Counter({steps * group: count * shape.batch * heads for steps, count in found.items()})


def makespan(work: Counter[int], overhead: float, sms: int) -> float:
    """Steps that the busiest SM does, the longest programs first, each with ``overhead`` steps' worth of waiting."""
    longest = sorted(work.items(), reverse=True)
    busy = [0.0] * sms
    for steps, count in longest:
        # Whole rounds of equal programs leave the order of the SMs as it is.
        rounds, rest = divmod(count, sms)
        if rounds:
            busy = [b + rounds * (steps + overhead) for b in busy]
        heapq.heapify(busy)
        for _ in range(rest):
            heapq.heapreplace(busy, busy[0] + steps + overhead)
    return max(busy)


def resident(machine: Machine, kernel: Kernel, dim: int) -> int:
    """Programs that an SM runs at a time, with as many registers as a thread may have."""
    if kernel.gluon:
        return 1
    by_registers = REGISTERS // (32 * kernel.tile.warps * THREAD_REGISTERS)
    by_shared = machine.shared // (_feeds.shared_bytes(kernel.which, kernel.tile, dim, dim) + _BLOCK)
    return max(1, min(by_registers, by_shared))


#: Shared memory that the system takes of each block (CUDA C++ programming guide, "Shared Memory" of 8.x).
_BLOCK = 1024


def kernel_step(machine: Machine, kernel: Kernel, dim: int) -> dict[str, float]:
    """:func:`benchmarks._feeds.step` of a kernel."""
    moves = _feeds.TENSOR_MEMORY_MOVES if machine.instruction == "tcgen05" and not kernel.gluon else 0.0
    return _feeds.step(machine, kernel.which, kernel.tile, dim, dim, moves)


def step_cycles(machine: Machine, kernel: Kernel, dim: int, factors: Factors) -> float:
    """Cycles of one step, as far as the parts of it overlap."""
    parts = kernel_step(machine, kernel, dim)
    exposed = factors.gluon if kernel.gluon else factors.general
    # In a warp the products of a step, its softmax and the next products follow each other. Copies from L2 and the operands
    # that asynchronous products read need no instructions there: they hide, or are the bound.
    chain = [parts[k] for k in ("tensor", "exp", "vector")]
    computing = max(chain) + exposed * (sum(chain) - max(chain))
    return max(computing, parts["shared"], parts["l2"])


def kernel_seconds(machine: Machine, kernel: Kernel, shape: Shape, factors: Factors) -> float:
    """Time of one kernel."""
    cycles = step_cycles(machine, kernel, shape.dim, factors)
    waiting = 0.0 if kernel.persistent else kernel.loops * LATENCY / resident(machine, kernel, shape.dim) / cycles
    steps = makespan(programs(shape, kernel), waiting, machine.sms)
    computing = steps * cycles / (machine.clock * factors.clock)
    # Everything is read and written once; what is read again comes from L2.
    q, k = shape.tensor, shape.key_tensor
    moved = {"forward": 2 * q + 2 * k, "dkdv": 2 * q + 4 * k, "dq": 3 * q + 2 * k}.get(kernel.which, 4 * q + 4 * k)
    return max(computing, moved / (machine.hbm * MEMORY_SHARE)) + LAUNCH


def around_seconds(machine: Machine, shape: Shape, gluon: bool) -> float:
    """Kernels before and after those of the backward: delta from out and its gradient; for the fused one dQ's float32 sum."""
    moved, launches = 2 * shape.tensor, 1
    if gluon:
        moved, launches = moved + 2 * shape.tensor + 3 * shape.tensor, 2
    return moved / (machine.hbm * MEMORY_SHARE) + launches * LAUNCH


def seconds(machine: Machine, kernels: tuple[Kernel, ...], shape: Shape, factors: Factors) -> float:
    """Time of a forward (one kernel) or of a backward (the kernels that compute gradients; those around them are added)."""
    total = math.fsum(kernel_seconds(machine, k, shape, factors) for k in kernels)
    if kernels[0].which == "forward":
        return total
    return total + around_seconds(machine, shape, any(k.gluon for k in kernels))
