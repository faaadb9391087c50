"""The Gluon forward of :mod:`fa_inductor.templates.sm90.gluon_forward` with one loop over all tiles of keys of a program.

There a consumer ends a tile of queries by itself: its last product, the output and the first scores of the next one wait for
each other. Here the first scores of a tile of queries are one more step: the tensor cores compute them together with the last
product of the tile before, whose output is stored before the next step. So the next queries must be there early: there are two
buffers for them, and the producer runs ahead from one tile of queries to the next. It also computes what the consumers have
to know of a tile of queries, and leaves it in a record.

Each step has fewer barriers: K of a step and V of the one before are given back at once, two consumers take turns by barriers of
the processor, and the sums of a row stay with its four threads until its end.

Roles, units and arguments are those of the module above.
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

from fa_inductor.templates.sm90.gluon_fp8 import column, partial_sums
from fa_inductor.templates.sm90.gluon_parts import (
    accumulator_layout,
    banded,
    key_tiles,
    ranges_of,
    tanh,
    tile_of,
    tma_load,
    tma_store,
)

#: Numbers of a record: the first query, batch, head, end of the tiles of keys and how many; for each consumer its ranges.
RECORD = gl.constexpr(16)

# What a score program masks by besides a band, and its sinks, as in :mod:`fa_inductor.templates.sm90.gluon_program_forward`: a
# module that :mod:`fa_inductor.templates.sm90.forward_source` generates holds this file's text and then its own of these two.


@gluon.jit
def score_masked(logit, b_idx, h_idx, q_idx, kv_idx, Q_LEN, KV_LEN, captures, ahead):
    """``logit``, or -inf where the program masks it by more than a band."""
    return logit


@gluon.jit
def score_sinks(b_idx, h_idx, q_idx, Q_LEN, KV_LEN, captures):
    """The sinks of queries [64], times log2(e): numbers or such blocks."""
    return (0.0,)


@gluon.jit
def write(records, at, value):
    """One number of a record, by the producer."""
    records.index(at).store(gl.full([1], value, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def read(records, at):
    """One number of a record, by a consumer."""
    return gl.max(records.index(at).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def take_turn(W: gl.constexpr):
    """Wait until the other of two consumers has issued its products."""
    # Barriers of the processor: a memory barrier is arrived at by one thread, for which all four warps wait for each other.
    own = gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    if W == 0:
        gl.inline_asm_elementwise("bar.sync 14, 256; mov.b32 $0, $1;", "=r,r", [own], gl.int32, False, 1)
    else:
        gl.inline_asm_elementwise("bar.sync 15, 256; mov.b32 $0, $1;", "=r,r", [own], gl.int32, False, 1)


@gluon.jit
def give_turn(W: gl.constexpr):
    """Let the other of two consumers issue its products."""
    own = gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    if W == 0:
        gl.inline_asm_elementwise("bar.arrive 15, 256; mov.b32 $0, $1;", "=r,r", [own], gl.int32, False, 1)
    else:
        gl.inline_asm_elementwise("bar.arrive 14, 256; mov.b32 $0, $1;", "=r,r", [own], gl.int32, False, 1)


@gluon.jit
def load_tile(i, n, b, kv_head, k_desc, v_desc, k_smem, v_smem, k_full, v_full, given_back, STAGES: gl.constexpr):
    """K and V of the keys from ``n`` as load ``i``. What is given back as ``i``: K of load ``i`` and V of the one before."""
    stage = i % STAGES
    if i >= STAGES:
        mbarrier.wait(given_back.index(stage), (i // STAGES - 1) & 1)
    mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
    tma_load(k_desc, [b, kv_head, n, 0], k_full.index(stage), k_smem.index(stage))
    if i >= STAGES:
        mbarrier.wait(given_back.index((i + 1) % STAGES), ((i + 1) // STAGES - 1) & 1)
    mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
    tma_load(v_desc, [b, kv_head, n, 0], v_full.index(stage), v_smem.index(stage))


@gluon.jit
def producer(
    operands, ranges, KEYS: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, SECTION: gl.constexpr,
    DYNAMIC: gl.constexpr, HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr,
):  # fmt: skip
    """Records and loads for every tile of this program."""
    (
        q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, q_empty, k_full, v_full, given_back, records,
        record_full, record_empty, counter, q_len, kv_len, low, high, num_heads, total_heads, group,
    ) = operands  # fmt: skip
    ROWS: gl.constexpr = 64 * CONSUMERS
    loaded = 0
    item = 0
    total = (q_len + ROWS - 1) // ROWS * total_heads
    work = gl.program_id(0)
    while work < total:
        q_first, b, h = tile_of(work, q_len, num_heads, total_heads, SECTION, ROWS)
        first, _full_first, _full_end, end = key_tiles(
            q_first, q_len, kv_len, low, high, b, ranges, HAS_LOW, HAS_HIGH, ROWS, KEYS
        )
        slot = item % 2
        phase = (item // 2) & 1
        mbarrier.wait(record_empty.index(slot), phase ^ 1)
        write(records, slot * RECORD, q_first)
        write(records, slot * RECORD + 1, b)
        write(records, slot * RECORD + 2, h)
        write(records, slot * RECORD + 3, end)
        write(records, slot * RECORD + 4, end - first)
        if ranges is not None:
            for w in gl.static_range(CONSUMERS):
                seen = ranges_of(ranges, b, q_first + w * 64, q_len)
                for i in gl.static_range(4):
                    write(records, slot * RECORD + 5 + w * 4 + i, gl.load(seen + i))
        mbarrier.arrive(record_full.index(slot))
        kv_head = h // group
        for w in gl.static_range(CONSUMERS):
            at = slot * CONSUMERS + w
            mbarrier.wait(q_empty.index(at), phase ^ 1)
            mbarrier.expect(q_full.index(at), q_desc.block_type.nbytes)
            tma_load(q_desc, [b, h, q_first + w * 64, 0], q_full.index(at), q_smem.index(at))
        load_tile(
            loaded, (end - 1) * KEYS, b, kv_head, k_desc, v_desc, k_smem, v_smem, k_full, v_full, given_back, STAGES
        )
        if DYNAMIC:
            # Here the answer, which takes as long as a load, is waited for beside the loads. Where each tile has a program,
            # the counter is memory that nobody has set: any number must mean that nothing is left.
            work = gl.minimum(gl.maximum(gl.atomic_add(counter, 1), 0), 1 << 30) + gl.num_programs(0)
        else:
            work += gl.num_programs(0)
        for j in range(1, end - first):
            load_tile(
                loaded + j, (end - 1 - j) * KEYS, b, kv_head, k_desc, v_desc, k_smem, v_smem, k_full, v_full, given_back, STAGES,
            )  # fmt: skip
        loaded += end - first
        item += 1
    slot = item % 2
    mbarrier.wait(record_empty.index(slot), ((item // 2) & 1) ^ 1)
    write(records, slot * RECORD + 4, 0)
    mbarrier.arrive(record_full.index(slot))


@gluon.jit
def next_item(
    item, records, record_full, q_len, kv_len, low, high, W: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """(first query of the consumer, its tiles of keys, those before and after them that only the others' rows see, the first's
    first key, the run of keys that all rows see); no tiles at the end."""
    at = item % 2 * RECORD
    mbarrier.wait(record_full.index(item % 2), (item // 2) & 1)
    row_first = read(records, at) + W * 64
    end = read(records, at + 3)
    count = read(records, at + 4)
    whole_first = 0
    whole_end = kv_len
    # Tiles of the others are given back with the next product, so some buffers must be left to load.
    AFTER: gl.constexpr = (STAGES - 1) // 3
    BEFORE: gl.constexpr = STAGES - 1 - AFTER
    before = 0
    after = 0
    if HAS_HIGH or MASKED:
        own_end = kv_len
        if MASKED:
            own_end = read(records, at + 6 + W * 4)
            whole_first = read(records, at + 7 + W * 4)
            whole_end = read(records, at + 8 + W * 4)
        if HAS_HIGH:
            own_end = gl.minimum(own_end, gl.minimum(row_first + 64, q_len) + high)
        own_end = (gl.maximum(own_end, 0) + KEYS - 1) // KEYS
        before = gl.minimum(gl.maximum(end - own_end, 0), gl.minimum(BEFORE, gl.maximum(count - 1, 0)))
    if AFTER > 0 and (HAS_LOW or MASKED):
        own_first = 0
        if MASKED:
            own_first = read(records, at + 5 + W * 4)
        if HAS_LOW:
            own_first = gl.maximum(own_first, row_first + low)
        after = gl.maximum(own_first // KEYS - (end - count), 0)
        after = gl.minimum(after, gl.minimum(AFTER, gl.maximum(count - before - 1, 0)))
    return row_first, count - before - after, before, after, (end - 1 - before) * KEYS, whole_first, whole_end


@gluon.jit
def masked_scores(
    s, row_first, n, q_len, kv_len, low, high, records, record, captures, whole_first, whole_end,
    W: gl.constexpr, KEYS: gl.constexpr, EVEN: gl.constexpr, HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr,
    MASKED: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scores of the keys from ``n``, -inf where they are masked. ``record``: where that of the queries begins."""
    if MASKED:
        edge = (n < whole_first) | (n + KEYS > whole_end)
        if HAS_HIGH:
            edge = edge | (n + KEYS > row_first + high + 1)
        if HAS_LOW:
            edge = edge | (n < row_first + 63 + low)
        if edge:
            q = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
            kv = gl.arange(0, KEYS, layout=gl.SliceLayout(0, LAYOUT))
            seen_first = read(records, record + 5 + W * 4)
            seen_end = read(records, record + 6 + W * 4)
            # Where all that is seen is seen by all, that is all there is to the mask.
            alone = (seen_first == whole_first) & (seen_end == whole_end)
            if ((n < whole_first) | (n + KEYS > whole_end)) & (alone == 0):
                at_q = gl.minimum(row_first + q, q_len - 1)[:, None]
                at_kv = n + kv
                if not EVEN:
                    at_kv = gl.minimum(at_kv, kv_len - 1)
                b = read(records, record + 1)
                h = read(records, record + 2)
                s = score_masked(s, b, h, at_q, at_kv[None, :], q_len, kv_len, captures, (0,))
            # As in ``banded``.
            even = kv & ~6
            own = (kv & 6) + n
            keep = ((even >= seen_first - own) & (even < seen_end - own))[None, :]
            ahead = even[None, :] - (q & 8)[:, None]
            at = ((q & ~8) + (row_first - n))[:, None] - (kv & 6)[None, :]
            if HAS_HIGH:
                keep = keep & (ahead <= at + high)
            if HAS_LOW:
                keep = keep & (ahead >= at + low)
            s = gl.where(keep, s, -float("inf"))
    else:
        s = banded(s, row_first, n, kv_len, low, high, KEYS, EVEN, HAS_LOW, HAS_HIGH, LAYOUT)
    return s


