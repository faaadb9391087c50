"""Launches of the Gluon backward kernel on tensors, between the kernels that prepare its rows and finish dQ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fa_inductor.spec import AttentionSpec
from fa_inductor.templates.direct import problem_of
from fa_inductor.templates.program import Program
from fa_inductor.templates.rendering import dense_strides
from fa_inductor.templates.sm90.captured import Captured, layout_of
from fa_inductor.templates.sm90.form import form_of, padded, program_form_of
from fa_inductor.templates.sm90.launcher import DescriptorForm, Launcher, overlaps
from fa_inductor.templates.sm90.program_source import ProgramSource, gluon_kernel, range_kernel, source_of
from fa_inductor.templates.sm90.sinks import sink_gradients

#: Keys, and rows of dQ, that a consumer handles.
CONSUMER_KEYS = 64
#: Elements of a program of the kernels before and after.
_ROWS_BLOCK = 4096
#: Lengths that every tile ends with.
_WHOLE = 128
#: In deterministic mode up to so many heads run side by side: the fewer programs of one head run at once, the less they wait for
#: each other. Of the backward kernel alone, TFLOP/s on an H200, bf16, causal, sections of 8 and of all 16 heads: S16k 486 and
#: 500, GQA 32:8 S8k 442 and 488. Of 64 heads, sections of 8, 16 and 32: S4k 471, 441 and 454.
_FEW_HEADS = 16


@dataclass(frozen=True)
class BackwardConfig:
    """Tile and launch choices of the backward kernels.

    Attributes:
        rows: queries of a tile: 64, or 128 where the padded head dim is 64.
        stages: buffers of Q and of dO. registers: of a consumer's thread. section: heads that run side by side.
        ordered_work: tiles of keys of the heads that run side by side in deterministic mode; None for ``section`` there too.
        wide: whether the kernel is the one for head dims above 128, of 64 keys and not 128 a program.
    """

    rows: int
    stages: int = 2
    registers: int = 240
    section: int = 8
    ordered_work: int | None = None
    wide: bool = False

    @property
    def keys(self) -> int:
        return CONSUMER_KEYS if self.wide else 2 * CONSUMER_KEYS

    def width(self, padded_dim: int) -> int:
        """Columns of a tile of a tensor with that padded head dim."""
        return padded_dim // 2 if self.wide else padded_dim

    def dq_columns(self, padded_dim: int) -> int:
        """Columns of a tile of dQ that a consumer adds to memory at once."""
        if self.wide:
            return 64
        return padded_dim // 2 if self.rows == CONSUMER_KEYS else padded_dim

    def constants(self, deterministic: bool, heads: int = 1 << 30, keys: int = 0) -> dict[str, int]:
        """The kernel's compile-time arguments that the configuration decides, for so many (batch, key head) and keys."""
        section = self._ordered_section(heads, keys) if deterministic else self.section
        made = {"STAGES": self.stages, "SECTION": section, "REGISTERS": self.registers, "DETERMINISTIC": deterministic}
        return made if self.wide else {"ROWS": self.rows, **made}

    def _ordered_section(self, heads: int, keys: int) -> int:
        if self.ordered_work is not None:
            # A power of two: each is a kernel of its own.
            tiles = -(-max(keys, 1) // self.keys)
            return max(_FEW_HEADS, min(4 * _FEW_HEADS, self.ordered_work >> (tiles - 1).bit_length()))
        return _FEW_HEADS if heads <= _FEW_HEADS else self.section


#: By padded head dim. Backward TFLOP/s on an H200 (torch 2.11, triton 3.6, bf16, 16384 tokens, hidden size 2048; in brackets
#: cuDNN in that run), the sides taking turns: D64 S4k 468 (430), causal 423 (378), with 64 rows 421 and 378; D128 S2k causal
#: 419 (403), S4k 525 (531), causal 487 (460), S16k 546 (545), causal 540 (540), with 3 stages 1 to 5 % less. Sections of 4 and
#: 16 heads were within the spread of runs, of 1 head up to 11 % slower under a mask.
#: ``ordered_work`` at D64, TFLOP/s of whole calls, causal, sections of 8, 16, 32 and 64 heads, the sides taking turns: S16k 440,
#: 465, 464; S8k 424, 429, 410; S4k 384, 416, 425, 421; S2k (32: 348) 286, then 320, 346, 343 in another run; S1k 230, 253, 264 from
#: 16 on. At D128 the order of 8, 16 and 32 heads was another in each run (S4k 471, 441, 454 and 433, 446, 449).
CONFIGS = {64: BackwardConfig(128, ordered_work=1024), 128: BackwardConfig(64), 256: BackwardConfig(64, wide=True)}
#: With the slope of the softcap, or of another logit, 128 rows need more registers than there are: D64 S4k causal with a
#: temperature by head 206 with 128 rows and 327 with 64, with softcap and ALiBi 202 and 286, with ALiBi alone 386 and 363. And
#: so do lengths that end inside of a tile, for a program with text of its own.
SOFTCAP_CONFIGS = {**CONFIGS, 64: BackwardConfig(64, stages=3)}


#: The kernel's compile-time arguments for a score under a band, which needs no text of its own.
NO_PROGRAM = {"PROGRAM": False, "MASKED": False, "EVEN_Q": True, "SELECT": False}


class Backward:
    """The backward kernels prepared for operands of given shapes, strides, dtype and device; called with such operands.

    Args:
        grad_out: [B, Hq, M, Dv]; q: [B, Hq, M, Dqk]; k: [B, Hkv, N, Dqk]; v: [B, Hkv, N, Dv]; out: as grad_out, of any
            strides that are multiples of 16 bytes, the last 1; bf16 or fp16 on one Hopper GPU.
        scale, low, high, softcap, layout, dead_zero: as in :class:`fa_inductor.templates.sm90.launch.Forward`; the gradients
            are stored in the layout's order.
        deterministic: dQ is added up in a fixed order, so that equal operands give equal bits.
        source: the program's own kernels where it is more than ``scale``, ``softcap`` and the band say, with its captured
            tensors and run-time sizes.
    """

    def __init__(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        config: BackwardConfig,
        *,
        scale: float,
        low: int | None = None,
        high: int | None = None,
        softcap: float | None = None,
        layout: str = "bhmd",
        dead_zero: bool = False,
        deterministic: bool = False,
        source: ProgramSource | None = None,
        captures: Sequence[Tensor] = (),
        sizes: Sequence[int] = (),
    ) -> None:
        from fa_inductor.templates.sm90.backward_rows import row_statistics, scale_sum
        from fa_inductor.templates.sm90.gluon_backward import flash_backward
        from fa_inductor.templates.sm90.gluon_backward_wide import flash_backward_wide

        b, hq, m, d = q.shape
        hkv, n, dv = k.shape[1], k.shape[2], v.shape[3]
        d_pad, v_pad = padded(d), padded(dv)
        self.device, self.device_index, self.dtype = q.device, q.get_device(), q.dtype
        self.sizes = [(t.shape, dense_strides(t.shape, layout)) for t in (q, k, v)]
        padded_len = -(-m // config.rows) * config.rows
        self.statistics = (2, b * hq, padded_len)
        self.sum_size = (b * hq * padded_len, d)
        dq, dk, dv_ = (torch.empty_strided(*size, dtype=q.dtype, device="meta") for size in self.sizes)
        dq_sum = torch.empty(self.sum_size, dtype=torch.float32, device="meta")
        row = torch.empty(b * hq, padded_len, dtype=torch.float32, device="meta")
        d_tile, v_tile = config.width(d_pad), config.width(v_pad)
        self.forms = [
            DescriptorForm(q, config.rows, d_tile),
            DescriptorForm(k, CONSUMER_KEYS, d_tile),
            DescriptorForm(v, CONSUMER_KEYS, v_tile),
            DescriptorForm(grad_out, config.rows, v_tile),
            DescriptorForm(row, config.rows),
            DescriptorForm(row, config.rows),
            DescriptorForm(dq_sum, CONSUMER_KEYS, config.dq_columns(d_pad)),
            DescriptorForm(dk, CONSUMER_KEYS, d_tile),
            DescriptorForm(dv_, CONSUMER_KEYS, v_tile),
        ]
        factor = scale * (softcap or 1.0)
        plain = True
        if source is not None and not source.plain:
            plain, factor = False, source.factor
        self.numbers = (
            scale * math.log2(math.e),
            (softcap or 0.0) if plain else factor,
            m,
            n,
            0 if low is None else low,
            0 if high is None else high,
            hkv,
            b * hkv,
            hq // hkv,
        )
        # Rows without keys are NaN, and all keys get NaN from them: then no tile may be skipped.
        first, last = -m if low is None else low, n if high is None else high
        dead = first > last or first + m > n or last < 0
        skip = dead_zero or not dead
        flags = {
            "EVEN": n % config.keys == 0, "SKIP": skip, "HAS_LOW": low is not None, "HAS_HIGH": high is not None,
            "SOFTCAP": softcap is not None,
        }  # fmt: skip
        kernel = flash_backward_wide if config.wide else flash_backward
        constants = {**config.constants(deterministic, b * hkv, n), **flags}
        self.ranges: Launcher | None = None
        self.program: tuple[Any, ...] = () if config.wide else (None, None)
        self.source = source
        if not config.wide:
            constants |= NO_PROGRAM
        if source is not None:
            assert not config.wide
            kernel = gluon_kernel(source)
            constants |= {
                "SKIP": skip if source.skip is None else source.skip, "PROGRAM": not source.plain, "MASKED": source.masked,
                "EVEN_Q": m % config.rows == 0, "SELECT": source.select,
            }  # fmt: skip
            self.arguments = Captured(source.arguments, captures, sizes)
            self.range_arguments = Captured(source.range_arguments, captures, sizes)
            # The order of the additions supposes that the ends of what tiles of keys see grow with the keys.
            if source.ranges and not deterministic:
                tiles = -(-n // config.keys)
                self.range_size = (b, tiles, 4)
                made = {"BLOCK_M": config.rows, "BLOCK_N": config.keys}
                self.ranges = Launcher(range_kernel(source.ranges), (b * tiles, 1, 1), made)
        self.main = Launcher(kernel, (-(-n // config.keys) * b * hkv, 1, 1), constants)
        #: Numbers that give the additions to dQ their order: see gluon_order.
        self.turns = 1 + b * hq * -(-m // config.rows) if deterministic else 0
        self.row_numbers = (hq, m, padded_len, *out.stride()[:3], *grad_out.stride()[:3])
        rows = _ROWS_BLOCK // d_pad
        widths = {"QK_DIM": d, "QK_PAD": d_pad, "V_DIM": dv, "V_PAD": v_pad, "ROWS": rows, "DEAD_ZERO": dead_zero}
        row_grid = (padded_len // rows * b * hq, 1, 1)
        self.rows = Launcher(row_statistics, row_grid, widths)
        self.sum_numbers = (factor, hq, m, padded_len, *dq.stride()[:3])
        self.sum = Launcher(scale_sum, row_grid, {"DIM": d, "PAD": d_pad, "ROWS": rows})

    def __call__(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, captures: Sequence[Tensor] = ()
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) in the layout's order; ``lse`` [B, Hq, M] float32 as the forward wrote it."""
        return self.with_delta((grad_out, q, k, v, out, lse), captures)[:3]

    def with_delta(self, operands: Sequence[Tensor], captures: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As a call with these, and sum_d out * grad_out [B * Hq, M padded to tiles] float32."""
        if torch.cuda.current_device() != self.device_index:
            with torch.cuda.device(self.device_index):
                return self.with_delta(operands, captures)
        grad_out, q, k, v, out, lse = operands
        dq, dk, dv = (torch.empty_strided(*size, dtype=self.dtype, device=self.device) for size in self.sizes)
        dq_sum = torch.empty(self.sum_size, dtype=torch.float32, device=self.device)
        log2_denom, delta = torch.empty(self.statistics, dtype=torch.float32, device=self.device).unbind()
        self.rows(self.device_index, out, grad_out, lse, log2_denom, delta, dq_sum, *self.row_numbers)
        tiled = (q, k, v, grad_out, log2_denom, delta, dq_sum, dk, dv)
        descriptors = [form.of(t) for form, t in zip(self.forms, tiled, strict=True)]
        turns = torch.zeros(self.turns, dtype=torch.int32, device=self.device) if self.turns else None
        self.main(self.device_index, *descriptors, *self.numbers, turns, *self._program(captures))
        self.sum(self.device_index, dq_sum, dq, *self.sum_numbers)
        return dq, dk, dv, delta

    def _program(self, captures: Sequence[Tensor]) -> tuple[Any, ...]:
        """The kernel's arguments for the program: what its text takes from outside, and the tiles that its mask leaves."""
        if self.source is None:
            return self.program
        ranges = None
        if self.ranges is not None:
            ranges = torch.empty(self.range_size, dtype=torch.int32, device=self.device)
            lengths = self.numbers[2:4]
            self.ranges(self.device_index, ranges, *self.range_arguments(captures), *lengths)
        return self.arguments(captures) or None, ranges


def backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, config: BackwardConfig, **form: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of one call, with the arguments of :class:`Backward`."""
    return Backward(grad_out, q, k, v, out, config, **form)(grad_out, q, k, v, out, lse)


#: Prepared kernels by program, sizes and what a tensor's metadata says of the operands.
_PREPARED: dict[tuple[Any, ...], Backward] = {}
_MOST_PREPARED = 1024


def attention_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sizes: Sequence[int], program: str
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of a program that has a :class:`~fa_inductor.templates.sm90.form.Form`, with its default tiles.

    Under ``torch.use_deterministic_algorithms`` equal operands give equal bits.
    """
    prepared, operands = _prepared(grad_out, q, k, v, out, lse, (), sizes, program)
    return prepared(*operands)


#: grad_out, q, k, v, out and lse.
Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def program_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, captures: Sequence[Tensor],
    sizes: Sequence[int], program: str, wanted: Sequence[bool] = (),
) -> list[Tensor | None]:  # fmt: skip
    """[dq, dk, dv, *gradients of captured tensors] of a program that has a ProgramForm, with its default tiles.

    Args:
        wanted: for each captured tensor whether its gradient is asked for; one that the score reads has none here. The others
            are None.
    """
    prepared, operands = _prepared(grad_out, q, k, v, out, lse, captures, sizes, program)
    *grads, delta = prepared.with_delta(operands, captures)
    if not any(wanted):
        return [*grads, *[None] * len(captures)]
    delta = delta[:, : q.shape[2]].view(lse.shape)
    return [*grads, *sink_gradients(lse, delta, k.shape[2], captures, sizes, AttentionSpec.parse(program), wanted)]


def _prepared(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, captures: Sequence[Tensor],
    sizes: Sequence[int], program: str,
) -> tuple[Backward, Operands]:  # fmt: skip
    """The prepared kernels and the operands as they take them, copied where TMA could not read them."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    tensors = (grad_out, q, k, v, out)
    pointers = grad_out.data_ptr() | q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr() | lse.data_ptr()
    prepared = _PREPARED.get(_key(tensors, captures, sizes, program, deterministic))
    if prepared is not None and pointers % 16 == 0 and lse.is_contiguous():
        return prepared, (*tensors, lse)
    if not all(_readable(t) for t in tensors):
        tensors = tuple(t if _readable(t) else _copy(t) for t in tensors)
    if not lse.is_contiguous() or lse.data_ptr() % 16:
        lse = _copy(lse)
    key = _key(tensors, captures, sizes, program, deterministic)
    prepared = _PREPARED.get(key)
    if prepared is None:
        if len(_PREPARED) >= _MOST_PREPARED:  # lengths that never repeat
            _PREPARED.clear()
        prepared = _PREPARED[key] = prepare(*tensors, sizes, program, deterministic, captures)
    return prepared, (*tensors, lse)


def _key(
    tensors: Sequence[Tensor], captures: Sequence[Tensor], sizes: Sequence[int], program: str, deterministic: bool
) -> tuple[Any, ...]:
    q = tensors[1]
    key = (program, deterministic, *sizes, q.dtype, q.get_device(), *[x for t in tensors for x in (t.shape, t.stride())])
    return (*key, *layout_of(captures)) if captures else key


def prepare(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sizes: Sequence[int], program: str,
    deterministic: bool = False, captures: Sequence[Tensor] = (),
) -> Backward:  # fmt: skip
    """The kernels of a program with default tiles; raises ValueError for a program without a form."""
    spec = AttentionSpec.parse(program)
    form = form_of(spec)
    more: dict[str, Any] = {}
    heavy = False
    if isinstance(form, str):
        problem = problem_of(q, k, v, captures, sizes, [grad_out])
        found = program_form_of(Program.of(spec, problem).spec)
        if not isinstance(found, str):
            form = found
            source = source_of(spec, problem, [t.stride() for t in captures])
            more = {"source": source, "captures": captures, "sizes": sizes}
            heavy = source.heavy or q.shape[2] % _WHOLE != 0 or k.shape[2] % _WHOLE != 0
    if isinstance(form, str):
        raise ValueError(f"not a program of the Gluon kernel ({form}): {program}")
    low, high = form.band(q.shape[2], k.shape[2], sizes)
    config = (SOFTCAP_CONFIGS if heavy or form.softcap is not None else CONFIGS)[padded(q.shape[3])]
    return Backward(
        grad_out, q, k, v, out, config, scale=form.scale, low=low, high=high, softcap=form.softcap, layout=spec.layout,
        dead_zero=spec.dead_rows == "zero", deterministic=deterministic, **more,
    )  # fmt: skip


def _readable(t: Tensor) -> bool:
    """Whether TMA can read a tensor: rows of contiguous elements at multiples of 16 bytes, apart from each other."""
    outer = [s for n, s in zip(t.shape[:3], t.stride()[:3], strict=True) if n > 1]
    return t.stride(3) == 1 and not overlaps(t) and all(s % 8 == 0 for s in outer) and t.data_ptr() % 16 == 0


def _copy(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)
