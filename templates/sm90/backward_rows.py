"""What comes before and after the Gluon backward kernel: row statistics, and dQ from its float32 sum."""

import triton
import triton.language as tl


# Strides are specialised: loads and stores of several elements at once need to know that they are multiples of 16.
@triton.jit(do_not_specialize=["heads", "q_len", "padded_len"])
def row_statistics(
    out, grad_out, lse, log2_denom, delta, dq_sum, heads, q_len, padded_len,
    out_b, out_h, out_m, grad_b, grad_h, grad_m,
    QK_DIM: tl.constexpr, QK_PAD: tl.constexpr, V_DIM: tl.constexpr, V_PAD: tl.constexpr, ROWS: tl.constexpr,
    DEAD_ZERO: tl.constexpr,
):  # fmt: skip
    """LOG2_DENOM and DELTA [B, H, padded_len] float32 of OUT and GRAD_OUT [B, H, M, V_DIM], LSE [B, H, M].

    delta = sum_d out * grad_out; log2_denom = lse * log2(e). Rows past the end, and with DEAD_ZERO rows without keys, get
    +inf and 0, so that exp2(score - log2_denom) is 0. DQ_SUM [B, H, padded_len, QK_DIM] float32 is zeroed.
    """
    # One grid dimension: the others end at 65535, and there may be more heads.
    tiles = padded_len // ROWS
    head = (tl.program_id(0) // tiles).to(tl.int64)
    b = head // heads
    h = head % heads
    rows = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, V_PAD)
    inside = (rows[:, None] < q_len) & (d[None, :] < V_DIM)
    index = rows.to(tl.int64)[:, None]
    o = tl.load(out + b * out_b + h * out_h + index * out_m + d[None, :], mask=inside, other=0.0).to(tl.float32)
    do = tl.load(grad_out + b * grad_b + h * grad_h + index * grad_m + d[None, :], mask=inside, other=0.0).to(tl.float32)
    row_lse = tl.load(lse + head * q_len + rows, mask=rows < q_len, other=float("inf"))
    if DEAD_ZERO:
        row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse)
    stored = rows < padded_len
    tl.store(log2_denom + head * padded_len + rows, row_lse * 1.4426950408889634, mask=stored)
    tl.store(delta + head * padded_len + rows, tl.sum(o * do, 1), mask=stored)
    d = tl.arange(0, QK_PAD)
    inside = stored[:, None] & (d[None, :] < QK_DIM)
    tl.store(dq_sum + (head * padded_len + index) * QK_DIM + d[None, :], tl.zeros([ROWS, QK_PAD], tl.float32), mask=inside)


@triton.jit(do_not_specialize=["heads", "q_len", "padded_len"])
def scale_sum(
    total, result, factor, heads, q_len, padded_len, result_b, result_h, result_m,
    DIM: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """RESULT [B, H, M, DIM] = TOTAL [B, H, padded_len, DIM] * factor in RESULT's dtype."""
    tiles = padded_len // ROWS
    head = (tl.program_id(0) // tiles).to(tl.int64)
    rows = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, PAD)
    inside = (rows[:, None] < q_len) & (d[None, :] < DIM)
    index = rows.to(tl.int64)[:, None]
    value = tl.load(total + (head * padded_len + index) * DIM + d[None, :], mask=inside)
    place = head // heads * result_b + head % heads * result_h + index * result_m + d[None, :]
    tl.store(result + place, (value * factor).to(result.dtype.element_ty), mask=inside)
