"""The judge of the fuzzer: chance in 16 bits is told from a wrong formula."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from tests.fuzz.oracle import DRAWS, Compiled, Gap, WrongValue, check, compare, near

BF16 = torch.bfloat16


class Altered(Compiled):
    """A backend that computes something else: ``change`` of every output."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def backend(self, gm: fx.GraphModule, example_inputs: list) -> Callable:
        return lambda *args: tuple(self.change(t) for t in gm(*args))


def total(x: Tensor, y: Tensor) -> Tensor:
    """A sum that cancels."""
    return (x * y).sum()


def draw(i: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(i)
    return [torch.randn(40, 6, generator=g).to(BF16) for _ in range(2)]


def judged(change: Callable[[Tensor], Tensor], seed: int = 0) -> Compiled:
    return check(total, draw(seed), dtype=BF16, made=Altered(change), draw=draw, dynamo=False)


def test_a_difference_by_chance_is_judged_by_other_draws() -> None:
    """Off in one draw as the sum's own rounding may be: right in the mean, in whatever draw it happens."""
    calls = iter(range(10**6))

    def once(t: Tensor) -> Tensor:
        return t + 0.4 if next(calls) == 0 else t

    made = judged(once)
    assert made.redrawn == 1


@pytest.mark.parametrize("factor", [1.06, 0.9])
def test_a_wrong_factor_is_wrong_in_the_mean(factor: float) -> None:
    with pytest.raises(WrongValue, match=f"root mean squares of {DRAWS} draws|float64"):
        judged(lambda t: t * factor)


def test_what_is_far_off_is_wrong_at_once() -> None:
    calls = iter(range(10**6))
    with pytest.raises(WrongValue, match=r"eager [0-9.e+-]*$"):
        judged(lambda t: t + 30.0 if next(calls) == 0 else t)


def test_only_16_bits_are_drawn_again() -> None:
    off = [Gap("output 0", 1e-4, 0.0, 1.0)]
    assert not near(off, torch.float32)
    assert near([Gap("output 0", 0.06, 0.0, 1.0)], BF16)
    assert not near([Gap("output 0", 0.1, 0.0, 1.0)], BF16)
    with pytest.raises(WrongValue, match="output 0"):
        compare(off, torch.float32)
