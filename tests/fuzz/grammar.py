"""The productions: operands, product, score terms, softmax, values and consumer, in the order of the code they write."""

from __future__ import annotations

from collections.abc import Callable

from tests.fuzz.generate import Shapes, Writer, turn
from tests.fuzz.terms import score_terms


def attention(w: Writer) -> None:
    """Writes the whole function."""
    for part in (_operands, _groups, _early_scale, _product, _scale, score_terms, _softmax, _values, _consume):
        turn(w.choose, meaning=part in (_early_scale, _scale, score_terms))
        part(w)
    turn(w.choose, meaning=False)


# ------------------------------------------------------------------------------------------------------------ operands
def _operands(w: Writer) -> None:
    s = w.shapes
    same = s.m == s.n and s.d == s.dv and s.lead == s.kv_lead
    if same and len(s.lead) == 2 and w.flag(4):
        _packed(w)
        return
    if same and w.flag(12):
        q = _operand(w, "q", s.lead, s.m, s.d)
        w.line(f"q = k = v = {q}")
        return
    w.line(f"q = {_operand(w, 'q', s.lead, s.m, s.d)}")
    w.line(f"k = {_operand(w, 'k', s.kv_lead, s.n, s.d)}")
    if s.d == s.dv and w.flag(12):
        w.line("v = k")
    else:
        w.line(f"v = {_operand(w, 'v', s.kv_lead, s.n, s.dv)}")


def _packed(w: Writer) -> None:
    """q, k and v as slices of one tensor."""
    b, h = w.shapes.lead
    m, d = w.shapes.m, w.shapes.d
    kind = w.pick(["chunk", "permute", "split", "index", "interleaved"])
    x = w.input("x", (b, m, 3 * h * d))
    if kind == "chunk":
        w.line(f"q, k, v = (t.view({b}, {m}, {h}, {d}).transpose(1, 2) for t in {x}.chunk(3, dim=-1))")
    elif kind == "permute":
        w.line(f"q, k, v = {x}.reshape({b}, {m}, 3, {h}, {d}).permute(2, 0, 3, 1, 4).unbind(0)")
    elif kind == "split":
        w.line(f"q, k, v = (t.unflatten(-1, ({h}, {d})).transpose(1, 2) for t in {x}.split({h * d}, dim=2))")
    elif kind == "index":
        w.line(f"qkv = {x}.view({b}, {m}, 3, {h}, {d}).transpose(1, 3)")
        w.line("q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]")
    else:
        w.line(f"q, k, v = {x}.view({b}, {m}, {h}, 3 * {d}).transpose(1, 2).chunk(3, -1)")


def _operand(w: Writer, name: str, lead: tuple[int, ...], n: int, d: int) -> str:
    """An expression of shape [*lead, n, d] on a new input."""
    kinds = ["plain", "turned", "slice", "step", "linear", "computed", "expanded", "cat", "cast"]
    if len(lead) == 2:
        kinds += ["bmhd", "merged", "merged"]
    if len(lead) > 1:
        kinds += ["folded"]
    kind = w.pick(kinds)
    shape = (*lead, n, d)
    text = ", ".join(map(str, shape))
    if kind == "plain":
        return w.input(name, shape)
    if kind == "turned":
        return f"{w.input(name, (*lead, d, n))}.transpose(-1, -2)"
    if kind == "slice":
        return f"{w.input(name, (*lead, n + 2, d + 1))}[..., 1:-1, :{d}]"
    if kind == "step":
        return f"{w.input(name, (*lead, 2 * n, d))}[..., ::2, :]"
    if kind == "linear":
        x, weight = w.input(name, (*lead, n, 3)), w.input("w", (d, 3))
        return f"F.linear({x}, {weight})"
    if kind == "computed":
        return f"({w.input(name, shape)} * 0.7).tanh()"
    if kind == "expanded":
        return f"{w.input(name, (1, *shape[1:]))}.expand({text})"
    if kind == "cat":
        return f"torch.cat([{w.input(name, (*lead, n, d))}[..., :1, :], {w.input(name, (*lead, n, d))}[..., 1:, :]], dim=-2)"
    if kind == "cast":
        return f"{w.input(name, shape, dtype='WIDE')}.to(DT)"
    if kind == "bmhd":
        return f"{w.input(name, (lead[0], n, lead[1], d))}.{w.pick(['transpose(1, 2)', 'permute(0, 2, 1, 3)', 'movedim(2, 1)'])}"
    if kind == "merged":
        return f"{w.input(name, (lead[0], n, lead[1] * d))}.view({lead[0]}, {n}, {lead[1]}, {d}).transpose(1, 2)"
    rows = 1
    for x in lead:
        rows *= x
    return f"{w.input(name, (rows, n, d))}.reshape({text})"


