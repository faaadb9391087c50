"""Launches of the Gluon kernels on tensors: descriptors, grids and default tiles."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fa_inductor.spec import AttentionSpec
from fa_inductor.templates.direct import problem_of
from fa_inductor.templates.program import Program
from fa_inductor.templates.rendering import dense_strides
from fa_inductor.templates.sm90.captured import Captured, layout_of
from fa_inductor.templates.sm90.form import FAR, form_of, forward_form_of, padded
from fa_inductor.templates.sm90.forward_source import ForwardSource, forward_kernel, forward_source_of
from fa_inductor.templates.sm90.launcher import DescriptorForm, Launcher, overlaps
from fa_inductor.templates.sm90.program_source import range_kernel

#: Query rows of one consumer warpgroup.
CONSUMER_ROWS = 64


#: Bytes of shared memory that a block may have on Hopper, and what barriers take at most.
SHARED, BARRIERS = 232448, 1024


@dataclass(frozen=True)
class GluonConfig:
    """Tile and launch choices of the forward kernel.

    Attributes:
        keys: keys of a tile. stages: buffers of K and of V.
        consumers: warpgroups of 64 query rows, 2 or 3. registers: of a thread of theirs.
        section: heads that run side by side.
        ping_pong: whether consumers take turns in issuing products.
        schedule: "tile": a program a tile; "static": a program an SM, which takes every n-th tile; "dynamic": a program an
            SM, which takes the next tile that nobody has taken.
        stream: whether tiles of queries follow each other in one loop (:mod:`~fa_inductor.templates.sm90.gluon_stream`), of 2
            consumers and where shared memory holds two tiles of queries for each.
    """

    keys: int
    stages: int
    consumers: int = 2
    registers: int = 240
    section: int = 8
    ping_pong: bool = True
    schedule: str = "dynamic"
    stream: bool = False


#: By padded head dim of queries and keys. Forward, TFLOP/s of calls past torch.compile on an H200 (torch 2.11, triton 3.6, bf16,
#: 16384 tokens, hidden size 2048), the sides taking turns; in brackets cuDNN in that run: D64 S4k 520 (440), causal 452 (407);
#: D128 S512 541 (549), S2k causal 563 (503), S4k 669 (634), causal 634 (563), GQA 32:8 S8k causal 621 (550); D256 S4k causal 679
#: (607). The other schedules were slower or within the spread of runs, ``static`` much so under a mask (D64 S4k causal 400).
CONFIGS = {
    64: GluonConfig(128, 2, consumers=3, registers=160),
    128: GluonConfig(128, 2),
    256: GluonConfig(64, 2),
}


#: Under a mask with few keys, half as many of them a tile, for less of a tile lies outside the mask, and no counter to fill
#: before the kernel: D128 S512 causal 343 TFLOP/s of calls (343; another run 341, 351), dynamic 339, with the tiles above 324; with
#: 2048 keys it is 520 and 563. With one loop, in CUDA graphs of one run, 323 (cuDNN 306, two loops 308).
SHORT = 512
MASKED_SHORT = {128: GluonConfig(64, 4, ping_pong=False, schedule="static", stream=True)}


#: Where the mask compares queries with keys, as within documents: their ends lie anywhere in a tile, and the mask's loads need
#: registers. D128, documents of log-normal length (32768 tokens, causal), TFLOP/s of the scores that are kept: 422, with the
#: tiles above 396, with these and turns 407. Lengths inside of a tile were not run with them. With one loop, in one run, 450 (444).
COMPARING = {128: GluonConfig(64, 4, ping_pong=False, stream=True)}


def config_of(dim: int, keys: int, masked: bool, compares: bool = False) -> GluonConfig:
    """Tile and launch choices for a padded head dim of queries and keys, a number of keys, whether a mask applies, and whether it
    compares more than distances."""
    if compares and dim in COMPARING and keys % COMPARING[dim].keys == 0:
        return COMPARING[dim]
    return MASKED_SHORT.get(dim, CONFIGS[dim]) if masked and keys <= SHORT else CONFIGS[dim]


def _streams(config: GluonConfig, d_pad: int, v_pad: int, source: ForwardSource | None, flags: Mapping[str, bool]) -> bool:
    """Whether a configuration's tiles of queries follow each other in one loop: of what was timed that way."""
    if not config.stream or d_pad != v_pad or flags["HAS_LOW"] or flags["SOFTCAP"] or not flags["EVEN"]:
        return False
    if source is not None and (not source.plain or source.wide or source.sinks or not (source.ranges and flags["HAS_HIGH"])):
        return False
    tiles = CONSUMER_ROWS * config.consumers * (2 * d_pad + v_pad) + config.stages * config.keys * (d_pad + v_pad)
    return config.consumers == 2 and 2 * tiles + BARRIERS <= SHARED


