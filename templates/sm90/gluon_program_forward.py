"""The Gluon forward of programs that read captured tensors or have logits of their own.

Roles, schedule and units are those of :mod:`fa_inductor.templates.sm90.gluon_forward`. Key tiles are visited from the last to
the first; only the tiles that an end of the band or of the keys crosses are masked. What else masks, and a logit of the
program's own, is text that :mod:`fa_inductor.templates.sm90.forward_source` prints; the tiles of keys that such a mask leaves
a tile of queries come from memory, RANGES.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from fa_inductor.templates.sm90.gluon_parts import (
    accumulator_layout,
    as_operand,
    begin,
    first_scores,
    last_product,
    next_rows,
    next_tile,
    producer,
    products,
    ranges_of,
    shares,
    store_output,
    tanh,
)

# What a score program computes, where it is more than a scale, a softcap and a band. A module that
# :mod:`fa_inductor.templates.sm90.forward_source` generates holds this file's text and, after it, definitions of its own of
# these. ``score`` is S [64, KEYS], ``q_idx`` [64, 1] and ``kv_idx`` [1, KEYS] lie within the lengths.


@gluon.jit
def score_values(b_idx, h_idx, q_idx, Q_LEN, KV_LEN, captures):
    """What depends on no key: once a tile of queries."""
    return (0,)


@gluon.jit
def score_logit(score, b_idx, h_idx, q_idx, kv_idx, Q_LEN, KV_LEN, captures, values):
    """The logit over ``scale``, not masked."""
    return score


@gluon.jit
def score_ahead(b_idx, h_idx, q_idx, kv_idx, Q_LEN, KV_LEN, captures):
    """What :func:`score_masked` takes of memory for every score, as it lies there: asked for before the scores are there."""
    return (0,)


@gluon.jit
def score_masked(logit, b_idx, h_idx, q_idx, kv_idx, Q_LEN, KV_LEN, captures, ahead):
    """``logit``, or -inf where the program masks it by more than a band. With WIDE it is the logit itself, and what the program
    adds to it for a key or a score is added here."""
    return logit


@gluon.jit
def score_sinks(b_idx, h_idx, q_idx, Q_LEN, KV_LEN, captures):
    """The sinks of queries [64], times log2(e): numbers or such blocks."""
    return (0.0,)


@gluon.jit
def seen_by(ranges, b, row_first, q_len, kv_len):
    """What RANGES say of 64 queries: (first key, end, first key of a run that all see, its end, and of those that need no other
    mask than the first two: all where they are the run's)."""
    first = 0
    end = kv_len
    whole_first = 0
    whole_end = 0
    clear_first = 0
    clear_end = 0
    if ranges is not None:
        at = ranges_of(ranges, b, row_first, q_len)
        first = gl.load(at)
        end = gl.load(at + 1)
        whole_first = gl.load(at + 2)
        whole_end = gl.load(at + 3)
        alone = (first == whole_first) & (end == whole_end)
        clear_first = gl.where(alone, 0, whole_first)
        clear_end = gl.where(alone, 1 << 30, whole_end)
    return first, end, whole_first, whole_end, clear_first, clear_end


@gluon.jit
def queries_from(row_first, q_len, LAYOUT: gl.constexpr):
    """The queries of a consumer [64]; those past the end repeat the last one."""
    return gl.minimum(row_first + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT)), q_len - 1)


@gluon.jit
def places(at, row_first, n, KEYS: gl.constexpr, EVEN: gl.constexpr, LAYOUT: gl.constexpr):
    """Queries [64, 1] and keys [1, KEYS] of a tile of scores; those past the ends repeat the last ones."""
    at_kv = n + gl.arange(0, KEYS, layout=gl.SliceLayout(0, LAYOUT))
    if not EVEN:
        at_kv = gl.minimum(at_kv, at.kv_len - 1)
    return queries_from(row_first, at.q_len, LAYOUT)[:, None], at_kv[None, :]


