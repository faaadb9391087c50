"""Packages of AOTInductor: what they hold runs without Python, right values always, unfused where nothing else can be."""

from __future__ import annotations

import logging
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fa_inductor
from fa_inductor import cpu_export, export, selection
from fa_inductor.config import Options
from fa_inductor.errors import OptionError, StrictModeError
from fa_inductor.report import FusionReport, collecting
from fa_inductor.selection import Choice
from fa_inductor.spec import AttentionSpec

CAUSAL = "q_idx >= kv_idx"
PROGRAMS = {
    "plain": "score * 0.125",
    "causal": f"where({CAUSAL}, score * 0.125, -inf)",
    "causal, finite fill": f"where({CAUSAL}, score, -1e9)",
    "bottom-right": "where(q_idx + (kv_len - q_len) >= kv_idx, score, -inf)",
    "window": f"where(({CAUSAL}) & (q_idx - kv_idx < 5), score, -inf)",
    "mask": "where(m0[b, q_idx, kv_idx], score * 0.125, -inf)",
    "mask, finite fill": "where(m0[b, q_idx, kv_idx], score * 0.125, -1e9)",
    "mask, weak fill": "where(m0[b, q_idx, kv_idx], score, -1e4)",
    "mask added": "score + where(m0[b, q_idx, kv_idx], 0.0, -3.4e38)",
    "bias": "score + f1[h, q_idx, kv_idx]",
    "bias and mask": "where(m0[b, q_idx, kv_idx], score + f1[h, q_idx, kv_idx], -inf)",
    "bias and mask, finite fill": "where(m0[b, q_idx, kv_idx], score + f1[h, q_idx, kv_idx], -1e9)",
    "scale": "where(m0[b, q_idx, kv_idx], score * f2[h], -inf)",
}


