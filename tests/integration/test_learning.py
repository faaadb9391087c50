"""The programs benchmarks/training.py and benchmarks/accuracy.py at small sizes, without code generation."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import _grammar, accuracy, training
from tests.compiling import Fusing

JOB = {
    "device": "cpu", "config": training.TINY, "batch": 4, "length": 24, "tokens": 2000, "steps": 4, "seeds": 2, "threads": 1,
    "dropout": 0.0, "checkpoint": False, "accumulate": 1, "options": {},
}  # fmt: skip


def trained(**variant: Any) -> dict[str, dict[str, Any]]:
    """Both sides' rows: eager code for plain torch.compile, and ours by the reference."""
    rows = {}
    for side in training.SIDES:
        trainer = training.Trainer({**JOB, **variant, "side": side})
        trainer.compiled = trainer.model
        if side == "fa_inductor":
            trainer.compiled = torch.compile(trainer.model, backend=Fusing(), dynamic=False)
        rows[side] = {**trainer.compile(), **trainer.measure()}
    return rows


def test_text_is_the_seeds() -> None:
    first, again, other = (_grammar.Grammar(seed).tokens(500) for seed in (3, 3, 4))
    assert first == again
    assert first != other
    assert set(first) <= set(range(len(_grammar.WORDS)))


def test_an_answer_is_one_of_the_facts() -> None:
    grammar = _grammar.Grammar(0)
    asked = 0
    for _ in range(50):
        text = " ".join(grammar.document())
        for question in text.split("what has ")[1:]:
            name, answer = question.split(" . ")[0].removesuffix(" .").split(" ? ")
            assert f"{name} has the {answer} ." in text
            asked += 1
    assert asked > 50


def test_training_compares_like_with_like() -> None:
    rows = trained()
    found = training.compare(rows)
    assert training.faults(rows, found) == []
    assert found["between_sides"] < 1e-2  # bfloat16 attention in another order of operations
    assert rows["fa_inductor"]["fused"] == rows["fa_inductor"]["sites"] == 1
    assert found["gradients"]["fa_inductor"]["worst"] < 0.05
    assert "seed 1" in training.summary(rows, found)


def test_training_with_dropout_checkpointing_and_accumulation() -> None:
    rows = trained(dropout=0.1, checkpoint=True, accumulate=2)
    assert rows["fa_inductor"]["fused"] == 1
    assert not rows["fa_inductor"]["gradient_errors"]
    for a, b in zip(*(rows[side]["runs"] for side in training.SIDES), strict=True):
        assert a["losses"] == pytest.approx(b["losses"], rel=0.02)


def test_what_is_wrong_is_said() -> None:
    run = {"losses": [3.0, 2.0], "held_out": 2.0, "tokens_per_second": 1.0, "seed": 0}
    side = {"runs": [run, {**run, "losses": [3.0, 2.1]}], "gradient_errors": {"w": 0.01}, "fused": 1, "sites": 1, "reasons": []}
    off = {**side, "runs": [{**run, "losses": [3.0, float("nan")]}] * 2, "gradient_errors": {"w": 0.03}, "fused": 0}
    for ours, wrong in ((side, 0), (off, 3)):
        rows = {"compile": side, "fa_inductor": ours}
        assert len(training.faults(rows, training.compare(rows))) == wrong


@pytest.mark.parametrize("program", accuracy.PROGRAMS)
def test_accuracy(program: str) -> None:
    sizes = vars(accuracy.Sizes(2, 4, 2, 24, 8))
    job = {"program": program, "dtypes": ("float32", "bfloat16"), "sizes": sizes, "device": "cpu"}
    rows = accuracy.measure(job, {"backend": Fusing()})
    assert accuracy.faults(rows) == []
    for row in rows:
        assert row["kernel"] == "reference"
        assert ("sdpa" in row) == (program not in ("softcap", "sinks"))
        if "sdpa" in row and row["dtype"] == "float32":
            assert max(row["sdpa"].values()) < 1e-5  # SDPA is asked for the same thing
    assert program in accuracy.summary(rows)


def test_accuracy_out_of_proportion_is_said() -> None:
    row = {"program": "plain", "dtype": "float32", "eager": {"out": 1e-7, "dq": 1e-7}, "ours": {"out": 1e-5, "dq": float("nan")}}
    assert len(accuracy.faults([row])) == 2
