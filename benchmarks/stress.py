"""Random launches of the Gluon kernels for Hopper, forward and backward, against float64.

    python -m benchmarks.stress --launches 10000 --out benchmarks/results/stress_h200.json
    python -m benchmarks.stress --seed 3 --only 1234                # one launch again
    python -m benchmarks.stress --one-loop --variants 8             # the forward of templates/sm90/gluon_stream.py alone
    python -m benchmarks.stress --fp8                               # the forward in FP8

A launch draws one of ``--variants`` compiled kernels (pass, dtype, padded head dims, ends of the band, soft cap, what rows
without keys give, whether tiles end with the keys, order of dQ's additions), then what varies at run time: head dims,
lengths, batch, heads, groups, strides, the band's ends. The kernels are called as the ops call them, without torch.compile.
Some rows of a head, the first and the last among them, are computed in float64 and in the kernel's precision: products of
rounded operands in float32, P and dS rounded before theirs. The kernel's error, in the norm over these rows, may be twice
the latter's and two units in the last place; the backward gets the out and lse of the kernel's forward on every side. NaN
must be where it is in float64, and where additions have an order two launches must give the same bits.

The variants are shared out among processes, which report after each block of launches; a process that is silent for
``--timeout`` seconds counts as hanging.
"""

from __future__ import annotations

import argparse
import multiprocessing
import queue
import random
import sys
import time
import traceback
from collections import Counter
from dataclasses import replace
from typing import Any

import torch

from benchmarks._common import RESULTS, arguments, environment, save
from benchmarks._stress import Launch, Variant
from fa_inductor.templates.quantise import FORMATS

#: Launches between reports.
BLOCK = 50


def drawn(seed: int, variants: int, index: int, one_loop: bool = False, fp8: bool = False) -> Launch:
    variant = Variant.draw(random.Random(f"{seed} {index % variants}"))
    if one_loop:  # what that kernel takes
        variant = replace(
            variant, backward=False, padded=(128, 128), low=False, high=True, softcap=False, even=True, deterministic=False
        )
    if fp8:
        format = random.Random(f"{seed} {index % variants} fp8").choice(tuple(FORMATS))
        variant = replace(variant, backward=False, deterministic=False, format=format)
    return Launch(variant, random.Random(f"{seed} {variants} {index}"))


def work(seed: int, variants: int, one_loop: bool, fp8: bool, indices: list[int], found: Any, share: int) -> None:
    """Run launches in blocks; put (``share``, block, its ratios or the text of a failure) after each."""
    from fa_inductor.templates.sm90 import form, launch

    if one_loop:
        launch.SHORT = 2**31
    form.FEWEST, form.LEAST_WORK, form.LEAST_BACKWARD_WORK = 1, 0.0, 0.0
    for start in range(0, len(indices), BLOCK):
        block = indices[start : start + BLOCK]
        try:
            ratios = torch.stack([drawn(seed, variants, i, one_loop, fp8).run() for i in block]).tolist()
        except Exception:
            found.put((share, block, traceback.format_exc()))
            return
        found.put((share, block, ratios))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=10_000)
    parser.add_argument("--variants", type=int, default=140)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--one-loop", action="store_true", help="the kernel whose tiles follow each other in one loop")
    parser.add_argument("--fp8", action="store_true", help="the forward in FP8")
    parser.add_argument("--only", type=int, help="the number of one launch")
    parser.add_argument("--jobs", type=int, default=14, help="processes")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds of silence that count as a hang")
    parser.add_argument("--out", default=str(RESULTS / "stress.json"))
    args = parser.parse_args()
    launch_of = lambda i: drawn(args.seed, args.variants, i, args.one_loop, args.fp8)  # noqa: E731
    kind = " --one-loop" * args.one_loop + " --fp8" * args.fp8
    again = f"python -m benchmarks.stress --seed {args.seed} --variants {args.variants}{kind} --only"
    shares = [[i for i in range(args.launches) if i % args.variants % args.jobs == j] for j in range(args.jobs)]
    if args.only is not None:
        shares = [[args.only]]
    context = multiprocessing.get_context("spawn")
    found, begun = context.Queue(), time.monotonic()
    processes = [
        context.Process(target=work, args=(args.seed, args.variants, args.one_loop, args.fp8, share, found, j), daemon=True)
        for j, share in enumerate(shares)
    ]
    for process in processes:
        process.start()
    missing, heard = [list(share) for share in shares], [time.monotonic()] * len(shares)
    worst: dict[str, tuple[float, int]] = {}
    counts: Counter[str] = Counter()
    failures: list[tuple[str, int]] = []
    while any(missing) and not failures:
        try:
            j, block, ratios = found.get(timeout=1.0)
        except queue.Empty:
            silent = [m[:BLOCK] for m, at in zip(missing, heard, strict=True) if m and time.monotonic() - at > args.timeout]
            failures += [(f"no answer in {args.timeout} s from launches {m}", m[0]) for m in silent]
            continue
        missing[j], heard[j] = missing[j][len(block) :], time.monotonic()
        if isinstance(ratios, str):
            failures.append((f"{ratios}in one of the launches {block}, the first of which is", block[0]))
            continue
        for i, ratio in zip(block, ratios, strict=True):
            name = launch_of(i).variant.name
            counts[name] += 1
            worst[name] = max(worst.get(name, (0.0, i)), (ratio, i))
            if not ratio <= 1.0:
                failures.append((f"error {ratio:.3g} times what is allowed: {launch_of(i)}", i))
    for process in processes:
        process.kill()
    seconds = time.monotonic() - begun
    for text, i in failures:
        print(f"{text}\n  {again} {i}")
    for name, (ratio, i) in sorted(worst.items()):
        print(f"{name:28s} {counts[name]:6d} launches, worst error {ratio:.3f} of what is allowed (launch {i})")
    print(f"{counts.total()} launches, seed {args.seed}, {seconds:.0f} s, {len(failures)} failures")
    if args.only is None:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
        save(args.out, {
            "arguments": arguments(), "device": device, "environment": environment(), "seed": args.seed,
            "variants": args.variants, "seconds": round(seconds), "launches": dict(counts),
            "worst error over what is allowed": {name: round(ratio, 3) for name, (ratio, _) in worst.items()},
            "failures": [text for text, _ in failures],
        })  # fmt: skip
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