def kernel_of(
    config: GluonConfig, d_pad: int, v_pad: int, source: ForwardSource | None, flags: Mapping[str, bool]
) -> tuple[Any, dict[str, Any]]:
    """(the jitted kernel, all of its compile-time arguments).

    Args:
        source: a program's text where it has one. flags: EVEN, HAS_LOW, HAS_HIGH, SOFTCAP and DEAD_ZERO.
    """
    from fa_inductor.templates.sm90 import gluon_forward, gluon_stream

    made = {**constants(config, d_pad, v_pad), **flags}
    if _streams(config, d_pad, v_pad, source, flags):
        del made["OWN_O"]
        kernel = gluon_stream.flash_forward if source is None else forward_kernel(source, True)
        return kernel, {**made, "MASKED": source is not None, "SINKS": 0}
    if source is None:
        return gluon_forward.flash_forward, made
    return forward_kernel(source), {**made, **source.constants}


def _own_output(config: GluonConfig, d_pad: int, v_pad: int) -> bool:
    """Whether the output has room for a buffer of its own in shared memory."""
    queries, output = (CONSUMER_ROWS * config.consumers * dim for dim in (d_pad, v_pad))
    tiles = config.stages * config.keys * (d_pad + v_pad)
    return 2 * (queries + output + tiles) + BARRIERS <= SHARED


def constants(config: GluonConfig, d_pad: int, v_pad: int) -> dict[str, Any]:
    """The kernel's compile-time arguments that a configuration decides."""
    return {
        "KEYS": config.keys,
        "STAGES": config.stages,
        "CONSUMERS": config.consumers,
        "SECTION": config.section,
        "DYNAMIC": config.schedule == "dynamic",
        "REGISTERS": config.registers,
        "PING_PONG": config.ping_pong,
        "OWN_O": _own_output(config, d_pad, v_pad),
    }


