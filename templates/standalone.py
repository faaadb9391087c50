"""Kernels without Inductor: the second rendering stage, loading, launching and ahead-of-time signatures.

Tests and kernel benchmarks run the very text that Inductor gets. Here ``{{def_kernel}}`` and its companions are
filled in with ordinary kernel parameters: the tensors, then ``OUT``, then every size and stride that the text asks for.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from fa_inductor.templates.rendering import KernelSource

OUTPUT = "OUT"


@dataclass(frozen=True)
class Standalone:
    """A complete Triton source.

    Attributes:
        source: Python text of a module with one ``@triton.jit`` kernel.
        kernel: the kernel, whose text and launch options this is.
        scalars: (tensor name or "" for the program's sizes, "size" | "stride", dimension) of each integer parameter,
        in order
            after the tensors and OUT.
    """

    source: str
    kernel: KernelSource
    scalars: tuple[tuple[str, str, int], ...]


#: Values of sizes and strides: ((tensor or "", "size" | "stride", dimension), value), ...
Known = tuple[tuple[tuple[str, str, int], int], ...]


class _Hooks:
    def __init__(self, kernel: KernelSource, known: Known) -> None:
        self.kernel, self.known = kernel, dict(known)
        self.scalars: dict[tuple[str, str, int], str] = {}

    def _scalar(self, name: str, what: str, dim: int) -> str:
        if (name, what, dim) in self.known:
            return str(self.known[name, what, dim])
        return self.scalars.setdefault((name, what, dim), f"{name or 'PROGRAM'}_{what}{dim}")

    def def_kernel(self, *names: str) -> str:
        assert names == self.kernel.arguments, (names, self.kernel.arguments)
        return "<DEF_KERNEL>"

    def size(self, name: str | None, dim: int) -> str:
        return self._scalar(name or OUTPUT, "size", dim)

    def stride(self, name: str | None, dim: int | None = None) -> str:
        if dim is not None:
            return self._scalar(name or OUTPUT, "stride", dim)
        return ", ".join(self._scalar(name or OUTPUT, "stride", d) for d in range(4))

    def program_size(self, index: int) -> str:
        return self._scalar("", "size", index)

    def store_output(
        self, indices: Sequence[str], val: str, mask: str, indent_width: int = 4, val_shape: Any = None
    ) -> str:
        offset = " + ".join(f"({x}) * {self._scalar(OUTPUT, 'stride', d)}" for d, x in enumerate(indices))
        return f"tl.store({OUTPUT} + ({offset}), {val}.to({OUTPUT}.dtype.element_ty), mask={mask})"


@lru_cache(maxsize=512)
def complete(kernel: KernelSource, known: Known = (), specialize: bool = True) -> Standalone:
    """Fill in the hooks of a rendered kernel. Sizes and strides in ``known`` become numbers in the text.

    ``specialize``: whether Triton compiles the kernel anew where a size or stride is 1 or a multiple of 16, or a tensor starts
    at a multiple of 16 bytes.
    """
    import jinja2

    hooks = _Hooks(kernel, known)
    hooked = ("def_kernel", "size", "stride", "program_size", "store_output")
    body = jinja2.Template(kernel.text, undefined=jinja2.StrictUndefined, keep_trailing_newline=True).render(
        {n: getattr(hooks, n) for n in hooked}
    )
    names = [*kernel.arguments, OUTPUT, *hooks.scalars.values()]
    parameters = ", ".join(names)
    defines = "".join(f"    {k}: tl.constexpr = {v}\n" for k, v in kernel.constants.items())
    jit = "@triton.jit" if specialize else f"@triton.jit(do_not_specialize={names})"
    header = f"{jit}\ndef {kernel.name}({parameters}):\n{defines}    INDEX_DTYPE: tl.constexpr = tl.int64"
    source = "import triton\nimport triton.language as tl\n\n\n" + body.replace("<DEF_KERNEL>", header, 1)
    return Standalone(source, kernel, tuple(hooks.scalars))


@lru_cache(maxsize=1)
def _folder() -> str:
    return tempfile.mkdtemp(prefix="fa_inductor_kernels_")


@lru_cache(maxsize=512)
def load(kernel: KernelSource, known: Known = (), specialize: bool = True) -> tuple[Any, Standalone]:
    """The jitted function of a kernel."""
    standalone = complete(kernel, known, specialize)
    # The constants are part of the module's text but not of the kernel's name.
    name = f"{kernel.name}_{abs(hash(standalone.source)):x}"
    return getattr(module_of(name, standalone.source), kernel.name), standalone


def module_of(name: str, source: str) -> ModuleType:
    """A module of that text. Triton reads a kernel's source from its file, so one is written."""
    path = Path(_folder()) / f"{name}.py"
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(source)
    temporary.replace(path)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _value(tensors: dict[str, Any], sizes: Sequence[int], scalar: tuple[str, str, int]) -> int:
    name, what, dim = scalar
    if not name:
        return sizes[dim]
    return int(tensors[name].shape[dim] if what == "size" else tensors[name].stride(dim))


def prepare(
    kernel: KernelSource,
    tensors: dict[str, Any],
    out: Any,
    sizes: Sequence[int] = (),
    fixed: bool = False,
    specialize: bool = True,
) -> tuple[Any, list[Any]]:
    """(jitted function, positional arguments) of a launch.

    ``fixed``: sizes and strides are numbers in the kernel's text, as they are where Inductor knows them; otherwise they
    are arguments, as under dynamic shapes. ``specialize`` as :func:`complete` has it.
    """
    everything = {**tensors, OUTPUT: out}
    known: Known = ()
    if fixed:
        known = tuple((s, _value(everything, sizes, s)) for s in complete(kernel).scalars)
    function, standalone = load(kernel, known, specialize)
    values: list[Any] = [tensors[n] for n in kernel.arguments]
    return function, [*values, out, *(_value(everything, sizes, s) for s in standalone.scalars)]


def launch(
    kernel: KernelSource,
    grid: int,
    tensors: dict[str, Any],
    out: Any,
    sizes: Sequence[int] = (),
    fixed: bool = False,
    specialize: bool = True,
    **options: Any,
) -> None:
    """Run a kernel. ``grid`` programs; ``out`` is written, and so are the tensors named by ``kernel.outputs``."""
    if grid > 0:
        function, values = prepare(kernel, tensors, out, sizes, fixed, specialize)
        function[(grid,)](*values, num_warps=kernel.num_warps, num_stages=kernel.num_stages, **options)
