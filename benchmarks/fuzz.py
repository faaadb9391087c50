"""Random attention graphs through the backend against eager, for as long as you like.

    python -m benchmarks.fuzz --minutes 10                          # CPU
    python -m benchmarks.fuzz --minutes 10 --device cuda --seed 7   # generated kernels, forward and backward
    python -m benchmarks.fuzz --examples 1 --seed 3 --start 1234    # one of them again

The grammar of `tests/fuzz` writes a function: operands in any layout, heads and groups, scales, masks, biases, softcap, sinks, any
spelling of softmax, near misses of all these. It runs eagerly, in float64 and compiled; outputs and gradients may be off from
float64 by twice what eager is off, plus a rounding band of the dtype, and NaN must be where eager has it. Example `i` of a seed is
the same one whatever ran before it. A failure is shrunk and saved as a program that needs nothing but torch and fa_inductor.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import random
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks import _fuzz_repro  # noqa: E402
from fa_inductor import cpu_flash  # noqa: E402
from fa_inductor.config import Options  # noqa: E402
from tests.fuzz.generate import Example, generate  # noqa: E402
from tests.fuzz.oracle import BANDS, Compiled, WrongValue  # noqa: E402
from tests.fuzz.running import arguments, run, valid  # noqa: E402

T = TypeVar("T")

#: Seconds that one example may take before it counts as hanging.
HANG = {"cpu": 180, "cuda": 300}
#: Blocks of query rows of the CPU kernel: as they are, and so small that the grammar's short sequences have several.
BLOCKS = ((cpu_flash.BLOCK_M, cpu_flash.DENSE_M), (4, 2))


class Choices:
    """Draws for the grammar: those in ``given`` first, then from ``source``, then always the first and simplest option."""

    def __init__(self, given: Sequence[int] = (), source: random.Random | None = None) -> None:
        self.given, self.source, self.made = list(given), source, []
        # Some examples are plainer than others: where everything is drawn evenly, few are still attention.
        self.plain = source.choice((0.0, 0.3, 0.6)) if source is not None else 1.0

    def pick(self, options: Sequence[T]) -> T:
        position = len(self.made)
        if position < len(self.given):
            chosen = min(self.given[position], len(options) - 1)
        else:
            plain = self.source is None or self.source.random() < self.plain
            chosen = 0 if plain or self.source is None else self.source.randrange(len(options))
        self.made.append(chosen)
        return options[chosen]


@dataclass
class Case:
    """One graph and how it is compiled; ``trace`` are the choices that make it."""

    example: Example
    options: dict[str, Any]
    blocks: tuple[int, int]
    codegen: bool
    trace: list[int]


@dataclass
class Verdict:
    """``kind``: ok, invalid (eager refuses it), inductor (plain Inductor fails as well), wrong, crash or hang."""

    kind: str
    case: Case
    error: str = ""
    fused: int = 0

    @property
    def failed(self) -> bool:
        return self.kind in ("wrong", "crash", "hang")

    def same(self, other: Verdict) -> bool:
        """Whether both fail for one reason, as far as one can tell: the kind, and the class of an unexpected exception."""
        head = lambda v: v.error.split(":")[0] if v.kind == "crash" else ""  # noqa: E731
        return self.kind == other.kind and head(self) == head(other)


def case_of(choices: Choices, device: str, kernels: Sequence[str], codegen: bool) -> Case:
    """The case that the choices make. How it is compiled is drawn first, so that it survives shrinking of the rest."""
    kernel = choices.pick(list(kernels))
    blocks = choices.pick(BLOCKS) if device == "cpu" else BLOCKS[0]
    example = generate(choices)
    options = {"kernel": kernel, **({"min_seqlen": 0} if device == "cpu" and kernel != "reference" else {})}
    return Case(example, options, blocks, codegen, choices.made)


def judge(case: Case, device: str) -> Verdict:
    """Runs one case."""
    try:
        with _limit(HANG[device]), _blocks(case.blocks):
            if not valid(case.example, device):
                return Verdict("invalid", case)
            made = Compiled(case.example.full, Options(**case.options), case.codegen)
            try:
                return Verdict("ok", case, fused=run(case.example, 0, made, device))
            except Exception as e:
                if case.codegen and _plain_fails(case, device):
                    return Verdict("inductor", case, f"{type(e).__name__}: {e}")
                kind = "wrong" if isinstance(e, WrongValue) else "crash"
                return Verdict(kind, case, f"{type(e).__name__}: {e}")
    except _Hangs:
        return Verdict("hang", case, f"nothing came back within {HANG[device]} s")


def _plain_fails(case: Case, device: str) -> bool:
    """Whether Inductor without us computes the example wrongly, or fails on it: then it tells nothing about us."""
    try:
        run(case.example, 0, Compiled(case.example.full, Options(enabled=False), True), device)
    except Exception:
        return True
    return False


class _Hangs(BaseException):
    pass


@contextlib.contextmanager
def _limit(seconds: int) -> Iterator[None]:
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: Any) -> None:
        raise _Hangs

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _blocks(blocks: tuple[int, int]) -> Iterator[None]:
    before = cpu_flash.BLOCK_M, cpu_flash.DENSE_M
    cpu_flash.BLOCK_M, cpu_flash.DENSE_M = blocks
    try:
        yield
    finally:
        cpu_flash.BLOCK_M, cpu_flash.DENSE_M = before


# --------------------------------------------------------------------------------------------------------------- shrinking
def shrink(verdict: Verdict, again: Callable[[list[int]], Verdict], seconds: float) -> tuple[Verdict, int]:
    """(the simplest case found that fails the same way, how many were tried). ``again`` judges a list of choices.

    The first option of every choice is the simplest, and choices that are missing take it: so shorter lists, and lists of
    smaller numbers, are simpler cases.
    """
    end, tried, best = time.monotonic() + seconds, 0, verdict
    seen = {tuple(verdict.case.trace)}
    progress = True
    while progress and time.monotonic() < end:
        progress = False
        for candidate in _simpler(best.case.trace):
            if time.monotonic() > end:
                break
            if tuple(candidate) in seen:
                continue
            seen.add(tuple(candidate))
            tried += 1
            found = again(candidate)
            if found.failed and found.same(verdict) and _size(found.case) < _size(best.case):
                best, progress = found, True
                break
    return best, tried


def _size(case: Case) -> tuple[int, int, int]:
    trace = _trimmed(case.trace)
    return len(trace), sum(trace), sum(x > 0 for x in trace)


def _trimmed(trace: list[int]) -> list[int]:
    last = max((i for i, x in enumerate(trace) if x), default=-1)
    return trace[: last + 1]


def _simpler(trace: list[int]) -> Iterator[list[int]]:
    trace = _trimmed(trace)
    length = len(trace)
    for keep in (length // 2, 3 * length // 4, length - 1):
        yield trace[:keep]
    for width in (8, 4, 2, 1):
        for at in range(length - width, -1, -1):
            if any(trace[at : at + width]):
                yield trace[:at] + trace[at + width :]
                yield [*trace[:at], *[0] * width, *trace[at + width :]]
    for at, x in enumerate(trace):
        if x > 1:
            yield [*trace[:at], x // 2, *trace[at + 1 :]]
            yield [*trace[:at], x - 1, *trace[at + 1 :]]


# -------------------------------------------------------------------------------------------------------------------- main
@dataclass
class Tally:
    """What has been run."""

    kinds: Counter[str] = field(default_factory=Counter)
    dtypes: Counter[str] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)
    fused: int = 0
    gradients: int = 0
    generated: int = 0

    def add(self, verdict: Verdict) -> None:
        self.kinds[verdict.kind] += 1
        if verdict.kind == "invalid":
            return
        case = verdict.case
        self.fused += bool(verdict.fused)
        self.dtypes[str(case.example.dtype).removeprefix("torch.")] += 1
        self.kernels[case.options["kernel"]] += 1
        self.gradients += any(i.grad for i in case.example.inputs)
        self.generated += case.codegen

    @property
    def graphs(self) -> int:
        return sum(n for kind, n in self.kinds.items() if kind != "invalid")

    def line(self, device: str, first: str, last: str, seconds: float) -> str:
        """The summary."""
        each = lambda c: ", ".join(f"{n} {name}" for name, n in c.most_common())  # noqa: E731
        failures = sum(self.kinds[k] for k in ("wrong", "crash", "hang"))
        what = f" ({each(Counter({k: self.kinds[k] for k in ('wrong', 'crash', 'hang') if self.kinds[k]}))})" if failures else ""
        return (
            f"fuzz on {device}: {self.graphs} graphs in {seconds:.0f} s, examples {first} to {last}: {failures} failures{what}; "
            f"{self.fused} fused, {self.gradients} with gradients, {self.generated} through code generation; "
            f"{each(self.dtypes)}; kernels: {each(self.kernels)}; not counted: {self.kinds['invalid']} that eager refuses, "
            f"{self.kinds['inductor']} on which plain Inductor fails too"
        )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0], prog="python -m benchmarks.fuzz")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default 10)")
    parser.add_argument("--examples", type=int, help="stop after so many examples")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first example (default 0)")
    parser.add_argument("--out", type=Path, help="where to save a failure (default fuzz_SEED_EXAMPLE.py)")
    parser.add_argument("--kernels", help="options={'kernel': ...} to draw from (default aten,reference on CPU, auto on a GPU)")
    parser.add_argument("--codegen-every", type=int, help="every which example goes through code generation (50; 1 on a GPU)")
    parser.add_argument("--failures", type=int, default=5, help="stop after so many failures (default 5)")
    parser.add_argument("--shrink-seconds", type=float, default=120.0, help="time to simplify each failure (default 120)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 where anything failed."""
    args = parse(argv)
    device = args.device
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: torch sees no GPU")
    kernels = args.kernels.split(",") if args.kernels else ["auto"] if device == "cuda" else ["aten", "reference"]
    every = args.codegen_every or (1 if device == "cuda" else 50)
    command = f"python -m benchmarks.fuzz --device {device} --seed {args.seed}"
    tally, start, index = Tally(), time.monotonic(), args.start
    with torch.device(device) if device != "cpu" else contextlib.nullcontext():
        while time.monotonic() - start < 60 * args.minutes and index - args.start != args.examples:
            name, codegen = f"{args.seed}/{index}", (index + 1) % every == 0
            verdict = judge(case_of(Choices(source=random.Random(name)), device, kernels, codegen), device)
            tally.add(verdict)
            if verdict.failed:
                _save(verdict, f"{command} --start {index}", name, args, kernels)
                if sum(tally.kinds[k] for k in ("wrong", "crash", "hang")) >= args.failures:
                    break
            index += 1
            if index % 100 == 0:
                gc.collect()
    last = max(args.start, index - (not verdict.failed if tally.kinds else 1))
    print(tally.line(device, f"{args.seed}/{args.start}", f"{args.seed}/{last}", time.monotonic() - start), flush=True)
    return int(any(tally.kinds[k] for k in ("wrong", "crash", "hang")))


