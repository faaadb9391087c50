"""Which tiles of queries a program of the Gluon backward for Hopper visits, and in which order."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def key_tile_of(work, kv_len, num_kv_heads, total_heads, SECTION: gl.constexpr, KEYS: gl.constexpr):
    """(first key, batch, key head): SECTION heads run side by side and share Q and dO in L2. The first keys, which under a
    causal mask have the most queries, come first."""
    num_tiles = (kv_len + KEYS - 1) // KEYS
    section = work // (num_tiles * SECTION)
    inside = work - section * (num_tiles * SECTION)
    width = gl.minimum(SECTION, total_heads - section * SECTION)
    head = section * SECTION + inside % width
    return inside // width * KEYS, head // num_kv_heads, head % num_kv_heads


@gluon.jit
def query_tiles(
    n_first, q_len, kv_len, low, high, HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr, SKIP: gl.constexpr,
    ROWS: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """(first, end) in tiles of ROWS, at least one tile; all others see no key.

    Without SKIP every tile is visited: rows without keys are NaN, and so is what they reach.
    """
    n_last = gl.minimum(n_first + KEYS, kv_len) - 1
    first = 0
    end = (q_len + ROWS - 1) // ROWS
    if SKIP:
        if HAS_HIGH:
            first = gl.minimum(gl.maximum(n_first - high, 0) // ROWS, end - 1)
        if HAS_LOW:
            end = gl.minimum(end, (gl.maximum(n_last - low + 1, 0) + ROWS - 1) // ROWS)
    return first, gl.maximum(end, first + 1)


@gluon.jit
def within(first, end, ranges, n_first, b, q_len, kv_len, ROWS: gl.constexpr, KEYS: gl.constexpr):
    """What RANGES [B, key tiles, 4] leave of the tiles of :func:`query_tiles`, at least one."""
    if ranges is not None:
        at = ranges + 4 * (b * ((kv_len + KEYS - 1) // KEYS) + n_first // KEYS)
        first = gl.minimum(gl.maximum(first, gl.load(at)), (q_len + ROWS - 1) // ROWS - 1)
        end = gl.maximum(gl.minimum(end, gl.load(at + 1)), first + 1)
    return first, end


@gluon.jit
def unmasked(ranges, n_first, b, kv_len, ROWS: gl.constexpr, KEYS: gl.constexpr):
    """(first query, one past the last) of the tiles that RANGES show to be whole."""
    first = 0
    end = 0
    if ranges is not None:
        at = ranges + 4 * (b * ((kv_len + KEYS - 1) // KEYS) + n_first // KEYS)
        first = gl.load(at + 2) * ROWS
        end = gl.load(at + 3) * ROWS
    return first, end


@gluon.jit
def order_of(
    n_first, q_len, kv_len, low, high, HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr, SKIP: gl.constexpr,
    ROWS: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """(place of these keys in the order of additions, first query tile and end of those that keys before them visit too).

    The order is that in which programs start: the first keys first, each from its last query tile on, where under a causal
    mask all begin. Both ends of what a tile of keys visits grow with the keys, so those that visit one tile of queries are
    neighbours.
    """
    first, end = query_tiles(n_first - KEYS, q_len, kv_len, low, high, HAS_LOW, HAS_HIGH, SKIP, ROWS, KEYS)
    place = n_first // KEYS
    return place, first, gl.where(place == 0, 0, end)


@gluon.jit
def visited(t, first, end, DETERMINISTIC: gl.constexpr):
    """The query tile of step ``t`` of ``first`` to ``end``."""
    if DETERMINISTIC:
        t = first + end - 1 - t
    return t
