"""The fused ops: schemas, shape functions, kernels, autograd and FLOP counts.

``flash_attention`` computes ``spec = AttentionSpec.parse(program)`` over q [B, Hq, M, Dqk], k [B, Hkv, N, Dqk] and
v [B, Hkv, N, Dv] (any strides) and returns out [B, Hq, M, Dv] and lse [B, Hq, M]; ``flash_attention_backward`` gives
the gradients of out. ``sizes`` are the values of the program's n0, n1, ... and ``kernel`` names who computes it:

* ``reference``: :mod:`fa_inductor.reference`, any program, any device;
* ``aten``: ATen's flash attention for CPU, for what :func:`fa_inductor.cpu_flash.supports` admits;
* ``triton``: lowered by Inductor to the best template for the device; ``general``: to the Triton templates that serve every
  architecture. Called outside a compiled graph both compute the reference.

``plain_attention`` is what a compiled graph calls in place of ``flash_attention`` for a program without masks, bias or
captures on CPU: the same results, without the layers of dispatch that autograd and ambient modes need.
``hopper_attention`` and ``hopper_attention_backward`` are the same for the forms of
:mod:`fa_inductor.templates.sm90.form` on Hopper GPUs, ``hopper_program_attention`` and ``hopper_program_backward`` for its
forward and program forms.

``dropout_seed(like)`` draws the (seed, offset) of one dropout, int64[2] on ``like``'s device, from torch's default
generator. It is made of ``aten::randint``, which graph passes know as random: two calls are never merged and the
partitioner saves the value for the backward instead of drawing again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import register_flop_formula

from fa_inductor import cpu_plain, reference
from fa_inductor.errors import ProgramError
from fa_inductor.expr import INDEX_NAMES, SIZE_NAMES, Sym
from fa_inductor.spec import AttentionSpec

NAMESPACE = "fa_inductor"
KERNELS = ("reference", "aten", "general", "triton")

_LIB = torch.library.Library(NAMESPACE, "DEF")
# Kernels take operands of any strides; without the tag Inductor would copy permuted and expanded ones first.
_TAGS = (torch.Tag.flexible_layout,)

_LIB.define(
    "flash_attention(Tensor q, Tensor k, Tensor v, Tensor[] captures, SymInt[] sizes, str program, str kernel)"
    " -> (Tensor out, Tensor lse)",
    tags=_TAGS,
)
_LIB.define(
    "flash_attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor[] captures,"
    " SymInt[] sizes, str program, str kernel, bool[] needs_grad) -> Tensor[]",
    tags=_TAGS,
)
_LIB.define(
    "hopper_attention(Tensor q, Tensor k, Tensor v, SymInt[] sizes, str program) -> (Tensor out, Tensor lse)", tags=_TAGS
)
_LIB.define(
    "hopper_program_attention(Tensor q, Tensor k, Tensor v, Tensor[] captures, SymInt[] sizes, str program)"
    " -> (Tensor out, Tensor lse)",
    tags=_TAGS,
)
_LIB.define(
    "hopper_attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, SymInt[] sizes,"
    " str program) -> (Tensor dq, Tensor dk, Tensor dv)",
    tags=_TAGS,
)
_LIB.define(
    "hopper_program_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor[] captures,"
    " SymInt[] sizes, str program, bool[] needs_grad) -> Tensor[]",
    tags=_TAGS,
)
_LIB.define("plain_attention(Tensor q, Tensor k, Tensor v, str program) -> (Tensor out, Tensor lse)", tags=_TAGS)
_LIB.define("dropout_seed(Tensor like) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))

flash_attention = torch.ops.fa_inductor.flash_attention.default
flash_attention_backward = torch.ops.fa_inductor.flash_attention_backward.default
hopper_attention = torch.ops.fa_inductor.hopper_attention.default
hopper_program_attention = torch.ops.fa_inductor.hopper_program_attention.default
hopper_attention_backward = torch.ops.fa_inductor.hopper_attention_backward.default
hopper_program_backward = torch.ops.fa_inductor.hopper_program_backward.default
plain_attention = torch.ops.fa_inductor.plain_attention.default
dropout_seed = torch.ops.fa_inductor.dropout_seed.default


# --------------------------------------------------------------------------------------------------------- validation
@lru_cache(maxsize=1024)
def _requirements(program: str) -> tuple[tuple[tuple[int, int, str, str], ...], int]:
    """What a program asks of its operands: (slot, rank, kind, text) of every load, and how many sizes it names."""
    spec = AttentionSpec.parse(program)
    loads = tuple((x.slot, len(x.index), x.kind, str(x)) for x in spec.loads())
    names = {n.name for e in spec.expressions for n in e.walk() if isinstance(n, Sym)} - {*INDEX_NAMES, *SIZE_NAMES}
    return loads, max((int(n[1:]) + 1 for n in names), default=0)


def check_operands(
    q: Tensor, k: Tensor, v: Tensor, captures: Sequence[Tensor], sizes: Sequence[int], program: str, kernel: str
) -> AttentionSpec:
    """The parsed program, checked against its operands; raises :class:`ProgramError` saying what does not fit."""
    spec = AttentionSpec.parse(program)
    if kernel not in KERNELS:
        raise ProgramError(f"unknown kernel {kernel!r}; known are {', '.join(KERNELS)}")
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != 4 or not t.dtype.is_floating_point:
            raise ProgramError(f"{name} must be a float tensor of 4 dimensions, got {t.dtype} {tuple(t.shape)}")
        if t.dtype != q.dtype or t.device != q.device:
            raise ProgramError(f"{name} is {t.dtype} on {t.device}, q is {q.dtype} on {q.device}; they must agree")
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    torch._check(k.shape[0] == q.shape[0], lambda: f"batch sizes differ: {shapes}")
    torch._check(v.shape[0] == q.shape[0], lambda: f"batch sizes differ: {shapes}")
    torch._check(k.shape[1] == v.shape[1], lambda: f"k and v have different head counts: {shapes}")
    torch._check(k.shape[2] == v.shape[2], lambda: f"k and v have different lengths: {shapes}")
    torch._check(k.shape[3] == q.shape[3], lambda: f"q and k have different head_dim: {shapes}")
    torch._check(
        q.shape[1] == k.shape[1] or q.shape[1] % k.shape[1] == 0,
        lambda: f"the query heads are not a multiple of the key heads: {shapes}",
    )
    loads, n_sizes = _requirements(program)
    if len(sizes) < n_sizes:
        raise ProgramError(f"the program names {n_sizes} sizes, {len(sizes)} are given: {program}")
    for slot, rank, kind, text in loads:
        if slot >= len(captures):
            raise ProgramError(f"{text} reads slot {slot}, but {len(captures)} tensors are captured")
        t = captures[slot]
        if t.dim() != rank or reference.capture_kind(t) != kind:
            raise ProgramError(f"{text} does not fit the captured tensor {t.dtype} {tuple(t.shape)}")
    if spec.dropout_p and (spec.seed_slot >= len(captures) or captures[spec.seed_slot].dtype != torch.int64):
        raise ProgramError(f"dropout needs an int64 tensor of two elements in slot {spec.seed_slot}")
    return spec


# ------------------------------------------------------------------------------------------------------------ forward
def _autocast_keys() -> Any:
    keys = [key for name, key in torch._C.DispatchKey.__members__.items() if name.startswith("Autocast")]
    return reduce(or_, (torch._C.DispatchKeySet(key) for key in keys))


_INCLUDE = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.ADInplaceOrView
)
_EXCLUDE = _autocast_keys()


@contextmanager
def _own_context() -> Iterator[None]:
    """Runs a kernel's body as if it were called on its own, whatever the caller's modes.

    Ambient autocast would reach the matmuls inside, while the program already says which dtype each operand has; a
    dispatch mode would see the kernel's inner ops, and disables functorch's keys, which the reference's backward needs.
    """
    include = torch._C._dispatch_tls_local_include_set() & _INCLUDE  # without ADInplaceOrView in inference mode
    with _disable_current_modes(), torch._C._ForceDispatchKeyGuard(include, _EXCLUDE), torch.no_grad():
        yield


def _flash_attention(
    q: Tensor, k: Tensor, v: Tensor, captures: list[Tensor], sizes: list[int], program: str, kernel: str
) -> tuple[Tensor, Tensor]:
    with _own_context():
        spec = check_operands(q, k, v, captures, sizes, program, kernel)
        if kernel == "aten":
            from fa_inductor import cpu_flash

            return cpu_flash.forward(q, k, v, captures, sizes, spec)
        return reference.attention(q, k, v, captures, sizes, spec)


def _plain_attention(q: Tensor, k: Tensor, v: Tensor, program: str) -> tuple[Tensor, Tensor]:
    # Called by compiled code between two large products, where each microsecond of Python shows: the context, the
    # checks and the general path are for the rare cases only. Autocast knows none of the ops that the plain path uses.
    if torch._C._len_torch_dispatch_stack() == 0 and cpu_plain.fits(q, k, v):
        plain = cpu_plain.forward(q, k, v, program)
        if plain is not None:
            return plain
    return _flash_attention(q, k, v, [], [], program, "aten")


def _plain_attention_fake(q: Tensor, k: Tensor, v: Tensor, program: str) -> tuple[Tensor, Tensor]:
    return _flash_attention_fake(q, k, v, [], [], program, "aten")


def _hopper_attention(q: Tensor, k: Tensor, v: Tensor, sizes: list[int], program: str) -> tuple[Tensor, Tensor]:
    if q.numel() == 0 or k.numel() == 0 or v.numel() == 0:
        return _flash_attention(q, k, v, [], sizes, program, "reference")
    from fa_inductor.templates.sm90.launch import attention

    return attention(q, k, v, sizes, program)


def _hopper_attention_fake(q: Tensor, k: Tensor, v: Tensor, sizes: list[int], program: str) -> tuple[Tensor, Tensor]:
    return _flash_attention_fake(q, k, v, [], sizes, program, "triton")


def _hopper_program_attention(
    q: Tensor, k: Tensor, v: Tensor, captures: list[Tensor], sizes: list[int], program: str
) -> tuple[Tensor, Tensor]:
    if q.numel() == 0 or k.numel() == 0 or v.numel() == 0:
        return _flash_attention(q, k, v, captures, sizes, program, "reference")
    from fa_inductor.templates.sm90.launch import program_attention

    return program_attention(q, k, v, captures, sizes, program)


def _hopper_program_attention_fake(
    q: Tensor, k: Tensor, v: Tensor, captures: list[Tensor], sizes: list[int], program: str
) -> tuple[Tensor, Tensor]:
    return _flash_attention_fake(q, k, v, captures, sizes, program, "triton")


def _empty(like: Tensor, shape: Sequence[int], layout: str, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised [B, H, M, D] tensor stored in the order that ``layout`` names."""
    b, h, m, d = shape
    if layout == "bmhd":
        return like.new_empty((b, m, h, d), dtype=dtype).transpose(1, 2)
    return like.new_empty((b, h, m, d), dtype=dtype)


