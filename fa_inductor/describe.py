"""Short texts for the report: the form, shapes and dtype of a match."""

from __future__ import annotations

from fa_inductor.bounds import KvBounds
from fa_inductor.expr import BOOL, FLOAT, KV_IDX, Q_IDX, SCORE, TRUE, Call, Expr, Load, call, substitute
from fa_inductor.masks import conjuncts, disjuncts, negate, normalise, split_mask
from fa_inductor.patterns import AttentionMatch


def form_of(match: AttentionMatch) -> str:
    """``causal, GQA 8:2, softcap``: what a reader wants to know of a site at a glance."""
    spec = match.spec
    words = ["SDPA call"] if match.sdpa else []
    words += dict.fromkeys(_masks(spec.score) + _terms(spec.score))
    heads, kv_heads = match.extent(match.groups["heads"]), match.extent(match.groups["kv_heads"])
    if heads != kv_heads:
        words.append(f"GQA {heads}:{kv_heads}" if kv_heads != 1 else f"MQA {heads}:1")
    if match.extent(match.groups["qk"]) != match.extent(match.groups["v"]):
        words.append("Dqk != Dv")
    if spec.sinks:
        words.append("sinks")
    if match.dropout_p:
        words.append(f"dropout {match.dropout_p:g}")
    return ", ".join(words) or "plain"


_BY_POSITION, _BY_DATA = "mask by position", "mask"


def _masks(score: Expr) -> list[str]:
    """What the conjuncts of the mask are called: those of positions first, what data decide last."""
    return _conjunction(conjuncts(normalise(_keep(score))))


def _keep(score: Expr) -> Expr:
    """The mask of a logit; where more is computed of the masked logit, the conditions that choose whether it has the score."""
    keep = split_mask(score).keep
    for e in score.walk() if keep == TRUE else ():
        if isinstance(e, Call) and e.fn == "where" and e.kind != BOOL and e.args[0].depends_on(Q_IDX, KV_IDX):
            cond, x, y = e.args
            if x.depends_on(SCORE) != y.depends_on(SCORE):
                keep = call("and_", keep, cond if x.depends_on(SCORE) else negate(cond))
    return keep


def _conjunction(atoms: tuple[Expr, ...]) -> list[str]:
    words: list[str] = []
    ends: set[str] = set()
    for atom in atoms:
        either = disjuncts(atom)
        found = _ends(atom) if len(either) == 1 else set()
        ends |= found
        if len(either) > 1:
            words.append(_disjunction(either))
        elif not found:
            words.append(_word(atom))
    if ends:
        words.insert(0, "window" if len(ends) == 2 else "causal" if ends == {"upper"} else "anti-causal")
    return sorted(dict.fromkeys(words), key=_rank)


def _disjunction(either: tuple[Expr, ...]) -> str:
    words = []
    for x in either:
        names = _conjunction(conjuncts(x))
        named = len(names) == 1 and names[0] != "anti-causal"
        words.append(names[0] if named else _BY_DATA if _loads(x) else _BY_POSITION)
    return " or ".join(sorted(dict.fromkeys(words), key=_rank))


def _rank(word: str) -> int:
    return (_BY_POSITION, _BY_DATA).index(word) + 1 if word in (_BY_POSITION, _BY_DATA) else 0


def _ends(atom: Expr) -> set[str]:
    """Which ends of a row's keys an atom sets by the query's position, if that is all that it says."""
    if _is_chunk(atom) or any(x.depends_on(Q_IDX, KV_IDX) for x in _loads(atom)):
        return set()
    found = KvBounds.of(atom)
    sides = {"lower": found.lower, "upper": found.upper}
    return set() if found.rest else {side for side, ends in sides.items() if any(e.depends_on(Q_IDX) for e in ends)}


def _word(atom: Expr) -> str:
    if _is_chunk(atom):
        return "chunk"
    loads = _loads(atom)
    if isinstance(atom, Call) and atom.fn == "eq" and len(loads) == 2 and set(loads) == set(atom.args):
        of_one, of_other = (substitute(x, {Q_IDX: KV_IDX}) for x in loads)
        if of_one == of_other:
            return "documents"
    return _BY_DATA if loads else _BY_POSITION


def _is_chunk(atom: Expr) -> bool:
    """``kv_idx // n == q_idx // n``"""
    return isinstance(atom, Call) and atom.fn == "eq" and all(isinstance(x, Call) and x.fn == "floordiv" for x in atom.args)


def _loads(e: Expr) -> list[Load]:
    return [n for n in e.walk() if isinstance(n, Load)]


def _terms(score: Expr) -> list[str]:
    words = []
    loads = _loads(score)
    # A condition on no position masks none: the clamp of a temperature is one.
    tests = [n for n in score.walk() if isinstance(n, Call) and n.kind == BOOL and n.depends_on(Q_IDX, KV_IDX)]
    tested = {x for n in tests for x in _loads(n)}
    casts = [n for n in score.walk() if isinstance(n, Call) and n.fn == "cast_float" and n.depends_on(KV_IDX)]
    of_data = [n for n in casts if _loads(n)]  # (1 - keep) * -10000, not a distance
    named = set(_loads(_keep(score)))
    if any(x.kind == BOOL or x in tested for x in loads if x not in named) or any(set(_loads(n)) - named for n in of_data):
        words.append(_BY_DATA)
    if any(x.kind == FLOAT and x.depends_on(KV_IDX) and x not in tested for x in loads):
        words.append("bias")
    if any(isinstance(n, Call) and n.fn == "tanh" and n.depends_on(SCORE) for n in score.walk()):
        words.append("softcap")
    if len(casts) > len(of_data):
        words.append("ALiBi")
    return words


def shapes_of(match: AttentionMatch) -> str:
    """Sizes of q and of k and v, as the report shows them: numbers or the names of run-time sizes."""
    g = match.groups
    e = {k: match.extent(v) for k, v in g.items()}
    q = f"q[{e['batch']}, {e['heads']}, {e['query']}, {e['qk']}]"
    return f"{q} kv[{e['batch']}, {e['kv_heads']}, {e['key']}, {e['v']}]"


def dtype_text(match: AttentionMatch) -> str:
    """The operands' dtype without ``torch.``."""
    return str(match.dtype).removeprefix("torch.")
