"""Short texts for the report: the form, shapes and dtype of a match."""

from __future__ import annotations

from fa_inductor.expr import BOOL, FLOAT, KV_IDX, Q_IDX, SCORE, Call, Expr, Load
from fa_inductor.patterns import AttentionMatch


def form_of(match: AttentionMatch) -> str:
    """``causal, GQA 8:2, softcap``: what a reader wants to know of a site at a glance."""
    spec = match.spec
    words = ["SDPA call"] if match.sdpa else []
    words += _positions(spec.score) + _terms(spec.score)
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


def _positions(score: Expr) -> list[str]:
    """Masks that follow from positions."""
    words = []
    atoms = [n for n in score.walk() if isinstance(n, Call) and n.fn in ("le", "lt", "ge", "gt", "eq")]
    both = [a for a in atoms if a.depends_on(Q_IDX) and a.depends_on(KV_IDX) and not any(isinstance(x, Load) for x in a.walk())]
    if any(a.fn == "le" for a in both):
        bounds = [a for a in both if a.fn == "le"]
        words.append("causal" if len(bounds) == 1 else "window")
    if any(a.fn == "eq" for a in both):
        words.append("chunk")
    return words


def _terms(score: Expr) -> list[str]:
    words = []
    loads = [n for n in score.walk() if isinstance(n, Load)]
    # A condition on no position masks none: the clamp of a temperature is one.
    tests = [n for n in score.walk() if isinstance(n, Call) and n.kind == BOOL and n.depends_on(Q_IDX, KV_IDX)]
    tested = {x for n in tests for x in n.walk() if isinstance(x, Load)}
    casts = [n for n in score.walk() if isinstance(n, Call) and n.fn == "cast_float" and n.depends_on(KV_IDX)]
    of_data = [n for n in casts if any(isinstance(x, Load) for x in n.walk())]  # (1 - keep) * -10000, not a distance
    if any(x.kind == BOOL for x in loads) or tested or of_data:
        words.append("mask")
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