def operands(kind: str, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """(q, k, v), (mask, bias, scale); ``kind`` says what is unusual."""
    q = torch.randn(2, 4, 12, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, 12, 8, dtype=torch.float64), torch.randn(2, 2, 12, 5 if kind == "narrow values" else 8).double()
    keep, bias, scale = torch.rand(2, 12, 12) > 0.3, torch.randn(4, 12, 12).double(), torch.rand(4).double() + 0.5
    keep[:, torch.arange(12), torch.arange(12)] = True
    if kind == "dead rows":
        keep[0, 3], keep[1, 5:8] = False, False
    elif kind == "bias of -inf":
        bias[1, 4], bias[2, 5, 3:] = -math.inf, -math.inf
    elif kind == "huge":
        q[0, 1], k[1, 0] = q[0, 1] * 3e3, k[1, 0] * -2e3
    elif kind == "nan":
        v[0, 1, 2, 3], k[1, 0, 4, 0], q[1, 3, 2, 1] = math.nan, math.inf, -math.inf
    cast = [t.to(dtype) for t in (q, k, v)]
    return cast, [keep, bias.to(dtype), scale.to(dtype)]


@pytest.mark.parametrize("kind", ["usual", "narrow values", "dead rows", "bias of -inf", "huge", "nan"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_function_in_the_graph_computes_the_program(name: str, kind: str) -> None:
    for dtype, sinks, dead in ((torch.float32, "", ""), (torch.bfloat16, ", layout='bmhd'", ""), (torch.float64, "", "zero")):
        program = f"attention(score={PROGRAMS[name]}{sinks}{', dead_rows=' + repr(dead) if dead else ''})"
        program = AttentionSpec.parse(program).program
        (q, k, v), captures = operands(kind, dtype)
        masks = cpu_export.mask(q, k, captures, [], program)
        out, lse = cpu_export.attention(q, k, v, masks, captures, [], program)
        expected, true_lse = cpu_export.reference_attention(q, k, v, captures, [], program)
        assert out.dtype == expected.dtype
        assert out.stride() == expected.stride()
        near = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float64: 1e-10}[dtype]
        torch.testing.assert_close(out, expected, rtol=near, atol=near, equal_nan=True)
        finite = true_lse.isfinite()
        torch.testing.assert_close(lse[finite], true_lse[finite], rtol=1e-5, atol=max(near, 1e-5))
        assert torch.equal(lse == -math.inf, true_lse == -math.inf) or kind == "nan"


def test_sinks_in_the_graph() -> None:
    for fill in ("-inf", "-1e9"):
        program = f"attention(score=where(m0[b, q_idx, kv_idx], score, {fill}), sinks=[f2[h]])"
        (q, k, v), captures = operands("dead rows", torch.float64)
        masks = cpu_export.mask(q, k, captures, [], program)
        got = cpu_export.attention(q, k, v, masks, captures, [], program)[0]
        torch.testing.assert_close(got, cpu_export.reference_attention(q, k, v, captures, [], program)[0])


# ------------------------------------------------------------------------------------------------------------ packages
class Model(nn.Module):
    """Padding as an added mask, then filled in beside a bias; last softcap, which no CPU kernel has."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(32, 96) for _ in range(3))
        self.bias = nn.Parameter(torch.randn(4, 1, 1))
        self.register_buffer("past", torch.ones(64, 64, dtype=torch.bool).tril())

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        n = x.shape[1]
        keep = self.past[:n, :n] & attention_mask[:, None, None, :].bool()
        added = torch.where(keep, 0.0, torch.finfo(torch.float32).min)
        changes = [
            lambda s: s + added,
            lambda s: (s + self.bias * torch.arange(n)).masked_fill(~keep, -1e9),
            lambda s: torch.tanh(s / 20.0) * 20.0,
        ]
        for project, change in zip(self.qkv, changes, strict=True):
            q, k, v = (t.view(*x.shape[:2], 4, 8).transpose(1, 2) for t in project(x).chunk(3, -1))
            s = change(q @ k.transpose(-1, -2) / 8**0.5)
            x = x + (F.softmax(s, dim=-1) @ v).transpose(1, 2).reshape(x.shape)
        return x


QUICK = {"aot_inductor.compile_wrapper_opt_level": "O0"}

RUN = """
import sys, torch
path, inputs, out = sys.argv[1:]
model = torch._inductor.aoti_load_package(path)
torch.save([model(*args) for args in torch.load(inputs)], out)
assert not any(name.startswith("fa_inductor") for name in sys.modules)
"""


def exported(model: nn.Module, *args: Tensor, dynamic: Any = None) -> Any:
    with torch.no_grad():
        return torch.export.export(model.eval(), args, dynamic_shapes=dynamic)


@pytest.mark.xdist_group("aot packages")
def test_a_package_runs_fused_without_us(tmp_path: Path) -> None:
    model, x = Model(), torch.randn(2, 24, 32)
    n = torch.export.Dim("n", min=2, max=63)
    program = exported(model, x, torch.ones(2, 24, dtype=torch.int64), dynamic=({1: n}, {1: n}))
    with collecting() as report:
        path = fa_inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "model.pt2"), options={"min_seqlen": 0, "kernel": "aten", **QUICK}
        )
    assert [s.status for s in report.sites] == ["fused"] * 2 + ["declined"], str(report)
    assert "score * scale + bias" in report.sites[2].reason
    cases = []
    for length, first in ((24, 0), (2, 0), (61, 9)):
        padding = torch.ones(2, length, dtype=torch.int64)
        padding[1, :first] = 0
        cases.append((torch.randn(2, length, 32), padding))
    cases.append((cases[-1][0].clone(), cases[-1][1]))
    cases[-1][0][0, 3, 1] = math.nan
    torch.save(cases, tmp_path / "inputs.pt")
    command = [sys.executable, "-c", RUN, path, str(tmp_path / "inputs.pt"), str(tmp_path / "out.pt")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    with torch.no_grad():
        for got, args in zip(torch.load(tmp_path / "out.pt"), cases, strict=True):
            torch.testing.assert_close(got, model(*args), rtol=2e-4, atol=2e-5, equal_nan=True)


class Tiny(nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        return F.softmax(q @ q.transpose(-1, -2), dim=-1) @ q


@pytest.mark.xdist_group("aot packages")
def test_an_op_without_a_generated_kernel_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a GPU where no configuration compiles: the op's eager kernel is Python, so the package is compiled without it."""
    monkeypatch.setattr(export, "choose_for_export", lambda match, options: Choice("triton", "sm90-tma"))
    q = torch.randn(1, 2, 16, 8)
    with collecting() as report, caplog.at_level(logging.WARNING, "fa_inductor"):
        path = fa_inductor.aoti_compile_and_package(exported(Tiny(), q), package_path=str(tmp_path / "m.pt2"), options=QUICK)
    (site,) = report.sites
    assert site.status == "declined"
    assert "does not compile" in site.reason
    assert "which is Python: operands are on cpu" in caplog.text
    torch.testing.assert_close(torch._inductor.aoti_load_package(path)(q), Tiny()(q))


class Recorder:
    """In place of torch's function: runs its pre-grad pass over the graph and compiles nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: bool = False) -> None:
        self.configs: list[dict[str, Any]] = []
        self.fails = fails
        monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", self)

    def __call__(self, program: Any, *, package_path: Any = None, inductor_configs: Any = None) -> str:
        self.configs.append(dict(inductor_configs))
        custom = self.configs[-1].get("pre_grad_custom_pass")
        self.graph = program.module().graph
        if custom is not None:
            custom(self.graph)
        if self.fails and len(self.configs) == 1:
            raise RuntimeError("made to fail")
        return "package.pt2"

    @property
    def targets(self) -> list[str]:
        return [getattr(n.target, "__name__", "") for n in self.graph.nodes]


def package(monkeypatch: pytest.MonkeyPatch, fails: bool = False, model: Any = None, **more: Any) -> tuple[Recorder, FusionReport]:
    recorder = Recorder(monkeypatch, fails)
    with collecting() as report:
        program = exported(model or Tiny(), torch.randn(1, 2, 16, 8))
        assert fa_inductor.aoti_compile_and_package(program, **more) == "package.pt2"
    return recorder, report


def test_options_configs_and_passes_reach_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    recorder, report = package(
        monkeypatch,
        options={"min_seqlen": 0, "max_autotune": True},
        inductor_configs={"aot_inductor.metadata": {"a": "b"}, "pre_grad_custom_pass": seen.append},
    )
    (configs,) = recorder.configs
    assert configs["max_autotune"] is True
    assert configs["aot_inductor.metadata"] == {"a": "b"}
    assert seen == [recorder.graph]
    assert "attention" in recorder.targets
    assert report.counts()["fused"] == 1
    _, report = package(monkeypatch)
    assert "too few" in report.sites[0].reason
    recorder, report = package(monkeypatch, options={"enabled": False})
    assert recorder.configs == [{}]
    assert report.graphs == 0
    with pytest.raises(OptionError, match="Did you mean 'strict'"):
        package(monkeypatch, options={"strct": True})


def test_strict_and_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StrictModeError, match="too few"):
        package(monkeypatch, options={"strict": True})
    recorder, report = package(monkeypatch, options={"strict": True, "kernel": "reference"})
    assert "reference_attention" in recorder.targets
    assert report.sites[0].template == "reference, as ATen ops"
    with pytest.raises(StrictModeError, match="does not compile"):
        package(monkeypatch, fails=True, options={"strict": True, "kernel": "reference"})


def test_a_failed_compile_is_done_again_without_the_rewrite(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    configs = {"pre_grad_custom_pass": seen.append}
    recorder, report = package(monkeypatch, fails=True, options={"min_seqlen": 0}, inductor_configs=configs)
    assert recorder.configs[1] == configs
    assert "attention" not in recorder.targets
    assert report.sites[0].reason == "the package with the fused attention does not compile: RuntimeError: made to fail"
    with pytest.raises(RuntimeError, match="made to fail"):
        package(monkeypatch, fails=True)  # nothing was fused: the error is not ours


def test_inside_enable(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    program = exported(Tiny(), torch.randn(1, 2, 16, 8))
    with fa_inductor.enable(min_seqlen=0), collecting() as report:
        torch._inductor.aoti_compile_and_package(program, package_path=None)
    assert report.counts()["fused"] == 1
    assert torch._inductor.aoti_compile_and_package is recorder
    torch._inductor.aoti_compile_and_package(program, inductor_configs={})
    assert recorder.configs[-1] == {}


class Layers(nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        keep = torch.ones(16, 16, dtype=torch.bool).tril(-1)
        for _ in range(3):
            q = F.softmax((q @ q.mT).masked_fill(~keep, -1e9), dim=-1) @ q
        return q


def test_layers_share_their_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, report = package(monkeypatch, model=Layers(), options={"min_seqlen": 0})
    assert report.counts()["fused"] == 3
    assert recorder.targets.count("mask") == 1


class Trained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(16, 16))

    def forward(self, q: Tensor) -> Tensor:
        return F.softmax(q @ q.mT + self.bias, dim=-1) @ q


def test_parameters_ask_for_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    _, report = package(monkeypatch, model=Trained(), options={"min_seqlen": 0})
    assert [(s.status, s.backward) for s in report.sites] == [("fused", False)]


def test_exporting_a_compiled_module_exports_what_it_wraps() -> None:
    compiled = torch.compile(Tiny(), backend="fa_inductor", options={"kernel": "reference"})
    names = [str(n.target) for n in exported(compiled, torch.randn(1, 2, 16, 8)).graph.nodes]
    assert "aten.softmax.int" in names
    assert not any("fa_inductor" in name for name in names)


def test_a_fault_of_ours_leaves_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise AssertionError("made to fail")

    monkeypatch.setattr(cpu_export, "attention", fail)
    recorder, report = package(monkeypatch, options={"min_seqlen": 0})
    assert "AssertionError: made to fail" in report.sites[0].reason
    assert not {"attention", "mask"} & set(recorder.targets)


def test_the_gluon_kernel_is_not_packaged() -> None:
    picked = Choice("triton", selection.select.HOPPER)
    original = selection.choose_kernel
    try:
        selection.choose_kernel = lambda match, options: picked
        assert selection.choose_for_export(None, Options()) == Choice("triton", "sm90-tma")  # type: ignore[arg-type]
    finally:
        selection.choose_kernel = original
