"""Random attention graphs through the backend against eager, for as long as you like.

    python -m benchmarks.fuzz --minutes 10                          # CPU
    python -m benchmarks.fuzz --minutes 10 --jobs 8 --ledger benchmarks/results/fuzz_totals.json
    python -m benchmarks.fuzz --minutes 10 --device cuda --seed 7   # Triton kernels, forward and backward
    python -m benchmarks.fuzz --minutes 10 --interpret              # the same in Triton's interpreter, without a GPU
    python -m benchmarks.fuzz --examples 1 --seed 3 --start 1234    # one of them again

The grammar of `tests/fuzz` writes a function: operands in any layout, heads and groups, scales, masks, biases, softcap, sinks, any
spelling of softmax, near misses of all these. It runs eagerly, in float64 and compiled; outputs and gradients may be off from
float64 by twice what eager is off, plus a rounding band of the dtype, and NaN must be where eager has it. What is a little more in
16 bits, where sums cancel, is judged by the mean over other draws of the operands, ours and eager's alike. Example `i` of a seed is
the same one whatever ran before it. A failure is shrunk and saved as a program that needs nothing but torch and fa_inductor.

Most examples are rewritten from a graph like Dynamo's (`tests/fuzz/tracing.py`) and run op by op, a twentieth of a second each;
every 20th goes through Dynamo and AOTAutograd, and every 50th through Inductor's code generation besides, which take a second
and three: for many graphs in little time make the shares smaller (`--whole-every 100 --codegen-every 1000 --dynamic-every 10`).
On a GPU the ops launch the Triton kernels themselves, and two dozen graphs in a row spell the same attention, so that they share
kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

if __name__ == "__main__" and "--interpret" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported, here and in the processes that this one starts

import torch  # noqa: E402

from benchmarks import _fuzz_jobs, _fuzz_ledger, _fuzz_repro  # noqa: E402
from benchmarks._fuzz_tally import Tally  # noqa: E402
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
    """Draws for the grammar: those in ``given`` first, then from ``source``, then always the first and simplest option.

    ``meaning``: the source, where it is another one, of what says what is computed and not how it is written.
    """

    def __init__(
        self, given: Sequence[int] = (), source: random.Random | None = None, meaning: random.Random | None = None
    ) -> None:
        self.given, self.made = list(given), []
        # Some examples are plainer than others: where everything is drawn evenly, few are still attention.
        plain = lambda r: r.choice((0.0, 0.3, 0.6)) if r is not None else 1.0  # noqa: E731
        self._own = source, plain(source)
        self._meaning = self._own if meaning is None else (meaning, plain(meaning))
        self.turn(False)

    def turn(self, meaning: bool) -> None:
        self.source, self.plain = self._meaning if meaning else self._own

    def pick(self, options: Sequence[T]) -> T:
        position = len(self.made)
        if position < len(self.given):
            chosen = min(self.given[position], len(options) - 1)
        else:
            plain = self.source is None or self.source.random() < self.plain
            chosen = 0 if plain or self.source is None else self.source.randrange(len(options))
        self.made.append(chosen)
        return options[chosen]


@dataclass(frozen=True)
class Through:
    """What an example goes through: Dynamo and AOTAutograd (``whole``), and Inductor's code generation (``codegen``).

    ``dynamic``: Dynamo with run-time sizes, where the example draws that; otherwise its sizes are known all the same.
    """

    whole: bool = False
    codegen: bool = False
    dynamic: bool = True

    @staticmethod
    def of(index: int, args: argparse.Namespace) -> Through:
        every = lambda n: (index + 1) % n == 0  # noqa: E731
        codegen = every(args.codegen_every)
        whole = codegen or every(args.whole_every)
        return Through(whole, codegen, whole or every(args.dynamic_every))


@dataclass
class Case:
    """One graph and how it is compiled; ``trace`` are the choices that make it."""

    example: Example
    options: dict[str, Any]
    blocks: tuple[int, int]
    through: Through
    trace: list[int]

    @property
    def dynamo(self) -> bool:
        return self.through.whole or self.example.dynamic


@dataclass
class Verdict:
    """``kind``: ok, invalid (eager refuses it), inductor (plain Inductor fails as well), wrong, crash or hang."""

    kind: str
    case: Case
    error: str = ""
    fused: int = 0
    redrawn: int = 0

    @property
    def failed(self) -> bool:
        return self.kind in ("wrong", "crash", "hang")

    def same(self, other: Verdict) -> bool:
        """Whether both fail for one reason, as far as one can tell: the kind, and the class of an unexpected exception."""
        head = lambda v: v.error.split(":")[0] if v.kind == "crash" else ""  # noqa: E731
        return self.kind == other.kind and head(self) == head(other)


def case_of(choices: Choices, device: str, kernels: Sequence[str], through: Through) -> Case:
    """The case that the choices make. How it is compiled is drawn first, so that it survives shrinking of the rest."""
    kernel = choices.pick(list(kernels))
    blocks = choices.pick(BLOCKS) if device == "cpu" else BLOCKS[0]
    example = generate(choices)
    example.dynamic &= through.dynamic
    options = {"kernel": kernel, **({"min_seqlen": 0} if device == "cpu" and kernel != "reference" else {})}
    return Case(example, options, blocks, through, choices.made)


def judge(case: Case, device: str, seconds: int = 0) -> Verdict:
    """Runs one case; ``seconds``: how long it may take, 0 for the device's usual time."""
    try:
        with _limit(seconds or HANG[device]), _blocks(case.blocks):
            if not valid(case.example, device):
                return Verdict("invalid", case)
            made = Compiled(case.through.whole, Options(**case.options), case.through.codegen)
            try:
                fused = run(case.example, 0, made, device, case.dynamo)
                return Verdict("ok", case, fused=fused, redrawn=made.redrawn)
            except Exception as e:
                if case.through.codegen and _plain_fails(case, device):
                    return Verdict("inductor", case, f"{type(e).__name__}: {e}")
                kind = "wrong" if isinstance(e, WrongValue) else "crash"
                return Verdict(kind, case, f"{type(e).__name__}: {e}")
    except _Hangs:
        return Verdict("hang", case, f"nothing came back within {seconds or HANG[device]} s")


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
def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0], prog="python -m benchmarks.fuzz")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default 10)")
    parser.add_argument("--examples", type=int, help="stop after so many examples")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the examples (default 1)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--interpret", action="store_true", help="on the CPU, run the Triton kernels in Triton's interpreter")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first example (default 0)")
    parser.add_argument("--out", type=Path, help="where to save a failure (default fuzz_SEED_EXAMPLE.py)")
    parser.add_argument("--kernels", help="options={'kernel': ...} to draw from (default aten,reference on CPU, auto on a GPU)")
    parser.add_argument("--whole-every", type=int, default=20, help="every which example Dynamo traces (default 20)")
    parser.add_argument("--codegen-every", type=int, default=50, help="every which example Inductor compiles (default 50)")
    parser.add_argument("--dynamic-every", type=int, default=1, help="every which one drawn so has run-time sizes (default 1)")
    parser.add_argument("--family", type=int, help="graphs in a row that spell one attention (default 1; 24 on a GPU)")
    parser.add_argument("--failures", type=int, default=5, help="stop a process after so many failures (default 5)")
    parser.add_argument("--shrink-seconds", type=float, default=120.0, help="time to simplify each failure (default 120)")
    parser.add_argument("--hang", type=int, default=0, help="seconds that one example may take (default 180; 300 on a GPU)")
    parser.add_argument("--ledger", type=Path, help="a JSON file of totals that this run is added to")
    parser.add_argument("--revision", help="of the sources, for the ledger (default: what git says)")
    args = parser.parse_args(argv)
    gpu = args.device == "cuda"
    if args.interpret:
        if gpu or args.kernels:
            parser.error("--interpret takes neither --device cuda nor --kernels")
        if os.environ.get("TRITON_INTERPRET") != "1":
            parser.error("--interpret needs TRITON_INTERPRET=1 in the environment of a program that imports this one")
        args.kernels = "reference"  # any program is fused, and launched() runs the kernels in its place
        args.codegen_every = 2**62  # generated code would run the reference
    args.family = args.family or (24 if gpu else 1)
    args.kernels = args.kernels.split(",") if args.kernels else ["auto"] if gpu else ["aten", "reference"]
    return args