def _groups(w: Writer) -> None:
    """Key-value heads spread over query heads."""
    s = w.shapes
    if s.group == 1:
        return
    b, kv = s.kv_lead
    kind = w.pick(["repeat_interleave", "expand", "grouped", "interleaved heads"])
    if kind == "repeat_interleave":
        for t in "kv":
            w.line(f"{t} = {t}.repeat_interleave({s.group}, dim=1)")
    elif kind == "expand":
        for t, d in (("k", s.d), ("v", s.dv)):
            w.line(f"{t} = {t}[:, :, None].expand({b}, {kv}, {s.group}, {s.n}, {d}).reshape({b}, {s.lead[1]}, {s.n}, {d})")
    elif kind == "grouped":
        w.line(f"q = q.reshape({b}, {kv}, {s.group}, {s.m}, {s.d})")
        w.line("k, v = k.unsqueeze(2), v.unsqueeze(2)")
        s.lead = (b, kv, s.group)
    else:
        for t in "kv":
            w.line(f"{t} = {t}.repeat(1, {s.group}, 1, 1)")
        w.example.refuse("query heads are interleaved over key heads")


# ------------------------------------------------------------------------------------------------------------- product
def _early_scale(w: Writer) -> None:
    kind = w.pick(["", "", "", "q * c", "k / c", "both", "tensor", "parameter"])
    if kind == "q * c":
        w.line("q = q * 0.37")
    elif kind == "k / c":
        w.line("k = k / 2.3")
    elif kind == "both":
        w.line("q, k = q * 0.61, k * 0.61")
    elif kind == "tensor":
        w.line("q = q * torch.tensor(0.43, dtype=DT)")
    elif kind == "parameter":
        w.line(f"q = q * {w.input('t', (), 'positive')}")


def _product(w: Writer) -> None:
    s = w.shapes
    grouped = len(s.lead) != len(s.kv_lead)
    kinds = [
        "q @ k.transpose(-1, -2)",
        "torch.matmul(q, k.mT)",
        "torch.einsum('...md,...nd->...mn', q, k)",
        "(k @ q.mT).mT",
    ]
    kinds += ["torch.matmul(q, k.transpose(-2, -1).contiguous())"]
    if not grouped:
        letters = "abc"[: len(s.lead)]
        rows = f"reshape(-1, {s.m}, {s.d})"
        kinds += [
            f"torch.einsum('{letters}md,{letters}nd->{letters}mn', q, k)",
            f"torch.bmm(q.{rows}, k.reshape(-1, {s.n}, {s.d}).transpose(1, 2)).view({_text(s.scores)})",
            _baddbmm(s, rows),
        ]
    w.line(f"s = {w.pick(kinds)}")


def _baddbmm(s: Shapes, rows: str) -> str:
    keys = f"k.reshape(-1, {s.n}, {s.d}).transpose(1, 2)"
    product = f"torch.baddbmm(torch.zeros(1, 1, 1, dtype=DT), q.{rows}, {keys}, beta=0, alpha=0.7)"
    return f"{product}.view({_text(s.scores)})"


def _text(shape: tuple[int, ...]) -> str:
    return ", ".join(map(str, shape))


