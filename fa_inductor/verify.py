"""``options={"verify": True}``: the first call of a compiled graph is compared with the unfused graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fa_inductor.errors import VerificationError
from fa_inductor.graph_pass import PassResult

log = logging.getLogger("fa_inductor")

# Rounding of the fused and the unfused path each, in units of the dtype's epsilon, over a model's depth. The unfused path in
# low precision is itself off by about sqrt(layers) roundings of the largest value.
_ROUNDINGS = 256


def tolerance(t: torch.Tensor) -> float:
    """Largest absolute difference that rounding explains for values as large as those of ``t``."""
    finite = t[torch.isfinite(t)]
    largest = finite.abs().max().item() if finite.numel() else 0.0
    return _ROUNDINGS * torch.finfo(t.dtype).eps * max(largest, 1e-6)


def checked(original: fx.GraphModule, compiled: Callable, result: PassResult) -> Callable:
    """``compiled``, whose first call also runs ``original`` and raises :class:`VerificationError` where they differ.

    Sites with dropout draw other random numbers than the unfused graph, so a graph with one is not compared.
    """
    sites = [s for s in result.sites if s.status == "fused"]
    pending = not any("dropout" in s.form for s in sites)
    if not pending:
        log.warning("verify: the graph has active dropout, fused and unfused path cannot be compared")

    def run(*args: Any) -> Any:
        nonlocal pending
        if not pending:
            return compiled(*args)
        pending = False
        with torch.no_grad():
            copies = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args]
            expected = original(*copies)
        got = compiled(*args)
        _compare(expected, got, sites)
        return got

    return run


def _compare(expected: Any, got: Any, sites: Sequence[object]) -> None:
    pairs = zip(pytree.tree_leaves(expected), pytree.tree_leaves(got), strict=True)
    for e, g in pairs:
        if not (isinstance(e, torch.Tensor) and isinstance(g, torch.Tensor) and e.is_floating_point()):
            continue
        g = g.detach()
        limit = tolerance(e)
        same = (e == g) | (torch.isnan(e) & torch.isnan(g))
        error = torch.where(same, 0.0, (e.double() - g.double()).abs())
        worst = float("inf") if bool(torch.isnan(error).any()) else error.max().item() if error.numel() else 0.0
        if worst > limit:
            raise VerificationError(sites[0] if len(sites) == 1 else [str(s) for s in sites], worst, limit)
