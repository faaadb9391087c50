"""Attention as ATen ops alone, for packages that AOTInductor compiles: nothing in them may need Python.

:func:`attention` is what an exported graph calls in place of ``fa_inductor::flash_attention``. It is traced through, never kept:
what stays in the package is ATen's flash attention for CPU, the mask it reads, and, behind ``torch.cond``, the dense program for
operands on which that op is not exact (:mod:`fa_inductor.cpu_flash` lists them, and looks at the values just as this file does).
Where a bias or a mask depends on both the query and the key, it is made for all of them at once: [B, H, M, N] without the
dimensions that it does not depend on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fa_inductor import reference
from fa_inductor.bounds import Facts
from fa_inductor.cpu_flash import UNDERFLOW
from fa_inductor.cpu_plain import FLASH
from fa_inductor.cpu_plan import affine, plan_of
from fa_inductor.errors import ProgramError
from fa_inductor.expr import TRUE, Const, Expr
from fa_inductor.reference import Env, evaluate
from fa_inductor.spec import AttentionSpec

_COND = torch.ops.higher_order.cond


@dataclass(frozen=True)
class _Form:
    """``where(keep, score * scale + bias, fill)``; ``causal``: keep is the top-left causal mask and nothing else."""

    scale: Expr
    bias: Expr | None
    keep: Expr
    fill: float
    causal: bool


def _form(spec: AttentionSpec, facts: Facts) -> _Form:
    plan = plan_of(spec, facts)
    if plan.reason:
        raise ProgramError(f"ATen's CPU flash attention cannot run {spec.program}: {plan.reason}")
    added = affine(spec.score) if plan.additive else None
    if added is not None:  # a finite number added to what is masked is a bias like any other: the op adds it as eager code does
        return _Form(*added, TRUE, -math.inf, False)
    if plan.additive:
        raise ProgramError(f"a mask is added to part of the logit: {spec.score}")
    if plan.causal and plan.rest == TRUE and plan.bias is None:
        return _Form(plan.scale, None, plan.keep, plan.fill, True)
    return _Form(plan.scale, plan.bias, plan.keep, plan.fill, False)


def refusal(spec: AttentionSpec) -> str:
    """Why :func:`attention` does not run a program that :func:`fa_inductor.cpu_plan.supports` admits, "" where it does."""
    try:
        _form(spec, Facts())
    except ProgramError as e:
        return str(e)
    return ""


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, captures: Sequence[Tensor], sizes: Sequence[int], program: str
) -> tuple[Tensor, Tensor]:
    """(out, lse) by the dense program, any device: what ``kernel="reference"`` puts into an exported graph."""
    return reference.attention(q, k, v, captures, sizes, AttentionSpec.parse(program))


#: What is added to the scores; which rows keep no key; which scores count, where the first does not tell. None for nothing.
Masks = tuple[Tensor | None, Tensor | None, Tensor | None]


def mask(q: Tensor, k: Tensor, captures: Sequence[Tensor], sizes: Sequence[int], program: str) -> Masks:
    """The masks of a program: float [B, H, M, N], bool [B, H, M] and bool [B, H, M, N], each broadcastable.

    Of q and k only the sizes count, so layers of equal captures and sizes can share it.
    """
    form, env = _form_and_env(q, k, captures, sizes, AttentionSpec.parse(program))
    added = None if form.bias is None else _four(evaluate(form.bias, env))
    if form.keep == TRUE or form.causal:
        return added, None, None
    keep = _four(evaluate(form.keep, env))
    # Where a bias is -inf itself, the logit is -inf and not the fill.
    told = form.bias is None or form.fill == -math.inf
    zero = torch.zeros((), dtype=env.dtype, device=env.device) if added is None else added
    added = torch.where(keep, zero, torch.full((), -math.inf, dtype=env.dtype, device=env.device))
    return added, ~keep.any(-1), None if told else keep


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    masks: Masks,
    captures: Sequence[Tensor],
    sizes: Sequence[int],
    program: str,
) -> tuple[Tensor, Tensor]:
    """(out [B, Hq, M, Dv], lse [B, Hq, M] float32) of ``program`` over q [B, Hq, M, D], k [B, Hkv, N, D], v [B, Hkv, N, Dv].

    For tracing, not for running: sizes may be symbols, which must not be 0. ``masks`` is what :func:`mask` gives, ``sizes`` are the
    values of n0, n1, ... Raises :class:`ProgramError` for a program that :func:`refusal` refuses.
    """
    spec, result = AttentionSpec.parse(program), v.dtype
    form, env = _form_and_env(q, k, captures, sizes, spec)
    scale = 1.0
    if isinstance(form.scale, Const):
        scale = float(form.scale.value)
    else:  # a rounded q * scale would be one rounding more than the program has
        q, k, v = q.to(env.dtype) * evaluate(form.scale, env), k.to(env.dtype), v.to(env.dtype)
    # Copies: torch.cond takes no operands that share memory, and the flash op reads a dense head_dim only.
    q, k, v = (t.clone(memory_format=torch.contiguous_format) for t in (q, k, v))
    out, lse, good = _flash(q, k, v, masks, form, scale, spec)
    given = [t for t in (masks[0], masks[2]) if t is not None]
    operands, shapes = _packed([q, k, v, *given])
    dense = _Dense(form, scale, spec, env.dtype, out.dtype, lse.dtype, shapes)
    flat, lse = _COND(good, _Keep(), dense, (out.reshape(-1), lse.reshape(-1), *operands))
    out, lse = flat.view(*q.shape[:3], v.shape[3]), lse.view(q.shape[:3])
    for sink in spec.sinks:  # sinks only add to the denominator
        total = torch.logaddexp(lse, evaluate(sink, env).expand(*lse.shape, 1).squeeze(-1).to(lse.dtype))
        out, lse = out * torch.exp(lse - total).unsqueeze(-1), total
    return reference.with_layout(out.to(result), spec.layout), lse.to(torch.float32)


def _form_and_env(
    q: Tensor, k: Tensor, captures: Sequence[Tensor], sizes: Sequence[int], spec: AttentionSpec
) -> tuple[_Form, Env]:
    rows, cols = (n if isinstance(n, int) else None for n in (q.shape[2], k.shape[2]))
    env = Env.full((*q.shape[:3], k.shape[2]), captures, sizes, q.device, reference.compute_dtype_of(q.dtype))
    return _form(spec, Facts(rows, cols)), env


def _four(t: Tensor) -> Tensor:
    return t if t.dim() == 4 else t.view(1, 1, 1, 1)


def _flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    masks: Masks,
    form: _Form,
    scale: float,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, whether they are exact): by the flash op, rows without a key put right."""
    width, v_dim = max(q.shape[3], v.shape[3]), v.shape[3]
    wide = [torch.nn.functional.pad(t, (0, width - t.shape[3])) if t.shape[3] < width else t for t in (q, k, v)]
    added, dead, _ = masks
    # float64 operands take a float64 mask, all others a float32 one.
    kind = torch.float64 if q.dtype == torch.float64 else torch.float32
    out, lse = FLASH(*wide, 0.0, form.causal, attn_mask=None if added is None else added.to(kind), scale=scale)
    out = out[..., :v_dim]
    limit = -math.inf if form.fill == -math.inf else form.fill + UNDERFLOW[kind]
    # A row of -inf alone has lse 0; if one's lse is 0 by chance all take the dense program, and no harm.
    exact = (lse > limit) & (lse < math.inf) & (lse != 0)
    if dead is not None:
        exact = exact | dead
        out, lse = _dead_rows(out, lse, v, dead, form, spec)
    good = exact.all()
    for t in (q, k, v):  # a finite sum proves finite elements: the op skips products of NaN with a weight of 0
        good = good & torch.isfinite(t.sum(dtype=kind))
    return out, lse, good


