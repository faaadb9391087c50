"""Which programs the Gluon kernels compute: scores scaled or soft-capped, under a mask that is a band of keys.

Others have text of their own in the kernels: :func:`forward_form_of`, and in the backward for head dims up to 128
:func:`program_form_of`. Needs neither triton nor a GPU.
:func:`form_of` reads the form out of a program, :meth:`Form.band` its run-time numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from fa_inductor.bounds import KvBounds
from fa_inductor.derivative import d_score
from fa_inductor.expr import KV_IDX, KV_LEN, Q_IDX, Q_LEN, SCORE, TRUE, Call, Const, Expr, H, Load, Sym, call
from fa_inductor.intervals import Linear, linear
from fa_inductor.masks import MaskedScore, conjuncts, normalise, split_mask
from fa_inductor.spec import AttentionSpec
from fa_inductor.templates.program import VANISHING_FILL, may_be_huge, pull_scale
from fa_inductor.templates.score_codegen import ScorePrinter, Unprintable
from fa_inductor.templates.sm90.ranges import finds

#: Fewest queries and keys that the kernel takes.
FEWEST = 256
#: Least work of one call, FLOPs of the scores that the mask keeps and of one tile of keys a row more. A compiled call takes
#: about 0.1 ms of the host, 0.04 ms of them for the launch from Python, so what runs for less than about that is left to the
#: general kernel. On an H200, 16384 tokens, hidden size 2048, ms of the general and of this kernel alone: D128 S256 0.116 and
#: 0.088 (5.2e10), S512 causal 0.129 and 0.100 (5.2e10), S512 0.188 and 0.127; of 16 heads and one batch, S2048 0.069 and 0.056
#: (3.7e10), S4096 causal 0.156 and 0.127 (7.3e10).
LEAST_WORK = 5e10
#: The same for the FP8 forward.
LEAST_FP8_WORK = 6e10
#: Fewest keys under a causal mask at head dims up to 64, where a tile has 192 queries. TFLOP/s of the general and of this kernel
#: on an H200: S4k 410 and 452. Fewer keys, windows and softcap were not measured since it became faster.
FEWEST_MASKED = 4096
#: The same as LEAST_WORK for the backward: there S512 took 0.600 and 0.550, causal 0.420 and 0.393.
LEAST_BACKWARD_WORK = 5e10
#: The same for a program with text of its own, where captured tensors are looked at first: 8 documents of 512 tokens (D128, 4
#: batches of 4096, 16 heads: 5.2e10 as :data:`DOCUMENTS` counts) took 0.43 ms of the device, but 0.54 ms in compiled calls one
#: after the other, and the general kernels 0.47; ALiBi (2.9e11) 1.55 and 1.90, sinks 1.46 and 1.82.
LEAST_PROGRAM_WORK = 8e10
#: A mask that compares queries with keys by more than their distance, as packed documents do, is taken to keep one score in so
#: many.
DOCUMENTS = 8
_TILE = 128
#: Beyond this an end of the band is beyond every key; it keeps the sums of the kernel within int32.
FAR = 2**30


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
            return max(-FAR, min(FAR, total))

        lows, highs = [value(x) for x in self.lows], [value(x) for x in self.highs]
        return max(lows, default=None), min(highs, default=None)

    def kept(self, queries: int, keys: int) -> float:
        """About how many scores the mask keeps; an end that depends on n0, n1, ... counts as open."""
        known = {Q_LEN, KV_LEN}
        fixed = [tuple(end for end in ends if known.issuperset(end.terms)) for ends in (self.lows, self.highs)]
        low, high = Form(self.scale, self.softcap, *fixed).band(queries, keys, ())
        low, high = -FAR if low is None else low, FAR if high is None else high
        rows = min(queries, 64)
        middles = [(2 * i + 1) * queries // (2 * rows) for i in range(rows)]
        counts = (min(q + high, keys - 1) - max(q + low, 0) + 1 for q in middles)
        return sum(max(c, 0) for c in counts) * queries / rows


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


@dataclass(frozen=True)
class ProgramForm(Form):
    """``where((low <= kv_idx - q_idx <= high) & rest, logit, -inf)`` with a logit of any kind, of which ``scale`` is a factor.

    Attributes:
        rest: what masks beside the band.
        plain: whether the logit is that of a :class:`Form`, ``f(score) * scale``.
    """

    rest: Expr = TRUE
    plain: bool = True

    @property
    def compares(self) -> bool:
        """Whether the mask compares queries with keys by more than their distance."""
        return self.rest != TRUE and any(_differs(a) and finds(a) for a in conjuncts(self.rest))

    def kept(self, queries: int, keys: int) -> float:
        return super().kept(queries, keys) / (DOCUMENTS if self.compares else 1)


@lru_cache(maxsize=512)
def program_form_of(spec: AttentionSpec) -> ProgramForm | str:
    """The form of a program whose captured tensors the backward kernel reads, or why it has none."""
    if spec.dropout_p:
        return "dropout is active"
    masked = split_mask(spec.score)
    if masked.fill is not None and masked.fill_value != -math.inf:
        return f"masked logits are {masked.fill}"
    if may_be_huge(spec.score):
        return "logits may be huge"
    _body, scale, softcap, plain = _logit(masked.live)
    if pull_scale(spec.score)[1] != scale:
        return f"the logit is {masked.live}"
    return ProgramForm(scale, softcap, *_band_and_rest(masked), plain)


@dataclass(frozen=True)
class ForwardForm(ProgramForm):
    """``where((low <= kv_idx - q_idx <= high) & rest, logit + term, fill)``.

    Attributes:
        body: the logit over ``scale``, without ``term``.
        term: what is added to the logits of a key, or of a score, which may be as low as a mask's fill; None for nothing.
        fill: the logit of a masked entry, None for -inf. A finite one comes without a band, and with ``rest`` of keys alone.
    """

    body: Expr = SCORE
    term: Expr | None = None
    fill: float | None = None

    @property
    def wide(self) -> bool:
        """Whether logits may be huge."""
        return self.term is not None or self.fill is not None

    @property
    def of_scores(self) -> bool:
        """Whether something else is added for each query or head: no tile of keys can be left out for it."""
        return self.term is not None and self.term.depends_on(Q_IDX, H)

    @property
    def taken_ahead(self) -> tuple[Load, ...]:
        """What ``term`` reads for every score."""
        nodes = () if self.term is None else self.term.walk()
        return tuple(dict.fromkeys(n for n in nodes if isinstance(n, Load) and n.index[-2:] == (Q_IDX, KV_IDX)))


@lru_cache(maxsize=512)
def forward_form_of(spec: AttentionSpec) -> ForwardForm | str:
    """The form of a program for the forward kernel, which may have more than a :class:`Form`, or why it has none."""
    if spec.dropout_p:
        return "dropout is active"
    masked = split_mask(spec.score)
    live, term, fill = masked.live, None, masked.fill_value
    if masked.fill is None or masked.keep == TRUE or fill == -math.inf:
        fill = None
        if may_be_huge(live):
            live, term = _term(live)
    elif fill is None or fill > VANISHING_FILL or not math.isfinite(fill):
        return f"masked logits are {masked.fill}"
    elif masked.keep.depends_on(Q_IDX, H, SCORE):
        # Where a row keeps no key it is an average of all, and which rows keep one is known of such masks alone.
        return f"masked logits are {masked.fill}, and may be all that a row has"
    elif masked.additive:
        live, term, fill = live, call("where", masked.keep, Const(0.0), Const(fill)), None
        masked = MaskedScore(TRUE, live)
    if may_be_huge(live):
        return "logits may be huge"
    body, scale, softcap, plain = _logit(live)
    if term is None and fill is None and pull_scale(spec.score)[1] != scale:
        return f"the logit is {masked.live}"
    if spec.sinks and (term is not None or fill is not None):
        return "there are sinks, and logits may be huge"
    lows, highs, rest = ((), (), masked.keep) if fill is not None else _band_and_rest(masked)
    return ForwardForm(scale, softcap, lows, highs, rest, plain, body, term, fill)


def _term(live: Expr) -> tuple[Expr, Expr | None]:
    """(logit, what is added to it and does not depend on it) where they may be told apart."""
    if isinstance(live, Call) and live.fn in ("add", "sub"):
        x, y = live.args
        if live.fn == "add" and y.depends_on(SCORE):
            x, y = y, x
        if not y.depends_on(SCORE) and y.depends_on(KV_IDX):
            return x, y if live.fn == "add" else call("neg", y)
    return live, None


def _logit(live: Expr) -> tuple[Expr, float, float | None, bool]:
    """(body, scale, softcap, whether they are all of it) of a logit, ``body * scale``."""
    body, scale = pull_scale(live)
    inner, softcap = body, None
    if isinstance(body, Call) and body.fn == "tanh" and pull_scale(body.args[0])[0] == SCORE:
        inner, softcap = pull_scale(body.args[0])
    return body, scale, softcap, inner == SCORE


def _band_and_rest(masked: MaskedScore) -> tuple[tuple[Linear, ...], tuple[Linear, ...], Expr]:
    """(lower ends, upper ends, the rest) of a mask."""
    if masked.fill is None or masked.keep == TRUE:
        return (), (), TRUE
    lows: list[Linear] = []
    highs: list[Linear] = []
    rest: list[Expr] = []
    for atom in conjuncts(normalise(masked.keep)):
        found = KvBounds.of(atom)
        ends = [_offset(e, 0) for e in found.lower], [_offset(e, -1) for e in found.upper]
        if not found.rest and None not in ends[0] + ends[1]:
            lows += [x for x in ends[0] if x]
            highs += [x for x in ends[1] if x]
        else:
            rest.append(atom)
    keep: Expr = TRUE
    for atom in rest:
        keep = call("and_", keep, atom)
    return tuple(lows), tuple(highs), keep


def _offset(end: Expr, by: int) -> Linear | None:
    """``end - q_idx + by`` as a sum of sizes, None where it is none."""
    found = linear(call("add", call("sub", end, Q_IDX), Const(by)))
    known = all(t in (Q_LEN, KV_LEN) or (isinstance(t, Sym) and t.name[:1] == "n" and t.name[1:].isdigit()) for t in found.terms)
    return found if known else None


def padded(dim: int) -> int:
    """The tile's width for a head dim: a power of two of at least 64."""
    return max(64, 1 << (dim - 1).bit_length())


