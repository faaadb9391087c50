"""Warp-specialised Gluon kernel for Hopper: dQ, dK and dV of the forms that the forward kernel computes, in one pass.

A program owns 128 keys of one (batch, key head) and visits the tiles of ``ROWS`` queries that see them, for every query head
of the group. The producer warp loads K and V once, Q and dO with their row statistics tile by tile through TMA. Each of the
two consumer warpgroups owns 64 keys: it computes S^T and dP^T for them, keeps dK and dV in registers (P^T and dS^T are the
left operands of those products without leaving them), and hands dS^T to the other through shared memory, for dQ needs all
128 keys. Each consumer then computes half of the tile's dQ and adds it to a float32 buffer in memory with a TMA reduction.
The order of these additions is not fixed, so dQ is not bitwise reproducible; dK and dV are. With DETERMINISTIC two warps
more add dQ, in turns; the order is :func:`order_of`'s.

``STATS`` hold, for each row, the logarithm of the denominator in base 2 (+inf for rows that no key must reach) and
delta = sum_d out * grad_out. See :func:`fa_inductor.templates.sm90.backward_launch.backward`.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fa_inductor.templates.sm90.gluon_backward_tiles import key_tile_of, order_of, query_tiles, unmasked, visited, within
from fa_inductor.templates.sm90.gluon_order import pass_turn, ticket, wait_for_turn
from fa_inductor.templates.sm90.gluon_parts import accumulator_layout, tanh, tma_load, tma_store


@builtin
def tma_add(desc, coord, src, _semantic=None):
    """Add a tile in shared memory to memory, asynchronously: Gluon up to triton 3.9 has no spelling of its own for it."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


# What a score program computes, where it is more than a scale, a softcap and a band. A module that
# :mod:`fa_inductor.templates.sm90.program_source` generates holds this file's text and, after it, definitions of its own of
# these four. ``score`` is S^T [64, ROWS], ``q_idx`` [1, ROWS] and ``kv_idx`` [64, 1] lie within the lengths.


@gluon.jit
def score_values(b_idx, h_idx, kv_idx, Q_LEN, KV_LEN, captures):
    """What depends on no query: once a head."""
    return (0,)


@gluon.jit
def score_rows(b_idx, h_idx, q_idx, kv_idx, Q_LEN, KV_LEN, captures, values):
    """What is loaded for a tile."""
    return (0,)


@gluon.jit
def score_logit(score, b_idx, h_idx, q_idx, kv_idx, Q_LEN, KV_LEN, captures, values, rows):
    """The logit over ``scale``, not masked."""
    return score


@gluon.jit
def score_masked(logit, b_idx, h_idx, q_idx, kv_idx, Q_LEN, KV_LEN, captures):
    """``logit``, or -inf where the program masks it by more than a band."""
    return logit


@gluon.jit
def score_slope(p, score, b_idx, h_idx, q_idx, kv_idx, Q_LEN, KV_LEN, captures, values, rows):
    """``p`` times d logit / d score over ``factor``."""
    return p


@gluon.constexpr_function
def dq_columns(rows, qk_dim):
    """Columns of the half of dQ's tile that a consumer computes: of 64 rows the half, of 128 rows all of 64."""
    return qk_dim // 2 if rows == 64 else qk_dim


