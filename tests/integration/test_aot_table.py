"""The committed table of ahead-of-time compiles is of the kernels as they are, and a compile gives what it says."""

from __future__ import annotations

import json

import pytest

from benchmarks import _aot, _common, aot_table
from benchmarks.aot_table import Case
from fa_inductor._compat import triton_version

TABLE = json.loads((_common.RESULTS / "aot_table.json").read_text())
RENEW = "renew it: python -m benchmarks.aot_table --resume"
#: Fast compiles of four families: mma.sync with and without a mask, wgmma, tcgen05.
SAMPLE = (
    Case(86, "general", "dkdv", 64, "causal"),
    Case(120, "general", "dq", 64, "plain"),
    Case(90, "general", "dq", 64, "plain"),
    Case(100, "general", "forward", 64, "plain"),
    Case(103, "general", "dq", 256, "causal"),
    Case(89, "general", "forward", 256, "plain"),
)


def row_of(case: Case) -> dict:
    return next(r for r in TABLE["rows"] if tuple(r[k] for k in aot_table.KEY) == case.key)


def test_table_has_every_default_kernel() -> None:
    keys = [tuple(r[k] for k in aot_table.KEY) for r in TABLE["rows"]]
    assert keys == [c.key for c in aot_table.cases()], RENEW


def test_rows_are_of_the_kernels_as_they_are() -> None:
    stale = [c.key for c in aot_table.cases() if not aot_table.current(row_of(c), c)]
    assert not stale, RENEW


@pytest.mark.parametrize("case", SAMPLE, ids=lambda c: "-".join(map(str, c.key)))
def test_sample_compiles_to_what_the_table_says(case: Case) -> None:
    found = triton_version()
    if found != TABLE["triton"]:
        pytest.skip(f"the table is of triton {TABLE['triton']}, this is {found or 'no triton'}")
    made, row = aot_table.compile_case(case), row_of(case)
    assert {k: made[k] for k in made} == {k: row[k] for k in made}, RENEW


@pytest.mark.parametrize("arch", aot_table.ARCHITECTURES)
def test_default_kernels_run_on_their_target(arch: int) -> None:
    """No spills, no trap stub, shared and tensor memory within the limits, and the instructions of the architecture."""
    rows = [r for r in TABLE["rows"] if r["arch"] == arch]
    product = "tcgen05" if arch in (100, 103) else "wgmma" if arch == 90 else "mma.sync"
    for r in rows:
        made, name = r["instructions"], tuple(r[k] for k in aot_table.KEY)
        assert r["stack"] == r["local"] == 0, name
        assert made["trap"] == 0, name
        assert r["shared"] <= _aot.SHARED_LIMIT[arch], name
        assert r["tmem"] <= aot_table.TENSOR_MEMORY, name
        assert made[product] > 0, name
        assert aot_table.problems(r) == r["problems"] == [], name


def test_problems_are_found() -> None:
    row = row_of(SAMPLE[0])
    assert aot_table.problems(row) == []
    assert aot_table.problems({**row, "shared": row["shared_limit"] + 1})[0].startswith("shared")
    assert aot_table.problems({**row, "stack": 8})[0].startswith("spills")
    assert aot_table.problems({**row, "tmem": 513})[0].startswith("tensor memory")
    none = dict.fromkeys(row["instructions"], 0)
    assert aot_table.problems({**row, "instructions": none}) == ["no mma.sync", "no cp.async"]


def test_limits_are_those_of_the_targets() -> None:
    assert {r["arch"]: r["shared_limit"] for r in TABLE["rows"]} == _aot.SHARED_LIMIT
    for r in TABLE["rows"]:
        assert ("fits" in r) == (r["shared"] > r["shared_limit"])


def test_smaller_tiles_shrink() -> None:
    default = aot_table.candidates(Case(86, "general", "forward", 256, "plain"))[0]
    found = list(aot_table.smaller(default))
    assert found[0] == default
    areas = [c.block_m * c.block_n for c in found]
    assert areas == sorted(areas, reverse=True)
    assert min(min(c.block_m, c.block_n) for c in found) == 16
