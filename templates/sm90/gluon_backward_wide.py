"""The Gluon backward kernel for Hopper for head dims above 128, whose dK and dV do not fit the registers of a warpgroup.

As :mod:`fa_inductor.templates.sm90.gluon_backward`, with other roles. A program owns 64 keys. One consumer computes S^T and
from it P^T, the other dP^T and from it dS^T; both pass through shared memory, and each consumer multiplies them for its half
of the columns of dV, dK and dQ. The scores of one query tile are computed while the products of the one before run. dQ
leaves through the buffers of the queries that it belongs to: shared memory is full.

Tiles hold half of the columns of their tensor, so that a half is one operand.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fa_inductor.templates.sm90.gluon_backward import (
    course,
    crossed,
    hidden_zero,
    kept,
    score_factor,
    tma_add,
)
from fa_inductor.templates.sm90.gluon_backward_tiles import key_tile_of, order_of, query_tiles, visited
from fa_inductor.templates.sm90.gluon_order import pass_turn, ticket, wait_for_turn
from fa_inductor.templates.sm90.gluon_parts import accumulator_layout, tanh, tma_load, tma_store


@gluon.jit
def producer(
    operands, STAGES: gl.constexpr, SECTION: gl.constexpr, HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr,
    SKIP: gl.constexpr, DETERMINISTIC: gl.constexpr,
):  # fmt: skip
    (
        work, q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_desc, dv_desc, q_smem, k_smem, v_smem, do_smem,
        lse_smem, delta_smem, kv_full, q_full, q_empty, do_full, do_empty, stored, q_len, kv_len, low, high, num_kv_heads,
        total_heads, group,
    ) = operands  # fmt: skip
    QK_HALF: gl.constexpr = q_desc.block_type.shape[3]
    V_HALF: gl.constexpr = do_desc.block_type.shape[3]
    n_first, b, kv_head = key_tile_of(work, kv_len, num_kv_heads, total_heads, SECTION, 64)
    first, end = query_tiles(n_first, q_len, kv_len, low, high, HAS_LOW, HAS_HIGH, SKIP, 64, 64)
    mbarrier.expect(kv_full, 2 * (k_desc.block_type.nbytes + v_desc.block_type.nbytes))
    for w in gl.static_range(2):
        tma_load(k_desc, [b, kv_head, n_first, w * QK_HALF], kv_full, k_smem.index(w))
        tma_load(v_desc, [b, kv_head, n_first, w * V_HALF], kv_full, v_smem.index(w))
    i = 0
    for g in range(group):
        h = kv_head * group + g
        row_head = b * (num_kv_heads * group) + h
        for t in range(first, end):
            m = visited(t, first, end, DETERMINISTIC) * 64
            stage = i % STAGES
            phase = ((i // STAGES) & 1) ^ 1
            mbarrier.wait(q_empty.index(stage), phase)
            mbarrier.expect(q_full.index(stage), 2 * q_desc.block_type.nbytes + 4 * 64)
            tma_load(lse_desc, [row_head, m], q_full.index(stage), lse_smem.index(stage))
            for w in gl.static_range(2):
                tma_load(q_desc, [b, h, m, w * QK_HALF], q_full.index(stage), q_smem.index(2 * stage + w))
            mbarrier.wait(do_empty.index(stage), phase)
            mbarrier.expect(do_full.index(stage), 2 * do_desc.block_type.nbytes + 4 * 64)
            tma_load(delta_desc, [row_head, m], do_full.index(stage), delta_smem.index(stage))
            for w in gl.static_range(2):
                tma_load(do_desc, [b, h, m, w * V_HALF], do_full.index(stage), do_smem.index(2 * stage + w))
            i += 1
    # The consumers leave dK and dV where K and V were.
    mbarrier.wait(stored, 0)
    for w in gl.static_range(2):
        tma_store(dv_desc, [b, kv_head, n_first, w * V_HALF], v_smem.index(w))
        tma_store(dk_desc, [b, kv_head, n_first, w * QK_HALF], k_smem.index(w))
    tma.store_wait(0)


@gluon.jit
def halves_product(left, right, i, STAGES: gl.constexpr, HALF: gl.constexpr, S_LAYOUT: gl.constexpr):
    """``left`` (64 keys) times the transpose of ``right`` (64 queries), load ``i``: two halves of the columns each."""
    total = gl.zeros([64, 64], gl.float32, S_LAYOUT)
    for w in gl.static_range(2):
        a = left.index(w + hidden_zero(i)).reshape([64, HALF])
        b = right.index(2 * (i % STAGES) + w).reshape([64, HALF]).permute((1, 0))
        total = warpgroup_mma(a, b, total, use_acc=w > 0, is_async=True)
    return total


@gluon.jit
def scores(
    i, q_smem, k_smem, v_smem, do_smem, q_full, do_full,
    W: gl.constexpr, STAGES: gl.constexpr, QK_HALF: gl.constexpr, V_HALF: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """S^T of load ``i``, by the first consumer, or dP^T, by the second; under way."""
    stage = i % STAGES
    phase = (i // STAGES) & 1
    # Both tensors: the products of this tile read them too.
    mbarrier.wait(q_full.index(stage), phase)
    mbarrier.wait(do_full.index(stage), phase)
    if W == 0:
        token = halves_product(k_smem, q_smem, i, STAGES, QK_HALF, S_LAYOUT)
    else:
        token = halves_product(v_smem, do_smem, i, STAGES, V_HALF, S_LAYOUT)
    return token


@gluon.jit
def pass_on(
    i, m, x, lse_smem, delta_smem, p_smem, ds_smem, p_full, ds_full, scale, cap, left, low,
    W: gl.constexpr, STAGES: gl.constexpr, EVEN: gl.constexpr, SKIP: gl.constexpr, HAS_LOW: gl.constexpr,
    HAS_HIGH: gl.constexpr, SOFTCAP: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """P^T of the scores ``x``, or dS^T of dP^T ``x``, into shared memory.

    Two buffers of each: who writes one has heard, at the other's last barrier, that its products of two tiles ago are done.
    """
    MASKED: gl.constexpr = HAS_HIGH or HAS_LOW or not EVEN
    ROW: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    p_tile = p_smem.index(i & 1)
    ds_tile = ds_smem.index(i & 1)
    if W == 0:
        if SOFTCAP:
            x = tanh(x * cap)
        if MASKED:  # noqa: SIM102 - one at compile time, one at run time
            if crossed(m, left, low, EVEN, HAS_LOW, HAS_HIGH, 64):
                x = gl.where(kept(m, left, low, EVEN, HAS_LOW, HAS_HIGH, 64, S_LAYOUT), x, -float("inf"))
        lse = lse_smem.index(i % STAGES).reshape([64]).load(ROW)
        p = gl.exp2(x * scale - lse[None, :])
        p_tile.store(p.to(p_smem.dtype))
        if SOFTCAP:
            # What dS is a multiple of waits where dS goes. A masked score is -inf, whose slope is 0.
            ds_tile.store((p * (1.0 - gl.minimum(x * x, 1.0))).to(ds_smem.dtype))
        fence_async_shared()
        mbarrier.arrive(p_full)
    else:
        delta = delta_smem.index(i % STAGES).reshape([64]).load(ROW)
        x = x - delta[None, :]
        mbarrier.wait(p_full, i & 1)
        if SOFTCAP:
            p = ds_tile.load(S_LAYOUT).to(gl.float32)
        else:
            p = p_tile.load(S_LAYOUT).to(gl.float32)
        ds = p * x
        if MASKED and not SKIP:
            # p may be NaN where the score is masked.
            ds = gl.where(kept(m, left, low, EVEN, HAS_LOW, HAS_HIGH, 64, S_LAYOUT), ds, 0.0)
        ds_tile.store(ds.to(ds_smem.dtype))
        fence_async_shared()
        mbarrier.arrive(ds_full)


@gluon.jit
def products(
    i, k_smem, q_tile, do_tile, p_smem, ds_smem, ds_full, dk, dv,
    W: gl.constexpr, QK_HALF: gl.constexpr, V_HALF: gl.constexpr, K_LAYOUT: gl.constexpr,
):  # fmt: skip
    """(dQ of load ``i``, dK and dV with what it adds), of this consumer's columns."""
    mbarrier.wait(ds_full, i & 1)
    ds_tile = ds_smem.index(i & 1)
    zero = gl.zeros([64, QK_HALF], gl.float32, K_LAYOUT)
    k_half = k_smem.index(W + hidden_zero(i)).reshape([64, QK_HALF])
    dq_token = warpgroup_mma(ds_tile.permute((1, 0)), k_half, zero, use_acc=False, is_async=True)
    dk_token = warpgroup_mma(ds_tile, q_tile.reshape([64, QK_HALF]), dk, is_async=True)
    dv_token = warpgroup_mma(p_smem.index(i & 1), do_tile.reshape([64, V_HALF]), dv, is_async=True)
    return warpgroup_mma_wait(0, deps=[dq_token, dk_token, dv_token])


