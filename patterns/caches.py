"""Keys and values behind a lookup of pages or a dequantisation: what is stored, so that a kernel can read it as it lies.

``k_pages[table]`` copies every page that a batch of sequences uses, and ``k_int8.to(bf16) * scale`` doubles every byte. Both
are functions of one stored element: an operand's element is followed down its views, through the lookup and the
multiplication, to what is held. The lookup must be at ``table[batch, n // page]`` with ``n % page`` inside of the page; the
scale may differ between sequences, key heads and keys. Anything else stays as the graph has it, copied before the attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import sympy
import torch
from torch import fx
from torch.utils._sympy.functions import FloorDiv, Mod

from fa_inductor.patterns.anchor import is_rearrangement
from fa_inductor.patterns.index_map import broadcast, pull_view
from fa_inductor.patterns.operands import Axes, Extents, Level, Operand, is_moved, merged_axes
from fa_inductor.patterns.prover import Prover
from fa_inductor.patterns.pull import op_name
from fa_inductor.patterns.site import AttentionMatch
from fa_inductor.patterns.terms import Index, Unsupported, dtype, quotient, shape, tensor_of, value_of
from fa_inductor.spec import CacheForm

#: Axes of what is stored: pages of keys and of values, keys of a page, and pages of a sequence.
K_PAGE, V_PAGE, SLOT, BLOCK = (sympy.Symbol(n, integer=True, nonnegative=True) for n in ("k_page", "v_page", "slot", "block"))
_PRODUCTS = (torch.float16, torch.bfloat16, torch.float32)
_CASTS = ("_to_copy", "convert_element_type")


@dataclass(frozen=True)
class Scale:
    """What stored elements are multiplied with, as ``dtype``: a tensor by axes, or a number."""

    by: Operand | float
    dtype: torch.dtype


@dataclass(frozen=True)
class Stored:
    """How one of k and v is stored.

    ``node`` is held, its dimensions merge ``dims``. ``table`` names the page of BLOCK, ``wraps`` where negative entries count from
    the end. ``product``: dtype that elements are cast to and multiplied in with ``scale``; None where they are read as they are.
    """

    node: fx.Node
    dims: tuple[Axes, ...]
    extents: tuple[tuple[sympy.Symbol, sympy.Expr], ...] = ()
    page: int = 0
    table: Operand | None = None
    wraps: bool = True
    product: torch.dtype | None = None
    scale: Scale | None = None


@dataclass(frozen=True)
class Cache:
    """k and v as a kernel may read them, and the extents of the axes that only they have."""

    k: Stored
    v: Stored
    extents: Extents

    @property
    def table(self) -> Operand | None:
        return self.k.table

    @property
    def form(self) -> CacheForm:
        k, v = (str(s.product).removeprefix("torch.") if s.product else "" for s in (self.k, self.v))
        return CacheForm(self.k.page, self.k.wraps, k, v, self.k.scale is not None, self.v.scale is not None)

    def dims(self, groups: dict[str, Axes]) -> tuple[tuple[Axes, ...], tuple[Axes, ...], tuple[Axes, ...]]:
        """Axes of the dimensions of what the op gets as k, v and the table."""
        batch, key, heads = groups["batch"], groups["key"], groups["kv_heads"]
        if not self.k.page:
            return (batch, heads, key, groups["qk"]), (batch, heads, key, groups["v"]), ()
        inside = (SLOT,) if SLOT in self.extents else key if self.k.page > 1 else ()
        blocks = (BLOCK,) if BLOCK in self.extents else key if self.k.page == 1 else ()
        return ((K_PAGE,), heads, inside, groups["qk"]), ((V_PAGE,), heads, inside, groups["v"]), (batch, blocks)


def find(match: AttentionMatch, stored: frozenset[torch.dtype]) -> Cache | None:
    """How k and v of a match are stored, None where they are there as q is. ``stored``: 8-bit dtypes that a kernel reads."""
    plain = [Stored(o.node, o.dims) for o in (match.k, match.v)]
    forms = [_Descent(match, o, stored, page).run() for o, page in ((match.k, K_PAGE), (match.v, V_PAGE))]
    # No kernel multiplies in another dtype: what is cast to float64, say, is copied as the graph says.
    forms = [[x for x in f if x.product is None or x.product in _PRODUCTS] for f in forms]
    k, v = (f[-1] if f else p for f, p in zip(forms, plain, strict=True))
    if not _same_pages(k, v):
        # Copied together then; what is dequantised before its pages are looked up or needs none can still be read.
        k, v = (next((x for x in reversed(f) if not x.page), p) for f, p in zip(forms, plain, strict=True))
    if not (k.page or k.product or v.product):
        return None
    extents = dict((*match.extents.items(), *k.extents, *v.extents))
    return Cache(k, v, extents)


def _same_pages(k: Stored, v: Stored) -> bool:
    if (k.page, k.wraps) != (v.page, v.wraps) or k.table is None or v.table is None:
        return k.page == v.page == 0
    own = [{a: e for a, e in s.extents if a not in (K_PAGE, V_PAGE)} for s in (k, v)]
    return own[0] == own[1] and k.table.dims == v.table.dims and _same(k.table.node, v.table.node)


def _same(a: object, b: object, depth: int = 12) -> bool:
    """Whether two arguments are one value or were computed alike: code that looks k and v up may index the table twice."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y, depth) for x, y in zip(a, b, strict=True))
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node) or a is b:
        return a is b or (not isinstance(a, fx.Node) and not isinstance(b, fx.Node) and type(a) is type(b) and a == b)
    if a.target is not b.target or not depth or not isinstance(a.target, torch._ops.OpOverload) or a.kwargs != b.kwargs:
        return False
    if torch.Tag.nondeterministic_seeded in a.target.tags or not (torch.Tag.pointwise in a.target.tags or is_rearrangement(a)):
        return False
    return _same(a.args, b.args, depth - 1)


