"""ATen's flash attention for CPU as a kernel for the programs it computes exactly.

``aten::_scaled_dot_product_flash_attention_for_cpu`` knows one scale, one additive float mask and top-left causality.
The score matrix is walked in blocks of query rows; each block evaluates bias and mask only for itself and only for the
keys that the mask is proven to allow, so that peak memory is linear in the lengths.

Masked entries are computed as -inf, whatever the program's fill. That is exact where their weight underflows, which is
checked row by row on the result: rows that keep no key, whose live logits do not stand far above the fill, or whose
logits are not finite, are computed again densely, in the forward and in the backward.
:func:`fa_inductor.cpu_plan.supports` says what is declined.

Facts about the op that this file works around, on torch 2.13: an innermost stride other than 1 is ignored in silence,
no keys or no queries divide by zero, the value's head_dim must be the key's, a row of -inf gives 0 with lse 0, and the
backward, which recomputes exp(logit - lse) in float32, loses rows whose lse is large (2e-4 off at -1e4, all wrong at
-1e9).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fa_inductor import cpu_plain, reference
from fa_inductor.bounds import block_range
from fa_inductor.cpu_plain import FLASH, FLASH_BACKWARD
from fa_inductor.cpu_plan import Plan, loads_without_gradient, plan_of, profitable, supports
from fa_inductor.errors import ProgramError
from fa_inductor.expr import Q_IDX, TRUE, Const, Expr, Load, loads
from fa_inductor.intervals import Facts
from fa_inductor.reference import Env, evaluate
from fa_inductor.spec import AttentionSpec

__all__ = ["backward", "forward", "profitable", "supports"]

#: Query rows a block. 512 rows of a float32 mask over 64k keys are 128 MiB; larger blocks gain nothing, the op tiles
#: anyway.
BLOCK_M = 512
#: Query rows computed densely at a time where the flash result cannot be trusted.
DENSE_M = 64
#: exp(-x) is 0 from here on in float32 (denormals included: 103.98) and in float64 (745.14).
UNDERFLOW = {torch.float32: 104.0, torch.float64: 746.0}
#: Above this magnitude of lse the backward's exp(logit - lse) is off by more than 3e-5 (half a float32 ulp of lse).
LSE_LIMIT = 1000.0


# --------------------------------------------------------------------------------------------------------- operands
@dataclass
class _Call:
    """One call's operands, ready for the op, and what it needs to know of the program."""

    spec: AttentionSpec
    plan: Plan
    env: Env
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    scale_tensor: Tensor | None  # already multiplied into q
    limit: float  # a row is exact when its lse lies above; -inf when every finite lse will do

    @property
    def mask_dtype(self) -> torch.dtype:
        return torch.float32 if self.q.dtype in (torch.bfloat16, torch.float16) else self.q.dtype


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, captures: Sequence[Tensor], sizes: Sequence[int], spec: AttentionSpec, fold: bool
) -> _Call:
    plan = plan_of(spec, Facts(q.shape[2], k.shape[2], tuple(sizes)))
    if plan.reason:
        raise ProgramError(f"kernel 'aten' cannot run {spec.program}: {plan.reason}")
    dtype = reference.compute_dtype_of(q.dtype)
    env = Env.full((*q.shape[:3], k.shape[2]), captures, sizes, q.device, dtype)
    scale_tensor: Tensor | None = None
    if isinstance(plan.scale, Const):
        scale = float(plan.scale.value)
    else:
        scale_tensor = evaluate(plan.scale, env)
        scale = 1.0
        if scale_tensor.numel() == 1 and not fold:
            scale, scale_tensor = float(scale_tensor), None
        else:
            # A rounded q * scale would be one rounding more than the program has.
            q, k, v = (
                x.to(dtype) for x in (q * scale_tensor if q.dtype == dtype else q.to(dtype) * scale_tensor, k, v)
            )
    limit = -math.inf
    if plan.fill != -math.inf:
        limit = plan.fill + UNDERFLOW[dtype]
        if plan.additive:
            limit += _largest_logit(q, k, scale, plan, env)
    head_dim = max(q.shape[3], v.shape[3])
    q, k, v = (_ready(x, head_dim) for x in (q, k, v))
    return _Call(spec, plan, env, q, k, v, scale, scale_tensor, limit)


