"""Compile caches across processes: the same code hits them, any change of rules, kernels or options misses.

Processes run over a copy of the sources, so that the copy can be changed; all share one cache folder.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import fa_inductor.patterns
import fa_inductor.templates
from fa_inductor import cache_key
from fa_inductor.config import Options

ROOT = Path(__file__).parents[2]

PROGRAM = textwrap.dedent(
    """
    import json, sys

    import torch
    from torch._dynamo.utils import counters
    from torch._inductor.custom_graph_pass import CustomGraphPass

    import fa_inductor.patterns
    import fa_inductor.templates
    from fa_inductor.backend import fa_inductor as backend  # by name only where the package is installed
    from fa_inductor.report import collecting


    class Pass(CustomGraphPass):
        def __init__(self, uuid):
            self._uuid = uuid

        def __call__(self, graph):
            pass

        def uuid(self):
            return self._uuid


    def attention(q, k, v):
        keep = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
        return (q @ k.mT * 0.3).masked_fill(~keep, float("-inf")).softmax(-1) @ v


    for arguments in json.loads(sys.argv[1]):
        torch._dynamo.reset()
        counters.clear()
        options = {"kernel": "reference", **arguments.get("options", {})}
        if "uuid" in arguments:
            options["joint_custom_pre_pass"] = Pass(arguments["uuid"])
        q, k, v = (torch.randn(2, 2, 8, 8, requires_grad=True) for _ in range(3))
        compiled = torch.compile(attention, backend=backend, options=options)
        with collecting() as report:
            out = compiled(q, k, v)
        torch.testing.assert_close(out, attention(q, k, v))
        out.sum().backward()
        found = {name: counters["aot_autograd"]["autograd_cache_" + name] for name in ("hit", "miss", "bypass")}
        packages = [m.__path__[0] for m in (fa_inductor, fa_inductor.patterns, fa_inductor.templates)]
        found |= {"fx_" + name: counters["inductor"]["fxgraph_cache_" + name] for name in ("hit", "miss", "bypass")}
        print(json.dumps({**found, "fused": len(report.fused), "packages": packages}))
    """
)


def run(folder: Path, *compiles: dict[str, Any]) -> list[dict[str, Any]]:
    """Counters of the compiles that one process does over the sources in ``folder``."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
    }
    command = [sys.executable, str(folder / "program.py"), json.dumps(compiles or [{}])]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == len(compiles or [{}])
    for counts in found:
        assert all(folder in Path(p).parents for p in counts["packages"]), "the copy must be what runs"
        assert counts["fused"] == 1, "the pass runs in any case: what it makes is what is looked up"
        assert counts["bypass"] == counts["fx_bypass"] == 0, counts
    return found


def hit(counts: dict[str, Any]) -> bool:
    """Whether AOTAutograd's cache served the compile; else both caches must have missed."""
    served = counts["hit"] == 1
    assert counts["miss"] == (not served), counts
    assert counts["fx_miss"] == 0 if served else counts["fx_miss"] >= 1, counts
    return served


def test_caches_across_processes(tmp_path: Path) -> None:
    # Laid out as installed: an editable install would otherwise answer for the two mapped folders.
    for name, target in (("fa_inductor", "."), ("patterns", "fa_inductor"), ("templates", "fa_inductor")):
        shutil.copytree(ROOT / name, tmp_path / target / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "program.py").write_text(PROGRAM)
    assert not hit(*run(tmp_path))

    # Another process: served; other options and passes of the user are not.
    compiles = [{}, {"options": {"dropout": False}}, {"uuid": "mine"}, {"uuid": "mine"}, {"uuid": "yours"}]
    assert [hit(c) for c in run(tmp_path, *compiles)] == [True, False, False, True, False]

    for changed in ("patterns/pull.py", "templates/common/forward.py.jinja"):
        path = tmp_path / "fa_inductor" / changed
        before = path.read_text()
        path.write_text(before + ("\n{# changed #}\n" if changed.endswith("jinja") else "\n# changed\n"))
        assert not hit(*run(tmp_path)), changed
        path.write_text(before)


def test_the_key_covers_every_source_file(monkeypatch: pytest.MonkeyPatch) -> None:
    read: set[Path] = set()
    original = Path.read_bytes

    def recording(self: Path) -> bytes:
        read.add(self.resolve())
        return original(self)

    monkeypatch.setattr(Path, "read_bytes", recording)
    cache_key.source_digest.__wrapped__()
    folders = [Path(p) for m in (fa_inductor, fa_inductor.patterns, fa_inductor.templates) for p in m.__path__]
    on_disk = {
        path.resolve()
        for folder in folders
        for path in folder.rglob("*")
        if path.suffix in (".py", ".jinja") and "__pycache__" not in path.parts
    }
    assert read == on_disk
    assert {p.suffix for p in read} == {".py", ".jinja"}


def test_options_that_change_no_graph_are_not_in_the_key() -> None:
    assert Options(log_level="DEBUG").key() == Options().key()
    assert Options(dropout=False).key() != Options().key()
