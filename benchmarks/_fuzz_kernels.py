"""Graphs that run op by op launch the Triton kernels, where the ops would run the reference: on a GPU, or in Triton's interpreter.

Small tiles, so that short sequences have several and a compile takes half a second. Lengths and strides are run-time arguments
without any assumption, so that graphs of one program, dtype and head dim run one kernel. Whatever assumes more (even lengths,
tensor descriptors, tiles of a hundred rows) is left to the examples that Inductor compiles, and to ``benchmarks.stress``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fa_inductor import ops, reference
from fa_inductor.templates import direct
from fa_inductor.templates.configs import TileConfig
from fa_inductor.templates.rendering import Problem

_TALL, _WIDE = TileConfig(32, 16, 2, 1), TileConfig(16, 32, 2, 1)
CONFIGS = direct.Configs(_TALL, _WIDE, _TALL, _TALL)


def _problem_of(*args: Any) -> Problem:
    """As under dynamic shapes: nothing is known of lengths."""
    known = _PROBLEM_OF(*args)
    captures = tuple(replace(c, sizes=(), tma=False) for c in known.captures)
    return replace(
        known, captures=captures, even_q=False, even_kv=False, rows=None, cols=None, square=False,
        sizes=(None,) * len(known.sizes), tma=False,
    )  # fmt: skip


_PROBLEM_OF = direct.problem_of


def _in_triton(kernel: str, *tensors: Tensor) -> bool:
    if not all(t.numel() for t in tensors):
        return False
    # The interpreter multiplies bfloat16 wrongly, and no kernel takes float64.
    interpreted = tensors[0].device.type == "cpu" and tensors[0].dtype in (torch.float32, torch.float16)
    return interpreted or kernel == "triton"


def forward(
    q: Tensor, k: Tensor, v: Tensor, captures: list[Tensor], sizes: list[int], program: str, kernel: str
) -> tuple[Tensor, Tensor]:
    """``fa_inductor::flash_attention``."""
    with ops._own_context():
        spec = ops.check_operands(q, k, v, captures, sizes, program, kernel)
        if not _in_triton(kernel, q, k, v):
            return reference.attention(q, k, v, captures, sizes, spec)
        return direct.forward(q, k, v, captures, sizes, spec, CONFIGS, specialize=False)


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    captures: list[Tensor],
    sizes: list[int],
    program: str,
    kernel: str,
    needs_grad: Sequence[bool],
) -> list[Tensor]:
    """``fa_inductor::flash_attention_backward``."""
    with ops._own_context():
        spec = ops.check_operands(q, k, v, captures, sizes, program, kernel)
        if not _in_triton(kernel, q, k, v):
            grads = reference.attention_grads(grad_out, q, k, v, captures, sizes, spec, needs_grad)
        else:
            grads = direct.backward(
                grad_out, q, k, v, out, lse, captures, sizes, spec, needs_grad, CONFIGS, specialize=False
            )
    return ops.returned(grads, q, spec)


@contextlib.contextmanager
def launched(device: str) -> Iterator[None]:
    """The ops run the Triton kernels on tensors of that device meanwhile; on the CPU with TRITON_INTERPRET=1."""
    dispatch = device.upper()
    library = torch.library.Library("fa_inductor", "IMPL")
    library.impl("flash_attention", forward, dispatch)
    library.impl("flash_attention_backward", backward, dispatch)
    direct.problem_of = _problem_of
    try:
        yield
    finally:
        direct.problem_of = _PROBLEM_OF
        library._destroy()
