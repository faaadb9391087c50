"""Launches of the Gluon backward kernel on tensors, between the kernels that prepare its rows and finish dQ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fa_inductor.spec import AttentionSpec
from fa_inductor.templates.rendering import dense_strides
from fa_inductor.templates.sm90.form import form_of, padded
from fa_inductor.templates.sm90.launcher import DescriptorForm, Launcher, overlaps

#: Keys, and rows of dQ, that a consumer handles.
CONSUMER_KEYS = 64
#: Elements of a program of the kernels before and after.
_ROWS_BLOCK = 4096
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
        wide: whether the kernel is the one for head dims above 128, of 64 keys and not 128 a program.
    """

    rows: int
    stages: int = 2
    registers: int = 240
    section: int = 8
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

    def constants(self, deterministic: bool, heads: int = 1 << 30) -> dict[str, int]:
        """The kernel's compile-time arguments that the configuration decides, for so many (batch, key head)."""
        section = _FEW_HEADS if deterministic and heads <= _FEW_HEADS else self.section
        made = {"STAGES": self.stages, "SECTION": section, "REGISTERS": self.registers, "DETERMINISTIC": deterministic}
        return made if self.wide else {"ROWS": self.rows, **made}


#: By padded head dim. Backward TFLOP/s on an H200 (torch 2.11, triton 3.6, bf16, 16384 tokens, hidden size 2048; in brackets
#: cuDNN in that run), the sides taking turns: D64 S4k 468 (430), causal 423 (378), with 64 rows 421 and 378; D128 S2k causal
#: 419 (403), S4k 525 (531), causal 487 (460), S16k 546 (545), causal 540 (540), with 3 stages 1 to 5 % less. Sections of 4 and
#: 16 heads were within the spread of runs, of 1 head up to 11 % slower under a mask.
CONFIGS = {64: BackwardConfig(128), 128: BackwardConfig(64), 256: BackwardConfig(64, wide=True)}
#: With the slope of the softcap, 128 rows need more registers than there are.
SOFTCAP_CONFIGS = {**CONFIGS, 64: BackwardConfig(64, stages=3)}


class Backward:
    """The backward kernels prepared for operands of given shapes, strides, dtype and device; called with such operands.

    Args:
        grad_out: [B, Hq, M, Dv]; q: [B, Hq, M, Dqk]; k: [B, Hkv, N, Dqk]; v: [B, Hkv, N, Dv]; out: as grad_out, of any
            strides that are multiples of 16 bytes, the last 1; bf16 or fp16 on one Hopper GPU.
        scale, low, high, softcap, layout, dead_zero: as in :class:`fa_inductor.templates.sm90.launch.Forward`; the gradients
            are stored in the layout's order.
        deterministic: dQ is added up in a fixed order, so that equal operands give equal bits.
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
        self.numbers = (
            scale * math.log2(math.e),
            softcap or 0.0,
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
        flags = {
            "EVEN": n % config.keys == 0, "SKIP": dead_zero or not dead, "HAS_LOW": low is not None, "HAS_HIGH": high is not None,
            "SOFTCAP": softcap is not None,
        }  # fmt: skip
        kernel = flash_backward_wide if config.wide else flash_backward
        constants = {**config.constants(deterministic, b * hkv), **flags}
        self.main = Launcher(kernel, (-(-n // config.keys) * b * hkv, 1, 1), constants)
        #: Numbers that give the additions to dQ their order: see gluon_order.
        self.turns = 1 + b * hq * -(-m // config.rows) if deterministic else 0
        self.row_numbers = (hq, m, padded_len, *out.stride()[:3], *grad_out.stride()[:3])
        rows = _ROWS_BLOCK // d_pad
        widths = {"QK_DIM": d, "QK_PAD": d_pad, "V_DIM": dv, "V_PAD": v_pad, "ROWS": rows, "DEAD_ZERO": dead_zero}
        row_grid = (padded_len // rows * b * hq, 1, 1)
        self.rows = Launcher(row_statistics, row_grid, widths)
        self.sum_numbers = (scale * (softcap or 1.0), hq, m, padded_len, *dq.stride()[:3])
        self.sum = Launcher(scale_sum, row_grid, {"DIM": d, "PAD": d_pad, "ROWS": rows})

    def __call__(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) in the layout's order; ``lse`` [B, Hq, M] float32 as the forward wrote it."""
        if torch.cuda.current_device() != self.device_index:
            with torch.cuda.device(self.device_index):
                return self(grad_out, q, k, v, out, lse)
        dq, dk, dv = (torch.empty_strided(*size, dtype=self.dtype, device=self.device) for size in self.sizes)
        dq_sum = torch.empty(self.sum_size, dtype=torch.float32, device=self.device)
        log2_denom, delta = torch.empty(self.statistics, dtype=torch.float32, device=self.device).unbind()
        self.rows(self.device_index, out, grad_out, lse, log2_denom, delta, dq_sum, *self.row_numbers)
        operands = (q, k, v, grad_out, log2_denom, delta, dq_sum, dk, dv)
        descriptors = [form.of(t) for form, t in zip(self.forms, operands, strict=True)]
        turns = torch.zeros(self.turns, dtype=torch.int32, device=self.device) if self.turns else None
        self.main(self.device_index, *descriptors, *self.numbers, turns)
        self.sum(self.device_index, dq_sum, dq, *self.sum_numbers)
        return dq, dk, dv


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
    tensors = (grad_out, q, k, v, out)
    if not all(_readable(t) for t in tensors):
        grad_out, q, k, v, out = tensors = tuple(t if _readable(t) else _copy(t) for t in tensors)
    if not lse.is_contiguous() or lse.data_ptr() % 16:
        lse = _copy(lse)
    deterministic = torch.are_deterministic_algorithms_enabled()
    key = (program, deterministic, *sizes, q.dtype, q.get_device(), *[x for t in tensors for x in (t.shape, t.stride())])
    prepared = _PREPARED.get(key)
    if prepared is None:
        if len(_PREPARED) >= _MOST_PREPARED:  # lengths that never repeat
            _PREPARED.clear()
        prepared = _PREPARED[key] = prepare(*tensors, sizes, program, deterministic)
    return prepared(grad_out, q, k, v, out, lse)


def prepare(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sizes: Sequence[int], program: str,
    deterministic: bool = False,
) -> Backward:  # fmt: skip
    """The kernels of a program with default tiles; raises ValueError for a program without a form."""
    spec = AttentionSpec.parse(program)
    form = form_of(spec)
    if isinstance(form, str):
        raise ValueError(f"not a program of the Gluon kernel ({form}): {program}")
    low, high = form.band(q.shape[2], k.shape[2], sizes)
    config = (CONFIGS if form.softcap is None else SOFTCAP_CONFIGS)[padded(q.shape[3])]
    return Backward(
        grad_out, q, k, v, out, config, scale=form.scale, low=low, high=high, softcap=form.softcap, layout=spec.layout,
        dead_zero=spec.dead_rows == "zero", deterministic=deterministic,
    )  # fmt: skip


def _readable(t: Tensor) -> bool:
    """Whether TMA can read a tensor: rows of contiguous elements at multiples of 16 bytes, apart from each other."""
    outer = [s for n, s in zip(t.shape[:3], t.stride()[:3], strict=True) if n > 1]
    return t.stride(3) == 1 and not overlaps(t) and all(s % 8 == 0 for s in outer) and t.data_ptr() % 16 == 0


def _copy(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)
