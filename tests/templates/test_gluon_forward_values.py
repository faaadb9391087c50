"""Values of the Gluon forward of programs with text of their own, on the CPU, run by gluon_threads."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_inductor import reference
from fa_inductor.expr import TRUE
from fa_inductor.spec import AttentionSpec
from tests.templates.families import error
from tests.templates.gluon_threads import Descriptor, Number, Pointer, launch
from tests.templates.test_gluon_backward_values import CASES as BACKWARD_CASES
from tests.templates.test_gluon_backward_values import Captures

pytest.importorskip("triton")

CAUSAL = "kv_idx <= q_idx"


def lengths(batch: int, _heads: int, _m: int, n: int) -> list[Tensor]:
    """The last batch is empty."""
    found = torch.randint(n // 2, n + 1, (batch,))
    found[-1] = 0
    return [found]


def real(batch: int, _heads: int, _m: int, n: int) -> list[Tensor]:
    """1 where a token is real; none of the last batch is."""
    found = torch.ones(batch, n, dtype=torch.int64)
    found[0, n // 2 :] = 0
    found[-1] = 0
    return [found]


def kept_tiles(batch: int, _heads: int, m: int, n: int) -> list[Tensor]:
    keep = torch.rand(batch, 1, m, n) < 0.7
    keep[:, :, m // 2] = False
    return [keep]


def sinks(batch: int, heads: int, m: int, _n: int) -> list[Tensor]:
    return [torch.randn(heads), torch.randn(batch, m)]


def bias(batch: int, heads: int, m: int, n: int) -> list[Tensor]:
    """Some of it masks: a row as a whole, keys of some rows by -inf or by float32's least number."""
    found = torch.randn(heads, m, n)
    found[:, m // 2] = -math.inf
    found[0, :, : n // 3] = -math.inf
    found[-1, : m // 3, n // 2 :] = torch.finfo(torch.float32).min
    return [found]


#: Program, captured tensors, (batch, query heads, key heads, queries, keys).
CASES: dict[str, tuple[str, Captures | None, tuple[int, int, int, int, int]]] = {
    **{name: case for name, case in BACKWARD_CASES.items() if name != "causal"},
    "lengths": ("score=where(kv_idx < i0[b], score * 0.1, -inf), dead_rows='zero'", lengths, (3, 2, 2, 130, 300)),
    "lengths_nan": (f"score=where(({CAUSAL}) & (kv_idx < i0[b]), score * 0.1, -inf)", lengths, (2, 2, 1, 150, 300)),
    "clipped": ("score=minimum(maximum(score * 0.3, -1.0), 1.0)", None, (1, 2, 1, 130, 200)),
    "tile": ("score=where(m0[b, 0, q_idx, kv_idx], score * 0.1, -inf), dead_rows='zero'", kept_tiles, (2, 2, 2, 130, 200)),
    "several_sinks": (
        f"score=where(({CAUSAL}) & (q_idx - kv_idx < 50), score * 0.1, -inf), sinks=[f0[h], f1[b, q_idx], 0.5]", sinks,
        (2, 2, 1, 150, 300),
    ),
    "term": ("score=score * 0.1 + (1.0 - cast_float(i0[b, kv_idx])) * -3.3e38", real, (3, 2, 1, 130, 400)),
    "term_causal": (
        f"score=where({CAUSAL}, score * 0.1 + (1.0 - cast_float(i0[b, kv_idx])) * -3.3e38, -inf)", real, (3, 2, 1, 200, 200)
    ),
    "bias": ("score=score * 0.1 + f0[h, q_idx, kv_idx], dead_rows='zero'", bias, (2, 2, 1, 130, 384)),
    "bias_nan": ("score=tanh(score * 0.1) * 5.0 - f0[h, q_idx, kv_idx] * -1.5", bias, (3, 2, 2, 200, 200)),
    "holes": (
        f"score=where(({CAUSAL}) & m0[b, kv_idx], score * 0.1 + f1[b, kv_idx], -inf), dead_rows='zero'",
        lambda b, _h, _m, n: [torch.rand(b, n) < 0.8, torch.where(torch.rand(b, n) < 0.9, 0.0, 2.0)], (2, 2, 2, 200, 300)
    ),
    "fill": ("score=where(i0[b, kv_idx] != 0, score * 0.1, -1e9)", real, (3, 2, 1, 130, 400)),
    "fill_added": ("score=score * 0.1 + where(i0[b, kv_idx] != 0, 0.0, -1e30)", real, (3, 2, 1, 130, 400)),
}  # fmt: skip


def ranges_of(captures: list[Tensor], spec: AttentionSpec, shape: tuple[int, ...], rows: int = 64) -> Tensor:
    """What the kernel of tile_ranges finds, by the mask itself: [B, tiles of ``rows``, 4] in keys."""
    from fa_inductor.templates.sm90.form import forward_form_of

    b, h, _, m, n = shape
    form = forward_form_of(spec)
    assert not isinstance(form, str)
    env = reference.Env.full((b, h, m, n), captures, [], torch.device("cpu"), torch.float32)
    keep = reference.evaluate(form.rest, env).broadcast_to(b, 1, m, n)[:, 0] if form.rest != TRUE else torch.ones(b, m, n) > 0
    clear = keep
    if form.term is not None:
        term = reference.evaluate(form.term, env).broadcast_to(b, 1, m, n)[:, 0]
        keep, clear = keep & (term > -30000.0), keep & (term == 0)
    found = torch.zeros(b, -(-m // rows), 4, dtype=torch.int32)
    for i in range(b):
        for t in range(found.shape[1]):
            part, own = clear[i, rows * t : rows * t + rows], keep[i, rows * t : rows * t + rows]
            hit, whole = own.any(0).nonzero(), part.all(0)
            seen = whole.tolist()
            first = seen.index(True) if True in seen else 0
            end = next((x for x in range(first, n) if not seen[x]), n) if True in seen else 0
            every = (form.wide and not whole.any()) or (form.term is not None and bool(form.highs))
            low, high = (0, n) if every else (int(hit.min()), int(hit.max()) + 1) if len(hit) else (n, 0)
            found[i, t] = torch.tensor([low, high, first, end])
    return found


#: What the kernel with one loop takes: nothing computed of a score, and a mask as ranges.
STREAMED = (
    "documents", "documents_zero", "lengths", "lengths_nan", "padding_causal", "padding_zero", "several_sinks", "sinks",
    "softcap_documents",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "keys", "consumers", "stream"),
    [
        *((name, keys, consumers, False) for name in CASES for keys, consumers in ((128, 2), (64, 3))),
        *((name, keys, 2, True) for name in STREAMED for keys in (128, 64)),
    ],
)
def test_values(name: str, keys: int, consumers: int, stream: bool) -> None:
    from fa_inductor.templates.direct import problem_of
    from fa_inductor.templates.program import Program
    from fa_inductor.templates.sm90.form import forward_form_of
    from fa_inductor.templates.sm90.forward_source import forward_kernel, forward_source_of

    torch.manual_seed(0)
    text, make, shape = CASES[name]
    b, h, hkv, m, n = shape
    d = 64
    spec = AttentionSpec.parse(f"attention({text})")
    q, k, v = (torch.randn(b, x, length, d).half() for x, length in ((h, m), (hkv, n), (hkv, n)))
    captures = make(b, h, m, n) if make else []
    exact = [t.double() for t in (q, k, v)]
    doubles = [c.double() if c.is_floating_point() else c for c in captures]
    want, want_lse = reference.attention(*exact, doubles, [], spec)
    problem = problem_of(q, k, v, captures, [])
    asked = Program.of(spec, problem).spec
    form = forward_form_of(asked)
    assert not isinstance(form, str), form
    source = forward_source_of(spec, problem, [c.stride() for c in captures])
    assert (name in STREAMED) == (source.plain and not source.wide and bool(source.ranges or not source.masked))
    # Scalars are tensors, as the kernel's other numbers.
    values = {a: captures[int(a[3])].stride(int(a[6])) for a in source.arguments if "_S" in a}
    named = tuple(Number.of(values[a]) if a in values else Pointer(captures[int(a[3])].flatten()) for a in source.arguments)
    ranges = Pointer(ranges_of(captures, asked, shape).flatten()) if source.ranges else None
    assert bool(source.ranges) == ((form.wide and not form.of_scores) or (form.rest != TRUE and name != "tile"))
    low, high = form.band(m, n, [])
    out, lse = torch.full((b, h, m, d), 7.0, dtype=torch.float16), torch.full((b * h * m,), 7.0)
    tiles = ((q, 64, d), (k, keys, d), (v, keys, d), (out, 64, d))
    arguments: list[Any] = [Descriptor(t, (1, 1, *tile)) for t, *tile in tiles]
    arguments += [Pointer(lse), Pointer(torch.zeros(1, dtype=torch.int64)), form.scale * math.log2(math.e), form.softcap or 0.0]
    arguments += [Number.of(x) for x in (m, n, low or 0, high or 0, h, b * h, h // hkv)]
    constants = {
        "KEYS": keys, "STAGES": 2, "CONSUMERS": consumers, "SECTION": 2, "DYNAMIC": True, "REGISTERS": 0, "PING_PONG": True,
        "OWN_O": True, "EVEN": n % keys == 0, "HAS_LOW": low is not None, "HAS_HIGH": high is not None,
        "SOFTCAP": form.softcap is not None and form.plain, "DEAD_ZERO": spec.dead_rows == "zero", **source.constants,
    }  # fmt: skip
    if stream:
        constants["STAGES"] = 256 // keys
        for name in ("OWN_O", "PROGRAM", "WIDE", "ACROSS"):
            del constants[name]
    launch(forward_kernel(source, stream), 2, [*arguments, named or None, ranges], constants)
    nan = torch.isnan(want)
    assert torch.equal(torch.isnan(out), nan)
    assert error(out[~nan].float(), want[~nan]) < 2e-3
    kept = torch.isfinite(want_lse)
    torch.testing.assert_close(lse.view(b, h, m)[kept], want_lse[kept].float(), rtol=1e-5, atol=1e-3)
    assert torch.equal(torch.isfinite(lse.view(b, h, m)), kept)
