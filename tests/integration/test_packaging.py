"""Wheel, sdist, plain and editable install, the entry point, and a checkout that shadows or replaces an install."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("fa_inductor", "patterns", "templates")
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis", "results"
)

pytestmark = pytest.mark.xdist_group("packaging")  # the installs below are shared: one worker runs them all

USE = """
import importlib.metadata, os, sys
import fa_inductor
assert "torch" not in sys.modules or os.environ.get("TORCH_LOGS"), "import fa_inductor must not import torch"
import fa_inductor.patterns, fa_inductor.templates
import torch
for module in (fa_inductor, fa_inductor.patterns, fa_inductor.templates):
    print(module.__name__, os.path.realpath(module.__file__))
print("version", importlib.metadata.version("fa-inductor"), fa_inductor.__version__)
import torch._dynamo
print("listed", "fa_inductor" in torch._dynamo.list_backends())
if not os.environ.get("WITH_CPP"):
    # Inductor's C++ takes most of the time, and it is the same however the package is found: run the rewritten graph.
    import torch._inductor.compile_fx
    torch._inductor.compile_fx.compile_fx = lambda gm, inputs, **settings: gm.forward
q = torch.randn(1, 2, 64, 16)
def f(q): return torch.softmax(q @ q.transpose(-1, -2) * 0.25, -1) @ q
# No import of ours on the way: torch finds the backend by its entry point.
out = torch.compile(f, backend="fa_inductor", options={"kernel": "reference"})(q)
print("close", torch.allclose(out, f(q), atol=1e-5))
print("fused", fa_inductor.explain(f, options={"kernel": "reference"})(q).counts())
"""

#: What README promises: nothing of ours is imported, before or after, and a misspelt option gets our own error.
TORCH_ALONE = """
import torch
import torch._inductor.compile_fx
torch._inductor.compile_fx.compile_fx = lambda gm, inputs, **settings: gm.forward
q = torch.randn(1, 2, 64, 16)
def f(q): return torch.softmax(q @ q.transpose(-1, -2) * 0.25, -1) @ q
out = torch.compile(f, backend="fa_inductor", options={"kernel": "reference"})(q)
print("close", torch.allclose(out, f(q), atol=1e-5))
try:
    torch.compile(f, backend="fa_inductor", options={"strickt": True})(q)
except Exception as error:
    print("told", "strict" in str(error))
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Standard output of a command that must succeed, in an environment without PYTHONPATH."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**env, **environment},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def copy_of_tree(target: Path) -> Path:
    """The tree without build products: a build writes into its source folder, and must not meet an earlier one's."""
    return Path(shutil.copytree(ROOT, target, ignore=LEFT_OUT))