def _save(verdict: Verdict, command: str, name: str, args: argparse.Namespace, kernels: Sequence[str]) -> Path:
    print(f"example {name} fails: {verdict.kind}: {verdict.error.splitlines()[0]}", flush=True)
    codegen = verdict.case.codegen
    again = lambda trace: judge(case_of(Choices(trace), args.device, kernels, codegen), args.device)  # noqa: E731
    small, tried = shrink(verdict, again, args.shrink_seconds) if verdict.kind != "hang" else (verdict, 0)
    case = small.case
    path = _free(args.out or Path(f"fuzz_{name.replace('/', '_')}.py"))
    band = BANDS.get(case.example.dtype, 2e-5)
    given = arguments(case.example, 0, "cpu")
    path.write_text(
        _fuzz_repro.program(case, given, small.error, command, _fuzz_repro.versions(), band, args.device)
    )
    lines = len(verdict.case.example.lines), len(case.example.lines)
    print(f"  shrunk from {lines[0]} to {lines[1]} lines in {tried} tries; saved to {path}", flush=True)
    return path


def _free(path: Path) -> Path:
    """``path``, or with a number behind its name where that exists."""
    found, count = path, 1
    while found.exists():
        count += 1
        found = path.with_name(f"{path.stem}-{count}{path.suffix}")
    return found


if __name__ == "__main__":
    # For the whole process, and so not main's to set.
    warnings.filterwarnings("ignore")
    logging.getLogger("fa_inductor").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    sys.exit(main())
