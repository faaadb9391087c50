"""``options={"verify": True}``: the first call of a graph also runs the unfused code and compares."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fa_inductor import reference
from fa_inductor.config import Options
from fa_inductor.errors import VerificationError
from fa_inductor.spec import AttentionSpec
from tests.compiling import Fusing, agree, fuse, normal
from tests.patterns.forms import FORMS, Draw

VERIFY = Options(kernel="reference", verify=True)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) * 0.3).softmax(-1) @ v


def qkv() -> tuple[Tensor, Tensor, Tensor]:
    return normal(2, 4, 8, 8), normal(2, 4, 8, 8), normal(2, 4, 8, 8)


@pytest.fixture
def wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    original = reference.attention

    def off_by_a_little(q, k, v, captures, sizes, spec):
        out, lse = original(q, k, v, captures, sizes, spec)
        out.view(-1)[0] += 0.01
        return out, lse

    monkeypatch.setattr(reference, "attention", off_by_a_little)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["plain", "padding_additive", "sinks", "t5", "kv_cache", "gqa_repeat_kv"])
def test_right_kernels_pass(name: str, dtype: torch.dtype) -> None:
    inputs = [x.to(dtype) if x.is_floating_point() else x for x in FORMS[name].draw(Draw())]
    compiled, backend = fuse(FORMS[name].make(), Fusing(VERIFY))
    compiled(*inputs)
    assert backend.fused == 1


def test_gradients_flow_through_a_verified_call() -> None:
    agree(attention, *qkv(), backend=Fusing(VERIFY))


@pytest.mark.usefixtures("wrong_kernel")
def test_a_wrong_kernel_is_found() -> None:
    compiled, _ = fuse(attention, Fusing(VERIFY))
    with pytest.raises(VerificationError, match="FA_INDUCTOR=0 runs the model without the rewrite") as raised:
        compiled(*qkv())
    assert raised.value.max_error == pytest.approx(0.01, rel=1e-6)
    assert raised.value.tolerance < 1e-6
    assert "test_verify.py" in str(raised.value), "the user's own line"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_lost_mask_is_found_in_every_dtype(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    original = reference.attention
    unmasked = AttentionSpec.parse("attention(score=score * 0.35355339059327373)")
    monkeypatch.setattr(reference, "attention", lambda q, k, v, c, n, spec: original(q, k, v, c, n, unmasked))
    inputs = [x.to(dtype) for x in FORMS["causal_top_left"].draw(Draw())]
    compiled, _ = fuse(FORMS["causal_top_left"].make(), Fusing(VERIFY))
    with pytest.raises(VerificationError):
        compiled(*inputs)


@pytest.mark.usefixtures("wrong_kernel")
def test_only_the_first_call_is_compared() -> None:
    compiled, _ = fuse(attention, Fusing(VERIFY))
    with pytest.raises(VerificationError):
        compiled(*qkv())
    compiled(*qkv())


@pytest.mark.usefixtures("wrong_kernel")
def test_without_verify_nothing_is_compared() -> None:
    compiled, _ = fuse(attention)
    compiled(*qkv())


@pytest.mark.usefixtures("wrong_kernel")
def test_nan_in_one_of_the_two_only_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = reference.attention

    def not_a_number(*args):
        out, lse = original(*args)
        return out * float("nan"), lse

    monkeypatch.setattr(reference, "attention", not_a_number)
    compiled, _ = fuse(attention, Fusing(VERIFY))
    with pytest.raises(VerificationError, match="inf"):
        compiled(*qkv())


class Writing(nn.Module):
    """State that a second run would change twice."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))
        self.register_buffer("cache", torch.zeros(2, 4, 8, 8, dtype=torch.float64))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.calls += 1
        self.cache.mul_(0.5).add_(k)
        v.mul_(2.0)
        return attention(q, self.cache, v)


def test_state_and_inputs_are_written_once() -> None:
    ours = Writing()
    theirs = copy.deepcopy(ours)
    compiled, backend = fuse(ours, Fusing(VERIFY))
    with torch.no_grad():
        for _ in range(2):
            inputs = [x.detach() for x in qkv()]
            same = [x.clone() for x in inputs]
            torch.testing.assert_close(compiled(*inputs), theirs(*same))
            torch.testing.assert_close(inputs, same)
    torch.testing.assert_close((ours.calls, ours.cache), (theirs.calls, theirs.cache))
    assert backend.fused == 1


@pytest.mark.parametrize("inside", [True, False])
def test_random_graphs_are_not_compared(inside: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Dropout draws anew in each run, in the attention or elsewhere: a difference would say nothing."""

    def fn(q, k, v):
        p = (q @ k.mT).softmax(-1)
        return F.dropout(p, 0.5) @ v if inside else F.dropout(p @ v, 0.5)

    compiled, backend = fuse(fn, Fusing(VERIFY))
    with caplog.at_level(logging.WARNING, "fa_inductor"):
        compiled(*qkv())
    assert backend.fused == 1
    assert "verify" in caplog.text


def test_verify_leaves_the_random_generator_alone() -> None:
    def fn(q, k, v):
        return attention(q, k, v) + torch.rand_like(v)

    plain, _ = fuse(fn)
    torch.manual_seed(3)
    plain(*qkv())
    expected = torch.rand(3)
    torch._dynamo.reset()
    checked, _ = fuse(fn, Fusing(VERIFY))
    torch.manual_seed(3)
    checked(*qkv())
    torch.testing.assert_close(torch.rand(3), expected)


def test_dropout_in_eval_mode_is_compared(wrong_kernel: None) -> None:
    """Code that calls dropout and drops nothing is as good as without."""

    def fn(q, k, v):
        return F.dropout(F.dropout((q @ k.mT).softmax(-1), 0.0) @ v, 0.5, training=False)

    compiled, _ = fuse(fn, Fusing(VERIFY))
    with pytest.raises(VerificationError):
        compiled(*qkv())