def _flash_attention_fake(
    q: Tensor, k: Tensor, v: Tensor, captures: list[Tensor], sizes: list[int], program: str, kernel: str
) -> tuple[Tensor, Tensor]:
    spec = check_operands(q, k, v, captures, sizes, program, kernel)
    batch, heads, rows, _ = q.shape
    out = _empty(q, (batch, heads, rows, v.shape[3]), spec.layout)
    return out, q.new_empty((batch, heads, rows), dtype=torch.float32)


# ----------------------------------------------------------------------------------------------------------- backward
class _BackwardCall(NamedTuple):
    """Arguments of ``flash_attention_backward``."""

    grad_out: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    captures: list[Tensor]
    sizes: list[int]
    program: str
    kernel: str
    needs_grad: list[bool]

    def checked(self) -> AttentionSpec:
        _check_needs_grad(self.captures, self.needs_grad)
        return check_operands(self.q, self.k, self.v, self.captures, self.sizes, self.program, self.kernel)


def _flash_attention_backward(*args: Any) -> list[Tensor]:
    call = _BackwardCall(*args)
    spec = call.checked()
    operands = call.grad_out, call.q, call.k, call.v
    with _own_context():
        if call.kernel == "aten":
            from fa_inductor import cpu_flash

            grads = cpu_flash.backward(*operands, call.out, call.lse, call.captures, call.sizes, spec, call.needs_grad)
        else:
            grads = reference.attention_grads(*operands, call.captures, call.sizes, spec, call.needs_grad)
    return returned(grads, call.q, spec)


