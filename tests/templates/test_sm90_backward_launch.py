"""What the Gluon backward's launches are given, without a GPU: every argument of every kernel, in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from fa_inductor.templates.sm90 import backward_launch

pytest.importorskip("triton")

#: Kernel -> the arguments of its last launch.
Launches = dict[str, tuple[Any, ...]]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    found: Launches = {}

    class Recorder:
        def __init__(self, function: Any, grid: tuple[int, int, int], constants: Mapping[str, Any]) -> None:
            names = list(function.arg_names)
            assert set(names[-len(constants) :]) == set(constants), function
            self.name, self.run_time, self.constants = function.fn.__name__, names[: -len(constants)], constants

        def __call__(self, _device: int, *args: Any) -> None:
            assert len(args) == len(self.run_time), self.name
            found[self.name] = (dict(zip(self.run_time, args, strict=True)), self.constants)

    monkeypatch.setattr(backward_launch, "Launcher", Recorder)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    monkeypatch.setattr(backward_launch, "_PREPARED", {})
    return found


CAUSAL = "kv_idx <= q_idx"
SAME = "i0[b, q_idx] == i0[b, kv_idx]"


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("program", "length", "rows", "ranges", "flags"),
    [
        (f"score=where({CAUSAL}, score, -inf), sinks=[f1[h]]", 256, 128, False, ()),
        (f"score=where({CAUSAL}, score * 0.1 + f1[h] * cast_float(kv_idx - q_idx), -inf)", 256, 128, False, ("PROGRAM",)),
        (f"score=where({CAUSAL}, score * 0.1 + f1[h] * cast_float(kv_idx - q_idx), -inf)", 200, 64, False, ("PROGRAM",)),
        (f"score=where(({CAUSAL}) & ({SAME}), score, -inf)", 256, 128, True, ("MASKED",)),
        ("score=minimum(score, 1.0)", 256, 64, False, ("PROGRAM", "SELECT")),
    ],
)
def test_arguments(
    program: str, length: int, rows: int, ranges: bool, flags: tuple[str, ...], deterministic: bool, launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    q = torch.zeros(2, 4, length, 64, dtype=torch.bfloat16)
    lse = torch.zeros(2, 4, length)
    captures = [torch.zeros(2, length, dtype=torch.int64), torch.zeros(4)]
    wanted = [False, "sinks" in program]
    found = backward_launch.program_backward(q, q, q, q, q, lse, captures, [], f"attention({program})", wanted)
    assert [None if g is None else g.shape for g in found] == [q.shape] * 3 + [None, captures[1].shape if wanted[1] else None]
    given, constants = launches["flash_backward"]
    assert constants["ROWS"] == rows
    assert {n for n in ("PROGRAM", "MASKED", "SELECT") if constants[n]} == set(flags)
    assert constants["EVEN_Q"] == (length % rows == 0)
    assert constants["DETERMINISTIC"] == deterministic == (given["turns"] is not None)
    assert (given["ranges"] is not None) == ("tile_ranges" in launches) == (ranges and not deterministic)
    tensors = [x for x in given["captures"] or () if isinstance(x, torch.Tensor)]
    used = [c for i, c in enumerate(captures) if f"{'if'[i]}{i}[" in program.split(", sinks")[0]]
    assert [t.data_ptr() for t in tensors] == [t.data_ptr() for t in used]
    if ranges and not deterministic:
        assert launches["tile_ranges"][0]["CAP0"] is captures[0]


def test_forms_without_text_of_their_own(launches: Launches) -> None:
    q = torch.zeros(1, 2, 300, 128, dtype=torch.bfloat16)
    program = f"attention(score=where({CAUSAL}, score, -inf))"
    backward_launch.attention_backward(q, q, q, q, q, torch.zeros(1, 2, 300), [], program)
    given, constants = launches["flash_backward"]
    assert given["captures"] is given["ranges"] is None
    assert {n: constants[n] for n in backward_launch.NO_PROGRAM} == backward_launch.NO_PROGRAM
    wide = torch.zeros(1, 2, 300, 256, dtype=torch.bfloat16)
    backward_launch.attention_backward(wide, wide, wide, wide, wide, torch.zeros(1, 2, 300), [], program)
    assert "flash_backward_wide" in launches
