"""A graph as Dynamo would write it, of a function without branches, in a tenth of Dynamo's time.

The function runs once on stand-ins of tensors: every call on them, operator, method or function of torch, becomes the node that
Dynamo makes of it, with the fake result as its ``example_value``. ``tests/fuzz/test_tracing.py`` compares the two.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

#: Attributes that are tensors; Dynamo spells them ``getattr(x, name)``.
_VIEWS = {"T", "mT", "H", "mH"}
_BINARY = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift",
)  # fmt: skip
_COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")
_UNARY = ("neg", "invert", "abs", "pos")


class Traced:
    """Stands for one tensor of the function that is traced."""

    __slots__ = ("node", "recorder", "value")
    __hash__ = object.__hash__

    def __init__(self, recorder: Recorder, node: fx.Node, value: Tensor) -> None:
        self.recorder, self.node, self.value = recorder, node, value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} outside of the recorder")

    def __getattr__(self, name: str) -> Any:
        if name in _VIEWS:
            return self.recorder.call("call_function", getattr, (self, name), {})
        found = getattr(self.value, name)
        if not callable(found):
            return found
        return lambda *args, **kwargs: self.recorder.call("call_method", name, (self, *args), kwargs)

    def __getitem__(self, index: Any) -> Any:
        return self.recorder.call("call_function", operator.getitem, (self, index), {})

    def __setitem__(self, index: Any, value: Any) -> None:
        self.recorder.call("call_function", operator.setitem, (self, index, value), {})

    def __bool__(self) -> bool:
        raise TypeError("a branch on values")

    def __len__(self) -> int:
        return len(self.value)


def _operator(target: Callable[..., Any], reflected: bool = False) -> Callable[..., Any]:
    def made(self: Traced, *others: Any) -> Any:
        args = (*others, self) if reflected else (self, *others)
        return self.recorder.call("call_function", target, args, {})

    return made


for _name in _BINARY:
    _plain = getattr(operator, f"__{_name}__")
    setattr(Traced, f"__{_name}__", _operator(getattr(operator, _plain.__name__)))
    setattr(Traced, f"__r{_name}__", _operator(getattr(operator, _plain.__name__), reflected=True))
    if hasattr(operator, f"__i{_name}__"):
        setattr(Traced, f"__i{_name}__", _operator(getattr(operator, f"i{_name.strip('_')}")))
for _name in (*_COMPARED, *_UNARY):
    setattr(Traced, f"__{_name}__", _operator(getattr(operator, f"__{_name}__")))


@functools.cache
def _defaults(target: Any) -> tuple[tuple[str, Any], ...]:
    """Defaults of a function of torch.nn.functional that is written in Python."""
    if getattr(target, "__module__", "") != F.__name__:
        return ()
    return tuple((n, p.default) for n, p in inspect.signature(target).parameters.items() if p.default is not p.empty)


class Recorder(TorchFunctionMode):
    """Writes the graph; active while the function runs."""

    def __init__(self) -> None:
        super().__init__()
        self.graph, self.mode = fx.Graph(), _mode()
        self.names = 0

    def input(self, x: Tensor) -> Traced:
        fake = self.mode.from_tensor(x, static_shapes=True)
        self.names += 1
        return self._value(self.graph.placeholder(f"arg{self.names}"), fake)

    def _value(self, node: fx.Node, value: Tensor) -> Traced:
        node.meta["example_value"] = value
        return Traced(self, node, value)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # This mode is off meanwhile; one below it may say on which device tensors are made.
        return self.call("call_function", func, args, kwargs or {}, active=False)

    def call(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], active: bool = True) -> Any:
        """The result of a call, recorded where it is a tensor or tensors. ``active``: whether the mode is."""
        leaf = lambda x: isinstance(x, Traced)  # noqa: E731
        values, named = pytree.tree_map(lambda x: x.value if leaf(x) else x, (args, kwargs), is_leaf=leaf)
        with torch._C.DisableTorchFunction() if active else contextlib.nullcontext(), self.mode:
            result = getattr(values[0], target)(*values[1:], **named) if op == "call_method" else target(*values, **named)
        many = isinstance(result, (tuple, list)) and any(isinstance(x, Tensor) for x in result)
        if not isinstance(result, Tensor) and not many and target is not operator.setitem:
            return result
        # Functions of Python hand all their arguments on where a stand-in comes in, defaults included.
        kwargs = {k: x for k, x in kwargs.items() if leaf(x) or (k, x) not in _defaults(target)}
        nodes, named = pytree.tree_map(lambda x: x.node if leaf(x) else x, (args, kwargs), is_leaf=leaf)
        node = self.graph.create_node(op, target, nodes, named)
        if not many:
            return self._value(node, result) if isinstance(result, Tensor) else None
        node.meta["example_value"] = result
        parts = [self._value(self.graph.call_function(operator.getitem, (node, i)), x) for i, x in enumerate(result)]
        return type(result)(parts)


#: The mode of the last graphs, and how many there were.
_shared: list[Any] = [None, 0]


def _mode() -> FakeTensorMode:
    """One for many graphs: none of them has a size that is a symbol. What it remembers of them is not kept for ever."""
    if _shared[1] % 1000 == 0:
        FakeTensorMode.cache_clear()
        _shared[0] = FakeTensorMode(shape_env=ShapeEnv())
    _shared[1] += 1
    return _shared[0]


def trace(function: Callable[..., Any], inputs: Sequence[Tensor]) -> fx.GraphModule:
    """The graph of ``function(*inputs)``, whose outputs are tensors: a call gives a tuple of them."""
    recorder = Recorder()
    given = [recorder.input(x) for x in inputs]
    with recorder:
        result = function(*given)
    results = result if isinstance(result, (tuple, list)) else (result,)
    recorder.graph.output(tuple(x.node for x in results))
    for node in reversed(recorder.graph.nodes):
        if node.target is operator.getitem and not node.users and isinstance(node.args[0].meta["example_value"], (tuple, list)):
            recorder.graph.erase_node(node)
    return fx.GraphModule(torch.nn.Module(), recorder.graph)
