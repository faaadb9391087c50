"""Training on two processes over gloo: DDP, FSDP2 and tensor parallelism, compiled beside eager.

Two CPU processes run all scenarios of ``distributed_worker.py`` one after the other; each test looks at one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("torch is built without gloo", allow_module_level=True)

from tests.compiling import Fusing
from tests.integration.distributed_worker import LAYERS, SCENARIOS

ROOT = Path(__file__).resolve().parents[2]
WORLD = 2
#: Seconds for everything; whoever is not done by then hangs.
PATIENCE = 420

pytestmark = [pytest.mark.xdist_group("distributed"), pytest.mark.timeout(PATIENCE + 60)]
Results = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Result of every rank of a scenario, by its name."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(WORLD)}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the name of the machine may not resolve
    logs = [(folder / f"log.{rank}").open("w+") for rank in range(WORLD)]
    command = [sys.executable, "-m", "tests.integration.distributed_worker"]
    ranks = [
        subprocess.Popen(
            [*command, str(folder), *SCENARIOS],
            cwd=ROOT, env={**environment, "RANK": str(rank)}, stdout=logs[rank], stderr=subprocess.STDOUT,
        )
        for rank in range(WORLD)
    ]  # fmt: skip
    deadline = time.monotonic() + PATIENCE
    try:
        while any(p.poll() is None for p in ranks) and not any(p.poll() for p in ranks) and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        states = [p.poll() for p in ranks]
        for p in ranks:
            p.kill()
            p.wait()
    said = []
    for log, state in zip(logs, states, strict=True):
        log.seek(0)
        said.append(f"{'still running' if state is None else f'exit code {state}'}\n{log.read()[-2000:]}")
        log.close()

    def of(name: str) -> list[dict[str, Any]]:
        files = [folder / f"{name}.{rank}.json" for rank in range(WORLD)]
        assert all(f.exists() for f in files), "\n".join(f"rank {i}: {text}" for i, text in enumerate(said))
        return [json.loads(f.read_text()) for f in files]

    return of


@pytest.mark.parametrize("name", [n for n, s in SCENARIOS.items() if not s.dropout])
def test_losses_and_gradients_are_those_of_eager(name: str, results: Results) -> None:
    for result in results(name):
        eager, ours = result["losses"]
        assert ours == pytest.approx(eager, rel=1e-5)
        assert result["gradients"] < 1e-5


@pytest.mark.parametrize("name", [n for n, s in SCENARIOS.items() if s.kind != "dtensor"])
def test_every_attention_is_fused(name: str, results: Results) -> None:
    """Layers that are compiled one by one share one compiled graph."""
    compiled = 1 if SCENARIOS[name].kind.startswith("fsdp") else LAYERS
    heads = "GQA 4:2" if SCENARIOS[name].kind == "tensor" else "GQA 8:4"
    for result in results(name):
        assert len(result["sites"]) == compiled
        for status, form, reason in result["sites"]:
            assert (status, reason) == ("fused", "")
            assert form.startswith(f"causal, {heads}")


def test_ddp_compiles_a_graph_for_each_bucket(results: Results) -> None:
    assert all(result["graphs"] > 1 for result in results("ddp"))


def test_attention_on_dtensors_says_why_it_stays(results: Results) -> None:
    for result in results("dtensor"):
        assert len(result["sites"]) == LAYERS
        for status, _, reason in result["sites"]:
            assert status == "rejected"
            assert "DTensor" in reason


@pytest.mark.parametrize("name", [n for n, s in SCENARIOS.items() if s.dropout])
def test_dropout_trains_and_is_repeated_by_checkpointing(name: str, results: Results) -> None:
    """Other random numbers than eager give about the same losses; recomputing draws the same ones again."""
    for result in results(name):
        eager, ours = result["losses"]
        assert ours == pytest.approx(eager, rel=0.03)
        assert result["kept"]["losses"] == pytest.approx(ours, rel=1e-6)
        assert result["kept"]["gradients"] < 1e-5


# ---- the graph pass beside DTensors, in this process ---------------------------------------------------------------------
@pytest.fixture
def mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A mesh of this process alone."""
    if sys.platform == "linux":
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None = None) -> Tensor:
    scores = q @ k.transpose(-2, -1) * 0.3
    return torch.softmax(scores if keep is None else scores.masked_fill(~keep, -1e9), -1) @ v


def compiled_like_eager(fn: Callable[..., Tensor], *inputs: Any) -> Fusing:
    backend = Fusing()
    torch.testing.assert_close(torch.compile(fn, backend=backend)(*inputs), fn(*inputs))
    return backend


def test_mask_and_operands_out_of_dtensors(mesh: Any) -> None:
    from torch.distributed.tensor import distribute_tensor

    q, k, v, keep = (distribute_tensor(x, mesh) for x in (*torch.randn(3, 2, 2, 8, 4), torch.rand(8, 8) > 0.3))
    backend = compiled_like_eager(lambda *xs: attention(*(x.to_local() for x in xs)), q, k, v, keep)
    assert [site.form for site in backend.report.fused] == ["mask"]


def test_dtensors_themselves(mesh: Any) -> None:
    from torch.distributed.tensor import distribute_tensor

    q, k, v = (distribute_tensor(x, mesh) for x in torch.randn(3, 2, 2, 8, 4))
    backend = compiled_like_eager(lambda *xs: attention(*xs).to_local(), q, k, v)
    assert [("DTensor" in reason) for reason in backend.reasons] == [True]


def test_writes_beside_dtensors(mesh: Any) -> None:
    """The local tensor is the DTensor's memory: after the write the product sees other queries than the projection gave."""
    from torch.distributed.tensor import distribute_tensor

    def fn(x: Any, k: Tensor, v: Tensor) -> Tensor:
        q = (x * 2).to_local()
        q.add_(1)
        return attention(q, k, v)

    x, k, v = torch.randn(3, 2, 2, 8, 4)
    backend = compiled_like_eager(fn, distribute_tensor(x, mesh), k, v)
    assert [("writes in place" in reason) for reason in backend.reasons] == [True]
