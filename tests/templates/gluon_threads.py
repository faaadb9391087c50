"""Gluon kernels run in Python, on the CPU: tensors are torch tensors, warp groups are threads, barriers block them.

What a kernel computes and how its roles wait for each other is run as written; layouts mean nothing here, products are done
at once, and one program runs after the other. triton's own interpreter has no Gluon.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

#: Seconds after which a thread that waits counts as stuck.
STUCK = 60.0


class Number(Tensor):
    """An integer, and what is computed from it: ``x += y`` binds x to another value, as in a kernel."""

    def __iadd__(self, other: Any) -> Any:
        return self + other

    def __ior__(self, other: Any) -> Any:
        return self | other

    @staticmethod
    def of(x: int) -> Number:
        return torch.tensor(x).as_subclass(Number)  # type: ignore[return-value]


class Pointer:
    """A place in a flat tensor, or places."""

    def __init__(self, flat: Tensor, offset: Any = 0) -> None:
        self.flat, self.offset = flat, offset

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.flat, self.offset + more)


class Shared:
    """A tensor in shared memory."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    def index(self, i: Any) -> Shared:
        return Shared(self.data[int(i)])

    def reshape(self, shape: Sequence[int]) -> Shared:
        return Shared(self.data.view(*shape))

    def permute(self, dims: Sequence[int]) -> Shared:
        return Shared(self.data.permute(*dims))

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.data.narrow(dim, start, length))

    def _reinterpret(self, dtype: torch.dtype, shape: Sequence[int], _layout: Any) -> Shared:
        return Shared(self.data.view(-1).view(dtype).view(*shape))

    def load(self, _layout: Any = None) -> Tensor:
        return self.data.clone()

    def store(self, value: Tensor) -> None:
        self.data.copy_(value)


class Barrier:
    """An mbarrier: a phase ends when all arrivals and all announced bytes are there."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count, self.pending, self.bytes, self.phase = 1, 1, 0, 0

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def update(self, arrivals: int, more: int) -> None:
        with self.changed:
            self.pending -= arrivals
            self.bytes += more
            assert self.pending >= 0, "more arrivals than a phase has"
            if self.pending == 0 and self.bytes == 0:
                self.phase ^= 1
                self.pending = self.count
                self.changed.notify_all()

    def wait(self, phase: Any) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.phase != int(phase), STUCK), "a thread waits for ever"


class Barriers:
    def __init__(self, n: int) -> None:
        self.all = [Barrier() for _ in range(n)]

    def index(self, i: Any) -> Barrier:
        return self.all[int(i)]


class Descriptor:
    """A TMA descriptor: tiles of ``block`` of a tensor, zero outside of it."""

    def __init__(self, tensor: Tensor, block: Sequence[int]) -> None:
        self.tensor, self.dtype, self.layout = tensor, tensor.dtype, None
        size = torch.empty(tuple(block)).numel() * tensor.element_size()
        self.block_type = types.SimpleNamespace(shape=list(block), nbytes=size)

    def _overlap(self, at: Sequence[Any]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        ends = zip(map(int, at), self.tensor.shape, self.block_type.shape, strict=True)
        sizes = [(i, max(0, min(n - i, b))) for i, n, b in ends]
        return tuple(slice(i, i + n) for i, n in sizes), tuple(slice(0, n) for _, n in sizes)

    def load(self, at: Sequence[Any], barrier: Barrier, tile: Shared) -> None:
        there, here = self._overlap(at)
        tile.data.zero_()
        tile.data[here] = self.tensor[there]
        barrier.update(0, -self.block_type.nbytes)

    def store(self, at: Sequence[Any], tile: Shared) -> None:
        there, here = self._overlap(at)
        self.tensor[there] = tile.data[here]

    def add(self, at: Sequence[Any], tile: Shared) -> None:
        there, here = self._overlap(at)
        with _ADDS:
            self.tensor[there] += tile.data[here]


#: An addition to memory is whole.
_ADDS = threading.Lock()


def _scalar(f: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda x, y, propagate_nan=None: f(torch.as_tensor(x), torch.as_tensor(y))


def _product(a: Any, b: Shared, acc: Tensor, use_acc: bool = True, is_async: bool = False, **_: Any) -> Tensor:
    made = (a.data if isinstance(a, Shared) else a).float() @ b.data.float()
    return acc + made if use_acc else made.to(acc.dtype)


def _wait(_outstanding: int = 0, deps: Sequence[Any] = ()) -> Any:
    return deps[0] if len(deps) == 1 else tuple(deps)


def _load(place: Pointer, mask: Any = None, other: Any = 0) -> Tensor:
    if mask is None:
        return place.flat[place.offset]
    index, mask = torch.broadcast_tensors(torch.as_tensor(place.offset), torch.as_tensor(mask))
    return torch.where(mask, place.flat[torch.where(mask, index, 0)], other)


def _store(place: Pointer, value: Tensor, mask: Tensor) -> None:
    place.flat[place.offset[mask]] = value[mask]


def _wait_for_turn(turn: Pointer, number: Any) -> None:
    # One program runs after the other: what it waits for is there.
    assert turn.flat[turn.offset] >= number, "a program waits for one that starts after it"


def _pass_turn(turn: Pointer, number: Any) -> None:
    turn.flat[turn.offset] = number


def _take(turns: list[threading.Semaphore]) -> Callable[[int], None]:
    def take(w: int) -> None:
        assert turns[w].acquire(timeout=STUCK), "a thread waits for ever"

    return take


class Bits:
    """Bytes that become numbers as they are."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    def to(self, dtype: torch.dtype, bitcast: bool) -> Tensor:
        assert bitcast
        return self.data.contiguous().view(dtype)