def indices(args: argparse.Namespace, job: int) -> Iterator[int]:
    """The numbers of the examples of one process: whole families, in turn."""
    for number in itertools.count(job, args.jobs):
        for index in range(args.start + number * args.family, args.start + (number + 1) * args.family):
            if args.examples is None or index - args.start < args.examples:
                yield index
        if args.examples is not None and number * args.family >= args.examples:
            return


def work(args: argparse.Namespace, job: int, told: Callable[[Tally], None]) -> Tally:
    """Runs one process's examples. ``told`` gets what was seen so far before each; its ``last`` is the example that comes."""
    tally, start = Tally(), time.monotonic()
    gc.freeze()  # torch's own objects, of which there are millions, are not looked through again and again
    device = args.device
    with contextlib.ExitStack() as stack:
        if device == "cuda" or args.interpret:
            from benchmarks._fuzz_kernels import launched

            stack.enter_context(launched(device))
        for index in indices(args, job):
            if time.monotonic() - start >= 60 * args.minutes:
                break
            tally.last = index
            told(tally)
            name = f"{args.seed}/{index}"
            meaning = random.Random(f"{args.seed}/family/{index // args.family}") if args.family > 1 else None
            choices = Choices(source=random.Random(name), meaning=meaning)
            verdict = judge(case_of(choices, device, args.kernels, Through.of(index, args)), device, args.hang)
            tally.add(verdict)
            if verdict.failed:
                _save(verdict, name, args)
                if tally.failures >= args.failures:
                    break
    return tally