def refusal(spec: AttentionSpec, dtype: str, qk_dim: int, v_dim: int, queries: int, keys: int, heads: int) -> str:
    """Why the forward kernel does not take an attention, "" where it does.

    Args:
        dtype: torch's name. queries, keys: lengths, heads: batch size times query heads; of run-time sizes the ones at hand.
    """
    form: Form | str = form_of(spec)
    least = LEAST_WORK
    if isinstance(form, str):
        form = forward_form_of(spec)
        if isinstance(form, str):
            return form
        least = LEAST_PROGRAM_WORK
        reason = _forward_program_refusal(spec, form, padded(qk_dim), keys)
        if reason:
            return reason
    reason = _refusal(spec, dtype, qk_dim, v_dim, queries, keys, heads, least, form)
    if reason:
        return reason
    if padded(qk_dim) == 64 and (form.lows or form.highs):
        if form.lows or form.softcap is not None:
            return "the general kernel takes windows and masked scores with a softcap at head dims up to 64"
        if keys < FEWEST_MASKED:
            return f"the general kernel takes masked scores of {keys} keys at head dims up to 64"
    return ""


def _forward_program_refusal(spec: AttentionSpec, form: ForwardForm, padded_dim: int, keys: int) -> str:
    """Why the forward kernel does not take a program with a form, "" where it does."""
    printed = [e for e in (form.body, form.rest, form.term, *spec.sinks) if e is not None]
    for load in (n for e in printed for n in e.walk() if isinstance(n, Load)):
        if load.index[-2:] != (Q_IDX, KV_IDX) and load.depends_on(Q_IDX) and load.depends_on(KV_IDX):
            return f"{load} is gathered for every score"
    for load in (n for n in form.body.walk() if isinstance(n, Load) and n.depends_on(KV_IDX)):
        return f"the logit reads {load} for every {'score' if load.depends_on(Q_IDX) else 'key'}"
    if form.of_scores:
        reason = _bias_refusal(form, padded_dim, keys)
        if reason:
            return reason
    masks = form.rest != TRUE or form.wide
    if padded_dim == 64 and masks and (form.compares or keys % _TILE):
        # Documents took 268 and 196 TFLOP/s with 2 and 3 consumers against 306; padding, of lengths of whole tiles, 461 and 412.
        return "masks but of whole tiles of padding take more registers than there are at head dims up to 64"
    if padded_dim > 128 and masks:
        return "above head dim 128 other masks than bands spill registers, and were not timed"
    most = MOST_TERMS if padded_dim > 64 else MOST_TERMS_64
    return _costly((form.body,), most) or _unread(form.rest, padded_dim == 128) or _unprintable(printed)


