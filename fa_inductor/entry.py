"""The two entry points besides ``backend="fa_inductor"``: `enable` for code one cannot edit, `explain` for reports."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from . import _compat
from .config import Options
from .errors import OptionError
from .report import FusionReport, collecting

__all__ = ["enable", "explain"]


class _Backend:
    """Our backend with options bound to it. No two are equal, so Dynamo never reuses another's graphs."""

    __name__ = "fa_inductor"  # what Dynamo calls the backend in messages

    def __init__(self, bound: Mapping[str, Any]) -> None:
        self.bound = dict(bound)

    def __call__(self, gm: Any, example_inputs: Any, *, mode: str | None = None, options: Mapping[str, Any] | None = None) -> Any:
        from .backend import fa_inductor

        merged = {**self.bound, **(options or {})}
        return fa_inductor(gm, example_inputs, mode=mode, options=merged or None)


_enabled: list[_Backend] = []
_enable_lock = threading.Lock()


def _redirect(compile_: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile, which uses the innermost `enable` block where the caller left or set the backend to inductor."""

    @functools.wraps(compile_)
    def compile(*args: Any, **kwargs: Any) -> Any:
        if _enabled and (kwargs.get("backend") or _compat.default_backend()) == "inductor":
            kwargs["backend"] = _enabled[-1]
        return compile_(*args, **kwargs)

    compile._fa_inductor_original = compile_  # type: ignore[attr-defined]
    return compile


def _redirect_package(package: Callable[..., Any]) -> Callable[..., Any]:
    """torch._inductor.aoti_compile_and_package, through ours inside an `enable` block."""

    @functools.wraps(package)
    def aoti_compile_and_package(exported_program: Any, *args: Any, **kwargs: Any) -> Any:
        if not _enabled:
            return package(exported_program, *args, **kwargs)
        from .export import aoti_compile_and_package as ours

        kept = {name: kwargs[name] for name in ("package_path", "inductor_configs") if name in kwargs}
        return ours(exported_program, options=_enabled[-1].bound, **kept)

    aoti_compile_and_package._fa_inductor_original = package  # type: ignore[attr-defined]
    return aoti_compile_and_package


@contextmanager
def enable(**options: Any) -> Iterator[None]:
    """Send every ``torch.compile`` call made inside the block through fa_inductor, with these options, and every
    ``torch._inductor.aoti_compile_and_package``.

    Covers ``torch.compile(m)``, ``@torch.compile``, ``m.compile()`` and ``backend="inductor"``; other backends are
    left alone. What was wrapped inside the block stays with fa_inductor when it is first called after the block, and
    what was wrapped before it stays with its own backend. Blocks nest, the innermost counts. The effect is on the
    whole process, as ``torch.compile`` is replaced for the time of the block; a name bound earlier by ``from torch
    import compile`` is not seen.

    Raises `OptionError` at once for a bad option.
    """
    import torch
    import torch._inductor

    Options.from_user(options)
    backend = _Backend(options)
    replaced = ((torch, "compile", _redirect), (torch._inductor, "aoti_compile_and_package", _redirect_package))
    with _enable_lock:
        _enabled.append(backend)
        for module, name, redirect in replaced:
            if not hasattr(getattr(module, name), "_fa_inductor_original"):
                setattr(module, name, redirect(getattr(module, name)))
    try:
        yield
    finally:
        with _enable_lock:
            _enabled.remove(backend)
            for module, name, _ in replaced:
                original = getattr(getattr(module, name), "_fa_inductor_original", None)
                # If somebody else wrapped the function meanwhile, ours stays beneath it and does nothing.
                if not _enabled and original is not None:
                    setattr(module, name, original)


def explain(fn: Callable[..., Any], *, profile: bool = False, **compile_kwargs: Any) -> Callable[..., FusionReport]:
    """``explain(fn, **compile_kwargs)(*args, **kwargs)`` compiles `fn` anew, runs it once and returns the report of
    its sites.

    With ``profile=True`` it is run again under torch's profiler (on a GPU twice again), and each fused site says how many
    milliseconds its kernel took in the forward pass.

    `fn` is a module or a function; one that torch.compile returned is taken by what it wraps. `compile_kwargs` are
    those of ``torch.compile`` without ``backend``. The compile reads and writes no graph cache, and leaves what
    Dynamo has compiled for `fn` alone, except for the inner functions of a model with graph breaks, which get one
    more entry each.

    The call has the side effects of one call of `fn` (running statistics, KV caches, the random generator).
    """
    if "backend" in compile_kwargs:
        raise OptionError.invalid("explain", compile_kwargs["backend"], "no backend: explain always uses fa_inductor")
    Options.from_user(compile_kwargs.get("options"))
    target = _uncompiled(fn)

    def run(*args: Any, **kwargs: Any) -> FusionReport:
        import torch

        if not Options.from_user(compile_kwargs.get("options"))[0].enabled:
            return FusionReport(notes=["fa_inductor is switched off (FA_INDUCTOR=0 or options={'enabled': False})"])
        compiled = torch.compile(_fresh_call(target), backend=_Backend({}), **_copied(compile_kwargs))
        with _compat.compile_caches_off(), _compat.unlimited_recompiles(), collecting() as report:
            compiled(*args, **kwargs)
            if profile:
                from .evidence import profiled

                report = profiled(report, functools.partial(compiled, *args, **kwargs))
        if not report.graphs:
            report.notes.append("Dynamo captured no graph: nothing was compiled")
        return report

    return run


def _copied(compile_kwargs: dict[str, Any]) -> dict[str, Any]:
    # torch.compile pops entries out of the options it is given.
    options = compile_kwargs.get("options")
    return compile_kwargs if options is None else {**compile_kwargs, "options": dict(options)}


def _uncompiled(fn: Any) -> Any:
    for attribute in ("_orig_mod", "_torchdynamo_orig_callable"):
        inner = getattr(fn, attribute, None)
        if inner is not None:
            return inner
    return fn


def _fresh_call(target: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `target` and whose code object is new: Dynamo keeps what it compiled by code object."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    fresh = types.FunctionType(call.__code__.replace(), call.__globals__, "call", None, call.__closure__)
    fresh.__kwdefaults__ = call.__kwdefaults__
    return fresh
