"""The forward that multiplies with V a step late, and dP between logits and weights: values, and what comes out of compilers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import tune_tiles
from benchmarks._aot import SHARED_LIMIT, assembler_says, compiled, render, request
from fa_inductor.spec import AttentionSpec, CacheForm
from fa_inductor.templates.configs import DP_PLACES, LATE_VALUES, TileConfig, Use, candidates
from fa_inductor.templates.forward import forward_kernel
from fa_inductor.templates.quantise import fp8_problem
from fa_inductor.templates.rendering import Problem
from fa_inductor.templates.score_codegen import CaptureInfo
from tests.templates.families import FAMILIES

pytest.importorskip("triton")

#: Bound of the relative error, as in test_interpreter.py.
BOUND = {"float32": 4e-6, "float16": 2e-3}
CAUSAL = "attention(score=where(q_idx >= kv_idx, score * 0.088, -inf))"
PROGRAMS = {
    "full": "attention(score=score * 0.088)",
    "causal": CAUSAL,
    "window": "attention(score=where((q_idx >= kv_idx) & (q_idx - kv_idx < 1024), score * 0.088, -inf))",
    "bias": "attention(score=score * 0.088 + f0[h, q_idx, kv_idx])",
    "softcap": "attention(score=where(q_idx >= kv_idx, tanh(score * 0.003) * 30.0, -inf))",
}

#: (dtype, options, which families)
_OPTIONS: list[tuple[str, dict[str, Any], slice]] = [
    ("float32", {"late_values": "registers"}, slice(0, None, 4)),
    ("float32", {"late_values": "registers", "tma": True}, slice(1, None, 4)),
    ("float32", {"late_values": "registers", "rescale_threshold": 8}, slice(2, None, 4)),
    ("float32", {"late_values": "registers", "splits": 5, "tma": True}, slice(3, None, 4)),
    ("float16", {"late_values": "registers", "tma": True}, slice(0, None, 6)),
    ("float32", {"late_values": "shared"}, slice(1, None, 4)),
    ("float32", {"late_values": "shared", "tma": True}, slice(2, None, 4)),
    ("float16", {"late_values": "shared", "splits": 2}, slice(3, None, 6)),
]


@pytest.mark.parametrize(("dtype", "options", "part"), _OPTIONS, ids=str)
def test_families(dtype: str, options: dict[str, Any], part: slice) -> None:
    """The values of the reference, and those of the kernel that multiplies at once where V is infinite or no number."""
    names = [f.name for f in FAMILIES][part]
    command = [sys.executable, "-m", "tests.templates.interpret_late", dtype, json.dumps(options), *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert [r["name"] for r in reports] == names
    assert not {(r["name"], k): v for r in reports for k, v in r["errors"].items() if not v <= BOUND[dtype]}
    assert [r["name"] for r in reports if not r["same"]] == []
    assert sum(r["infinite"] > 0 for r in reports) > len(reports) // 2


def _made(program: str, dim: int, which: str, config: TileConfig, length: int | None) -> dict[str, Any]:
    whole = tuple(frozenset({n}) for n in ("h", "q_idx", "kv_idx"))
    captures = (CaptureInfo(3, whole, tma=True),) if program == "bias" else ()
    problem = Problem(dim, dim, 1, captures, wide_captures=(False,) * len(captures), tma=True)
    if length is not None:
        problem = replace(problem, even_q=True, even_kv=True, rows=length, cols=length, square=True)
    kernel = render(PROGRAMS[program], problem, which, config)
    return compiled(replace(request(90, kernel, **({"CAP0": "bf16"} if captures else {})), text=True))


def _runs_on(ptx: str) -> bool:
    """Whether the loop's product of weights in registers is still running where its block of instructions ends."""
    weights = re.search(r"wgmma\.mma_async\S*\s*\{[^}]*\},\s*\{", ptx)
    assert weights is not None
    rest = ptx[weights.end() :]
    return "wgmma.wait_group" not in rest[: rest.index("bra")]


