"""Makes a checkout that is not installed behave like an installed package.

The folders patterns/ and templates/ lie beside fa_inductor/ in the repository, and setuptools maps them into the
package. In a checkout that nobody installed (or when ``python -m`` from the repository root shadows the installed
package) two things are missing: ``fa_inductor.patterns`` and ``fa_inductor.templates`` do not resolve, and torch
finds no entry point for ``backend="fa_inductor"``. One finder at the end of ``sys.meta_path`` answers for both, and
only where nobody before it did.

Why not ``__path__.append(root)``: every folder of the root would become a sub-package, and
``TORCH_LOGS="+fa_inductor"``, which walks the package, would import fa_inductor.fa_inductor, a second copy. Why not
``register_backend``: with TORCH_LOGS set torch imports this package before torch itself is complete, and otherwise
importing Dynamo costs seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from email.message import Message
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = Path(__file__).resolve().parent
ROOT = PACKAGE.parent
MAPPED = ("patterns", "templates")
ENTRY_POINTS = "[torch_dynamo_backends]\nfa_inductor = fa_inductor.backend:fa_inductor\n"


def is_checkout() -> bool:
    """Whether this file runs from a checkout: the mapped folders lie beside the package, not in it."""
    return (ROOT / "pyproject.toml").is_file() and not any((PACKAGE / name).exists() for name in MAPPED)


class _CheckoutDistribution(Distribution):
    """The metadata that an installed fa-inductor would have, as far as importlib.metadata asks for entry points."""

    def __init__(self, version: str) -> None:
        self._version = version

    def read_text(self, filename: str) -> str | None:
        if filename == "entry_points.txt":
            return ENTRY_POINTS
        if filename in ("METADATA", "PKG-INFO"):
            header = Message()
            header["Metadata-Version"], header["Name"], header["Version"] = "2.1", "fa-inductor", self._version
            return header.as_string()
        return None

    def locate_file(self, path: Any) -> Path:
        return ROOT / path


class CheckoutFinder(DistributionFinder):
    """Resolves the mapped folders and offers the entry point."""

    def __init__(self, version: str) -> None:
        self._distribution = _CheckoutDistribution(version)

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        parent, _, name = fullname.rpartition(".")
        if parent != "fa_inductor" or name not in MAPPED:
            return None
        folder = ROOT / name
        return spec_from_file_location(fullname, folder / "__init__.py", submodule_search_locations=[str(folder)])

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterable[Distribution]:
        wanted = None if context is None else context.name
        if wanted is None or wanted.lower().replace("_", "-") == "fa-inductor":
            return [self._distribution]
        return []


def install(version: str) -> None:
    """Install the finder, once, if this is a checkout. Register the backend if Dynamo looked for backends before."""
    if not is_checkout() or any(isinstance(finder, CheckoutFinder) for finder in sys.meta_path):
        return
    sys.meta_path.append(CheckoutFinder(version))
    registry = sys.modules.get("torch._dynamo.backends.registry")
    # Dynamo looks for entry points once. If it already has, this process has paid for importing it.
    if registry is not None and registry._discover_entrypoint_backends.cache_info().currsize:
        from .backend import fa_inductor

        # Where it found ours (an editable install), it registers what it loads by itself, which may be happening right now.
        if "fa_inductor" not in registry._BACKENDS:
            registry.register_backend(fa_inductor, name="fa_inductor")
