"""The scripts of examples/ at small sizes."""

from __future__ import annotations

import importlib
import runpy
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = pytest.mark.usefixtures("small_and_quick")


@pytest.fixture
def small_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any length is fused, and the rewritten graph runs as it is: generated C++ would take most of the time, and has its
    own tests."""
    monkeypatch.setenv("FA_INDUCTOR_MIN_SEQLEN", "0")
    compile_fx = importlib.import_module("torch._inductor.compile_fx")
    monkeypatch.setattr(compile_fx, "compile_fx", lambda gm, inputs, **settings: gm.forward)


def run(name: str, *arguments: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](list(arguments))


def test_decoder_inference(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--tokens", "64", "--layers", "1", "--width", "32", "--heads", "4", "--kv-heads", "2", "--repeats", "1"]
    result = run("decoder_inference", *sizes)
    assert result["report"].counts() == {"fused": 1, "declined": 0, "rejected": 0}
    assert result["report"].fused[0].form == "causal, GQA 4:2"
    assert max(result["differences"]) < 1e-4  # float32, logits of order 1
    assert "speed-up" in capsys.readouterr().out


def test_vit_training(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--image", "128", "--batch", "1", "--layers", "1", "--width", "32", "--heads", "2", "--repeats", "1"]
    result = run("vit_training", *sizes)
    assert result["report"].counts() == {"fused": 1, "declined": 0, "rejected": 0}
    assert result["report"].fused[0].backward
    assert result["losses"][0] == pytest.approx(result["losses"][1], rel=1e-5)
    assert max(result["differences"]) < 1e-4
    assert "speed-up" in capsys.readouterr().out


def test_fp8_block(capsys: pytest.CaptureFixture[str]) -> None:
    rows = run("fp8_block", "--tokens", "512", "--width", "64", "--heads", "1", "--repeats", "1")
    assert [row["report"].fused[0].fp8 for row in rows] == ["", "e4m3", "e4m3-rotated", "int8-e4m3"]
    plain, *cast = [row["error"] for row in rows]
    assert 0 < plain < min(cast) < max(cast) < 0.2
    assert '{"fp8": "int8-e4m3"}' in capsys.readouterr().out


def test_defaults_are_parsed_without_arguments() -> None:
    for name in ("decoder_inference", "vit_training", "fp8_block"):
        assert runpy.run_path(str(EXAMPLES / f"{name}.py"))["arguments"]([]).device == "cpu"