def _scale(w: Writer) -> None:
    s = w.shapes
    kind = w.pick(["", "mul", "div", "in place", "tensor", "parameter", "per head", "rows"])
    if kind == "mul":
        w.line(f"s = s * {w.pick(['0.5', '-0.3', '1.0', '2'])}")
    elif kind == "div":
        w.line(f"s = s / {w.pick([f'math.sqrt({s.d})', '2', '0.9'])}")
    elif kind == "in place":
        w.line(w.pick(["s *= 0.5", "s.div_(1.7)", "s = s.mul_(0.5)"]))
    elif kind == "tensor":
        w.line("s = s / torch.tensor(1.3, dtype=DT)")
    elif kind == "parameter":
        w.line(f"s = s * {w.input('t', (1,), 'positive')}")
    elif kind == "per head":
        t = w.input("t", (s.lead[-1], 1, 1))
        w.line(f"s = s * {w.pick([t, f'{t}.exp()', f'{t}.clamp(max=0.3)'])}")
    elif kind == "rows":
        w.line(f"s = s * {w.input('t', (s.m, 1), 'positive')}")


# ------------------------------------------------------------------------------------------------- softmax and onwards
def _softmax(w: Writer) -> None:
    wide = w.pick([False, False, True])
    if wide:
        w.line("s = s.to(WIDE)")
    kinds: list[tuple[str, Callable[[], None]]] = [
        ("op", lambda: w.line(f"p = {w.pick(['F.softmax(s, dim=-1)', 'torch.softmax(s, -1)', 's.softmax(-1)'])}")),
        ("op", lambda: w.line("p = F.softmax(s, dim=s.dim() - 1)")),
        ("dtype", lambda: w.line("p = F.softmax(s, dim=-1, dtype=WIDE)")),
        ("exp", lambda: _by_hand(w)),
        ("logsumexp", lambda: _log_sum(w)),
        ("log_softmax", lambda: w.line("p = F.log_softmax(s, dim=-1).exp()")),
        ("deferred", lambda: _deferred(w)),
        ("sink", lambda: _sink(w)),
        ("wrong axis", lambda: _near_miss(w, "p = F.softmax(s, dim=-2)", "softmax over the queries")),
        ("twice", lambda: _near_miss(w, "p = F.softmax(F.softmax(s, dim=-1), dim=-1)", "two softmaxes")),
        ("squared", lambda: _near_miss(w, "p = F.softmax(s, dim=-1).square()", "squared probabilities")),
        ("eps", lambda: _near_miss(w, "p = s.exp() / (s.exp().sum(-1, keepdim=True) + 0.1)", "softmax plus one")),
        (
            "other sum",
            lambda: _near_miss(w, "p = s.exp() / (s * 0.9).exp().sum(-1, keepdim=True)", "sum of something else"),
        ),
        ("heads", lambda: _near_miss(w, "p = F.softmax(s, dim=0)", "softmax over the batch")),
        ("zeroed", lambda: _near_miss(w, "p = F.softmax(s, dim=-1).tril()", "masked after the softmax")),
    ]
    kinds[0:0] = kinds[:7] * 3  # near misses are the rarer case
    w.pick(kinds)[1]()


def _near_miss(w: Writer, line: str, why: str) -> None:
    w.line(line)
    w.example.refuse(why)


def _log_sum(w: Writer) -> None:
    w.line("p = torch.exp(s - torch.logsumexp(s, dim=-1, keepdim=True))")
    _unshifted(w)


def _unshifted(w: Writer) -> None:
    """exp of scores whose maximum was not taken off is only a softmax where no row is filled as a whole."""
    if any(word in line for line in w.example.lines for word in ("fill", "where", "mask", "bias", "full", "1e4")):
        w.example.refuse("exp may vanish")


def _by_hand(w: Writer) -> None:
    shift = w.pick(["s.amax(dim=-1, keepdim=True)", "s.max(dim=-1, keepdim=True).values", "s.detach().amax(-1, keepdim=True)", ""])
    w.line(f"e = torch.exp(s - {shift})" if shift else "e = torch.exp(s)")
    if not shift:
        _unshifted(w)
    w.line(w.pick(["p = e / e.sum(dim=-1, keepdim=True)", "p = e / e.sum(-1).unsqueeze(-1)", "p = e / torch.sum(e, -1, True)"]))


def _deferred(w: Writer) -> None:
    w.line("e = torch.exp(s - s.amax(dim=-1, keepdim=True))")
    w.line("total = e.sum(dim=-1, keepdim=True)")
    w.line("p = e")


