"""How many attentions of real models are fused, with the right values, by us and by Inductor's built-in pass.

    python benchmarks/coverage.py                 # every model, both sides, infer and train, fp32 and bf16
    python benchmarks/coverage.py --models 'hf_llama.*' --modes infer --dtypes fp32
    python benchmarks/coverage.py --sides fa_inductor --reuse benchmarks/results/coverage.json

Each model runs in a forked child of its own. See README.md in this folder for what is counted.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
import time
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT), *(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT / "benchmarks")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from benchmarks import _common, zoo  # noqa: E402

Row = dict[str, Any]


def child(name: str, modes: list[str], dtypes: list[str], sides: tuple[str, ...], path: Path, quiet: bool) -> None:
    """Measure one model; rows are on disk as soon as they exist, so that a crash loses one row only."""
    import torch

    from benchmarks._coverage_child import measure

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    if quiet:
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
    rows: list[Row] = []
    for dtype in dtypes:
        for mode in modes:
            rows += measure(name, mode, dtype, sides)
            path.write_text(json.dumps(rows))


def lost(name: str, sides: tuple[str, ...], status: str) -> list[Row]:
    model = zoo.get(name)
    head = {"model": name, "family": model.family, "kind": model.kind, "stated_sites": model.sites}
    return [{**head, "mode": "?", "dtype": "?", "side": side, "status": status} for side in sides]


def preload() -> None:
    """Import once what every child would import again; a missing library is reported by the models that need it."""
    import torch
    from torch._inductor import compile_fx, pattern_matcher  # noqa: F401
    from torch._inductor.fx_passes import joint_graph

    torch.set_num_threads(1)
    for library in ("transformers", "diffusers", "x_transformers", "timm", "open_clip"):
        try:
            zoo.base.require(library)
        except zoo.Unavailable as reason:
            print(f"unavailable: {reason}", file=sys.stderr)
    joint_graph.lazy_init(torch.device("cpu"))


def run(names: list[str], options: argparse.Namespace) -> list[Row]:
    """Fork a child a model, at most ``options.jobs`` at a time."""
    context = multiprocessing.get_context("fork")
    scratch = Path(options.json).with_suffix(".rows")
    scratch.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    waiting, running, started = list(names), {}, time.monotonic()
    if options.resume:
        kept = {name: path for name in names if (path := scratch / f"{name}.json").exists()}
        rows = [row for path in kept.values() for row in json.loads(path.read_text())]
        waiting = [name for name in names if name not in kept]
    done = len(names) - len(waiting)
    while waiting or running:
        while waiting and len(running) < options.jobs:
            name = waiting.pop(0)
            path = scratch / f"{name}.part"
            path.unlink(missing_ok=True)
            arguments = (name, options.modes, options.dtypes, options.sides, path, not options.verbose)
            process = context.Process(target=child, args=arguments)
            process.start()
            running[name] = (process, path, time.monotonic())
        time.sleep(0.05)
        for name, (process, path, since) in list(running.items()):
            status = None
            if process.is_alive():
                if time.monotonic() - since < options.timeout:
                    continue
                process.kill()
                status = "timeout"
            process.join()
            if status is None and process.exitcode:
                status = f"crash (exit code {process.exitcode})"
            found = json.loads(path.read_text()) if path.exists() else []
            found += lost(name, options.sides, status) if status else []
            path.unlink(missing_ok=True)
            path.with_suffix(".json").write_text(json.dumps(found))
            rows += found
            done += 1
            del running[name]
            print(f"[{done}/{len(names)} {time.monotonic() - started:4.0f}s] {name}: {one_line(found)}", flush=True)
    for name in names:
        (scratch / f"{name}.json").unlink(missing_ok=True)
    scratch.rmdir()
    return rows


def one_line(rows: list[Row]) -> str:
    parts = []
    for row in rows:
        label = f"{row['side'][:7]} {row['mode']} {row['dtype']}"
        if row["status"] in ("ok", "wrong"):
            mark = "" if row["status"] == "ok" else " WRONG"
            parts.append(f"{label} {row['fused']}/{row['sites'] + row['our_ops'] + row['torch_ops']}{mark}")
        else:
            parts.append(f"{label} {row['status']}")
    return "; ".join(parts)


def sites_seen(rows: list[Row]) -> dict[tuple[str, str, str], int]:
    """Attentions a model, mode and dtype: those that stand spelled out in the graph when no pass has touched it.

    The built-in side sees that graph. Without it, what our side left plus what it fused.
    """
    seen: dict[tuple[str, str, str], int] = {}
    for row in rows:
        key = (row["model"], row["mode"], row["dtype"])
        if row.get("side") == "builtin" and "sites" in row and row["status"] in ("ok", "wrong"):
            seen[key] = row["sites"] + row["torch_ops"]
        elif row["status"] in ("ok", "wrong"):
            seen.setdefault(key, row["sites"] + row["our_ops"] + row["torch_ops"])
    return seen


def summary(rows: list[Row]) -> str:
    """Tables by family, look-alikes, wrong values, and the sites that we left with the reason."""
    seen = sites_seen(rows)
    measured = {(row["mode"], row["dtype"]) for row in rows}
    combos = [(mode, dtype) for mode in ("infer", "train") for dtype in ("fp32", "bf16") if (mode, dtype) in measured]
    totals: dict[str, dict[Any, int]] = defaultdict(lambda: defaultdict(int))
    models: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        if row["kind"] not in ("pos", "sdpa") or row["status"] not in ("ok", "wrong"):
            continue
        key = (row["model"], row["mode"], row["dtype"])
        for family in (row["family"], "all"):
            models[family].add(row["model"])
            totals[family][row["side"], row["mode"], row["dtype"]] += min(row["fused"], seen[key])
            totals[family]["seen", row["side"], row["mode"], row["dtype"]] += seen[key]
    sides = [side for side in ("builtin", "fa_inductor") if any(row["side"] == side for row in rows)]
    headers = ["family", "models", *(f"{side} {mode} {dtype}" for mode, dtype in combos for side in sides)]
    lines = []
    for family in [*sorted(set(totals) - {"all"}), *(["all"] if "all" in totals else [])]:
        cells = []
        for mode, dtype in combos:
            for side in sides:
                fused, total = totals[family][side, mode, dtype], totals[family]["seen", side, mode, dtype]
                cells.append(f"{fused}/{total}")
        lines.append([family, len(models[family]), *cells])
    text = ["Sites fused / sites seen, models that hold softmax attention:", _common.table(lines, headers), ""]
    counts = [
        [
            side,
            *(
                sum(1 for row in rows if row["side"] == side and row["status"].startswith(status))
                for status in ("ok", "wrong", "error", "crash", "timeout", "unavailable")
            ),
        ]
        for side in sides
    ]
    text += ["Runs:", _common.table(counts, ["side", "right", "wrong", "error", "crash", "timeout", "unavailable"]), ""]
    bad = [row for row in rows if row["status"] not in ("ok", "unavailable")]
    bad += [row for row in rows if row["kind"] == "neg" and row["status"] == "ok" and row["fused"]]
    listing = [[row["side"], row["model"], row["kind"], row["mode"], row["dtype"], verdict(row)] for row in bad]
    text += [
        "Wrong, failed, or fused although it must not be:",
        _common.table(listing, ["side", "model", "kind", "mode", "dtype", "what"]),
        "",
    ]
    left = []
    for row in rows:
        total = seen.get((row["model"], row["mode"], row["dtype"]), 0)
        if row["side"] == "fa_inductor" and row["kind"] in ("pos", "sdpa") and row.get("fused", total) < total:
            reasons = sorted({entry["reason"] for entry in row.get("declined", []) if entry["reason"]})
            left.append([row["model"], row["mode"], row["dtype"], f"{row['fused']}/{total}", "; ".join(reasons)[:160]])
    if "fa_inductor" in sides:
        text += ["Sites that we left:", _common.table(left, ["model", "mode", "dtype", "fused", "reasons"]), ""]
    return "\n".join(text)


def verdict(row: Row) -> str:
    if row["status"] == "wrong":
        for part in ("value", "gradient"):
            found = row.get(part)
            if found and found["ratio"] > 1:
                return f"{part} of {found['worst']}: error {found['error']}, {found['ratio']:.3g} x budget"
        return "not finite"
    if row["status"] == "ok":
        return f"fused {row['fused']}"
    return f"{row['status']}: {row.get('message', '')}"[:160]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", action="append", metavar="REGEX", help="only models whose whole name matches; repeatable"
    )
    parser.add_argument(
        "--families", help="comma-separated: " + ", ".join(sorted({m.family for m in zoo.REGISTRY.values()}))
    )
    parser.add_argument("--sides", default="builtin,fa_inductor")
    parser.add_argument("--modes", default="infer,train")
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time")
    parser.add_argument("--timeout", type=float, default=600, help="seconds a model, all its runs together")
    parser.add_argument("--json", default=str(_common.RESULTS / "coverage.json"))
    parser.add_argument(
        "--resume", action="store_true", help="continue a run that was stopped, from the rows beside --json"
    )
    parser.add_argument("--reuse", metavar="JSON", help="take the rows of sides and models not run now from this file")
    parser.add_argument("--show", metavar="JSON", help="print the tables of an earlier run, measure nothing")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="let the children write to the terminal")
    options = parser.parse_args(arguments)
    for field in ("modes", "dtypes", "sides"):
        setattr(options, field, [part for part in getattr(options, field).split(",") if part])
    options.sides = tuple(options.sides)
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    names = zoo.names(options.families.split(",") if options.families else None)
    if options.models:
        names = [name for name in names if any(re.fullmatch(pattern, name) for pattern in options.models)]
    if options.list:
        print("\n".join(names))
        return 0
    if options.show:
        print(summary(json.loads(Path(options.show).read_text())["rows"]))
        return 0
    preload()
    rows = run(names, options)
    if options.reuse:
        ran = {(row["model"], row["side"]) for row in rows}
        rows += [
            row for row in json.loads(Path(options.reuse).read_text())["rows"] if (row["model"], row["side"]) not in ran
        ]
    _common.save(options.json, {"environment": _common.environment(), "command": _common.arguments(), "rows": rows})
    print(summary(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
