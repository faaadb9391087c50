"""The documentation: its Python runs, what is generated is up to date, what is included and linked exists."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))

# Blocks for readers alone (a GPU, files, parts of a program) are fenced otherwise, e.g. "``` py".
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def with_blocks() -> list[str]:
    return [page.name for page in PAGES if BLOCK.search(page.read_text("utf-8"))]


@pytest.mark.parametrize("name", with_blocks())
def test_python_of_a_page_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of one page run in their order in one module. Lines keep their numbers, for tracebacks and reports."""
    text = (DOCS / name).read_text("utf-8")
    page = ModuleType("docs_page")
    monkeypatch.setitem(sys.modules, page.__name__, page)  # Dynamo imports the module of a function that it inlines
    for block in BLOCK.finditer(text):
        code = "\n" * text.count("\n", 0, block.start(1)) + block[1]
        exec(compile(code, str(DOCS / name), "exec"), vars(page))


def test_some_pages_have_blocks() -> None:
    """A fence that the pattern no longer finds would be skipped in silence."""
    assert {"index.md", "how_it_works.md", "report.md", "options.md"} <= set(with_blocks())


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["accuracy.md", "forms.md", "fuzz.md", "lookalikes.md", "options.md", "report.txt"])
def test_generated_file_is_up_to_date(generate: ModuleType, name: str) -> None:
    written = (DOCS / "generated" / name).read_text("utf-8")
    assert generate.FILES[name]() == written, f"docs/generated/{name} is out of date: run python docs/generate.py"


def test_every_generated_file_is_compared(generate: ModuleType) -> None:
    assert set(generate.FILES) == {path.name for path in (DOCS / "generated").iterdir()}
    assert set(generate.FILES) == {"accuracy.md", "forms.md", "fuzz.md", "lookalikes.md", "options.md", "report.txt"}


def test_readme_lists_every_option() -> None:
    """The table in the README says more of each option than the generated one, but it must not lose one, or a default."""
    from fa_inductor import Options

    readme = (ROOT / "README.md").read_text("utf-8")
    for name, default, variable, _ in Options.describe():
        (row,) = [line for line in readme.splitlines() if line.startswith(f"| `{name}` |")]
        cells = [cell.strip() for cell in row.split("|")]
        assert cells[2].replace('"', "'") == f"`{default!r}`"
        assert cells[3] == f"`{variable}`" or name == "enabled"


@pytest.mark.parametrize("name", [page.name for page in PAGES])
def test_what_a_page_includes_and_links_exists(name: str) -> None:
    text = (DOCS / name).read_text("utf-8")
    for included in re.findall(r'^--8<-- "(.+)"$', text, re.MULTILINE):
        path, _, section = included.partition(":")
        source = (ROOT / path).read_text("utf-8")
        for end in ("start", "end") if section else ():
            assert source.count(f"--8<-- [{end}:{section}]") == 1, included
    for target in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", text):
        assert (DOCS / target).is_file(), target


def test_navigation_names_every_page() -> None:
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    assert sorted(re.findall(r": (\S+\.md)$", nav, re.MULTILINE)) == [page.name for page in PAGES]


def test_plots_that_pages_show_exist() -> None:
    shown = re.findall(r"!\[[^]]*\]\((benchmarks/results/[^)]+)\)", (ROOT / "README.md").read_text("utf-8"))
    assert shown
    if (ROOT / "benchmarks" / "results").is_dir():
        assert all((ROOT / path).is_file() for path in shown)


def test_sections_of_the_readme_link_to_nothing_that_the_site_has_not() -> None:
    """Pages include them, and a path from the repository's root leads nowhere from there; pictures are copied."""
    sections = re.findall(r"\[start:(\w+)\] -->(.*?)<!-- --8<-- \[end:\1\]", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(sections) > 3
    targets = [(name, t) for name, text in sections for t in re.findall(r"(?<!!)\[[^]]*\]\(([^)]+)\)", text)]
    assert not [x for x in targets if not x[1].startswith(("http", "#"))]


@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="needs mkdocs-material (extra 'docs')")
def test_site_builds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "performance" / "index.html").read_text("utf-8")
    for source in re.findall(r'<img [^>]*src="([^"]+)"', page):
        assert (tmp_path / "site" / "performance" / source).resolve().is_file(), source
