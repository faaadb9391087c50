"""What a kernel needs to know about a score program before its text is printed.

* :func:`pull_scale` finds the positive number that the whole logit is multiplied with. It is folded with log2(e) into
  one multiply-add per score.
* :func:`may_be_huge` tells programs whose logits may be large for other reasons than the scores, such as ``-1e9`` or
  ``finfo.min`` fills and additive masks. There ``logit * log2(e)`` may overflow and ``log(sum(exp(logit)))`` rounds to
  the fill, so the kernels subtract the maximum before scaling and the backward keeps maximum and sum apart.
* :func:`pull_factor` finds the number that the derivative is multiplied with; it is applied once to the accumulated
  gradient.
* :class:`Program` puts them together for one attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from fa_inductor.bounds import Facts, row_always_has_key
from fa_inductor.derivative import d_score, times
from fa_inductor.expr import (
    BOOL,
    FLOAT,
    INT,
    KV_IDX,
    KV_LEN,
    Q_IDX,
    Q_LEN,
    SCORE,
    TRUE,
    B,
    Call,
    Const,
    Expr,
    H,
    Load,
    Sym,
    call,
    substitute,
)  # fmt: skip
from fa_inductor.intervals import never_negative
from fa_inductor.masks import MaskedScore, conjuncts, normalise, split_mask
from fa_inductor.spec import AttentionSpec
from fa_inductor.templates.rendering import Problem

LOG2E = math.log2(math.e)
ZERO, ONE = Const(0.0), Const(1.0)

#: Logits below this magnitude keep 2^-10 absolute accuracy in float32, so that exp() of a difference keeps a relative
#: accuracy of 2^-10 and the base-2 forms are safe.
HUGE = 8192.0

#: A finite fill at or below this vanishes next to any kept logit: exp(fill - max) underflows to 0 unless the scores
#: of the row are themselves below fill + 104, which for half precision operands means overflow. What is loaded and added to
#: the scores may be that low as well: padding, beside a causal fill, takes every key from a row that keeps some by its position.
VANISHING_FILL = -30000.0

#: What one comparison of indices, a number apart, is made of.
_COMPARES = frozenset({"lt", "le", "gt", "ge", "add", "sub", "neg"})
_BOUNDED = frozenset({"tanh", "sigmoid", "sin", "cos", "erf", "log", "log2", "log1p", "sqrt", "rsqrt"})
_LIKE_ARGUMENTS = frozenset({"add", "sub", "minimum", "maximum", "neg", "abs", "relu", "floor"})

#: Functions that are infinite or NaN at ordinary numbers.
_MAY_BE_INFINITE = frozenset({"log", "log2", "log1p", "div", "reciprocal", "rsqrt", "sqrt", "pow"})


def may_be_huge(e: Expr) -> bool:
    """Whether ``|e|`` may pass :data:`HUGE` for another reason than large scores, large indices or large scales.

    A float load is taken as unbounded where it is added, and as a moderate factor where it multiplies.
    """
    if isinstance(e, Load):
        return e.kind == FLOAT
    if isinstance(e, Const):
        return math.isfinite(e.value) and abs(e.value) > HUGE
    if not isinstance(e, Call) or e.kind in (BOOL, INT) or e.fn in _BOUNDED:
        return False
    if e.fn == "where":
        return may_be_huge(e.args[1]) or may_be_huge(e.args[2])
    if e.fn in _LIKE_ARGUMENTS:
        return any(may_be_huge(a) for a in e.args)
    if e.fn in ("mul", "div"):
        return any(may_be_huge(a) for a in e.args if not isinstance(a, Load))
    return not e.fn.startswith("cast_")


def pull_scale(e: Expr) -> tuple[Expr, float]:
    """``(body, c)`` with ``e == body * c``, c a positive finite number, as large a factor as the structure shows."""
    if isinstance(e, Call):
        if e.fn == "mul" and isinstance(e.args[1], Const) and e.kind == FLOAT:
            c = float(e.args[1].value)
            if math.isfinite(c) and c != 0.0:
                body, inner = pull_scale(e.args[0])
                if math.isfinite(c * inner) and abs(c * inner) > 1e-30:
                    return (body, c * inner) if c > 0 else (call("neg", body), -c * inner)
        if e.fn == "where":
            condition, x, y = e.args
            if y == Const(-math.inf):
                body, c = pull_scale(x)
                return call("where", condition, body, y), c
            if x == Const(-math.inf):
                body, c = pull_scale(y)
                return call("where", condition, x, body), c
        if e.fn in ("add", "sub") and e.kind == FLOAT:
            return _pull_from_sum(e)
    return e, 1.0


def _pull_from_sum(e: Call) -> tuple[Expr, float]:
    """:func:`pull_scale` of ``score * c + term``: the term is divided by c once a row or once a block where it can be."""
    x, y = e.args
    turned = not x.depends_on(SCORE)
    if turned:
        x, y = y, x
    body, c = pull_scale(x)
    # A term such as a mask's -1e9 may overflow when it is divided, and rounding it once more would show.
    if c == 1.0 or not 1e-6 < c < 1e6 or y.depends_on(SCORE) or may_be_huge(y):
        return e, 1.0
    term = _scaled(y, 1.0 / c)
    return call(e.fn, *((term, body) if turned else (body, term))), c


def _scaled(e: Expr, k: float) -> Expr:
    """``e * k``, k multiplied into a factor that is one number for a block where there is one."""
    if isinstance(e, Call) and e.fn == "mul":
        x, y = e.args
        if isinstance(y, Const) and math.isfinite(float(y.value) * k):
            return call("mul", x, Const(float(y.value) * k))
        if not x.depends_on(Q_IDX, KV_IDX):
            return call("mul", _scaled(x, k), y)
        if not y.depends_on(Q_IDX, KV_IDX):
            return call("mul", x, _scaled(y, k))
    return call("mul", e, Const(k))


#: Integers up to this magnitude are exact in float32.
_EXACT = 2**24


def float_indices(e: Expr, facts: Facts) -> Expr:
    """``e`` with ``cast_float(kv_idx - q_idx)`` written ``cast_float(kv_idx) - cast_float(q_idx)``, and the like.

    Both are the same number where every index is exact in float32, which the lengths in ``facts`` must show. The casts
    are then one a row and one a key instead of one a score, at a quarter of the rate of an addition.
    """
    if not isinstance(e, Call):
        return e
    if e.fn == "cast_float" and e.args[0].kind == INT:
        turned = _float_integer(e.args[0], facts)
        if turned is not None:
            return turned[0]
    args = [float_indices(a, facts) for a in e.args]
    return e if args == list(e.args) else call(e.fn, *args)


def _float_integer(e: Expr, facts: Facts) -> tuple[Expr, int] | None:
    """(``cast_float(e)`` computed in floats, a bound on its magnitude), None where the two could differ."""
    lengths: dict[Expr, int | None] = {Q_IDX: facts.q_len, KV_IDX: facts.kv_len, Q_LEN: facts.q_len, KV_LEN: facts.kv_len}
    length = lengths.get(e)
    if length is not None:
        return (call("cast_float", e), length) if length <= _EXACT else None
    if isinstance(e, Const):
        return (Const(float(e.value)), abs(int(e.value))) if abs(int(e.value)) <= _EXACT else None
    if not isinstance(e, Call) or e.fn not in ("add", "sub", "neg", "abs"):
        return None
    parts = [_float_integer(a, facts) for a in e.args]
    bound = sum(p[1] for p in parts if p is not None)
    if None in parts or bound > _EXACT:
        return None
    if e.fn == "neg":
        # Not -x: the integer 0 has no sign, and 1 / x would tell.
        return call("sub", Const(0.0), *(p[0] for p in parts if p is not None)), bound
    return call(e.fn, *(p[0] for p in parts if p is not None)), bound


def pull_factor(e: Expr) -> tuple[Expr, float]:
    """``(rest, c)`` with ``e == rest * c``, c a finite non-zero number of either sign."""
    if isinstance(e, Const) and e.kind == FLOAT and math.isfinite(e.value) and e.value not in (0.0, 1.0):
        return Const(1.0), float(e.value)
    if isinstance(e, Call):
        if e.fn == "mul" and isinstance(e.args[1], Const):
            c = float(e.args[1].value)
            if math.isfinite(c) and c != 0.0:
                rest, inner = pull_factor(e.args[0])
                if math.isfinite(c * inner) and abs(c * inner) > 1e-30:
                    return rest, c * inner
        if e.fn == "neg":
            rest, c = pull_factor(e.args[0])
            return rest, -c
        if e.fn == "where":
            condition, x, y = e.args
            if y == Const(0.0):
                rest, c = pull_factor(x)
                return call("where", condition, rest, y), c
            if x == Const(0.0):
                rest, c = pull_factor(y)
                return call("where", condition, x, rest), c
    return e, 1.0


def keeps_diagonal(keep: Expr, facts: Facts) -> bool:
    """Whether a mask is proven to keep kv_idx == q_idx in every row, as causal masks within documents do."""

    def holds(e: Expr) -> bool:
        if e == TRUE:
            return True
        if not isinstance(e, Call):
            return False
        if e.fn in ("and_", "or_"):
            return (all if e.fn == "and_" else any)(holds(a) for a in e.args)
        if e.fn not in ("eq", "le", "ge", "lt", "gt") or e.args[0].kind != INT:
            return False
        x, y = e.args
        if x == y:
            return e.fn in ("eq", "le", "ge")
        if e.fn in ("le", "lt"):
            x, y = y, x
        gap = call("sub", x, y)
        return e.fn != "eq" and never_negative(call("sub", gap, Const(1)) if e.fn in ("lt", "gt") else gap, facts)

    return holds(normalise(substitute(keep, {KV_IDX: Q_IDX})))


def _vanishes(masked: MaskedScore) -> bool:
    """Whether masked entries weigh nothing in a row that keeps a key, by a finite fill."""
    value = masked.fill_value
    return value is not None and -math.inf < value <= VANISHING_FILL and not may_be_huge(masked.live)


@dataclass(frozen=True)
class Program:
    """One attention as the kernels compute it.

    Attributes:
        spec: the program. A finite fill that vanishes, because every row provably keeps a key, is written as -inf.
        masked: the program's mask, live logit and fill.
        always_keeps: whether every row is proven to keep a key.
        single: whether operands are float32, whose weights the backward is to compute to the last bits.
    """

    spec: AttentionSpec
    masked: MaskedScore
    always_keeps: bool
    single: bool = False

    @staticmethod
    def of(spec: AttentionSpec, problem: Problem) -> Program:
        found = Program.under(spec, Facts(problem.rows, problem.cols, problem.sizes), problem.square)
        return replace(found, single=True) if problem.element == 4 else found

    @staticmethod
    @lru_cache(maxsize=512)
    def under(spec: AttentionSpec, facts: Facts, square: bool) -> Program:
        """The program where lengths and sizes are as ``facts`` say. ``square``: no more queries than keys."""
        spec = replace(spec, score=float_indices(spec.score, facts))
        masked = split_mask(spec.score)
        if masked.fill is None or masked.keep == TRUE:
            return Program(spec, masked, True)
        keeps = row_always_has_key(masked.keep, facts) or (square and keeps_diagonal(masked.keep, facts))
        if keeps and _vanishes(masked):
            spec = replace(spec, score=call("where", masked.keep, masked.live, Const(-math.inf)))
            masked = split_mask(spec.score)
        return Program(spec, masked, keeps)

    @cached_property
    def wide(self) -> bool:
        """Whether logits may be huge, so that the maximum is subtracted before scaling; in float32 large is huge.

        A sink may be: beside one that is far larger than every logit no weight is left, whatever it is rounded to.
        """
        return self.single or may_be_huge(self.spec.score)

    @cached_property
    def scale(self) -> float:
        """The positive number that :meth:`body` leaves out of the logit."""
        return pull_scale(self.spec.score)[1]

    @cached_property
    def lean(self) -> bool:
        """Whether nothing is computed of a score but a scale and one comparison of q_idx and kv_idx, a number apart.

        Such kernels have registers to spare for larger tiles.
        """
        spec, kept = self.spec, conjuncts(normalise(self.masked.keep))
        if spec.loads() or spec.sinks or spec.dropout_p or self.wide or pull_scale(self.masked.live)[0] != SCORE:
            return False
        if self.masked.fill_value not in (None, -math.inf) or len(kept) > 1:
            return False
        return all(n in (Q_IDX, KV_IDX) or not isinstance(n, Sym) for e in kept for n in e.walk()) and not any(
            isinstance(n, Call) and n.fn not in _COMPARES for e in kept for n in e.walk()
        )

    def body(self, logit: Expr) -> Expr:
        """``logit / scale``, for the whole program or for what is left of it inside full tiles."""
        body, scale = pull_scale(logit)
        if scale == self.scale:
            return body
        return logit if self.scale == 1.0 else call("mul", logit, Const(1.0 / self.scale))

    @cached_property
    def masks_exactly(self) -> bool:
        """Whether a masked entry has p == 0 exactly, in rows that what is added to the scores leaves finite."""
        return self.masked.fill_value == -math.inf and (self.always_keeps or self.spec.dead_rows == "zero")

    @cached_property
    def added_may_mask(self) -> bool:
        """Whether what belongs to a query or a key may be -inf, as a mask that is added is, or a logarithm of what is read."""
        of_places = (n for n in self.masked.live.walk() if n.depends_on(Q_IDX, KV_IDX))
        return any(isinstance(n, Load) or (isinstance(n, Call) and n.fn in _MAY_BE_INFINITE) for n in of_places)

    def _derivative(self, logit: Expr) -> tuple[Expr, float]:
        # Where p == 0 exactly, the mask need not be applied to the derivative again. A row that an added mask leaves without
        # keys is NaN throughout, and ``where`` keeps that from the entries that it masks.
        exact = self.masks_exactly and not self.added_may_mask
        return pull_factor(d_score(split_mask(logit).live if exact else logit))

    @cached_property
    def factor(self) -> float:
        """The number that :meth:`rest` leaves out of d logit / d score; it is applied to the accumulated dQ and dK."""
        return self._derivative(self.spec.score)[1]

    def rest(self, logit: Expr) -> Expr:
        """``d logit / d score / factor``."""
        rest, factor = self._derivative(logit)
        if factor == self.factor:
            return rest
        d = d_score(logit)
        return times(d, Const(1.0 / self.factor))

    def may_skip(self, backward: bool) -> bool:
        """Whether leaving out tiles in which no row keeps a key changes nothing, and there may be such tiles."""
        if self.masked.fill_value != -math.inf or self.masked.keep == TRUE:
            return False
        # A row without keys has P = NaN, hence NaN in every dV, unless the spec asks for zeros: then nothing may be
        # skipped.
        return not backward or self.masks_exactly

    @property
    def fill_vanishes(self) -> bool:
        """Whether a finite fill is as good as -inf in each row that keeps a key."""
        return self.masked.keep != TRUE and _vanishes(self.masked)

    @cached_property
    def loads_tiles(self) -> bool:
        """Whether a tensor is read at every (q_idx, kv_idx): a bias or a mask of the scores' size, or a gather."""
        return any(n.depends_on(Q_IDX) and n.depends_on(KV_IDX) for n in self.spec.loads())

    @property
    def uneven(self) -> bool:
        """Whether a tensor says which keys a sequence sees: of some sequences many more than of others."""
        reads = (n for n in self.masked.keep.walk() if isinstance(n, Load) and n.depends_on(B))
        return (self.masked.fill_value == -math.inf or self.fill_vanishes) and any(reads)

    @property
    def shares_batches(self) -> bool:
        """Whether what is read at every (q_idx, kv_idx) is the same in every batch and differs between heads.

        The programs of one head's batches then run side by side, so that a tile of it is read from memory once.
        """
        tiles = [n for n in self.spec.loads() if n.depends_on(Q_IDX) and n.depends_on(KV_IDX)]
        return any(n.depends_on(H) for n in tiles) and not any(n.depends_on(B) for n in tiles)