def returned(grads: Sequence[Tensor | None], q: Tensor, spec: AttentionSpec) -> list[Tensor]:
    """Gradients as ``flash_attention_backward`` returns them: laid out as its shape function says, empty where there is none."""
    return [
        q.new_empty(0) if g is None else reference.with_layout(g, spec.layout) if i < 3 else g.contiguous()
        for i, g in enumerate(grads)
    ]


def _check_needs_grad(captures: Sequence[Tensor], needs_grad: Sequence[bool]) -> None:
    if len(needs_grad) != 3 + len(captures):
        raise ProgramError(f"needs_grad must have 3 + {len(captures)} entries, got {len(needs_grad)}")
    for i, (t, need) in enumerate(zip(captures, needs_grad[3:], strict=True)):
        if need and not t.dtype.is_floating_point:
            raise ProgramError(f"captured tensor {i} is {t.dtype} and has no gradient")


def _flash_attention_backward_fake(*args: Any) -> list[Tensor]:
    call = _BackwardCall(*args)
    spec = call.checked()
    result = []
    for i, (t, need) in enumerate(zip([call.q, call.k, call.v, *call.captures], call.needs_grad, strict=True)):
        if not need:
            result.append(call.q.new_empty(0))
        elif i < 3:
            result.append(_empty(t, t.shape, spec.layout))
        else:
            result.append(t.new_empty(t.shape))
    return result


