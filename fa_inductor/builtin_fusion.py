"""Keeps Inductor's own attention patterns off the graphs that we compiled.

Those patterns do not check everything they assume (a softmax over another axis passes, for instance), so what we refused with
a reason could be rewritten wrongly behind our back. Their entries stay registered and keep working for everybody else: each
gets a check that looks for our mark on the graph.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

from torch import fx

_MARK = "_fa_inductor_compiled"
_GUARDED = "_fa_inductor_guarded"
_lock = threading.Lock()


def _is_attention_pattern(entry: Any) -> bool:
    name = getattr(entry, "pattern_name", None)
    if name is None:  # torch before 2.13 keeps the pattern's function in the check's closure only
        check: Any = getattr(entry, "extra_check", None)
        try:
            search = inspect.getclosurevars(check).nonlocals.get("search_fn")
        except TypeError:
            return False
        name = getattr(search, "__name__", "")
    return "sfdp" in (name or "")


def _guarded(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def guarded(match: Any) -> bool:
        return not any(hasattr(n.graph, _MARK) for n in match.nodes[:1]) and check(match)

    setattr(guarded, _GUARDED, True)
    return guarded


def keep_off(graph: fx.Graph) -> None:
    """Mark ``graph`` so that the built-in attention patterns leave it alone. Call before the joint-graph patterns run."""
    from torch._inductor.fx_passes import joint_graph

    setattr(graph, _MARK, True)
    with _lock:
        for group in joint_graph.pass_patterns:
            for entries in group.patterns.values():
                for entry in entries:
                    if not hasattr(entry.extra_check, _GUARDED) and _is_attention_pattern(entry):
                        entry.extra_check = _guarded(entry.extra_check)
