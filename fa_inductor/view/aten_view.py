"""What the functional view of a Dynamo graph is made of, and what can be asked of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode


class ViewError(Exception):
    """The view could not be built; carries the Dynamo node at fault when there is one."""

    def __init__(self, message: str, node: fx.Node | None = None):
        super().__init__(message)
        self.node = node


Path = tuple[str, ...]
Holder = tuple[Path, fx.Node]


@dataclass(frozen=True)
class Origin:
    """Where an ATen node came from."""

    path: Path
    node: fx.Node
    clock: int
    grad_enabled: bool


@dataclass(frozen=True)
class DynamoValue:
    """A Dynamo node (or one leaf of its output) that holds an ATen value."""

    path: Path
    node: fx.Node
    leaf: int


@dataclass
class AtenView:
    """Result of :func:`build`."""

    graph: fx.Graph = None  # type: ignore[assignment]
    fake_mode: FakeTensorMode | None = None
    origin: dict[fx.Node, Origin] = field(default_factory=dict)
    bodies: dict[Path, fx.GraphModule] = field(default_factory=dict)
    opaque_bodies: list[tuple[Path, fx.Node]] = field(default_factory=list)
    transformed: list[tuple[Path, fx.Node]] = field(default_factory=list)
    """Softmaxes and attention calls under torch.func transforms, which the view does not enter."""
    foreign: list[tuple[Path, fx.Node]] = field(default_factory=list)
    """Softmaxes and attention calls on tensor subclasses (DTensor), whose values the view does not know."""
    rewritten: dict[tuple[fx.Node, int], fx.Node] = field(default_factory=dict)
    """What stands for a leaf of a Dynamo node since a rewrite replaced it."""
    erased: set[fx.Node] = field(default_factory=set)
    seconds: float = 0.0
    clock: int = 0
    _shared: dict[Any, Any] = field(default_factory=dict)
    _history: dict[Holder, list[tuple[int, dict[int, fx.Node | None]]]] = field(default_factory=dict)
    _holders: dict[fx.Node, list[tuple[Holder, int]]] = field(default_factory=dict)
    _live: dict[Holder, list[tuple[int, Any]]] = field(default_factory=dict)
    _storages: dict[int, set[Holder]] = field(default_factory=dict)

    def dynamo_values(self, node: fx.Node, clock: int, path: Path) -> list[DynamoValue]:
        """Dynamo values of sub-graph ``path`` that hold ``node`` just before ``clock``, earliest first."""
        out = []
        for holder, leaf in self._holders.get(node, ()):
            if holder[0] != path or holder[1].op == "output":
                continue
            past = [leaves for t, leaves in self._history[holder] if t < clock]
            if past and past[-1].get(leaf) is node:
                out.append(DynamoValue(holder[0], holder[1], leaf))
        return out

    def shared(self, key: Any, make: Callable[[], Any]) -> Any:
        """A result of the analysis that sites have in common: layers repeat, and so do their questions."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def results(self, holder: Holder) -> dict[int, fx.Node | None]:
        """ATen node per output leaf of a Dynamo node, as first produced."""
        return self._history[holder][0][1] if holder in self._history else {}

    def holders(self, node: fx.Node) -> list[tuple[Holder, int]]:
        return self._holders.get(node, [])