def _hopper_attention_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sizes: list[int], program: str
) -> tuple[Tensor, Tensor, Tensor]:
    if q.numel() == 0 or k.numel() == 0 or v.numel() == 0:
        dq, dk, dv = _flash_attention_backward(
            grad_out, q, k, v, out, lse, [], sizes, program, "reference", [True, True, True]
        )
        return dq, dk, dv
    from fa_inductor.templates.sm90.backward_launch import attention_backward

    return attention_backward(grad_out, q, k, v, out, lse, sizes, program)


def _hopper_attention_backward_fake(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sizes: list[int], program: str
) -> tuple[Tensor, Tensor, Tensor]:
    layout = check_operands(q, k, v, [], sizes, program, "triton").layout
    return _empty(q, q.shape, layout), _empty(k, k.shape, layout), _empty(v, v.shape, layout)


def _hopper_program_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    captures: list[Tensor],
    sizes: list[int],
    program: str,
    needs_grad: list[bool],
) -> list[Tensor]:
    if q.numel() == 0 or k.numel() == 0 or v.numel() == 0:
        return _flash_attention_backward(
            grad_out, q, k, v, out, lse, captures, sizes, program, "reference", needs_grad
        )  # fmt: skip
    from fa_inductor.templates.sm90.backward_launch import program_backward

    _check_needs_grad(captures, needs_grad)
    with _own_context():
        grads = program_backward(grad_out, q, k, v, out, lse, captures, sizes, program, needs_grad[3:])
    return [q.new_empty(0) if g is None or not need else g for g, need in zip(grads, needs_grad, strict=True)]


def _hopper_program_backward_fake(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    captures: list[Tensor],
    sizes: list[int],
    program: str,
    needs_grad: list[bool],
) -> list[Tensor]:
    return _flash_attention_backward_fake(
        grad_out, q, k, v, out, lse, captures, sizes, program, "triton", needs_grad
    )  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- autograd
def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, captures, sizes, program, kernel = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse, *captures)
    ctx.sizes, ctx.program, ctx.kernel = sizes, program, kernel


