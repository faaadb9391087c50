"""The dense oracle: any program on any device, written with differentiable torch ops.

:func:`evaluate` gives the value of a score expression over a (batch, head, query, key) block and :func:`attention` the
whole operation with eager PyTorch's semantics: a row whose every logit is -inf is NaN (or 0, as the spec says), NaN
stays NaN, a row excluded by a finite fill is averaged like any other, and zero keys give zeros. Low-precision operands
are computed in float32 and rounded once at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add, and_, eq, floordiv, ge, gt, le, lt, mod, mul, ne, neg, or_, sub, truediv

import torch
from torch import Tensor

from fa_inductor.errors import ProgramError
from fa_inductor.expr import BOOL, FLOAT, INDEX_NAMES, INT, Call, Const, Expr, Load, Score, Sym
from fa_inductor.philox import keep_mask
from fa_inductor.spec import AttentionSpec

_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "add": add, "sub": sub, "mul": mul, "div": truediv, "floordiv": floordiv, "mod": mod, "neg": neg,
    "lt": lt, "le": le, "gt": gt, "ge": ge, "eq": eq, "ne": ne,
    "and_": and_, "or_": or_, "not_": torch.logical_not,
    "minimum": torch.minimum, "maximum": torch.maximum, "pow": torch.pow, "where": torch.where, "isnan": torch.isnan,
    **{f: getattr(torch, f) for f in (
        "abs", "exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt", "tanh", "sigmoid", "sin", "cos", "erf",
        "relu", "floor", "reciprocal",
    )},
}  # fmt: skip


def capture_kind(t: Tensor) -> str:
    """The kind under which a program reads a captured tensor: float, int or bool."""
    return BOOL if t.dtype == torch.bool else FLOAT if t.dtype.is_floating_point else INT


def compute_dtype_of(dtype: torch.dtype) -> torch.dtype:
    """Accumulation dtype of the oracle: float64 for float64, float32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass
class Env:
    """The block of the [B, H, M, N] score matrix over which expressions are evaluated.

    Attributes:
        ranges: (start, length) of each index symbol: b, h, q_idx, kv_idx, in this order of dimensions.
        sizes: values of ``q_len``, ``kv_len``, ``n0``, ...
        captures: the captured tensors by slot.
        device, dtype: where to compute and the float dtype to compute in; captures of any float dtype are read as that.
        score: the raw scores of the block, None where the expressions do not use them.
    """

    ranges: dict[str, tuple[int, int]]
    sizes: dict[str, int]
    captures: Sequence[Tensor]
    device: torch.device
    dtype: torch.dtype
    score: Tensor | None = None
    _values: dict[Expr, Tensor] = field(default_factory=dict, repr=False)

    @staticmethod
    def full(
        shape: tuple[int, int, int, int],
        captures: Sequence[Tensor],
        sizes: Sequence[int],
        device: torch.device,
        dtype: torch.dtype,
        score: Tensor | None = None,
    ) -> Env:
        """The environment of a whole [B, H, M, N] score matrix; ``sizes`` are the values of n0, n1, ..."""
        table = {"q_len": shape[2], "kv_len": shape[3], **{f"n{i}": s for i, s in enumerate(sizes)}}
        return Env({n: (0, s) for n, s in zip(INDEX_NAMES, shape, strict=True)}, table, captures, device, dtype, score)

    def block(self, **ranges: tuple[int, int]) -> Env:
        """The same environment over a part of the matrix, e.g. ``block(q_idx=(m0, rows), kv_idx=(n0, cols))``."""
        return Env({**self.ranges, **ranges}, self.sizes, self.captures, self.device, self.dtype)

    def _index(self, name: str) -> Tensor:
        start, length = self.ranges[name]
        shape = [1, 1, 1, 1]
        shape[INDEX_NAMES.index(name)] = length
        return torch.arange(start, start + length, device=self.device, dtype=torch.int64).view(shape)

    def _scalar(self, value: float | bool, kind: str) -> Tensor:
        dtype = {FLOAT: self.dtype, INT: torch.int64, BOOL: torch.bool}[kind]
        return torch.full((), value, dtype=dtype, device=self.device)

    def _convert(self, t: Tensor, kind: str) -> Tensor:
        if kind == BOOL:
            return t if t.dtype == torch.bool else t != 0
        return t.to(self.dtype if kind == FLOAT else torch.int64)


