"""The form in the report names the mask that is there: a wrong word would be a wrong report."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.compiling import fuse, rewriting
from tests.patterns.forms import INF, scores

N = 16

Keep = Callable[..., Tensor]


def row() -> Tensor:
    return torch.arange(N)[:, None]


def key() -> Tensor:
    return torch.arange(N)


def lengths() -> Tensor:
    return torch.tensor([5, 9])


def segments() -> Tensor:
    return torch.arange(2 * N).view(2, N) // 6


def near() -> Tensor:
    return (row() - key()).abs() < 4


MASKS: dict[str, tuple[str, Keep, tuple[Tensor, ...]]] = {
    "earlier keys": ("causal", lambda: key() < row(), ()),
    "earlier blocks": ("causal", lambda: key() // 4 <= row() // 4, ()),
    "positions from a tensor": ("causal", lambda p: key() <= p + row(), (torch.tensor(3),)),
    "later keys": ("anti-causal", lambda: key() >= row(), ()),
    "the last four": ("window", lambda: (key() <= row()) & (row() - key() < 4), ()),
    "on both sides": ("window", near, ()),
    "own block": ("chunk", lambda: row() // 4 == key() // 4, ()),
    "causal in the own block": ("causal, chunk", lambda: (row() // 4 == key() // 4) & (key() <= row()), ()),
    "all but itself": ("mask by position", lambda: key() != row(), ()),
    "the first five keys": ("mask by position", lambda: (key() < 5) | (row() < 0), ()),
    "every third": ("mask by position", lambda: (row() - key()) % 3 == 0, ()),
    "every third, causal": ("causal, mask by position", lambda: ((row() - key()) % 3 == 0) & (key() <= row()), ()),
    "window and first keys": ("window or mask by position", lambda: near() | (key() < 2), ()),
    "a prefix": ("causal or mask by position", lambda: (key() <= row()) | (key() < 5), ()),
    "prefixes": ("causal or mask", lambda n: (key() <= row()) | (key() < n[:, None, None, None]), (lengths(),)),
    "lengths": ("mask", lambda n: key() < n[:, None, None, None], (lengths(),)),
    "causal and lengths": ("causal, mask", lambda n: (key() <= row()) & (key() < n[:, None, None, None]), (lengths(),)),
    "documents": ("documents", lambda s: s[:, None, :, None] == s[:, None, None], (segments(),)),
    "causal documents": (
        "causal, documents", lambda s: (s[:, None, :, None] == s[:, None, None]) & (key() <= row()), (segments(),)
    ),
    "a mask of another tensor": ("mask", lambda s: s[:, None, :, None] == s.flip(1)[:, None, None], (segments(),)),
}


def form(fn: Callable, *more: Tensor) -> str:
    compiled, backend = fuse(fn, rewriting())
    with torch.no_grad():
        compiled(*(torch.randn(2, 4, N, 8) for _ in range(3)), *more)
    (site,) = backend.report.fused
    return site.form


@pytest.mark.parametrize("name", MASKS)
def test_mask(name: str) -> None:
    expected, keep, more = MASKS[name]
    fn = lambda q, k, v, *m: scores(q, k).masked_fill(~keep(*m), -INF).softmax(-1) @ v  # noqa: E731
    assert form(fn, *more) == expected


def test_mask_under_a_temperature() -> None:
    def fn(q, k, v, t):  # type: ignore[no-untyped-def]
        return (scores(q, k).masked_fill(key() > row(), -20.0) * t).softmax(-1) @ v

    assert form(fn, torch.rand(4, 1, 1)) == "causal"


def test_terms_beside_a_mask() -> None:
    def fn(q, k, v, slopes, keep):  # type: ignore[no-untyped-def]
        s = 5 * torch.tanh(scores(q, k) / 5) + slopes[:, None, None] * (key() - row())
        return s.masked_fill(~(keep[:, None, None] & (key() <= row())), -INF).softmax(-1) @ v

    assert form(fn, torch.rand(4), torch.rand(2, N) > 0.3) == "causal, mask, softcap, ALiBi"