def _work_here(args: argparse.Namespace) -> Tally:
    """In this process, until it is asked to end (SIGTERM): what was seen until then."""
    seen, asked = Tally(), threading.Event()

    def told(tally: Tally) -> None:
        nonlocal seen
        seen = tally
        if asked.is_set():
            tally.last -= 1  # which has not run yet
            raise _fuzz_jobs.Stopped

    with _fuzz_jobs.on_termination(lambda *_: asked.set()):
        try:
            return work(args, 0, told)
        except _fuzz_jobs.Stopped:
            return seen


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 where anything failed."""
    args = parse(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: torch sees no GPU")
    start = time.monotonic()
    if args.jobs == 1:
        tally = _work_here(args)
    else:
        tally = _fuzz_jobs.run(work, command, args, 2 * (args.hang or HANG[args.device]) + args.shrink_seconds)
    seconds = time.monotonic() - start
    print(tally.line("the interpreter" if args.interpret else args.device, args.seed, args.start, seconds), flush=True)
    if args.ledger is not None:
        _fuzz_ledger.add(args.ledger, _fuzz_ledger.entry(tally, args, seconds))
    return int(tally.failures > 0)


def command(args: argparse.Namespace, name: str) -> str:
    """The command line that runs one example again."""
    text = f"python -m benchmarks.fuzz --device {args.device} --seed {args.seed} --start {name.split('/')[1]} --examples 1"
    given = {"whole-every": (args.whole_every, 20), "dynamic-every": (args.dynamic_every, 1)}
    if not args.interpret:
        given["codegen-every"] = args.codegen_every, 50
    text += " --interpret" if args.interpret else ""
    given["family"] = args.family, 24 if args.device == "cuda" else 1
    return text + "".join(f" --{option} {value}" for option, (value, usual) in given.items() if value != usual)


def _save(verdict: Verdict, name: str, args: argparse.Namespace) -> Path:
    print(f"example {name} fails: {verdict.kind}: {verdict.error.splitlines()[0]}", flush=True)
    through = verdict.case.through
    again = lambda trace: judge(case_of(Choices(trace), args.device, args.kernels, through), args.device)  # noqa: E731
    small, tried = shrink(verdict, again, args.shrink_seconds) if verdict.kind != "hang" else (verdict, 0)
    case = small.case
    path = _free(args.out or Path(f"fuzz_{name.replace('/', '_')}.py"))
    band = BANDS.get(case.example.dtype, 2e-5)
    given = arguments(case.example, 0, "cpu")
    path.write_text(
        _fuzz_repro.program(case, given, small.error, command(args, name), _fuzz_repro.versions(), band, args.device)
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
    _fuzz_jobs.quiet()
    sys.exit(main())
