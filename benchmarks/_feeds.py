"""Feeds and speeds of flash attention: cycles that one step of a kernel needs of each part of an SM.

A step is one tile of scores, ``rows`` queries by ``keys`` keys. :func:`step` counts for it what the tensor cores, the special
function units, the FP32 lanes, shared memory and the L2 cache have to do, by architecture and by where the operands of each
product lie. ``roofline.py`` makes times of it. Every rate has its source beside it; ASSUMED marks what no source was found for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

#: Passes: the general templates' kernels, and the Gluon backward for sm_90 (all three gradients in one kernel; wide: head dims
#: above 128).
PASSES = ("forward", "dkdv", "dq", "fused", "wide")


@dataclass(frozen=True)
class Machine:
    """One GPU.

    Attributes:
        arch: compute capability. sms: streaming multiprocessors. clock: Hz, at which the datasheet's peak is reached.
        mma: dense bf16 FLOP with float32 sums an SM and cycle: datasheet's peak / (sms * clock).
        instruction: how the tensor cores are fed: mma.sync from registers, wgmma and tcgen05 from shared memory.
        exps, fp32, alu: results an SM and cycle of ex2, of FMA/add/multiply, of max and conversions to bf16.
        hbm: bytes a second of device memory. l2: bytes an SM and cycle from L2.
        block, shared: bytes of shared memory that a block and an SM may have.
    """

    name: str
    arch: int
    sms: int
    clock: float
    mma: int
    instruction: str
    exps: int
    fp32: int
    alu: int
    hbm: float
    l2: float
    block: int
    shared: int

    @property
    def peak(self) -> float:
        """Dense bf16 FLOP a second at the datasheet's clock."""
        return self.sms * self.mma * self.clock


_KB = 1024
# exps, fp32, alu: CUDA C++ programming guide, table "Throughput of Native Arithmetic Instructions": base 2 exponential 16 on all;
# 32-bit floating-point add, multiply, multiply-add 64 on 8.0, 128 from 8.6 on; compare, minimum, maximum 64; conversions from
# 32-bit types 64 on 8.0 and 9.0, 16 on 8.6 and 8.9 (counted as 64 here: they are few beside the maximum).
# block, shared: the same guide, table "Technical Specifications per Compute Capability".
# l2: A100 whitepaper (2020): 5120 bytes a cycle. ASSUMED for all others: the same, Blackwell's two dies each as much; 64 bytes a
# cycle is what one SM can take at most.
# The shared memory of all of them moves 128 bytes an SM and cycle: 32 banks of 4 bytes (CUDA programming guide, "Shared Memory").
SHARED_BYTES = 128
MACHINES = {
    # A100 80GB SXM datasheet: 312 TFLOP/s bf16, 2039 GB/s; A100 whitepaper: 108 SMs, boost 1410 MHz, 1024 FMA an SM and cycle.
    80: Machine("A100", 80, 108, 1.410e9, 2048, "mma.sync", 16, 64, 64, 2.039e12, 5120 / 108, 163 * _KB, 164 * _KB),
    # A40 datasheet: 149.7 TFLOP/s, 696 GB/s; GA102 whitepaper: 84 SMs, boost 1740 MHz. GeForce cards of the same chip have half
    # the rate with float32 sums.
    86: Machine("A40", 86, 84, 1.740e9, 1024, "mma.sync", 16, 128, 64, 0.696e12, 5120 / 84, 99 * _KB, 100 * _KB),
    # L40S datasheet: 362 TFLOP/s, 864 GB/s, 18176 FP32 lanes = 142 SMs; the clock follows from the peak.
    89: Machine("L40S", 89, 142, 2.490e9, 1024, "mma.sync", 16, 128, 64, 0.864e12, 5120 / 142, 99 * _KB, 100 * _KB),
    # H200 SXM datasheet: 989 TFLOP/s, 4.8 TB/s; H100 whitepaper: 132 SMs, 1830 MHz for tensor core peaks.
    90: Machine("H200", 90, 132, 1.830e9, 4096, "wgmma", 16, 128, 64, 4.8e12, 5120 / 132, 227 * _KB, 228 * _KB),
    # HGX B200 datasheet: 2.25 PFLOP/s, 8 TB/s; FlashAttention-4 (arXiv 2603.05451): 8192 FLOP of bf16, 16 exponentials and 128
    # bytes of shared memory an SM and cycle; 148 SMs; the clock follows from the peak.
    100: Machine("B200", 100, 148, 1.856e9, 8192, "tcgen05", 16, 128, 64, 8.0e12, 64, 227 * _KB, 228 * _KB),
    # HGX B300 datasheet: 2.25 PFLOP/s, 8 TB/s; twice the exponentials (NVIDIA, "Inside NVIDIA Blackwell Ultra"). ASSUMED: SMs as
    # the B200.
    103: Machine("B300", 103, 148, 1.856e9, 8192, "tcgen05", 32, 128, 64, 8.0e12, 64, 227 * _KB, 228 * _KB),
    # GeForce RTX 5090, RTX Blackwell whitepaper: 170 SMs, 2407 MHz, 209.5 TFLOP/s with float32 sums, 1792 GB/s. No tensor memory.
    120: Machine("RTX 5090", 120, 170, 2.407e9, 512, "mma.sync", 16, 128, 64, 1.792e12, 5120 / 170, 99 * _KB, 100 * _KB),
}