@pytest.fixture(scope="module")
def dists(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(wheel, sdist); the wheel is built from the sdist, so it also shows that the sdist is complete."""
    work = tmp_path_factory.mktemp("dists")
    tree = copy_of_tree(work / "tree")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", work / "out", cwd=tree)
    (wheel,) = (work / "out").glob("*.whl")
    (sdist,) = (work / "out").glob("*.tar.gz")
    return wheel, sdist


class Environment:
    """A virtual environment that sees this one's packages (torch is too big to install again) except fa-inductor."""

    def __init__(self, folder: Path) -> None:
        run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
        self.python = folder / "bin" / "python"
        site = Path(run(self.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
        borrowed = folder / "borrowed"
        borrowed.mkdir()
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            if "fa_inductor" not in entry.name and not entry.name.endswith((".pth", ".egg-link")):
                (borrowed / entry.name).symlink_to(entry)
        (site / "borrowed.pth").write_text(f"{borrowed}\n")

    def install(self, *what: str | Path, cwd: Path) -> None:
        options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
        run(self.python, "-m", "pip", "install", *options, *what, cwd=cwd, PIP_DISABLE_PIP_VERSION_CHECK="1")


@pytest.fixture(scope="module")
def installed(dists: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the wheel installed."""
    folder = tmp_path_factory.mktemp("plain")
    environment = Environment(folder / "venv")
    environment.install(dists[0], cwd=folder)
    return environment


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout."""
    return copy_of_tree(tmp_path_factory.mktemp("checkout") / "tree")


def source_files() -> set[str]:
    """Every file that belongs into the package, by its path inside the wheel."""
    wanted = set()
    for top in PACKAGES:
        for path in (ROOT / top).rglob("*"):
            if path.suffix in (".py", ".jinja", ".typed") and "__pycache__" not in path.parts:
                inner = path.relative_to(ROOT).as_posix()
                wanted.add(inner if top == "fa_inductor" else f"fa_inductor/{inner}")
    return wanted


def test_wheel_holds_every_source_file_and_nothing_else(dists: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(dists[0]) as wheel:
        names = set(wheel.namelist())
        (entry_points,) = [name for name in names if name.endswith("entry_points.txt")]
        assert "fa_inductor = fa_inductor.backend:fa_inductor" in wheel.read(entry_points).decode()
        (metadata,) = [name for name in names if name.endswith("METADATA")]
        text = wheel.read(metadata).decode()
    held = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
    wanted = source_files()
    assert held == wanted, f"missing: {sorted(wanted - held)}; too many: {sorted(held - wanted)}"
    assert "fa_inductor/py.typed" in held
    assert any(name.endswith("licenses/LICENSE") for name in names)
    for line in ("License-Expression: Apache-2.0", "Requires-Python: >=3.10", "Requires-Dist: torch>=2.11"):
        assert line in text
    assert not any(line.startswith("Requires-Dist: triton") for line in text.splitlines())


def test_sdist_holds_sources_tests_and_documents(dists: tuple[Path, Path]) -> None:
    with tarfile.open(dists[1]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    wanted = {
        name.removeprefix("fa_inductor/") if "/patterns/" in name or "/templates/" in name else name for name in source_files()
    }
    wanted |= {
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "Makefile",
        "constraints.txt",
        "mkdocs.yml",
        "docs/index.md",
        "docs/generated/forms.md",
        "examples/decoder_inference.py",
        "tests/conftest.py",
    }
    assert wanted <= names, f"missing: {sorted(wanted - names)}"
    assert not any(".git/" in name or "__pycache__" in name for name in names)


def check_use(output: str, home: Path, mapped: Path) -> None:
    lines = dict(line.split(" ", 1) for line in output.splitlines() if " " in line)
    assert Path(lines["fa_inductor"]) == (home / "__init__.py").resolve()
    assert Path(lines["fa_inductor.patterns"]) == (mapped / "patterns" / "__init__.py").resolve()
    assert Path(lines["fa_inductor.templates"]) == (mapped / "templates" / "__init__.py").resolve()
    versions = lines["version"].split()
    assert versions[0] == versions[1]
    assert lines["listed"] == "True"
    assert lines["close"] == "True"
    assert lines["fused"] == "{'fused': 1, 'declined': 0, 'rejected': 0}"


def site_of(environment: Environment) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(run(environment.python, "-c", code, cwd=environment.python.parent).strip())


def test_installed_wheel_works_anywhere(installed: Environment, tmp_path: Path) -> None:
    home = site_of(installed) / "fa_inductor"
    check_use(run(installed.python, "-c", USE, cwd=tmp_path, WITH_CPP="1"), home, home)
    assert run(installed.python, "-c", TORCH_ALONE, cwd=tmp_path).split() == ["close", "True", "told", "True"]


def test_checkout_shadows_a_plain_install(installed: Environment, tree: Path) -> None:
    # `python -m` and `python -c` put the current folder first, and with it the checkout's package.
    check_use(run(installed.python, "-c", USE, cwd=tree), tree / "fa_inductor", tree)
    assert "fa_inductor" in run(installed.python, "-m", "fa_inductor", "doctor", cwd=tree)


def test_editable_install(tree: Path, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "venv")
    environment.install("-e", tree, cwd=tmp_path)
    assert run(environment.python, "-c", TORCH_ALONE, cwd=tmp_path).split() == ["close", "True", "told", "True"]
    check_use(run(environment.python, "-c", USE, cwd=tmp_path), tree / "fa_inductor", tree)


def test_checkout_that_nobody_installed(tree: Path, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "venv")
    check_use(run(environment.python, "-c", USE, cwd=tree), tree / "fa_inductor", tree)


@pytest.mark.parametrize("where", ["installed", "checkout"])
def test_torch_logs_may_import_us_before_torch_is_ready(where: str, installed: Environment, tree: Path, tmp_path: Path) -> None:
    python = installed.python if where == "installed" else Environment(tmp_path / "venv").python
    home = site_of(installed) / "fa_inductor" if where == "installed" else tree / "fa_inductor"
    output = run(python, "-c", "import torch\n" + USE, cwd=tree if where == "checkout" else tmp_path, TORCH_LOGS="+fa_inductor")
    check_use(output, home, home if where == "installed" else tree)


def test_late_import_registers_with_dynamo_that_has_already_looked(tree: Path, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "venv")
    code = (
        f"import torch, torch._dynamo, sys; assert 'fa_inductor' not in torch._dynamo.list_backends()\n"
        f"sys.path.insert(0, {str(tree)!r}); import fa_inductor\n"
        "print('fa_inductor' in torch._dynamo.list_backends())\n"
        "from torch._dynamo.backends.registry import lookup_backend; print(lookup_backend('fa_inductor').__module__)\n"
    )
    assert run(environment.python, "-c", code, cwd=tmp_path).split("\n")[:2] == ["True", "fa_inductor.backend"]


def test_one_module_object_however_it_is_reached(tree: Path, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "venv")
    code = (
        "import pkgutil, sys, fa_inductor\n"
        "print(sorted(m.name for m in pkgutil.iter_modules(fa_inductor.__path__) if m.ispkg))\n"
        "import fa_inductor.patterns as a; from fa_inductor import patterns as b; print(a is b)\n"
        "print('fa_inductor.fa_inductor' in sys.modules, 'fa_inductor.tests' in sys.modules)\n"
    )
    assert run(environment.python, "-c", code, cwd=tree).split("\n")[:3] == ["['view']", "True", "False False"]


def test_packages_listed_for_setuptools_are_those_on_disk() -> None:
    if sys.version_info < (3, 11):
        import tomli as toml  # a dependency of pytest there
    else:
        import tomllib as toml
    listed = set(toml.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = set()
    for top in PACKAGES:
        for path in (ROOT / top).rglob("__init__.py"):
            dotted = ".".join(path.parent.relative_to(ROOT).parts)
            found.add(dotted if top == "fa_inductor" else f"fa_inductor.{dotted}")
    assert listed == found
