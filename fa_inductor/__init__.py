"""fa_inductor: torch.compile finds your attention, however it is spelled, and runs it as one flash-attention op.

    compiled = torch.compile(model, backend="fa_inductor")
    print(fa_inductor.explain(model)(*inputs))

Importing the package imports no torch: everything below is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import _checkout

if TYPE_CHECKING:
    from .config import Options
    from .entry import enable, explain
    from .export import aoti_compile_and_package
    from .report import FusionReport

__version__ = "0.1.0"

__all__ = ["FusionReport", "Options", "__version__", "aoti_compile_and_package", "enable", "explain"]

_HOME = {
    "FusionReport": "report", "Options": "config", "aoti_compile_and_package": "export", "enable": "entry", "explain": "entry",
}  # fmt: skip

_checkout.install(__version__)


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "report":  # fa_inductor.report.collecting(), before anything has imported it
        return import_module("fa_inductor.report")
    if name not in _HOME:
        raise AttributeError(f"module 'fa_inductor' has no attribute {name!r}")
    return getattr(import_module(f"fa_inductor.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