def _sink(w: Writer) -> None:
    lead = w.shapes.lead
    sink = w.input("sink", (lead[-1],))
    ones = ", ".join("1" for _ in lead[:-1])
    w.line(f"extra = {sink}.view({ones + ', ' if ones else ''}-1, 1, 1).expand({_text(lead)}, {w.shapes.m}, 1)")
    first = w.pick([False, True])
    parts = "[extra.to(s.dtype), s]" if first else "[s, extra.to(s.dtype)]"
    w.line(f"p = F.softmax(torch.cat({parts}, dim=-1), dim=-1)[..., {'1:' if first else ':-1'}]")


def _factor(w: Writer) -> None:
    """The probabilities times what is the same for every key of a row, or (a near miss) is not."""
    s = w.shapes
    kind = w.pick(["number", "gate", "gate", "zeroed", "expanded", "turned", "keys"])
    if kind == "number":
        w.line(w.pick(["p = p * 1.1", "p = p / 3", "p = -0.5 * p", "p = p * 0.0"]))
    elif kind == "gate":
        gate = w.input("gate", w.pick([(s.m, 1), (*s.lead, s.m, 1), (s.lead[-1], 1, 1), (1,)]))
        w.line(w.pick([f"p = p * {gate}", f"p = torch.sigmoid({gate}) * p", f"p = p.mul({gate})"]))
    elif kind == "zeroed":
        ok = w.input("ok", w.pick([(s.m, 1), (*s.lead, s.m, 1)]), "bool", "bool")
        w.line(w.pick([f"p = p * {ok}", f"p = p * {ok}.to(p.dtype)", f"p = p * {ok}.long()"]))
    elif kind == "expanded":
        w.line(f"p = p * {w.input('gate', (s.m, 1))}.expand({s.m}, {s.n})")
    elif kind == "turned":
        w.line(f"p = (p.mT * {w.input('gate', (1, s.m))}).mT")
    else:
        _near_miss(w, f"p = p * {w.input('gate', (s.n,))}", "a factor of the keys")
    if any("total = " in line for line in w.example.lines):
        w.example.refuse("exponentials changed before they are divided")


def _values(w: Writer) -> None:
    s = w.shapes
    kinds = ["p @ v", "torch.matmul(p, v)", "torch.einsum('...mn,...nd->...md', p, v)", "(v.mT @ p.mT).mT"]
    if len(s.lead) == len(s.kv_lead):
        kinds += [f"torch.bmm(p.reshape(-1, {s.m}, {s.n}), v.reshape(-1, {s.n}, {s.dv})).view({_text((*s.lead, s.m, s.dv))})"]
        if s.m == s.n:
            kinds += ["p.mT @ v"]
    kind = w.pick([*kinds, *kinds[:5]])
    if kind == "p.mT @ v":
        w.example.refuse("transposed probabilities")
    if w.flag(6):
        _factor(w)
    w.line("p = p.to(DT)")
    if w.flag(8):
        w.line(w.pick(["p = F.dropout(p, 0.0)", "p = F.dropout(p, 0.3, training=False)", "p = torch.dropout(p, 0.0, True)"]))
    w.line(f"o = {kind}")
    if any("total = " in line for line in w.example.lines):
        w.line("o = o / total.to(DT)")


def _consume(w: Writer) -> None:
    s = w.shapes
    heads = len(s.lead) == 2
    kinds = ["return o", "return o * 2 + 1", "return o, k, v", "return o.contiguous().view(-1)", "return o + 1, q"]
    if heads:
        kinds += [
            f"return o.transpose(1, 2).reshape({s.lead[0]}, {s.m}, -1)",
            f"return o.transpose(1, 2).contiguous().view({s.lead[0]}, {s.m}, -1)",
            "return o.permute(0, 2, 1, 3).flatten(2)",
        ]
    kinds = kinds * 3 + [
        "return o, p",
        "return o, s",
        "return o, p.sum()",
        "o = o.clone(); o += 1; return o",
        "k.mul_(0.5); return o, k",
    ]
    kind = w.pick(kinds)
    if kind in ("return o, p", "return o, s", "return o, p.sum()"):
        w.example.refuse("the scores or probabilities are used elsewhere")
    if kind.startswith("k.mul_"):
        w.example.refuse("the keys are overwritten")
        if w.grads or any(i.grad for i in w.example.inputs) or not any("k = " in x for x in w.example.lines):
            kind = "return o"
    for part in kind.split("; "):
        w.line(part)
