"""Productions for what happens to the scores between the product and the softmax."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tests.fuzz.generate import FILLS, Writer


def score_terms(w: Writer) -> None:
    """Up to four terms, in any order."""
    terms = [
        bias, keep_mask, keep_mask, causal, causal, padding, document, alibi, gathered, softcap, shift, by_number, inf_mask, window,
        narrow, by_hand_mask, clamp, viewed, logits_cast, row_condition, computed_mask,
    ]  # fmt: skip
    for _ in range(w.pick([1, 0, 2, 3, 4])):
        if any(line.startswith("s = s - s.") for line in w.example.lines):
            w.example.refuse("what follows a shift sees the shifted scores")
        w.pick(terms)(w)


def _broadcast(w: Writer, shape: Sequence[int]) -> tuple[int, ...]:
    """A shape that broadcasts to ``shape``: some dimensions 1, some leading ones left out."""
    out = [x if w.pick([True, True, False]) else 1 for x in shape]
    drop = w.pick([0, 0, 1, len(shape) - 2])
    return tuple(out[drop:])


def _add(w: Writer, term: str, shape: Sequence[int] | None = None) -> None:
    fits = shape is None or len(shape) <= len(w.shapes.scores)
    w.line(
        w.pick(
            [
                f"s = s + {term}",
                f"s = {term} + s",
                f"s += {term}" if fits else f"s = s + {term}",
                f"s = torch.add(s, {term})",
            ]
        )
    )


def _fill(w: Writer) -> str:
    """A fill that the dtype can hold: torch refuses -1e9 in float16."""
    return w.pick([f for f in FILLS if not (f == "-1e9" and w.example.dtype is torch.float16)])


def _exclude(w: Writer, drop: str, keep: str | None = None) -> None:
    """Scores replaced by a fill where ``drop`` holds."""
    fill = _fill(w)
    keep = keep or f"~({drop})"
    kinds = [
        f"s = s.masked_fill({drop}, {fill})",
        f"s = torch.where({keep}, s, {fill})",
        f"s = torch.where({drop}, {fill}, s)",
        f"s = torch.where({keep}, s, torch.full((), {fill}, dtype=s.dtype))",
        f"s = torch.where({drop}, torch.tensor({fill}, dtype=s.dtype), s)",
        f"s = s + torch.zeros({w.shapes.m}, {w.shapes.n}, dtype=s.dtype).masked_fill({drop}, {fill})",
        f"s.masked_fill_({drop}, {fill})",
    ]
    w.line(w.pick(kinds))


def bias(w: Writer) -> None:
    shape = _broadcast(w, w.shapes.scores)
    b = w.input("bias", shape, dtype=w.pick(["DT", "DT", "WIDE"]))
    _add(w, w.pick([b, b, f"{b} * 0.3", f"-{b}", f"{b}.to(s.dtype)"]), shape)


def keep_mask(w: Writer) -> None:
    m = w.input("keep", _broadcast(w, w.shapes.scores), "bool", "bool")
    _exclude(w, f"~{m}", m)


def inf_mask(w: Writer) -> None:
    shape = _broadcast(w, w.shapes.scores)
    _add(w, w.input("mask", shape, "inf"), shape)


def by_hand_mask(w: Writer) -> None:
    """(1 - keep) * fill, as BERT does."""
    kind = w.pick(["int64", "DT", "int64"])
    m = w.input("keep", (w.shapes.lead[0], w.shapes.n), "padding", kind)
    view = f"{m}[{', '.join([':'] + ['None'] * len(w.shapes.lead) + [':'])}]"
    w.line(f"mask = (1.0 - {view}.to(s.dtype)) * {w.pick(['-1e4', 'torch.finfo(s.dtype).min', '-10.0'])}")
    if w.flag(3):
        w.line("mask = mask.masked_fill(mask.to(torch.bool), -20.0)")
    _add(w, "mask")


def _positions(w: Writer, dtype: str = "torch.int64") -> tuple[str, str]:
    """Names of the query positions [M, 1] and key positions [1, N]."""
    m, n = w.shapes.m, w.shapes.n
    offset = w.pick(["0", str(n - m), "1"])
    w.line(f"qi = torch.arange({m}, dtype={dtype})[:, None] + {offset}")
    w.line(f"ki = torch.arange({n}, dtype={dtype})[None, :]")
    return "qi", "ki"


def causal(w: Writer) -> None:
    m, n = w.shapes.m, w.shapes.n
    ones = f"torch.ones({m}, {n}, dtype=torch.bool)"
    k = w.pick([0, n - m, 1, -1])
    kind = w.pick(["tril", "triu", "arange", "float triu", "gpt2", "slice", "cumsum"])
    if kind == "tril":
        w.line(f"causal = {ones}.tril({k})")
        _exclude(w, "~causal", "causal")
    elif kind == "triu":
        _exclude(w, f"torch.triu({ones}, diagonal={k + 1})")
    elif kind == "arange":
        q, key = _positions(w)
        _exclude(w, w.pick([f"{key} > {q}", f"{q} < {key}", f"({q} - {key}) < 0", f"torch.lt({q}, {key})"]))
    elif kind == "float triu":
        fill = _fill(w)
        _add(w, f"torch.full(({m}, {n}), {fill}, dtype=s.dtype).triu({k + 1})")
    elif kind == "gpt2":
        w.line(f"causal = torch.ones({m}, {n}, dtype=s.dtype).tril({k})")
        w.line("s = s * causal - 1e4 * (1 - causal)")
    elif kind == "slice":
        big = 2 * (m + n)
        w.line(f"causal = torch.ones({big}, {big}, dtype=torch.bool).tril()[{n} : {n + m}, {n - w.pick([0, 1])} :][:, :{n}]")
        _exclude(w, "~causal", "causal")
    else:
        w.line(f"place = torch.ones({n}, dtype=torch.int64).cumsum(0) - 1")
        w.line(f"causal = place[None, :] <= place[:, None][-{m}:] if {n} >= {m} else {ones}")
        w.line(f"causal = causal.expand({m}, {n})")
        _exclude(w, "~causal", "causal")


def window(w: Writer) -> None:
    q, k = _positions(w)
    width = w.pick([2, 1, 3])
    kind = w.pick(["band", "sliding", "prefix", "chunk", "chunk causal", "truncated", "dilated", "xor", "global"])
    keep = {
        "band": f"({q} - {k}).abs() <= {width}",
        "sliding": f"({k} <= {q}) & ({k} > {q} - {width})",
        "prefix": f"({k} <= {q}) | ({k} < {width})",
        "chunk": f"({q} // {width}) == ({k} // {width})",
        "chunk causal": f"(torch.div({q}, {width}, rounding_mode='floor') == {k} // {width}) & ({k} <= {q})",
        "truncated": f"torch.div({q} - 2, {width}, rounding_mode='trunc') == torch.div({k} - 2, {width}, rounding_mode='trunc')",
        "dilated": f"(({q} - {k}) % {width}) == 0",
        "xor": f"({k} <= {q}) ^ ({k} < {width})",
        "global": f"torch.logical_or(({q} - {k}).abs() < {width}, torch.logical_and({k} == 0, {q} >= 0))",
    }[kind]
    w.line(f"keep = {keep}")
    _exclude(w, "~keep", "keep")


def narrow(w: Writer) -> None:
    """Positions in narrow or floating dtypes: their arithmetic wraps or rounds."""
    dtype = w.pick(["torch.uint8", "torch.int8", "torch.int32", "torch.int16", "DT", "torch.float32"])
    q, k = _positions(w, dtype)
    if dtype.startswith("torch.") and w.flag(2):
        w.line(f"ki = (ki * {w.pick([1, 17, 60])} - 3).to({dtype})")
    _exclude(w, w.pick([f"({q} - {k}) < 1", f"({q} - {k}) > 2", f"{q} + {k} * 20 > 100", f"-{k} > {q}"]))


def padding(w: Writer) -> None:
    s = w.shapes
    lens = w.input("lens", (s.lead[0],), "int", "int64", w.pick([1, 0]), s.n + 1)
    ones = ", ".join("1" for _ in s.scores[1:])
    _exclude(w, f"torch.arange({s.n}) >= {lens}.view(-1, {ones})")


def document(w: Writer) -> None:
    s = w.shapes
    dtype = w.pick(["int64", "int32", "uint8"])
    a = w.input("seg", (s.lead[0], s.m), "sorted", dtype, 0, 3)
    b = a if s.m == s.n else w.input("seg", (s.lead[0], s.n), "sorted", dtype, 0, 3)
    middle = ", ".join("1" for _ in s.lead[1:])
    view = f"-1, {middle}, " if middle else "-1, "
    _exclude(w, f"{a}.view({view}{s.m}, 1) {w.pick(['!=', '<', '>'])} {b}.view({view}1, {s.n})")


def alibi(w: Writer) -> None:
    q, k = _positions(w)
    slopes = w.input("slope", (w.shapes.lead[-1],), "positive")
    distance = w.pick([f"({k} - {q})", f"-({q} - {k}).abs()", f"{k}"])
    text = f"{slopes}.view(-1, 1, 1) * {distance}"
    _add(w, w.pick([text, f"({text}).to(s.dtype)", f"({distance} * {slopes}[:, None, None])"]))


def gathered(w: Writer) -> None:
    s = w.shapes
    q, k = _positions(w)
    span = s.m + s.n + 1
    table = w.input("table", (2 * span, s.lead[-1]))
    kind = w.pick(["difference", "clamped", "input", "negative"])
    if kind == "difference":
        w.line(f"at = {q} - {k} + {span}")
    elif kind == "clamped":
        w.line(f"at = ({q} - {k}).clamp(-2, 2) + {w.pick([2, 3])}")
    elif kind == "input":
        w.line(f"at = {w.input('at', (s.m, s.n), 'int', 'int64', -span, span)}")
    else:
        w.line(f"at = {q} - {k} - {w.pick([span, 2])}")
    _add(w, w.pick([f"{table}[at].permute(2, 0, 1)", f"F.embedding(at % {2 * span}, {table}).permute(2, 0, 1)"]))


def softcap(w: Writer) -> None:
    w.line(w.pick(["s = 3.0 * torch.tanh(s / 3.0)", "s = s / 5; s = torch.tanh(s); s = s * 5"]))


def shift(w: Writer) -> None:
    w.line(
        w.pick(
            [
                "s = s - s.amax(dim=-1, keepdim=True)",
                "s = s - s.detach().amax(dim=-1, keepdim=True)",
                "s = s - s.max(-1, keepdim=True)[0]",
                "s = s - s.mean(-1, keepdim=True)",
                "s = s - s.amax(dim=-2, keepdim=True)",
            ]
        )
    )
    if "dim=-2" in w.example.lines[-1] or "mean" in w.example.lines[-1]:
        w.example.refuse("no shift of whole rows")


def by_number(w: Writer) -> None:
    w.line(w.pick(["s = s * 0.7", "s = s + 0.5", "s = s / 2", "s = 1 - s", "s = torch.sub(s, 1, alpha=2)", "s = -s"]))


def clamp(w: Writer) -> None:
    w.line(
        w.pick(
            [
                "s = s.clamp(-1.0, 1.5)",
                "s = torch.clamp(s, max=2)",
                "s = s.clamp_min(-2.0)",
                "s = s.abs()",
                "s = s.relu()",
            ]
        )
    )


def viewed(w: Writer) -> None:
    """A term added to a view of the scores with more or fewer dimensions."""
    s = w.shapes
    rows = 1
    for x in s.lead:
        rows *= x
    b = w.input("bias", (s.lead[0], 1, 1, s.m, s.n))
    split = f"{s.lead[0]}, {rows // s.lead[0]}, 1, {s.m}, {s.n}"
    w.line(f"s = (s.reshape({split}) + {b}).reshape({', '.join(map(str, s.scores))})")


def logits_cast(w: Writer) -> None:
    w.line(w.pick(["s = s.to(WIDE)", "s = s.to(DT)", "s = s.contiguous()", "s = s.clone()"]))


def row_condition(w: Writer) -> None:
    s = w.shapes
    t = w.input("row", (s.m, 1))
    _exclude(
        w,
        w.pick(
            [
                f"({t} > 0.1) & (torch.arange({s.n}) > 0)",
                f"{t} + 0.001 > torch.arange({s.n}) * 0.1",
                f"{t} == {t}.mT[:, :1]",
            ]
        ),
    )


def computed_mask(w: Writer) -> None:
    s = w.shapes
    w.line(f"mask = torch.zeros({s.m}, {s.n}, dtype=s.dtype)")
    w.line(
        w.pick(
            [
                f"mask[:, {s.n // 2} :] = -3.0",
                "mask[0] = 1.5",
                "mask[..., -1] += 2",
                f"mask = mask + torch.eye({s.m}, {s.n}, dtype=s.dtype)",
            ]
        )
    )
    _add(w, "mask")
