"""What flash attention can reach on a GPU, by a model of its kernels, beside what was measured.

    python -m benchmarks.roofline                          # H200 beside measurements, A100 and B200 beside published ones
    python -m benchmarks.roofline --arch sm_86             # one GPU: predicted times of the default tiles
    python -m benchmarks.roofline --rank                   # where the model ranks the default tiles of templates/configs.py
    python -m benchmarks.roofline --fit                    # fit the three factors again
    python -m benchmarks.roofline --json out.json          # the same as JSON

``_feeds.py`` counts cycles of each part of an SM for one tile, ``_schedule.py`` makes times of calls of them. Nothing here
runs a GPU. Three numbers are fitted, on the rows of MEASURED: how much of a step the two families of kernels leave exposed, and
the clock that the tensor cores sustain (:class:`benchmarks._schedule.Factors`). On other GPUs the same factors are assumed.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from benchmarks import _common, _feeds
from benchmarks._feeds import MACHINES, Machine, Tile
from benchmarks._schedule import REGISTERS, Factors, Kernel, Shape, kernel_seconds, kernel_step, seconds
from fa_inductor.templates import configs, select

#: Columns of tensor memory of an SM (PTX ISA, "Tensor Memory").
TENSOR_MEMORY = 512
#: Fitted by --fit to MEASURED.
FACTORS = Factors(general=0.35, gluon=0.25, clock=0.75)


def parse_tile(text: str) -> Tile:
    """``64x128w8s3``: queries, keys, warps, stages."""
    rows, rest = text.split("x")
    keys, rest = rest.split("w")
    warps, stages = rest.rstrip("T").split("s")
    return Tile(int(rows), int(keys), int(warps), int(stages))


def general(which: str, tile: str, loops: int = 1) -> Kernel:
    return Kernel(which, parse_tile(tile), loops=loops)


def gluon_forward(dim: int) -> Kernel:
    """The forward of templates/sm90: 64 rows a consumer of four warps, a program an SM."""
    return Kernel("forward", parse_tile({64: "192x128w12s2", 128: "128x128w8s2", 256: "128x64w8s2"}[dim]), True, True)


def gluon_backward(dim: int) -> Kernel:
    tile = {64: "128x128w8s2", 128: "64x128w8s2", 256: "64x64w8s2"}[dim]
    return Kernel("wide" if dim > 128 else "fused", parse_tile(tile), True)


@dataclass(frozen=True)
class Row:
    """A measurement: of the forward or the backward of a case, and the kernels that ran then."""

    case: str
    source: str
    kernels: tuple[Kernel, ...]
    tflops: float | None = None

    @property
    def backward(self) -> bool:
        return self.kernels[0].which != "forward"

    @property
    def label(self) -> str:
        return ("gluon " if self.kernels[0].gluon else "general ") + ("backward" if self.backward else "forward")


def shape_of(case: str) -> Shape:
    """The shape of a case of attention.py that the model knows: no score program but a scale, a mask that is a band."""
    if case.startswith("gqa"):
        return Shape(2, 32, 8, 8192, 128, True)
    if case.startswith("window"):
        return Shape(4, 16, 16, 4096, 128, True, 1024)
    if case.startswith("sinks"):
        return Shape(4, 16, 16, 4096, 128, True)
    dim, length, *causal = case[1:].split("_")
    n = int(length[1:].replace("k", "")) * (1024 if "k" in length else 1)
    heads = 2048 // int(dim)
    return Shape(16384 // n, heads, heads, n, int(dim), bool(causal))


#: (case, forward, dK/dV, dQ): the tiles that templates/configs.py chose when attention_h200.json was measured.
_CAUSAL = ("64x64w4s3", "64x64w4s2", "128x64w8s3")
_GENERAL = {
    "d64_s4k": ("64x128w4s2", "64x64w4s2", "64x64w4s2"),
    "d64_s4k_causal": ("64x64w4s3", "64x64w4s2", "64x64w4s3"),
    "d128_s512": ("64x64w4s3", "64x128w8s3", "128x32w8s3"),
    "d128_s512_causal": ("64x64w4s3", "64x128w8s3", "64x64w4s2"),
    "d128_s2k_causal": _CAUSAL,
    "d128_s4k": ("128x64w4s2", "64x64w4s2", "128x64w8s3"),
    "d128_s4k_causal": _CAUSAL,
    "d128_s16k": ("128x64w4s2", "64x64w4s2", "128x64w8s3"),
    "d128_s16k_causal": _CAUSAL,
    "gqa_s8k_causal": _CAUSAL,
    "d256_s4k_causal": ("128x64w8s2", "64x64w8s2", "64x64w4s2"),
    "window_d128_s4k": _CAUSAL,
    "sinks_d128_s4k": _CAUSAL,
}
#: Rows of attention_h200_gluon.json whose forward the Gluon kernel still takes (at S 512 its launch from Python decided).
_GLUON = [c for c in _GENERAL if "s512" not in c and c not in ("d64_s4k_causal", "sinks_d128_s4k")]
#: The same when attention_h200_hopper.json was measured, with one loop over tiles of every kind.
_ONE_LOOP = {
    **{c: t for c, t in _GENERAL.items() if "s16k" not in c},
    "d64_s4k_causal": ("64x64w4s3", "32x64w4s2", "64x64w4s3"),
    "d128_s512_causal": ("64x64w4s3", "64x64w4s2", "64x64w4s2"),
    "d256_s4k_causal": ("128x64w8s2", "64x64w8s1", "64x64w4s2"),
}
#: There both passes of these ran in Gluon.
_HOPPER = [c for c in _ONE_LOOP if c in _GLUON]
#: TFLOP/s of one kernel alone at S 4096 (comments of templates/configs.py): (pass, head dim, causal, tile). Not fitted to.
_ALONE = {
    ("forward", 64, False, "64x128w4s2"): 441, ("forward", 64, False, "128x64w4s3"): 434,
    ("forward", 128, False, "128x64w4s2"): 541, ("forward", 128, False, "128x128w8s3"): 506,
    ("forward", 128, False, "64x64w4s3"): 467, ("forward", 128, True, "64x64w4s3"): 491,
    ("forward", 128, True, "128x64w4s2"): 480, ("dkdv", 128, False, "64x64w4s2"): 616,
    ("dkdv", 128, False, "64x128w8s3"): 572, ("dq", 128, False, "128x64w8s3"): 648,
    ("dq", 128, False, "64x64w4s2"): 568, ("dq", 64, False, "64x64w4s2"): 646, ("dq", 64, False, "128x64w8s3"): 631,
}  # fmt: skip


def measured() -> list[Row]:
    """The rows that the factors are fitted to: ours, from the first two of the committed results."""
    rows = []
    for case, tiles in _GENERAL.items():
        # The kernels had a loop for the tiles that a mask cuts and one for the others.
        rows += _rows(case, "attention_h200", tiles, 2 if shape_of(case).causal else 1)
    rows += [Row(c, "attention_h200_gluon", (gluon_forward(shape_of(c).dim),)) for c in _GLUON]
    return _with_tflops(rows, "ours")


def held_out() -> list[Row]:
    """Rows that came later: the general kernels with one loop, and both Gluon passes."""
    source = "attention_h200_hopper"
    rows = [r for case, tiles in _ONE_LOOP.items() for r in _rows(case, source, tiles, 1)]
    dims = {c: shape_of(c).dim for c in _HOPPER}
    ours = [Row(c, source, (make(d),)) for c, d in dims.items() for make in (gluon_forward, gluon_backward)]
    return _with_tflops(rows, "general") + _with_tflops(ours, "ours")


def _rows(case: str, source: str, tiles: tuple[str, str, str], loops: int) -> list[Row]:
    forward, dkdv, dq = (general(w, t, loops) for w, t in zip(("forward", "dkdv", "dq"), tiles, strict=True))
    return [Row(case, source, (forward,)), Row(case, source, (dkdv, dq))]


def _with_tflops(rows: Sequence[Row], provider: str) -> list[Row]:
    found = {}
    for source in {r.source for r in rows}:
        for r in json.loads((_common.RESULTS / f"{source}.json").read_text())["results"]:
            if r["provider"] == provider:
                found[source, r["case"]] = r
    return [replace(r, tflops=found[r.source, r.case][f"{'backward' if r.backward else 'forward'}_tflops"]) for r in rows]


def predict(machine: Machine, kernels: tuple[Kernel, ...], shape: Shape, factors: Factors = FACTORS) -> dict[str, Any]:
    """Milliseconds, TFLOP/s (products that the algorithm needs, not those that a split repeats) and the longest part."""
    time = seconds(machine, kernels, shape, factors)
    backward = kernels[0].which != "forward"
    bounds = [_feeds.bound(kernel_step(machine, k, shape.dim)) for k in kernels]
    return {"ms": time * 1e3, "tflops": shape.flops(backward) / time * 1e-12, "bound": "/".join(dict.fromkeys(bounds))}


def errors(rows: Sequence[Row], factors: Factors) -> list[float]:
    """Predicted over measured time, less 1."""
    found = []
    for r in rows:
        assert r.tflops is not None
        found.append(r.tflops / predict(MACHINES[90], r.kernels, shape_of(r.case), factors)["tflops"] - 1)
    return found


def fit(rows: Sequence[Row]) -> Factors:
    """The factors with the smallest mean absolute error, one after the other on a grid of 0.05 until none moves."""
    grids = {"general": range(21), "gluon": range(21), "clock": range(14, 21)}
    best = Factors(0.5, 0.5, 0.8)

    def loss(f: Factors) -> float:
        return statistics.fmean(abs(e) for e in errors(rows, f))

    while True:
        start = best
        # The clock and an exposure trade places: they move together.
        for name in ("general", "gluon"):
            tries = [replace(best, **{name: x / 20, "clock": c / 20}) for x in grids[name] for c in grids["clock"]]
            best = min([best, *tries], key=loss)
        if best == start:
            return best


def hopper() -> dict[str, Any]:
    """Measured and predicted, row by row, with medians of the absolute error."""
    result: dict[str, Any] = {"factors": asdict(FACTORS)}
    for name, rows in (("fitted", measured()), ("held_out", held_out())):
        table: list[dict[str, Any]] = []
        for r, e in zip(rows, errors(rows, FACTORS), strict=True):
            p = predict(MACHINES[90], r.kernels, shape_of(r.case))
            table.append({"case": r.case, "kernels": r.label, "bound": p["bound"], "measured": r.tflops,
                          "predicted": p["tflops"], "error": e})  # fmt: skip
        result[name] = table
        result[f"{name}_median"] = statistics.median(abs(r["error"]) for r in table)
    alone: list[dict[str, Any]] = []
    for (which, dim, causal, tile), tflops in _ALONE.items():
        shape = Shape(4, 2048 // dim, 2048 // dim, 4096, dim, causal)
        value = alone_tflops(MACHINES[90], general(which, tile), shape)
        alone.append({"pass": which, "dim": dim, "causal": causal, "tile": tile, "measured": tflops, "predicted": value,
                      "error": tflops / value - 1})  # fmt: skip
    return {**result, "alone": alone, "alone_median": statistics.median(abs(r["error"]) for r in alone)}


def alone_tflops(machine: Machine, kernel: Kernel, shape: Shape) -> float:
    """TFLOP/s of one kernel by its own products, as tune_tiles.py counts them."""
    products = {"forward": 2, "dkdv": 4, "dq": 3}[kernel.which]
    return shape.flops(False) * products / 2 / kernel_seconds(machine, kernel, shape, FACTORS) * 1e-12


# ------------------------------------------------------------------------------------------------------ other GPUs
def default_kernels(arch: int, shape: Shape) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...]]:
    """(forward, backward) of the general templates with the first rows of templates/configs.py."""
    family = select.architecture((arch // 10, arch % 10))
    assert family is not None
    use = configs.Use(
        family, 2, shape.dim, shape.dim, keys=shape.length, masked=shape.causal, shared=MACHINES[arch].block
    )  # fmt: skip
    lean = {w: shape.window is None and (w != "dkdv" or shape.heads == shape.kv_heads) for w in ("forward", "dkdv", "dq")}
    forward, dkdv, dq = (Kernel(w, tile_of(configs.candidates(replace(use, lean=x), w)[0])) for w, x in lean.items())
    return (forward,), (dkdv, dq)


def tile_of(config: configs.TileConfig) -> Tile:
    return Tile(config.block_m, config.block_n, config.num_warps, config.num_stages)


#: What others published, TFLOP/s: (arch, kernel family and tiles as they are in the source, shape, figure, source).
_FA2 = "FlashAttention-2, arXiv 2307.08691, abstract: 50 to 73 % of the peak; the upper end"
_FA4 = "FlashAttention-4, arXiv 2603.05451, abstract: up to 1613 TFLOP/s, 71 % of the peak"
_TRITON = "the same abstract: 2.7 times Triton's"
_LONG = Shape(1, 16, 16, 32768, 128)
#: The shape of the best figure is not in an abstract: a long one is taken.
PUBLISHED: list[tuple[int, str, tuple[Kernel, ...], Shape, float, str]] = [
    (80, "FlashAttention-2, 128x64w4", (general("forward", "128x64w4s2"),), _LONG, 0.73 * 312, _FA2),
    (100, "FlashAttention-4, 2 x 128 rows", (Kernel("forward", Tile(256, 128, 8), True, True),), _LONG, 1613, _FA4),
    (100, "Triton, with our default tile", default_kernels(100, _LONG)[0], _LONG, 1613 / 2.7, _TRITON),
]


def other(arch: int) -> dict[str, Any]:
    """Predicted times of the default tiles on a GPU that was not at hand."""
    machine, rows = MACHINES[arch], []
    for dim, length, causal in product((64, 128, 256), (512, 4096, 16384), (False, True)):
        shape = Shape(16384 // length, 2048 // dim, 2048 // dim, length, dim, causal)
        for kernels in default_kernels(arch, shape):
            p = predict(machine, kernels, shape)
            what = "forward" if kernels[0].which == "forward" else "backward"
            tiles = " ".join(f"{k.tile.rows}x{k.tile.keys}w{k.tile.warps}" for k in kernels)
            rows.append({"dim": dim, "length": length, "causal": causal, "pass": what, "tiles": tiles, **p,
                         "peak": p["tflops"] * 1e12 / machine.peak})  # fmt: skip
    published = []
    for found, name, kernels, shape, figure, source in PUBLISHED:
        if found == arch:
            p = predict(machine, kernels, shape)
            published.append({"what": name, "dim": shape.dim, "length": shape.length, "published": figure,
                              "predicted": p["tflops"], "bound": p["bound"], "source": source})  # fmt: skip
    return {"gpu": machine.name, "rows": rows, "published": published}


# -------------------------------------------------------------------------------------------------------- ranking
def registers(machine: Machine, which: str, tile: Tile, dim: int) -> float:
    """32-bit values that a thread holds at least: sums of the outputs and the scores of a step (none where in tensor memory)."""
    m, n = tile.rows, tile.keys
    scores = m * n * (1 if which == "forward" else 2)
    sums = {"forward": m * dim, "dq": m * dim}.get(which, 2 * n * dim)
    if machine.instruction == "tcgen05":
        sums, scores = 0, m * n
    return (sums + scores) / (32 * tile.warps)


#: How many of these a thread may have before registers spill, roughly, by ahead-of-time compilation (triton 3.7.1). mma.sync,
#: whose operands need registers too: at 96 most tiles are clean, at 128 most spill. wgmma: 192 spill up to 40 bytes in kernels
#: that were measured fastest. tcgen05: 64 are clean, 128 spill 136 bytes and more.
HELD = {"mma.sync": 96, "wgmma": 192, "tcgen05": 64}


def tiles(machine: Machine, which: str, dim: int) -> Iterator[Tile]:
    """Tiles of a general kernel that fit in registers and shared memory of a GPU."""
    for m, n, warps in product((16, 32, 64, 128, 256), (16, 32, 64, 128, 256), (4, 8)):
        if machine.instruction == "wgmma" and (n if which == "dkdv" else m) < 64:
            continue  # no wgmma below 64 rows: mma.sync runs at half the rate or less
        if 32 * warps * 255 > REGISTERS or registers(machine, which, Tile(m, n, warps), dim) > HELD[machine.instruction]:
            continue
        if machine.instruction == "tcgen05" and _feeds.tensor_memory(which, Tile(m, n, warps), dim, dim) > TENSOR_MEMORY:
            continue
        for stages in (3, 2, 1):
            tile = Tile(m, n, warps, stages)
            if _feeds.shared_bytes(which, tile, dim, dim) <= machine.block:
                yield tile  # the model tells stages apart by their memory alone: the most that fit
                break


def rank(arch: int, which: str, dim: int, causal: bool, length: int = 4096) -> dict[str, Any]:
    """Where the model puts the default tile among :func:`tiles`, for 16384 tokens of hidden size 2048."""
    machine = MACHINES[arch]
    shape = Shape(16384 // length, 2048 // dim, 2048 // dim, length, dim, causal)
    forward, backward = default_kernels(arch, shape)
    kernel = next(k for k in (*forward, *backward) if k.which == which)
    value = alone_tflops(machine, kernel, shape)
    found = {t: alone_tflops(machine, Kernel(which, t), shape) for t in tiles(machine, which, dim)}
    found[kernel.tile] = value
    best = max(found, key=lambda t: found[t])
    text = lambda t: f"{t.rows}x{t.keys}w{t.warps}"  # noqa: E731
    others = [v for t, v in found.items() if text(t) != text(kernel.tile)]
    return {
        "arch": arch, "pass": which, "dim": dim, "causal": causal, "tile": text(kernel.tile), "tflops": value,
        "bound": _feeds.bound(kernel_step(machine, kernel, dim)),
        "rank": 1 + sum(v > value * 1.001 for v in others), "of": len(others) + 1,
        "best": text(best), "best_tflops": found[best], "behind": max(0.0, 1 - value / found[best]),
    }  # fmt: skip


def ranking(archs: Sequence[int]) -> list[dict[str, Any]]:
    return [rank(a, w, d, c) for a in archs for w in ("forward", "dkdv", "dq") for d in (64, 128, 256) for c in (False, True)]


def show(rows: Sequence[dict[str, Any]]) -> str:
    """Rows of equal keys as a table; TFLOP/s without decimals."""
    def cell(key: str, value: Any) -> Any:
        if key in ("error", "behind", "peak"):
            return f"{100 * value:+.0f} %" if key == "error" else f"{100 * value:.0f} %"
        if isinstance(value, float):
            return f"{value:.3f}" if key == "ms" else f"{value:.0f}"
        return str(value)

    return _common.table([[cell(k, v) for k, v in r.items()] for r in rows], list(rows[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", choices=[f"sm_{a}" for a in MACHINES], help="one GPU; without: sm_90, sm_80 and sm_100")
    parser.add_argument("--rank", action="store_true", help="rank the default tiles instead")
    parser.add_argument("--fit", action="store_true", help="fit the factors and stop")
    parser.add_argument("--json", metavar="FILE", help="write what is printed there as well")
    args = parser.parse_args()
    if args.fit:
        rows = measured()
        factors = fit(rows)
        print(factors, "median", statistics.median(abs(e) for e in errors(rows, factors)))
        return
    archs = [int(args.arch[3:])] if args.arch else [90, 80, 100]
    payload: dict[str, Any] = {}
    if args.rank:
        payload["ranking"] = ranking(archs if args.arch else list(MACHINES))
        print(show(payload["ranking"]))
    for arch in [] if args.rank else archs:
        if arch == 90:
            payload["sm_90"] = found = hopper()
            print(f"H200, TFLOP/s, factors {found['factors']}", show(found["fitted"]), sep="\n\n")
            print(f"\nmedian error {100 * found['fitted_median']:.1f} %\n\nNot fitted to:\n", show(found["held_out"]), sep="\n")
            print(f"\nmedian error {100 * found['held_out_median']:.1f} %\n\nOne kernel alone:\n", show(found["alone"]), sep="\n")
            print(f"\nmedian error {100 * found['alone_median']:.1f} %\n")
            continue
        payload[f"sm_{arch}"] = result = other(arch)
        print(f"{result['gpu']}, predicted for the default tiles, nothing measured\n", show(result["rows"]), "", sep="\n")
        if result["published"]:
            print(show(result["published"]), "", sep="\n")
    if args.json:
        _common.save(args.json, payload)


if __name__ == "__main__":
    main()