@gluon.jit
def dq_tiles(dq_desc, q_tile, do_tile):
    """Where a consumer leaves its 128 columns of 64 rows of dQ: in its halves of Q and dO of these rows.

    Nobody reads those any more: of this half of Q, S was computed before the other consumer's dS was there, of this half of
    dO dP, and dK and dV are done.
    """
    HALF: gl.constexpr = dq_desc.block_type.shape
    return q_tile._reinterpret(gl.float32, HALF, dq_desc.layout), do_tile._reinterpret(gl.float32, HALF, dq_desc.layout)


@gluon.jit
def leave_dq(dq, dq_desc, q_tile, do_tile):
    left, right = gl.split(dq.reshape([64, 2, 64]).permute((0, 2, 1)))
    left_tile, right_tile = dq_tiles(dq_desc, q_tile, do_tile)
    left_tile.reshape([64, 64]).store(left)
    right_tile.reshape([64, 64]).store(right)
    fence_async_shared()


@gluon.jit
def add_dq(dq_desc, q_tile, do_tile, row, W: gl.constexpr):
    """Add what a consumer has left to dQ's sum."""
    left_tile, right_tile = dq_tiles(dq_desc, q_tile, do_tile)
    tma_add(dq_desc, [row, W * 128], left_tile)
    tma_add(dq_desc, [row, W * 128 + 64], right_tile)


