"""How captured tensors reach the GPU kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fa_inductor.config import Options
from fa_inductor.graph_pass import AttentionPass
from fa_inductor.ops import flash_attention
from fa_inductor.selection import Choice

ROWS, KEYS, HEADS = 6, 9, 4


def captured(fn: Callable, *inputs: Any) -> list[Tensor]:
    """The captured tensors that the op gets when every site is given to the Triton templates; values must equal eager's."""
    found: list[Tensor] = []

    def backend(gm: fx.GraphModule, _: list[Any]) -> Callable:
        AttentionPass(Options(), lambda match, options: Choice("triton", "any"))(gm)
        for n in gm.graph.nodes:
            if n.target is flash_attention:
                found.extend(a.meta["example_value"] for a in n.args[3])
        gm.recompile()
        return gm.forward

    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(fn, backend=backend)(*inputs), fn(*inputs))
    return found


def qkv() -> tuple[Tensor, ...]:
    return torch.randn(2, HEADS, ROWS, 8), torch.randn(2, HEADS, KEYS, 8), torch.randn(2, HEADS, KEYS, 8)


def test_a_looked_up_bias_is_copied_so_that_keys_lie_side_by_side() -> None:
    def t5(q, k, v, table):
        distance = torch.arange(KEYS)[None, :] - torch.arange(ROWS)[:, None] + ROWS
        bias = torch.nn.functional.embedding(distance, table).permute(2, 0, 1)
        return (q @ k.mT + bias).softmax(-1) @ v

    (bias,) = captured(t5, *qkv(), torch.randn(20, HEADS))
    keys = [d for d, n in enumerate(bias.shape) if n == KEYS]
    assert [bias.stride(d) for d in keys] == [1]


def test_what_lies_well_or_is_no_table_is_not_copied() -> None:
    def fn(q, k, v, bias, row, keep):
        s = (q @ k.mT + bias + row).masked_fill(~keep, -1e9)
        return s.softmax(-1) @ v

    bias, row = torch.randn(HEADS, ROWS, KEYS), torch.randn(KEYS, HEADS).T[:, None]
    keep = torch.rand(KEYS, 2).T[:, None, None] > 0.3
    strides = {tuple(t.stride()) for t in captured(fn, *qkv(), bias, row, keep)}
    assert strides == {tuple(t.stride()) for t in (bias, row, keep)}


def test_a_table_looked_up_pair_by_pair_gets_a_dimension_for_queries_and_one_for_keys() -> None:
    """As Swin transformers write it: one flat index of all pairs."""

    def swin(q, k, v, table, index):
        bias = table[index.view(-1)].view(ROWS, KEYS, HEADS).permute(2, 0, 1).contiguous().unsqueeze(0)
        return (q @ k.mT + bias).softmax(-1) @ v

    (bias,) = captured(swin, *qkv(), torch.randn(20, HEADS), torch.randint(0, 20, (ROWS, KEYS)))
    assert tuple(bias.shape) == (HEADS, ROWS, KEYS)
    assert bias.is_contiguous()


def test_a_flat_index_with_another_stride_stays() -> None:
    def fn(q, k, v, flat):
        at = torch.arange(ROWS)[:, None] * (KEYS - 1) + torch.arange(KEYS)[None, :]
        return (q @ k.mT + flat[at]).softmax(-1) @ v

    (flat,) = captured(fn, *qkv(), torch.randn(ROWS * KEYS))
    assert flat.dim() == 1
