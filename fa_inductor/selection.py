"""Which kernel runs a proven site: asked before the rewrite, so that a site nothing can run stays as the user wrote it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch

from fa_inductor import caches, cpu_export, cpu_flash
from fa_inductor.bounds import Facts
from fa_inductor.config import Options
from fa_inductor.patterns import AttentionMatch, projection
from fa_inductor.patterns.caches import Cache
from fa_inductor.patterns.caches import find as find_cache
from fa_inductor.patterns.projection import Projections
from fa_inductor.patterns.terms import value_of
from fa_inductor.templates import select


@dataclass(frozen=True)
class Choice:
    """``kernel`` is the op's kernel argument, or None with the reason; ``template`` is its name in the report.

    ``fused_already``: the user's code calls a fused kernel itself. ``fp8``: the FP8 format it runs in; ``fp8_refused``: why not in
    the one that was asked for. ``projections``: what makes q, k and v, where they are cast as they are made. ``cache``: how k and
    v are stored, where the kernel reads them so.
    """

    kernel: str | None
    template: str = ""
    reason: str = ""
    fused_already: bool = False
    fp8: str = ""
    fp8_refused: str = ""
    projections: Projections | None = None
    cache: Cache | None = None


@dataclass(frozen=True)
class _Meta:
    """Device and dtype of an operand as the op will get it."""

    device: torch.device
    dtype: torch.dtype


def needs_grad(match: AttentionMatch) -> tuple[bool, ...]:
    """For q, k, v and each capture whether a gradient will be asked for."""
    origin = match.place.view.origin[match.pv]
    reached = match.full_spec().differentiable_slots()
    operands = [match.place.requires_grad(o.node) for o in (match.q, match.k, match.v)]
    captures = [i in reached and match.place.requires_grad(c) for i, c in enumerate(match.captures)]
    return tuple(origin.grad_enabled and needed for needed in (*operands, *captures))


def choose_kernel(match: AttentionMatch, options: Options) -> Choice:
    """The kernel for one match, or why there is none."""
    choice = _choose(match, options)
    if choice.kernel is not None and options.fp8 != "off":
        choice = _in_fp8(match, options, choice)
    return choice if choice.kernel not in ("reference", "general", "triton") or choice.fp8 else _from_cache(match, choice)


#: Most queries for which 8-bit keys and values are dequantised in the kernel. It does so anew for each tile of queries, and many of
#: those run faster on a copy. An estimate, not measured.
FEW_QUERIES = 256


def _from_cache(match: AttentionMatch, choice: Choice) -> Choice:
    """``choice`` with k and v read as they are stored, where they lie in pages or in 8 bits. They have no gradients then."""
    bodies = match.place.view.bodies
    calls = sum(body is bodies[match.place.path] for body in bodies.values())
    if any(needs_grad(match)) or calls > 1:  # what another call of the sub-graph stores was not looked at
        return choice
    device, stored = _tensor(match.q.node).device, set(caches.STORED)
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        stored.discard(torch.float8_e4m3fn)  # which Triton converts from compute capability 8.9 on
    if size_hint(match, match.extent(match.groups["query"])) > FEW_QUERIES:
        stored.clear()
    found = find_cache(match, frozenset(stored))
    if found is None:
        return choice
    if choice.kernel != "reference":
        answer = select.supports(replace(_request(match, torch.cuda.get_device_capability(device), True), tma=False))
        if isinstance(answer, select.Unsupported):
            return choice
        choice = replace(choice, template=answer.template)
    return replace(choice, template=f"{choice.template}, {found.form}", cache=found)


def _in_fp8(match: AttentionMatch, options: Options, choice: Choice) -> Choice:
    """``choice`` in the FP8 format that is asked for, or with the reason why not."""
    device = _tensor(match.q.node).device
    if choice.kernel == "reference":
        refused = select.fp8_refusal(_request(match, (9, 0), False), options.fp8) if _numeric_dims(match) else _RUN_TIME_DIM
        if refused:
            return replace(choice, fp8_refused=refused)
        return _with_projection(match, options, replace(choice, fp8=options.fp8))
    if device.type != "cuda":
        return replace(choice, fp8_refused=f"operands are on {device.type}")
    request = _request(match, torch.cuda.get_device_capability(device), options.kernel == "general")
    answer = select.fp8_supports(request, options.fp8)
    if isinstance(answer, select.Unsupported):
        return replace(choice, fp8_refused=answer.reason)
    return _with_projection(match, options, replace(choice, template=answer.template, fp8=options.fp8))


def _with_projection(match: AttentionMatch, options: Options, choice: Choice) -> Choice:
    """``choice`` with the projections that cast q, k and v as they make them, or with the reason why there are none."""
    if not options.fp8_projection:
        return choice
    found = projection.find(match)
    if isinstance(found, str):
        return replace(choice, template=f"{choice.template}, cast by a kernel of its own: {found}")
    return replace(choice, template=f"{choice.template}, cast in the projection", projections=found)


def _choose(match: AttentionMatch, options: Options) -> Choice:
    if match.dropout_p and not options.dropout:
        return Choice(None, reason="dropout is active and options={'dropout': False} forbids fusing it")
    if options.kernel == "reference":
        return Choice("reference", "reference")
    device = _tensor(match.q.node).device
    if device.type == "cpu":
        return _cpu(match, options)
    if device.type == "cuda" and options.kernel in ("auto", "general"):
        return _cuda(match, device, options.kernel == "general")
    return Choice(None, reason=f"no kernel for device {device.type} with kernel={options.kernel!r}")


def choose_for_export(match: AttentionMatch, options: Options) -> Choice:
    """The kernel for one match of an exported graph: one that a package runs without Python."""
    choice = choose_kernel(match, replace(options, fp8="off"))
    made = _packaged(match, replace(choice, cache=None) if choice.kernel == "reference" else choice)
    refused = "" if options.fp8 == "off" else "the operands are cast from Python, which a package does not have"
    return replace(made, fp8_refused=refused) if made.kernel is not None else made


def _packaged(match: AttentionMatch, choice: Choice) -> Choice:
    if choice.kernel == "reference":
        return Choice("reference in the graph", "reference, as ATen ops")
    if choice.kernel == "triton" and choice.template == select.HOPPER:
        return Choice("triton", "sm90-tma")  # the Gluon kernel is launched from Python
    if choice.kernel != "aten":
        return choice
    extents = [match.extent(match.groups[g]) for g in ("batch", "heads", "kv_heads", "query", "key")]
    if any(may_be_zero(match, e) for e in extents):
        return Choice(None, reason="a run-time size may be 0, which ATen's CPU flash attention divides by: give its Dim a min of 1")
    reason = cpu_export.refusal(match.full_spec())
    return Choice(None, reason=reason) if reason else Choice("aten in the graph", choice.template)


def may_be_zero(match: AttentionMatch, e: sympy.Expr) -> bool:
    """Whether nothing is known that keeps a size from being 0."""
    if e.is_Integer:
        return int(e) < 1
    env = getattr(match.place.view.fake_mode, "shape_env", None)
    return env is None or not bool(env.bound_sympy(e).lower >= 1)


def _tensor(node: Any) -> torch.Tensor:
    v = value_of(node)
    assert isinstance(v, torch.Tensor)
    return v


def _cpu(match: AttentionMatch, options: Options) -> Choice:
    if match.sdpa and not match.dropout_p and match.extent(match.groups["qk"]) == match.extent(match.groups["v"]):
        return Choice(None, reason="already scaled_dot_product_attention, which ATen runs fused on CPU", fused_already=True)
    cpu = torch.device("cpu")
    operand = _Meta(cpu, match.dtype)
    captures = [_Meta(v.device, v.dtype) if isinstance(v, torch.Tensor) else _Meta(cpu, torch.float64)
                for v in map(value_of, match.captures)]  # fmt: skip
    grads = needs_grad(match)
    spec = match.full_spec()
    reason = cpu_flash.supports(spec, operand, operand, operand, captures, grads if any(grads) else ())
    if reason is None:
        reason = _unprofitable(match, options, any(grads))
    return Choice(None, reason=reason) if reason else Choice("aten", "ATen flash attention (CPU)")


def _unprofitable(match: AttentionMatch, options: Options, training: bool) -> str | None:
    rows, keys, features = (size_hint(match, match.extent(match.groups[g])) for g in ("query", "key", "qk"))
    if options.min_seqlen is not None:
        return f"{keys} keys are fewer than min_seqlen={options.min_seqlen}" if keys < options.min_seqlen else None
    return cpu_flash.profitable(match.full_spec(), match.dtype, rows, keys, features, training)


#: Length assumed for a run-time size whose traced value is not known.
_ASSUMED_LENGTH = 4096


def size_hint(match: AttentionMatch, e: sympy.Expr) -> int:
    """The size at hand for a dimension; a run-time size counts by the value that it was traced with."""
    if e.is_Integer:
        return int(e)
    table = match.place.view.shared("size hints", lambda: _hints(match))
    value = e.xreplace(table)
    return int(value) if value.is_Integer else _ASSUMED_LENGTH


def _hints(match: AttentionMatch) -> dict[sympy.Expr, sympy.Expr]:
    """Size symbols of the graph's inputs and their traced values."""
    table = {}
    for n in match.place.view.graph.nodes:
        if n.op != "placeholder":
            break
        v = value_of(n)
        for d in v.shape if isinstance(v, torch.Tensor) else (v,):
            if isinstance(d, torch.SymInt) and d.node.expr.is_Symbol and d.node.has_hint():
                table[d.node.expr] = sympy.Integer(d.node.hint)
    return table