def _ready(t: Tensor, head_dim: int) -> Tensor:
    """``t`` with head_dim columns (zeros behind) and strides that the op reads right."""
    if t.shape[3] < head_dim:
        return torch.nn.functional.pad(t, (0, head_dim - t.shape[3]))
    if t.stride(3) != 1 or t.stride(2) < head_dim:  # BLAS wants a leading dimension of at least a row
        return t.clone(memory_format=torch.contiguous_format)
    return t


def _largest_logit(q: Tensor, k: Tensor, scale: float, plan: Plan, env: Env) -> float:
    """An upper bound of the live logits (Cauchy-Schwarz), infinite where the bias could be anything."""
    norms = [float(torch.linalg.vector_norm(x, dim=-1, dtype=env.dtype).amax()) for x in (q, k)]
    bound = abs(scale) * norms[0] * norms[1] * 1.001
    return bound if plan.bias is None else bound + _largest_bias(plan.bias, env)


def _largest_bias(bias: Expr, env: Env) -> float:
    rows, largest = env.ranges["q_idx"][1], 0.0
    for m0 in range(0, rows, BLOCK_M):
        value = float(evaluate(bias, env.block(q_idx=(m0, min(BLOCK_M, rows - m0)))).amax())
        largest = math.inf if math.isnan(value) else max(largest, value)
        if not bias.depends_on(Q_IDX):
            break
    return largest


def _finite(*tensors: Tensor) -> bool:
    """Whether no element is NaN or infinite: the op skips products with a weight of 0 that are NaN in eager code.

    A finite sum proves it. A sum that overflows is taken for the worst, which costs time and no exactness.
    """
    return all(math.isfinite(t.sum(dtype=reference.compute_dtype_of(t.dtype)).item()) for t in tensors)


# ------------------------------------------------------------------------------------------------------------ blocks
@dataclass
class _Block:
    """Query rows [m0, m1) against keys [n0, n1): one call of the op."""

    m0: int
    m1: int
    n0: int
    n1: int
    causal: bool
    mask: Tensor | None


def _blocks(c: _Call) -> Iterator[_Block]:
    plan, env = c.plan, c.env
    rows, cols = env.ranges["q_idx"][1], env.ranges["kv_idx"][1]
    varying = [e for e in (plan.bias, plan.rest) if e is not None and e.depends_on(Q_IDX)]
    if not varying or (plan.rest == TRUE and _is_plain_mask(plan.bias, c)):
        yield _Block(0, rows, 0, cols, plan.causal, _mask(c, plan.rest, env))
        return
    sizes = [env.sizes[f"n{i}"] for i in range(len(env.sizes) - 2)]
    for m0 in range(0, rows, BLOCK_M):
        m1 = min(m0 + BLOCK_M, rows)
        n0, n1 = block_range(plan.keep, m0, m1, rows, cols, sizes, env.ranges["b"][1], env.ranges["h"][1])
        if n0 < n1:
            block = env.block(q_idx=(m0, m1 - m0), kv_idx=(n0, n1 - n0))
            yield _Block(m0, m1, n0, n1, False, _mask(c, plan.keep, block))
        else:
            yield _Block(m0, m1, 0, 0, False, None)


def _is_plain_mask(bias: Expr | None, c: _Call) -> bool:
    """Whether the bias is a captured tensor that the op can read as it lies."""
    return isinstance(bias, Load) and c.env.captures[bias.slot].dtype == c.mask_dtype


def _mask(c: _Call, keep: Expr, env: Env) -> Tensor | None:
    """The additive mask of a block, broadcastable to its scores; None for none."""
    bias = None if c.plan.bias is None else evaluate(c.plan.bias, env)
    if keep != TRUE:
        zero = torch.zeros((), dtype=env.dtype) if bias is None else bias
        bias = torch.where(evaluate(keep, env), zero, torch.full((), -math.inf, dtype=env.dtype))
    if bias is None:
        return None
    bias = bias.to(c.mask_dtype)
    return bias if bias.dim() == 4 else bias.view(1, 1, 1, 1)


