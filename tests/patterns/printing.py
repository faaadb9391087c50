"""A short, stable text of a rewritten Dynamo graph: what is left that the results depend on, one op a line."""

from __future__ import annotations

import operator
import re
from typing import Any

import torch
from torch import fx

from fa_inductor.view.aliasing import is_inplace
from fa_inductor.view.slicing import live_nodes, name_of

_DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.int64: "i64",
    torch.int32: "i32", torch.bool: "bool",
}  # fmt: skip


class _Printer:
    def __init__(self) -> None:
        self.names: dict[fx.Node, str] = {}
        self.taken: dict[str, int] = {}
        self.symbols: dict[str, str] = {}
        self.lines: list[str] = []

    def name(self, n: fx.Node, wish: str) -> str:
        count = self.taken[wish] = self.taken.get(wish, -1) + 1
        self.names[n] = wish if count == 0 else f"{wish}_{count}"
        return self.names[n]

    def size(self, d: Any) -> str:
        """Run-time sizes are called s0, s1, ... in order of appearance: torch's own numbers come from hashes."""
        if not isinstance(d, torch.SymInt):
            return str(d)
        def alias(match: re.Match[str]) -> str:
            return self.symbols.setdefault(match.group(), f"s{len(self.symbols)}")

        return re.sub(r"\b[su]\d+\b", alias, str(d.node.expr))

    def type_of(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{_DTYPES.get(value.dtype, str(value.dtype))}[{', '.join(map(self.size, value.shape))}]"
        if isinstance(value, (tuple, list)):
            return f"({', '.join(map(self.type_of, value))})"
        return self.size(value) if isinstance(value, torch.SymInt) else type(value).__name__

    def argument(self, a: Any) -> str:
        if isinstance(a, fx.Node):
            return self.names[a]
        if isinstance(a, (tuple, list)):
            inner = ", ".join(map(self.argument, a))
            return f"[{inner}]" if isinstance(a, list) else f"({inner})"
        if isinstance(a, slice):
            return ":".join("" if x is None else self.argument(x) for x in (a.start, a.stop))
        return str(a).removeprefix("torch.")

    def line(self, indent: str, text: str) -> None:
        self.lines.append(indent + text)

    def graph(self, gm: fx.GraphModule, indent: str) -> None:
        live = live_nodes(gm.graph, is_inplace)
        bodies: dict[fx.Node, fx.GraphModule] = {}
        inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
        for n in sorted(inputs, key=_input):  # by name: the order depends on the version of torch
            value = n.meta.get("example_value")
            if isinstance(value, torch.Tensor) and n in live:
                self.line(indent, f"{self.name(n, _input(n))}: {self.type_of(value)}")
            else:
                self.name(n, self.size(value) if isinstance(value, torch.SymInt) else _input(n))
        for n in gm.graph.nodes:
            value = n.meta.get("example_value")
            if n.op == "placeholder":
                continue
            if n.op == "get_attr":
                body = getattr(gm, str(n.target), None)
                self.name(n, "body" if isinstance(body, fx.GraphModule) else "constant")
                if isinstance(body, fx.GraphModule):
                    bodies[n] = body
            elif n.op == "output":
                results = n.args[0]
                self.line(indent, f"return {', '.join(map(self.argument, results))}")  # type: ignore[arg-type]
            elif n in live:
                self.call(n, value, indent, bodies)

    def call(self, n: fx.Node, value: Any, indent: str, bodies: dict[fx.Node, fx.GraphModule]) -> None:
        if "flash_attention" in str(n.target):
            q, k, v, captures, sizes, program, _ = n.args
            more = f", captures={self.argument(captures)}" if captures else ""
            more += f", sizes={self.argument(sizes)}" if sizes else ""
            operands = ", ".join(map(self.argument, (q, k, v)))
            self.line(indent, f"{self.name(n, 'attention')} = flash_attention({operands}{more})")
            self.line(indent, f"    {program}")
            return
        if "cached_attention" in str(n.target):
            *operands, captures, sizes, keys, program, cache, _ = n.args
            lists = [f"{m}={self.argument(a)}" for m, a in (("captures", captures), ("sizes", sizes)) if a]
            given = ", ".join([*map(self.argument, operands[:3]), *lists, f"keys={self.argument(keys)}"])
            beside = zip(("table", "k_scale", "v_scale"), operands[3:], strict=True)
            cache += "".join(f", {m}={self.argument(a)}" for m, a in beside if a is not None)
            self.line(indent, f"{self.name(n, 'attention')} = cached_attention({given})")
            self.line(indent, f"    {program}")
            self.line(indent, f"    {cache}")
            return
        if n.target is operator.getitem and isinstance(n.args[0], fx.Node) and isinstance(n.args[1], int):
            self.line(indent, f"{self.name(n, 'item')} = {self.names[n.args[0]]}[{n.args[1]}]: {self.type_of(value)}")
            return
        for a in n.all_input_nodes:
            if a in bodies:
                self.line(indent, f"{self.names[a]}:")
                self.graph(bodies[a], indent + "    ")
        arguments = [self.argument(a) for a in n.args]
        if isinstance(n.target, torch._ops.HigherOrderOperator):
            arguments = [arguments[0], *sorted(arguments[1:])]
        else:
            arguments += [f"{k}={self.argument(a)}" for k, a in n.kwargs.items()]
        short = str(n.target) if isinstance(n.target, torch._ops.HigherOrderOperator) else name_of(n)
        self.line(indent, f"{self.name(n, short)} = {short}({', '.join(arguments)}): {self.type_of(value)}")


def _input(n: fx.Node) -> str:
    """``q`` for ``l_q_``; the last part of a parameter's path."""
    name = n.name.strip("_").removeprefix("l_")
    return name.split("modules_")[-1].replace("parameters_", "").strip("_").replace("__", "_") or n.name


def graph_text(gm: fx.GraphModule) -> str:
    """The live part of a Dynamo graph: inputs with types, ops with the program they carry, sub-graph bodies indented."""
    printer = _Printer()
    printer.graph(gm, "")
    return "\n".join(printer.lines) + "\n"