@gluon.jit
def taken_ahead(
    at, row_first, n, b, h, captures, EDGE: gl.constexpr, KEYS: gl.constexpr, EVEN: gl.constexpr, MASKED: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    ahead = (0,)
    if EDGE and MASKED:
        at_q, at_kv = places(at, row_first, n, KEYS, EVEN, LAYOUT)
        ahead = score_ahead(b, h, at_q, at_kv, at.q_len, at.kv_len, captures)
    return ahead


@gluon.jit
def softmax(
    s, m, denom, at, row_first, n, b, h, captures, values, ahead,
    seen_first, seen_end, clear_first, clear_end,
    EDGE: gl.constexpr, KEYS: gl.constexpr, EVEN: gl.constexpr, HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr,
    SOFTCAP: gl.constexpr, PROGRAM: gl.constexpr, MASKED: gl.constexpr, WIDE: gl.constexpr, RANGED: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """One tile of scores into probabilities: (p, maximum, sum, what the earlier output is multiplied with).

    What masks besides the band keeps no key but from ``seen_first`` to ``seen_end``, and of those all from ``clear_first`` to
    ``clear_end``.
    """
    if SOFTCAP:
        s = tanh(s * at.cap)
    if PROGRAM or (EDGE and MASKED):
        at_q, at_kv = places(at, row_first, n, KEYS, EVEN, LAYOUT)
    if PROGRAM:
        s = score_logit(s, b, h, at_q, at_kv, at.q_len, at.kv_len, captures, values)
    if EDGE and MASKED:
        if WIDE:
            s = s * (at.scale * 0.6931471805599453)
        if not RANGED or (n < clear_first) | (n + KEYS > clear_end):
            s = score_masked(s, b, h, at_q, at_kv, at.q_len, at.kv_len, captures, ahead)
    if EDGE:
        q_idx = row_first + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
        kv_idx = n + gl.arange(0, KEYS, layout=gl.SliceLayout(0, LAYOUT))
        if HAS_HIGH:
            s = gl.where(kv_idx[None, :] <= (q_idx + at.high)[:, None], s, -float("inf"))
        if HAS_LOW:
            s = gl.where(kv_idx[None, :] >= (q_idx + at.low)[:, None], s, -float("inf"))
        if MASKED and RANGED:
            # ``seen_end`` is no more than ``at.kv_len``.
            s = gl.where(((kv_idx >= seen_first) & (kv_idx < seen_end))[None, :], s, -float("inf"))
        elif not EVEN:
            s = gl.where((kv_idx < at.kv_len)[None, :], s, -float("inf"))
    if WIDE:
        # The maximum is one of logits: those of edge tiles may be too large to be multiplied.
        top = gl.max(s, 1)
        if not EDGE:
            top = top * (at.scale * 0.6931471805599453)
        m_new = gl.maximum(m, top)
        m_safe = gl.where(m_new == -float("inf"), 0.0, m_new)
        alpha = gl.exp2((m - m_safe) * 1.4426950408889634)
        if EDGE:
            p = gl.exp2((s - m_safe[:, None]) * 1.4426950408889634)
        else:
            p = gl.exp2(s * at.scale - (m_safe * 1.4426950408889634)[:, None])
    else:
        m_new = gl.maximum(m, gl.max(s, 1) * at.scale)
        m_safe = gl.where(m_new == -float("inf"), 0.0, m_new)
        alpha = gl.exp2(m - m_safe)
        p = gl.exp2(s * at.scale - m_safe[:, None])
    return p, m_new, denom * alpha + gl.sum(p, 1), alpha


@gluon.jit
def step(
    i, t, n, q, at, p, m, denom, acc,
    row_first, b, h, captures, values,
    seen_first, seen_end, clear_first, clear_end,
    W: gl.constexpr, EDGE: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
    PING_PONG: gl.constexpr, EVEN: gl.constexpr, HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr, SOFTCAP: gl.constexpr,
    PROGRAM: gl.constexpr, MASKED: gl.constexpr, WIDE: gl.constexpr, RANGED: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scores of the keys from ``n``, load ``i``, while tile ``i - 1`` is multiplied with V. ``t`` counts the turns."""
    ahead = taken_ahead(at, row_first, n, b, h, captures, EDGE, KEYS, EVEN, MASKED, S_LAYOUT)
    s, o_token = products(i, t, q, at, p, acc, W, KEYS, STAGES, CONSUMERS, PING_PONG, S_LAYOUT)
    p, m, denom, alpha = softmax(
        s, m, denom, at, row_first, n, b, h, captures, values, ahead,
        seen_first, seen_end, clear_first, clear_end, EDGE, KEYS, EVEN, HAS_LOW, HAS_HIGH, SOFTCAP, PROGRAM, MASKED, WIDE,
        RANGED, S_LAYOUT,
    )  # fmt: skip
    acc = warpgroup_mma_wait(0, deps=[o_token])
    mbarrier.arrive(at.v_empty.index((i - 1) % STAGES))
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
    return as_operand(p, q.dtype, O_LAYOUT), m, denom, acc


@gluon.jit
def consumer(
    W: gl.constexpr, at, captures, ranges, KEYS: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
    SECTION: gl.constexpr, DYNAMIC: gl.constexpr, QK_DIM: gl.constexpr, V_DIM: gl.constexpr, PING_PONG: gl.constexpr,
    OWN_O: gl.constexpr, EVEN: gl.constexpr, HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr, SOFTCAP: gl.constexpr,
    DEAD_ZERO: gl.constexpr, PROGRAM: gl.constexpr, MASKED: gl.constexpr, WIDE: gl.constexpr, SINKS: gl.constexpr,
    ACROSS: gl.constexpr,
):  # fmt: skip
    S_LAYOUT: gl.constexpr = accumulator_layout(KEYS)
    O_LAYOUT: gl.constexpr = accumulator_layout(V_DIM)
    RANGED: gl.constexpr = ranges is not None
    q, o_tile, work, total = begin(W, at, QK_DIM, CONSUMERS, OWN_O)
    loaded = 0
    t = 0
    done = 0
    while work < total:
        row_first, b, h, first, full_first, full_end, end = next_rows(
            W, work, at, ranges, KEYS, CONSUMERS, SECTION, HAS_LOW, HAS_HIGH, ACROSS
        )
        seen_first, seen_end, whole_first, whole_end, clear_first, clear_end = seen_by(ranges, b, row_first, at.q_len, at.kv_len)
        if MASKED:
            full_end = gl.minimum(full_end, gl.maximum(whole_end // KEYS, first))
            full_first = gl.minimum(gl.maximum(full_first, (whole_first + KEYS - 1) // KEYS), full_end)
        m = gl.full([64], -float("inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
        denom = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, S_LAYOUT))
        if SINKS > 0:
            # A sink is one more logit of its row: it starts the maximum and the sum, and has no value.
            sinks = score_sinks(b, h, queries_from(row_first, at.q_len, S_LAYOUT), at.q_len, at.kv_len, captures)
            for i in gl.static_range(SINKS):
                m = gl.maximum(m, sinks[i])
            m_safe = gl.where(m == -float("inf"), 0.0, m)
            for i in gl.static_range(SINKS):
                denom += gl.exp2(sinks[i] - m_safe)
        values = (0,)
        if PROGRAM:
            values = score_values(b, h, queries_from(row_first, at.q_len, S_LAYOUT)[:, None], at.q_len, at.kv_len, captures)
        acc = gl.zeros([64, V_DIM], gl.float32, O_LAYOUT)

        mbarrier.wait(at.q_full.index(W), done & 1)
        ahead = taken_ahead(at, row_first, (end - 1) * KEYS, b, h, captures, True, KEYS, EVEN, MASKED, S_LAYOUT)
        s = first_scores(q, loaded, at, KEYS, QK_DIM, STAGES, S_LAYOUT)
        p, m, denom, _alpha = softmax(
            s, m, denom, at, row_first, (end - 1) * KEYS, b, h, captures, values, ahead,
            seen_first, seen_end, clear_first, clear_end, True, KEYS, EVEN, HAS_LOW, HAS_HIGH, SOFTCAP, PROGRAM, MASKED, WIDE,
            RANGED, S_LAYOUT,
        )  # fmt: skip
        p = as_operand(p, q.dtype, O_LAYOUT)
        if HAS_HIGH or not EVEN or MASKED:
            for j in range(1, end - full_end):
                p, m, denom, acc = step(
                    loaded + j, t + j - 1, (end - 1 - j) * KEYS, q, at, p, m, denom, acc, row_first, b, h, captures, values,
                    seen_first, seen_end, clear_first, clear_end, W, True, KEYS, STAGES, CONSUMERS, PING_PONG, EVEN,
                    HAS_LOW, HAS_HIGH, SOFTCAP, PROGRAM, MASKED, WIDE, RANGED, S_LAYOUT, O_LAYOUT,
                )  # fmt: skip
        for j in range(gl.maximum(end - full_end, 1), end - full_first):
            p, m, denom, acc = step(
                loaded + j, t + j - 1, (end - 1 - j) * KEYS, q, at, p, m, denom, acc, row_first, b, h, captures, values,
                seen_first, seen_end, clear_first, clear_end, W, False, KEYS, STAGES, CONSUMERS, PING_PONG, EVEN,
                HAS_LOW, HAS_HIGH, SOFTCAP, PROGRAM, MASKED, WIDE, RANGED, S_LAYOUT, O_LAYOUT,
            )  # fmt: skip
        if HAS_LOW or MASKED:
            for j in range(gl.maximum(end - full_first, 1), end - first):
                p, m, denom, acc = step(
                    loaded + j, t + j - 1, (end - 1 - j) * KEYS, q, at, p, m, denom, acc, row_first, b, h, captures, values,
                    seen_first, seen_end, clear_first, clear_end, W, True, KEYS, STAGES, CONSUMERS, PING_PONG, EVEN,
                    HAS_LOW, HAS_HIGH, SOFTCAP, PROGRAM, MASKED, WIDE, RANGED, S_LAYOUT, O_LAYOUT,
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
        if WIDE:
            gl.store(lse_row, m + gl.log2(denom) * 0.6931471805599453, mask=rows < at.q_len)
        else:
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
    captures, ranges,
    KEYS: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, SECTION: gl.constexpr, DYNAMIC: gl.constexpr,
    REGISTERS: gl.constexpr,
    PING_PONG: gl.constexpr, OWN_O: gl.constexpr, EVEN: gl.constexpr, HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr,
    SOFTCAP: gl.constexpr, DEAD_ZERO: gl.constexpr, PROGRAM: gl.constexpr, MASKED: gl.constexpr, WIDE: gl.constexpr,
    SINKS: gl.constexpr, ACROSS: gl.constexpr,
):  # fmt: skip
    """out and lse of ``softmax(band(q k^T * scale)) v``; with SOFTCAP of ``softmax(band(tanh(q k^T * cap) * scale)) v``.

    Descriptors over [B, H, L, D]: Q [1, 1, 64, QK_DIM], K [1, 1, KEYS, QK_DIM], V [1, 1, KEYS, V_DIM], O [1, 1, 64, V_DIM].
    Launched with at most ceil(q_len / (64 * CONSUMERS)) * total_heads programs of 4 warps, which share the tiles.
    DYNAMIC: a program takes its next tile from ``counter``, int32[1], zero at the start; with a program a tile, any number.
    OWN_O: the output leaves through a buffer of its own, so that the next queries are loaded before it is stored.
    Of a module with a score program of its own (PROGRAM, or MASKED and SINKS where only the mask and the sinks are more)
    ``captures`` are what that text names, and ``ranges`` as in :func:`key_tiles`, or None. SINKS: how many. WIDE: what MASKED
    adds may be huge. ACROSS as in :func:`tile_of`.
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
                0, for_consumers, captures, ranges, KEYS, STAGES, CONSUMERS, SECTION, DYNAMIC, QK_DIM, V_DIM, PING_PONG, OWN_O,
                EVEN, HAS_LOW, HAS_HIGH, SOFTCAP, DEAD_ZERO, PROGRAM, MASKED, WIDE, SINKS, ACROSS,
            )),
            (consumer, (
                1, for_consumers, captures, ranges, KEYS, STAGES, CONSUMERS, SECTION, DYNAMIC, QK_DIM, V_DIM, PING_PONG, OWN_O,
                EVEN, HAS_LOW, HAS_HIGH, SOFTCAP, DEAD_ZERO, PROGRAM, MASKED, WIDE, SINKS, ACROSS,
            )),
            (producer, (for_producer, ranges, KEYS, STAGES, CONSUMERS, SECTION, DYNAMIC, HAS_LOW, HAS_HIGH, False, ACROSS)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (
                0, for_consumers, captures, ranges, KEYS, STAGES, CONSUMERS, SECTION, DYNAMIC, QK_DIM, V_DIM, PING_PONG, OWN_O,
                EVEN, HAS_LOW, HAS_HIGH, SOFTCAP, DEAD_ZERO, PROGRAM, MASKED, WIDE, SINKS, ACROSS,
            )),
            (consumer, (
                1, for_consumers, captures, ranges, KEYS, STAGES, CONSUMERS, SECTION, DYNAMIC, QK_DIM, V_DIM, PING_PONG, OWN_O,
                EVEN, HAS_LOW, HAS_HIGH, SOFTCAP, DEAD_ZERO, PROGRAM, MASKED, WIDE, SINKS, ACROSS,
            )),
            (consumer, (
                2, for_consumers, captures, ranges, KEYS, STAGES, CONSUMERS, SECTION, DYNAMIC, QK_DIM, V_DIM, PING_PONG, OWN_O,
                EVEN, HAS_LOW, HAS_HIGH, SOFTCAP, DEAD_ZERO, PROGRAM, MASKED, WIDE, SINKS, ACROSS,
            )),
            (producer, (for_producer, ranges, KEYS, STAGES, CONSUMERS, SECTION, DYNAMIC, HAS_LOW, HAS_HIGH, False, ACROSS)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip
