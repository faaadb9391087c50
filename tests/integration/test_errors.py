"""Bad input and faults of our own: a named error or a decline with its reason, and the model still runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fa_inductor import graph_pass, rewrite
from fa_inductor.config import Options
from fa_inductor.errors import StrictModeError
from fa_inductor.report import collecting
from fa_inductor.view import builder
from tests.compiling import TESTING, Fusing, agree, fuse, normal, rewriting


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) * 0.3).softmax(-1) @ v


def wrong_axis(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) * 0.3).softmax(-2) @ v


def qkv(n: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    return normal(2, 4, n, 8), normal(2, 4, n, 8), normal(2, 4, n, 8)


# ------------------------------------------------------------------------------------------------- faults of our own
def fail(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("made to fail")


@pytest.mark.parametrize(
    ("where", "name", "reason"),
    [
        (graph_pass, "recognise", "analysis failed: AssertionError: made to fail"),
        (builder, "build", "analysis failed: AssertionError: made to fail"),
        (graph_pass, "_report", "rewrite failed: AssertionError: made to fail"),
        (rewrite, "_emit_op", "AssertionError: made to fail"),
    ],
)
def test_a_fault_of_ours_costs_the_rewrite_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, reason: str
) -> None:
    monkeypatch.setattr(where, name, fail)
    backend = agree(attention, *qkv(), fused=0)
    assert any(reason in r for r in backend.reasons), backend.reasons


def test_a_fault_in_kernel_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    original = graph_pass.AttentionPass.__init__
    monkeypatch.setattr(graph_pass.AttentionPass, "__init__", lambda self, options: original(self, options, fail))
    backend = agree(attention, *qkv(), fused=0)
    assert backend.reasons == ["kernel selection failed: AssertionError: made to fail"]


def test_a_fault_half_way_through_a_rewrite_leaves_the_graph_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "_leaf_replacements", fail)
    backend = agree(attention, *qkv(), fused=0)
    assert not any("fa_inductor" in str(n.target) for n in backend.graphs[0].graph.nodes)


def test_a_fault_at_one_site_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = rewrite._emit_op, []

    def second_fails(*args: Any) -> Any:
        calls.append(args)
        return fail() if len(calls) == 2 else original(*args)

    monkeypatch.setattr(rewrite, "_emit_op", second_fails)

    def fn(q, k, v):
        for _ in range(3):
            q = attention(q, k, v).tanh()
        return q

    agree(fn, *qkv(), fused=2)


def test_a_fault_is_logged_with_its_traceback(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(graph_pass, "recognise", fail)
    with caplog.at_level(logging.WARNING, "fa_inductor"):
        agree(attention, *qkv(), fused=0)
    assert "could not analyse" in caplog.text
    assert "made to fail" in caplog.text


# ---------------------------------------------------------------------------------------------------- unusual inputs
def declined(fn: Callable, *inputs: Any, reason: str, options: Options = TESTING) -> None:
    compiled, backend = fuse(fn, Fusing(options))
    got, expected = compiled(*inputs), fn(*inputs)
    torch.testing.assert_close(got, expected, equal_nan=True)
    assert backend.fused == 0
    assert any(reason in r for r in backend.reasons), backend.reasons


@pytest.mark.parametrize("rows", [0, 4])
@pytest.mark.parametrize("keys", [0, 4])
@pytest.mark.parametrize("batch", [0, 2])
def test_empty_shapes(batch: int, rows: int, keys: int) -> None:
    q, k, v = torch.randn(batch, 2, rows, 8), torch.randn(batch, 2, keys, 8), torch.randn(batch, 2, keys, 8)
    if batch and rows and keys:
        assert agree(attention, q.double(), k.double(), v.double()).fused
    else:
        declined(attention, q, k, v, reason="size 0")


def test_empty_features() -> None:
    q, k = torch.randn(2, 2, 4, 0), torch.randn(2, 2, 4, 0)
    declined(attention, q, k, torch.randn(2, 2, 4, 8), reason="size 0")


def test_complex_operands() -> None:
    def fn(q, v):
        return (q @ q.mT).abs().softmax(-1) @ v

    declined(fn, torch.randn(2, 4, 8, 8, dtype=torch.complex64), torch.randn(2, 4, 8, 8), reason="dtype torch.complex64")


def test_float8_operands_cast_before_the_product() -> None:
    """Stored in eight bits, computed in more: the casts belong to the operands."""

    def fn(q, k, v):
        return attention(q.double(), k.double(), v.double())

    eight = [torch.randn(2, 4, 8, 8).to(torch.float8_e4m3fn) for _ in range(3)]
    compiled, backend = fuse(fn)
    torch.testing.assert_close(compiled(*eight), fn(*eight))
    assert backend.fused == 1


def test_meta_tensors() -> None:
    """There is nothing to compute and nothing to crash at."""
    q, k, v = (torch.empty(2, 4, 8, 8, device="meta") for _ in range(3))
    compiled, backend = fuse(attention, Fusing(Options()))
    assert compiled(q, k, v).shape == q.shape
    assert backend.reasons == ["no kernel for device meta with kernel='auto'"]


def test_sizes_of_one() -> None:
    for shape in ((1, 1, 1, 1), (1, 1, 1, 8), (1, 4, 1, 8), (2, 1, 5, 1)):
        torch._dynamo.reset()
        agree(attention, normal(*shape), normal(*shape), normal(*shape), fused=None)


def test_two_dimensional_operands() -> None:
    agree(attention, normal(6, 8), normal(9, 8), normal(9, 5))


def test_seven_dimensions() -> None:
    agree(attention, *(normal(2, 1, 3, 2, 2, 4, 8) for _ in range(3)))


def test_nan_and_infinite_inputs_stay_what_they_are() -> None:
    q, k, v = qkv()
    with torch.no_grad():
        q[0, 0, 0, 0], k[0, 1, 2, 3], v[1, 2, 3, 4] = float("nan"), float("inf"), float("nan")
    agree(attention, q, k, v)


# --------------------------------------------------------------------------------------------------- strict and switched off
def test_strict_names_every_site_that_stays_unfused() -> None:
    def fn(q, k, v):
        return attention(q, k, v) + wrong_axis(q, k, v)

    compiled, _ = fuse(fn, Fusing(Options(kernel="reference", strict=True)))
    with pytest.raises(Exception, match="softmax is not taken over the axis") as raised:
        compiled(*qkv())
    assert isinstance(raised.value.__cause__ or raised.value, (StrictModeError, torch._dynamo.exc.BackendCompilerFailed))
    assert "1 attention site stayed unfused" in str(raised.value)
    assert "test_errors.py" in str(raised.value), "the user's own line"


def test_strict_is_content_with_calls_that_aten_fuses_itself() -> None:
    def fn(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    compiled, backend = fuse(fn, Fusing(Options(strict=True)))
    inputs = qkv()
    torch.testing.assert_close(compiled(*inputs), fn(*inputs))
    assert [(site.status, site.fused_already) for site in backend.report.sites] == [("declined", True)]


def test_strict_is_content_with_fused_sites_and_with_none() -> None:
    strict = Options(kernel="reference", strict=True)
    agree(attention, *qkv(), backend=Fusing(strict))
    torch._dynamo.reset()
    agree(lambda q, k, v: torch.sigmoid(q @ k.mT) @ v, *qkv(), backend=Fusing(strict), fused=0)


def test_strict_through_torch_compile() -> None:
    compiled = torch.compile(wrong_axis, backend="fa_inductor", options={"strict": True})
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="strict mode: 1 attention site stayed unfused"):
        compiled(*qkv())


def test_switched_off_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA_INDUCTOR", "0")
    with collecting() as report:
        options, _ = Options.from_user({"kernel": "reference", "strict": True})
        backend = agree(attention, *qkv(), backend=Fusing(options), fused=0)
    assert report.graphs == 0
    assert not any("fa_inductor" in str(n.target) for n in backend.graphs[0].graph.nodes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strct": True}, "unknown option 'strct'. Did you mean 'strict'"),
        ({"strict": 1}, "strict: got 1 of type int"),
        ({"kernel": "flash"}, "kernel: got 'flash'"),
        ({"fp8": "e5m2"}, "fp8: got 'e5m2'"),
        ({"max_autotune": "yes"}, "Inductor option max_autotune: got 'yes' of type str, expected bool"),
    ],
)
def test_bad_options_reach_the_user(options: dict[str, Any], message: str) -> None:
    compiled = torch.compile(attention, backend="fa_inductor", options=options)
    with pytest.raises(Exception, match="(?s)" + message.replace("(", r"\(")):
        compiled(*qkv())


def test_bad_mode() -> None:
    compiled = torch.compile(attention, backend="fa_inductor", mode="fastest")
    with pytest.raises(Exception, match=r"mode: got 'fastest'.*expected one of default, "):
        compiled(*qkv())


def test_second_derivatives_are_refused_by_name() -> None:
    """Compiled code has none in torch; the op itself, run as it is, must not give wrong ones."""
    compiled, _ = fuse(attention, rewriting())
    q, k, v = qkv()
    (grad,) = torch.autograd.grad(compiled(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        grad.sum().backward()


def test_a_dead_row_is_as_eager_has_it() -> None:
    def fn(q, k, v, keep):
        return (q @ k.mT).masked_fill(~keep, float("-inf")).softmax(-1) @ v

    def sdpa(q, k, v, keep):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)

    keep = torch.ones(8, 8, dtype=torch.bool)
    keep[3] = False
    agree(fn, *(x.detach() for x in qkv()), keep)
    torch._dynamo.reset()
    agree(sdpa, *(x.detach() for x in qkv()), keep)
