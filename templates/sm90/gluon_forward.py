"""Flash attention forward for Hopper in Gluon: one producer warp, two or three consumer warpgroups.

A program computes 64 query rows a consumer, of one (batch, query head). The producer warp loads Q once and K and V tile by
tile through TMA into rings of ``STAGES`` buffers. Each consumer keeps 64 rows of the softmax and the output in registers:
while the tensor cores multiply P of one key tile with V, it runs the softmax of the next. The consumers take turns in
issuing their products (``PING_PONG``), so that one computes exponentials while the other's products run.

The program's mask is a band: query q attends to keys ``q + low <= kv <= q + high``, each side optional. Key tiles are
visited from the last to the first; a consumer masks only the tiles that an end of the band or of the keys crosses for its own
rows, and leaves out those after the last key that they see.

Units: the softmax runs in base 2, ``scale`` holds log2(e). LSE is the natural logarithm of the denominator, [B, H, M].
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from fa_inductor.templates.sm90.gluon_parts import (
    accumulator_layout,
    as_operand,
    banded,
    begin,
    first_scores,
    last_product,
    next_rows,
    next_tile,
    producer,
    products,
    shares,
    store_output,
    tanh,
)


@gluon.jit
def own_end(row_first, q_len, first, end, high, HAS_HIGH: gl.constexpr, KEYS: gl.constexpr):
    """Where the key tiles from ``first`` to ``end`` end for the 64 rows of a consumer; at least one tile is left."""
    if HAS_HIGH:
        q_last = gl.minimum(row_first + 64, q_len) - 1
        end = gl.minimum(end, gl.maximum((gl.maximum(q_last + high + 1, 0) + KEYS - 1) // KEYS, first + 1))
    # Nothing is kept of rows past the end.
    return gl.where(row_first < q_len, end, first + 1)


@gluon.jit
def softmax(s, m, denom, scale):
    """One tile of scores into probabilities: (p, maximum, sum, what the earlier output is multiplied with)."""
    m_new = gl.maximum(m, gl.max(s, 1) * scale)
    m_safe = gl.where(m_new == -float("inf"), 0.0, m_new)
    alpha = gl.exp2(m - m_safe)
    p = gl.exp2(s * scale - m_safe[:, None])
    return p, m_new, denom * alpha + gl.sum(p, 1), alpha


@gluon.jit
def step(
    i, t, n, q, at, p, m, denom, acc,
    row_first,
    W: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
    PING_PONG: gl.constexpr, EVEN: gl.constexpr, HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr, SOFTCAP: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scores of the keys from ``n``, load ``i``, while tile ``i - 1`` is multiplied with V. ``t`` counts the turns."""
    s, o_token = products(i, t, q, at, p, acc, W, KEYS, STAGES, CONSUMERS, PING_PONG, S_LAYOUT)
    if SOFTCAP:
        s = tanh(s * at.cap)
    s = banded(s, row_first, n, at.kv_len, at.low, at.high, KEYS, EVEN, HAS_LOW, HAS_HIGH, S_LAYOUT)
    p, m, denom, alpha = softmax(s, m, denom, at.scale)
    acc = warpgroup_mma_wait(0, deps=[o_token])
    mbarrier.arrive(at.v_empty.index((i - 1) % STAGES))
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
    return as_operand(p, q.dtype, O_LAYOUT), m, denom, acc


