"""Which programs ATen's CPU flash attention computes exactly, and for which sizes that is worth it.

A program qualifies when its logit is ``score * scale + bias`` under masks, see :class:`Plan`;
:mod:`fa_inductor.cpu_flash` runs the plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from fa_inductor.bounds import KvBounds
from fa_inductor.expr import FLOAT, KV_IDX, Q_IDX, SCORE, TRUE, Call, Const, Expr, Load, call, loads, substitute
from fa_inductor.intervals import Facts
from fa_inductor.masks import MASK_FILL, conjuncts, normalise, split_mask
from fa_inductor.spec import AttentionSpec

#: What the op takes for q, k and v.
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

_ONE = Const(1.0)
_FILLS = f"ATen's CPU flash attention leaves masked keys out, which is exact for fills of {MASK_FILL:g} and below"
FLOAT32_MAX = torch.finfo(torch.float32).max


_NO_FACTS = Facts()
_TOP_LEFT = KvBounds(upper=(call("add", Q_IDX, Const(1)),))


@dataclass(frozen=True)
class Plan:
    """A program as ``where(keep, score * scale + bias, fill)``.

    Attributes:
        scale: float expression of (b, h, q_idx) and loads. bias: float expression without score, None for 0.
        keep: the whole mask, with the facts' sizes as numbers.
        causal: whether the mask has a top-left causal part. rest: the mask without that part.
        fill: the number that replaces masked logits, or is added to them when ``additive``; -inf without a mask.
        reason: why the op cannot compute the program, empty when it can.
    """

    scale: Expr = _ONE
    bias: Expr | None = None
    keep: Expr = TRUE
    rest: Expr = TRUE
    causal: bool = False
    fill: float = -math.inf
    additive: bool = False
    reason: str = ""


@lru_cache(maxsize=1024)
def plan_of(spec: AttentionSpec, facts: Facts = _NO_FACTS) -> Plan:
    """The plan of a program; its ``reason`` says why there is none.

    With the sizes at hand in ``facts`` a bottom-right causal mask over equal lengths, say, is known to be top-left.
    """
    if spec.dropout_p:
        return Plan(reason="dropout is not in ATen's CPU flash attention")
    split = split_mask(spec.score)
    parts = affine(split.live)
    if parts is None:
        return Plan(reason=f"the logit is not score * scale + bias: {split.live}")
    scale, bias = parts
    if isinstance(scale, Const) and not abs(float(scale.value)) <= FLOAT32_MAX:
        return Plan(reason=f"the scale {scale} is no float32 number")
    if scale.depends_on(KV_IDX):
        return Plan(reason=f"the scale depends on the key: {scale}")
    if split.keep.depends_on(SCORE):
        return Plan(reason=f"the mask depends on the score: {split.keep}")
    fill = -math.inf if split.fill is None else split.fill_value
    if fill is None:
        return Plan(reason=f"the fill of the mask is no number known here: {split.fill}. {_FILLS}")
    if not fill <= MASK_FILL:
        return Plan(reason=f"masked logits of {fill} still attend. {_FILLS}")
    atoms = conjuncts(normalise(substitute(split.keep, facts.table())))
    top_left = [a for a in atoms if _is_top_left_causal(a)]
    keep: Expr = TRUE
    rest: Expr = TRUE
    for a in atoms:
        keep = call("and_", keep, a)
        rest = rest if a in top_left else call("and_", rest, a)
    return Plan(scale, bias, keep, rest, bool(top_left), fill, split.additive)


def _is_top_left_causal(atom: Expr) -> bool:
    return KvBounds.of(atom) == _TOP_LEFT


def affine(e: Expr) -> tuple[Expr, Expr | None] | None:
    """(scale, bias) with ``e == score * scale + bias``, None when ``e`` is not of that form."""
    if e == SCORE:
        return _ONE, None
    if not isinstance(e, Call) or e.kind != FLOAT:
        return None
    if e.fn == "neg":
        inner = affine(e.args[0])
        return None if inner is None else (call("neg", inner[0]), _map(inner[1], "neg"))
    if e.fn not in ("add", "sub", "mul", "div"):
        return None
    x, y = e.args
    if x.depends_on(SCORE) and y.depends_on(SCORE):
        return None
    if y.depends_on(SCORE):
        if e.fn == "div":
            return None
        if e.fn == "sub":
            return affine(call("add", call("neg", y), x))
        x, y = y, x
    inner = affine(x)
    if inner is None:
        return None
    scale, bias = inner
    if e.fn in ("mul", "div"):
        return call(e.fn, scale, y), _map(bias, e.fn, y)
    if bias is None:
        return scale, y if e.fn == "add" else call("neg", y)
    return scale, call(e.fn, bias, y)


def _map(e: Expr | None, fn: str, *more: Expr) -> Expr | None:
    return None if e is None else call(fn, e, *more)


# --------------------------------------------------------------------------------------------------------- selection
def supports(
    spec: AttentionSpec, q: Any, k: Any, v: Any, captures: Sequence[Any], needs_grad: Sequence[bool] = ()
) -> str | None:
    """None when :mod:`fa_inductor.cpu_flash` computes ``spec`` exactly for such operands, else the reason.

    Args:
        q, k, v, captures: tensors or fake tensors; only device and dtype are looked at, sizes may be symbols.
        needs_grad: for q, k, v and each capture whether a gradient is asked for; empty for inference.
    """
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.device.type != "cpu":
            return f"{name} is on {t.device}, ATen's CPU flash attention needs the CPU"
        if t.dtype not in DTYPES:
            return f"{name} is {t.dtype}, ATen's CPU flash attention takes {', '.join(str(d) for d in DTYPES)}"
    if any(c.device.type != "cpu" for c in captures):
        return "a captured tensor is not on the CPU"
    plan = plan_of(spec)
    if plan.reason:
        return plan.reason
    if any(needs_grad) and q.dtype == torch.float64:
        return "the backward would recompute float64 softmax weights from a float32 lse"
    for load in loads_without_gradient(plan):
        if load.kind == FLOAT and len(needs_grad) > 3 + load.slot and needs_grad[3 + load.slot]:
            return (
                f"{load} is added to the logits and needs a gradient, which ATen's CPU flash attention does not give "
                "(inference: under torch.no_grad())"
            )
    return None


#: Shortest (query, key) lengths that pay. Measured on torch 2.13, one thread of a 2-core x86 CPU, float32, 8 heads,
#: head_dim 64, CPU time of the unfused graph under torch.compile over ours, forward / forward and backward:
#:
#:     S                      256          512          1024         2048
#:     no mask             1.15 / 0.76  1.25 / 0.93  3.22 / 1.94  3.50 / 2.05
#:     causal              1.33 / 0.72  1.25 / 1.00  3.14 / 2.17  4.25 / 3.24
#:     causal + padding    1.26 / 0.78  2.00 / 1.27  3.54 / 2.12  4.48 / 2.98
#:     window of 256       0.87 / 0.91  1.21 / 0.96  2.84 / 2.27  5.04 / 4.55
#:     padding             0.98 / 0.93  2.70 / 1.43  2.72 / 1.76  3.38 / 2.42
#:     bias per head       0.58 / 0.59  1.08 / 0.68  2.23 / 1.68  3.01
#:
#: Without a mask plain torch.compile may know the spelling and call the same op itself; over that it is 0.83 / 0.85,
#: 0.93 / 0.95, 1.08 / 0.94 and 0.98 / 1.03, for the checks around the op.
PAYS_INFERENCE = (256, 512)
PAYS_TRAINING = (512, 1024)
PAYS_WITHOUT_MASK = {False: (256, 256), True: (512, 512)}


def profitable(
    spec: AttentionSpec, dtype: torch.dtype, q_len: int, kv_len: int, head_dim: int, training: bool
) -> str | None:
    """None when the op is expected to be faster than the unfused compiled graph, else the reason it is not."""
    rows, cols = PAYS_TRAINING if training else PAYS_INFERENCE
    if plain_scale(spec) is not None:
        rows, cols = PAYS_WITHOUT_MASK[training]
    if q_len < rows or kv_len < cols:
        return (
            f"{q_len} queries and {kv_len} keys are too few for ATen's CPU flash attention to pay "
            f"in {'training' if training else 'inference'}: it takes {rows} and {cols}"
        )
    return None


@lru_cache(maxsize=1024)
def plain_scale(spec: AttentionSpec) -> float | None:
    """The scale of a program that is ``score * number`` and nothing else, None for any other."""
    parts = None if spec.sinks or spec.dropout_p else affine(spec.score)
    if parts is None or parts[1] is not None or not isinstance(parts[0], Const):
        return None
    scale = float(parts[0].value)
    return scale if abs(scale) <= FLOAT32_MAX else None


def loads_without_gradient(plan: Plan) -> list[Load]:
    """The loads whose gradient is not computed here: all but those of scale and sinks."""
    return [x for e in (plan.bias, plan.keep) if e is not None for x in loads(e)]
