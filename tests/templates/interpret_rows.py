"""Run what comes before and after the Gluon backward in Triton's interpreter and check it.

A program of its own because TRITON_INTERPRET must be set before triton is first imported.
"""

from __future__ import annotations

import math
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from fa_inductor.templates.sm90.backward_rows import row_statistics, scale_sum
from fa_inductor.templates.sm90.form import padded


def check(batch: int, heads: int, rows: int, dims: tuple[int, int], dead_zero: bool) -> None:
    d, dv = dims
    out, grad = (torch.randn(batch, rows, heads, dv).transpose(1, 2) for _ in range(2))
    lse = torch.randn(batch, heads, rows)
    lse[0, 0, 3] = -math.inf
    padded_len = -(-rows // 128) * 128
    log2_denom, delta = torch.full((2, batch * heads, padded_len), 7.0)
    total = torch.full((batch * heads * padded_len, d), 5.0)
    block = 4096 // padded(d)
    row_statistics[(padded_len // block * batch * heads, 1, 1)](
        out, grad, lse, log2_denom, delta, total, heads, rows, padded_len,
        *out.stride()[:3], *grad.stride()[:3],
        QK_DIM=d, QK_PAD=padded(d), V_DIM=dv, V_PAD=padded(dv), ROWS=block, DEAD_ZERO=dead_zero,
    )  # fmt: skip
    want = torch.full((batch * heads, padded_len), math.inf)
    want[:, :rows] = lse.reshape(-1, rows) * math.log2(math.e)
    if dead_zero:
        want[want == -math.inf] = math.inf
    torch.testing.assert_close(log2_denom, want)
    want = torch.zeros(batch * heads, padded_len)
    want[:, :rows] = (out * grad).sum(-1).reshape(-1, rows)
    torch.testing.assert_close(delta, want, atol=1e-4, rtol=1e-5)
    assert torch.equal(total, torch.zeros_like(total))
    summed = torch.randn(batch, heads, padded_len, d)
    result = torch.full((batch, rows, heads, d), 7.0, dtype=torch.float16).transpose(1, 2)
    scale_sum[(padded_len // block * batch * heads, 1, 1)](
        summed, result, 0.5, heads, rows, padded_len, *result.stride()[:3], DIM=d, PAD=padded(d), ROWS=block
    )
    torch.testing.assert_close(result, (summed[:, :, :rows] * 0.5).half())


if __name__ == "__main__":
    torch.manual_seed(0)
    check(2, 3, 70, (64, 64), False)
    check(1, 2, 130, (128, 80), True)
    check(3, 1, 16, (256, 200), False)
    print("right")
