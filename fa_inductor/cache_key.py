"""What the compile caches of AOTAutograd and Inductor must know about us.

The caches key on the graph, which carries the program of every fused op, but not on our code. A pass that changes nothing is
put in front of Inductor's joint passes for the sake of its uuid: it covers our version and sources, the options, and the user's
own pass that it stands before. It also marks the graph as ours (:mod:`fa_inductor.builtin_fusion`).
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from fa_inductor.builtin_fusion import keep_off
from fa_inductor.config import Options

_PACKAGES = ("fa_inductor", "fa_inductor.patterns", "fa_inductor.templates")
_SOURCES = (".py", ".jinja")


@lru_cache(maxsize=1)
def source_digest() -> str:
    """SHA-256 over every source file of the package, its patterns and templates."""
    digest = hashlib.sha256()
    for name in _PACKAGES:
        try:
            roots = import_module(name).__path__
        except ImportError:
            continue
        for root in roots:
            for path in sorted(p for p in Path(root).rglob("*") if p.suffix in _SOURCES and "__pycache__" not in p.parts):
                digest.update(f"{name}/{path.relative_to(root)}".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


class KeyPass(CustomGraphPass):
    """Runs the user's joint pre-pass, if any, and gives both of us a place in the cache key."""

    def __init__(self, key: str, user_pass: Any = None):
        self.key, self.user_pass = key, user_pass

    def __call__(self, graph: fx.Graph) -> None:
        keep_off(graph)
        if self.user_pass is not None:
            self.user_pass(graph)

    def uuid(self) -> Any:
        if self.user_pass is None:
            return ("fa_inductor", self.key)
        uuid = getattr(self.user_pass, "uuid", None)
        theirs = uuid() if callable(uuid) else None
        # A pass without a uuid must not be served from a cache; None is how Inductor is told.
        return None if theirs is None else ("fa_inductor", self.key, theirs)


def with_key(options: Options, user_pass: Any = None) -> KeyPass:
    """The pass for ``config.joint_custom_pre_pass``; a pass that is set there already is kept."""
    from torch._inductor import config

    return KeyPass(f"{source_digest()}:{options.key()}", user_pass if user_pass is not None else config.joint_custom_pre_pass)
