"""Which template a device gets, forward and backward, and how the report names it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fa_inductor.spec import AttentionSpec
from fa_inductor.templates.select import HOPPER, Request, Supported, Unsupported, fp8_supports, not_hopper_fp8, supports

CAUSAL = AttentionSpec.parse("attention(score=where(kv_idx <= q_idx, score * 0.1, -inf))")
#: A causal training step on Hopper.
REQUEST = Request(
    CAUSAL, "bfloat16", 128, 128, (9, 0), tma=True, backward=True, keys=4096, queries=4096, heads=64
)  # fmt: skip


@pytest.fixture(autouse=True)
def _no_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_OVERRIDE_ARCH", raising=False)


def named(**changes: object) -> str:
    answer = supports(replace(REQUEST, **changes))  # type: ignore[arg-type]
    assert isinstance(answer, Supported), answer
    return answer.template


def test_hopper_takes_both_passes() -> None:
    assert named() == named(backward=False) == HOPPER
    assert named(qk_dim=256, v_dim=256) == HOPPER
    assert named(deterministic=True) == HOPPER


def test_passes_are_chosen_each_for_itself() -> None:
    assert named(qk_dim=64, v_dim=64) == HOPPER
    # Few masked keys at small head dims are the general kernel's in the forward.
    assert named(qk_dim=64, v_dim=64, keys=1024) == f"sm90-tma, backward {HOPPER}"
    assert named(qk_dim=64, v_dim=64, keys=1024, backward=False) == "sm90-tma"
    # Beyond 128 columns the values must be as wide as the keys.
    assert named(qk_dim=192, v_dim=128) == f"{HOPPER}, backward sm90-tma"


@pytest.mark.parametrize(
    ("changes", "template"),
    [
        ({"general": True}, "sm90-tma"),
        ({"tma": False}, "sm90-pointer"),
        ({"dtype": "float32"}, "sm90-pointer"),
        ({"keys": None}, "sm90-tma"),
        ({"keys": 100}, "sm90-tma"),
        ({"heads": 1}, "sm90-tma"),
        ({"capability": (8, 0)}, "sm80-pointer"),
        ({"capability": (8, 9)}, "sm80-pointer"),
        ({"capability": (10, 0)}, "sm100-tma"),
        ({"capability": (12, 0)}, "sm80-pointer"),
    ],
)
def test_the_general_templates_take_the_rest(changes: dict[str, object], template: str) -> None:
    assert named(**changes) == template


def test_older_devices_have_none() -> None:
    assert isinstance(supports(replace(REQUEST, capability=(7, 5))), Unsupported)


def test_wide_heads_in_fp8_take_the_kernel_for_hopper() -> None:
    request = Request(AttentionSpec.parse("attention(score=score * 0.1)"), "bfloat16", 128, 128, (9, 0), keys=4096,
                             queries=4096, heads=64)  # fmt: skip
    assert not_hopper_fp8(request) == ""
    assert not_hopper_fp8(replace(request, qk_dim=256, v_dim=256)) == ""
    assert "head dims are 128 and 256" in not_hopper_fp8(replace(request, qk_dim=128, v_dim=256))
    assert isinstance(fp8_supports(replace(request, qk_dim=256, v_dim=256), "e4m3"), Supported)