def _bias_refusal(form: ForwardForm, padded_dim: int, keys: int) -> str:
    """Why the forward kernel does not take what is added to every score, "" where it does.

    D128 S4k, TFLOP/s of the general kernel and of this one: a bias of every head 384 and 407, of every sequence 391 and 435; under
    a causal mask 350 and 183 with the tiles of the default, 310 with tiles of 64 keys.
    """
    assert form.term is not None
    loads = [n for n in form.term.walk() if isinstance(n, Load) and n.depends_on(KV_IDX)]
    if form.lows or form.highs or form.rest != TRUE:
        return f"{form.term} is added to every score under a mask"
    if not loads or set(loads) != set(form.taken_ahead):
        return f"{form.term} is added, and is not a tensor of a value for every score"
    if padded_dim != 128 or keys % _TILE:
        return f"{form.term} is added to every score: timed at head dim 128 and lengths of whole tiles alone"
    return ""


#: Of the forward at head dims up to 64: clipped scores, 3 terms, 385 TFLOP/s of the general kernel and 417; ALiBi on both sides, 5
#: terms, 381 and 357.
MOST_TERMS_64 = 3


def fp8_refusal(spec: AttentionSpec, dtype: str, qk_dim: int, v_dim: int, queries: int, keys: int, heads: int) -> str:
    """Why the FP8 forward kernel does not take an attention, "" where it does. Arguments as in :func:`refusal`."""
    if qk_dim % 16 or v_dim % 16:
        return f"rows of {qk_dim} and {v_dim} elements are no multiple of 16 bytes"
    return _refusal(spec, dtype, qk_dim, v_dim, queries, keys, heads, LEAST_FP8_WORK)


