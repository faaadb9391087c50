"""Repeated launches of a Gluon kernel: through the jit once, then past it, and back where that is not possible."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fa_inductor.templates.sm90 import launcher

pytest.importorskip("triton")


class Jit:
    """Stands for a triton JITFunction; records its calls."""

    arg_names = ("x", "y", "B", "A")

    def __init__(self, result: Any) -> None:
        self.calls: list[Any] = []
        self.result = result

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def call(*args: Any, **kw: Any) -> Any:
            self.calls.append((grid, args, kw))
            return self.result

        return call


COMPILED = SimpleNamespace(run=None, function=0, packed_metadata=())
#: What the jit is called with, and what the compiled kernel is.
SLOW, FAST = ((7, 1, 1), (1, 2), {"A": 5, "B": 6, "num_warps": 4}), (COMPILED, (7, 1, 1), 0, (1, 2, 6, 5))


def launches(monkeypatch: pytest.MonkeyPatch, result: Any, error: Exception | None = None) -> tuple[list[Any], list[Any]]:
    """Three launches: (calls of the jit, launches of the compiled kernel)."""
    direct: list[Any] = []

    def launch(*args: Any) -> None:
        direct.append(args)
        if error is not None:
            raise error

    monkeypatch.setattr(launcher, "_launch", launch)
    jit = Jit(result)
    made = launcher.Launcher(jit, (7, 1, 1), {"A": 5, "B": 6})
    for _ in range(3):
        made(0, 1, 2)
    return jit.calls, direct


def test_second_launch_skips_the_jit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launches(monkeypatch, COMPILED) == ([SLOW], [FAST, FAST])


@pytest.mark.parametrize("result", [None, SimpleNamespace(run=None)])
def test_an_unknown_compiled_kernel_stays_with_the_jit(monkeypatch: pytest.MonkeyPatch, result: Any) -> None:
    assert launches(monkeypatch, result) == ([SLOW] * 3, [])


def test_arguments_that_do_not_fit_go_back_to_the_jit(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, direct = launches(monkeypatch, COMPILED, TypeError("function takes 3 arguments"))
    assert (calls, direct) == ([SLOW] * 3, [FAST])


def test_other_errors_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="CUDA"):
        launches(monkeypatch, COMPILED, RuntimeError("CUDA error"))


def test_descriptors_of_a_form() -> None:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    like = torch.empty_strided((1, 2, 100, 128), (5, 12800, 128, 1), dtype=torch.bfloat16, device="meta")
    form = launcher.DescriptorForm(like, 64, 128)
    t = torch.zeros(1, 2, 100, 128, dtype=torch.bfloat16)
    made = form.of(t)
    # A dimension of one element has no stride to speak of.
    want = TensorDescriptor(t, [1, 2, 100, 128], [8, 12800, 128, 1], made.block_shape, made.layout)
    assert made.base is t
    assert {**vars(made), "base": None} == {**vars(want), "base": None}
    assert form.of(like) is not made


def test_strides_that_tma_cannot_read() -> None:
    like = torch.empty_strided((1, 2, 100, 128), (0, 12800, 129, 1), dtype=torch.bfloat16, device="meta")
    with pytest.raises(AssertionError, match="16"):
        launcher.DescriptorForm(like, 64, 128)


def test_overlaps() -> None:
    t = torch.zeros(2, 3, 5, 8)
    assert not launcher.overlaps(t)
    assert not launcher.overlaps(t[:1].expand(1, 3, 5, 8))
    assert launcher.overlaps(t[:1].expand(4, 3, 5, 8))
    assert launcher.overlaps(t[..., :1].expand(2, 3, 5, 8))


def test_more_heads_than_a_second_dimension_of_a_grid_has() -> None:
    from fa_inductor.templates.sm90 import backward_launch

    q = torch.empty(4096, 17, 256, 64, dtype=torch.bfloat16, device="meta")
    made = backward_launch.Backward(q, q, q, q, q, backward_launch.CONFIGS[64], scale=1.0)
    for launch in (made.rows, made.main, made.sum):
        assert launch._grid[1:] == (1, 1)