def _backward(ctx: Any, grad_out: Tensor | None, _grad_lse: Tensor | None) -> tuple:
    q, k, v, out, lse, *captures = ctx.saved_tensors
    needs = [*ctx.needs_input_grad[:3], *(ctx.needs_input_grad[3] if captures else ())]
    grads: list[Tensor | None] = [None] * len(needs)
    if grad_out is not None and any(needs):
        computed = torch.ops.fa_inductor.flash_attention_backward(
            grad_out, q, k, v, out, lse, captures, ctx.sizes, ctx.program, ctx.kernel, needs
        )
        grads = [g if need else None for g, need in zip(computed, needs, strict=True)]
    # torch matches the structure of what comes back with the inputs': a list of numbers is one leaf, an empty list a
    # list.
    return (*grads[:3], grads[3:], None if ctx.sizes else [], None, None)


def _setup_nothing(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    pass


def _no_double_backward(ctx: Any, *_grads: Any) -> tuple:
    raise NotImplementedError(
        "fa_inductor::flash_attention has no second derivative: run the model without backend='fa_inductor' where "
        "gradients of gradients are needed"
    )


# ------------------------------------------------------------------------------------------------------- registration
_LIB.impl("flash_attention", _flash_attention, "CompositeExplicitAutograd")
_LIB.impl("hopper_attention", _hopper_attention, "CUDA")
_LIB.impl("hopper_program_attention", _hopper_program_attention, "CUDA")
_LIB.impl("hopper_attention_backward", _hopper_attention_backward, "CUDA")
_LIB.impl("hopper_program_backward", _hopper_program_backward, "CUDA")
_LIB.impl("plain_attention", _plain_attention, "CPU")
_LIB.impl("flash_attention_backward", _flash_attention_backward, "CompositeExplicitAutograd")
torch.library.register_fake(flash_attention, _flash_attention_fake, lib=_LIB)
torch.library.register_fake(hopper_attention, _hopper_attention_fake, lib=_LIB)
torch.library.register_fake(hopper_program_attention, _hopper_program_attention_fake, lib=_LIB)
torch.library.register_fake(hopper_attention_backward, _hopper_attention_backward_fake, lib=_LIB)
torch.library.register_fake(hopper_program_backward, _hopper_program_backward_fake, lib=_LIB)
torch.library.register_fake(plain_attention, _plain_attention_fake, lib=_LIB)
torch.library.register_fake(flash_attention_backward, _flash_attention_backward_fake, lib=_LIB)
torch.library.register_autograd(flash_attention, _backward, setup_context=_setup_context, lib=_LIB)
torch.library.register_autograd(flash_attention_backward, _no_double_backward, setup_context=_setup_nothing, lib=_LIB)


def _dropout_seed(like: Tensor) -> Tensor:
    return torch.randint(0, 2**62, (2,), dtype=torch.int64, device=like.device)


_LIB.impl("dropout_seed", _dropout_seed, "CompositeImplicitAutograd")


# ---------------------------------------------------------------------------------------------------------------- FLOPs
def _products(q_shape: Sequence[int], k_shape: Sequence[int]) -> int:
    batch, heads, rows, _ = q_shape
    return 2 * batch * heads * rows * k_shape[2]


_FORWARDS = ("flash_attention", "plain_attention", "hopper_attention", "hopper_program_attention")


@register_flop_formula([getattr(torch.ops.fa_inductor, name) for name in _FORWARDS])
def _forward_flops(
    q: Sequence[int], k: Sequence[int], v: Sequence[int], *args: Any, out_shape: Any = None, **kw: Any
) -> int:
    """q k^T and p v, masks not counted, as torch counts scaled_dot_product_attention."""
    return _products(q, k) * (q[3] + v[3])


_BACKWARDS = ("flash_attention_backward", "hopper_attention_backward", "hopper_program_backward")


@register_flop_formula([getattr(torch.ops.fa_inductor, name) for name in _BACKWARDS])
def _backward_flops(
    grad: Sequence[int],
    q: Sequence[int],
    k: Sequence[int],
    v: Sequence[int],
    *args: Any,
    out_shape: Any = None,
    **kw: Any,
) -> int:
    """q k^T again, dp = do v^T, dv = p^T do, dq = ds k, dk = ds^T q."""
    return _products(q, k) * (3 * q[3] + 2 * v[3])
