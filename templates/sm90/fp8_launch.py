"""Launches of the Gluon FP8 forward kernel on tensors that are not FP8 yet: the cast, then the attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fa_inductor.spec import AttentionSpec
from fa_inductor.templates.quantise import SCALE_KEYS, Quantised, quantise
from fa_inductor.templates.rendering import dense_strides
from fa_inductor.templates.sm90.form import form_of, padded
from fa_inductor.templates.sm90.launch import CONSUMER_ROWS, _processors, numbers_of
from fa_inductor.templates.sm90.launcher import DescriptorForm, Launcher


@dataclass(frozen=True)
class Fp8Config:
    """Tile and launch choices, as :class:`~fa_inductor.templates.sm90.launch.GluonConfig` has them.

    Attributes:
        keys: divides SCALE_KEYS. two_levels: the output is summed outside of the tensor cores, whose sums of FP8 products have
            so few bits that they drift: with 16384 keys and values of mean 1 an H200 gave 0.81 for 1.00 without. parts: of the
            output's columns, whose products with V follow each other; more than one needs two_levels. raises: tiles of keys
            take the rows' maxima as integers, three numbers an instruction.
    """

    keys: int
    stages: int
    consumers: int = 2
    registers: int = 240
    section: int = 8
    ping_pong: bool = True
    schedule: str = "dynamic"
    two_levels: bool = True
    parts: int = 1
    raises: bool = False


#: By padded head dim of queries and keys. TFLOP/s on an H200 in one run, 4096 keys, unmasked and causal: D64 520 and 464; in turns
#: 501 and 460, with three consumers of 160 registers 512 and 347. In another run D128 808 and 789, without ``raises`` 724 and 694
#: (benchmarks/notes/fp8.md). D256 causal 858; it spills nothing in its loops.
CONFIGS = {
    64: Fp8Config(128, 2, ping_pong=False),
    128: Fp8Config(128, 2, raises=True),
    256: Fp8Config(64, 2, parts=4),
}


def constants(config: Fp8Config) -> dict[str, Any]:
    """The kernel's compile-time arguments that a configuration decides."""
    return {
        "KEYS": config.keys,
        "STAGES": config.stages,
        "CONSUMERS": config.consumers,
        "SECTION": config.section,
        "DYNAMIC": config.schedule == "dynamic",
        "REGISTERS": config.registers,
        "PING_PONG": config.ping_pong,
        "TWO_LEVELS": config.two_levels,
        "PARTS": config.parts,
        "RAISES": config.raises,
    }


