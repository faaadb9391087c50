"""Ops that stand for a whole in the view: what is opaque to the analysis, SDPA, and detach."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten

_lib = torch.library.Library("fa_inductor_view", "DEF")
_lib.define("opaque(Tensor[] inputs, int key) -> Tensor[]")
_lib.define(
    "sdpa(Tensor q, Tensor k, Tensor v, Tensor? attn_mask, float dropout_p, bool is_causal, float? scale, bool enable_gqa)"
    " -> Tensor"
)

opaque_outputs: dict[int, list[torch.Tensor]] = {}


def _opaque(inputs: list[torch.Tensor], key: int) -> list[torch.Tensor]:
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in opaque_outputs[key]]


def _sdpa(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa):  # type: ignore[no-untyped-def]
    lead = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2]) if not enable_gqa else q.shape[:-2]
    return q.new_empty((*lead, q.shape[-2], v.shape[-1]))


for _name, _impl in (("opaque", _opaque), ("sdpa", _sdpa)):
    _lib.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fa_inductor_view::{_name}", _impl, lib=_lib)

#: Leaves of the view that stand for something else than the ATen op of their name.
OPAQUE = torch.ops.fa_inductor_view.opaque.default
#: ``detach``, which nothing else in the view becomes. It shares memory with its input: writes through either are seen by both.
DETACH = aten.alias.default
SDPA = torch.ops.fa_inductor_view.sdpa.default


def plain(t: Any) -> Any:
    """The tensor inside a functional one, all writes done; anything else as it is."""
    if isinstance(t, FunctionalTensor):
        torch._sync(t)
        return torch._from_functional_tensor(t.elem)
    return t


class Leaves(TorchFunctionMode):
    """Keeps SDPA and detach as single nodes, also where a composite function calls them.

    ``node_of``: the node of the view that a tensor is the value of.
    """

    def __init__(self, node_of: Callable[[torch.Tensor], fx.Node | None]):
        super().__init__()
        self.node_of = node_of

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _call_sdpa(*args, **kwargs)
        data = getattr(getattr(func, "__self__", None), "__name__", "") == "data" and func.__name__ == "__get__"
        if data or func in (torch.detach, torch.Tensor.detach):
            return DETACH(args[0])
        result = func(*args, **kwargs)
        if func in _MAY_RETURN_ALIAS and self._is_alias_of(result, args[0]):
            return aten.slice.Tensor(args[0], 0)
        return result

    def _is_alias_of(self, result: Any, x: torch.Tensor) -> bool:
        """Whether ``result`` is all of ``x`` and was recorded as an ``alias`` node."""
        if not isinstance(result, (FunctionalTensor, FakeTensor)) or x.dim() == 0 or result.shape != x.shape:
            return False
        node = self.node_of(result)
        return node is not None and node.target is DETACH


#: Views that torch spells ``alias`` where nothing changes, as ``x[:, 0:]`` does; the view says ``slice`` there.
_MAY_RETURN_ALIAS = {
    torch.Tensor.__getitem__, torch.movedim, torch.moveaxis, torch.Tensor.movedim, torch.Tensor.moveaxis, torch.transpose,
    torch.Tensor.transpose, torch.swapaxes, torch.Tensor.swapaxes, torch.swapdims, torch.Tensor.swapdims,
}  # fmt: skip


def _call_sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):  # type: ignore[no-untyped-def]
    return SDPA(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@contextlib.contextmanager
def sdpa_inside() -> Iterator[None]:
    """Keeps SDPA a leaf inside a Python composite, where a function mode is off: F's own name is replaced for the time.

    Only calls on functional tensors, which exist in this analysis alone, are answered here; other threads get the original.
    """
    original = F.scaled_dot_product_attention

    def leaf(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        answer = _call_sdpa if isinstance(query, FunctionalTensor) else original
        return answer(query, *args, **kwargs)

    F.scaled_dot_product_attention = leaf  # type: ignore[assignment]
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original  # type: ignore[assignment]
