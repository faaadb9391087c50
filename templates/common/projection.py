"""One kernel from hidden states to the FP8 operands of an attention: the projections, with the cast in their epilogue.

Each program computes the projection of 128 tokens to one or two heads of q, k or v in float32, adds the bias, rounds to the dtype
of the hidden states as the unfused projection does, and casts the tile while it is in registers: nothing but FP8 reaches memory.
"""

import triton
import triton.language as tl

from fa_inductor.templates.common.quantise import store_keys, store_queries, store_values


@triton.jit
def product(
    x, w, bias, first, head, length, features, xm, wn,
    ROWS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, STEP: tl.constexpr, BIAS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Rows ``first`` ... of X [length, features] times a head's rows of W [heads * DIM, features], [ROWS, PAD] in X's dtype.

    Zero behind the last row.
    """
    row = first + tl.arange(0, ROWS)
    d = tl.arange(0, PAD)
    w += (head * DIM).to(tl.int64) * wn
    acc = tl.zeros([ROWS, PAD], tl.float32)
    if TMA:
        x_desc = tl.make_tensor_descriptor(x, [length, features], [xm, 1], [ROWS, STEP])
        w_desc = tl.make_tensor_descriptor(w, [DIM, features], [wn, 1], [PAD, STEP])
        for at in tl.range(0, features, STEP):
            acc = tl.dot(x_desc.load([first, at]), w_desc.load([0, at]).T, acc)
    else:
        f = tl.arange(0, STEP)
        x_row = x + tl.minimum(row, length - 1).to(tl.int64)[:, None] * xm
        w_row = w + tl.minimum(d, DIM - 1).to(tl.int64)[:, None] * wn
        for at in tl.range(0, features, STEP):
            inside = (at + f < features)[None, :]
            a = tl.load(x_row + (at + f)[None, :], mask=inside, other=0.0)
            b = tl.load(w_row + (at + f)[None, :], mask=inside, other=0.0)
            acc = tl.dot(a, b.T, acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + head * DIM + d, mask=d < DIM, other=0.0).to(tl.float32)[None, :]
    kept = (row < length)[:, None] & (d < DIM)[None, :]
    return tl.where(kept, acc, 0.0).to(x.dtype.element_ty)


@triton.jit
def sides(x, ROWS: tl.constexpr, DIM: tl.constexpr):
    """The first and the last columns of x [ROWS, 2 * DIM]."""
    return tl.split(tl.permute(tl.reshape(x, [ROWS, 2, DIM]), (0, 2, 1)))


@triton.jit(do_not_specialize=["batch", "heads", "kv_heads", "length"])
def project(
    x, wq, wk, wv, bq, bk, bv, q8, k8, v8, q_scale, k_scale, v_scale, batch, heads, kv_heads, length, features, xb, xm,
    q_row, k_row, v_row,
    QK_DIM: tl.constexpr, QK_PAD: tl.constexpr, V_DIM: tl.constexpr, V_PAD: tl.constexpr, KEYS: tl.constexpr,
    TOGETHER: tl.constexpr, STEP: tl.constexpr, SECTION: tl.constexpr, GROUP: tl.constexpr, INTEGER: tl.constexpr,
    PERMUTE: tl.constexpr, BIAS: tl.constexpr, TMA: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """X [B, L, features]; WQ [HQ * QK_DIM, features] with rows ``q_row`` apart, BQ [HQ * QK_DIM], and so on; the results as
    templates/common/quantise.py has them. One program a block of KEYS tokens and TOGETHER (1 or 2) heads of q, k and v; SECTION
    blocks run side by side, head by head, and share the weights in L2. TOGETHER 2: head dims are powers of two, heads even.
    """
    tl.static_assert(TOGETHER == 1 or (TOGETHER == 2 and QK_DIM == QK_PAD and V_DIM == V_PAD))
    pid = tl.program_id(0)
    blocks = tl.cdiv(length, KEYS)
    tokens = blocks * batch
    q_columns = heads // TOGETHER
    kv_columns = kv_heads // TOGETHER
    columns = q_columns + 2 * kv_columns
    section = pid // (SECTION * columns)
    inside = pid - section * (SECTION * columns)
    width = tl.minimum(SECTION, tokens - section * SECTION)
    token = section * SECTION + inside % width
    column = inside // width
    b = token // blocks
    block = token % blocks
    x += b.to(tl.int64) * xb
    first = block * KEYS
    rows = first + tl.arange(0, KEYS)
    QK: tl.constexpr = TOGETHER * QK_DIM
    QK_WIDE: tl.constexpr = TOGETHER * QK_PAD
    V: tl.constexpr = TOGETHER * V_DIM
    V_WIDE: tl.constexpr = TOGETHER * V_PAD
    if column < q_columns:
        q = product(x, wq, bq, first, column, length, features, xm, q_row, KEYS, QK, QK_WIDE, STEP, BIAS, TMA)
        q_head = (b * heads + column * TOGETHER).to(tl.int64)
        if TOGETHER == 2:
            q, q2 = sides(q, KEYS, QK_DIM)
            store_queries(q2, q8, q_scale, q_head + 1, rows, length, QK_DIM, QK_PAD, KEYS, GROUP, INTEGER, ROUNDS)
        store_queries(q, q8, q_scale, q_head, rows, length, QK_DIM, QK_PAD, KEYS, GROUP, INTEGER, ROUNDS)
    elif column < q_columns + kv_columns:
        at = column - q_columns
        k = product(x, wk, bk, first, at, length, features, xm, k_row, KEYS, QK, QK_WIDE, STEP, BIAS, TMA)
        k_head = (b * kv_heads + at * TOGETHER).to(tl.int64)
        if TOGETHER == 2:
            k, k2 = sides(k, KEYS, QK_DIM)
            store_keys(k2, k8, k_scale, k_head + 1, block, length, QK_DIM, QK_PAD, KEYS, GROUP, INTEGER, ROUNDS)
        store_keys(k, k8, k_scale, k_head, block, length, QK_DIM, QK_PAD, KEYS, GROUP, INTEGER, ROUNDS)
    else:
        last = column - q_columns - kv_columns
        v = product(x, wv, bv, first, last, length, features, xm, v_row, KEYS, V, V_WIDE, STEP, BIAS, TMA)
        v_head = (b * kv_heads + last * TOGETHER).to(tl.int64)
        if TOGETHER == 2:
            v, v2 = sides(v, KEYS, V_DIM)
            store_values(v2, v8, v_scale, v_head + 1, block, length, V_DIM, V_PAD, KEYS, PERMUTE, ROUNDS)
        store_values(v, v8, v_scale, v_head, block, length, V_DIM, V_PAD, KEYS, PERMUTE, ROUNDS)