_LATE = [
    ("full", 64, "128x64w4s2TLS"), ("full", 64, "64x128w4s2TL"), ("causal", 64, "64x64w4s3TL"), ("window", 64, "64x128w4s2TL"),
    ("softcap", 64, "64x64w4s3TL"), ("full", 128, "64x64w4s3TL"), ("causal", 128, "64x64w4s3TL"), ("window", 128, "64x64w4s3TL"),
    ("softcap", 128, "64x64w4s3TL"), ("full", 128, "128x64w4s2TLS"), ("causal", 128, "128x64w4s2TLS"),
    ("bias", 128, "64x64w4s2TL"), ("bias", 128, "64x32w4s3TL"),
]  # fmt: skip


@pytest.mark.parametrize("length", [None, 4096])
@pytest.mark.parametrize(("program", "dim", "tile"), _LATE)
def test_late_products(program: str, dim: int, tile: str, length: int | None) -> None:
    """No spills, and wgmma is not serialised. In registers the product runs on while the softmax is computed."""
    config = tune_tiles.parse(f"forward:{dim}:full:4096:{tile}")[0][4]
    found = _made(program, dim, "forward", config, length)
    assert found["shared"] <= SHARED_LIMIT[90]
    assert found["instructions"]["wgmma"] > 0
    assert found["instructions"]["bulk_load"] > 0
    assert found["stack"] == found["local"] == 0
    assert "serialized" not in assembler_says(found["ptx"])
    assert config.late_values != "registers" or _runs_on(found["ptx"])


@pytest.mark.parametrize("length", [None, 4096])
@pytest.mark.parametrize(
    ("which", "dim", "tile"), [("dkdv", 64, "64x64w4s2TOmask"), ("dkdv", 128, "64x64w4s2TOmask"), ("dq", 128, "128x64w8s3TOmask")]
)
def test_dp_after_the_mask(which: str, dim: int, tile: str, length: int | None) -> None:
    config = tune_tiles.parse(f"{which}:{dim}:causal:4096:{tile}")[0][4]
    found = _made("causal", dim, which, config, length)
    assert found["shared"] <= SHARED_LIMIT[90]
    assert found["instructions"]["wgmma"] > 0
    # Lengths that are not known take registers: rows of that size are not for them at 128 (configs._UNKNOWN).
    assert found["local"] == 0
    assert found["stack"] <= (24 if (which, dim, length) == ("dkdv", 128, None) else 0)
    assert "serialized" not in assembler_says(found["ptx"])


def test_what_multiplies_at_once_all_the_same() -> None:
    """FP8 and caches: the same text with and without the option; other kernels' texts differ."""
    spec, tile = AttentionSpec.parse(CAUSAL), TileConfig(64, 64, 4, 3)
    plain = Problem(64, 64, 1)
    for late in LATE_VALUES[1:]:
        for problem, fp8 in ((fp8_problem(plain), True), (replace(plain, cache=CacheForm(16)), False)):
            texts = {forward_kernel(spec, problem, replace(tile, late_values=x), fp8=fp8).text for x in ("", late)}
            assert len(texts) == 1
    assert len({forward_kernel(spec, plain, replace(tile, late_values=x)).text for x in LATE_VALUES}) == 3


def test_tiles_as_text() -> None:
    """What tune_tiles prints of a tile is what it takes."""
    for text in ("64x64w4s2", "64x64w4s2T", "128x64w4s2TL", "64x64w4s3LS", "64x64w4s2TOmask", "32x64w8s1Oscore"):
        (job,) = tune_tiles.parse(f"dkdv:64:causal:512:{text}")
        assert tune_tiles.label(vars(job[4])) == text
        assert job[4].dp_place in DP_PLACES
    for wrong in ("64x64w4s2S", "64x64w4s2LT", "64x64w4s2Tdp"):
        with pytest.raises(SystemExit):
            tune_tiles.parse(f"dkdv:64:causal:512:{wrong}")


def test_few_queries_multiply_at_once() -> None:
    use = Use(arch=90, element=2, qk_pad=128, v_pad=128, rows=16)
    assert all(c.late_values == "" for c in candidates(use, "forward"))
