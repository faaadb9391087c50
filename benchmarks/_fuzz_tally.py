"""What a run of the fuzzer has seen."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

FAILED = ("wrong", "crash", "hang")


@dataclass
class Tally:
    """Counts of verdicts and of what the examples were.

    ``redrawn``: those right by the mean over other draws, where the first was off by chance (tests/fuzz/oracle.py). ``last``: the
    number of the last example.
    """

    kinds: Counter[str] = field(default_factory=Counter)
    dtypes: Counter[str] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)
    fused: int = 0
    gradients: int = 0
    whole: int = 0
    dynamic: int = 0
    generated: int = 0
    redrawn: int = 0
    last: int = -1

    def add(self, verdict: Any) -> None:
        """Counts a :class:`benchmarks.fuzz.Verdict`."""
        self.kinds[verdict.kind] += 1
        if verdict.kind == "invalid":
            return
        case = verdict.case
        self.fused += bool(verdict.fused)
        self.redrawn += bool(verdict.redrawn)
        self.dtypes[str(case.example.dtype).removeprefix("torch.")] += 1
        self.kernels[case.options["kernel"]] += 1
        self.gradients += any(i.grad for i in case.example.inputs)
        self.whole += case.dynamo
        self.dynamic += case.example.dynamic
        self.generated += case.through.codegen

    def merge(self, other: Tally) -> None:
        """Adds what another process has seen."""
        for name in ("kinds", "dtypes", "kernels"):
            getattr(self, name).update(getattr(other, name))
        for name in ("fused", "gradients", "whole", "dynamic", "generated", "redrawn"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.last = max(self.last, other.last)

    @property
    def graphs(self) -> int:
        return sum(n for kind, n in self.kinds.items() if kind != "invalid")

    @property
    def failures(self) -> int:
        return sum(self.kinds[k] for k in FAILED)

    def line(self, device: str, seed: int, first: int, seconds: float) -> str:
        """The summary."""
        each = lambda c: ", ".join(f"{n} {name}" for name, n in c.most_common())  # noqa: E731
        what = f" ({each(Counter({k: self.kinds[k] for k in FAILED if self.kinds[k]}))})" if self.failures else ""
        return (
            f"fuzz on {device}: {self.graphs} graphs in {seconds:.0f} s, examples {seed}/{first} to {seed}/{self.last}: "
            f"{self.failures} failures{what}; {self.fused} fused, {self.gradients} with gradients, {self.whole} through Dynamo, "
            f"{self.generated} through code generation; {each(self.dtypes)}; kernels: {each(self.kernels)}; "
            f"{self.redrawn} right by the mean of other draws; not counted: "
            f"{self.kinds['invalid']} that eager refuses, {self.kinds['inductor']} on which plain Inductor fails too"
        )
