"""Values of the Gluon backward on the CPU, of bands and of programs with text of their own, run by gluon_threads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_inductor import reference
from fa_inductor.spec import AttentionSpec
from tests.templates.families import error
from tests.templates.gluon_threads import Descriptor, Number, Pointer, launch

pytest.importorskip("triton")

CAUSAL = "kv_idx <= q_idx"
Captures = Callable[[int, int, int, int], list[Tensor]]


def slopes(_batch: int, heads: int, _m: int, _n: int) -> list[Tensor]:
    return [2.0 ** -torch.arange(1.0, heads + 1)]


def documents(batch: int, _heads: int, m: int, n: int) -> list[Tensor]:
    """Of random lengths."""
    return [(torch.rand(batch, max(m, n)) < 0.01).long().cumsum(1)]


def padding(batch: int, _heads: int, _m: int, n: int) -> list[Tensor]:
    keep = torch.ones(batch, n, dtype=torch.bool)
    keep[0, : n // 2] = False
    return [keep]


def row_terms(batch: int, heads: int, m: int, n: int) -> list[Tensor]:
    return [torch.rand(heads) + 0.5, torch.rand(batch, m) + 0.5]


#: Program, captured tensors, (batch, query heads, key heads, queries, keys).
CASES: dict[str, tuple[str, Captures | None, tuple[int, int, int, int, int]]] = {
    "causal": (f"score=where({CAUSAL}, score * 0.1, -inf)", None, (1, 2, 1, 200, 200)),
    "alibi": (f"score=where({CAUSAL}, score * 0.1 + f0[h] * cast_float(kv_idx - q_idx), -inf)", slopes, (1, 4, 2, 200, 256)),
    "alibi_both_sides": ("score=score * 0.1 - f0[h] * cast_float(abs(kv_idx - q_idx))", slopes, (2, 2, 2, 128, 150)),
    "documents": (f"score=where(({CAUSAL}) & (i0[b, q_idx] == i0[b, kv_idx]), score * 0.1, -inf)", documents, (2, 2, 1, 300, 300)),
    "documents_zero": (
        "score=where(i0[b, q_idx] == i0[b, kv_idx], score * 0.1, -inf), dead_rows='zero'", documents, (2, 2, 1, 150, 300)
    ),
    "padding_zero": ("score=where(m0[b, kv_idx], score * 0.1, -inf), dead_rows='zero'", padding, (2, 2, 1, 130, 300)),
    "padding_causal": (f"score=where(({CAUSAL}) & m0[b, kv_idx], score * 0.1, -inf)", padding, (2, 2, 1, 200, 200)),
    "sinks": (f"score=where({CAUSAL}, score * 0.1, -inf), sinks=[f0[h]]", slopes, (1, 2, 2, 150, 150)),
    "softcap_documents": (
        f"score=where(({CAUSAL}) & (i0[b, q_idx] == i0[b, kv_idx]), tanh(score * 0.02) * 20.0, -inf)", documents,
        (1, 2, 1, 200, 200),
    ),
    "softcap_alibi": (
        f"score=where({CAUSAL}, tanh(score * 0.02) * 20.0 + f0[h] * cast_float(kv_idx - q_idx), -inf)", slopes,
        (1, 2, 1, 200, 200),
    ),
    "scales": ("score=score * f0[h] * f1[b, q_idx]", row_terms, (2, 2, 1, 100, 130)),
}  # fmt: skip


def sum_ranges(captures: list[Tensor], spec: AttentionSpec, shape: tuple[int, ...], rows: int) -> Tensor:
    """What the kernel of tile_ranges finds, by the mask itself: [B, key tiles, 4] in tiles of ``rows``."""
    b, h, _, m, n = shape
    from fa_inductor.masks import split_mask
    from fa_inductor.templates.sm90.form import program_form_of

    form = program_form_of(spec)
    assert not isinstance(form, str)
    assert split_mask(spec.score).fill is not None
    env = reference.Env.full((b, h, m, n), captures, [], torch.device("cpu"), torch.float32)
    keep = reference.evaluate(form.rest, env).broadcast_to(b, 1, m, n)[:, 0]
    found = torch.zeros(b, -(-n // 128), 4, dtype=torch.int32)
    for i in range(b):
        for t in range(found.shape[1]):
            part = keep[i, :, 128 * t : 128 * t + 128]
            hit, whole = part.any(1).nonzero(), part.all(1)
            tiles = [bool(whole[rows * x : rows * x + rows].all()) for x in range(m // rows)]
            first = tiles.index(True) if True in tiles else 0
            end = next((x for x in range(first, len(tiles)) if not tiles[x]), len(tiles)) if True in tiles else 0
            found[i, t] = torch.tensor([
                int(hit.min()) // rows if len(hit) else -(-m // rows), int(hit.max()) // rows + 1 if len(hit) else 0, first, end,
            ])  # fmt: skip
    return found


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("name", list(CASES))
def test_values(name: str, rows: int) -> None:
    from fa_inductor.templates.direct import problem_of
    from fa_inductor.templates.sm90.form import form_of, program_form_of
    from fa_inductor.templates.sm90.gluon_backward import flash_backward
    from fa_inductor.templates.sm90.program_source import gluon_kernel, source_of

    torch.manual_seed(0)
    text, make, shape = CASES[name]
    b, h, hkv, m, n = shape
    d = 64
    spec = AttentionSpec.parse(f"attention({text})")
    q, k, v, grad = (torch.randn(b, x, length, d).half() for x, length in ((h, m), (hkv, n), (hkv, n), (h, m)))
    captures = make(b, h, m, n) if make else []
    exact = [t.double() for t in (q, k, v)]
    doubles = [c.double() if c.is_floating_point() else c for c in captures]
    out, lse = reference.attention(*exact, doubles, [], spec)
    want = reference.attention_grads(grad.double(), *exact, doubles, [], spec, [True] * 3 + [False] * len(captures))

    form = form_of(spec)
    kernel: Any = flash_backward
    flags = {"PROGRAM": False, "MASKED": False, "SELECT": False, "SKIP": True}
    named: tuple[Any, ...] | None = None
    ranges = None
    factor = 0.0
    if isinstance(form, str):
        form = program_form_of(spec)
        assert not isinstance(form, str), form
        source = source_of(spec, problem_of(q, k, v, captures, [], [grad]), [c.stride() for c in captures])
        kernel = gluon_kernel(source)
        flags = {"PROGRAM": not source.plain, "MASKED": source.masked, "SELECT": source.select, "SKIP": source.skip is not False}
        # Scalars are tensors, as the kernel's other numbers.
        values = {a: captures[int(a[3])].stride(int(a[6])) for a in source.arguments if "_S" in a}
        named = tuple(Number.of(values[a]) if a in values else Pointer(captures[int(a[3])].flatten()) for a in source.arguments)
        factor = source.factor
        if source.ranges:
            ranges = Pointer(sum_ranges(captures, spec, shape, rows).flatten())
            if not flags["SKIP"]:
                kept = ranges.flat.view(-1, 4)
                kept[:, 0], kept[:, 1] = 0, -(-m // rows)
    low, high = form.band(m, n, [])
    padded_len = -(-m // rows) * rows
    statistics = torch.zeros(2, b * h, padded_len)
    statistics[0] = torch.inf
    log2 = (lse * math.log2(math.e)).float()
    if spec.dead_rows == "zero":
        log2[log2 == -torch.inf] = torch.inf
    statistics[0, :, :m] = log2.view(b * h, m)
    statistics[1, :, :m] = (out.half().float() * grad.float()).sum(-1).view(b * h, m)
    dq, dk, dv = torch.zeros(b * h * padded_len, d), torch.zeros_like(k), torch.zeros_like(v)
    tiles = ((q, rows, d), (k, 64, d), (v, 64, d), (grad, rows, d))
    arguments: list[Any] = [Descriptor(t, (1, 1, *tile)) for t, *tile in tiles]
    arguments += [Descriptor(s, (1, rows)) for s in statistics]
    arguments += [Descriptor(dq, (64, d // 2 if rows == 64 else d)), *(Descriptor(t, (1, 1, 64, d)) for t in (dk, dv))]
    factor = factor if flags["PROGRAM"] else form.scale * (form.softcap or 1.0)
    arguments += [form.scale * math.log2(math.e), factor if flags["PROGRAM"] else form.softcap or 0.0]
    arguments += [Number.of(x) for x in (m, n, low or 0, high or 0, hkv, b * hkv, h // hkv)]
    constants = {
        "ROWS": rows, "STAGES": 2, "SECTION": 2, "REGISTERS": 0, "EVEN": n % 128 == 0, "HAS_LOW": low is not None,
        "HAS_HIGH": high is not None, "SOFTCAP": form.softcap is not None, "DETERMINISTIC": False, "EVEN_Q": m % rows == 0,
    } | flags  # fmt: skip
    launch(kernel, -(-n // 128) * b * hkv, [*arguments, None, named, ranges], constants)
    dq = dq.view(b, h, padded_len, d)[:, :, :m] * factor
    for name_, ours, true in zip(("dq", "dk", "dv"), (dq, dk, dv), want[:3], strict=True):
        assert true is not None
        nan = torch.isnan(true)
        assert torch.equal(torch.isnan(ours), nan), name_
        assert error(ours[~nan], true[~nan]) < 2e-3, name_
