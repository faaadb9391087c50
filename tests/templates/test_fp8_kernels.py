"""The cast to FP8 and the FP8 kernels on a machine without a GPU: values in the interpreter, compiles for every architecture."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks._aot import SHARED_LIMIT, CastRequest, GluonRequest, compiled, render, request
from fa_inductor.spec import AttentionSpec
from fa_inductor.templates import tiles
from fa_inductor.templates.program import Program
from fa_inductor.templates.quantise import fp8_problem
from fa_inductor.templates.rendering import Problem
from fa_inductor.templates.sm90.fp8_launch import CONFIGS

pytest.importorskip("triton")

CAUSAL = "attention(score=where(q_idx >= kv_idx, score * 0.088, -inf))"
#: The configurations' architecture of each compute capability.
ARCHITECTURES = {89: 80, 90: 90, 100: 100, 120: 80}


def test_values() -> None:
    names = ["causal", "softcap_bias", "padding_causal_finfo", "sinks_window", "run_time_sizes"]
    command = [sys.executable, "-m", "tests.templates.interpret_fp8", *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr[-3000:]


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("arch", list(ARCHITECTURES))
def test_default_configuration(arch: int, dim: int) -> None:
    problem = fp8_problem(Problem(dim, dim, 1))
    table = ARCHITECTURES[arch]
    config = tiles.choose(Program.of(AttentionSpec.parse(CAUSAL), problem), problem, table, "forward")[0]
    report = compiled(request(arch, render(CAUSAL, problem, "fp8", config)))
    found = report["instructions"]
    kind = {90: "wgmma", 100: "tcgen05"}.get(arch, "mma.sync")
    assert found["fp8"] == found[kind] > 0
    assert found["bulk_load"] > 0 or table == 80
    assert report["shared"] <= SHARED_LIMIT[arch]
    assert found["trap"] == report["stack"] == report["local"] == 0


@pytest.mark.parametrize("arch", [89, 90, 120])
def test_integers(arch: int) -> None:
    problem = fp8_problem(Problem(128, 128, 1))
    table = ARCHITECTURES[arch]
    config = tiles.choose(Program.of(AttentionSpec.parse(CAUSAL), problem), problem, table, "forward")[0]
    report = compiled(request(arch, render(CAUSAL, problem, "fp8", config), scores="i8"))
    found = report["instructions"]
    assert found["fp8"] > 0
    assert found["fp8"] + found["int8"] == found["wgmma" if arch == 90 else "mma.sync"]
    assert found["trap"] == report["stack"] == report["local"] == 0


@pytest.mark.parametrize(
    ("dims", "options"),
    [
        ((64, 64), {"has_high": True}),
        ((64, 64), {"even": False, "has_high": True, "has_low": True, "softcap": True}),
        ((128, 128), {"has_high": True, "integer": True}),
        ((128, 128), {}),
        ((128, 128), {"has_high": True}),
        ((128, 128), {"even": False, "has_high": True, "has_low": True, "softcap": True}),
        ((128, 64), {"has_high": True, "has_low": True}),
        ((256, 256), {}),
        ((256, 256), {"has_high": True}),
        ((256, 256), {"even": False, "has_high": True, "has_low": True, "softcap": True}),
        ((256, 128), {"has_high": True, "integer": True}),
    ],
)
def test_gluon_forward(dims: tuple[int, int], options: dict[str, bool]) -> None:
    found = compiled(GluonRequest(*dims, CONFIGS[dims[0]], **options))
    assert found["shared"] <= SHARED_LIMIT[90]
    assert found["instructions"]["fp8"] + found["instructions"]["int8"] == found["instructions"]["wgmma"]
    assert found["instructions"]["fp8"] > 0
    assert (found["instructions"]["int8"] > 0) == options.get("integer", False)
    assert found["instructions"]["bulk_load"] > 0
    assert found["instructions"]["trap"] == found["instructions"]["mma.sync"] == 0
    # Weights written into registers that a running product still reads would make ptxas wait for each product.
    assert "serialized" not in found["assembler"], found["assembler"]
    # At most four constants of a thread, which are stored before the first tile: that is where ``raises`` puts the addresses of
    # its one reduction over the warps. Masked, on an H200, that kernel was 1.14x the one before it, which has none on the stack.
    # With four parts up to ten, stored and read once a tile of queries.
    limit = 40 if dims == (256, 256) else 16 if CONFIGS[dims[0]].raises and not options.get("integer") else 0
    assert found["stack"] <= limit
    assert found["local"] == 0


@pytest.mark.parametrize(
    ("arch", "dim", "format"), [(89, 128, "e4m3"), (90, 128, "e4m3-rotated"), (90, 256, "int8-e4m3"), (100, 64, "e4m3-rotated")]
)
def test_projection(arch: int, dim: int, format: str) -> None:
    found = compiled(CastRequest(arch, dim, format, projects=True))
    kind = {90: "wgmma", 100: "tcgen05"}.get(arch, "mma.sync")
    assert found["shared"] <= SHARED_LIMIT[arch]
    assert found["instructions"][kind] > 0
    assert found["instructions"]["saturating_cast"] > 0
    assert found["instructions"]["bulk_load"] > 0 or arch == 89
    assert found["instructions"]["trap"] == found["stack"] == found["local"] == 0


@pytest.mark.parametrize(
    ("arch", "dim", "format"), [(89, 128, "e4m3-rotated"), (90, 128, "e4m3"), (90, 256, "int8-e4m3"), (100, 64, "e4m3-rotated")]
)
def test_cast(arch: int, dim: int, format: str) -> None:
    found = compiled(CastRequest(arch, dim, format))
    assert found["shared"] <= SHARED_LIMIT[arch]
    assert found["instructions"]["saturating_cast"] > 0
    assert found["instructions"]["trap"] == found["stack"] == found["local"] == 0