@gluon.jit
def writer(
    P: gl.constexpr, operands, turns, STAGES: gl.constexpr, SECTION: gl.constexpr, HAS_LOW: gl.constexpr,
    HAS_HIGH: gl.constexpr, SKIP: gl.constexpr,
):  # fmt: skip
    """Add what the consumers leave of every second tile, when it is these keys' turn."""
    (
        work, dq_desc, q_smem, do_smem, dq_full, q_empty, do_empty, q_len, kv_len, low, high, num_kv_heads, total_heads,
        group,
    ) = operands  # fmt: skip
    n_first, b, kv_head = key_tile_of(work, kv_len, num_kv_heads, total_heads, SECTION, 64)
    first, end = query_tiles(n_first, q_len, kv_len, low, high, HAS_LOW, HAS_HIGH, SKIP, 64, 64)
    place, shared_first, shared_end = order_of(n_first, q_len, kv_len, low, high, HAS_LOW, HAS_HIGH, SKIP, 64, 64)
    num_tiles = (q_len + 63) // 64
    head = b * (num_kv_heads * group) + kv_head * group
    for i in range(P, group * (end - first), 2):
        h = i // (end - first)
        t = visited(first + i % (end - first), first, end, True)
        stage = i % STAGES
        tile = (head + h) * num_tiles + t
        turn = turns + 1 + tile.to(gl.int64)
        wait_for_turn(turn, gl.where((t >= shared_first) & (t < shared_end), place, 0))
        mbarrier.wait(dq_full.index(stage), (i // STAGES) & 1)
        for w in gl.static_range(2):
            left, right = q_smem.index(2 * stage + w), do_smem.index(2 * stage + w)
            add_dq(dq_desc, left, right, tile * 64, w)
        tma.store_wait(0)
        mbarrier.arrive(q_empty.index(stage))
        mbarrier.arrive(do_empty.index(stage))
        pass_turn(turn, place + 1)


@gluon.jit
def consumer(
    W: gl.constexpr, operands, STAGES: gl.constexpr, SECTION: gl.constexpr, QK_HALF: gl.constexpr, V_HALF: gl.constexpr,
    DETERMINISTIC: gl.constexpr, EVEN: gl.constexpr, SKIP: gl.constexpr, HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr,
    SOFTCAP: gl.constexpr,
):  # fmt: skip
    (
        work, dq_desc, q_smem, k_smem, v_smem, do_smem, lse_smem, delta_smem, p_smem, ds_smem, kv_full, q_full, q_empty,
        do_full, do_empty, p_full, ds_full, dq_full, finished, stored, scale, cap, q_len, kv_len, low, high, num_kv_heads,
        total_heads, group,
    ) = operands  # fmt: skip
    S_LAYOUT: gl.constexpr = accumulator_layout(64)
    K_LAYOUT: gl.constexpr = accumulator_layout(QK_HALF)
    V_LAYOUT: gl.constexpr = accumulator_layout(V_HALF)
    n_first, b, kv_head = key_tile_of(work, kv_len, num_kv_heads, total_heads, SECTION, 64)
    first, end = query_tiles(n_first, q_len, kv_len, low, high, HAS_LOW, HAS_HIGH, SKIP, 64, 64)
    start, stop, ahead, row, jump = course(first, end, (b * num_kv_heads + kv_head) * group, q_len, 64, DETERMINISTIC)
    left = kv_len - n_first
    shift = n_first
    if HAS_HIGH:
        shift = shift - high
        low = low - high
    start = start - shift
    stop = stop - shift
    dk = gl.zeros([64, QK_HALF], gl.float32, K_LAYOUT)
    dv = gl.zeros([64, V_HALF], gl.float32, V_LAYOUT)
    mbarrier.wait(kv_full, 0)
    x = warpgroup_mma_wait(
        0, deps=[scores(0, q_smem, k_smem, v_smem, do_smem, q_full, do_full, W, STAGES, QK_HALF, V_HALF, S_LAYOUT)]
    )
    m = start
    pass_on(
        0, m, x, lse_smem, delta_smem, p_smem, ds_smem, p_full, ds_full, scale, cap, left, low, W, STAGES, EVEN, SKIP,
        HAS_LOW, HAS_HIGH, SOFTCAP, S_LAYOUT,
    )  # fmt: skip
    for i in range(1, group * (end - first)):
        before = (i - 1) % STAGES
        q_tile = q_smem.index(2 * before + W)
        do_tile = do_smem.index(2 * before + W)
        dq, dk, dv = products(
            i - 1, k_smem, q_tile, do_tile, p_smem, ds_smem, ds_full, dk, dv, W, QK_HALF, V_HALF, K_LAYOUT
        )  # fmt: skip
        leave_dq(dq, dq_desc, q_tile, do_tile)
        if DETERMINISTIC:
            mbarrier.arrive(dq_full.index(before))
        else:
            add_dq(dq_desc, q_tile, do_tile, row, W)
        row = row + ahead
        if HAS_LOW or HAS_HIGH:
            m = m + ahead
            if m == stop:
                m = start
                row = row + jump
        x_token = scores(i, q_smem, k_smem, v_smem, do_smem, q_full, do_full, W, STAGES, QK_HALF, V_HALF, S_LAYOUT)
        x = warpgroup_mma_wait(0, deps=[x_token])
        pass_on(
            i, m, x, lse_smem, delta_smem, p_smem, ds_smem, p_full, ds_full, scale, cap, left, low, W, STAGES, EVEN, SKIP,
            HAS_LOW, HAS_HIGH, SOFTCAP, S_LAYOUT,
        )  # fmt: skip
        if not DETERMINISTIC:
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(before))
            mbarrier.arrive(do_empty.index(before))
    last = group * (end - first) - 1
    q_tile = q_smem.index(2 * (last % STAGES) + W)
    do_tile = do_smem.index(2 * (last % STAGES) + W)
    dq, dk, dv = products(last, k_smem, q_tile, do_tile, p_smem, ds_smem, ds_full, dk, dv, W, QK_HALF, V_HALF, K_LAYOUT)
    leave_dq(dq, dq_desc, q_tile, do_tile)
    if DETERMINISTIC:
        mbarrier.arrive(dq_full.index(last % STAGES))
    else:
        add_dq(dq_desc, q_tile, do_tile, row, W)
    # K's and V's buffers are free when both consumers have finished.
    mbarrier.arrive(finished)
    mbarrier.wait(finished, 0)
    v_smem.index(W).reshape([64, V_HALF]).store(dv.to(v_smem.dtype))
    k_smem.index(W).reshape([64, QK_HALF]).store((dk * score_factor(scale, cap, SOFTCAP, False)).to(k_smem.dtype))
    fence_async_shared()
    mbarrier.arrive(stored)
    if not DETERMINISTIC:
        tma.store_wait(0)


# One binary serves every length: a length divisible by 16, or 1, is no other kernel.
@gluon.jit(do_not_specialize=["q_len", "kv_len", "low", "high", "num_kv_heads", "total_heads", "group"])
def flash_backward_wide(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dq_desc, dk_desc, dv_desc, scale, cap,
    q_len, kv_len, low, high, num_kv_heads, total_heads, group, turns,
    STAGES: gl.constexpr, SECTION: gl.constexpr, REGISTERS: gl.constexpr,
    EVEN: gl.constexpr, SKIP: gl.constexpr, HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr, SOFTCAP: gl.constexpr,
    DETERMINISTIC: gl.constexpr,
):  # fmt: skip
    """dK, dV, and dQ divided by ``factor``, of ``softmax(band(f(q k^T)) * scale) v``; ``scale`` includes log2(e).

    Descriptors over [B, H, L, D]: Q, K, V, dO, dK, dV of half-width tiles [1, 1, 64, 128]; dQ [64, 64] float32, zero at
    the start, LSE, DELTA and turns as for :func:`flash_backward`, of 64 rows. Launched with ceil(kv_len / 64) * total_heads
    programs of 4 warps.
    """
    QK_HALF: gl.constexpr = q_desc.block_type.shape[3]
    V_HALF: gl.constexpr = do_desc.block_type.shape[3]
    # ruff: noqa: RUF005 - lists are added, the language has no starred expressions
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2 * STAGES] + q_desc.block_type.shape, q_desc.layout)
    do_smem = gl.allocate_shared_memory(do_desc.dtype, [2 * STAGES] + do_desc.block_type.shape, do_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [2] + k_desc.block_type.shape, k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [2] + v_desc.block_type.shape, v_desc.layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 64], lse_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 64], delta_desc.layout)
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    p_smem = gl.allocate_shared_memory(q_desc.dtype, [2, 64, 64], TILE)
    ds_smem = gl.allocate_shared_memory(q_desc.dtype, [2, 64, 64], TILE)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    do_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], BAR)
    p_full = gl.allocate_shared_memory(gl.int64, [1], BAR)
    ds_full = gl.allocate_shared_memory(gl.int64, [1], BAR)
    finished = gl.allocate_shared_memory(gl.int64, [1], BAR)
    stored = gl.allocate_shared_memory(gl.int64, [1], BAR)
    dq_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    # Who is done last with a buffer of Q or of dO: both consumers, or the writer.
    READERS: gl.constexpr = 1 if DETERMINISTIC else 2
    mbarrier.init(kv_full, count=1)
    mbarrier.init(p_full, count=1)
    mbarrier.init(ds_full, count=1)
    mbarrier.init(finished, count=2)
    mbarrier.init(stored, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=READERS)
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(do_empty.index(i), count=READERS)
        mbarrier.init(dq_full.index(i), count=2)
    fence_async_shared()
    work = ticket(turns) if DETERMINISTIC else gl.program_id(0)
    # Constants are spelled out in the lists: a variable would make run-time values of them.
    for_consumers = (
        work, dq_desc, q_smem, k_smem, v_smem, do_smem, lse_smem, delta_smem, p_smem, ds_smem, kv_full, q_full, q_empty,
        do_full, do_empty, p_full, ds_full, dq_full, finished, stored, scale, cap, q_len, kv_len, low, high, num_kv_heads,
        total_heads, group,
    )  # fmt: skip
    for_producer = (
        work, q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_desc, dv_desc, q_smem, k_smem, v_smem, do_smem,
        lse_smem, delta_smem, kv_full, q_full, q_empty, do_full, do_empty, stored, q_len, kv_len, low, high, num_kv_heads,
        total_heads, group,
    )  # fmt: skip
    for_writers = (
        work, dq_desc, q_smem, do_smem, dq_full, q_empty, do_empty, q_len, kv_len, low, high, num_kv_heads, total_heads,
        group,
    )  # fmt: skip
    if DETERMINISTIC:
        gl.warp_specialize([
            (consumer, (
                0, for_consumers, STAGES, SECTION, QK_HALF, V_HALF, DETERMINISTIC, EVEN, SKIP, HAS_LOW, HAS_HIGH, SOFTCAP,
            )),
            (consumer, (
                1, for_consumers, STAGES, SECTION, QK_HALF, V_HALF, DETERMINISTIC, EVEN, SKIP, HAS_LOW, HAS_HIGH, SOFTCAP,
            )),
            (producer, (for_producer, STAGES, SECTION, HAS_LOW, HAS_HIGH, SKIP, DETERMINISTIC)),
            (writer, (0, for_writers, turns, STAGES, SECTION, HAS_LOW, HAS_HIGH, SKIP)),
            (writer, (1, for_writers, turns, STAGES, SECTION, HAS_LOW, HAS_HIGH, SKIP)),
        ], [4, 1, 1, 1], [REGISTERS, 24, 24, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (
                0, for_consumers, STAGES, SECTION, QK_HALF, V_HALF, DETERMINISTIC, EVEN, SKIP, HAS_LOW, HAS_HIGH, SOFTCAP,
            )),
            (consumer, (
                1, for_consumers, STAGES, SECTION, QK_HALF, V_HALF, DETERMINISTIC, EVEN, SKIP, HAS_LOW, HAS_HIGH, SOFTCAP,
            )),
            (producer, (for_producer, STAGES, SECTION, HAS_LOW, HAS_HIGH, SKIP, DETERMINISTIC)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
