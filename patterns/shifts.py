"""What is added to all logits of a row: softmax does not change when a row is shifted as a whole by a finite number.

Hand-written softmaxes take the row's maximum off, or a bounded one. Such terms are :class:`~fa_inductor.patterns.terms.RowValue`
reductions in the pulled logit; :class:`RowShifts` takes them out and checks that they are finite where the logits are.
"""

from __future__ import annotations

import math
import operator

import sympy
from torch import fx

from fa_inductor.expr import Call, Const, Expr, call, substitute
from fa_inductor.patterns.anchor import Softmax
from fa_inductor.patterns.guards import plainly_finite
from fa_inductor.patterns.pull import Puller
from fa_inductor.patterns.site import Reject, shown
from fa_inductor.patterns.terms import Elem, Index, RowValue, shape
from fa_inductor.view import DETACH


class RowShifts:
    """Shifts of one softmax whose logits ``puller`` evaluates; ``qk`` is the product, ``key`` the index of its keys."""

    def __init__(self, puller: Puller, anchor: Softmax, qk: fx.Node, key: sympy.Expr):
        self.puller, self.anchor, self.qk, self.key = puller, anchor, qk, key

    def strip(self, e: Expr) -> tuple[Expr, tuple[Expr, ...]]:
        """(logit without row-wise shifts, the shifts): softmax does not change when a row is shifted as a whole.

        A sink may be the shift alone, with a logit of 0.
        """
        shifts: list[Expr] = []

        def go(x: Expr) -> Expr:
            if isinstance(x, Call) and x.fn in ("add", "sub"):
                a, b = x.args
                if self._is_row_value(b):
                    shifts.append(call("neg", b) if x.fn == "sub" else b)
                    return go(a)
                if x.fn == "add" and self._is_row_value(a):
                    shifts.append(a)
                    return go(b)
                return call(x.fn, go(a), b) if not isinstance(b, Call) or x.fn == "sub" else call(x.fn, go(a), go(b))
            return x

        if self._is_row_value(e) and not any(isinstance(x, Elem) for x in e.walk()):
            return Const(0.0), (e,)
        out = go(e)
        return out, tuple(sorted(shifts, key=str))

    def _is_row_value(self, e: Expr) -> bool:
        """A reduction of the row, negated or bounded: by numbers, or by a value of the row (which :meth:`check` looks at)."""
        if isinstance(e, RowValue):
            return True
        if not isinstance(e, Call):
            return False
        if e.fn == "neg":
            return self._is_row_value(e.args[0])
        if e.fn not in ("maximum", "minimum", "where"):
            return False
        parts = e.args[1:] if e.fn == "where" else e.args
        tests = [x for x in e.args[0].walk() if not isinstance(x, Call)] if e.fn == "where" else []
        return (
            any(self._is_row_value(x) for x in parts)
            and all(self._is_row_value(x) or self._is_bound(x) for x in parts)
            and all(isinstance(x, (RowValue, Const)) for x in tests)
        )

    def _is_bound(self, e: Expr) -> bool:
        return plainly_finite(e, self.qk) if isinstance(e, Const) else isinstance(e, Elem) and not self._varies_with_key(e)

    def _varies_with_key(self, e: Elem) -> bool:
        return e.node is self.qk or (self.key != 0 and any(i.has(self.key) for i in e.index))

    def is_own_maximum(self, shift: Expr, logit: Expr, at: Index) -> bool:
        """Whether a shift takes off the maximum of the row's own logits."""
        if not (isinstance(shift, Call) and shift.fn == "neg" and isinstance(shift.args[0], RowValue)):
            return False
        return shown(shift.args[0].node) in ("amax", "max") and self.reduces(shift.args[0], at) == logit

    def reduces(self, row: RowValue, at: Index) -> Expr | None:
        """What a reduction of the row is taken of, without shifts; None where it is of other elements than the softmax."""
        node = row.node
        if node.target is operator.getitem:
            node = node.args[0]  # type: ignore[assignment]
        source = node.args[0]
        while isinstance(source, fx.Node) and source.target is DETACH:
            source = source.args[0]
        dims = node.args[1] if len(node.args) > 1 else ()
        listed = [dims] if isinstance(dims, int) else list(dims)  # type: ignore[call-overload]
        if not isinstance(source, fx.Node) or shape(source) != shape(self.anchor.logits):
            return None
        if [d % len(at) for d in listed] != [self.anchor.dim]:
            return None
        return self.strip(self.puller.element(source, at))[0]

    def check(self, shift: Expr, logit: Expr, at: Index, sunk: set[Expr]) -> None:
        """Softmax forgets a shift that is finite; one that is not makes the row NaN, which the row's own logits or sinks must."""
        if any(isinstance(x, Elem) and x not in sunk for x in shift.walk()):
            raise Reject("the scores are shifted by a value that need not be finite", self.anchor.logits)
        for row in (x for x in shift.walk() if isinstance(x, RowValue)):
            source = self.reduces(row, at)
            if source != logit and (source is None or not plainly_finite(source, self.qk)):
                raise Reject(f"the scores are shifted by their {shown(row.node)}, which need not be finite", row.node)

    def finite_without_keys(self, shift: Expr, logit: Expr, at: Index) -> bool:
        """Whether a row's shift is a finite number where all of its logits, and so their maximum, are -inf."""
        rows = [x for x in shift.walk() if isinstance(x, RowValue)]
        e = substitute(shift, {x: Const(-math.inf if self.reduces(x, at) == logit else 0.0) for x in rows})
        return isinstance(e, Const) and math.isfinite(e.value)