@gluon.jit
def beginning(row_first, q_len, kv_len, records, record, captures, SINKS: gl.constexpr, KEYS: gl.constexpr, LAYOUT: gl.constexpr):
    """(maximum [64], sums [64, 4]) of rows before any key."""
    m = gl.full([64], -float("inf"), gl.float32, gl.SliceLayout(1, LAYOUT))
    denom = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, LAYOUT))
    if SINKS > 0:
        # A sink is one more logit of its row, and has no value.
        rows = gl.minimum(row_first + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT)), q_len - 1)
        sinks = score_sinks(read(records, record + 1), read(records, record + 2), rows, q_len, kv_len, captures)
        for i in gl.static_range(SINKS):
            m = gl.maximum(m, sinks[i])
        m_safe = gl.where(m == -float("inf"), 0.0, m)
        for i in gl.static_range(SINKS):
            denom += gl.exp2(sinks[i] - m_safe)
    zero = partial_sums(gl.zeros([64, KEYS], gl.float32, LAYOUT), KEYS)
    return m, zero + column(denom * 0.25, zero)


@gluon.jit
def softmax(s, m, denom, scale, KEYS: gl.constexpr):
    """One tile of scores into probabilities: (p, maximum, sums of a thread [64, 4], what the earlier output is multiplied with)."""
    m_new = gl.maximum(m, gl.max(s, 1) * scale)
    m_safe = gl.where(m_new == -float("inf"), 0.0, m_new)
    alpha = gl.exp2(m - m_safe)
    p = gl.exp2(s * scale - m_safe[:, None])
    # Four threads share a row: their sums are added once, at the end.
    sums = partial_sums(p, KEYS)
    return p, m_new, denom * column(alpha, sums) + sums, alpha