class Fp8Forward:
    """The FP8 forward kernel prepared for operands of given shapes, device and output dtype; called with such operands.

    Args:
        small: the operands, cast with their keys permuted. dtype: of out. The others as for
            :class:`~fa_inductor.templates.sm90.launch.Forward`.
    """

    def __init__(
        self,
        small: Quantised,
        dtype: torch.dtype,
        config: Fp8Config,
        *,
        scale: float,
        low: int | None = None,
        high: int | None = None,
        softcap: float | None = None,
        layout: str = "bhmd",
        dead_zero: bool = False,
    ) -> None:
        from fa_inductor.templates.sm90.gluon_fp8 import fp8_forward

        b, hq, m, d = small.q.shape
        hkv, n, dv = small.k.shape[1], small.k.shape[2], small.v.shape[2]
        d_pad, v_pad = padded(d), padded(dv)
        self.device, self.device_index, self.dtype = small.q.device, small.q.get_device(), dtype
        self.out_size, self.lse_size = (b, hq, m, dv), (b, hq, m)
        self.out_stride = dense_strides(self.out_size, layout)
        out = torch.empty_strided(self.out_size, self.out_stride, dtype=dtype, device="meta")
        self.forms = [
            DescriptorForm(small.q, CONSUMER_ROWS, d_pad),
            DescriptorForm(small.k, config.keys, d_pad),
            DescriptorForm(small.v, v_pad, config.keys),
            DescriptorForm(out, CONSUMER_ROWS, v_pad),
        ]
        tiles = -(-m // (CONSUMER_ROWS * config.consumers)) * b * hq
        programs = tiles if config.schedule == "tile" else min(tiles, _processors(self.device_index))
        self.make_counter = torch.zeros if config.schedule == "dynamic" and programs < tiles else torch.empty
        self.numbers = numbers_of(scale, softcap, (m, n), (low, high), b, hq, hkv)
        flags = {
            "EVEN": n % config.keys == 0, "HAS_LOW": low is not None, "HAS_HIGH": high is not None,
            "SOFTCAP": softcap is not None, "DEAD_ZERO": dead_zero, "SCALE_KEYS": SCALE_KEYS,
        }  # fmt: skip
        self.launcher = Launcher(fp8_forward, (programs, 1, 1), {**constants(config), **flags})

    def __call__(self, small: Quantised) -> tuple[Tensor, Tensor]:
        """(out [B, Hq, M, Dv] in the layout's order, lse [B, Hq, M] float32)."""
        if torch.cuda.current_device() != self.device_index:
            with torch.cuda.device(self.device_index):
                return self(small)
        out = torch.empty_strided(self.out_size, self.out_stride, dtype=self.dtype, device=self.device)
        lse = torch.empty(self.lse_size, dtype=torch.float32, device=self.device)
        counter = self.make_counter(1, dtype=torch.int32, device=self.device)
        q_form, k_form, v_form, o_form = self.forms
        descriptors = q_form.of(small.q), k_form.of(small.k), v_form.of(small.v), o_form.of(out)
        scales = small.q_scale, small.k_scale, small.v_scale
        self.launcher(self.device_index, *descriptors, lse, *scales, counter, *self.numbers)
        return out, lse


#: Prepared kernels by program, sizes and what a tensor's metadata says of the operands.
_PREPARED: dict[tuple[Any, ...], Fp8Forward] = {}
_MOST_PREPARED = 1024


def attention(
    q: Tensor, k: Tensor, v: Tensor, sizes: Sequence[int], program: str, format: str
) -> tuple[Tensor, Tensor]:
    """(out, lse) of a program that has a :class:`~fa_inductor.templates.sm90.form.Form`, computed in FP8.

    Args:
        q: [B, Hq, M, Dqk], k: [B, Hkv, N, Dqk], v: [B, Hkv, N, Dv], bf16 or fp16 on one Hopper GPU, any strides.
        format: of templates.quantise.FORMATS.
    """
    with torch.cuda.device(q.device):
        return attend(quantise(q, k, v, format, permute=True), q.dtype, sizes, program)


def attend(small: Quantised, dtype: torch.dtype, sizes: Sequence[int], program: str) -> tuple[Tensor, Tensor]:
    """(out, lse) as :func:`attention` gives them, of operands that are cast, with permuted keys; out of ``dtype``."""
    key = (program, *sizes, small.q.dtype, small.q.shape, small.k.shape, small.v.shape, dtype, small.q.get_device())
    prepared = _PREPARED.get(key)
    if prepared is None:
        if len(_PREPARED) >= _MOST_PREPARED:  # lengths that never repeat
            _PREPARED.clear()
        prepared = _PREPARED[key] = prepare(small, dtype, sizes, program)
    return prepared(small)


def prepare(
    small: Quantised, dtype: torch.dtype, sizes: Sequence[int], program: str, config: Fp8Config | None = None
) -> Fp8Forward:
    """The kernel of a program, by default with its own tiles; raises ValueError for a program without a form."""
    spec = AttentionSpec.parse(program)
    form = form_of(spec)
    if isinstance(form, str):
        raise ValueError(f"not a program of the Gluon kernel ({form}): {program}")
    low, high = form.band(small.q.shape[2], small.k.shape[2], sizes)
    return Fp8Forward(
        small, dtype, config or CONFIGS[padded(small.q.shape[3])], scale=form.scale, low=low, high=high, softcap=form.softcap,
        layout=spec.layout, dead_zero=spec.dead_rows == "zero",
    )  # fmt: skip
