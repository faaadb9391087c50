"""Flash attention forward in FP8 for Hopper in Gluon, with the roles and the schedule of gluon_forward.

Operands are those of templates/common/quantise.py: e4m3 (q and k may be int8), a scale for each query and for each block of
SCALE_KEYS keys, V as [B, HKV, V_DIM, keys] with the keys of every 16 in the order in which a thread holds their scores. There the
weights are quantised in registers and are at once the left operand of the product with V: nothing moves between threads.

The scales of q and k and the scale of the softmax make one factor a row and tile. Weights are exp2(logit - max + shift), where
the shift makes them as large as e4m3 takes, less what a block of V is scaled lower than the largest block so far (``v_top``);
the sum of weights is shifted back. With TWO_LEVELS each tile's product is added to the output outside of the tensor cores: these
keep, of 32 products and the sum so far, 13 bits below the leading one of the largest, and cut off the rest (measured on an H200).
Over a tile of 128 keys that takes at most 33 * 2.5 * 2^-13 = 1.0 % from a sum of equal signs, 0.4 % were measured. Where the
output and a product of its size do not fit the registers, PARTS of its columns are multiplied one after the other.
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

from fa_inductor.templates.sm90.gluon_parts import (
    buffers,
    key_tiles,
    next_tile,
    producer,
    store_output,
    tanh,
    tile_of,
    tma_store,
)


@gluon.constexpr_function
def accumulator_layout(columns):
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 32])


@gluon.jit
def pack(p, KEYS: gl.constexpr):
    """Weights [64, KEYS] in the scores' layout, cast to e4m3, four to an int32: h, c, b of every 16 keys as (c; h, b)."""
    p = p.reshape([64, KEYS // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4))
    even, odd = gl.split(p)
    even0, even1 = gl.split(even)
    odd0, odd1 = gl.split(odd)
    return gl.inline_asm_elementwise(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; "
        "mov.b32 $0, {low, high}; }",
        "=r,f,f,f,f", [even0, odd0, even1, odd1], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def unpack(words, KEYS: gl.constexpr, P_LAYOUT: gl.constexpr):
    """What :func:`pack` packed, as the left operand [64, KEYS] of the product with V: every thread has what it takes."""
    low = gl.join(words.to(gl.int8), (words >> 16).to(gl.int8))
    high = gl.join((words >> 8).to(gl.int8), (words >> 24).to(gl.int8))
    p = gl.join(low, high).reshape([64, KEYS])
    return gl.convert_layout(p, P_LAYOUT, assert_trivial=True).to(gl.float8e4nv, bitcast=True)


@gluon.jit
def log2(x):
    """Of a normal positive number."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def inverse(x):
    """1 / x of a normal number."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def partial_sums(p, KEYS: gl.constexpr):
    """Sums [64, 4] of the weights [64, KEYS] that a thread holds, four threads a row."""
    return gl.sum(gl.sum(p.reshape([64, KEYS // 8, 4, 2]), 3), 1)


@gluon.jit
def column(x, matrix):
    """x [N] as [N, 1], in the layout of ``matrix`` [N, ...]."""
    return gl.convert_layout(x, gl.SliceLayout(1, matrix.type.layout))[:, None]


@gluon.jit
def bits(x):
    """Of float32, as integers."""
    return x.to(gl.int32, bitcast=True)


@gluon.jit
def float_of(bits):
    """The float32 numbers of such bits."""
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def largest(x):
    """The largest of each row of the integers x [64, KEYS]."""
    # Of every eighth column first: these are sequences that do not wait for each other.
    return gl.max(gl.max(x.reshape([64, x.shape[1] // 8, 8]), 1), 1)


@gluon.jit
def row_top(s, RAISES: gl.constexpr, RAISED: gl.constexpr, LAYOUT: gl.constexpr):
    """The largest of each row of the products s [64, KEYS], in float32; RAISED: at least 0.

    Of integers the vector units take the largest of three at a time, of floats of two. Floats that are not negative are ordered
    as the integers of their bits are, and negative ones are negative integers.
    """
    if RAISED:
        top = float_of(gl.maximum(largest(bits(s)), 0))
    elif RAISES and s.dtype == gl.int32:
        top = largest(s).to(gl.float32)
    else:
        top = gl.max(s, 1)
    return gl.convert_layout(top, gl.SliceLayout(1, LAYOUT))


@gluon.jit
def moved(words):
    """The same words in other registers. The weights of a tile are computed while a product reads those of the tile before;
    ptxas serialises every product of a kernel that writes them where those are, so they are moved there once it is done."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [words], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def softmax(
    s, m, denom, factor, scale, v_top, v_scale, row_first, n, kv_len, low, high,
    EDGE: gl.constexpr, RAISES: gl.constexpr, RAISED: gl.constexpr, KEYS: gl.constexpr, EVEN: gl.constexpr,
    HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr, SOFTCAP: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """One tile of products into weights.

    Returns (p in e4m3, maximum, partial sums, largest scale of V, what the earlier output is multiplied with). ``factor`` [64]:
    makes logits of products, or with SOFTCAP arguments of tanh, whose values times ``scale`` are. RAISED: the maximum is at
    least 0 from here on. RAISES: maxima are taken of integers where that is right.
    """
    if not (EDGE or SOFTCAP):
        top = row_top(s, RAISES, RAISED, LAYOUT)
    s = s.to(gl.float32)
    if SOFTCAP:
        s = tanh(s * factor[:, None])
    if EDGE:
        q_idx = row_first + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
        kv_idx = n + gl.arange(0, KEYS, layout=gl.SliceLayout(0, LAYOUT))
        if HAS_HIGH:
            s = gl.where(kv_idx[None, :] <= (q_idx + high)[:, None], s, -float("inf"))
        if HAS_LOW:
            s = gl.where(kv_idx[None, :] >= (q_idx + low)[:, None], s, -float("inf"))
        if not EVEN:
            s = gl.where((kv_idx < kv_len)[None, :], s, -float("inf"))
    if EDGE or SOFTCAP:
        top = gl.max(s, 1)
    # Weights that are 2^60 times as small as e4m3 takes are zeros there.
    lower = gl.minimum(v_top * inverse(v_scale), 1152921504606846976.0)
    less = gl.maximum(lower, 1.0)
    # 448, as a power of two.
    shift = 8.807354922057604 - log2(less)
    m_new = gl.maximum(m, top * (scale if SOFTCAP else factor))
    m_safe = m_new if RAISED else gl.where(m_new == -float("inf"), 0.0, m_new)
    p = gl.exp2(s * (scale if SOFTCAP else factor[:, None]) - (m_safe - shift)[:, None])
    alpha = gl.exp2(m - m_safe)
    denom = denom * column(alpha, denom) + partial_sums(p, KEYS) * (less * 0.002232142857142857)
    return pack(p, KEYS), m_new, denom, gl.maximum(v_top, v_scale), alpha * gl.minimum(lower, 1.0)


@gluon.jit
def zeros(shape: gl.constexpr, layout: gl.constexpr, PARTS: gl.constexpr):
    """PARTS tensors."""
    # ruff: noqa: RUF005 - lists are added, the language has no starred expressions
    made = ()
    for _ in gl.static_range(PARTS):
        made = made + (gl.zeros(shape, gl.float32, layout),)
    return made


@gluon.jit
def part_of(v, i, PARTS: gl.constexpr):
    """Columns [KEYS, V_DIM / PARTS] of V, which lies as v [V_DIM, KEYS]."""
    WIDTH: gl.constexpr = v.shape[0] // PARTS
    if PARTS > 1:
        v = v.slice(i * WIDTH, WIDTH, 0)
    return v.permute((1, 0))


@gluon.jit
def step(
    i, t, n, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, turn, p, m, denom, acc, v_top, alpha,
    k_scales, v_scales, scale_base, row_factor, scale, row_first, kv_len, low, high,
    W: gl.constexpr, EDGE: gl.constexpr, RAISED: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, PING_PONG: gl.constexpr, RAISES: gl.constexpr, EVEN: gl.constexpr, HAS_LOW: gl.constexpr,
    HAS_HIGH: gl.constexpr, SOFTCAP: gl.constexpr, TWO_LEVELS: gl.constexpr, PARTS: gl.constexpr, SCALE_KEYS: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scores of the keys from ``n``, load ``i``, while tile ``i - 1`` is multiplied with V. ``t`` counts the turns.

    ``acc``: PARTS tensors of columns. With TWO_LEVELS ``alpha`` is what the output before tile ``i - 1`` is multiplied with; else
    that has happened. The first part's product overlaps the softmax, each other one the sum of the part before.
    """
    stage = i % STAGES
    before = (i - 1) % STAGES
    k_scale = gl.load(k_scales + (scale_base + n // SCALE_KEYS))
    v_scale = gl.load(v_scales + (scale_base + n // SCALE_KEYS))
    mbarrier.wait(k_full.index(stage), (i // STAGES) & 1)
    if PING_PONG:
        mbarrier.wait(turn.index(W), t & 1)
    weights = unpack(p, KEYS, P_LAYOUT)
    zero = gl.zeros([64, KEYS], gl.int32 if q.dtype == gl.int8 else gl.float32, S_LAYOUT)
    k = k_smem.index(stage).reshape([KEYS, q.shape[1]]).permute((1, 0))
    s_token = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)
    v = v_smem.index(before).reshape([PARTS * acc[0].shape[1], KEYS])
    if TWO_LEVELS:
        zero_o = gl.zeros([64, acc[0].shape[1]], gl.float32, O_LAYOUT)
        o_token = warpgroup_mma(weights, part_of(v, 0, PARTS), zero_o, use_acc=False, is_async=True)
    else:
        o_token = warpgroup_mma(weights, part_of(v, 0, PARTS), acc[0], is_async=True)
    if PING_PONG:
        mbarrier.arrive(turn.index((W + 1) % CONSUMERS))
    s = warpgroup_mma_wait(1, deps=[s_token])
    mbarrier.arrive(k_empty.index(stage))
    p, m, denom, v_top, alpha_new = softmax(
        s, m, denom, row_factor * k_scale, scale, v_top, v_scale, row_first, n, kv_len, low, high,
        EDGE, RAISES, RAISED, KEYS, EVEN, HAS_LOW, HAS_HIGH, SOFTCAP, S_LAYOUT,
    )  # fmt: skip
    if PARTS == 1:
        # ptxas puts the exponentials behind the wait for the product that they should overlap; over a loop it does not move them.
        # So here is the loop of a wait on a barrier that is complete already. With more parts that takes registers that are not
        # there; the other consumer's products overlap the exponentials then.
        mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)
    made = ()
    for part in gl.static_range(PARTS - 1):
        next_token = warpgroup_mma(weights, part_of(v, part + 1, PARTS), zero_o, use_acc=False, is_async=True)
        done = warpgroup_mma_wait(1, deps=[o_token])
        made = made + (acc[part] * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None] + done,)
        o_token = next_token
    done = warpgroup_mma_wait(0, deps=[o_token])
    p = moved(p)
    mbarrier.arrive(v_empty.index(before))
    if TWO_LEVELS:
        made = made + (acc[PARTS - 1] * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None] + done,)
    else:
        made = (done * gl.convert_layout(alpha_new, gl.SliceLayout(1, O_LAYOUT))[:, None],)
    return p, m, denom, made, v_top, alpha_new


@gluon.jit
def consumer(
    W: gl.constexpr, operands, KEYS: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, SECTION: gl.constexpr,
    DYNAMIC: gl.constexpr, QK_DIM: gl.constexpr, V_DIM: gl.constexpr, PING_PONG: gl.constexpr, TWO_LEVELS: gl.constexpr,
    PARTS: gl.constexpr, RAISES: gl.constexpr, EVEN: gl.constexpr, HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr,
    SOFTCAP: gl.constexpr, DEAD_ZERO: gl.constexpr, SCALE_KEYS: gl.constexpr,
):  # fmt: skip
    (
        o_desc, lse, q_scales, k_scales, v_scales, q_smem, k_smem, v_smem, o_smem, q_full, q_empty, k_full, k_empty,
        v_full, v_empty, turn, work_smem, work_full, work_empty, scale, cap, q_len, kv_len, low, high, num_heads,
        total_heads, group,
    ) = operands  # fmt: skip
    S_LAYOUT: gl.constexpr = accumulator_layout(KEYS)
    O_LAYOUT: gl.constexpr = accumulator_layout(V_DIM // PARTS)
    # Integers are ordered as they are.
    LIFTS: gl.constexpr = RAISES and not SOFTCAP and q_smem.dtype != gl.int8
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 4)
    ROWS: gl.constexpr = 64 * CONSUMERS
    q = q_smem.index(W).reshape([64, QK_DIM])
    o_tile = o_smem.index(W)
    loaded = 0
    t = 0
    done = 0
    total = (q_len + ROWS - 1) // ROWS * total_heads
    work = gl.program_id(0)
    while work < total:
        q_first, b, h = tile_of(work, q_len, num_heads, total_heads, SECTION, ROWS)
        first, full_first, full_end, end = key_tiles(
            q_first, q_len, kv_len, low, high, b, None, HAS_LOW, HAS_HIGH, ROWS, KEYS
        )
        row_first = q_first + W * 64
        m = gl.full([64], -float("inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
        denom = partial_sums(gl.zeros([64, KEYS], gl.float32, S_LAYOUT), KEYS)
        acc = zeros([64, V_DIM // PARTS], O_LAYOUT, PARTS)
        rows = row_first + gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT))
        row_base = (b * num_heads + h).to(gl.int64) * q_len
        q_scale = gl.load(q_scales + row_base + gl.minimum(rows, q_len - 1))
        row_factor = q_scale * (cap if SOFTCAP else scale)
        scale_base = (b * (num_heads // group) + h // group) * ((kv_len + SCALE_KEYS - 1) // SCALE_KEYS)
        k_scale = gl.load(k_scales + (scale_base + (end - 1) * KEYS // SCALE_KEYS))
        v_top = gl.load(v_scales + (scale_base + (end - 1) * KEYS // SCALE_KEYS))
        mbarrier.wait(q_full.index(W), done & 1)
        mbarrier.wait(k_full.index(loaded % STAGES), (loaded // STAGES) & 1)
        zero = gl.zeros([64, KEYS], gl.int32 if q.dtype == gl.int8 else gl.float32, S_LAYOUT)
        k = k_smem.index(loaded % STAGES).reshape([KEYS, QK_DIM]).permute((1, 0))
        s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(loaded % STAGES))
        p, m, denom, v_top, alpha = softmax(
            s, m, denom, row_factor * k_scale, scale, v_top, v_top, row_first, (end - 1) * KEYS, kv_len, low, high,
            True, RAISES, False, KEYS, EVEN, HAS_LOW, HAS_HIGH, SOFTCAP, S_LAYOUT,
        )  # fmt: skip
        if HAS_HIGH or not EVEN:
            for j in range(1, end - full_end):
                p, m, denom, acc, v_top, alpha = step(
                    loaded + j, t + j - 1, (end - 1 - j) * KEYS, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, turn,
                    p, m, denom, acc, v_top, alpha, k_scales, v_scales, scale_base, row_factor, scale, row_first, kv_len, low, high,
                    W, True, False, KEYS, STAGES, CONSUMERS, PING_PONG, RAISES, EVEN, HAS_LOW, HAS_HIGH, SOFTCAP, TWO_LEVELS,
                    PARTS, SCALE_KEYS, S_LAYOUT, O_LAYOUT, P_LAYOUT,
                )  # fmt: skip
        full = gl.maximum(end - full_end, 1)
        # A maximum that is raised to 0 costs less. The largest weight then is at least 448 / 2^4 in a row, of the 14 powers of two
        # that e4m3 has with all its bits 10 remain below it.
        if LIFTS and gl.min(m) >= -4.0:
            for j in range(full, end - full_first):
                p, m, denom, acc, v_top, alpha = step(
                    loaded + j, t + j - 1, (end - 1 - j) * KEYS, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, turn,
                    p, m, denom, acc, v_top, alpha, k_scales, v_scales, scale_base, row_factor, scale, row_first, kv_len, low, high,
                    W, False, True, KEYS, STAGES, CONSUMERS, PING_PONG, RAISES, EVEN, HAS_LOW, HAS_HIGH, SOFTCAP, TWO_LEVELS,
                    PARTS, SCALE_KEYS, S_LAYOUT, O_LAYOUT, P_LAYOUT,
                )  # fmt: skip
        else:
            for j in range(full, end - full_first):
                p, m, denom, acc, v_top, alpha = step(
                    loaded + j, t + j - 1, (end - 1 - j) * KEYS, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, turn,
                    p, m, denom, acc, v_top, alpha, k_scales, v_scales, scale_base, row_factor, scale, row_first, kv_len, low, high,
                    W, False, False, KEYS, STAGES, CONSUMERS, PING_PONG, RAISES, EVEN, HAS_LOW, HAS_HIGH, SOFTCAP, TWO_LEVELS,
                    PARTS, SCALE_KEYS, S_LAYOUT, O_LAYOUT, P_LAYOUT,
                )  # fmt: skip
        if HAS_LOW:
            for j in range(gl.maximum(end - full_first, 1), end - first):
                p, m, denom, acc, v_top, alpha = step(
                    loaded + j, t + j - 1, (end - 1 - j) * KEYS, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, turn,
                    p, m, denom, acc, v_top, alpha, k_scales, v_scales, scale_base, row_factor, scale, row_first, kv_len, low, high,
                    W, True, False, KEYS, STAGES, CONSUMERS, PING_PONG, RAISES, EVEN, HAS_LOW, HAS_HIGH, SOFTCAP, TWO_LEVELS,
                    PARTS, SCALE_KEYS, S_LAYOUT, O_LAYOUT, P_LAYOUT,
                )  # fmt: skip
        mbarrier.arrive(q_empty.index(W))
        work = next_tile(work, work_smem, work_full, work_empty, done, DYNAMIC)
        loaded += end - first
        t += end - first - 1
        done += 1

        last = loaded - 1
        mbarrier.wait(v_full.index(last % STAGES), (last // STAGES) & 1)
        v = v_smem.index(last % STAGES).reshape([V_DIM, KEYS])
        made = ()
        for part in gl.static_range(PARTS):
            sums = acc[part]
            if TWO_LEVELS:
                sums = sums * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
            sums = warpgroup_mma(unpack(p, KEYS, P_LAYOUT), part_of(v, part, PARTS), sums, is_async=True)
            made = made + (warpgroup_mma_wait(0, deps=[sums]),)
        mbarrier.arrive(v_empty.index(last % STAGES))

        denom = gl.convert_layout(gl.sum(denom, 1), gl.SliceLayout(1, S_LAYOUT))
        gl.store(lse + row_base + rows, (m + gl.log2(denom)) * 0.6931471805599453, mask=rows < q_len)
        if DEAD_ZERO:
            denom = gl.where(denom == 0.0, 1.0, denom)
        # The weights were made 448 times as large.
        by = gl.convert_layout(v_top * 0.002232142857142857 / denom, gl.SliceLayout(1, O_LAYOUT))[:, None]
        if PARTS == 1:
            store_output(made[0] * by, o_desc, o_tile, q_empty.index(W), b, h, row_first, V_DIM, True)
        else:
            tma.store_wait(0)
            for part in gl.static_range(PARTS):
                columns = o_tile.reshape([64, V_DIM]).slice(part * (V_DIM // PARTS), V_DIM // PARTS, 1)
                columns.store((made[part] * by).to(o_tile.dtype))
            fence_async_shared()
            tma_store(o_desc, [b, h, row_first, 0], o_tile)
    tma.store_wait(0)


# One binary serves every length: a length divisible by 16, or 1, is no other kernel.
@gluon.jit(do_not_specialize=["q_len", "kv_len", "low", "high", "num_heads", "total_heads", "group"])
def fp8_forward(
    q_desc, k_desc, v_desc, o_desc, lse, q_scales, k_scales, v_scales, counter, scale, cap, q_len, kv_len, low, high, num_heads,
    total_heads, group,
    KEYS: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, SECTION: gl.constexpr, DYNAMIC: gl.constexpr,
    REGISTERS: gl.constexpr, PING_PONG: gl.constexpr, TWO_LEVELS: gl.constexpr, PARTS: gl.constexpr, RAISES: gl.constexpr,
    EVEN: gl.constexpr, HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr, SOFTCAP: gl.constexpr, DEAD_ZERO: gl.constexpr,
    SCALE_KEYS: gl.constexpr,
):  # fmt: skip
    """out and lse of ``softmax(band(q k^T * scale)) v``; with SOFTCAP of ``softmax(band(tanh(q k^T * cap) * scale)) v``.

    Descriptors of e4m3 (Q and K: or int8) over [B, H, L, D]: Q [1, 1, 64, QK_DIM], K [1, 1, KEYS, QK_DIM]; over
    [B, HKV, V_DIM, keys]: V [1, 1, V_DIM, KEYS]; of the output's dtype: O [1, 1, 64, V_DIM]. Launched as flash_forward is.
    """
    QK_DIM: gl.constexpr = q_desc.block_type.shape[3]
    V_DIM: gl.constexpr = v_desc.block_type.shape[2]
    (
        q_smem, k_smem, v_smem, o_smem, q_full, q_empty, turn, k_full, k_empty, v_full, v_empty, work_smem, work_full, work_empty,
    ) = buffers(q_desc, k_desc, v_desc, o_desc, STAGES, CONSUMERS, True, PING_PONG)  # fmt: skip
    # Constants are spelled out in the lists: a variable would make run-time values of them.
    for_consumers = (
        o_desc, lse, q_scales, k_scales, v_scales, q_smem, k_smem, v_smem, o_smem, q_full, q_empty, k_full, k_empty,
        v_full, v_empty, turn, work_smem, work_full, work_empty, scale, cap, q_len, kv_len, low, high, num_heads,
        total_heads, group,
    )  # fmt: skip
    for_producer = (
        q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, counter,
        work_smem, work_full, work_empty, q_len, kv_len, low, high, num_heads, total_heads, group,
    )  # fmt: skip
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consumer, (
                0, for_consumers, KEYS, STAGES, CONSUMERS, SECTION, DYNAMIC, QK_DIM, V_DIM, PING_PONG, TWO_LEVELS, PARTS, RAISES,
                EVEN, HAS_LOW, HAS_HIGH, SOFTCAP, DEAD_ZERO, SCALE_KEYS,
            )),
            (consumer, (
                1, for_consumers, KEYS, STAGES, CONSUMERS, SECTION, DYNAMIC, QK_DIM, V_DIM, PING_PONG, TWO_LEVELS, PARTS, RAISES,
                EVEN, HAS_LOW, HAS_HIGH, SOFTCAP, DEAD_ZERO, SCALE_KEYS,
            )),
            (producer, (for_producer, None, KEYS, STAGES, CONSUMERS, SECTION, DYNAMIC, HAS_LOW, HAS_HIGH, True)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (
                0, for_consumers, KEYS, STAGES, CONSUMERS, SECTION, DYNAMIC, QK_DIM, V_DIM, PING_PONG, TWO_LEVELS, PARTS, RAISES,
                EVEN, HAS_LOW, HAS_HIGH, SOFTCAP, DEAD_ZERO, SCALE_KEYS,
            )),
            (consumer, (
                1, for_consumers, KEYS, STAGES, CONSUMERS, SECTION, DYNAMIC, QK_DIM, V_DIM, PING_PONG, TWO_LEVELS, PARTS, RAISES,
                EVEN, HAS_LOW, HAS_HIGH, SOFTCAP, DEAD_ZERO, SCALE_KEYS,
            )),
            (consumer, (
                2, for_consumers, KEYS, STAGES, CONSUMERS, SECTION, DYNAMIC, QK_DIM, V_DIM, PING_PONG, TWO_LEVELS, PARTS, RAISES,
                EVEN, HAS_LOW, HAS_HIGH, SOFTCAP, DEAD_ZERO, SCALE_KEYS,
            )),
            (producer, (for_producer, None, KEYS, STAGES, CONSUMERS, SECTION, DYNAMIC, HAS_LOW, HAS_HIGH, True)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip
