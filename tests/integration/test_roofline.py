"""The model of the kernels: counts that can be done by hand, its direction, and how far it is from the committed results."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace

import pytest

from benchmarks import _common, _feeds, roofline
from benchmarks._feeds import MACHINES, Product, Tile, step
from benchmarks._schedule import Kernel, Shape, kernel_seconds, makespan, programs, seconds
from fa_inductor.templates.configs import TileConfig

SHAPE = Shape(4, 16, 16, 4096, 128)


@pytest.mark.parametrize("arch", MACHINES)
def test_peak_of_the_datasheet(arch: int) -> None:
    published = {80: 312, 86: 149.7, 89: 362, 90: 989, 100: 2250, 103: 2250, 120: 209.5}[arch]
    assert MACHINES[arch].peak * 1e-12 == pytest.approx(published, rel=2e-3)


@pytest.mark.parametrize(
    ("arch", "which", "tile", "dim", "expected"),
    [
        # FlashAttention-4 (arXiv 2603.05451) counts these for sm_100, without the copies into shared memory.
        (100, "forward", Tile(128, 128, 8), 128, {"tensor": 1024, "exp": 1024, "shared": 768}),
        (100, "fused", Tile(128, 128, 8), 128, {"tensor": 2560, "exp": 1024, "shared": 3328}),
        # notes/hopper_backward.md, with 256 cycles of copies.
        (90, "fused", Tile(64, 128, 8), 128, {"tensor": 2560, "exp": 512, "shared": 2944 - 256}),
        # 4 * 128 * 64 * 128 / 2048; K and V by each of 8 warps, Q once: (8 * 2 * 16 + 32) KiB / 128.
        (80, "forward", Tile(128, 64, 8), 128, {"tensor": 2048, "exp": 512, "shared": 2304}),
        # Half as many warps read K and V half as often.
        (80, "forward", Tile(128, 64, 4), 128, {"tensor": 2048, "exp": 512, "shared": 1280}),
    ],
)
def test_counts_by_hand(arch: int, which: str, tile: Tile, dim: int, expected: dict[str, float]) -> None:
    found = step(MACHINES[arch], which, tile, dim, dim)
    found["shared"] -= found["fill"]
    assert {k: found[k] for k in expected} == expected


@pytest.mark.parametrize(("which", "count"), [("forward", 2), ("dkdv", 4), ("dq", 3), ("fused", 5), ("wide", 5)])
def test_products(which: str, count: int) -> None:
    found = _feeds.products(which, Tile(64, 128, 8), 256, 256)
    assert sum(p.flops for p in found) == count * 2 * 64 * 128 * 256


def test_rows_shared_by_warps_are_read_by_each() -> None:
    """Eight warps on 64 rows of mma.sync: 4 parts of the rows, 2 of the columns."""
    assert _feeds._split(MACHINES[80], Product(64, 64, 128), 8) == (4, 2)
    assert _feeds._split(MACHINES[90], Product(64, 64, 128), 8) == (1, 2)
    assert _feeds._split(MACHINES[100], Product(64, 64, 128), 8) == (1, 1)


def test_steps_of_masks() -> None:
    forward, dkdv = Kernel("forward", Tile(128, 64, 8)), Kernel("dkdv", Tile(64, 64, 4))
    causal = replace(SHAPE, length=256, causal=True)
    assert programs(replace(causal, causal=False), forward) == {4: 128}
    assert programs(causal, forward) == {2: 64, 4: 64}
    # The first keys are seen by all queries, the last by their own tile; two query heads share a key head.
    assert programs(replace(causal, kv_heads=8), dkdv) == {8: 32, 6: 32, 4: 32, 2: 32}
    assert programs(replace(causal, window=64), dkdv) == {2: 192, 1: 64}


def test_makespan_quantises_waves() -> None:
    assert makespan(programs(SHAPE, Kernel("forward", Tile(128, 64, 8))), 0.0, 132) == 64 * 16  # 2048 programs: 15.5 waves
    assert makespan(programs(SHAPE, Kernel("forward", Tile(128, 64, 8))), 1.0, 1) == 65 * 2048


@pytest.mark.parametrize("arch", MACHINES)
def test_more_work_takes_longer_and_faster_parts_less(arch: int) -> None:
    machine = MACHINES[arch]
    for kernels in roofline.default_kernels(arch, SHAPE):
        time = seconds(machine, kernels, SHAPE, roofline.FACTORS)
        assert time < seconds(machine, kernels, replace(SHAPE, length=8192), roofline.FACTORS)
        assert time < seconds(machine, kernels, replace(SHAPE, heads=32, kv_heads=32), roofline.FACTORS)
        assert time > seconds(machine, kernels, replace(SHAPE, causal=True), roofline.FACTORS)
        assert time > seconds(replace(machine, sms=2 * machine.sms), kernels, SHAPE, roofline.FACTORS)
        for part in ("mma", "exps", "hbm", "l2"):
            better = replace(machine, **{part: 2 * getattr(machine, part)})
            assert time >= seconds(better, kernels, SHAPE, roofline.FACTORS)
        assert time < seconds(machine, kernels, SHAPE, replace(roofline.FACTORS, general=1.0))
        assert time > seconds(machine, kernels, SHAPE, replace(roofline.FACTORS, clock=1.0))


def test_memory_bounds_short_rows() -> None:
    """One key tile a program: what is read and written takes longer than the products."""
    shape, machine = Shape(4096, 16, 16, 64, 64), MACHINES[90]
    kernel = Kernel("forward", Tile(64, 64, 4), persistent=True)
    assert kernel_seconds(machine, kernel, shape, roofline.FACTORS) >= 4 * shape.tensor / machine.hbm


def test_error_on_the_committed_results() -> None:
    result = roofline.hopper()
    assert len(result["fitted"]) >= 30
    assert result["fitted_median"] == pytest.approx(statistics.median(abs(r["error"]) for r in result["fitted"]))
    assert result["fitted_median"] <= 0.15
    assert result["held_out_median"] <= 0.2
    assert result["alone_median"] <= 0.15


def test_ranking_holds_the_default_tile() -> None:
    for arch in (86, 90, 100):
        r = roofline.rank(arch, "forward", 128, causal=False)
        assert 1 <= r["rank"] <= r["of"]
        assert r["tflops"] <= r["best_tflops"]
        assert 0.0 <= r["behind"] < 1.0


def test_candidates_fit_their_target() -> None:
    for arch, which in ((86, "forward"), (90, "dkdv"), (100, "dq")):
        found = list(roofline.tiles(MACHINES[arch], which, 128))
        assert found
        assert all(_feeds.shared_bytes(which, t, 128, 128) <= MACHINES[arch].block for t in found)
    assert roofline.tile_of(TileConfig(64, 32, 4, 2)) == roofline.parse_tile("64x32w4s2T") == Tile(64, 32, 4, 2)


def test_tensor_memory_is_what_was_compiled() -> None:
    rows = json.loads((_common.RESULTS / "aot_table.json").read_text())["rows"]
    found = [r for r in rows if r["instructions"]["tcgen05"]]
    assert found
    for r in found:
        tile = Tile(r["config"]["block_m"], r["config"]["block_n"], r["config"]["num_warps"])
        assert _feeds.tensor_memory(r["which"], tile, r["dim"], r["dim"]) == r["tmem"], r
    # Ahead of time it is 640, more than there is.
    assert _feeds.tensor_memory("dkdv", Tile(128, 128, 8), 128, 128) > roofline.TENSOR_MEMORY


def test_program_prints_and_writes(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["roofline", "--json", str(tmp_path / "out.json")])
    roofline.main()
    printed = capsys.readouterr().out
    assert "median error" in printed
    assert "FlashAttention-4" in printed
    assert set(json.loads((tmp_path / "out.json").read_text())) == {"sm_90", "sm_80", "sm_100"}
