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
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# triton 3.9 renamed the copies.
tma_load = getattr(tma, "async_copy_global_to_shared", None) or tma.async_load
tma_store = getattr(tma, "async_copy_shared_to_global", None) or tma.async_store


@gluon.constexpr_function
def accumulator_layout(columns):
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.jit
def tile_of(work, q_len, num_heads, total_heads, SECTION: gl.constexpr, ROWS: gl.constexpr):
    """(first query row, batch, head): SECTION heads run side by side and share K and V in L2, the longest rows first."""
    num_tiles = (q_len + ROWS - 1) // ROWS
    section = work // (num_tiles * SECTION)
    inside = work - section * (num_tiles * SECTION)
    width = gl.minimum(SECTION, total_heads - section * SECTION)
    head = section * SECTION + inside % width
    return (num_tiles - 1 - inside // width) * ROWS, head // num_heads, head % num_heads


@gluon.jit
def ranges_of(ranges, b, row_first, q_len):
    """Where the 64 queries from ``row_first`` have theirs; past the last queries, those of the last ones."""
    tiles = (q_len + 63) // 64
    return ranges + 4 * (b * tiles + gl.minimum(row_first // 64, tiles - 1))


@gluon.jit
def key_tiles(
    q_first, q_len, kv_len, low, high, b, ranges, HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr, ROWS: gl.constexpr,
    KEYS: gl.constexpr,
):  # fmt: skip
    """(first, first full, end of full, end) in tiles of KEYS; at least one tile, of which nothing need remain unmasked.

    RANGES [B, ceil(M / 64), 4] int32, or None: for 64 queries the first key and the end of those that the rest of the mask leaves
    to any, and of a run of those that it leaves to all of them.
    """
    q_last = gl.minimum(q_first + ROWS, q_len) - 1
    first = 0
    end = (kv_len + KEYS - 1) // KEYS
    full_first = 0
    full_end = kv_len // KEYS
    if HAS_LOW:
        first = gl.minimum(gl.maximum(q_first + low, 0) // KEYS, end - 1)
        full_first = (gl.maximum(q_last + low, 0) + KEYS - 1) // KEYS
    if HAS_HIGH:
        full_end = gl.minimum(full_end, gl.maximum(q_first + high + 1, 0) // KEYS)
        end = gl.minimum(end, (gl.maximum(q_last + high + 1, 0) + KEYS - 1) // KEYS)
    if ranges is not None:
        at = ranges_of(ranges, b, q_first, q_len)
        seen = gl.load(at)
        seen_end = gl.load(at + 1)
        for w in gl.static_range(1, ROWS // 64):
            at = ranges_of(ranges, b, q_first + w * 64, q_len)
            seen = gl.minimum(seen, gl.load(at))
            seen_end = gl.maximum(seen_end, gl.load(at + 1))
        first = gl.minimum(gl.maximum(first, seen // KEYS), (kv_len + KEYS - 1) // KEYS - 1)
        end = gl.minimum(end, (seen_end + KEYS - 1) // KEYS)
    end = gl.maximum(end, first + 1)
    full_end = gl.minimum(gl.maximum(full_end, first), end)
    full_first = gl.minimum(gl.maximum(full_first, first), full_end)
    return first, full_first, full_end, end


@gluon.jit
def producer(
    operands, ranges, KEYS: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, SECTION: gl.constexpr,
    DYNAMIC: gl.constexpr, HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr, V_TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """Loads for every tile of this program. V_TRANSPOSED: V lies as [B, H, V_DIM, N]."""
    (
        q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, counter,
        work_smem, work_full, work_empty, q_len, kv_len, low, high, num_heads, total_heads, group,
    ) = operands  # fmt: skip
    ROWS: gl.constexpr = 64 * CONSUMERS
    loaded = 0
    turn = 0
    total = (q_len + ROWS - 1) // ROWS * total_heads
    work = gl.program_id(0)
    while work < total:
        q_first, b, h = tile_of(work, q_len, num_heads, total_heads, SECTION, ROWS)
        first, _full_first, _full_end, end = key_tiles(
            q_first, q_len, kv_len, low, high, b, ranges, HAS_LOW, HAS_HIGH, ROWS, KEYS
        )
        kv_head = h // group
        for w in gl.static_range(CONSUMERS):
            mbarrier.wait(q_empty.index(w), (turn & 1) ^ 1)
            mbarrier.expect(q_full.index(w), q_desc.block_type.nbytes)
            tma_load(q_desc, [b, h, q_first + w * 64, 0], q_full.index(w), q_smem.index(w))
        for j in range(end - first):
            i = loaded + j
            stage = i % STAGES
            phase = (i // STAGES) & 1
            n = (end - 1 - j) * KEYS
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
            tma_load(k_desc, [b, kv_head, n, 0], k_full.index(stage), k_smem.index(stage))
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
            if V_TRANSPOSED:
                tma_load(v_desc, [b, kv_head, 0, n], v_full.index(stage), v_smem.index(stage))
            else:
                tma_load(v_desc, [b, kv_head, n, 0], v_full.index(stage), v_smem.index(stage))
        if DYNAMIC:
            # After the loads: they need not wait for the counter, whose answer takes as long as a load. Where each tile has
            # a program, the counter is memory that nobody has set: any number must mean that nothing is left.
            work = gl.minimum(gl.maximum(gl.atomic_add(counter, 1), 0), 1 << 30) + gl.num_programs(0)
            mbarrier.wait(work_empty, (turn & 1) ^ 1)
            work_smem.store(gl.full([1], work, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
            mbarrier.arrive(work_full)
        else:
            work += gl.num_programs(0)
        loaded += end - first
        turn += 1


@gluon.jit
def tanh(x):
    # 1 - 2 / (e^2x + 1): no overflow, exact at both ends.
    return 1.0 - 2.0 / (gl.exp2(x * 2.8853900817779268) + 1.0)


@gluon.jit
def own_end(row_first, q_len, first, end, high, HAS_HIGH: gl.constexpr, KEYS: gl.constexpr):
    """Where the key tiles from ``first`` to ``end`` end for the 64 rows of a consumer; at least one tile is left."""
    if HAS_HIGH:
        q_last = gl.minimum(row_first + 64, q_len) - 1
        end = gl.minimum(end, gl.maximum((gl.maximum(q_last + high + 1, 0) + KEYS - 1) // KEYS, first + 1))
    # Nothing is kept of rows past the end.
    return gl.where(row_first < q_len, end, first + 1)


@gluon.jit
def banded(
    s, row_first, n, kv_len, low, high,
    KEYS: gl.constexpr, EVEN: gl.constexpr, HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scores of the keys from ``n``, -inf outside of the band and of the keys."""
    if HAS_LOW or HAS_HIGH or not EVEN:
        slack = 0
        if HAS_HIGH:
            slack = gl.minimum(slack, row_first + high - (n + KEYS - 1))
        if HAS_LOW:
            slack = gl.minimum(slack, n - (row_first + 63 + low))
        if not EVEN:
            slack = gl.minimum(slack, kv_len - n - KEYS)
        # A branch, not a loop of its own: P in 16 bits goes from loop to loop a register a number, packed in every step.
        if slack < 0:
            q = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
            kv = gl.arange(0, KEYS, layout=gl.SliceLayout(0, LAYOUT))
            # A thread's keys differ in all bits but these and its queries in this one: it compares one number with constants.
            ahead = (kv & ~6)[None, :] - (q & 8)[:, None]
            at = ((q & ~8) + (row_first - n))[:, None] - (kv & 6)[None, :]
            keep = ahead < KEYS
            if HAS_HIGH:
                keep = keep & (ahead <= at + high)
            if HAS_LOW:
                keep = keep & (ahead >= at + low)
            if not EVEN:
                keep = keep & ((kv & ~6) < kv_len - n - (kv & 6))[None, :]
            s = gl.where(keep, s, -float("inf"))
    return s


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
    i, t, n, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, turn, p, m, denom, acc,
    scale, cap, row_first, kv_len, low, high,
    W: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
    PING_PONG: gl.constexpr, EVEN: gl.constexpr, HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr, SOFTCAP: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scores of the keys from ``n``, load ``i``, while tile ``i - 1`` is multiplied with V. ``t`` counts the turns."""
    stage = i % STAGES
    before = (i - 1) % STAGES
    mbarrier.wait(k_full.index(stage), (i // STAGES) & 1)
    if PING_PONG:
        mbarrier.wait(turn.index(W), t & 1)
    zero = gl.zeros([64, KEYS], gl.float32, S_LAYOUT)
    k = k_smem.index(stage).reshape([KEYS, q.shape[1]]).permute((1, 0))
    s_token = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)
    o_token = warpgroup_mma(p, v_smem.index(before).reshape([KEYS, acc.shape[1]]), acc, is_async=True)
    if PING_PONG:
        mbarrier.arrive(turn.index((W + 1) % CONSUMERS))
    s = warpgroup_mma_wait(1, deps=[s_token])
    mbarrier.arrive(k_empty.index(stage))
    if SOFTCAP:
        s = tanh(s * cap)
    s = banded(s, row_first, n, kv_len, low, high, KEYS, EVEN, HAS_LOW, HAS_HIGH, S_LAYOUT)
    p, m, denom, alpha = softmax(s, m, denom, scale)
    acc = warpgroup_mma_wait(0, deps=[o_token])
    mbarrier.arrive(v_empty.index(before))
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
    return gl.convert_layout(p.to(q.dtype), P_LAYOUT), m, denom, acc


@gluon.jit
def output_tile(q_smem, o_smem, o_desc, W: gl.constexpr, OWN_O: gl.constexpr):
    """Where a consumer's output is stored from."""
    if OWN_O:
        o_tile = o_smem.index(W)
    else:
        # The queries' buffer is free when the output is ready, and wide enough: V_DIM <= QK_DIM.
        o_tile = q_smem.index(W)._reinterpret(q_smem.dtype, o_desc.block_type.shape, o_desc.layout)
    return o_tile


@gluon.jit
def first_scores(
    q, i, k_smem, k_full, k_empty, KEYS: gl.constexpr, QK_DIM: gl.constexpr, STAGES: gl.constexpr, S_LAYOUT: gl.constexpr
):
    """Scores of load ``i``, with nothing to do beside them."""
    mbarrier.wait(k_full.index(i % STAGES), (i // STAGES) & 1)
    zero = gl.zeros([64, KEYS], gl.float32, S_LAYOUT)
    k = k_smem.index(i % STAGES).reshape([KEYS, QK_DIM]).permute((1, 0))
    s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_empty.index(i % STAGES))
    return s


@gluon.jit
def last_product(
    p, acc, last, v_smem, v_full, v_empty, KEYS: gl.constexpr, V_DIM: gl.constexpr, STAGES: gl.constexpr
):
    """The output with P times V of load ``last``, after which no scores follow."""
    mbarrier.wait(v_full.index(last % STAGES), (last // STAGES) & 1)
    acc = warpgroup_mma(p, v_smem.index(last % STAGES).reshape([KEYS, V_DIM]), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_empty.index(last % STAGES))
    return acc


@gluon.jit
def next_tile(work, work_smem, work_full, work_empty, done, DYNAMIC: gl.constexpr):
    """The number of this program's next tile, after ``done`` of them."""
    if DYNAMIC:
        mbarrier.wait(work_full, done & 1)
        work = gl.max(work_smem.load(gl.BlockedLayout([1], [32], [4], [0])), 0)
        mbarrier.arrive(work_empty)
    else:
        work += gl.num_programs(0)
    return work


@gluon.jit
def store_output(acc, o_desc, o_tile, q_empty, b, h, row_first, V_DIM: gl.constexpr, OWN_O: gl.constexpr):
    """Store the output of 64 rows from shared memory; without OWN_O from the queries', which is given back then."""
    if OWN_O:
        tma.store_wait(0)
    o_tile.reshape([64, V_DIM]).store(acc.to(o_tile.dtype))
    fence_async_shared()
    tma_store(o_desc, [b, h, row_first, 0], o_tile)
    if not OWN_O:
        tma.store_wait(0)
        mbarrier.arrive(q_empty)


@gluon.jit
def consumer(
    W: gl.constexpr, operands, KEYS: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, SECTION: gl.constexpr,
    DYNAMIC: gl.constexpr, QK_DIM: gl.constexpr, V_DIM: gl.constexpr, PING_PONG: gl.constexpr, OWN_O: gl.constexpr,
    EVEN: gl.constexpr, HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr, SOFTCAP: gl.constexpr, DEAD_ZERO: gl.constexpr,
):  # fmt: skip
    (
        o_desc, lse, q_smem, k_smem, v_smem, o_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn, work_smem,
        work_full, work_empty, scale, cap, q_len, kv_len, low, high, num_heads, total_heads,
    ) = operands  # fmt: skip
    S_LAYOUT: gl.constexpr = accumulator_layout(KEYS)
    O_LAYOUT: gl.constexpr = accumulator_layout(V_DIM)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROWS: gl.constexpr = 64 * CONSUMERS
    q = q_smem.index(W).reshape([64, QK_DIM])
    o_tile = output_tile(q_smem, o_smem, o_desc, W, OWN_O)
    loaded = 0
    t = 0
    done = 0
    total = (q_len + ROWS - 1) // ROWS * total_heads
    work = gl.program_id(0)
    while work < total:
        q_first, b, h = tile_of(work, q_len, num_heads, total_heads, SECTION, ROWS)
        first, _full_first, _full_end, end = key_tiles(
            q_first, q_len, kv_len, low, high, b, None, HAS_LOW, HAS_HIGH, ROWS, KEYS
        )
        row_first = q_first + W * 64
        m = gl.full([64], -float("inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
        denom = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, S_LAYOUT))
        acc = gl.zeros([64, V_DIM], gl.float32, O_LAYOUT)

        # Tiles that only the other consumers' rows see: their buffers are given back, and the turns passed on.
        skip = end - own_end(row_first, q_len, first, end, high, HAS_HIGH, KEYS)
        for j in range(skip):
            i = loaded + j
            mbarrier.wait(k_full.index(i % STAGES), (i // STAGES) & 1)
            mbarrier.arrive(k_empty.index(i % STAGES))
            if PING_PONG:
                mbarrier.wait(turn.index(W), (t + j) & 1)
                mbarrier.arrive(turn.index((W + 1) % CONSUMERS))
            mbarrier.wait(v_full.index(i % STAGES), (i // STAGES) & 1)
            mbarrier.arrive(v_empty.index(i % STAGES))

        i = loaded + skip
        mbarrier.wait(q_full.index(W), done & 1)
        s = first_scores(q, i, k_smem, k_full, k_empty, KEYS, QK_DIM, STAGES, S_LAYOUT)
        if SOFTCAP:
            s = tanh(s * cap)
        s = banded(s, row_first, (end - 1 - skip) * KEYS, kv_len, low, high, KEYS, EVEN, HAS_LOW, HAS_HIGH, S_LAYOUT)
        p, m, denom, _alpha = softmax(s, m, denom, scale)
        p = gl.convert_layout(p.to(q.dtype), P_LAYOUT)
        for j in range(skip + 1, end - first):
            p, m, denom, acc = step(
                loaded + j, t + j - 1, (end - 1 - j) * KEYS, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, turn,
                p, m, denom, acc, scale, cap, row_first, kv_len, low, high, W, KEYS, STAGES, CONSUMERS,
                PING_PONG, EVEN, HAS_LOW, HAS_HIGH, SOFTCAP, S_LAYOUT, O_LAYOUT, P_LAYOUT,
            )  # fmt: skip
        if OWN_O:
            mbarrier.arrive(q_empty.index(W))
        work = next_tile(work, work_smem, work_full, work_empty, done, DYNAMIC)
        loaded += end - first
        t += end - first - 1
        done += 1

        acc = last_product(p, acc, loaded - 1, v_smem, v_full, v_empty, KEYS, V_DIM, STAGES)

        rows = row_first + gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT))
        lse_row = lse + (b * num_heads + h).to(gl.int64) * q_len + rows
        gl.store(lse_row, (m + gl.log2(denom)) * 0.6931471805599453, mask=rows < q_len)
        if DEAD_ZERO:
            denom = gl.where(denom == 0.0, 1.0, denom)
        acc = acc * gl.convert_layout(1.0 / denom, gl.SliceLayout(1, O_LAYOUT))[:, None]
        store_output(acc, o_desc, o_tile, q_empty.index(W), b, h, row_first, V_DIM, OWN_O)
    tma.store_wait(0)


@gluon.jit
def buffers(
    q_desc, k_desc, v_desc, o_desc, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, OWN_O: gl.constexpr,
    PING_PONG: gl.constexpr,
):  # fmt: skip
    """The buffers of a forward kernel, its barriers and the number of a program's next tile, ready for use."""
    # ruff: noqa: RUF005 - lists are added, the language has no starred expressions
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS] + q_desc.block_type.shape, q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_desc.block_type.shape, k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES] + v_desc.block_type.shape, v_desc.layout)
    V_DIM: gl.constexpr = o_desc.block_type.shape[3]
    o_smem = gl.allocate_shared_memory(
        o_desc.dtype, [CONSUMERS if OWN_O else 1] + (o_desc.block_type.shape if OWN_O else [1, 1, 8, V_DIM]), o_desc.layout
    )
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BAR)
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BAR)
    turn = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BAR)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
        mbarrier.init(turn.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    work_smem = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    work_full = gl.allocate_shared_memory(gl.int64, [1], BAR)
    work_empty = gl.allocate_shared_memory(gl.int64, [1], BAR)
    mbarrier.init(work_full, count=1)
    mbarrier.init(work_empty, count=CONSUMERS)
    fence_async_shared()
    if PING_PONG:
        mbarrier.arrive(turn.index(0))
    return (
        q_smem, k_smem, v_smem, o_smem, q_full, q_empty, turn, k_full, k_empty, v_full, v_empty, work_smem, work_full, work_empty,
    )  # fmt: skip


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
    (
        q_smem, k_smem, v_smem, o_smem, q_full, q_empty, turn, k_full, k_empty, v_full, v_empty, work_smem, work_full, work_empty,
    ) = buffers(q_desc, k_desc, v_desc, o_desc, STAGES, CONSUMERS, OWN_O, PING_PONG)  # fmt: skip
    # Constants are spelled out in the lists: a variable would make run-time values of them.
    for_consumers = (
        o_desc, lse, q_smem, k_smem, v_smem, o_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn, work_smem,
        work_full, work_empty, scale, cap, q_len, kv_len, low, high, num_heads, total_heads,
    )  # fmt: skip
    for_producer = (
        q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, counter,
        work_smem, work_full, work_empty, q_len, kv_len, low, high, num_heads, total_heads, group,
    )  # fmt: skip
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
