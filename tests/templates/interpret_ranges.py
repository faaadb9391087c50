"""Run the kernels that find a tile of keys' queries in Triton's interpreter and check them against the masks.

A program of its own because TRITON_INTERPRET must be set before triton is first imported.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from fa_inductor import reference
from fa_inductor.spec import AttentionSpec
from fa_inductor.templates.direct import problem_of
from fa_inductor.templates.sm90.form import program_form_of
from fa_inductor.templates.sm90.program_source import range_kernel, source_of

ROWS, KEYS = 64, 128


def check(mask: str, captures: list[Tensor], m: int, n: int, exact: bool = True, more: str = ", dead_rows='zero'") -> None:
    """No tile that sees a key is left out, no masked one counts as whole; ``exact``: and no other tile is visited."""
    spec = AttentionSpec.parse(f"attention(score=where({mask}, score, -inf){more})")
    b = 2
    q, k = torch.zeros(b, 2, m, 16), torch.zeros(b, 2, n, 16)
    source = source_of(spec, problem_of(q, k, k, captures, [], [q]), [c.stride() for c in captures])
    assert source.ranges, mask
    tiles = -(-n // KEYS)
    found = torch.full((b, tiles, 4), -1, dtype=torch.int32)
    given = [captures[int(a[3])].stride(int(a[6])) if "_S" in a else captures[int(a[3])] for a in source.range_arguments]
    range_kernel(source.ranges)[(b * tiles, 1, 1)](found, *given, m, n, BLOCK_M=ROWS, BLOCK_N=KEYS)
    form = program_form_of(spec)
    assert not isinstance(form, str)
    env = reference.Env.full((b, 2, m, n), captures, [], torch.device("cpu"), torch.float32)
    keep = reference.evaluate(form.rest, env).broadcast_to(b, 1, m, n)[:, 0]
    for i in range(b):
        for t in range(tiles):
            first, end, whole_first, whole_end = found[i, t].tolist()
            part = keep[i, :, KEYS * t : KEYS * t + KEYS]
            seen = sorted({int(x) // ROWS for x in part.any(1).nonzero()})
            if not more:
                assert (first, end) == (0, -(-m // ROWS)), mask
            elif seen:
                assert first <= seen[0], (mask, i, t)
                assert end > seen[-1], (mask, i, t)
                assert not exact or (first, end) == (seen[0], seen[-1] + 1), (mask, i, t)
            else:
                assert not exact or first >= end, (mask, i, t)
            for x in range(whole_first, whole_end):
                assert part[ROWS * x : ROWS * x + ROWS].all(), (mask, i, t, x)
            if exact and part.all():
                assert (whole_first, whole_end) == (0, m // ROWS), (mask, i, t)


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
    print("right")