def numbers_of(
    scale: float, softcap: float | None, lengths: tuple[int, int], band: tuple[int | None, int | None], b: int, hq: int, hkv: int
) -> tuple[float | int, ...]:
    """The numbers that a forward kernel gets after its tensors. ``lengths``: queries and keys; ``band``: low and high."""
    low, high = (0 if end is None else end for end in band)
    return (scale * math.log2(math.e), softcap or 0.0, *lengths, low, high, hq, b * hq, hq // hkv)


class Forward:
    """The forward kernel prepared for operands of given shapes, strides, dtype and device; called with such operands.

    Args:
        q: [B, Hq, M, Dqk]; k: [B, Hkv, N, Dqk]; v: [B, Hkv, N, Dv], bf16 or fp16 on one Hopper GPU.
        scale: factor of the logits. low, high: query m attends to keys m + low .. m + high; None for no limit.
        softcap: scores become ``tanh(score * softcap)`` before ``scale``.
        layout: memory order of out. dead_zero: rows without keys give 0, not NaN.
        source: the program's own kernels where it is more than ``scale``, ``softcap`` and the band say, with its captured
            tensors and run-time sizes.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        config: GluonConfig,
        *,
        scale: float,
        low: int | None = None,
        high: int | None = None,
        softcap: float | None = None,
        layout: str = "bhmd",
        dead_zero: bool = False,
        source: ForwardSource | None = None,
        captures: Sequence[Tensor] = (),
        sizes: Sequence[int] = (),
    ) -> None:
        b, hq, m, d = q.shape
        hkv, n, dv = k.shape[1], k.shape[2], v.shape[3]
        d_pad, v_pad = padded(d), padded(dv)
        self.device, self.device_index, self.dtype = q.device, q.get_device(), q.dtype
        self.out_size, self.lse_size = (b, hq, m, dv), (b, hq, m)
        self.out_stride = dense_strides(self.out_size, layout)
        out = torch.empty_strided(self.out_size, self.out_stride, dtype=q.dtype, device="meta")
        self.forms = [
            DescriptorForm(q, CONSUMER_ROWS, d_pad),
            DescriptorForm(k, config.keys, d_pad),
            DescriptorForm(v, config.keys, v_pad),
            DescriptorForm(out, CONSUMER_ROWS, v_pad),
        ]
        rows = CONSUMER_ROWS * config.consumers
        tiles = -(-m // rows) * b * hq
        programs = tiles if config.schedule == "tile" else min(tiles, _processors(self.device_index))
        # With a program for each tile, the counter's value does not matter.
        self.make_counter = torch.zeros if config.schedule == "dynamic" and programs < tiles else torch.empty
        self.numbers = numbers_of(scale, softcap, (m, n), (low, high), b, hq, hkv)
        flags = {
            "EVEN": n % config.keys == 0, "HAS_LOW": low is not None, "HAS_HIGH": high is not None,
            "SOFTCAP": softcap is not None, "DEAD_ZERO": dead_zero,
        }  # fmt: skip
        kernel, made = kernel_of(config, d_pad, v_pad, source, flags)
        self.programmed = source is not None or "ranges" in kernel.arg_names
        self.arguments = Captured(source.arguments if source else (), captures, sizes)
        self.ranges: Launcher | None = None
        if source is not None and source.ranges:
            blocks = -(-m // CONSUMER_ROWS)
            self.range_size = (b, blocks, 4)
            self.range_arguments = Captured(source.range_arguments, captures, sizes)
            self.range_numbers = (m, n, -FAR if low is None else low, FAR if high is None else high)
            blocked = {"BLOCK_M": CONSUMER_ROWS, "BLOCK_N": config.keys}
            self.ranges = Launcher(range_kernel(source.ranges), (b * blocks, 1, 1), blocked)
        self.launcher = Launcher(kernel, (programs, 1, 1), made)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, captures: Sequence[Tensor] = ()) -> tuple[Tensor, Tensor]:
        """(out [B, Hq, M, Dv] in the layout's order, lse [B, Hq, M] float32)."""
        if torch.cuda.current_device() != self.device_index:
            with torch.cuda.device(self.device_index):
                return self(q, k, v, captures)
        out = torch.empty_strided(self.out_size, self.out_stride, dtype=self.dtype, device=self.device)
        lse = torch.empty(self.lse_size, dtype=torch.float32, device=self.device)
        # One a call: launches on several streams, and graphs that are replayed side by side, may share none.
        counter = self.make_counter(1, dtype=torch.int32, device=self.device)
        q_form, k_form, v_form, o_form = self.forms
        descriptors = q_form.of(q), k_form.of(k), v_form.of(v), o_form.of(out)
        more: tuple[Any, ...] = ()
        if self.programmed:
            ranges = None
            if self.ranges is not None:
                ranges = torch.empty(self.range_size, dtype=torch.int32, device=self.device)
                self.ranges(self.device_index, ranges, *self.range_arguments(captures), *self.range_numbers)
            more = self.arguments(captures) or None, ranges
        self.launcher(self.device_index, *descriptors, lse, counter, *self.numbers, *more)
        return out, lse


@lru_cache(maxsize=64)
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def forward(q: Tensor, k: Tensor, v: Tensor, config: GluonConfig, **form: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of one call, with the arguments of :class:`Forward`."""
    return Forward(q, k, v, config, **form)(q, k, v)


#: Prepared kernels by program, sizes and what a tensor's metadata says of the operands.
_PREPARED: dict[tuple[Any, ...], Forward] = {}
_MOST_PREPARED = 1024


def attention(q: Tensor, k: Tensor, v: Tensor, sizes: Sequence[int], program: str) -> tuple[Tensor, Tensor]:
    """(out, lse) of a program that has a :class:`~fa_inductor.templates.sm90.form.Form`, with its default tiles."""
    return program_attention(q, k, v, (), sizes, program)


def program_attention(
    q: Tensor, k: Tensor, v: Tensor, captures: Sequence[Tensor], sizes: Sequence[int], program: str
) -> tuple[Tensor, Tensor]:
    """(out, lse) of a program that has a :class:`~fa_inductor.templates.sm90.form.ForwardForm`, with its default tiles."""
    prepared = _PREPARED.get(_key(q, k, v, captures, sizes, program))
    # TMA reads rows of 16-byte multiples from 16-byte aligned addresses; compiled code passes nothing else.
    if prepared is None or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16:
        q, k, v = (t.clone() if t.data_ptr() % 16 else t for t in (q, k, v))
        q, k, v = (t.clone(memory_format=torch.contiguous_format) if overlaps(t) else t for t in (q, k, v))
        key = _key(q, k, v, captures, sizes, program)
        prepared = _PREPARED.get(key)
        if prepared is None:
            if len(_PREPARED) >= _MOST_PREPARED:  # lengths that never repeat
                _PREPARED.clear()
            prepared = _PREPARED[key] = prepare(q, k, v, sizes, program, captures)
    return prepared(q, k, v, captures)


def _key(
    q: Tensor, k: Tensor, v: Tensor, captures: Sequence[Tensor], sizes: Sequence[int], program: str
) -> tuple[Any, ...]:
    key = (program, *sizes, q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.dtype, q.get_device())
    return (*key, *layout_of(captures)) if captures else key


def prepare(
    q: Tensor, k: Tensor, v: Tensor, sizes: Sequence[int], program: str, captures: Sequence[Tensor] = ()
) -> Forward:
    """The kernel of a program with its default tiles; raises ValueError for a program without a form."""
    spec = AttentionSpec.parse(program)
    form = form_of(spec)
    more: dict[str, Any] = {}
    compares = False
    if isinstance(form, str):
        problem = problem_of(q, k, v, captures, sizes)
        form = forward_form_of(Program.of(spec, problem).spec)
        if isinstance(form, str):
            raise ValueError(f"not a program of the Gluon kernel ({form}): {program}")
        source = forward_source_of(spec, problem, [t.stride() for t in captures])
        more, compares = {"source": source, "captures": captures, "sizes": sizes}, form.compares
    low, high = form.band(q.shape[2], k.shape[2], sizes)
    config = config_of(padded(q.shape[3]), k.shape[2], low is not None or high is not None, compares)
    return Forward(
        q, k, v, config, scale=form.scale, low=low, high=high, softcap=form.softcap,
        layout=spec.layout, dead_zero=spec.dead_rows == "zero", **more,
    )  # fmt: skip