def _nothing_left(spec: AttentionSpec) -> float:
    """What a row is whose every logit is -inf."""
    return 0.0 if spec.dead_rows == "zero" or spec.sinks else math.nan


def _dead_rows(out: Tensor, lse: Tensor, v: Tensor, dead: Tensor, form: _Form, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """out and lse with the rows put right that keep no key: the average of V under a finite fill, else NaN or 0."""
    if form.fill == -math.inf:
        return out.masked_fill(dead.unsqueeze(-1), _nothing_left(spec)), lse.masked_fill(dead, -math.inf)
    mean = v.mean(2, keepdim=True, dtype=lse.dtype)
    group = out.shape[1] // v.shape[1]
    mean = mean.unsqueeze(2).expand(-1, -1, group, -1, -1).flatten(1, 2) if group != 1 else mean
    keys = torch.scalar_tensor(v.shape[2], dtype=lse.dtype, device=lse.device)
    return torch.where(dead.unsqueeze(-1), mean.to(out.dtype), out), torch.where(dead, form.fill + torch.log(keys), lse)


# torch.cond names its branches by their __name__, and takes and gives no tensors that share memory. Inductor gives the operands
# of a branch and what it returns the order of strides that suits it, and lets the branch read them as they were traced (seen on
# torch 2.13: wrong values from a transposed operand). So all of them are flat.
class _Keep:
    """The branch that takes what the flash op has computed."""

    __name__ = "flash_attention"

    def __call__(self, out: Tensor, lse: Tensor, *_operands: Any) -> tuple[Tensor, Tensor]:
        return out.clone(), lse.clone()


@dataclass(frozen=True)
class _Dense:
    """The branch that computes the program with all its scores in memory."""

    form: _Form
    scale: float
    spec: AttentionSpec
    dtype: torch.dtype
    out_dtype: torch.dtype
    lse_dtype: torch.dtype
    shapes: tuple[tuple[int | None, ...], ...]

    __name__ = "dense_attention"

    def __call__(self, _out: Tensor, _lse: Tensor, *operands: Any) -> tuple[Tensor, Tensor]:
        q, k, v, *added = _unpacked(operands, self.shapes)
        logits = reference.raw_scores(q, k, self.dtype) * self.scale
        fill = torch.full((), self.form.fill, dtype=self.dtype, device=q.device)
        if self.form.causal:
            keep = evaluate(self.form.keep, Env.full((*q.shape[:3], k.shape[2]), (), (), q.device, self.dtype))
            logits = torch.where(keep, logits, fill)
        elif self.form.keep != TRUE:
            keep = added[1] if len(added) > 1 else added[0] != -math.inf
            logits = torch.where(keep, logits + added[0], fill)  # what does not count may be NaN
        elif added:
            logits = logits + added[0]
        probs = torch.softmax(logits, -1)
        if _nothing_left(self.spec) == 0:
            probs = probs.masked_fill((logits == -math.inf).all(-1, keepdim=True), 0.0)
        grouped = probs.unflatten(1, (k.shape[1], q.shape[1] // k.shape[1])) @ v.to(self.dtype).unsqueeze(2)
        return _flat(grouped.flatten(1, 2).to(self.out_dtype)), _flat(torch.logsumexp(logits, -1).to(self.lse_dtype))


def _flat(t: Tensor) -> Tensor:
    return t.reshape(-1).clone()


def _packed(tensors: Sequence[Tensor]) -> tuple[list[Any], tuple[tuple[int | None, ...], ...]]:
    """The tensors flat, then their run-time sizes; and their shapes, None for each run-time size."""
    sizes = [n for t in tensors for n in t.shape if not isinstance(n, int)]
    return [t.reshape(-1) for t in tensors] + sizes, tuple(
        tuple(n if isinstance(n, int) else None for n in t.shape) for t in tensors
    )


def _unpacked(operands: Sequence[Any], shapes: Sequence[Sequence[int | None]]) -> list[Tensor]:
    sizes = iter(operands[len(shapes) :])
    return [t.view([next(sizes) if n is None else n for n in shape]) for t, shape in zip(operands, shapes, strict=False)]