@gluon.jit
def producer(
    operands, ranges, ROWS: gl.constexpr, STAGES: gl.constexpr, SECTION: gl.constexpr, HAS_LOW: gl.constexpr,
    HAS_HIGH: gl.constexpr, SKIP: gl.constexpr, DETERMINISTIC: gl.constexpr,
):  # fmt: skip
    (
        work, q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_desc, dv_desc, q_smem, k_smem, v_smem, do_smem,
        lse_smem, delta_smem, kv_full, q_full, q_empty, do_full, do_empty, stored, q_len, kv_len, low, high, num_kv_heads,
        total_heads, group,
    ) = operands  # fmt: skip
    n_first, b, kv_head = key_tile_of(work, kv_len, num_kv_heads, total_heads, SECTION, 128)
    first, end = query_tiles(n_first, q_len, kv_len, low, high, HAS_LOW, HAS_HIGH, SKIP, ROWS, 128)
    first, end = within(first, end, ranges, n_first, b, q_len, kv_len, ROWS, 128)
    mbarrier.expect(kv_full, 2 * (k_desc.block_type.nbytes + v_desc.block_type.nbytes))
    for w in gl.static_range(2):
        tma_load(k_desc, [b, kv_head, n_first + w * 64, 0], kv_full, k_smem.index(0).slice(w * 64, 64, 2))
        tma_load(v_desc, [b, kv_head, n_first + w * 64, 0], kv_full, v_smem.index(0).slice(w * 64, 64, 2))
    i = 0
    for g in range(group):
        h = kv_head * group + g
        row_head = b * (num_kv_heads * group) + h
        for t in range(first, end):
            m = visited(t, first, end, DETERMINISTIC) * ROWS
            stage = i % STAGES
            mbarrier.wait(q_empty.index(stage), ((i // STAGES) & 1) ^ 1)
            mbarrier.expect(q_full.index(stage), q_desc.block_type.nbytes + 4 * ROWS)
            tma_load(q_desc, [b, h, m, 0], q_full.index(stage), q_smem.index(stage))
            tma_load(lse_desc, [row_head, m], q_full.index(stage), lse_smem.index(stage))
            stage = i % STAGES
            mbarrier.wait(do_empty.index(stage), ((i // STAGES) & 1) ^ 1)
            mbarrier.expect(do_full.index(stage), do_desc.block_type.nbytes + 4 * ROWS)
            tma_load(do_desc, [b, h, m, 0], do_full.index(stage), do_smem.index(stage))
            tma_load(delta_desc, [row_head, m], do_full.index(stage), delta_smem.index(stage))
            i += 1
    # The consumers leave dK and dV where K and V were, each in the other's half.
    mbarrier.wait(stored, 0)
    for w in gl.static_range(2):
        tma_store(dv_desc, [b, kv_head, n_first + w * 64, 0], v_smem.index(0).slice((1 - w) * 64, 64, 2))
        tma_store(dk_desc, [b, kv_head, n_first + w * 64, 0], k_smem.index(0).slice((1 - w) * 64, 64, 2))
    tma.store_wait(0)


@gluon.jit
def hidden_zero(i):
    """0, for a load ``i``, but not known to be. The addresses of a buffer's parts, the same in every step, would stay in
    registers, of which there are none to spare: 16 for the K of a product over 128 columns."""
    return i >> 30


@gluon.jit
def whole(smem, i, DIM: gl.constexpr):
    """The 128 rows of K or V, for load ``i``."""
    return smem.index(hidden_zero(i)).reshape([128, DIM])


@gluon.jit
def score_factor(scale, cap, SOFTCAP: gl.constexpr, PROGRAM: gl.constexpr):
    """What dS is multiplied with in dQ and dK: ``scale`` without log2(e), times the slope of the softcap at 0; or ``cap``."""
    factor = scale * 0.6931471805599453
    if SOFTCAP:
        factor = factor * cap
    if PROGRAM:
        factor = cap
    return factor


@gluon.jit
def course(first, end, head, q_len, ROWS: gl.constexpr, DETERMINISTIC: gl.constexpr):
    """(first query, one past the last, distance of tiles, row of dQ's sum, what is added there at the end of a head) of the
    tiles that keys visit in every head from ``head`` on; see :func:`visited`."""
    head_rows = (q_len + ROWS - 1) // ROWS * ROWS
    start = first * ROWS
    stop = end * ROWS
    ahead: gl.constexpr = -ROWS if DETERMINISTIC else ROWS
    if DETERMINISTIC:
        start, stop = stop - ROWS, start - ROWS
    return start, stop, ahead, head * head_rows + start, head_rows - (stop - start)


@gluon.jit
def own_half(smem, i, W: gl.constexpr, DIM: gl.constexpr):
    """The 64 rows of K or V that a consumer owns."""
    return whole(smem, i, DIM).slice(W * 64, 64, 0)


@gluon.jit
def crossed(
    m, left, low, EVEN: gl.constexpr, HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr, ROWS: gl.constexpr
):  # fmt: skip
    """Whether an end of the band or of the keys crosses a tile of 64 keys, of which ``left`` exist, and ROWS queries.

    Query i of the tile attends to its keys up to the key i + m, from the key i + m + low on.
    """
    slack = 0
    if HAS_HIGH:
        slack = gl.minimum(slack, m - 63)
    if HAS_LOW:
        slack = gl.minimum(slack, 1 - ROWS - (m + low))
    if not EVEN:
        slack = gl.minimum(slack, left - 64)
    return slack < 0


@gluon.jit
def kept(
    m, left, low,
    EVEN: gl.constexpr, HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr, ROWS: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Which scores of such a tile the mask keeps, [64 keys, ROWS queries]."""
    n = gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT))
    q = gl.arange(0, ROWS, layout=gl.SliceLayout(0, S_LAYOUT))
    # A thread's keys differ in this bit of theirs and its queries in all but these: it compares one number with constants.
    after = ((n & ~8) - m)[:, None] - (q & 6)[None, :]
    ahead = (q & ~6)[None, :] - (n & 8)[:, None]
    keep = ahead < ROWS
    if HAS_HIGH:
        keep = keep & (after <= ahead)
    if HAS_LOW:
        keep = keep & (after - low >= ahead)
    if not EVEN:
        keep = keep & (n < left)[:, None]
    return keep


@gluon.jit
def step(
    i, loads, m, row, dq_desc, q_smem, k_smem, v_smem, do_smem, lse_smem, delta_smem, ds_smem, dq_smem,
    q_full, q_empty, do_full, do_empty, ds_full, dq_full, dq_empty, s, dk, dv, scale, cap, left, low,
    query, b, h, whole_first, whole_end, q_len, kv_len, captures, values,
    W: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, QK_DIM: gl.constexpr,
    V_DIM: gl.constexpr, DETERMINISTIC: gl.constexpr, EVEN: gl.constexpr, SKIP: gl.constexpr, HAS_LOW: gl.constexpr,
    HAS_HIGH: gl.constexpr, SOFTCAP: gl.constexpr, PROGRAM: gl.constexpr, MASKED: gl.constexpr, EVEN_Q: gl.constexpr,
    SELECT: gl.constexpr,
    S_LAYOUT: gl.constexpr, DK_LAYOUT: gl.constexpr, DV_LAYOUT: gl.constexpr, DQ_LAYOUT: gl.constexpr,
):  # fmt: skip
    """(Next scores, dK, dV): add what the queries of load ``i`` contribute; ``s`` are their scores.

    ``m``, ``left`` and ``low`` as for :func:`crossed`; the queries' rows of dQ's sum begin with ``row``. A score program sees
    them as those from ``query`` of head ``h``, and what :func:`score_values` gave; the mask keeps all of them from
    ``whole_first`` to ``whole_end``.
    """
    stage = i % STAGES
    ROW: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    q = q_smem.index(stage).reshape([ROWS, QK_DIM])
    do = do_smem.index(stage).reshape([ROWS, V_DIM])
    v = own_half(v_smem, 0, W, V_DIM)
    if PROGRAM or MASKED:
        at_q = query + gl.arange(0, ROWS, layout=ROW)
        if not EVEN_Q:
            at_q = gl.minimum(at_q, q_len - 1)
        at_q = at_q[None, :]
        at_kv = keys_from(kv_len - left, kv_len, S_LAYOUT)
    if PROGRAM:
        loaded = score_rows(b, h, at_q, at_kv, q_len, kv_len, captures, values)
    mbarrier.wait(do_full.index(stage), (i // STAGES) & 1)
    zero = gl.zeros([64, ROWS], gl.float32, S_LAYOUT)
    dp_token = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
    lse = lse_smem.index(stage).reshape([ROWS]).load(ROW)
    if SOFTCAP:
        s = tanh(s * cap)
    score = s
    if PROGRAM:
        s = score_logit(score, b, h, at_q, at_kv, q_len, kv_len, captures, values, loaded)

    if HAS_HIGH or HAS_LOW or not EVEN or not EVEN_Q or MASKED:
        edge = crossed(m, left, low, EVEN, HAS_LOW, HAS_HIGH, ROWS)
        if not EVEN_Q:
            edge = edge | (query + ROWS > q_len)
        if MASKED:
            edge = edge | (query < whole_first) | (query >= whole_end)
        if edge:
            s = gl.where(kept(m, left, low, EVEN, HAS_LOW, HAS_HIGH, ROWS, S_LAYOUT), s, -float("inf"))
            if MASKED:
                s = score_masked(s, b, h, at_q, at_kv, q_len, kv_len, captures)
            if not EVEN_Q:
                s = gl.where((query + gl.arange(0, ROWS, layout=ROW) < q_len)[None, :], s, -float("inf"))
    p = gl.exp2(s * scale - lse[None, :])
    p_cast = gl.convert_layout(p.to(q.dtype), gl.DotOperandLayout(0, DV_LAYOUT, 2))
    if SOFTCAP:
        # The slope of tanh; a masked score is -inf, whose slope is 0.
        p = p * (1.0 - gl.minimum(s * s, 1.0))
    if PROGRAM:
        p = score_slope(p, score, b, h, at_q, at_kv, q_len, kv_len, captures, values, loaded)
    if ROWS == 64:
        # Of 128 rows there are no registers for it yet.
        delta = delta_smem.index(stage).reshape([ROWS]).load(ROW)
    dp = warpgroup_mma_wait(0, deps=[dp_token])
    dv_token = warpgroup_mma(p_cast, do, dv, is_async=True)
    if ROWS == 128:
        delta = delta_smem.index(stage).reshape([ROWS]).load(ROW)
    ds = p * (dp - delta[None, :])
    if not SKIP or SELECT:
        # p may be NaN where the score is masked.
        ds = gl.where(s == -float("inf"), 0.0, ds)
    ds = ds.to(q.dtype)
    # Two buffers: the other consumer has finished with this one when it arrived at the barrier of the tile before.
    ds_tile = ds_smem.index(i & 1)
    ds_tile.slice(W * 64, 64, 0).store(ds)
    fence_async_shared()
    mbarrier.arrive(ds_full)
    ds_cast = gl.convert_layout(ds, gl.DotOperandLayout(0, DK_LAYOUT, 2))
    dk_token = warpgroup_mma(ds_cast, q, dk, is_async=True)
    mbarrier.wait(ds_full, i & 1)
    dq_token = dq_product(ds_tile, whole(k_smem, i, QK_DIM), W, ROWS, QK_DIM, DQ_LAYOUT)
    # P's registers are free before the next scores need theirs.
    dv = warpgroup_mma_wait(2, deps=[dv_token])
    # The last tile has none after it, and computes its own scores once more.
    s_token = score_product(gl.where(i + 1 < loads, i + 1, i), q_smem, k_smem, q_full, W, ROWS, STAGES, QK_DIM, S_LAYOUT)
    if not DETERMINISTIC:
        tma.store_wait(0)
    dk, dq = warpgroup_mma_wait(1, deps=[dk_token, dq_token])
    mbarrier.arrive(do_empty.index(stage))
    mbarrier.arrive(q_empty.index(stage))
    if DETERMINISTIC:
        mbarrier.wait(dq_empty.index(i & 1), ((i // 2) & 1) ^ 1)
        dq_smem.index(2 * (i & 1) + W).reshape([64, dq_columns(ROWS, QK_DIM)]).store(dq)
        fence_async_shared()
        mbarrier.arrive(dq_full.index(i & 1))
    else:
        dq_smem.index(W).reshape([64, dq_columns(ROWS, QK_DIM)]).store(dq)
        fence_async_shared()
        add_dq(dq_desc, dq_smem.index(W), row, W, ROWS, QK_DIM)
    # Nothing stays under way from one turn of the loop to the next: the assembler would serialise all products.
    return warpgroup_mma_wait(0, deps=[s_token]), dk, dv


@gluon.jit
def keys_from(kv_first, kv_len, S_LAYOUT: gl.constexpr):
    """The keys of a consumer [64, 1]; those past the end repeat the last one."""
    return gl.minimum(kv_first + gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT)), kv_len - 1)[:, None]


@gluon.jit
def score_product(
    i, q_smem, k_smem, q_full,
    W: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, QK_DIM: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    mbarrier.wait(q_full.index(i % STAGES), (i // STAGES) & 1)
    q = q_smem.index(i % STAGES).reshape([ROWS, QK_DIM])
    return warpgroup_mma(
        own_half(k_smem, i, W, QK_DIM), q.permute((1, 0)), gl.zeros([64, ROWS], gl.float32, S_LAYOUT), use_acc=False, is_async=True
    )  # fmt: skip


@gluon.jit
def dq_product(ds, k_all, W: gl.constexpr, ROWS: gl.constexpr, QK_DIM: gl.constexpr, DQ_LAYOUT: gl.constexpr):
    """This consumer's half of the tile's dQ: half of the head dim of 64 rows, or 64 of 128 rows."""
    zero = gl.zeros([64, dq_columns(ROWS, QK_DIM)], gl.float32, DQ_LAYOUT)
    if ROWS == 64:
        half = k_all.slice(W * (QK_DIM // 2), QK_DIM // 2, 1)
        token = warpgroup_mma(ds.permute((1, 0)), half, zero, use_acc=False, is_async=True)
    else:
        token = warpgroup_mma(ds.slice(W * 64, 64, 1).permute((1, 0)), k_all, zero, use_acc=False, is_async=True)
    return token


@gluon.jit
def add_dq(dq_desc, dq_tile, row, W: gl.constexpr, ROWS: gl.constexpr, QK_DIM: gl.constexpr):
    if ROWS == 64:
        tma_add(dq_desc, [row, W * (QK_DIM // 2)], dq_tile)
    else:
        tma_add(dq_desc, [row + W * 64, 0], dq_tile)


@gluon.jit
def writer(
    P: gl.constexpr, operands, turns, ROWS: gl.constexpr, SECTION: gl.constexpr, QK_DIM: gl.constexpr,
    HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr, SKIP: gl.constexpr,
):  # fmt: skip
    """Add what the consumers leave in dQ's buffer ``P``, of every second tile, when it is these keys' turn."""
    (
        work, dq_desc, dq_smem, dq_full, dq_empty, q_len, kv_len, low, high, num_kv_heads, total_heads, group,
    ) = operands  # fmt: skip
    n_first, b, kv_head = key_tile_of(work, kv_len, num_kv_heads, total_heads, SECTION, 128)
    first, end = query_tiles(n_first, q_len, kv_len, low, high, HAS_LOW, HAS_HIGH, SKIP, ROWS, 128)
    place, shared_first, shared_end = order_of(n_first, q_len, kv_len, low, high, HAS_LOW, HAS_HIGH, SKIP, ROWS, 128)
    num_tiles = (q_len + ROWS - 1) // ROWS
    head = b * (num_kv_heads * group) + kv_head * group
    for i in range(P, group * (end - first), 2):
        h = i // (end - first)
        t = visited(first + i % (end - first), first, end, True)
        tile = (head + h) * num_tiles + t
        turn = turns + 1 + tile.to(gl.int64)
        wait_for_turn(turn, gl.where((t >= shared_first) & (t < shared_end), place, 0))
        mbarrier.wait(dq_full.index(P), (i // 2) & 1)
        for w in gl.static_range(2):
            add_dq(dq_desc, dq_smem.index(2 * P + w), tile * ROWS, w, ROWS, QK_DIM)
        tma.store_wait(0)
        mbarrier.arrive(dq_empty.index(P))
        pass_turn(turn, place + 1)


@gluon.jit
def consumer(
    W: gl.constexpr, operands, captures, ranges, ROWS: gl.constexpr, STAGES: gl.constexpr, SECTION: gl.constexpr,
    QK_DIM: gl.constexpr, V_DIM: gl.constexpr, DETERMINISTIC: gl.constexpr, EVEN: gl.constexpr, SKIP: gl.constexpr,
    HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr, SOFTCAP: gl.constexpr, PROGRAM: gl.constexpr, MASKED: gl.constexpr,
    EVEN_Q: gl.constexpr, SELECT: gl.constexpr,
):  # fmt: skip
    (
        work, dq_desc, q_smem, k_smem, v_smem, do_smem, lse_smem, delta_smem, ds_smem, dq_smem, kv_full, q_full, q_empty,
        do_full, do_empty, ds_full, dq_full, dq_empty, finished, stored, scale, cap, q_len, kv_len, low, high,
        num_kv_heads, total_heads, group,
    ) = operands  # fmt: skip
    S_LAYOUT: gl.constexpr = accumulator_layout(ROWS)
    DK_LAYOUT: gl.constexpr = accumulator_layout(QK_DIM)
    DV_LAYOUT: gl.constexpr = accumulator_layout(V_DIM)
    DQ_LAYOUT: gl.constexpr = accumulator_layout(dq_columns(ROWS, QK_DIM))
    n_first, b, kv_head = key_tile_of(work, kv_len, num_kv_heads, total_heads, SECTION, 128)
    first, end = query_tiles(n_first, q_len, kv_len, low, high, HAS_LOW, HAS_HIGH, SKIP, ROWS, 128)
    first, end = within(first, end, ranges, n_first, b, q_len, kv_len, ROWS, 128)
    kv_first = n_first + W * 64
    dk = gl.zeros([64, QK_DIM], gl.float32, DK_LAYOUT)
    dv = gl.zeros([64, V_DIM], gl.float32, DV_LAYOUT)
    start, stop, ahead, row, jump = course(first, end, (b * num_kv_heads + kv_head) * group, q_len, ROWS, DETERMINISTIC)
    shift = kv_first
    if HAS_HIGH:
        shift = shift - high
        low = low - high
    start = start - shift
    stop = stop - shift
    loads = group * (end - first)
    mbarrier.wait(kv_full, 0)
    s_token = score_product(0, q_smem, k_smem, q_full, W, ROWS, STAGES, QK_DIM, S_LAYOUT)
    s = warpgroup_mma_wait(0, deps=[s_token])
    m = start
    h = kv_head * group
    values = (0,)
    whole_first, whole_end = unmasked(ranges, n_first, b, kv_len, ROWS, 128)
    if PROGRAM:
        values = score_values(b, h, keys_from(kv_first, kv_len, S_LAYOUT), q_len, kv_len, captures)
    for i in range(loads):
        s, dk, dv = step(
            i, loads, m, row, dq_desc, q_smem, k_smem, v_smem, do_smem, lse_smem, delta_smem, ds_smem, dq_smem, q_full, q_empty,
            do_full, do_empty, ds_full, dq_full, dq_empty, s, dk, dv, scale, cap, kv_len - kv_first, low, m + shift,
            b, h, whole_first, whole_end, q_len, kv_len, captures, values, W, ROWS, STAGES, QK_DIM, V_DIM, DETERMINISTIC, EVEN,
            SKIP, HAS_LOW, HAS_HIGH, SOFTCAP, PROGRAM, MASKED, EVEN_Q, SELECT, S_LAYOUT, DK_LAYOUT, DV_LAYOUT, DQ_LAYOUT,
        )  # fmt: skip
        row = row + ahead
        if HAS_LOW or HAS_HIGH or PROGRAM or MASKED or not EVEN_Q:
            m = m + ahead
            if m == stop:
                m = start
                row = row + jump
                if PROGRAM or MASKED:
                    h = h + 1
                if PROGRAM:
                    # There is no head after the last one.
                    own = gl.minimum(h, kv_head * group + group - 1)
                    values = score_values(b, own, keys_from(kv_first, kv_len, S_LAYOUT), q_len, kv_len, captures)
    # K's and V's buffers are free when both consumers have finished.
    mbarrier.arrive(finished)
    mbarrier.wait(finished, 0)
    own_half(v_smem, 0, 1 - W, V_DIM).store(dv.to(v_smem.dtype))
    own_half(k_smem, 0, 1 - W, QK_DIM).store((dk * score_factor(scale, cap, SOFTCAP, PROGRAM)).to(k_smem.dtype))
    fence_async_shared()
    mbarrier.arrive(stored)
    if not DETERMINISTIC:
        tma.store_wait(0)


# One binary serves every length: a length divisible by 16, or 1, is no other kernel.
@gluon.jit(do_not_specialize=["q_len", "kv_len", "low", "high", "num_kv_heads", "total_heads", "group"])
def flash_backward(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dq_desc, dk_desc, dv_desc, scale, cap,
    q_len, kv_len, low, high, num_kv_heads, total_heads, group, turns, captures, ranges,
    ROWS: gl.constexpr, STAGES: gl.constexpr, SECTION: gl.constexpr, REGISTERS: gl.constexpr,
    EVEN: gl.constexpr, SKIP: gl.constexpr, HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr, SOFTCAP: gl.constexpr,
    DETERMINISTIC: gl.constexpr, PROGRAM: gl.constexpr, MASKED: gl.constexpr, EVEN_Q: gl.constexpr, SELECT: gl.constexpr,
):  # fmt: skip
    """dK, dV, and dQ divided by ``factor``, of ``softmax(band(f(q k^T)) * scale) v``; ``scale`` includes log2(e).

    Descriptors over [B, H, L, D]: Q [1, 1, ROWS, QK_DIM], dO [1, 1, ROWS, V_DIM], K, dK [1, 1, 64, QK_DIM],
    V, dV [1, 1, 64, V_DIM]; over [B * Hq, M padded to tiles]: LSE and DELTA [1, ROWS] float32; over
    [B * Hq * M padded to tiles, D]: dQ [64, dq_columns] float32, zero at the start. Launched with
    ceil(kv_len / 128) * total_heads programs of 4 warps, total_heads = B * Hkv.
    ROWS is 64, or 128 where QK_DIM is 64: what fits the registers. Of a module with a score program of its own (PROGRAM, or
    MASKED where only the mask is more than a band) ``captures`` are what that text names, and ``ranges`` the tiles that the
    mask leaves, as in :func:`within`, or None; EVEN_Q: whether tiles end with the queries; SELECT: whether the derivative of a
    masked score may be no number. With PROGRAM ``cap`` is the ``factor``. With DETERMINISTIC ``turns`` is
    int32[1 + B * Hq * ceil(q_len / ROWS)], zero at the start, else None.
    """
    QK_DIM: gl.constexpr = q_desc.block_type.shape[3]
    V_DIM: gl.constexpr = v_desc.block_type.shape[3]
    # ruff: noqa: RUF005 - lists are added, the language has no starred expressions
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES] + q_desc.block_type.shape, q_desc.layout)
    do_smem = gl.allocate_shared_memory(do_desc.dtype, [STAGES] + do_desc.block_type.shape, do_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [1, 1, 1, 128, QK_DIM], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [1, 1, 1, 128, V_DIM], v_desc.layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, ROWS], lse_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, ROWS], delta_desc.layout)
    DS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    ds_smem = gl.allocate_shared_memory(q_desc.dtype, [2, 128, ROWS], DS)
    DQ_STAGES: gl.constexpr = 2 if DETERMINISTIC else 1
    dq_smem = gl.allocate_shared_memory(gl.float32, [2 * DQ_STAGES] + dq_desc.block_type.shape, dq_desc.layout)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    do_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], BAR)
    ds_full = gl.allocate_shared_memory(gl.int64, [1], BAR)
    finished = gl.allocate_shared_memory(gl.int64, [1], BAR)
    stored = gl.allocate_shared_memory(gl.int64, [1], BAR)
    dq_full = gl.allocate_shared_memory(gl.int64, [DQ_STAGES, 1], BAR)
    dq_empty = gl.allocate_shared_memory(gl.int64, [DQ_STAGES, 1], BAR)
    mbarrier.init(kv_full, count=1)
    mbarrier.init(ds_full, count=2)
    mbarrier.init(finished, count=2)
    mbarrier.init(stored, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(do_empty.index(i), count=2)
    for i in gl.static_range(DQ_STAGES):
        mbarrier.init(dq_full.index(i), count=2)
        mbarrier.init(dq_empty.index(i), count=1)
    fence_async_shared()
    work = ticket(turns) if DETERMINISTIC else gl.program_id(0)
    # Constants are spelled out in the lists: a variable would make run-time values of them.
    for_consumers = (
        work, dq_desc, q_smem, k_smem, v_smem, do_smem, lse_smem, delta_smem, ds_smem, dq_smem, kv_full, q_full, q_empty,
        do_full, do_empty, ds_full, dq_full, dq_empty, finished, stored, scale, cap, q_len, kv_len, low, high,
        num_kv_heads, total_heads, group,
    )  # fmt: skip
    for_producer = (
        work, q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_desc, dv_desc, q_smem, k_smem, v_smem, do_smem,
        lse_smem, delta_smem, kv_full, q_full, q_empty, do_full, do_empty, stored, q_len, kv_len, low, high, num_kv_heads,
        total_heads, group,
    )  # fmt: skip
    for_writers = (
        work, dq_desc, dq_smem, dq_full, dq_empty, q_len, kv_len, low, high, num_kv_heads, total_heads, group,
    )  # fmt: skip
    if DETERMINISTIC:
        gl.warp_specialize([
            (consumer, (
                0, for_consumers, captures, ranges, ROWS, STAGES, SECTION, QK_DIM, V_DIM, DETERMINISTIC, EVEN, SKIP, HAS_LOW,
                HAS_HIGH, SOFTCAP, PROGRAM, MASKED, EVEN_Q, SELECT,
            )),
            (consumer, (
                1, for_consumers, captures, ranges, ROWS, STAGES, SECTION, QK_DIM, V_DIM, DETERMINISTIC, EVEN, SKIP, HAS_LOW,
                HAS_HIGH, SOFTCAP, PROGRAM, MASKED, EVEN_Q, SELECT,
            )),
            (producer, (for_producer, ranges, ROWS, STAGES, SECTION, HAS_LOW, HAS_HIGH, SKIP, DETERMINISTIC)),
            (writer, (0, for_writers, turns, ROWS, SECTION, QK_DIM, HAS_LOW, HAS_HIGH, SKIP)),
            (writer, (1, for_writers, turns, ROWS, SECTION, QK_DIM, HAS_LOW, HAS_HIGH, SKIP)),
        ], [4, 1, 1, 1], [REGISTERS, 24, 24, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (
                0, for_consumers, captures, ranges, ROWS, STAGES, SECTION, QK_DIM, V_DIM, DETERMINISTIC, EVEN, SKIP, HAS_LOW,
                HAS_HIGH, SOFTCAP, PROGRAM, MASKED, EVEN_Q, SELECT,
            )),
            (consumer, (
                1, for_consumers, captures, ranges, ROWS, STAGES, SECTION, QK_DIM, V_DIM, DETERMINISTIC, EVEN, SKIP, HAS_LOW,
                HAS_HIGH, SOFTCAP, PROGRAM, MASKED, EVEN_Q, SELECT,
            )),
            (producer, (for_producer, ranges, ROWS, STAGES, SECTION, HAS_LOW, HAS_HIGH, SKIP, DETERMINISTIC)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