def backward_refusal(
    spec: AttentionSpec,
    dtype: str,
    qk_dim: int,
    v_dim: int,
    queries: int,
    keys: int,
    heads: int,
    grad_slots: tuple[int, ...] = (),
    deterministic: bool = False,
) -> str:
    """Why the backward kernel does not take an attention, "" where it does. Arguments as in :func:`refusal`.

    Args:
        grad_slots: captured tensors whose gradient is wanted. deterministic: whether sums must be taken in a fixed order.
    """
    if padded(qk_dim) > 128 and padded(v_dim) != padded(qk_dim):
        # There dQ leaves through the buffers of dO's tiles, which must be as wide.
        return f"the head dims are {qk_dim} and {v_dim}"
    form = form_of(spec)
    if isinstance(form, str):
        form = program_form_of(spec)
        if isinstance(form, str):
            return form
        reason = _program_refusal(spec, form, padded(qk_dim), grad_slots, deterministic)
        if reason:
            return reason
        return _refusal(spec, dtype, qk_dim, v_dim, queries, keys, heads, LEAST_PROGRAM_WORK, form)
    return _refusal(spec, dtype, qk_dim, v_dim, queries, keys, heads, LEAST_BACKWARD_WORK)


#: What the backward computes of a score without losing to the general kernels: at most so many terms that differ from score
#: to score, the derivative's among them, of these functions. On an H200 (D128 S4k causal, TFLOP/s of the general kernels and of
#: this one): clipped scores, 12 terms, 122 and 206; tanh and ALiBi, 10 terms, 215 and 304; erf, 7 terms, 183 and 232; but log1p,
#: 9 terms, 115 and 107, sine and cosine, 14 terms, 71 and 43.
MOST_TERMS = 12
_CHEAP = frozenset({
    "add", "sub", "mul", "div", "neg", "abs", "minimum", "maximum", "where", "relu", "lt", "le", "gt", "ge", "eq", "ne", "and_",
    "or_", "not_", "tanh", "sigmoid", "erf", "exp", "exp2", "cast_float", "cast_int", "cast_bool",
})  # fmt: skip