class _Descent:
    """From an operand down to what is stored."""

    def __init__(self, match: AttentionMatch, operand: Operand, stored: frozenset[torch.dtype], pages: sympy.Symbol):
        self.pages = pages
        self.match, self.operand, self.stored, self.place = match, operand, stored, match.place
        self.prover = Prover({s: (sympy.Integer(0), d - 1) for s, d in match.extents.items()})
        self.key = match.groups["key"]
        self.page, self.wraps = 0, True
        self.table: Operand | None = None
        self.product: torch.dtype | None = None
        self.scale: tuple[fx.Node | float, Index] | None = None
        self.extents: Extents = {}

    def run(self) -> list[Stored]:
        """Every way in which the operand may be read, the one nearest to what is stored last."""
        found: list[Stored] = []
        if self.operand.dtype != self.match.dtype or len(self.key) != 1:
            return found
        seen = (0, None)
        try:
            for node, index in self._levels():
                state = (self.page, self.product)
                if state != seen and self._complete(node) and self.place.holder(node) is not None:
                    made = self._stored(node, index)
                    if made is not None:
                        found.append(made)
                        seen = state
        except Unsupported:
            pass
        return found

    def _complete(self, node: fx.Node) -> bool:
        if self.product is None:
            return dtype(node) == self.match.dtype
        return dtype(node) in self.stored

    def _levels(self) -> Iterator[tuple[fx.Node, Index]]:
        node, index = self.operand.node, tuple(self._merged(d) for d in self.operand.dims)
        if dtype(node) != self.match.dtype:  # casts at the end were passed on the way to the operand
            self.product = self.match.dtype if dtype(node) in self.stored else dtype(node)
        while True:
            yield node, index
            pulled = pull_view(node, index, self.prover) or self._looked_up(node, index)
            if pulled is None:
                pulled = self._cast(node, index) or self._multiplied(node, index)
            if pulled is None:
                return
            node, index = pulled[0], tuple(self._by_key(i) for i in pulled[1])

    def _by_key(self, e: sympy.Expr) -> sympy.Expr:
        """``(64 n + r) // 128`` as ``n // 2`` and the remainder as ``64 (n % 2) + r``, r running to 64: rows of a flat page."""
        n = self.key[0]
        for atom in e.atoms(FloorDiv, Mod):
            a, b = atom.args
            c = sympy.expand(a).coeff(n)
            if not (c.is_Integer and b.is_Integer and c > 1 and b % c == 0):
                continue
            rest = sympy.expand(a - c * n)
            if not rest.has(n) and self.prover.holds(rest) and self.prover.holds(c - 1 - rest):
                whole = isinstance(atom, FloorDiv)
                e = e.xreplace({atom: FloorDiv(n, b // c) if whole else c * self.prover.mod(n, b // c) + rest})
        return sympy.expand(e)

    def _merged(self, axes: Axes) -> sympy.Expr:
        e = sympy.Integer(0)
        for a in axes:
            e = e * self.match.extents[a] + a
        return sympy.expand(e)

    # -- dequantisation
    def _cast(self, node: fx.Node, index: Index) -> tuple[fx.Node, Index] | None:
        """Through the cast of a stored element, which is exact, or of a product to the operand's dtype."""
        if op_name(node) not in _CASTS or not isinstance(node.args[0], fx.Node):
            return None
        src, to = node.args[0], dtype(node)
        if is_moved(node, src):
            return None
        if dtype(src) in self.stored and to in _PRODUCTS:
            self.product = self.product or to
            return src, index
        if self.product is None and self.scale is None and to == self.match.dtype and dtype(src) in _PRODUCTS:
            self.product = dtype(src)
            return src, index
        return None

    def _multiplied(self, node: fx.Node, index: Index) -> tuple[fx.Node, Index] | None:
        """Through the multiplication with the scale, whose result the product's dtype rounds."""
        if op_name(node) != "mul" or self.scale is not None or dtype(node) not in _PRODUCTS:
            return None
        if self.product not in (None, dtype(node)):
            return None
        x, s = node.args[:2]
        if isinstance(x, fx.Node) and isinstance(s, fx.Node) and not self._from_stored(x):
            x, s = s, x
        if not isinstance(x, fx.Node) or not self._from_stored(x) or shape(x) != shape(node):
            return None
        if not isinstance(s, fx.Node):
            if isinstance(s, bool) or not isinstance(s, (int, float)) or abs(s) > torch.finfo(torch.float32).max:
                return None
            self.scale = (float(s), ())
        else:
            t = value_of(s)
            if not isinstance(t, torch.Tensor) or t.device != tensor_of(node).device or t.dtype not in _PRODUCTS:
                return None
            self.scale = (s, broadcast(index, shape(s)))
        self.product = dtype(node)
        return x, index

    def _from_stored(self, node: fx.Node, limit: int = 16) -> bool:
        """Whether a stored tensor lies behind ``node``, views, casts and a lookup away."""
        for _ in range(limit):
            if dtype(node) in self.stored:
                return True
            src = node.args[0] if node.op == "call_function" and node.args else None
            if not isinstance(src, fx.Node) or not isinstance(value_of(src), torch.Tensor) or op_name(node) == "mul":
                return False
            node = src
        return False

    # -- pages
    def _looked_up(self, node: fx.Node, index: Index) -> tuple[fx.Node, Index] | None:
        """Through ``pages[table]`` in its spellings, once."""
        found = None if self.page else _lookup(node, index)
        if found is None:
            return None
        pages, dim, at, entry, wraps = found
        if is_moved(pages, entry):  # the lookup itself takes entries from the CPU
            return None
        behind = dim + (len(shape(entry)) if at is None else 1)
        position = (*index[:dim], self.pages, *index[behind:])
        entry_index = tuple(index[dim:behind]) if at is None else broadcast(at, shape(entry))
        n = self.key[0]
        sizes = {int(a.args[1]) for i in entry_index for a in i.atoms(FloorDiv) if a.args[0] == n and a.args[1].is_Integer}
        used = any(i.has(n) for i in entry_index)
        if len(sizes) == 1:
            (page,) = sizes
        elif sizes:
            raise Unsupported("several sizes of pages", node)
        else:
            whole = self.match.extents[n]
            if not used and not whole.is_Integer:
                raise Unsupported("a page of a run-time size", node)
            page = 1 if used else int(whole)
        self.page, self.wraps = page, wraps
        self.extents[self.pages] = shape(pages)[dim]
        self.table = self._entries(entry, entry_index)
        if any(i.has(SLOT) for i in self._in_pages(position)):
            self.extents[SLOT] = sympy.Integer(page)
        return pages, position

    def _in_pages(self, index: Index) -> Index:
        """``index`` with ``n // page`` and ``n % page`` as axes of their own."""
        if self.page < 2:
            return index
        n, page = self.key[0], sympy.Integer(self.page)
        known = {FloorDiv(n, page): BLOCK, Mod(n, page): SLOT}
        return tuple(sympy.expand(i.xreplace(known)) for i in index)

    def _entries(self, node: fx.Node, index: Index) -> Operand:
        """The table by batch and BLOCK: the level nearest to what is held whose dimensions are those."""
        best: Operand | None = None
        allowed = {*self.match.groups["batch"], BLOCK, *(self.key if self.page == 1 else ())}
        index, extents = self._in_pages(index), dict(self.match.extents)
        n = self.key[0]
        if any(i.has(BLOCK) for i in index):
            blocks = quotient(extents[n], sympy.Integer(self.page))
            extents[BLOCK] = blocks if blocks is not None else FloorDiv(extents[n] + self.page - 1, self.page)
        prover = Prover({s: (sympy.Integer(0), d - 1) for s, d in extents.items()})
        while True:
            for i, d in zip(index, shape(node), strict=True):
                if i == BLOCK:
                    extents[BLOCK] = d
            dims = merged_axes(Level(node, index, 1.0, ()), extents)
            usable = dims is not None and {a for d in dims for a in d} <= allowed and self.place.emittable(node)
            if usable and (best is None or self.place.holder(node) is not None):
                assert dims is not None
                best = Operand(node, dims, dtype(node))
                self.extents |= {a: e for a, e in extents.items() if a == BLOCK}
            pulled = pull_view(node, index, prover)
            if pulled is None and op_name(node) in _CASTS and dtype(node) == torch.int64:
                src = node.args[0]
                passes = isinstance(src, fx.Node) and dtype(src) == torch.int32 and not is_moved(node, src)
                pulled = (src, index) if passes else None  # type: ignore[assignment]
            if pulled is None:
                break
            node, index = pulled
        if best is None or best.dtype not in (torch.int32, torch.int64):
            raise Unsupported("the pages are not looked up by batch and position", node)
        return best

    # -- the result
    def _stored(self, node: fx.Node, index: Index) -> Stored | None:
        extents = {**self.match.extents, **self.extents}
        dims = merged_axes(Level(node, self._in_pages(index), 1.0, ()), extents)
        if dims is None:
            return None
        axes, g = {a for d in dims for a in d}, self.match.groups
        within = (SLOT,) if SLOT in self.extents else self.key if self.page != 1 else ()
        inside = {self.pages, *within} if self.page else {*self.key, *g["batch"]}
        if not axes <= {*inside, *g["kv_heads"], *g["qk"], *g["v"]}:
            return None
        scale = None
        if self.scale is not None:
            assert self.product is not None
            by, at = self.scale
            scale = Scale(by if isinstance(by, float) else self._scale(by, at), self.product)
        more = tuple(sorted(self.extents.items(), key=lambda x: x[0].name))
        return Stored(node, dims, more, self.page, self.table, self.wraps, self.product, scale)

    def _scale(self, node: fx.Node, index: Index) -> Operand:
        """The scale by sequence, key head and key."""
        g = self.match.groups
        here = self._in_pages(index)
        extents = {**self.match.extents, **self.extents}
        if any(i.has(BLOCK) or i.has(SLOT) for i in here):
            # Looked up with the pages: the tensor of all scales is what the graph copies for it.
            whole = sympy.expand(extents.get(BLOCK, sympy.Integer(0)) * self.page - self.match.extents[self.key[0]])
            if whole != 0:
                raise Unsupported("scales of more keys than are used", node)
        dims = merged_axes(Level(node, here, 1.0, ()), extents)
        allowed = {*g["batch"], *g["kv_heads"], *self.key, BLOCK, SLOT}
        if dims is None or not {a for d in dims for a in d} <= allowed or not self.place.emittable(node):
            raise Unsupported("the scale differs along other axes than sequences, key heads and keys", node)
        return Operand(node, dims, dtype(node))


def _lookup(node: fx.Node, index: Index) -> tuple[fx.Node, int, Index | None, fx.Node, bool] | None:
    """(pages, dimension, index of the entry or None, table, whether negative entries wrap) of a lookup of whole rows.

    The entry's index is None where the table's dimensions stand in place of the pages' dimension.
    """
    if node.op != "call_function":
        return None
    name, a = op_name(node), node.args
    if name == "index" and isinstance(a[1], (list, tuple)):
        given = [(d, t) for d, t in enumerate(a[1]) if t is not None]
        if len(given) == 1 and isinstance(given[0][1], fx.Node) and dtype(given[0][1]) in (torch.int32, torch.int64):
            return a[0], given[0][0], None, given[0][1], True  # type: ignore[return-value]
    if name == "index_select":
        rank = len(shape(a[0]))  # type: ignore[arg-type]
        return a[0], int(a[1]) % rank, None, a[2], False  # type: ignore[return-value, arg-type]
    if name == "embedding":
        return a[0], 0, None, a[1], False  # type: ignore[return-value]
    if name == "gather":
        dim = int(a[1]) % len(index)  # type: ignore[arg-type]
        return a[0], dim, index, a[2], False  # type: ignore[return-value]
    return None