@gluon.jit
def consumer(
    W: gl.constexpr, at, KEYS: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, SECTION: gl.constexpr,
    DYNAMIC: gl.constexpr, QK_DIM: gl.constexpr, V_DIM: gl.constexpr, PING_PONG: gl.constexpr, OWN_O: gl.constexpr,
    EVEN: gl.constexpr, HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr, SOFTCAP: gl.constexpr, DEAD_ZERO: gl.constexpr,
):  # fmt: skip
    S_LAYOUT: gl.constexpr = accumulator_layout(KEYS)
    O_LAYOUT: gl.constexpr = accumulator_layout(V_DIM)
    q, o_tile, work, total = begin(W, at, QK_DIM, CONSUMERS, OWN_O)
    loaded = 0
    t = 0
    done = 0
    while work < total:
        row_first, b, h, first, _full_first, _full_end, end = next_rows(
            W, work, at, None, KEYS, CONSUMERS, SECTION, HAS_LOW, HAS_HIGH
        )
        m = gl.full([64], -float("inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
        denom = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, S_LAYOUT))
        acc = gl.zeros([64, V_DIM], gl.float32, O_LAYOUT)

        # Tiles that only the other consumers' rows see: their buffers are given back, and the turns passed on.
        skip = end - own_end(row_first, at.q_len, first, end, at.high, HAS_HIGH, KEYS)
        for j in range(skip):
            i = loaded + j
            mbarrier.wait(at.k_full.index(i % STAGES), (i // STAGES) & 1)
            mbarrier.arrive(at.k_empty.index(i % STAGES))
            if PING_PONG:
                mbarrier.wait(at.turn.index(W), (t + j) & 1)
                mbarrier.arrive(at.turn.index((W + 1) % CONSUMERS))
            mbarrier.wait(at.v_full.index(i % STAGES), (i // STAGES) & 1)
            mbarrier.arrive(at.v_empty.index(i % STAGES))

        i = loaded + skip
        mbarrier.wait(at.q_full.index(W), done & 1)
        s = first_scores(q, i, at, KEYS, QK_DIM, STAGES, S_LAYOUT)
        if SOFTCAP:
            s = tanh(s * at.cap)
        s = banded(s, row_first, (end - 1 - skip) * KEYS, at.kv_len, at.low, at.high, KEYS, EVEN, HAS_LOW, HAS_HIGH, S_LAYOUT)
        p, m, denom, _alpha = softmax(s, m, denom, at.scale)
        p = as_operand(p, q.dtype, O_LAYOUT)
        for j in range(skip + 1, end - first):
            p, m, denom, acc = step(
                loaded + j, t + j - 1, (end - 1 - j) * KEYS, q, at, p, m, denom, acc, row_first, W, KEYS, STAGES, CONSUMERS,
                PING_PONG, EVEN, HAS_LOW, HAS_HIGH, SOFTCAP, S_LAYOUT, O_LAYOUT,
            )  # fmt: skip
        if OWN_O:
            mbarrier.arrive(at.q_empty.index(W))
        work = next_tile(work, at.work_smem, at.work_full, at.work_empty, done, DYNAMIC)
        loaded += end - first
        t += end - first - 1
        done += 1

        acc = last_product(p, acc, loaded - 1, at, KEYS, V_DIM, STAGES)

        rows = row_first + gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT))
        lse_row = at.lse + (b * at.num_heads + h).to(gl.int64) * at.q_len + rows
        gl.store(lse_row, (m + gl.log2(denom)) * 0.6931471805599453, mask=rows < at.q_len)
        if DEAD_ZERO:
            denom = gl.where(denom == 0.0, 1.0, denom)
        acc = acc * gl.convert_layout(1.0 / denom, gl.SliceLayout(1, O_LAYOUT))[:, None]
        store_output(acc, at.o_desc, o_tile, at.q_empty.index(W), b, h, row_first, V_DIM, OWN_O)
    tma.store_wait(0)


# One binary serves every length: a length divisible by 16, or 1, is no other kernel.
@gluon.jit(do_not_specialize=["q_len", "kv_len", "low", "high", "num_heads", "total_heads", "group"])
def flash_forward(
    q_desc, k_desc, v_desc, o_desc, lse, counter, scale, cap, q_len, kv_len, low, high, num_heads, total_heads, group,
    KEYS: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, SECTION: gl.constexpr, DYNAMIC: gl.constexpr,
    REGISTERS: gl.constexpr,
    PING_PONG: gl.constexpr, OWN_O: gl.constexpr, EVEN: gl.constexpr, HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr,
    SOFTCAP: gl.constexpr, DEAD_ZERO: gl.constexpr,
):  # fmt: skip
    """out and lse of ``softmax(band(q k^T * scale)) v``; with SOFTCAP of ``softmax(band(tanh(q k^T * cap) * scale)) v``.

    Descriptors over [B, H, L, D]: Q [1, 1, 64, QK_DIM], K [1, 1, KEYS, QK_DIM], V [1, 1, KEYS, V_DIM], O [1, 1, 64, V_DIM].
    Launched with at most ceil(q_len / (64 * CONSUMERS)) * total_heads programs of 4 warps, which share the tiles.
    DYNAMIC: a program takes its next tile from ``counter``, int32[1], zero at the start; with a program a tile, any number.
    OWN_O: the output leaves through a buffer of its own, so that the next queries are loaded before it is stored.
    """
    QK_DIM: gl.constexpr = q_desc.block_type.shape[3]
    V_DIM: gl.constexpr = v_desc.block_type.shape[3]
    for_consumers, for_producer = shares(
        q_desc, k_desc, v_desc, o_desc, lse, counter, scale, cap, q_len, kv_len, low, high, num_heads, total_heads, group,
        STAGES, CONSUMERS, OWN_O, PING_PONG,
    )  # fmt: skip
    # Constants are spelled out in the lists: a variable would make run-time values of them.
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consumer, (
                0, for_consumers, KEYS, STAGES, CONSUMERS, SECTION, DYNAMIC, QK_DIM, V_DIM, PING_PONG, OWN_O, EVEN, HAS_LOW,
                HAS_HIGH, SOFTCAP, DEAD_ZERO,
            )),
            (consumer, (
                1, for_consumers, KEYS, STAGES, CONSUMERS, SECTION, DYNAMIC, QK_DIM, V_DIM, PING_PONG, OWN_O, EVEN, HAS_LOW,
                HAS_HIGH, SOFTCAP, DEAD_ZERO,
            )),
            (producer, (for_producer, None, KEYS, STAGES, CONSUMERS, SECTION, DYNAMIC, HAS_LOW, HAS_HIGH, False)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (
                0, for_consumers, KEYS, STAGES, CONSUMERS, SECTION, DYNAMIC, QK_DIM, V_DIM, PING_PONG, OWN_O, EVEN, HAS_LOW,
                HAS_HIGH, SOFTCAP, DEAD_ZERO,
            )),
            (consumer, (
                1, for_consumers, KEYS, STAGES, CONSUMERS, SECTION, DYNAMIC, QK_DIM, V_DIM, PING_PONG, OWN_O, EVEN, HAS_LOW,
                HAS_HIGH, SOFTCAP, DEAD_ZERO,
            )),
            (consumer, (
                2, for_consumers, KEYS, STAGES, CONSUMERS, SECTION, DYNAMIC, QK_DIM, V_DIM, PING_PONG, OWN_O, EVEN, HAS_LOW,
                HAS_HIGH, SOFTCAP, DEAD_ZERO,
            )),
            (producer, (for_producer, None, KEYS, STAGES, CONSUMERS, SECTION, DYNAMIC, HAS_LOW, HAS_HIGH, False)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip
