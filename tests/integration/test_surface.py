"""What others see: every public name says what it is, the documentation lists the public API, files stay readable."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import fa_inductor

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("fa_inductor", "patterns", "templates")
#: Lines of the longest file; longer ones are to be split.
LONGEST = 600


def sources() -> list[Path]:
    return sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))


def undocumented(tree: ast.Module) -> Iterator[str]:
    """Public functions and classes of a module without a docstring; functions of a kernel, which are compiled, are left out."""
    for node in tree.body:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or node.name.startswith("_"):
            continue
        compiled = any(ast.unparse(d).split(".")[0] in ("gluon", "triton") for d in node.decorator_list)
        if not compiled and not ast.get_docstring(node):
            yield node.name


@pytest.mark.parametrize("name", PACKAGES)
def test_every_public_name_says_what_it_is(name: str) -> None:
    missing = []
    for path in (p for p in sources() if p.relative_to(ROOT).parts[0] == name):
        tree = ast.parse(path.read_text("utf-8"))
        if tree.body and not ast.get_docstring(tree):
            missing.append(f"{path.relative_to(ROOT)}: the module")
        missing += [f"{path.relative_to(ROOT)}: {n}" for n in undocumented(tree)]
    assert not missing, "no docstring: " + ", ".join(missing)


def test_what_has_no_docstring_is_found() -> None:
    text = "def a(): ...\ndef _b(): ...\nclass C: ...\n@gluon.jit\ndef d(): ...\ndef e():\n    '''Says.'''\n"
    assert list(undocumented(ast.parse(text))) == ["a", "C"]


def test_the_public_api_is_documented() -> None:
    page = (ROOT / "docs" / "api.md").read_text("utf-8")
    for name in fa_inductor.__all__:
        assert f"`fa_inductor.{name}" in page, f"docs/api.md says nothing of {name}"
    for name in set(fa_inductor.__all__) - {"__version__"}:
        assert inspect.getdoc(getattr(fa_inductor, name))
    for cls in (fa_inductor.FusionReport, fa_inductor.Options):
        for name, member in inspect.getmembers(cls, lambda m: inspect.isfunction(m) or inspect.ismethod(m)):
            assert name.startswith("_") or inspect.getdoc(member), f"{cls.__name__}.{name} has no docstring"


@pytest.mark.parametrize("folder", [*PACKAGES, "tests", "benchmarks", "examples"])
def test_no_file_is_too_long(folder: str) -> None:
    lengths = {p.relative_to(ROOT): len(p.read_text("utf-8").splitlines()) for p in (ROOT / folder).rglob("*.py")}
    assert not {p: n for p, n in lengths.items() if n > LONGEST}
