"""What one fused attention computes: :class:`AttentionSpec`, its program text, and why a region was not one."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

from fa_inductor.errors import ProgramError
from fa_inductor.expr import FLOAT, KV_IDX, SCORE, Call, Expr, Load, from_ast, to_text

#: What a query row yields whose every logit is -inf: NaN (softmax of nothing, as hand-written code gives) or 0 (SDPA's rule).
DEAD_ROWS = ("nan", "zero")

#: Memory order of the op's output: [B, H, M, D] contiguous, or the same values stored as [B, M, H, D].
LAYOUTS = ("bhmd", "bmhd")


@dataclass(frozen=True)
class AttentionSpec:
    """``out[b,h,m] = sum_n dropout(softmax_n(score_expr(q[b,h,m] . k[b,h//g,n]; b, h, m, n))) v[b,h//g,n]``.

    Attributes:
        score: the logit at (b, h, q_idx, kv_idx) as an expression of ``score``, the raw dot product in float32.
        sinks: extra logits that take part in the softmax's normalisation and are then dropped; each a float expression of
            (b, h, q_idx) without ``score`` or ``kv_idx``.
        dropout_p: probability of zeroing a softmax weight; kept weights are divided by ``1 - dropout_p``. 0 for none.
        seed_slot: slot of the int64 tensor of two elements (seed, offset) that drives dropout's Philox stream; -1 without.
        dead_rows: what a row without any finite logit yields, one of :data:`DEAD_ROWS`.
        layout: memory order of the output, one of :data:`LAYOUTS`.
    """

    score: Expr = SCORE
    sinks: tuple[Expr, ...] = ()
    dropout_p: float = 0.0
    seed_slot: int = -1
    dead_rows: str = "nan"
    layout: str = "bhmd"

    def __post_init__(self) -> None:
        if self.score.kind != FLOAT or not self.score.depends_on(SCORE):
            raise ProgramError(f"the logit must be a float expression of score, got {self.score}")
        for s in self.sinks:
            if s.kind != FLOAT or s.depends_on(SCORE, KV_IDX):
                raise ProgramError(f"a sink must be a float expression without score and kv_idx, got {s}")
        if not 0.0 <= self.dropout_p < 1.0 or (self.dropout_p > 0) != (self.seed_slot >= 0):
            raise ProgramError(
                f"dropout_p {self.dropout_p} with seed_slot {self.seed_slot}: need 0 <= p < 1, a slot iff p > 0"
            )
        if self.dead_rows not in DEAD_ROWS or self.layout not in LAYOUTS:
            raise ProgramError(f"dead_rows {self.dead_rows!r} or layout {self.layout!r} unknown")

    @property
    def program(self) -> str:
        """The stable text that the op carries; :meth:`parse` is its inverse."""
        parts = [f"score={to_text(self.score)}"]
        if self.sinks:
            parts.append(f"sinks=[{', '.join(to_text(s) for s in self.sinks)}]")
        if self.dropout_p:
            parts.append(f"dropout=({self.dropout_p!r}, {self.seed_slot})")
        if self.dead_rows != "nan":
            parts.append(f"dead_rows={self.dead_rows!r}")
        if self.layout != "bhmd":
            parts.append(f"layout={self.layout!r}")
        return f"attention({', '.join(parts)})"

    @staticmethod
    @lru_cache(maxsize=1024)
    def parse(text: str) -> AttentionSpec:
        """The spec whose program is ``text``; raises :class:`ProgramError`."""
        try:
            tree = ast.parse(text, mode="eval").body
        except SyntaxError as e:
            raise ProgramError(f"cannot parse program {text[:200]!r}: {e}") from e
        if not (
            isinstance(tree, ast.Call)
            and isinstance(tree.func, ast.Name)
            and tree.func.id == "attention"
            and not tree.args
        ):
            raise ProgramError(f"a program has the form attention(score=..., ...), got {text[:200]!r}")
        kw: dict = {}
        for k in tree.keywords:
            if k.arg == "score":
                kw["score"] = from_ast(k.value)
            elif k.arg == "sinks" and isinstance(k.value, ast.List):
                kw["sinks"] = tuple(from_ast(e) for e in k.value.elts)
            elif k.arg == "dropout":
                kw["dropout_p"], kw["seed_slot"] = _literal(k.value, tuple)
            elif k.arg in ("dead_rows", "layout"):
                kw[k.arg] = _literal(k.value, str)
            else:
                raise ProgramError(f"unknown field {k.arg!r} in program {text[:200]!r}")
        return AttentionSpec(**kw)

    @property
    def expressions(self) -> tuple[Expr, ...]:
        return (self.score, *self.sinks)

    def loads(self) -> list[Load]:
        """Every distinct captured load, by slot."""
        found = {n for e in self.expressions for n in e.walk() if isinstance(n, Load)}
        return sorted(found, key=lambda n: (n.slot, str(n)))

    def differentiable_slots(self) -> frozenset[int]:
        """Slots of the captures that autograd reaches: read as floats, and not by a condition or as an integer alone."""
        found, seen, todo = set(), set(), list(self.expressions)
        while todo:
            e = todo.pop()
            if e.kind != FLOAT or e in seen:
                continue
            seen.add(e)
            if isinstance(e, Load):
                found.add(e.slot)
            elif isinstance(e, Call):
                todo += e.args
        return frozenset(found)


def _literal(node: ast.AST, kind: type) -> Any:
    """The Python literal at ``node``; raises :class:`ProgramError` when there is none of that type."""
    try:
        value = ast.literal_eval(node)
    except ValueError:
        value = None
    if not isinstance(value, kind) or (isinstance(value, tuple) and len(value) != 2):
        raise ProgramError(f"expected a {kind.__name__} in a program, got {ast.unparse(node)[:80]}")
    return value


@dataclass(frozen=True)
class CacheForm:
    """How keys and values lie in a cache that a kernel reads as it is.

    Attributes:
        page: keys of one page. k and v are then [pages, Hkv, page, D], and a table [B, ceil(N / page)] names the page of
            each run of ``page`` keys; 0 without pages.
        wraps: whether negative entries of the table count from the end, as PyTorch's ``pages[table]`` has it.
        k, v: dtype, by torch name, that stored elements have once they are multiplied with their scale; "" where they are
            stored in q's dtype.
        k_scaled, v_scaled: whether there is a scale [B, Hkv, N].
    """

    page: int = 0
    wraps: bool = True
    k: str = ""
    v: str = ""
    k_scaled: bool = False
    v_scaled: bool = False

    def __post_init__(self) -> None:
        if self.page < 0 or not {self.k, self.v} <= {"", "float16", "bfloat16", "float32"}:
            raise ProgramError(f"pages of {self.page} keys, products in {self.k or 'none'} and {self.v or 'none'}")
        if (self.k_scaled and not self.k) or (self.v_scaled and not self.v):
            raise ProgramError("a scale needs the dtype of its product")

    @property
    def text(self) -> str:
        """The text that the op carries; :meth:`parse` is its inverse."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return f"cache({', '.join(f'{n}={x!r}' for n, x in given.items())})"

    @staticmethod
    @lru_cache(maxsize=256)
    def parse(text: str) -> CacheForm:
        """The form whose text is ``text``; raises :class:`ProgramError`."""
        try:
            tree = ast.parse(text, mode="eval").body
        except SyntaxError as e:
            raise ProgramError(f"cannot parse cache {text[:200]!r}: {e}") from e
        named = isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and tree.func.id == "cache" and not tree.args
        known = {f.name: type(f.default) for f in fields(CacheForm)}
        if not named or not all(k.arg in known for k in tree.keywords):  # type: ignore[attr-defined]
            raise ProgramError(f"a cache has the form cache(page=..., ...), got {text[:200]!r}")
        return CacheForm(**{k.arg: _literal(k.value, known[k.arg]) for k in tree.keywords})  # type: ignore[attr-defined]

    def __str__(self) -> str:
        words = [f"pages of {self.page}"] if self.page else []
        words += [f"{name} dequantised" for name, product in (("k", self.k), ("v", self.v)) if product]
        return ", ".join(words)


@dataclass(frozen=True)
class Rejection:
    """Why a region that looks like attention was left alone.

    Attributes:
        reason: what was seen and what was expected, in one line.
        node: name of the graph node at fault.
        source: the user's source line (``file:line: code``) when the graph carries it.
        path: sub-graph path of the node, empty for the top graph.
        notes: how far the match got (near misses).
    """

    reason: str
    node: str = ""
    source: str = ""
    path: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())