# ----------------------------------------------------------------------------------------------------------- forward
def forward(
    q: Tensor, k: Tensor, v: Tensor, captures: Sequence[Tensor], sizes: Sequence[int], spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """(out, lse) as :func:`fa_inductor.reference.attention` gives them; ProgramError where the plan has a reason."""
    if min(*q.shape, *k.shape, *v.shape) == 0:
        return reference.attention(q, k, v, captures, sizes, spec)
    plain = cpu_plain.forward(q, k, v, spec.program) if cpu_plain.fits(q, k, v) else None
    if plain is not None:
        return plain
    c = _prepare(q, k, v, captures, sizes, spec, fold=False)
    batch, heads, rows, _ = q.shape
    finite = _finite(q, k, v)
    out = lse = None
    for block in _blocks(c):
        part = slice(block.m0, block.m1)
        bad: Tensor | None = None
        o = s = None
        if finite and block.n0 < block.n1:
            k_part, v_part = (x[:, :, block.n0 : block.n1] for x in (c.k, c.v))
            o, s = FLASH(c.q[:, :, part], k_part, v_part, 0.0, block.causal, attn_mask=block.mask, scale=c.scale)
            # A row of -inf alone has lse 0 here; a row whose lse is 0 by chance is merely computed twice.
            exact = (s > c.limit) & (s != 0)
            bad = None if exact.all() else ~exact.all(1)
            o, s = _with_sinks(o, s, c, block)
            o = o[..., : v.shape[3]]
            if bad is None and block.m1 - block.m0 == rows:
                return reference.with_layout(o.to(q.dtype), spec.layout), s.to(torch.float32).contiguous()
        else:
            bad = torch.ones((batch, block.m1 - block.m0), dtype=torch.bool)
        if out is None or lse is None:
            shape = (batch, rows, heads, v.shape[3]) if spec.layout == "bmhd" else (batch, heads, rows, v.shape[3])
            out = q.new_empty(shape).transpose(1, 2) if spec.layout == "bmhd" else q.new_empty(shape)
            lse = q.new_empty((batch, heads, rows), dtype=torch.float32)
        if o is not None:
            out[:, :, part], lse[:, :, part] = o, s
        for b, m0, m1 in _runs(bad, block.m0):
            o, s = _dense(q, k, v, c, b, m0, m1)
            out[b : b + 1, :, m0:m1], lse[b : b + 1, :, m0:m1] = o, s
    assert out is not None
    assert lse is not None
    return out, lse


def _with_sinks(out: Tensor, lse: Tensor, c: _Call, block: _Block) -> tuple[Tensor, Tensor]:
    """Sinks only add to the softmax's denominator: out and lse are corrected afterwards."""
    if not c.spec.sinks:
        return out, lse
    env = c.env.block(q_idx=(block.m0, block.m1 - block.m0))
    total = lse
    for sink in c.spec.sinks:
        total = torch.logaddexp(total, evaluate(sink, env).expand(*lse.shape, 1).squeeze(-1).to(lse.dtype))
    return out * torch.exp(lse - total).unsqueeze(-1), total  # in float32: one rounding, where it is stored


def _runs(bad: Tensor | None, m0: int) -> Iterator[tuple[int, int, int]]:
    """(b, m0, m1) of stretches of at most DENSE_M rows that cover every row marked in ``bad``, bool [B, rows]."""
    if bad is None:
        return
    for b in bad.any(1).nonzero().flatten().tolist():
        start = end = -1
        for m in bad[b].nonzero().flatten().tolist():
            if end < 0 or m >= start + DENSE_M:
                if end >= 0:
                    yield b, m0 + start, m0 + end
                start = m
            end = m + 1
        if end >= 0:
            yield b, m0 + start, m0 + end


def _dense(q: Tensor, k: Tensor, v: Tensor, c: _Call, b: int, m0: int, m1: int) -> tuple[Tensor, Tensor]:
    env = c.env.block(b=(b, 1), q_idx=(m0, m1 - m0))
    return reference.attend(q[b : b + 1, :, m0:m1], k[b : b + 1], v[b : b + 1], env, c.spec)


# ---------------------------------------------------------------------------------------------------------- backward
def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    captures: Sequence[Tensor],
    sizes: Sequence[int],
    spec: AttentionSpec,
    needs_grad: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients in (q, k, v, *captures), None where not needed; raises ProgramError for what `supports` declines."""
    operands = [q, k, v, *captures]
    if min(*q.shape, *k.shape, *v.shape) == 0:
        return reference.attention_grads(grad_out, q, k, v, captures, sizes, spec, needs_grad)
    plain = cpu_plain.backward(grad_out, q, k, v, out, lse, spec, LSE_LIMIT)
    if plain is not None:
        return [g if need else None for g, need in zip(plain, needs_grad, strict=False)] + [None] * len(captures)
    plan = plan_of(spec)
    scale_grad = any(needs_grad[3 + x.slot] for x in loads(plan.scale))
    if any(needs_grad[3 + x.slot] for x in loads_without_gradient(plan)):
        raise ProgramError(f"kernel 'aten' has no gradient for a captured bias: {spec.program}")
    c = _prepare(q, k, v, captures, sizes, spec, fold=scale_grad)
    dtype = c.env.dtype
    if scale_grad and out.dtype != dtype:
        # The gradient of a scale sums (dp - grad_out . out) over all rows, where a rounded out does not cancel.
        out, lse = forward(q.to(dtype), k.to(dtype), v.to(dtype), captures, sizes, spec)
    grads: list[Tensor | None] = [
        torch.zeros_like(t, dtype=dtype, memory_format=torch.contiguous_format) if need else None
        for t, need in zip(operands, needs_grad, strict=True)
    ]
    finite = _finite(q, k, v, grad_out)
    captured = [i for i, need in enumerate(needs_grad) if need and i >= 3]
    for block in _blocks(c):
        part = slice(block.m0, block.m1)
        block_lse = lse[:, :, part]
        if not finite or block.n1 <= block.n0:
            bad = torch.ones((q.shape[0], block.m1 - block.m0), dtype=torch.bool)
        else:
            bad = ~((block_lse > c.limit) & (block_lse.abs() < LSE_LIMIT)).all(1)
            _flash_backward(c, block, grad_out[:, :, part], out[:, :, part], block_lse, bad, q, grads, captured)
        for b, m0, m1 in _runs(bad, block.m0):
            _dense_backward(c, b, m0, m1, grad_out, q, k, v, grads, needs_grad, bad, block.m0)
    return [None if g is None else g.to(t.dtype) for g, t in zip(grads, operands, strict=True)]


def _flash_backward(
    c: _Call,
    block: _Block,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    bad: Tensor,
    q: Tensor,
    grads: list[Tensor | None],
    captured: list[int],
) -> None:
    """Adds the block's gradients, the rows marked bad left out (their grad_out is taken as 0)."""
    if bad.any():
        grad_out = grad_out.masked_fill(bad[:, None, :, None], 0.0)
        out = out.masked_fill(bad[:, None, :, None], 0.0)
        lse = lse.masked_fill(bad[:, None, :], math.inf)
    head_dim, dtype = c.q.shape[3], c.q.dtype
    grad_out, out = (_ready(x.to(dtype), head_dim) for x in (grad_out, out))
    part, keys = slice(block.m0, block.m1), slice(block.n0, block.n1)
    rows, (k_part, v_part) = c.q[:, :, part], (x[:, :, keys] for x in (c.k, c.v))
    env = c.env.block(q_idx=(block.m0, block.m1 - block.m0))
    slots = {x.slot for x in loads(c.plan.scale)} & {i - 3 for i in captured}
    if slots:
        dq, dk, dv = _centred_backward(c, env, block, grad_out, rows, k_part, v_part, out, lse, bad)
    else:
        dq, dk, dv = FLASH_BACKWARD(
            grad_out, rows, k_part, v_part, out, lse, 0.0, block.causal, attn_mask=block.mask, scale=c.scale
        )
    dq = dq[..., : q.shape[3]].to(c.env.dtype)
    if c.scale_tensor is not None:
        scale = evaluate(c.plan.scale, env)
        # q * scale was the op's query, so its gradient is scale's per row and, times scale, q's.
        _pull(c.plan.scale, env, (dq * q[:, :, part].to(dq.dtype)).sum(-1, keepdim=True), captured, grads)
        dq = dq * scale
    for sink in c.spec.sinks:
        value = evaluate(sink, env).expand(*lse.shape, 1)
        delta = (grad_out.to(dq.dtype) * out.to(dq.dtype)).sum(-1, keepdim=True)
        weight = torch.exp(value - lse.unsqueeze(-1).to(value.dtype))
        _pull(sink, env, -weight * delta, captured, grads)
    if grads[0] is not None:
        grads[0][:, :, part] += dq
    for g, d in ((grads[1], dk), (grads[2], dv)):
        if g is not None:
            g[:, :, keys] += d[..., : g.shape[3]]


def _centred_backward(
    c: _Call,
    env: Env,
    block: _Block,
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bad: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the op without the part of dq that is rounding alone.

    A row of the logits' gradient, sinks included, sums to zero. In the op it does so only up to the rounding of ``grad_out . out``,
    which dq then has times the sum of the row's weighted keys, and the gradient of a scale, dq . q summed over all rows, times
    that of its scores. A column of ones behind the keys, which the query does not see, brings the sum to light.
    """
    q1, v1, grad1, out1 = (torch.nn.functional.pad(x, (0, 1)) for x in (q, v, grad_out, out))
    k1 = torch.nn.functional.pad(k, (0, 1), value=1.0)
    dq, dk, dv = FLASH_BACKWARD(grad1, q1, k1, v1, out1, lse, 0.0, block.causal, attn_mask=block.mask, scale=c.scale)
    mean, own = FLASH(q, k, k, 0.0, block.causal, attn_mask=block.mask, scale=c.scale)
    rest = dq[..., -1:]
    if c.spec.sinks:
        total = lse.double().unsqueeze(-1)
        delta = (grad_out.double() * out.double()).sum(-1, keepdim=True)
        weights = [torch.exp(evaluate(sink, env).double().expand(*lse.shape, 1) - total) for sink in c.spec.sinks]
        rest = (rest.double() - c.scale * torch.stack(weights).sum(0) * delta).to(dq.dtype)
        share = torch.exp(own.double().unsqueeze(-1) - total).nan_to_num(0.0).to(dq.dtype)
        mean = (share * mean).masked_fill(share == 0.0, 0.0)
    rest = rest.masked_fill(bad[:, None, :, None], 0.0)
    return dq[..., :-1] - rest * mean, dk[..., :-1], dv[..., :-1]


def _pull(e: Expr, env: Env, cotangent: Tensor, captured: list[int], grads: list[Tensor | None]) -> None:
    """Adds to the captures' gradients what the expression ``e`` passes on of its own."""
    slots = sorted({x.slot for x in loads(e)} & {i - 3 for i in captured})
    if not slots:
        return

    def value(*tensors: Tensor) -> Tensor:
        captures = list(env.captures)
        for slot, t in zip(slots, tensors, strict=True):
            captures[slot] = t
        block = Env(env.ranges, env.sizes, captures, env.device, env.dtype)
        return evaluate(e, block).expand(cotangent.shape)

    _, pullback = torch.func.vjp(value, *(env.captures[s].detach().to(env.dtype) for s in slots))
    for slot, g in zip(slots, pullback(cotangent), strict=True):
        grads[3 + slot] += g


def _dense_backward(
    c: _Call,
    b: int,
    m0: int,
    m1: int,
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grads: list[Tensor | None],
    needs_grad: Sequence[bool],
    bad: Tensor,
    first: int,
) -> None:
    """Adds the gradients of the marked rows among [m0, m1) of batch b, through the dense oracle."""
    mine = bad[b, m0 - first : m1 - first]
    cotangent = (grad_out[b : b + 1, :, m0:m1] * 1.0).masked_fill(~mine[None, None, :, None], 0.0)
    env = c.env.block(b=(b, 1), q_idx=(m0, m1 - m0))
    wanted = [i for i, need in enumerate(needs_grad) if need]
    full = [q[b : b + 1, :, m0:m1], k[b : b + 1], v[b : b + 1], *env.captures]

    def value(*tensors: Tensor) -> Tensor:
        operands = list(full)
        for i, t in zip(wanted, tensors, strict=True):
            operands[i] = t
        block = Env(env.ranges, env.sizes, operands[3:], env.device, env.dtype)
        return reference.attend(operands[0], operands[1], operands[2], block, c.spec)[0]

    _, pullback = torch.func.vjp(value, *(full[i].detach().to(env.dtype) for i in wanted))
    for i, g in zip(wanted, pullback(cotangent.to(env.dtype)), strict=True):
        target = grads[i]
        assert target is not None
        if i == 0:
            target[b : b + 1, :, m0:m1] += g
        elif i < 3:
            target[b : b + 1] += g
        else:
            target += g
