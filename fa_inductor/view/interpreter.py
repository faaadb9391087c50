"""Interprets a Dynamo graph and its sub-graphs on functional fake tensors, and keeps the books of provenance."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _pytree as pytree

from fa_inductor.view import aliasing, slicing
from fa_inductor.view.aliasing import is_inplace
from fa_inductor.view.aten_view import Origin, Path, ViewError
from fa_inductor.view.books import Books
from fa_inductor.view.leaves import DETACH, OPAQUE, sdpa_inside

_SKIPPED = object()
#: Stands for a tensor subclass, as DTensor is: the view does not know what ops on it do. A plain tensor made from it is opaque.
FOREIGN = object()


class Interpreter(fx.Interpreter):
    """Runs a Dynamo graph on functional fake tensors and keeps the books of provenance."""

    def __init__(self, gm: fx.GraphModule, books: Books, path: Path):
        super().__init__(gm, garbage_collect_values=False)
        self.books, self.path = books, path
        self.need = books.need_of(gm)
        books.view.bodies[path] = gm
        books.view.transformed += [(path, n) for n in slicing.transformed(gm.graph) if slicing.is_anchor(n)]

    def run_node(self, n: fx.Node) -> Any:
        if n.op.startswith("call") and n not in self.need:
            return _SKIPPED
        for a in n.all_input_nodes:
            if self.env.get(a) is _SKIPPED and (n.op != "output" or self.path):
                self.env[a] = self._interpret(a, lambda x: self.opaque(x, ()))
        entered = n.op == "output" or isinstance(n.target, torch._ops.HigherOrderOperator)
        if not entered and any(self.env[a] is FOREIGN for a in n.all_input_nodes):
            if slicing.is_anchor(n):
                self.books.view.foreign.append((self.path, n))
            return self._interpret(n, lambda x: self.opaque(x, ()))
        return self._interpret(n, self._dispatch)

    def _interpret(self, n: fx.Node, how: Callable[[fx.Node], Any]) -> Any:
        b, view = self.books, self.books.view
        mark = b.aten_graph._root._prev
        view.clock += 1
        try:
            result = how(n)
        except ViewError:
            raise
        except Exception as e:
            raise ViewError(f"{type(e).__name__}: {str(e).splitlines()[0][:200] if str(e) else ''}", n) from e
        origin = Origin(self.path, n, view.clock, b.grad_enabled)
        x = mark._next
        while x is not b.aten_graph._root:
            view.origin.setdefault(x, origin)
            x = x._next
        b.record((self.path, n), result)
        if is_inplace(n):
            b.reread(n, [r for a in n.all_input_nodes for r in pytree.tree_leaves(self.env.get(a))])
        return result

    def _dispatch(self, n: fx.Node) -> Any:
        b = self.books
        if n.op == "output":
            return self._output(n)
        if n.op == "get_attr":
            return b.attribute(self.fetch_attr(n.target))  # type: ignore[arg-type]
        if n.op == "call_function":
            target = n.target
            if isinstance(target, torch._ops.HigherOrderOperator):
                return self._higher_order(n)
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            if target is torch._C._set_grad_enabled:
                b.grad_enabled = args[0]
                return None
            if target is torch.amp.autocast_mode._enter_autocast:
                token = target(*args, **kwargs)
                b.autocast.append(token)
                return token
            if target is torch.amp.autocast_mode._exit_autocast:
                b.autocast.remove(args[0])
                return target(*args)
            if slicing.is_heavy(n) and "example_value" in n.meta:
                for a in aliasing.side_writes(n):
                    self.env[a].copy_(self.opaque(a, (args, kwargs)))
                return self.opaque(n, (args, kwargs))
            if getattr(target, "__name__", "") == "_get_data_attr":  # ``x.data``, as Dynamo spells it
                return DETACH(args[0])
            if target is F.multi_head_attention_forward:
                with sdpa_inside():
                    return target(*args, **kwargs)
        return super().run_node(n) if n.op != "call_module" else self._module(n)

    def _output(self, n: fx.Node) -> Any:
        """At the top: whatever interpreted values the rest of the graph uses, so that their users are not forgotten."""
        live = slicing.live_nodes(self.module.graph, is_inplace)  # type: ignore[arg-type]
        for a in self.module.graph.nodes:  # type: ignore[union-attr]
            users = [u for u in a.users if u in live and u not in self.need]
            known = a in self.need or (bool(self.path) and a.op == "placeholder")
            if a not in live or not known or not users or self.env[a] is FOREIGN:
                continue
            if isinstance(self.env[a], (tuple, list)) and all(u.target is operator.getitem for u in users):
                self.books.kept.extend(self.env[a][u.args[1]] for u in users)
            else:
                self.books.kept.append(self.env[a])
        return super().run_node(n) if self.path else self.books.kept

    def _module(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        return self.opaque(n, (args, kwargs))

    def _higher_order(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        name = n.target.name()  # type: ignore[union-attr]
        b = self.books
        if name in ("tag_activation_checkpoint", "wrap", "wrap_activation_checkpoint"):
            return self._body(n, args[0], args[1:])
        if name == "invoke_subgraph":
            return self._body(n, args[0], args[2:])
        if name == "wrap_with_set_grad_enabled":
            before, b.grad_enabled = b.grad_enabled, args[0]
            try:
                return self._body(n, args[1], args[2:])
            finally:
                b.grad_enabled = before
        if name == "wrap_with_autocast":
            device, dtype, enabled, cache, body, *rest = args
            with torch.autocast(device, dtype, enabled, cache):
                return self._body(n, body, rest)
        self.books.view.opaque_bodies.append((self.path, n))
        return self.opaque(n, (args, kwargs))

    def _body(self, n: fx.Node, gm: Any, args: Any) -> Any:
        if not isinstance(gm, fx.GraphModule):
            return self.opaque(n, args)
        return Interpreter(gm, self.books, (*self.path, n.name)).run(*args)

    def opaque(self, n: fx.Node, inputs: Any) -> Any:
        """One node that stands for all outputs of ``n``; shapes come from Dynamo's own example values."""
        if aliasing.is_foreign(n.meta.get("example_value")):
            return FOREIGN
        leaves, spec = pytree.tree_flatten(n.meta.get("example_value"))
        tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
        key = self.books.new_key(tensors)
        made = OPAQUE([t for t in pytree.tree_leaves(inputs) if isinstance(t, torch.Tensor)], key)
        if self.books.functional:
            # Without a functional input the mode does not wrap the result, and in-place writes into it would go unseen.
            made = [t if isinstance(t, FunctionalTensor) else FunctionalTensor.to_functional(t) for t in made]
        out = iter(made)
        return pytree.tree_unflatten([next(out) if isinstance(t, torch.Tensor) else t for t in leaves], spec)