@gluon.jit
def finish(
    acc, m, denom, item, records, record_empty, lse, o_desc, o_tile, q_len, num_heads, W: gl.constexpr, V_DIM: gl.constexpr,
    DEAD_ZERO: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Store the output and the LSE of 64 rows, and give their record back."""
    record = item % 2 * RECORD
    row_first = read(records, record) + W * 64
    b = read(records, record + 1)
    h = read(records, record + 2)
    mbarrier.arrive(record_empty.index(item % 2))
    denom = gl.convert_layout(gl.sum(denom, 1), gl.SliceLayout(1, S_LAYOUT))
    rows = row_first + gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT))
    lse_row = lse + (b * num_heads + h).to(gl.int64) * q_len + rows
    gl.store(lse_row, (m + gl.log2(denom)) * 0.6931471805599453, mask=rows < q_len)
    if DEAD_ZERO:
        denom = gl.where(denom == 0.0, 1.0, denom)
    out = acc * gl.convert_layout(1.0 / denom, gl.SliceLayout(1, O_LAYOUT))[:, None]
    tma.store_wait(0)
    o_tile.reshape([64, V_DIM]).store(out.to(o_tile.dtype))
    fence_async_shared()
    tma_store(o_desc, [b, h, row_first, 0], o_tile)


@gluon.jit
def products(
    q, p, acc, i, before, k_smem, v_smem, k_full, v_full,
    STARTS: gl.constexpr, W: gl.constexpr, STAGES: gl.constexpr, PING_PONG: gl.constexpr, V_DIM: gl.constexpr,
    S_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr,
):  # fmt: skip
    """(scores of load ``i``, the output with P times V of load ``before``, not waited for); each load is a turn.

    STARTS: whether the scores are the first of a tile of queries.
    """
    KEYS: gl.constexpr = p.shape[1]
    # Here, not where P is computed: what goes from loop to loop in 16 bits takes a register a number.
    p = gl.convert_layout(p.to(q.dtype), P_LAYOUT)
    mbarrier.wait(k_full.index(i % STAGES), (i // STAGES) & 1)
    if PING_PONG:
        take_turn(W)
    zero = gl.zeros([64, KEYS], gl.float32, S_LAYOUT)
    k = k_smem.index(i % STAGES).reshape([KEYS, q.shape[1]]).permute((1, 0))
    s_token = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
    if STARTS:
        # Of a program's first product nothing is kept: P is zero, and V what lies there.
        if before >= 0:
            mbarrier.wait(v_full.index(before % STAGES), (before // STAGES) & 1)
    else:
        mbarrier.wait(v_full.index(before % STAGES), (before // STAGES) & 1)
    v = v_smem.index((before + STAGES) % STAGES).reshape([KEYS, V_DIM])
    o_token = warpgroup_mma(p, v, acc, is_async=True)
    if PING_PONG:
        give_turn(W)
    s = warpgroup_mma_wait(1, deps=[s_token])
    return s, o_token


@gluon.jit
def consumer(
    W: gl.constexpr, operands, captures, KEYS: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
    QK_DIM: gl.constexpr, V_DIM: gl.constexpr, PING_PONG: gl.constexpr, EVEN: gl.constexpr, HAS_LOW: gl.constexpr,
    HAS_HIGH: gl.constexpr, SOFTCAP: gl.constexpr, DEAD_ZERO: gl.constexpr, MASKED: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    (
        o_desc, lse, q_smem, k_smem, v_smem, o_smem, q_full, q_empty, k_full, v_full, given_back, records,
        record_full, record_empty, scale, cap, q_len, kv_len, low, high, num_heads,
    ) = operands  # fmt: skip
    S_LAYOUT: gl.constexpr = accumulator_layout(KEYS)
    O_LAYOUT: gl.constexpr = accumulator_layout(V_DIM)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    o_tile = o_smem.index(W)
    p = gl.zeros([64, KEYS], gl.float32, S_LAYOUT)
    m = gl.full([64], -float("inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    denom = partial_sums(p, KEYS)
    acc = gl.zeros([64, V_DIM], gl.float32, O_LAYOUT)
    row_first, own, skip, after, n, whole_first, whole_end = next_item(
        0, records, record_full, q_len, kv_len, low, high, W, KEYS, STAGES, HAS_LOW, HAS_HIGH, MASKED
    )
    if PING_PONG and W == 1:
        give_turn(W)
    item = 0
    i = 0
    while own > 0:
        # Of tiles that only the other consumer's rows see the turns are passed on, and below their buffers given back.
        if PING_PONG and (HAS_HIGH or HAS_LOW or MASKED):
            for _j in range(skip):
                take_turn(W)
                give_turn(W)
        at = item % 2 * CONSUMERS + W
        record = item % 2 * RECORD
        q = q_smem.index(at).reshape([64, QK_DIM])
        mbarrier.wait(q_full.index(at), (item // 2) & 1)
        s, o_token = products(
            q, p, acc, i + skip, i - 1, k_smem, v_smem, k_full, v_full, True, W, STAGES, PING_PONG, V_DIM,
            S_LAYOUT, P_LAYOUT,
        )  # fmt: skip
        acc = warpgroup_mma_wait(0, deps=[o_token])
        if item > 0:
            finish(
                acc, m, denom, item - 1, records, record_empty, lse, o_desc, o_tile, q_len, num_heads, W, V_DIM, DEAD_ZERO,
                S_LAYOUT, O_LAYOUT,
            )  # fmt: skip
        acc = gl.zeros([64, V_DIM], gl.float32, O_LAYOUT)
        if HAS_HIGH or HAS_LOW or MASKED:
            for j in range(i, i + skip):
                mbarrier.wait(k_full.index(j % STAGES), (j // STAGES) & 1)
                mbarrier.arrive(given_back.index(j % STAGES))
                mbarrier.wait(v_full.index(j % STAGES), (j // STAGES) & 1)
        i = i + skip
        mbarrier.arrive(given_back.index(i % STAGES))
        if SOFTCAP:
            s = tanh(s * cap)
        s = masked_scores(
            s, row_first, n, q_len, kv_len, low, high, records, record, captures, whole_first, whole_end, W, KEYS, EVEN,
            HAS_LOW, HAS_HIGH, MASKED, S_LAYOUT,
        )  # fmt: skip
        m, denom = beginning(row_first, q_len, kv_len, records, record, captures, SINKS, KEYS, S_LAYOUT)
        p, m, denom, _alpha = softmax(s, m, denom, scale, KEYS)

        for j in range(1, own):
            s, o_token = products(
                q, p, acc, i + j, i + j - 1, k_smem, v_smem, k_full, v_full, False, W, STAGES, PING_PONG, V_DIM,
                S_LAYOUT, P_LAYOUT,
            )  # fmt: skip
            if SOFTCAP:
                s = tanh(s * cap)
            s = masked_scores(
                s, row_first, n - j * KEYS, q_len, kv_len, low, high, records, record, captures, whole_first, whole_end, W,
                KEYS, EVEN, HAS_LOW, HAS_HIGH, MASKED, S_LAYOUT,
            )  # fmt: skip
            p, m, denom, alpha = softmax(s, m, denom, scale, KEYS)
            acc = warpgroup_mma_wait(0, deps=[o_token])
            mbarrier.arrive(given_back.index((i + j) % STAGES))
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
        mbarrier.arrive(q_empty.index(at))
        i = i + own
        item = item + 1
        left = after
        row_first, own, skip, after, n, whole_first, whole_end = next_item(
            item, records, record_full, q_len, kv_len, low, high, W, KEYS, STAGES, HAS_LOW, HAS_HIGH, MASKED
        )
        skip = skip + left

    mbarrier.wait(v_full.index((i - 1) % STAGES), ((i - 1) // STAGES) & 1)
    p = gl.convert_layout(p.to(q_smem.dtype), P_LAYOUT)
    acc = warpgroup_mma(p, v_smem.index((i - 1) % STAGES).reshape([KEYS, V_DIM]), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    finish(
        acc, m, denom, item - 1, records, record_empty, lse, o_desc, o_tile, q_len, num_heads, W, V_DIM, DEAD_ZERO, S_LAYOUT,
        O_LAYOUT,
    )  # fmt: skip
    tma.store_wait(0)


@gluon.jit
def buffers(q_desc, k_desc, v_desc, o_desc, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """The buffers of a forward kernel, its barriers and records, ready for use."""
    # ruff: noqa: RUF005 - lists are added, the language has no starred expressions
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2 * CONSUMERS] + q_desc.block_type.shape, q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_desc.block_type.shape, k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES] + v_desc.block_type.shape, v_desc.layout)
    o_smem = gl.allocate_shared_memory(o_desc.dtype, [CONSUMERS] + o_desc.block_type.shape, o_desc.layout)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [2 * CONSUMERS, 1], BAR)
    q_empty = gl.allocate_shared_memory(gl.int64, [2 * CONSUMERS, 1], BAR)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    given_back = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    for i in gl.static_range(2 * CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(given_back.index(i), count=CONSUMERS)
    records = gl.allocate_shared_memory(gl.int32, [2 * RECORD, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    record_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    record_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    for i in gl.static_range(2):
        mbarrier.init(record_full.index(i), count=1)
        mbarrier.init(record_empty.index(i), count=CONSUMERS)
    fence_async_shared()
    return (
        q_smem, k_smem, v_smem, o_smem, q_full, q_empty, k_full, v_full, given_back, records, record_full, record_empty,
    )  # fmt: skip


# One binary serves every length: a length divisible by 16, or 1, is no other kernel.
@gluon.jit(do_not_specialize=["q_len", "kv_len", "low", "high", "num_heads", "total_heads", "group"])
def flash_forward(
    q_desc, k_desc, v_desc, o_desc, lse, counter, scale, cap, q_len, kv_len, low, high, num_heads, total_heads, group,
    captures, ranges,
    KEYS: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, SECTION: gl.constexpr, DYNAMIC: gl.constexpr,
    REGISTERS: gl.constexpr,
    PING_PONG: gl.constexpr, EVEN: gl.constexpr, HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr,
    SOFTCAP: gl.constexpr, DEAD_ZERO: gl.constexpr, MASKED: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """out and lse as of ``flash_forward`` in :mod:`fa_inductor.templates.sm90.gluon_program_forward`, with 2 consumers.

    MASKED and SINKS: of a module with a score program of its own. MASKED comes with ``ranges``.
    """
    QK_DIM: gl.constexpr = q_desc.block_type.shape[3]
    V_DIM: gl.constexpr = v_desc.block_type.shape[3]
    (
        q_smem, k_smem, v_smem, o_smem, q_full, q_empty, k_full, v_full, given_back, records, record_full, record_empty,
    ) = buffers(q_desc, k_desc, v_desc, o_desc, STAGES, CONSUMERS)  # fmt: skip
    # Constants are spelled out in the lists: a variable would make run-time values of them.
    for_consumers = (
        o_desc, lse, q_smem, k_smem, v_smem, o_smem, q_full, q_empty, k_full, v_full, given_back, records,
        record_full, record_empty, scale, cap, q_len, kv_len, low, high, num_heads,
    )  # fmt: skip
    for_producer = (
        q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, q_empty, k_full, v_full, given_back, records,
        record_full, record_empty, counter, q_len, kv_len, low, high, num_heads, total_heads, group,
    )  # fmt: skip
    gl.warp_specialize([
        (consumer, (
            0, for_consumers, captures, KEYS, STAGES, CONSUMERS, QK_DIM, V_DIM, PING_PONG, EVEN, HAS_LOW, HAS_HIGH, SOFTCAP,
            DEAD_ZERO, MASKED, SINKS,
        )),
        (consumer, (
            1, for_consumers, captures, KEYS, STAGES, CONSUMERS, QK_DIM, V_DIM, PING_PONG, EVEN, HAS_LOW, HAS_HIGH, SOFTCAP,
            DEAD_ZERO, MASKED, SINKS,
        )),
        (producer, (for_producer, ranges, KEYS, STAGES, CONSUMERS, SECTION, DYNAMIC, HAS_LOW, HAS_HIGH)),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip
