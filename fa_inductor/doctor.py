"""What ``python -m fa_inductor doctor`` prints: versions, backend, devices, kernels, options and caches."""

from __future__ import annotations

import copy
import importlib.metadata
import itertools
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import __version__, _checkout, _compat
from .config import ENV_SWITCH, Options
from .errors import FaInductorError
from .report import SiteReport, tabulate

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
        shared = _compat.shared_memory(torch.device("cuda", index))
        text = f"{properties.name}, sm_{properties.major}{properties.minor}, {properties.total_memory / 2**30:.0f} GiB"
        rows.append((f"cuda:{index}", text + (f", {shared // 1024} KiB shared memory a block" if shared else "")))
    if torch.cuda.device_count() == 0:
        rows.append(("cuda", "no GPU" if torch.version.cuda else "this torch is built without CUDA"))
    return rows


LENGTH, HEADS, HEAD_DIM = 1024, 4, 64


def sample_forms() -> dict[str, Callable[..., torch.Tensor]]:
    """Common forms, functions of q, k, v, each [1, HEADS, LENGTH, HEAD_DIM] (GQA takes half of the k and v heads)."""

    def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return q @ k.transpose(-2, -1) * HEAD_DIM**-0.5

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.softmax(scores(q, k), -1) @ v

    def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keep = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        return torch.softmax(scores(q, k).masked_fill(~keep, float("-inf")), -1) @ v

    def window(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        index = torch.arange(q.shape[-2], device=q.device)
        distance = index[:, None] - index
        keep = (distance >= 0) & (distance < 256)
        return torch.softmax(scores(q, k).masked_fill(~keep, float("-inf")), -1) @ v

    def grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (t[:, : HEADS // 2].repeat_interleave(2, dim=1) for t in (k, v))
        return torch.softmax(scores(q, k), -1) @ v

    def softcap(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.softmax(30.0 * torch.tanh(scores(q, k) / 30.0), -1) @ v

    def dropout(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(torch.softmax(scores(q, k), -1), 0.1) @ v

    forms = {"plain": plain, "causal": causal, "sliding window": window, "grouped heads (GQA)": grouped}
    return {**forms, "softcap": softcap, "dropout": dropout}


def kernels(device: str) -> list[list[str]]:
    """[dtype, form, training, kernel or reason] of the sample forms on a device, as the graph pass decides them there.

    The pass runs as in a real compile, up to Inductor: nothing is generated, so this takes seconds.
    """
    from .graph_pass import AttentionPass

    options = Options.from_user()[0]
    rows = []
    dtypes = (torch.float32, torch.bfloat16) if device == "cpu" else (torch.float32, torch.float16, torch.bfloat16)
    for dtype, training in itertools.product(dtypes, (False, True)):
        for name, form in sample_forms().items():
            sites: list[SiteReport] = []

            def decide(gm: Any, inputs: Any, sites: list[SiteReport] = sites) -> Callable[..., Any]:
                unchanged = copy.deepcopy(gm)
                sites += AttentionPass(options)(gm).sites
                return unchanged

            torch._dynamo.reset()
            shape = (1, HEADS, LENGTH, HEAD_DIM)
            q, k, v = (torch.randn(shape, dtype=dtype, device=device, requires_grad=training) for _ in range(3))
            torch.compile(form, backend=decide)(q, k, v)
            answers = {f"{site.template or site.status}{': ' if site.reason else ''}{site.reason}" for site in sites}
            rows.append(
                [
                    str(dtype).removeprefix("torch."),
                    name,
                    "yes" if training else "no",
                    "; ".join(sorted(answers)) or "not recognised",
                ]
            )
    torch._dynamo.reset()
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
    text = "\n".join(f"{name.ljust(width)}  {text}" for name, text in rows)
    for device in ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]:
        text += f"\n\nKernels on {device}, {HEADS} heads, {LENGTH} tokens, head_dim {HEAD_DIM}\n"
        text += tabulate(_merged(kernels(device)), ["dtype", "form", "training", "kernel or reason"])
    return text


def _merged(rows: list[list[str]]) -> list[list[str]]:
    """Rows that differ in their dtype only become one row."""
    found: dict[tuple[str, ...], list[str]] = {}
    for dtype, *rest in rows:
        found.setdefault(tuple(rest), []).append(dtype)
    return [[", ".join(dtypes), *rest] for rest, dtypes in found.items()]
