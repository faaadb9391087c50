"""The only file that asks which torch or triton is installed.

Nothing here runs at import, so that ``import fa_inductor`` stays cheap and works while torch itself is being imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any

MIN_TORCH = (2, 11)
"""Oldest torch release the graph pass is written for."""

NEWEST_TESTED_TORCH = (2, 15)
"""Newest torch release the suite ran on. A newer one is tried, and the doctor says that it is untested."""


def version_tuple(text: str) -> tuple[int, int]:
    """Major and minor number of a version text such as ``2.13.0+cpu`` or ``2.15.0a0+git123``."""
    major, minor = text.split("+")[0].split(".")[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()))


def torch_version() -> tuple[int, int]:
    """(major, minor) of the installed torch."""
    import torch

    return version_tuple(torch.__version__)


def triton_version() -> str | None:
    """Version text of the installed triton, None where there is none (a CPU-only machine needs none)."""
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)


@lru_cache(maxsize=2)
def clamp_gradient(tensor_bound: bool) -> float:
    """The share of the gradient that a value exactly at the bound of ``clamp`` gets: asked of torch, which changed it in 2.15."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros(1, requires_grad=True)
        (gradient,) = torch.autograd.grad(torch.clamp(x, min=torch.zeros(1) if tensor_bound else 0.0).sum(), x)
    return float(gradient)


def inductor_config() -> Any:
    """The module ``torch._inductor.config``."""
    from torch._inductor import config

    return config


def shared_memory(device: Any) -> int | None:
    """Bytes of shared memory that one program may have on a CUDA device, None where torch does not say."""
    import torch

    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", None)


def traced_size(sizevars: Any, size: Any) -> int:
    """The value of a run-time size that a graph was traced with, from Inductor's ``sizevars``; no guard is added.

    Raises:
        Exception: of torch's choice, for a size that has no such value.
    """
    # torch 2.11 and 2.12 have size_hint, torch 2.13 has not.
    known = getattr(sizevars, "guarding_hint_or_throw", None) or sizevars.size_hint
    return int(known(size))


def inductor_option_type(name: str) -> type | None:
    """The declared type of an Inductor option where isinstance() can check it, else None (unions, generics)."""
    from typing import get_origin

    get_type = getattr(inductor_config(), "get_type", None)
    declared = get_type(name) if get_type is not None else None
    return declared if isinstance(declared, type) and get_origin(declared) is None else None


def default_backend() -> Any:
    """The backend of a ``torch.compile`` call that names none. torch before 2.13 has no way to change it."""
    from torch._dynamo.backends import registry

    get = getattr(registry, "get_default_backend", None)
    return "inductor" if get is None else get()


@contextmanager
def compile_caches_off() -> Iterator[None]:
    """Inside the block, compiles by this thread neither read nor write AOTAutograd's and Inductor's graph caches."""
    import torch._functorch.config as functorch_config

    with ExitStack() as stack:
        patches = ((functorch_config, "enable_autograd_cache"), (inductor_config(), "fx_graph_cache"))
        for module, name in patches:
            stack.enter_context(module.patch({name: False}))
        yield


@contextmanager
def unlimited_recompiles() -> Iterator[None]:
    """Inside the block, Dynamo compiles however many entries the code object already has.

    Without this a code object at its recompile limit would silently run in eager, and a report of it would be empty.
    """
    import torch._dynamo.config as dynamo_config

    limit = 1 << 30
    with dynamo_config.patch(recompile_limit=limit, accumulated_recompile_limit=limit):
        yield


def emit_artifact(name: str, payload: str) -> None:
    """Write one JSON artifact into torch's structured trace (TORCH_TRACE, read by tlparse), if that is on."""
    try:
        from torch._logging import trace_structured
    except ImportError:
        return
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "json"}, payload_fn=lambda: payload)
