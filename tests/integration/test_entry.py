"""`explain`, `enable` and the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fa_inductor
from fa_inductor import evidence
from fa_inductor.__main__ import load_target, main
from fa_inductor.errors import OptionError
from fa_inductor.report import FusionReport, collecting

ANY = {"kernel": "reference"}  # rewrite every recognised site, however small


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.view(*x.shape[:2], 2, 8).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        return torch.softmax(q @ k.transpose(-2, -1) / 8**0.5, dim=-1) @ v


def plain(q: Tensor) -> Tensor:
    return torch.softmax(q @ q.transpose(-2, -1), dim=-1) @ q


def returns_weights(q: Tensor) -> tuple[Tensor, Tensor]:
    weights = torch.softmax(q @ q.transpose(-2, -1), dim=-1)
    return weights @ q, weights


def tiny() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Attention(), (torch.randn(2, 12, 16),)


def with_kwargs() -> tuple[object, tuple[Tensor, ...], dict[str, Tensor]]:
    return plain, (), {"q": torch.randn(1, 2, 12, 8)}


Q = (1, 2, 12, 8)


def test_explain_a_module_and_a_function() -> None:
    report = fa_inductor.explain(Attention(), options=ANY)(torch.randn(2, 12, 16))
    assert report.counts() == {"fused": 1, "declined": 0, "rejected": 0}
    assert report.graphs == 1
    assert report.seconds > 0
    (site,) = report.sites
    assert "test_entry.py" in site.source
    assert "softmax" in site.source
    assert site.program.startswith("attention(")
    assert json.loads(report.to_json())["sites"][0]["status"] == "fused"


def test_explain_says_why_not() -> None:
    report = fa_inductor.explain(returns_weights, options=ANY)(torch.randn(Q))
    assert report.counts() == {"fused": 0, "declined": 0, "rejected": 1}
    assert report.sites[0].reason
    assert report.sites[0].reason in str(report).replace("\n", " ") or "rejected" in str(report)


def test_explain_again_and_again() -> None:
    # More often than Dynamo's recompile limit: each time a full report, never a silent run in eager.
    explained = fa_inductor.explain(plain, options=ANY)
    for _ in range(torch._dynamo.config.recompile_limit + 2):
        assert explained(torch.randn(Q)).counts()["fused"] == 1


def test_explain_after_the_caches_are_warm_and_leaves_compiled_code_alone() -> None:
    x = torch.randn(Q)
    compiled = torch.compile(plain, backend="fa_inductor", options=ANY)
    compiled(x)
    assert fa_inductor.explain(plain, options=ANY)(x).counts()["fused"] == 1
    assert fa_inductor.explain(compiled, options=ANY)(x).counts()["fused"] == 1
    with collecting() as report:
        compiled(x)
    assert report.graphs == 0, "the user's compiled function must not be compiled again"


def test_explain_runs_the_model_once() -> None:
    calls = []

    def counted(q: Tensor) -> Tensor:
        calls.append(1)
        torch._dynamo.graph_break()
        return plain(q)

    report = fa_inductor.explain(counted, options=ANY)(torch.randn(Q))
    assert len(calls) == 1
    assert report.counts()["fused"] == 1


def test_explain_without_a_graph_and_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    report = fa_inductor.explain(lambda number: number + 1)(3)
    assert report.graphs == 0
    assert "captured no graph" in str(report)
    monkeypatch.setenv("FA_INDUCTOR", "0")
    assert "switched off" in str(fa_inductor.explain(plain)(torch.randn(Q)))


def test_explain_refuses_bad_arguments_at_once() -> None:
    with pytest.raises(OptionError, match="Did you mean 'strict'"):
        fa_inductor.explain(plain, options={"strct": True})
    with pytest.raises(OptionError, match="explain always uses fa_inductor"):
        fa_inductor.explain(plain, backend="inductor")
    options = {"kernel": "reference", "max_autotune": False}
    fa_inductor.explain(plain, options=options)(torch.randn(Q))
    assert options == {"kernel": "reference", "max_autotune": False}


def sites_of(compiled: object, *args: Tensor) -> int:
    with collecting() as report:
        compiled(*args)  # type: ignore[operator]
    return report.counts()["fused"]


def test_enable_takes_what_would_go_to_inductor() -> None:
    original = torch.compile
    with fa_inductor.enable(**ANY):
        default = torch.compile(plain)
        named = torch.compile(Attention(), backend="inductor")
        eager = torch.compile(plain, backend="eager")
        module = Attention()
        module.compile()

        @torch.compile(dynamic=False)
        def decorated(q: Tensor) -> Tensor:
            return plain(q)

    assert torch.compile is original
    assert sites_of(decorated, torch.randn(Q)) == 1, "first called after the block"
    assert sites_of(default, torch.randn(Q)) == 1
    assert sites_of(named, torch.randn(2, 12, 16)) == 1
    torch._dynamo.reset()  # or the graph of `named`, which fits any instance of the class, is used again
    assert sites_of(module, torch.randn(2, 12, 16)) == 1
    assert sites_of(eager, torch.randn(Q)) == 0
    torch._dynamo.reset()
    assert sites_of(torch.compile(plain), torch.randn(Q)) == 0, "after the block torch.compile is Inductor's again"


def test_enable_merges_options_and_nests() -> None:
    original = torch.compile
    with fa_inductor.enable(enabled=False):
        with fa_inductor.enable(**ANY):
            inner = torch.compile(plain, options={"max_autotune": False})
            overridden = torch.compile(plain, options={"enabled": False})
        outer = torch.compile(plain)
    assert torch.compile is original
    assert [sites_of(f, torch.randn(Q)) for f in (inner, overridden, outer)] == [1, 0, 0]


def test_enable_refuses_bad_options_and_ends_on_errors() -> None:
    original = torch.compile
    with pytest.raises(OptionError, match="strct"), fa_inductor.enable(strct=True):
        pass
    with pytest.raises(KeyError), fa_inductor.enable():
        raise KeyError
    assert torch.compile is original


def test_enable_under_somebody_elses_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    block = fa_inductor.enable(**ANY)
    block.__enter__()
    ours = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: ours(*args, **kwargs))
    block.__exit__(None, None, None)
    assert sites_of(torch.compile(plain), torch.randn(Q)) == 0, "ours stays beneath, and does nothing"


def test_command_line_explain(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA_INDUCTOR_KERNEL", "reference")
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    assert main(["explain", "test_entry:tiny", "--profile"]) == 0
    assert "1 fused" in capsys.readouterr().out
    assert main(["explain", "test_entry:with_kwargs", "--json", "--dynamic"]) == 0
    assert json.loads(capsys.readouterr().out)["counts"]["fused"] == 1
    for options, backward in ([], True), (["--no-grad"], False):
        assert main(["explain", "test_entry:tiny", "--json", *options]) == 0
        (site,) = json.loads(capsys.readouterr().out)["sites"]
        assert (site["status"], site["backward"]) == ("fused", backward)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("test_entry", "expected MODULE:CALLABLE"),
        ("no_such_module_here:f", "there is no module 'no_such_module_here'"),
        ("test_entry:no_such_function", "expected a function without arguments"),
        ("test_entry:Attention", "expected (model, args) or (model, args, kwargs)"),
    ],
)
def test_command_line_says_what_it_expects(
    target: str, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    assert main(["explain", target]) == 2
    assert says in capsys.readouterr().err


def test_load_target_keeps_keyword_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    _, args, kwargs = load_target("test_entry:with_kwargs")
    assert args == ()
    assert set(kwargs) == {"q"}


def test_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert f"torch        {torch.__version__}" in text
    assert '"fa_inductor" is registered: fa_inductor.backend.fa_inductor' in text
    assert "enabled      yes" in text
    table = text[text.index("Kernels on cpu") :]
    assert {"plain", "causal", "softcap", "dropout"} <= set(table.split())
    assert "not recognised" not in table
    monkeypatch.setenv("FA_INDUCTOR", "0")
    monkeypatch.setenv("FA_INDUCTOR_STRICT", "1")
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "enabled      no" in text
    assert "strict = True (from FA_INDUCTOR_STRICT" in text


def test_import_is_lazy_and_complete() -> None:
    assert set(fa_inductor.__all__) <= set(dir(fa_inductor))
    for name in fa_inductor.__all__:
        assert getattr(fa_inductor, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = fa_inductor.nothing


def test_the_report_module_needs_no_import_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import fa_inductor\nwith fa_inductor.report.collecting() as r: print(len(r.sites))"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout == "0\n", done.stderr



def two_layers(q: Tensor) -> Tensor:
    for _ in range(2):
        q = torch.softmax(q @ q.transpose(-2, -1), dim=-1) @ q
    return torch.softmax(q, 1)


def test_a_profile_gives_each_site_its_time() -> None:
    report = fa_inductor.explain(two_layers, profile=True, options=ANY)(torch.randn(2, 2, 64, 8))
    assert [s.evidence for s in report.fused] == ["profiler shows its time"] * 2
    assert all(s.milliseconds is not None and s.milliseconds > 0 for s in report.fused)
    assert "ms in 2 sites" in str(report)
    assert FusionReport.from_dict(json.loads(report.to_json())) == report


def test_a_profile_on_the_cpu_kernel() -> None:
    q = torch.randn(1, 2, 1024, 32)
    with torch.no_grad():
        report = fa_inductor.explain(plain, profile=True)(q)
    (site,) = report.fused
    assert site.evidence == "profiler shows its time"
    assert site.milliseconds is not None


def test_a_profile_of_fp8() -> None:
    with torch.no_grad():
        explained = fa_inductor.explain(plain, profile=True, dynamic=False, options={**ANY, "fp8": "e4m3"})
        report = explained(torch.randn(1, 1, 512, 64, dtype=torch.bfloat16))
    (site,) = report.fused
    assert (site.fp8, site.evidence) == ("e4m3", "profiler shows its time"), str(report)


def test_without_a_profile_only_the_choice_is_known() -> None:
    report = fa_inductor.explain(returns_weights, options=ANY)(torch.randn(Q))
    assert [(s.status, s.evidence) for s in report.sites] == [("rejected", "")]
    (site,) = fa_inductor.explain(plain, options=ANY)(torch.randn(Q)).sites
    assert (site.evidence, site.milliseconds) == ("selector chose it", None)


def test_a_profile_that_sees_another_number_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "_times", lambda call: [1.0, 2.0])
    report = fa_inductor.explain(plain, profile=True, options=ANY)(torch.randn(Q))
    assert report.fused[0].milliseconds is None
    assert "saw 2 attention kernels for 1 fused sites" in str(report)