def evaluate(expr: Expr, env: Env) -> Tensor:
    """Value of ``expr`` as a tensor of four dimensions or none that broadcasts to the block's shape.

    Integers are int64, booleans bool, floats ``env.dtype``. A load outside its tensor reads 0 or False, as a masked
    load does in a kernel, so that ``where(kv_idx < n0, f0[kv_idx], f1[kv_idx - n0])`` is defined. Raises
    :class:`ProgramError` for a slot, size or rank that the environment does not have.
    """
    values = env._values
    for node in expr.walk():
        if node in values:
            continue
        if isinstance(node, Score):
            if env.score is None:
                raise ProgramError(f"no scores are given, but the expression reads them: {expr}")
            values[node] = env.score
        elif isinstance(node, Const):
            values[node] = env._scalar(node.value, node.kind)
        elif isinstance(node, Sym):
            values[node] = _symbol(node, env)
        elif isinstance(node, Load):
            values[node] = _load(node, env, values)
        elif isinstance(node, Call):
            values[node] = _apply(node, env, values)
        else:
            raise ProgramError(f"cannot evaluate a {type(node).__name__}: {node}")
    return values[expr]


def _symbol(node: Sym, env: Env) -> Tensor:
    if node.name in INDEX_NAMES:
        return env._index(node.name)
    if node.name not in env.sizes:
        raise ProgramError(f"size {node.name} is not given; known sizes are {', '.join(env.sizes)}")
    return env._scalar(env.sizes[node.name], INT)


def _apply(node: Call, env: Env, values: dict[Expr, Tensor]) -> Tensor:
    args = [values[a] for a in node.args]
    if node.fn.startswith("cast_"):
        return env._convert(args[0], node.kind)
    if node.fn == "pow" and isinstance(node.args[1], Const):
        return torch.pow(args[0], node.args[1].value)  # a number as the exponent is what eager code has: x*x for 2
    return _FUNCTIONS[node.fn](*args)


def _load(node: Load, env: Env, values: dict[Expr, Tensor]) -> Tensor:
    if node.slot >= len(env.captures):
        raise ProgramError(f"{node} reads slot {node.slot}, but {len(env.captures)} tensors are captured")
    t = env.captures[node.slot]
    if t.dim() != len(node.index) or capture_kind(t) != node.kind:
        raise ProgramError(
            f"{node} does not fit the captured tensor of shape {tuple(t.shape)} and dtype {t.dtype}: "
            f"expected {t.dim()} indices and kind {capture_kind(t)}"
        )
    view = _load_as_view(t, node.index, env)
    if view is None:
        view = _gather(t, [values[i] for i in node.index])
    return env._convert(view, node.kind)


def _load_as_view(t: Tensor, index: tuple[Expr, ...], env: Env) -> Tensor | None:
    """The load as a strided view when every index is a distinct bare symbol or a number within range, else None."""
    names = [i.name if isinstance(i, Sym) else "" for i in index]
    used = [n for n in names if n]
    if len(set(used)) != len(used) or not all(n in INDEX_NAMES for n in used):
        return None
    for dim in reversed(range(t.dim())):  # from the back, so that select() does not move the dimensions still to do
        i = index[dim]
        if isinstance(i, Const):
            if i.kind != INT or not 0 <= i.value < t.shape[dim]:
                return None
            t = t.select(dim, int(i.value))
        elif isinstance(i, Sym):
            start, length = env.ranges[i.name]
            if start + length > t.shape[dim]:
                return None
            t = t.narrow(dim, start, length)
        else:
            return None
    order = sorted(range(len(used)), key=lambda d: INDEX_NAMES.index(used[d]))
    t = t.permute(order)
    for position, name in enumerate(INDEX_NAMES):
        if name not in used:
            t = t.unsqueeze(position)
    return t


def _gather(t: Tensor, index: list[Tensor]) -> Tensor:
    inside = reduce(and_, ((i >= 0) & (i < n) for i, n in zip(index, t.shape, strict=True)))
    if t.numel() == 0:
        return torch.zeros_like(inside, dtype=t.dtype)
    clamped = tuple(i.clamp(0, n - 1) for i, n in zip(index, t.shape, strict=True))
    return torch.where(inside, t[clamped], torch.zeros((), dtype=t.dtype, device=t.device))


