"""What ``python -m fa_inductor doctor`` prints: versions, backend, devices, kernels, options and caches."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from . import __version__, _checkout, _compat
from .config import ENV_SWITCH, Options
from .errors import FaInductorError
from .report import FusionReport, collecting, tabulate

Row = tuple[str, str]


def versions() -> list[Row]:
    """Ours, Python's, torch's (with a word if it is outside the tested range) and triton's."""
    current = _compat.torch_version()
    low, high = (".".join(map(str, v)) for v in (_compat.MIN_TORCH, _compat.NEWEST_TESTED_TORCH))
    note = ""
    if current < _compat.MIN_TORCH:
        note = f"  TOO OLD: torch {low} or newer is needed"
    elif current > _compat.NEWEST_TESTED_TORCH:
        note = f"  newer than the newest tested, {high}"
    where = "a checkout" if _checkout.is_checkout() else "installed"
    return [
        ("fa_inductor", f"{__version__} ({where}, {_checkout.PACKAGE})"),
        ("python", f"{platform.python_version()} on {platform.platform()}"),
        ("torch", f"{torch.__version__}{note}"),
        ("triton", _compat.triton_version() or "not installed (needed for GPU kernels only)"),
        ("sympy", importlib.metadata.version("sympy")),
    ]


def backend() -> list[Row]:
    """Whether ``torch.compile(backend="fa_inductor")`` finds us, and whether we are switched on."""
    rows = []
    try:
        from torch._dynamo.backends.registry import lookup_backend

        found = lookup_backend("fa_inductor")
        rows.append(("backend", f'"fa_inductor" is registered: {found.__module__}.{found.__qualname__}'))
    except Exception as error:
        # Whatever breaks the look-up is the finding: the doctor reports it and goes on.
        rows.append(("backend", f'"fa_inductor" cannot be used: {type(error).__name__}: {error}'))
    try:
        options, _ = Options.from_user()
    except FaInductorError as error:
        return [*rows, ("options", f"INVALID: {error}")]
    rows.append(("enabled", "yes" if options.enabled else f"no, switched off by {ENV_SWITCH} or {ENV_SWITCH}_ENABLED"))
    for name, default, variable, _ in Options.describe():
        value = getattr(options, name)
        if value != default and name != "enabled":
            rows.append(("option", f"{name} = {value!r} (from {variable}, default {default!r})"))
    return rows


def cpp_compiler() -> str:
    """The C++ compiler that Inductor uses on CPU, or what is wrong with it."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        return str(get_cpp_compiler())
    except Exception as error:
        return f"NONE FOUND ({type(error).__name__}); torch.compile needs one on CPU: install g++ or set CXX"


def devices() -> list[Row]:
    """The CPU, its vector instructions and its compiler, then each GPU."""
    capability = torch.backends.cpu.get_cpu_capability()
    rows = [("cpu", f"{capability}, {torch.get_num_threads()} threads, C++ compiler: {cpp_compiler()}")]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        shared = getattr(properties, "shared_memory_per_block_optin", None)
        text = f"{properties.name}, sm_{properties.major}{properties.minor}, {properties.total_memory / 2**30:.0f} GiB"
        rows.append((f"cuda:{index}", text + (f", {shared // 1024} KiB shared memory a block" if shared else "")))
    if torch.cuda.device_count() == 0:
        rows.append(("cuda", "no GPU" if torch.version.cuda else "this torch is built without CUDA"))
    return rows


def caches() -> list[Row]:
    """Where Inductor keeps compiled graphs, how much lies there, and which caches are on."""
    import torch._functorch.config as functorch_config
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder = Path(cache_dir())
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    size = sum(path.stat().st_size for path in files) / 2**20
    inductor = _compat.inductor_config()
    state = {
        "FX graph cache": bool(inductor.fx_graph_cache) and not inductor.force_disable_caches,
        "AOTAutograd cache": bool(functorch_config.enable_autograd_cache) and not inductor.force_disable_caches,
    }
    on = ", ".join(f"{name} {'on' if value else 'OFF'}" for name, value in state.items())
    return [("caches", on), ("folder", f"{folder} ({len(files)} files, {size:.0f} MiB)")]


def doctor() -> str:
    """The whole text."""
    rows: list[Row] = []
    for section in (versions, backend, devices, caches):
        rows += section()
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {text}" for name, text in rows)
