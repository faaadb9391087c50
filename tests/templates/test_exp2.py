"""exp2 as a polynomial and the conditional rescale of the forward: values in Triton's interpreter, and what compilers make of
them. The default configurations have neither.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from benchmarks._aot import SHARED_LIMIT, compiled, render, request
from fa_inductor.templates import configs, exp2, select
from fa_inductor.templates.configs import TileConfig
from fa_inductor.templates.rendering import Problem
from tests.templates.families import FAMILIES

pytest.importorskip("triton")

#: Largest relative error of FlashAttention-4's polynomials (arXiv 2603.05451), by degree.
PUBLISHED = {3: 8.8e-5, 4: 3.1e-6}
CAUSAL = "attention(score=where(q_idx >= kv_idx, score * 0.088, -inf))"


def interpret(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.templates.interpret_exp2", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_polynomials_over_a_sweep() -> None:
    """Ten million float32 numbers from -126 to 127, against float64."""
    found = interpret("sweep")
    assert found["points"] > 10**7
    assert set(exp2.COEFFICIENTS) == set(PUBLISHED)
    for degree, bound in PUBLISHED.items():
        # As the comment of the coefficients says, and no worse than what is published.
        assert found[f"error{degree}"] <= {3: 7.49e-5, 4: 2.72e-6}[degree] < bound
        # -inf, -3e38, -1e4, -127, -126.75: zero. NaN stays.
        assert found[f"ends{degree}"][:6] == ["0.0"] * 5 + ["nan"]
        assert found[f"integers{degree}"]


def test_rows_whose_maximum_moves() -> None:
    """Maxima that grow by less than the threshold, by it and by more, shrink and jump: no error is added."""
    found = interpret("rows")
    assert found["nan"]
    for name, errors in found["rows"].items():
        degree = int(name.split()[1])
        assert errors["out"] <= PUBLISHED.get(degree, 0.0) + 1e-6, name
        assert errors["lse"] <= PUBLISHED.get(degree, 0.0) + 1e-5, name


#: (options, dtype, which families, bound): float32's rounding, and that of the polynomial in weights and in their sum.
_OPTIONS = [
    *(({"rescale_threshold": 8}, "float32", slice(i, None, 3), 4e-6) for i in range(3)),
    ({"poly_degree": 3}, "float32", slice(0, None, 4), 1.8e-4),
    ({"poly_degree": 4, "poly_quarters": 4}, "float32", slice(1, None, 4), 1e-5),
    ({"poly_degree": 3, "poly_quarters": 2, "rescale_threshold": 8}, "float16", slice(2, None, 4), 2e-3),
    ({"poly_degree": 3, "poly_quarters": 4}, "float16", slice(3, None, 5), 2e-3),
]


@pytest.mark.parametrize(("options", "dtype", "part", "bound"), _OPTIONS, ids=str)
def test_families(options: dict[str, int], dtype: str, part: slice, bound: float) -> None:
    """Every form: sinks, rows without keys under each convention, huge fills, dropout, packed heads."""
    names = [f.name for f in FAMILIES][part]
    found = interpret("families", dtype, json.dumps(options), *names)
    assert list(found) == names
    wrong = {(n, k): v for n, errors in found.items() for k, v in errors.items() if not v <= bound}
    assert not wrong


@pytest.mark.parametrize("arch", [80, 90, 100, 103])
def test_compiles_clean(arch: int) -> None:
    family = select.architecture((arch // 10, arch % 10))
    assert family is not None
    problem = Problem(128, 128, 1, tma=arch >= 90)
    tile = {80: TileConfig(128, 64, 8, 3), 90: TileConfig(64, 64, 4, 3)}.get(arch, TileConfig(128, 128, 8, 2, tma=True))
    plain = _compiled(arch, problem, tile)
    for options in ({"poly_degree": 3}, {"rescale_threshold": 8}, {"poly_degree": 3, "rescale_threshold": 8}):
        found = _compiled(arch, problem, configs.replace(tile, **options))
        assert found["stack"] == found["local"] == found["instructions"]["trap"] == 0
        assert found["shared"] <= SHARED_LIMIT[arch]
        assert found["tmem"] <= 512
        # A quarter of the exponentials is gone, but on sm_80, where the compiler does not know which keys a register holds.
        quarter = plain["instructions"]["ex2"] // 4 if "poly_degree" in options and arch >= 90 else 0
        assert found["instructions"]["ex2"] == plain["instructions"]["ex2"] - quarter


def _compiled(arch: int, problem: Problem, tile: TileConfig) -> dict[str, Any]:
    return compiled(request(arch, render(CAUSAL, problem, "forward", tile)))


def test_defaults_have_neither() -> None:
    tables = (configs._TABLE, configs._LEAN, configs._SMALL, configs._MASKED, configs._UNKNOWN)
    for row in (row for table in tables for row in table.values()):
        assert row[0].poly_degree == row[0].rescale_threshold == 0
