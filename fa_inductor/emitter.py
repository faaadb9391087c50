"""Builds the nodes of a rewrite in the Dynamo graph, with their example values; what was built can be undone."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy.functions import FloorDiv

from fa_inductor.patterns import AttentionMatch
from fa_inductor.patterns.operands import Axes, Operand
from fa_inductor.patterns.terms import size
from fa_inductor.view import AtenView
from fa_inductor.view.aliasing import is_inplace

#: Nodes that several sites of a graph share: names of tables of :meth:`AtenView.shared`.
MASKS, DIAGONALS = "masks in the graph", "diagonals in the graph"


class RewriteError(Exception):
    """The match holds but its nodes could not be built here; the graph is left as it was."""


class Emitter:
    """Builds Dynamo nodes before ``anchor`` for values of the view; computes their example values as it goes."""

    def __init__(self, view: AtenView, match: AttentionMatch, anchor: fx.Node):
        self.view, self.match, self.anchor, self.graph = view, match, anchor, anchor.graph
        self.made: list[fx.Node] = []
        self.override: dict[fx.Node, fx.Node] = {}
        self._memo: dict[fx.Node, Any] = {}
        self.grad = view.origin[match.pv].grad_enabled
        self.device = match.pv.meta["val"].device

    # -- nodes
    def call(self, fn: Callable, *args: Any, **kwargs: Any) -> fx.Node:
        with self.graph.inserting_before(self.anchor):
            node = self.graph.call_function(fn, args, kwargs)
        self.made.append(node)
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack"):
            if key in self.anchor.meta:
                node.meta[key] = self.anchor.meta[key]
        example = lambda n: n.meta["example_value"]  # noqa: E731
        mode = self.view.fake_mode or contextlib.nullcontext()
        env = getattr(self.view.fake_mode, "shape_env", None)
        quiet = env.suppress_guards() if env is not None else contextlib.nullcontext()
        with mode, quiet, torch.set_grad_enabled(self.grad):
            node.meta["example_value"] = fn(*fx.map_arg(args, example), **fx.map_arg(kwargs, example))
        return node

    def undo(self) -> None:
        for shared in (MASKS, DIAGONALS):
            self.view.shared(shared, dict).clear()
        for n in reversed(self.made):
            self.graph.erase_node(n)
        self.made.clear()

    def discard(self, start: int) -> None:
        """Erase the nodes made since ``made`` had ``start`` of them."""
        gone = self.made[start:]
        del self.made[start:]
        self._memo = {n: x for n, x in self._memo.items() if x not in gone}
        for n in reversed(gone):
            self.graph.erase_node(n)

    # -- values
    def value(self, node: fx.Node) -> Any:
        """The Dynamo node that holds ATen value ``node`` here, computed anew where nobody holds it."""
        if node in self.override:
            return self.override[node]
        if node not in self._memo:
            self._memo[node] = self._value(node)
        return self._memo[node]

    def constant(self, node: fx.Node) -> fx.Node:
        """As :meth:`value`, without gradient: what is read anew here may be a parameter that the program read under no_grad."""
        x: fx.Node = self.value(node)
        return self.call(torch.Tensor.detach, x) if x.meta["example_value"].requires_grad else x

    def _value(self, node: fx.Node) -> Any:
        v = node.meta.get("val")
        if isinstance(v, torch.SymInt):
            return self.size(size(v))
        if isinstance(v, torch.SymFloat):
            return self._run_time_float(v)
        held = self.match.place.holder(node)
        if held is not None:
            if (held.node, held.leaf) in self.view.rewritten:
                return self.view.rewritten[held.node, held.leaf]
            if held.node in self.view.erased:
                raise RewriteError(f"{held.node.name} went with another attention")
            example = held.node.meta.get("example_value")
            if isinstance(example, torch.Tensor):
                return held.node
            if isinstance(example, (tuple, list)) and isinstance(example[held.leaf], torch.Tensor):
                return self.call(operator.getitem, held.node, held.leaf)
            raise RewriteError(f"{held.node.name} holds its tensors in a structure that is not a plain tuple")
        if node.op != "call_function":
            raise RewriteError(f"{node.name} cannot be computed here")
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self._argument)  # type: ignore[misc]
        return self.call(node.target, *args, **kwargs)  # type: ignore[arg-type]

    def _argument(self, node: fx.Node) -> Any:
        """As :meth:`value`, with run-time numbers as numbers: schemas that take one do not take a tensor."""
        v = node.meta.get("val")
        if not isinstance(v, torch.SymFloat):
            return self.value(node)
        for n in self.graph.nodes:
            if n is self.anchor:
                break
            example = n.meta.get("example_value")
            if isinstance(example, torch.SymFloat) and example.node.expr == v.node.expr:
                return n
        raise RewriteError(f"run-time float {v} is not at hand")

    def _run_time_float(self, v: torch.SymFloat) -> fx.Node:
        """The 0-d tensor that a run-time float was read from."""
        for n in self.graph.nodes:
            if n is self.anchor:
                break
            example = n.meta.get("example_value")
            if isinstance(example, torch.SymFloat) and example.node.expr == v.node.expr:
                if n.target == "item":
                    return n.args[0]
                return self.call(torch.ops.aten.scalar_tensor.default, n, dtype=torch.float64, device=self.device)
        raise RewriteError(f"run-time float {v} has no tensor in this graph")

    def size(self, e: sympy.Expr) -> Any:
        """A size as an int or as a node of the graph."""
        if e.is_Integer:
            return int(e)
        for n in self.graph.nodes:
            if n is self.anchor:
                break
            example = n.meta.get("example_value")
            if isinstance(example, torch.SymInt) and example.node.expr == e:
                return n
        for n in self.graph.nodes:
            if n is self.anchor:
                break
            example = n.meta.get("example_value")
            if isinstance(example, torch.Tensor) and type(example).__name__ == "FakeTensor" and not is_inplace(n):
                for d, s in enumerate(example.shape):
                    if isinstance(s, torch.SymInt) and s.node.expr == e:
                        return self.call(torch.ops.aten.sym_size.int, n, d)
        if e.is_Add or e.is_Mul:
            fn = operator.add if e.is_Add else operator.mul
            out = self.size(e.args[0])
            for a in e.args[1:]:
                out = self._integer(fn, out, self.size(a))
            return out
        if isinstance(e, FloorDiv):
            return self._integer(operator.floordiv, self.size(e.args[0]), self.size(e.args[1]))
        raise RewriteError(f"size {e} is not at hand")

    def _integer(self, fn: Callable, a: Any, b: Any) -> Any:
        return fn(a, b) if isinstance(a, int) and isinstance(b, int) else self.call(fn, a, b)

    # -- layout
    def extent(self, axes: Axes) -> Any:
        return self.size(self.match.extent(axes))

    def rearrange(self, x: fx.Node, have: Sequence[Axes], want: Sequence[Axes]) -> fx.Node:
        """``x``, whose dimensions merge the axes ``have``, with dimensions ``want``; axes it lacks are expanded."""
        runs = [_run_of(d, want) for d in have]
        if any(r is None for r in runs):  # a dimension that is no run of one wanted dimension comes apart
            sizes: list[Any] = []
            for d, r in zip(have, runs, strict=True):
                sizes.extend([self.extent((a,)) for a in d] if r is None else [self.extent(d)])
            have = [p for d, r in zip(have, runs, strict=True) for p in ([(a,) for a in d] if r is None else [d])]
            x = self.call(torch.reshape, x, sizes)
        atoms = [d for d in have if d]
        for i in range(len(have) - 1, -1, -1):
            if not have[i]:
                x = self.call(torch.select, x, i, 0)
        target = [a for d in want for a in d]
        order = sorted(range(len(atoms)), key=lambda i: target.index(atoms[i][0]))
        if order != list(range(len(atoms))):
            x = self.call(torch.permute, x, order)
        atoms = [atoms[i] for i in order]
        x, atoms = self._spread(x, atoms, want)
        return self._merge(x, atoms, want)

    def _spread(self, x: fx.Node, atoms: list[Axes], want: Sequence[Axes]) -> tuple[fx.Node, list[Axes]]:
        have = {a for d in atoms for a in d}
        missing = [a for d in want for a in d if a not in have]
        if not missing:
            return x, atoms
        target = [a for d in want for a in d]
        for a in missing:
            at = sum(1 for d in atoms if target.index(d[0]) < target.index(a))
            x = self.call(torch.unsqueeze, x, at)
            atoms = [*atoms[:at], (a,), *atoms[at:]]
        sizes = [self.extent(d) if d[0] in missing else -1 for d in atoms]
        return self.call(torch.Tensor.expand, x, sizes), atoms

    def _merge(self, x: fx.Node, atoms: list[Axes], want: Sequence[Axes]) -> fx.Node:
        for position, axes in enumerate(want):
            count, covered = 0, 0
            while covered < len(axes):
                covered += len(atoms[position + count])
                count += 1
            if count == 0:
                x = self.call(torch.unsqueeze, x, position)
                atoms = [*atoms[:position], (), *atoms[position:]]
            elif count > 1:
                x = self.call(torch.flatten, x, position, position + count - 1)
                atoms = [*atoms[:position], axes, *atoms[position + count :]]
        return x

    def operand(self, o: Operand, want: Sequence[Axes], dtype: torch.dtype) -> fx.Node:
        x = self.value(o.node)
        if x.meta["example_value"].dtype != o.dtype and o.dtype != dtype:
            x = self.call(torch.Tensor.to, x, o.dtype)  # the rounding that the user's cast does
        if x.meta["example_value"].dtype != dtype:
            x = self.call(torch.Tensor.to, x, dtype)
        return self.rearrange(x, o.dims, want)


def _run_of(axes: Axes, want: Sequence[Axes]) -> Axes | None:
    """``axes`` when they are consecutive in one wanted dimension."""
    if not axes:
        return axes
    for d in want:
        if axes[0] in d:
            at = d.index(axes[0])
            return axes if d[at : at + len(axes)] == axes else None
    return None