@dataclass(frozen=True)
class Tile:
    """Queries and keys of a step and the warps that compute (Gluon: four a consumer), with buffers of the tiles in flight."""

    rows: int
    keys: int
    warps: int
    stages: int = 2


@dataclass(frozen=True)
class Product:
    """``[rows, depth] @ [depth, columns]``: the right side from shared memory, the left from there, ``registers`` or ``copied``.

    ``copied``: in registers, but of another warp than the one that needs it, if several share a row.
    """

    rows: int
    columns: int
    depth: int
    left: str = "shared"

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.columns * self.depth


def products(which: str, tile: Tile, dim: int, v_dim: int) -> list[Product]:
    """The matrix products of a step: 2 in the forward, 4 and 3 in the split backward, 5 in the fused one."""
    m, n = tile.rows, tile.keys
    if which == "forward":
        return [Product(m, n, dim), Product(m, v_dim, n, "copied")]
    if which == "dq":
        return [Product(m, n, dim), Product(m, n, v_dim), Product(m, dim, n, "copied")]
    # Scores transposed, so that P^T and dS^T are left operands in registers.
    transposed = [Product(n, m, dim), Product(n, m, v_dim), Product(n, v_dim, m, "copied"), Product(n, dim, m, "copied")]
    if which == "dkdv":
        return transposed
    if which == "fused":
        return [*transposed, Product(m, dim, n)]
    # One consumer computes S and one dP, then each half of the columns of dV, dK and dQ, all from shared memory.
    half = [Product(n, v_dim // 2, m), Product(n, dim // 2, m), Product(m, dim // 2, n)]
    return [Product(n, m, dim), Product(n, m, v_dim), *half, *half]


def _split(machine: Machine, product: Product, warps: int) -> tuple[int, int]:
    """(how often the right operand is read, how often the left): parts of the rows, and parts of the columns a part of rows."""
    if machine.instruction == "tcgen05":
        return max(1, product.rows // 128), 1
    # A warp group of wgmma takes 64 rows, a warp of mma.sync 16. More warps than that share rows.
    unit, workers = (64, max(1, warps // 4)) if machine.instruction == "wgmma" else (16, warps)
    # mma.sync: a warp with several parts of the rows keeps the right operand for all of them; wgmma reads it for each.
    parts = max(1, product.rows // unit)
    columns = max(1, workers // parts)
    return (parts if machine.instruction == "wgmma" else min(parts, workers)), columns


#: Of a kernel that Triton compiles for sm_100, where scores and sums pass between tensor memory and registers: 11.5 instructions
#: a score in the assembler's output of the forward (128 x 128, D 128, eight warps, triton 3.7.1), of which 7.4 are counted below.
TENSOR_MEMORY_MOVES = 4.0


@lru_cache(maxsize=4096)
def step(machine: Machine, which: str, tile: Tile, dim: int, v_dim: int, moves: float = 0.0) -> dict[str, float]:
    """Cycles of one SM for one step, by part: tensor, exp, vector, shared, l2.

    ``which`` is one of :data:`PASSES`. ``fill`` (part of ``shared``): the copies into shared memory. ``moves``: instructions a
    score that are neither arithmetic nor counted otherwise (:data:`TENSOR_MEMORY_MOVES`).
    """
    m, n, scores = tile.rows, tile.keys, tile.rows * tile.keys
    tensor = shared = loads = 0.0
    warps = 4 if which == "wide" else tile.warps  # there a product is one consumer's
    for p in products(which, tile, dim, v_dim):
        # tcgen05 with 64 rows fills half of the tensor core (ASSUMED: half the rate).
        rate = machine.mma * (min(1.0, p.rows / 128) if machine.instruction == "tcgen05" else 1.0)
        tensor += p.flops / rate
        right, left = _split(machine, p, warps)
        read = 2 * p.columns * p.depth * right
        if p.left == "shared":
            read += 2 * p.rows * p.depth * left
        elif left > 1 and machine.instruction != "tcgen05":
            read += 2 * p.rows * p.depth * (left + 1)  # stored once, read by each
        shared += read
        loads += read
    # dS (where one consumer computes it alone: P too) goes to shared memory for the fused dQ; dQ goes there and out again.
    extra = {"fused": 1, "wide": 2}.get(which, 0)
    shared += 2 * scores * extra + (8 * m * dim if extra else 0)
    # Keys and values stay in dkdv, fused and wide, queries and their gradients in the others.
    moved = 2 * (dim + v_dim) * (n if which in ("forward", "dq") else m)
    fill = moved / SHARED_BYTES
    l2 = moved + (4 * m * dim if extra else 0)
    # Instructions a score, counted in the assembler's output for sm_80 and sm_90 (triton 3.7.1): forward FFMA, FADD, FMNMX, half
    # an F2FP, and the rescaling of the output; dQ FFMA, FADD, FMUL, half an F2FP; the others as dQ, with another F2FP and FMUL.
    fp32 = {"forward": 2.0 * scores + m * v_dim, "dq": 3.0 * scores}.get(which, 3.5 * scores)
    alu = {"forward": 1.5 * scores, "dq": 0.5 * scores}.get(which, 1.0 * scores)
    # Of every warp and step: addresses, barriers, loop. In the same output 100 to 140.
    issued = fp32 + alu + (1.0 + moves) * scores + 32 * 120 * tile.warps
    if machine.instruction == "mma.sync":
        # Instructions of 32 lanes: ldmatrix of 512 bytes, and products of 16 x 8 x 16.
        issued += 32 * (loads / 512 + sum(p.flops for p in products(which, tile, dim, v_dim)) / 4096)
    # Four schedulers of 32 lanes (whitepapers).
    vector = max(fp32 / machine.fp32, alu / machine.alu, issued / 128)
    return {
        "tensor": tensor,
        "exp": scores / machine.exps,
        "vector": vector,
        "shared": shared / SHARED_BYTES + fill,
        "l2": l2 / machine.l2,
        "fill": fill,
    }


def bound(cycles: dict[str, float]) -> str:
    """The part that a step waits for longest."""
    return max((k for k in cycles if k != "fill"), key=lambda k: cycles[k])


def shared_bytes(which: str, tile: Tile, dim: int, v_dim: int) -> int:
    """Shared memory of one block: resident operands once, what is streamed ``stages`` times, less one that is in registers.

    A lower estimate for the general templates; ``aot_table.py`` has the exact numbers.
    """
    still, moving = (tile.rows, tile.keys) if which in ("forward", "dq") else (tile.keys, tile.rows)
    resident = 2 * still * (dim if which == "forward" else dim + v_dim)
    buffers = max(1, tile.stages - (0 if which in ("fused", "wide") else 1))
    return resident + 2 * moving * (dim + v_dim) * buffers


def tensor_memory(which: str, tile: Tile, dim: int, v_dim: int) -> int:
    """Columns of tensor memory that Triton allocates: the products' sums, and P and dS where they are left operands.

    Columns are 32 bits by 128 rows: 64 rows take half, bf16 operands half. A block gets a power of two of them.
    """
    columns = 0.0
    for p in products(which, tile, dim, v_dim):
        operand = p.depth / 2 if p.left == "copied" else 0.0
        columns += p.rows / 128 * (p.columns + operand)
    return 1 << (math.ceil(columns) - 1).bit_length()
