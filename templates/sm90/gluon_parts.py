"""What the Gluon forward kernels for Hopper share: order of tiles, producer, products, buffers and barriers.

Roles, schedule and units are described in :mod:`fa_inductor.templates.sm90.gluon_forward`.
"""

from typing import Any, NamedTuple

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


class ConsumerOperands(NamedTuple):
    """What consumers work with: buffers [CONSUMERS or STAGES, ...], their barriers, and the call's numbers."""

    o_desc: Any
    lse: Any
    q_smem: Any
    k_smem: Any
    v_smem: Any
    o_smem: Any
    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any
    turn: Any
    work_smem: Any
    work_full: Any
    work_empty: Any
    scale: Any
    cap: Any
    q_len: Any
    kv_len: Any
    low: Any
    high: Any
    num_heads: Any
    total_heads: Any


@gluon.constexpr_function
def accumulator_layout(columns):
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.jit
def tile_of(work, q_len, num_heads, total_heads, SECTION: gl.constexpr, ROWS: gl.constexpr, ACROSS: gl.constexpr = False):
    """(first query row, batch, head): SECTION heads run side by side and share K and V in L2, the longest rows first.

    ACROSS: a head's sequences follow each other, which share what does not depend on the sequence, not a sequence's heads.
    """
    num_tiles = (q_len + ROWS - 1) // ROWS
    section = work // (num_tiles * SECTION)
    inside = work - section * (num_tiles * SECTION)
    width = gl.minimum(SECTION, total_heads - section * SECTION)
    head = section * SECTION + inside % width
    if ACROSS:
        batch = total_heads // num_heads
        b = head % batch
        h = head // batch
    else:
        b = head // num_heads
        h = head % num_heads
    return (num_tiles - 1 - inside // width) * ROWS, b, h


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
    ACROSS: gl.constexpr = False,
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
        q_first, b, h = tile_of(work, q_len, num_heads, total_heads, SECTION, ROWS, ACROSS)
        first, _full_first, _full_end, end = key_tiles(q_first, q_len, kv_len, low, high, b, ranges, HAS_LOW, HAS_HIGH, ROWS, KEYS)
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
def as_operand(p, dtype: gl.constexpr, O_LAYOUT: gl.constexpr):
    """Probabilities as the registers of a product that adds to an output of O_LAYOUT."""
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    return gl.convert_layout(p.to(dtype), P_LAYOUT)


@gluon.jit
def products(
    i, t, q, at, p, acc, W: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
    PING_PONG: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """(scores of load ``i``, the output with P times V of load ``i - 1`` to be waited for)."""
    stage = i % STAGES
    before = (i - 1) % STAGES
    mbarrier.wait(at.k_full.index(stage), (i // STAGES) & 1)
    if PING_PONG:
        mbarrier.wait(at.turn.index(W), t & 1)
    zero = gl.zeros([64, KEYS], gl.float32, S_LAYOUT)
    k = at.k_smem.index(stage).reshape([KEYS, q.shape[1]]).permute((1, 0))
    s_token = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
    mbarrier.wait(at.v_full.index(before), ((i - 1) // STAGES) & 1)
    o_token = warpgroup_mma(p, at.v_smem.index(before).reshape([KEYS, acc.shape[1]]), acc, is_async=True)
    if PING_PONG:
        mbarrier.arrive(at.turn.index((W + 1) % CONSUMERS))
    s = warpgroup_mma_wait(1, deps=[s_token])
    mbarrier.arrive(at.k_empty.index(stage))
    return s, o_token


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
def begin(W: gl.constexpr, at, QK_DIM: gl.constexpr, CONSUMERS: gl.constexpr, OWN_O: gl.constexpr):
    """(queries, where the output is stored from, the number of the first tile, how many there are) of a consumer."""
    ROWS: gl.constexpr = 64 * CONSUMERS
    q = at.q_smem.index(W).reshape([64, QK_DIM])
    o_tile = output_tile(at.q_smem, at.o_smem, at.o_desc, W, OWN_O)
    return q, o_tile, gl.program_id(0), (at.q_len + ROWS - 1) // ROWS * at.total_heads


@gluon.jit
def next_rows(
    W: gl.constexpr, work, at, ranges, KEYS: gl.constexpr, CONSUMERS: gl.constexpr, SECTION: gl.constexpr,
    HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr, ACROSS: gl.constexpr = False,
):  # fmt: skip
    """(first row of consumer W, batch, head) of tile ``work``, and its :func:`key_tiles`."""
    ROWS: gl.constexpr = 64 * CONSUMERS
    q_first, b, h = tile_of(work, at.q_len, at.num_heads, at.total_heads, SECTION, ROWS, ACROSS)
    first, full_first, full_end, end = key_tiles(
        q_first, at.q_len, at.kv_len, at.low, at.high, b, ranges, HAS_LOW, HAS_HIGH, ROWS, KEYS
    )
    return q_first + W * 64, b, h, first, full_first, full_end, end


@gluon.jit
def first_scores(q, i, at, KEYS: gl.constexpr, QK_DIM: gl.constexpr, STAGES: gl.constexpr, S_LAYOUT: gl.constexpr):
    """Scores of load ``i``, with nothing to do beside them."""
    mbarrier.wait(at.k_full.index(i % STAGES), (i // STAGES) & 1)
    zero = gl.zeros([64, KEYS], gl.float32, S_LAYOUT)
    k = at.k_smem.index(i % STAGES).reshape([KEYS, QK_DIM]).permute((1, 0))
    s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(at.k_empty.index(i % STAGES))
    return s


@gluon.jit
def last_product(p, acc, last, at, KEYS: gl.constexpr, V_DIM: gl.constexpr, STAGES: gl.constexpr):
    """The output with P times V of load ``last``, after which no scores follow."""
    mbarrier.wait(at.v_full.index(last % STAGES), (last // STAGES) & 1)
    acc = warpgroup_mma(p, at.v_smem.index(last % STAGES).reshape([KEYS, V_DIM]), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(at.v_empty.index(last % STAGES))
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


@gluon.jit
def shares(
    q_desc, k_desc, v_desc, o_desc, lse, counter, scale, cap, q_len, kv_len, low, high, num_heads, total_heads, group,
    STAGES: gl.constexpr, CONSUMERS: gl.constexpr, OWN_O: gl.constexpr, PING_PONG: gl.constexpr,
):  # fmt: skip
    """What a consumer and what the producer work with, buffers and barriers ready for use."""
    (
        q_smem, k_smem, v_smem, o_smem, q_full, q_empty, turn, k_full, k_empty, v_full, v_empty, work_smem, work_full, work_empty,
    ) = buffers(q_desc, k_desc, v_desc, o_desc, STAGES, CONSUMERS, OWN_O, PING_PONG)  # fmt: skip
    for_consumers = ConsumerOperands(
        o_desc, lse, q_smem, k_smem, v_smem, o_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn, work_smem,
        work_full, work_empty, scale, cap, q_len, kv_len, low, high, num_heads, total_heads,
    )  # fmt: skip
    for_producer = (
        q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, counter,
        work_smem, work_full, work_empty, q_len, kv_len, low, high, num_heads, total_heads, group,
    )  # fmt: skip
    return for_consumers, for_producer