def raw_scores(q: Tensor, k: Tensor, dtype: torch.dtype) -> Tensor:
    """q . k for every query and key in ``dtype``: q [B, Hq, M, D], k [B, Hkv, N, D] -> [B, Hq, M, N]."""
    heads, kv_heads = q.shape[1], k.shape[1]
    grouped = q.to(dtype).unflatten(1, (kv_heads, heads // kv_heads if kv_heads else 1))
    return (grouped @ k.to(dtype).unsqueeze(2).mT).flatten(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, env: Env, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Dense attention over the block that ``env`` describes, whose score is filled in here.

    q [b, Hq, m, Dqk], k [b, Hkv, n, Dqk] and v [b, Hkv, n, Dv] are the block's own; returns out [b, Hq, m, Dv] in
    ``env.dtype`` and lse [b, Hq, m] float32.
    """
    heads, kv_heads, cols = q.shape[1], k.shape[1], k.shape[2]
    env.score = raw_scores(q, k, env.dtype)
    shape = env.score.shape
    logits = evaluate(spec.score, env).expand(shape)
    sinks = [evaluate(s, env).expand(*shape[:3], 1) for s in spec.sinks]
    row = torch.cat([logits, *sinks], dim=-1) if sinks else logits
    lse = torch.logsumexp(row.detach(), dim=-1).to(torch.float32)
    if spec.dead_rows == "zero":
        # Masked before and after, so that neither the value nor the gradient of such a row is NaN.
        dead = (row == -torch.inf).all(dim=-1, keepdim=True)
        probs = torch.softmax(row.masked_fill(dead, 0.0), dim=-1).masked_fill(dead, 0.0)
    else:
        probs = torch.softmax(row, dim=-1)
    probs = probs[..., :cols]
    if spec.dropout_p:
        keep = keep_mask(env.captures[spec.seed_slot], spec.dropout_p, tuple(shape))
        probs = probs * keep * (1.0 / (1.0 - spec.dropout_p))
    grouped = probs.unflatten(1, (kv_heads, heads // kv_heads if kv_heads else 1))
    return (grouped @ v.to(env.dtype).unsqueeze(2)).flatten(1, 2), lse


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    captures: Sequence[Tensor],
    sizes: Sequence[int],
    spec: AttentionSpec,
    compute_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention as ``spec`` says, dense. Differentiable in q, k, v and every float capture.

    Args:
        q: [B, Hq, M, Dqk]; k: [B, Hkv, N, Dqk]; v: [B, Hkv, N, Dv]; Hq is a multiple of Hkv; strides are free.
        captures: captured tensors by slot; float ones of any dtype are read in the compute dtype.
        sizes: values of the program's run-time sizes n0, n1, ...
        compute_dtype: float32 or float64; None takes float64 for float64 operands and float32 otherwise.

    Returns:
        out [B, Hq, M, Dv] in v's dtype, laid out as ``spec.layout`` says, and lse [B, Hq, M] float32: the natural
        logarithm of the softmax's denominator, sinks included, before dropout; -inf where every logit is.
    """
    dtype = compute_dtype or compute_dtype_of(q.dtype)
    env = Env.full((*q.shape[:3], k.shape[2]), captures, sizes, q.device, dtype)
    out, lse = attend(q, k, v, env, spec)
    return with_layout(out.to(v.dtype), spec.layout), lse


def with_layout(out: Tensor, layout: str) -> Tensor:
    """``out`` [B, H, M, D] stored contiguously in the order that ``layout`` names."""
    return out.transpose(1, 2).contiguous().transpose(1, 2) if layout == "bmhd" else out.contiguous()


def attention_grads(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    captures: Sequence[Tensor],
    sizes: Sequence[int],
    spec: AttentionSpec,
    needs_grad: Sequence[bool],
    compute_dtype: torch.dtype | None = None,
) -> list[Tensor | None]:
    """Gradients of :func:`attention`'s out in (q, k, v, *captures), None where ``needs_grad`` is False.

    Each has its operand's shape and dtype. Works below autograd (inside a dispatcher kernel), where grad mode does
    nothing.
    """
    operands = [q, k, v, *captures]
    wanted = [i for i, need in enumerate(needs_grad) if need]

    def forward(*xs: Tensor) -> Tensor:
        full = list(operands)
        for i, x in zip(wanted, xs, strict=True):
            full[i] = x
        return attention(full[0], full[1], full[2], full[3:], sizes, spec, compute_dtype)[0]

    grads: list[Tensor | None] = [None] * len(operands)
    if wanted:
        _, pullback = torch.func.vjp(forward, *(operands[i].detach() for i in wanted))
        for i, g in zip(wanted, pullback(grad_out), strict=True):
            grads[i] = g
    return grads
