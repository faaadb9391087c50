"""Which programs the Gluon kernels compute: scores scaled or soft-capped, under a mask that is a band of keys.

Needs neither triton nor a GPU. :func:`form_of` reads the form out of a program, :meth:`Form.band` its run-time numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from fa_inductor.bounds import KvBounds
from fa_inductor.expr import KV_LEN, Q_IDX, Q_LEN, SCORE, TRUE, Call, Const, Expr, Sym, call
from fa_inductor.intervals import Linear, linear
from fa_inductor.masks import split_mask
from fa_inductor.spec import AttentionSpec
from fa_inductor.templates.program import may_be_huge, pull_scale

#: Fewest queries and keys that the kernel takes. It is launched from Python, which costs host time that short attentions do not
#: hide: at S = 512 a call took 0.195 ms (causal 0.188), the general kernel 0.181 (0.140), on an H200; at S = 2048, causal, 0.286
#: against 0.340.
FEWEST = 2048
#: Beyond this an end of the band is beyond every key; it keeps the sums of the kernel within int32.
_FAR = 2**30


@dataclass(frozen=True)
class Form:
    """``where(low <= kv_idx - q_idx <= high, f(score) * scale, -inf)``.

    Attributes:
        scale: positive factor of the logits. softcap: f is tanh(score * softcap), None for the score itself.
        lows, highs: the ends, sums of lengths and sizes; the band lies within all of them.
    """

    scale: float
    softcap: float | None
    lows: tuple[Linear, ...]
    highs: tuple[Linear, ...]

    def band(self, q_len: int, kv_len: int, sizes: Sequence[int]) -> tuple[int | None, int | None]:
        """(low, high) for given lengths and values of n0, n1, ...; None where that side is open."""

        def value(end: Linear) -> int:
            table = {"q_len": q_len, "kv_len": kv_len, **{f"n{i}": n for i, n in enumerate(sizes)}}
            total = end.const + sum(c * table[t.name] for t, c in end.terms.items() if isinstance(t, Sym))
            return max(-_FAR, min(_FAR, total))

        lows, highs = [value(x) for x in self.lows], [value(x) for x in self.highs]
        return max(lows, default=None), min(highs, default=None)


@lru_cache(maxsize=512)
def form_of(spec: AttentionSpec) -> Form | str:
    """The form of a program, or why it has none."""
    if spec.sinks or spec.dropout_p or spec.loads():
        return "sinks, dropout and captured tensors"
    masked = split_mask(spec.score)
    if masked.fill is not None and masked.fill_value != -math.inf:
        return f"masked logits are {masked.fill}"
    if any(may_be_huge(e) for e in spec.expressions):
        return "logits may be huge"
    body, scale = pull_scale(masked.live)
    softcap = None
    if isinstance(body, Call) and body.fn == "tanh":
        body, softcap = pull_scale(body.args[0])
    if body != SCORE:
        return f"the logit is {masked.live}"
    found = KvBounds() if masked.fill is None or masked.keep == TRUE else KvBounds.of(masked.keep)
    if found.rest:
        return f"the mask is more than a band: {found.rest[0]}"
    # Upper ends are exclusive.
    lows, highs = (tuple(_offset(e, end) for e in ends) for ends, end in ((found.lower, 0), (found.upper, -1)))
    if None in lows or None in highs:
        return f"the mask is no band: {masked.keep}"
    return Form(scale, softcap, tuple(x for x in lows if x), tuple(x for x in highs if x))


def _offset(end: Expr, by: int) -> Linear | None:
    """``end - q_idx + by`` as a sum of sizes, None where it is none."""
    found = linear(call("add", call("sub", end, Q_IDX), Const(by)))
    known = all(t in (Q_LEN, KV_LEN) or (isinstance(t, Sym) and t.name[:1] == "n" and t.name[1:].isdigit()) for t in found.terms)
    return found if known else None


def padded(dim: int) -> int:
    """The tile's width for a head dim: a power of two of at least 64."""
    return max(64, 1 << (dim - 1).bit_length())


def refusal(spec: AttentionSpec, dtype: str, qk_dim: int, v_dim: int, queries: int, keys: int) -> str:
    """Why the kernels do not take an attention, "" where they do.

    Args:
        dtype: torch's name. queries, keys: lengths, or the ones at hand for run-time lengths.
    """
    if dtype not in ("bfloat16", "float16"):
        return f"operands are {dtype}"
    if qk_dim % 8 or v_dim % 8:
        return f"rows of {qk_dim} and {v_dim} elements are no multiple of 16 bytes"
    if not padded(v_dim) <= padded(qk_dim) <= 256:
        return f"the head dims are {qk_dim} and {v_dim}"
    if min(queries, keys) < FEWEST:
        return f"{queries} queries and {keys} keys are few"
    form = form_of(spec)
    if isinstance(form, str):
        return form
    if padded(qk_dim) == 64 and (form.lows or form.highs):
        # 373 TFLOP/s against 429 for a causal mask over 4096 keys on an H200.
        return "the general kernel is faster for masked scores at head dims up to 64"
    return ""
