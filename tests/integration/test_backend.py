"""The backend beside Inductor: modes, the user's own graph passes, the built-in attention patterns, the default kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

from fa_inductor import cache_key
from fa_inductor.config import Options
from fa_inductor.report import collecting
from tests.compiling import Fusing, agree, fuse, normal

REFERENCE = {"kernel": "reference"}


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) * 0.3).softmax(-1) @ v


def wrong_axis(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) * 0.3).softmax(-2) @ v


def qkv(n: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    return normal(2, 4, n, 16), normal(2, 4, n, 16), normal(2, 4, n, 16)


# -------------------------------------------------------------------------------------------------------------- modes
@pytest.mark.parametrize("mode", [None, "default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"])
def test_modes_of_torch_compile(mode: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA_INDUCTOR_KERNEL", "reference")  # torch.compile takes a mode or options, not both
    compiled = torch.compile(attention, backend="fa_inductor", mode=mode)
    q, k, v = qkv()
    with collecting() as report:
        out = compiled(q, k, v)
    torch.testing.assert_close(out, attention(q, k, v))
    assert report.counts() == {"fused": 1, "declined": 0, "rejected": 0}


def test_options_of_inductor_reach_it() -> None:
    seen = []

    def joint_pass(graph: fx.Graph) -> None:
        seen.append(config.max_autotune)

    options = {**REFERENCE, "max_autotune": True, "joint_custom_post_pass": joint_pass}
    torch.compile(attention, backend="fa_inductor", options=options)(*(x.detach() for x in qkv()))
    assert seen == [True]


def test_default_options_on_cpu() -> None:
    """Short sequences are declined since they do not pay, long ones run ATen's flash attention."""

    def causal(q, k, v):
        later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
        return (q @ k.mT * 0.3).masked_fill(later, float("-inf")).softmax(-1) @ v

    reports = []
    for n in (16, 1024):
        q, k, v = (torch.randn(1, 2, n, 64) for _ in range(3))
        compiled, backend = fuse(causal, Fusing(Options()))
        torch.testing.assert_close(compiled(q, k, v), causal(q, k, v), rtol=1e-4, atol=1e-5)
        reports += backend.report.sites
        torch._dynamo.reset()
    assert [site.status for site in reports] == ["declined", "fused"]
    assert reports[0].reason
    assert reports[1].template == "ATen flash attention (CPU)"


def test_without_attention_nothing_is_reported() -> None:
    backend = agree(lambda x: (x.relu() @ x).sum(-1), normal(4, 4), fused=0)
    assert backend.report.graphs == 1
    assert backend.report.sites == []


# ------------------------------------------------------------------------------------------------ the user's own passes
class WithUuid(CustomGraphPass):
    def __init__(self, uuid: str = "mine") -> None:
        self.seen: list[fx.Graph] = []
        self._uuid = uuid

    def __call__(self, graph: fx.Graph) -> None:
        self.seen.append(graph)

    def uuid(self) -> str:
        return self._uuid


class WithoutUuid(WithUuid):
    def uuid(self) -> None:  # type: ignore[override]
        return None


def plain_function() -> Any:
    seen: list[fx.Graph] = []

    def graph_pass(graph: fx.Graph) -> None:
        seen.append(graph)

    graph_pass.seen = seen  # type: ignore[attr-defined]
    return graph_pass


@pytest.mark.parametrize("make", [WithUuid, WithoutUuid, plain_function])
@pytest.mark.parametrize("how", ["options", "config"])
@pytest.mark.parametrize("where", ["joint_custom_pre_pass", "joint_custom_post_pass"])
def test_the_users_joint_passes_run(make: Callable[[], Any], how: str, where: str) -> None:
    own = make()
    if how == "options":
        backend = Fusing(inductor={"force_disable_caches": True, where: own})
        agree(attention, *qkv(), backend=backend)
    else:
        with config.patch({where: own}):
            agree(attention, *qkv(), backend=Fusing(inductor={"force_disable_caches": True}))
    assert len(own.seen) == 1
    assert any("fa_inductor.flash_attention" in str(n.target) for n in own.seen[0].nodes)


@pytest.mark.parametrize("where", ["post_grad_custom_pre_pass", "post_grad_custom_post_pass"])
def test_the_users_post_grad_passes_run(where: str) -> None:
    own = WithUuid()
    compiled = torch.compile(attention, backend="fa_inductor", options={**REFERENCE, where: own})
    q, k, v = (x.detach() for x in qkv())
    with config.patch(force_disable_caches=True):
        compiled(q, k, v)
    torch.testing.assert_close(compiled(q, k, v), attention(q, k, v))
    assert any("fa_inductor.flash_attention" in str(n.target) for graph in own.seen for n in graph.nodes)


def test_the_users_pre_grad_pass_runs() -> None:
    """Inductor's pre-grad passes see the graph after ours."""
    own = WithUuid()
    with config.patch(pre_grad_custom_pass=own):
        agree(attention, *qkv(), backend=Fusing(inductor={"force_disable_caches": True}))
    assert any("fa_inductor.flash_attention" in str(n.target) for graph in own.seen for n in graph.nodes)


@pytest.mark.parametrize("where", ["joint_custom_pre_pass", "joint_custom_post_pass"])
def test_a_failing_pass_of_the_user_is_theirs(where: str) -> None:
    def broken(graph: fx.Graph) -> None:
        raise ZeroDivisionError("in the user's own pass")

    backend = Fusing(inductor={"force_disable_caches": True, where: broken})
    compiled, _ = fuse(attention, backend)
    with pytest.raises(Exception, match="in the user's own pass"):
        compiled(*qkv())
    assert backend.report.sites == [] or backend.fused == 1


def test_the_cache_key_of_composed_passes() -> None:
    options = Options()
    alone = cache_key.with_key(options).uuid()
    mine, yours = (cache_key.with_key(options, WithUuid(u)).uuid() for u in ("mine", "yours"))
    assert len({str(x) for x in (alone, mine, yours)}) == 3
    assert cache_key.with_key(options, WithUuid("mine")).uuid() == mine
    assert cache_key.with_key(options, WithoutUuid()).uuid() is None, "a pass that cannot be told apart is not cached"
    assert cache_key.with_key(options, plain_function()).uuid() is None
    assert cache_key.with_key(Options(dropout=False)).uuid() != alone


# ------------------------------------------------------------------------------------------------- the built-in patterns
def builtin_fusions(fn: Callable, backend: Any, *inputs: Tensor) -> int:
    torch._dynamo.reset()
    before = counters["inductor"]["fuse_attention"]
    with config.patch(force_disable_caches=True):
        torch.compile(fn, backend=backend)(*inputs)
    return counters["inductor"]["fuse_attention"] - before


def test_builtin_patterns_are_kept_off_our_graphs_and_work_for_others() -> None:
    """They would take the softmax over the wrong axis for attention; what we refuse must stay as it is written."""
    inputs = tuple(x.detach().float() for x in qkv())
    assert builtin_fusions(attention, "inductor", *inputs) == 1
    declines = Fusing(Options(min_seqlen=10**9))
    assert builtin_fusions(attention, declines, *inputs) == 0
    assert "fewer than min_seqlen" in declines.reasons[0]
    agree(wrong_axis, *inputs, fused=0)
    assert builtin_fusions(attention, "inductor", *inputs) == 1, "still there for backend='inductor' in this process"


def test_switched_off_means_plain_inductor() -> None:
    inputs = tuple(x.detach().float() for x in qkv())
    assert builtin_fusions(attention, Fusing(Options(enabled=False)), *inputs) == 1
