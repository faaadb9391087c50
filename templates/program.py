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
from fa_inductor.derivative import d_score
from fa_inductor.expr import BOOL, FLOAT, INT, KV_IDX, Q_IDX, TRUE, Call, Const, Expr, Load, call, substitute
from fa_inductor.intervals import never_negative
from fa_inductor.masks import MaskedScore, normalise, split_mask
from fa_inductor.spec import AttentionSpec
from fa_inductor.templates.rendering import Problem

LOG2E = math.log2(math.e)
ZERO, ONE = Const(0.0), Const(1.0)

#: Logits below this magnitude keep 2^-10 absolute accuracy in float32, so that exp() of a difference keeps a relative
#: accuracy of 2^-10 and the base-2 forms are safe.
HUGE = 8192.0

#: A finite fill at or below this vanishes next to any kept logit: exp(fill - max) underflows to 0 unless the scores
#: of the row are themselves below fill + 104, which for half precision operands means overflow.
VANISHING_FILL = -30000.0

_BOUNDED = frozenset({"tanh", "sigmoid", "sin", "cos", "erf", "log", "log2", "log1p", "sqrt", "rsqrt"})
_LIKE_ARGUMENTS = frozenset({"add", "sub", "minimum", "maximum", "neg", "abs", "relu", "floor"})


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
    return e, 1.0


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


@dataclass(frozen=True)
class Program:
    """One attention as the kernels compute it.

    Attributes:
        spec: the program. A finite fill that vanishes, because every row provably keeps a key, is written as -inf.
        masked: the program's mask, live logit and fill.
        always_keeps: whether every row is proven to keep a key.
    """

    spec: AttentionSpec
    masked: MaskedScore
    always_keeps: bool

    @staticmethod
    def of(spec: AttentionSpec, problem: Problem) -> Program:
        return Program.under(spec, Facts(problem.rows, problem.cols, problem.sizes), problem.square)

    @staticmethod
    @lru_cache(maxsize=512)
    def under(spec: AttentionSpec, facts: Facts, square: bool) -> Program:
        """The program where lengths and sizes are as ``facts`` say. ``square``: no more queries than keys."""
        masked = split_mask(spec.score)
        if masked.fill is None or masked.keep == TRUE:
            return Program(spec, masked, True)
        keeps = row_always_has_key(masked.keep, facts) or (square and keeps_diagonal(masked.keep, facts))
        value = masked.fill_value
        if keeps and value is not None and -math.inf < value <= VANISHING_FILL:
            spec = replace(spec, score=call("where", masked.keep, masked.live, Const(-math.inf)))
            masked = split_mask(spec.score)
        return Program(spec, masked, keeps)

    @cached_property
    def wide(self) -> bool:
        """Whether logits may be huge, so that the maximum is subtracted before scaling."""
        return any(may_be_huge(e) for e in self.spec.expressions)

    @cached_property
    def scale(self) -> float:
        """The positive number that :meth:`body` leaves out of the logit."""
        return pull_scale(self.spec.score)[1]

    def body(self, logit: Expr) -> Expr:
        """``logit / scale``, for the whole program or for what is left of it inside full tiles."""
        body, scale = pull_scale(logit)
        if scale == self.scale:
            return body
        return logit if self.scale == 1.0 else call("mul", logit, Const(1.0 / self.scale))

    @cached_property
    def masks_exactly(self) -> bool:
        """Whether a masked entry has p == 0 exactly, so that the mask need not be applied to the derivative again."""
        return self.masked.fill_value == -math.inf and (self.always_keeps or self.spec.dead_rows == "zero")

    def _derivative(self, logit: Expr) -> tuple[Expr, float]:
        return pull_factor(d_score(split_mask(logit).live if self.masks_exactly else logit))

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
        return d if self.factor == 1.0 else call("mul", d, Const(1.0 / self.factor))

    def may_skip(self, backward: bool) -> bool:
        """Whether leaving out tiles in which no row keeps a key changes nothing, and there may be such tiles."""
        if self.masked.fill_value != -math.inf or self.masked.keep == TRUE:
            return False
        # A row without keys has P = NaN, hence NaN in every dV, unless the spec asks for zeros: then nothing may be
        # skipped.
        return not backward or self.masks_exactly

    @cached_property
    def loads_tiles(self) -> bool:
        """Whether a tensor is read at every (q_idx, kv_idx): a bias or a mask of the scores' size, or a gather."""
        return any(n.depends_on(Q_IDX) and n.depends_on(KV_IDX) for n in self.spec.loads())