def _assembly(text: str, _constraints: str, arguments: Sequence[Tensor], **_: Any) -> Tensor:
    """What the assembly in the kernels computes: a copy, one of the functions, or four numbers cast to the bytes of a word, the
    first lowest."""
    for name, function in (("ex2", torch.exp2), ("lg2", torch.log2), ("rcp", torch.reciprocal)):
        if f"{name}.approx.ftz.f32 $0" in text:
            return function(torch.as_tensor(arguments[0]))
    if "cvt.rn.satfinite.e4m3x2.f32" not in text:
        assert text == "mov.b32 $0, $1;", text
        return arguments[0]
    assert "low, $2, $1" in text
    assert "high, $4, $3" in text
    assert "{low, high}" in text
    cast = [a.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8).to(torch.int32) for a in arguments]
    return sum((byte << (8 * i) for i, byte in enumerate(cast[1:], 1)), start=cast[0])


class Program:
    """One program of a launch: the language as its kernel sees it."""

    def __init__(self, index: int, programs: int) -> None:
        self.index, self.programs = index, programs
        self.lock = threading.Lock()

    def language(self) -> types.SimpleNamespace:
        nothing = lambda *_a, **_k: None  # noqa: E731
        return types.SimpleNamespace(
            constexpr=None, int8=torch.int8, int32=torch.int32, int64=torch.int64, float32=torch.float32,
            float8e4nv=torch.float8_e4m3fn,
            minimum=_scalar(torch.minimum), maximum=_scalar(torch.maximum), where=torch.where, exp2=torch.exp2, log2=torch.log2,
            max=lambda x, dim: x.amax(dim), min=lambda x: x.amin(), sum=lambda x, dim: x.sum(dim), static_range=range,
            full=lambda shape, value, dtype, _=None: torch.full(tuple(shape), value, dtype=dtype),
            zeros=lambda shape, dtype, _=None: torch.zeros(tuple(shape), dtype=dtype),
            arange=lambda start, end, layout=None: torch.arange(start, end),
            convert_layout=lambda x, _layout, assert_trivial=False: Bits(x) if x.dtype == torch.int8 else x,
            inline_asm_elementwise=_assembly,
            split=lambda x: (x[..., 0], x[..., 1]), join=lambda x, y: torch.stack([x, y], -1),
            cast=lambda x, dtype: torch.as_tensor(x).to(dtype), abs=lambda x: torch.as_tensor(x).abs(),
            load=_load, store=_store, atomic_add=self._atomic_add,
            program_id=lambda _: torch.tensor(self.index), num_programs=lambda _: self.programs,
            allocate_shared_memory=self._allocate, warp_specialize=self._specialise,
            SliceLayout=nothing, BlockedLayout=nothing, DotOperandLayout=nothing, SwizzledSharedLayout=nothing,
            NVMMASharedLayout=nothing,
        )  # fmt: skip

    def _atomic_add(self, place: Pointer, by: int, **_: Any) -> Tensor:
        with self.lock:
            before = place.flat[place.offset].clone()
            place.flat[place.offset] += by
        return before

    @staticmethod
    def _allocate(dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Any:
        if layout == "barrier":
            return Barriers(shape[0]) if len(shape) == 2 else Barrier()
        return Shared(torch.zeros(tuple(shape), dtype=dtype))

    @staticmethod
    def _specialise(roles: Sequence[tuple[Callable[..., None], tuple]], *_: Any) -> None:
        failures: list[BaseException] = []

        def run(role: Callable[..., None], arguments: tuple) -> None:
            try:
                role(*arguments)
            except BaseException as e:
                failures.append(e)

        threads = [threading.Thread(target=run, args=role, daemon=True) for role in roles]
        for t in threads:
            t.start()
        for t in threads:
            t.join(2 * STUCK)
        if failures:
            raise failures[0]


def launch(kernel: Any, programs: int, arguments: Sequence[Any], constants: dict[str, Any]) -> None:
    """Run ``kernel``, a jitted Gluon function, with tensors as :class:`Pointer` and :class:`Descriptor`."""
    for index in range(programs):
        language = Program(index, programs).language()
        mbarrier = types.SimpleNamespace(
            MBarrierLayout=lambda: "barrier",
            init=lambda bar, count: bar.init(count),
            expect=lambda bar, size: bar.update(1, size),
            arrive=lambda bar: bar.update(1, 0),
            wait=lambda bar, phase: bar.wait(phase),
        )
        turns = [threading.Semaphore(0), threading.Semaphore(0)]
        replaced = {
            "gl": language, "tl": language, "mbarrier": mbarrier, "warpgroup_mma": _product, "warpgroup_mma_wait": _wait,
            "fence_async_shared": lambda: None, "tma": types.SimpleNamespace(store_wait=lambda _: None),
            "tma_load": lambda desc, at, bar, tile: desc.load(at, bar, tile),
            "tma_store": lambda desc, at, tile: desc.store(at, tile),
            "tma_add": lambda desc, at, tile: desc.add(at, tile), "wait_for_turn": _wait_for_turn, "pass_turn": _pass_turn,
            "accumulator_layout": lambda _: None, "column": lambda x, _: x[:, None],
            "take_turn": _take(turns), "give_turn": lambda w, turns=turns: turns[1 - w].release(),
            "bits": lambda x: x.view(torch.int32), "float_of": lambda x: x.view(torch.float32),
        }  # fmt: skip
        namespace = _namespace(kernel.fn.__globals__, kernel.fn.__module__, replaced, {})
        _in(kernel.fn, namespace)(*arguments, **constants)


def _namespace(of: dict[str, Any], module: str, replaced: dict[str, Any], made: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """The globals ``of`` a module of kernels, with ``replaced`` in them and in those of every jitted function they reach."""
    if id(of) in made:
        return made[id(of)]
    namespace = made[id(of)] = {**of, **replaced}
    for name, value in of.items():
        plain = getattr(value, "fn", None)
        if name in replaced or not isinstance(plain, types.FunctionType):
            continue
        if plain.__module__.startswith(("fa_inductor", module)):
            namespace[name] = _in(plain, _namespace(plain.__globals__, module, replaced, made))
    return namespace


def _in(function: types.FunctionType, namespace: dict[str, Any]) -> types.FunctionType:
    """``function`` with other globals."""
    made = types.FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made