def _cuda(match: AttentionMatch, device: torch.device, general: bool) -> Choice:
    if not _numeric_dims(match):
        return Choice(None, reason=_RUN_TIME_DIM)
    answer = select.supports(_request(match, torch.cuda.get_device_capability(device), general))
    if isinstance(answer, select.Unsupported):
        return Choice(None, reason=answer.reason)
    return Choice("general" if general else "triton", answer.template)


_RUN_TIME_DIM = "head_dim is a run-time size"


def _numeric_dims(match: AttentionMatch) -> bool:
    return all(match.extent(match.groups[g]).is_Integer for g in ("qk", "v"))


def _request(match: AttentionMatch, capability: tuple[int, int], general: bool) -> select.Request:
    dims = [match.extent(match.groups[g]) for g in ("qk", "v")]
    grads = needs_grad(match)
    lengths = [match.extent(match.groups[g]) for g in ("query", "key")]
    rows, cols = (int(n) if n.is_Integer else None for n in lengths)
    return select.Request(
        spec=match.full_spec(),
        dtype=str(match.dtype).removeprefix("torch."),
        qk_dim=int(dims[0]),
        v_dim=int(dims[1]),
        capability=capability,
        grad_slots=tuple(i for i, g in enumerate(grads[3:]) if g),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        backward=any(grads),
        keys=size_hint(match, lengths[1]),
        queries=size_hint(match, lengths[0]),
        heads=size_hint(match, match.extent((*match.groups["batch"], *match.groups["heads"]))),
        facts=Facts(rows, cols),
        general=general,
    )
