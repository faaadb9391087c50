"""One kernel that casts q, k and v of an attention to FP8 (e4m3; q and k also to int8), with a scale for each query and each
block of keys.

A scale is the largest finite magnitude of its query or block divided by 448, the largest number of e4m3, so nothing finite
overflows; infinities become the largest number of their block, NaN stays NaN (of integers, the scale is NaN), zeros stay zeros.

The quotient 448 / largest is rounded correctly: short numbers often lie half way between two of e4m3, and a last bit of it would
decide where they go. So every device makes the same e4m3 of the same numbers.
"""

import triton
import triton.language as tl


@triton.jit
def to_e4m3(x, ROUNDS: tl.constexpr):
    """The nearest e4m3, saturated. ROUNDS: in float32 first, for the interpreter, whose cast loses carries."""
    if ROUNDS:
        size = tl.abs(x)
        step = tl.maximum((size.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True), 0.015625) * 1572864.0
        size = tl.minimum((size + step) - step, 448.0)
        x = tl.where(x < 0.0, -size, size)
    return x.to(tl.float8e4nv)


@triton.jit
def to_int8(x):
    """The nearest integer from -127 to 127, halves to even; 0 for NaN, whose scale is NaN."""
    x = tl.where(x == x, tl.minimum(tl.maximum(x, -127.0), 127.0), 0.0)
    return ((x + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def finite(x):
    """The magnitude of x, 0 for what is not finite."""
    size = tl.abs(x)
    return tl.where(size < float("inf"), size, 0.0)


@triton.jit
def rotated(x, N: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr):
    """Each GROUP elements of the rows of x [N, DIM] times the normalised Hadamard matrix; 0: as they are. float32."""
    if GROUP:
        i = tl.arange(0, GROUP)
        parity = i[:, None] & i[None, :]
        parity = parity ^ (parity >> 8)
        parity = parity ^ (parity >> 4)
        parity = parity ^ (parity >> 2)
        parity = (parity ^ (parity >> 1)) & 1
        # Its entries, and so all products, are exact in the operands' dtype.
        groups = tl.reshape(x, [N * DIM // GROUP, GROUP])
        groups = tl.dot(groups, (1 - 2 * parity).to(x.dtype), input_precision="ieee") * (GROUP**-0.5)
        x = tl.reshape(groups, [N, DIM])
    return x.to(tl.float32)


@triton.jit
def store_queries(
    x, q8, q_scale, head, row, q_len, DIM: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    INTEGER: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """The queries x [ROWS, PAD], at ``row`` [ROWS] of ``head``, into Q8 [heads, q_len, DIM] and Q_SCALE [heads, q_len]."""
    d = tl.arange(0, PAD)
    x = rotated(x, ROWS, PAD, GROUP)
    top = tl.maximum(tl.max(finite(x), 1), 2.0**-50)
    inside = (row < q_len)[:, None] & (d < DIM)[None, :]
    place = q8 + (head * q_len + row)[:, None] * DIM + d[None, :]
    if INTEGER:
        scale = tl.where(tl.max((x != x).to(tl.int32), 1) > 0, float("nan"), top * (1.0 / 127.0))
        tl.store(place, to_int8(x * tl.div_rn(127.0, top)[:, None]), mask=inside)
    else:
        scale = top * (1.0 / 448.0)
        tl.store(place, to_e4m3(x * tl.div_rn(448.0, top)[:, None], ROUNDS), mask=inside)
    tl.store(q_scale + head * q_len + row, scale, mask=row < q_len)


@triton.jit
def store_keys(
    x, k8, k_scale, head, block, kv_len, DIM: tl.constexpr, PAD: tl.constexpr, KEYS: tl.constexpr, GROUP: tl.constexpr,
    INTEGER: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """The keys x [KEYS, PAD] of ``block``, zero behind the last, into K8 [heads, kv_len, DIM] and K_SCALE [heads, blocks]."""
    d = tl.arange(0, PAD)
    key = block * KEYS + tl.arange(0, KEYS)
    x = rotated(x, KEYS, PAD, GROUP)
    top = tl.maximum(tl.max(finite(x)), 2.0**-50)
    inside = (key < kv_len)[:, None] & (d < DIM)[None, :]
    place = k8 + (head * kv_len + key)[:, None] * DIM + d[None, :]
    if INTEGER:
        scale = tl.where(tl.max((x != x).to(tl.int32)) > 0, float("nan"), top * (1.0 / 127.0))
        tl.store(place, to_int8(x * tl.div_rn(127.0, top)), mask=inside)
    else:
        scale = top * (1.0 / 448.0)
        tl.store(place, to_e4m3(x * tl.div_rn(448.0, top), ROUNDS), mask=inside)
    tl.store(k_scale + head * tl.cdiv(kv_len, KEYS) + block, scale)


@triton.jit
def store_values(
    x, v8, v_scale, head, block, kv_len, DIM: tl.constexpr, PAD: tl.constexpr, KEYS: tl.constexpr, PERMUTE: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    """The values x [KEYS, PAD] of ``block``, zero behind the last, into V8 [heads, DIM, blocks * KEYS] and V_SCALE."""
    d = tl.arange(0, PAD)
    blocks = tl.cdiv(kv_len, KEYS)
    x = x.to(tl.float32)
    top = tl.maximum(tl.max(finite(x)), 2.0**-50)
    small = tl.trans(to_e4m3(x * tl.div_rn(448.0, top), ROUNDS))
    if PERMUTE:
        # A thread holds scores of keys 2c, 2c + 1, 2c + 8, 2c + 9 of every 16, and takes weights 4c ... 4c + 3.
        small = tl.reshape(tl.permute(tl.reshape(small, [PAD, KEYS // 16, 2, 4, 2]), (0, 1, 3, 2, 4)), [PAD, KEYS])
    place = (head * DIM + d)[:, None] * (blocks * KEYS).to(tl.int64) + (block * KEYS + tl.arange(0, KEYS))[None, :]
    tl.store(v8 + place, small, mask=(d < DIM)[:, None])
    tl.store(v_scale + head * blocks + block, top * (1.0 / 448.0))


@triton.jit
def tile(x, head, heads, row, length, xb, xh, xm, xd, DIM: tl.constexpr, PAD: tl.constexpr):
    """Rows of a head of X [B, heads, length, DIM], zero outside of it."""
    d = tl.arange(0, PAD)
    inside = (row < length)[:, None] & (d < DIM)[None, :]
    place = x + head // heads * xb + head % heads * xh + row.to(tl.int64)[:, None] * xm + d[None, :] * xd
    return tl.load(place, mask=inside, other=0.0)


@triton.jit(do_not_specialize=["heads", "kv_heads", "q_len", "kv_len", "q_tiles", "q_programs", "kv_programs"])
def quantise(
    q, k, v, q8, k8, v8, q_scale, k_scale, v_scale, heads, kv_heads, q_len, kv_len, q_tiles, q_programs, kv_programs,
    qb, qh, qm, qd, kb, kh, kn, kd, vb, vh, vn, vd,
    QK_DIM: tl.constexpr, QK_PAD: tl.constexpr, V_DIM: tl.constexpr, V_PAD: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, GROUP: tl.constexpr, INTEGER: tl.constexpr, PERMUTE: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Q [B, HQ, M, QK_DIM] -> Q8 of that shape, dense, and Q_SCALE [B, HQ, M] float32; K likewise, with K_SCALE
    [B, HKV, ceil(N / KEYS)]; V [B, HKV, N, V_DIM] -> V8 [B, HKV, V_DIM, ceil(N / KEYS) * KEYS], zero in the padding.

    GROUP: each so many elements of q and k times the normalised Hadamard matrix, which leaves q k^T as it is; a power of two
    that divides QK_DIM, 0 for none. INTEGER: Q8 and K8 are 8-bit integers of at most 127. PERMUTE: the keys of V8 lie in the
    order in which wgmma takes FP8 weights from the registers that hold the scores.
    The first q_programs programs are for Q, ROWS queries each, the next kv_programs for K, KEYS keys each, the rest for V.
    """
    pid = tl.program_id(0)
    if pid < q_programs:
        head = (pid // q_tiles).to(tl.int64)
        query = pid % q_tiles * ROWS + tl.arange(0, ROWS)
        x = tile(q, head, heads, query, q_len, qb, qh, qm, qd, QK_DIM, QK_PAD)
        store_queries(x, q8, q_scale, head, query, q_len, QK_DIM, QK_PAD, ROWS, GROUP, INTEGER, ROUNDS)
    else:
        blocks = tl.cdiv(kv_len, KEYS)
        index = (pid - q_programs) % kv_programs
        head = (index // blocks).to(tl.int64)
        block = index % blocks
        key = block * KEYS + tl.arange(0, KEYS)
        if pid < q_programs + kv_programs:
            y = tile(k, head, kv_heads, key, kv_len, kb, kh, kn, kd, QK_DIM, QK_PAD)
            store_keys(y, k8, k_scale, head, block, kv_len, QK_DIM, QK_PAD, KEYS, GROUP, INTEGER, ROUNDS)
        else:
            z = tile(v, head, kv_heads, key, kv_len, vb, vh, vn, vd, V_DIM, V_PAD)
            store_values(z, v8, v_scale, head, block, kv_len, V_DIM, V_PAD, KEYS, PERMUTE, ROUNDS)
