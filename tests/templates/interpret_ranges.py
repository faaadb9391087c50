"""Run the kernels that find a tile of keys' queries, and a tile of queries' keys, in Triton's interpreter and check them against
the masks.

A program of its own because TRITON_INTERPRET must be set before triton is first imported.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from fa_inductor import reference
from fa_inductor.expr import TRUE
from fa_inductor.spec import AttentionSpec
from fa_inductor.templates.direct import problem_of
from fa_inductor.templates.sm90.form import forward_form_of, program_form_of
from fa_inductor.templates.sm90.forward_source import forward_source_of
from fa_inductor.templates.sm90.program_source import range_kernel, source_of

B = 2


FAR = 2**30


def found_by(
    source: object, captures: list[Tensor], m: int, n: int, rows: int, keys: int, by_rows: bool, high: int = FAR
) -> Tensor:
    """[B, tiles, 4] as the kernel leaves it; ``by_rows``: of tiles of queries, with a band up to ``high``."""
    text, names = source.ranges, source.range_arguments  # type: ignore[attr-defined]
    own, size = (m, rows) if by_rows else (n, keys)
    tiles = -(-own // size)
    found = torch.full((B, tiles, 4), -1, dtype=torch.int32)
    given = [captures[int(a[3])].stride(int(a[6])) if "_S" in a else captures[int(a[3])] for a in names]
    band = (-FAR, high) if by_rows else ()
    range_kernel(text)[(B * tiles, 1, 1)](found, *given, m, n, *band, BLOCK_M=rows, BLOCK_N=keys)
    if by_rows:  # keys
        found[..., 0] //= keys
        found[..., 1] = -(-found[..., 1] // keys)
        found[..., 2] = -(-found[..., 2] // keys)
        found[..., 3] //= keys
    return found


def compare(found: Tensor, keep: Tensor, clear: Tensor, own: int, other: int, every: bool, exact: bool, what: str) -> None:
    """No tile that is seen is left out, no masked one counts as whole; ``exact``: and no other tile is visited.

    ``keep``, ``clear``: [B, side with the tiles of ``found``, other side]. ``every``: all tiles must be visited.
    """
    length = keep.shape[2]
    for i in range(B):
        for t in range(found.shape[1]):
            first, end, whole_first, whole_end = found[i, t].tolist()
            part, whole = (x[i, own * t : own * t + own] for x in (keep, clear))
            seen = sorted({int(x) // other for x in part.any(0).nonzero()})
            where = (what, i, t)
            if every:
                assert (first, end) == (0, -(-length // other)), where
            elif seen:
                assert first <= seen[0], where
                assert end > seen[-1], where
                assert not exact or (first, end) == (seen[0], seen[-1] + 1), where
            else:
                assert not exact or first >= end, where
            for x in range(whole_first, whole_end):
                assert whole[:, other * x : other * x + other].all(), (*where, x)
            if exact and whole.all():
                assert (whole_first, whole_end) == (0, length // other), where


def check(mask: str, captures: list[Tensor], m: int, n: int, exact: bool = True, more: str = ", dead_rows='zero'") -> None:
    spec = AttentionSpec.parse(f"attention(score=where({mask}, score, -inf){more})")
    q, k = torch.zeros(B, 2, m, 16), torch.zeros(B, 2, n, 16)
    strides = [c.stride() for c in captures]
    form = program_form_of(spec)
    assert not isinstance(form, str)
    env = reference.Env.full((B, 2, m, n), captures, [], torch.device("cpu"), torch.float32)
    keep = reference.evaluate(form.rest, env).broadcast_to(B, 1, m, n)[:, 0]
    found = found_by(source_of(spec, problem_of(q, k, k, captures, [], [q]), strides), captures, m, n, 64, 128, False)
    compare(found, keep.transpose(1, 2), keep.transpose(1, 2), 128, 64, not more, exact, mask)
    source = forward_source_of(spec, problem_of(q, k, k, captures, []), strides)
    for keys in (128, 64):
        found = found_by(source, captures, m, n, 64, keys, True)
        compare(found, keep, keep, 64, keys, False, exact, mask)
    # Under a causal mask, what it leaves must still be seen.
    causal = keep & (torch.arange(m)[:, None] >= torch.arange(n))
    compare(found_by(source, captures, m, n, 64, 128, True, 0), causal, keep, 64, 128, False, False, mask)


def check_finite(score: str, captures: list[Tensor], m: int, n: int, skips: bool = True) -> None:
    """Of logits that are low instead of masked: where no key of a batch is clear, every tile is visited."""
    spec = AttentionSpec.parse(f"attention(score={score})")
    q, k = torch.zeros(B, 2, m, 16), torch.zeros(B, 2, n, 16)
    form = forward_form_of(spec)
    assert not isinstance(form, str), form
    source = forward_source_of(spec, problem_of(q, k, k, captures, []), [c.stride() for c in captures])
    env = reference.Env.full((B, 2, m, n), captures, [], torch.device("cpu"), torch.float32)
    clear = torch.ones(B, m, n, dtype=torch.bool)
    if form.rest != TRUE:
        clear &= reference.evaluate(form.rest, env).broadcast_to(B, 1, m, n)[:, 0]
    keep = clear
    if form.term is not None:
        term = reference.evaluate(form.term, env).broadcast_to(B, 1, m, n)[:, 0]
        keep, clear = clear & (term > -30000.0), clear & (term == 0.0)
    found = found_by(source, captures, m, n, 64, 128, True)
    for i in range(B):
        pick = [torch.stack([x[i], x[i]]) for x in (found, keep, clear)]
        compare(*pick, 64, 128, not skips or not bool(clear[i].any()), False, score)


if __name__ == "__main__":
    torch.manual_seed(0)
    ids = (torch.rand(2, 2500) < 0.003).long().cumsum(1)
    ids[1] = 3
    keep = torch.ones(2, 2500, dtype=torch.bool)
    keep[0, :300], keep[1, 500:] = False, False
    for m, n in ((1300, 600), (300, 1300), (2500, 2500)):
        check("i0[b, q_idx] == i0[b, kv_idx]", [ids], m, n)
        if m == n:
            break
        check("i0[b, kv_idx] == i0[b, q_idx]", [ids.int()], m, n)
        check("m0[b, kv_idx]", [keep], m, n, more="")
        check("i0[b, q_idx] >= i0[b, kv_idx]", [ids], m, n)
        check("i0[b, kv_idx] > i0[b, q_idx]", [ids], m, n)
        check("m0[b, kv_idx]", [keep], m, n)
        check("m0[b, q_idx] & m0[b, kv_idx]", [keep], m, n, exact=False)
        check("(kv_idx < i0[b]) & (i1[b, q_idx] == i1[b, kv_idx])", [torch.tensor([0, 700]), ids], m, n)
        check("(kv_idx < i0[b]) & (kv_idx // 100 != q_idx // 100)", [torch.tensor([500, 700])], m, n, exact=False)
        check("kv_idx // 100 == q_idx // 100", [], m, n, exact=False)
        check("i0[b, q_idx] == i0[b, kv_idx]", [torch.randint(0, 9, (2, 2500))], m, n, exact=False)
        real = keep.long()
        real[1] = 0
        term = "(1.0 - cast_float(i0[b, kv_idx])) * -3.3e38"
        check_finite(f"score + {term}", [real], m, n)
        check_finite(f"where(kv_idx <= q_idx, score + {term}, -inf)", [real], m, n, skips=False)
        check_finite("where(i0[b, kv_idx] != 0, score, -1e9)", [real], m, n)
        check_finite("score + f0[b, kv_idx]", [torch.where(keep, 0.0, -1e5) + torch.tensor([[0.0], [1.0]])], m, n)
    print("right")