def _program_refusal(
    spec: AttentionSpec, form: ProgramForm, padded_dim: int, grad_slots: tuple[int, ...], deterministic: bool
) -> str:
    """Why the backward kernel does not take a program with a form, "" where it does."""
    if padded_dim > 128:
        return "above head dim 128 scores are computed under a band alone"
    live = split_mask(spec.score).live
    for load in (n for n in spec.score.walk() if isinstance(n, Load)):
        if load.slot in grad_slots:
            return f"the gradient of {load} is summed by the general kernel"
        if load.index[-2:] != (Q_IDX, KV_IDX) and load.depends_on(Q_IDX) and load.depends_on(KV_IDX):
            return f"{load} is gathered for every score"
    for load in (n for n in live.walk() if isinstance(n, Load) and n.depends_on(Q_IDX)):
        if load.depends_on(KV_IDX):
            # 134 TFLOP/s against 266 for a bf16 factor of every score.
            return f"the logit reads {load} for every score"
        if padded_dim > 64:
            # 251 against 294; at head dim 64 305 against 223.
            return f"the logit reads {load} for every query, which takes more registers than there are"
    reason = _costly((live, d_score(live)), MOST_TERMS) or _unread(form.rest, padded_dim > 64)
    if reason:
        return reason
    if deterministic and (form.rest != TRUE or not form.plain):
        # The order of the additions to dQ holds for bands, and without it masked tiles would be visited too. Other logits spill
        # more there, and were not timed.
        return "sums in a fixed order are taken of scores under a band alone"
    return _unprintable((spec.score, d_score(spec.score)))


def _costly(exprs: Sequence[Expr], most: int) -> str:
    """Why what is computed of every score takes too long, "" where it does not."""
    terms = dict.fromkeys(n for e in exprs for n in e.walk() if isinstance(n, Call) and _differs(n))
    strange = sorted({n.fn for n in terms} - _CHEAP)
    if strange or len(terms) > most:
        return f"the logit has {strange[0] if strange else f'{len(terms)} terms'}, which takes more registers than there are"
    return ""


def _unread(rest: Expr, tiles: bool) -> str:
    """Why the kernel does not mask by ``rest``, "" where it does. ``tiles``: whether by tensors of a size with the scores."""
    for atom in () if rest == TRUE else conjuncts(rest):
        loads = any(isinstance(n, Load) and n.index[-2:] == (Q_IDX, KV_IDX) for n in atom.walk())
        if loads and not tiles:
            return f"{atom} is read for every score"
        if not loads and not finds(atom):
            # The general kernels may skip tiles by it.
            return f"the tiles that the mask leaves are not found: {atom}"
    return ""


def _unprintable(exprs: Iterable[Expr]) -> str:
    """Why text of a Gluon kernel does not compute expressions, "" where it does."""
    printer = ScorePrinter()
    try:
        for e in exprs:
            printer.emit(e)
    except Unprintable as e:
        return str(e)
    if any("tl.full(" in line for line in [*printer.lines, *printer.names.values()]):
        return "a constant is out of int32's or of float32's normal range"
    return ""


def _differs(e: Expr) -> bool:
    """Whether a term is another for each score."""
    return e.depends_on(SCORE) or (e.depends_on(Q_IDX) and e.depends_on(KV_IDX))


def _refusal(
    spec: AttentionSpec, dtype: str, qk_dim: int, v_dim: int, queries: int, keys: int, heads: int, least_work: float,
    form: Form | None = None,
) -> str:  # fmt: skip
    if dtype not in ("bfloat16", "float16"):
        return f"operands are {dtype}"
    if qk_dim % 8 or v_dim % 8:
        return f"rows of {qk_dim} and {v_dim} elements are no multiple of 16 bytes"
    if not padded(v_dim) <= padded(qk_dim) <= 256:
        return f"the head dims are {qk_dim} and {v_dim}"
    if min(queries, keys) < FEWEST:
        return f"{queries} queries and {keys} keys are few"
    found = form or form_of(spec)
    if isinstance(found, str):
        return found
    work = 2.0 * (qk_dim + v_dim) * heads * (found.kept(queries, keys) + _TILE * queries)
    if work < least_work:
        return f"{work / 1e9:.1f} GFLOP do not hide the launch from Python"
    return ""
