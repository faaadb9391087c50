"""A graph as Dynamo would write it, of a function without branches, in a tenth of Dynamo's time.

The function runs once, on the tensors themselves, behind stand-ins: every call on them, operator, method or function of torch,
becomes the node that Dynamo makes of it, with a fake of the result as its ``example_value``. Running small tensors and copying
what is known of the results takes a tenth of the time of running fakes. ``tests/fuzz/test_tracing.py`` compares with Dynamo.
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
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode

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


def _each(x: Any, part: str) -> Any:
    """``x`` with that part of each stand-in in its place."""
    if isinstance(x, Traced):
        return getattr(x, part)
    if type(x) in (tuple, list):
        return type(x)(_each(y, part) for y in x)
    return {k: _each(y, part) for k, y in x.items()} if type(x) is dict else x


class Recorder(TorchFunctionMode):
    """Writes the graph; active while the function runs."""

    def __init__(self) -> None:
        super().__init__()
        self.graph, self.mode = fx.Graph(), _mode()
        self.names = 0
        self._fakes: dict[int, tuple[Tensor, FakeTensor]] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}

    def input(self, x: Tensor) -> Traced:
        self.names += 1
        return self._value(self.graph.placeholder(f"arg{self.names}"), x)

    def _value(self, node: fx.Node, value: Tensor) -> Traced:
        with torch._C.DisableTorchFunction():
            node.meta["example_value"] = self._fake(value)
        return Traced(self, node, value)

    def _fake(self, x: Tensor) -> FakeTensor:
        """A fake as ``x`` is: what shares memory, and what is one tensor, is so among the fakes too."""
        if id(x) in self._fakes:
            fake = self._fakes[id(x)][1]
            if fake.requires_grad != x.requires_grad:  # written in place
                fake.requires_grad_(x.requires_grad)
            return fake
        storage = x.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta").untyped_storage()
        meta = torch.empty(0, dtype=x.dtype, device="meta")
        meta.set_(self._storages[storage._cdata], x.storage_offset(), x.shape, x.stride())
        fake = FakeTensor(self.mode, meta.requires_grad_(x.requires_grad), x.device)
        self._fakes[id(x)] = x, fake  # x is kept, and so are its id and its storage
        return fake

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # This mode is off meanwhile; one below it may say on which device tensors are made.
        return self.call("call_function", func, args, kwargs or {}, active=False)

    def call(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], active: bool = True) -> Any:
        """The result of a call, recorded where it is a tensor or tensors. ``active``: whether the mode is."""
        values, named = _each(args, "value"), _each(kwargs, "value")
        with torch._C.DisableTorchFunction() if active else contextlib.nullcontext():
            result = getattr(values[0], target)(*values[1:], **named) if op == "call_method" else target(*values, **named)
        many = isinstance(result, (tuple, list)) and any(isinstance(x, Tensor) for x in result)
        if not isinstance(result, Tensor) and not many and target is not operator.setitem:
            return result
        # Functions of Python hand all their arguments on where a stand-in comes in, defaults included.
        kwargs = {k: x for k, x in kwargs.items() if isinstance(x, Traced) or (k, x) not in _defaults(target)}
        node = self.graph.create_node(op, target, _each(args, "node"), _each(kwargs, "node"))
        if not many:
            return self._value(node, result) if isinstance(result, Tensor) else None
        parts = [self._value(self.graph.call_function(operator.getitem, (node, i)), x) for i, x in enumerate(result)]
        node.meta["example_value"] = type(result)(x.node.meta["example_value"] for x in parts)
        return type(result)(parts)


#: The mode of the last graphs, and how many there were.
_shared: list[Any] = [None, 0]


def _mode() -> FakeTensorMode:
    """One for many graphs: none of them has a size that is a symbol. What it remembers of them is not kept for ever."""
    if _shared[1] % 1000 == 0:
        FakeTensorMode.cache_clear()
        _shared[0] = FakeTensorMode(shape_env=ShapeEnv())
        _shared[0].cache_enabled = False  # few calls come twice, and remembering them costs as much as they do
    _shared[1] += 1
    return _shared[0]


def trace(function: Callable[..., Any], inputs: Sequence[Tensor]) -> fx.GraphModule:
    """The graph of ``function(*inputs)``, whose outputs are tensors: a call gives a tuple of them.

    The function runs, and writes into the inputs where it writes in place.
    """
    recorder = Recorder()
    given = [recorder.input(x) for x in inputs]
    with recorder:
        result = function(*given)
    results = result if isinstance(result, (tuple, list)) else (result,)
    recorder.graph.output(tuple(x.node for x in results))
    for node in reversed(recorder.graph.nodes):
        if node.target is operator.getitem and not node.users and isinstance(node.args[0].meta["example_value"], (tuple, list)):
            recorder.graph.erase_node(node)
    with _use_lazy_graph_module(True):  # its code is made when it runs, after the rewrite
        return _make_graph_module(torch.nn.Module(), recorder.graph)
