"""Which template runs a program on a device, and why one does not.

Order: the architecture's specialised form, the general form, decline. :func:`supports` is asked before a graph is
rewritten and again when the op is lowered; its reasons are what the report shows.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

from fa_inductor.bounds import Facts
from fa_inductor.expr import KV_IDX, Q_IDX, Load
from fa_inductor.spec import AttentionSpec
from fa_inductor.templates.backward import is_unique
from fa_inductor.templates.program import Program
from fa_inductor.templates.quantise import FORMATS
from fa_inductor.templates.score_codegen import ScorePrinter, Unprintable
from fa_inductor.templates.sm90 import form

#: Architectures with configurations; a device uses the newest one that is not newer than itself.
ARCHITECTURES = (80, 90, 100)
MAX_HEAD_DIM = 512
#: Program operands that the kernels read, by torch name.
DTYPES = ("float16", "bfloat16", "float32")


NO_FACTS = Facts()


@dataclass(frozen=True)
class Supported:
    """``template`` names what will run, for the report."""

    template: str


@dataclass(frozen=True)
class Unsupported:
    """Why no template runs the program."""

    reason: str


@dataclass(frozen=True)
class Request:
    """One attention to run.

    Attributes:
        spec: the program.
        dtype: of q, k and v, by torch name (``bfloat16``).
        qk_dim, v_dim: head dims.
        capability: CUDA compute capability.
        tma: whether strides allow tensor descriptors; None where it is not known yet.
        grad_slots: captures whose gradient is wanted.
        deterministic: whether torch.use_deterministic_algorithms is on.
        backward: whether the backward pass is asked for.
        keys, queries, heads: lengths and batch size times query heads, or the ones that run-time sizes were traced with;
            None where not known.
        facts: what is known of the lengths for certain.
        general: whether kernels for one architecture alone are left out.
    """

    spec: AttentionSpec
    dtype: str
    qk_dim: int
    v_dim: int
    capability: tuple[int, int]
    tma: bool | None = None
    grad_slots: tuple[int, ...] = ()
    deterministic: bool = False
    backward: bool = False
    keys: int | None = None
    queries: int | None = None
    heads: int | None = None
    facts: Facts = NO_FACTS
    general: bool = False


def architecture(capability: tuple[int, int]) -> int | None:
    """The entry of :data:`ARCHITECTURES` that serves a compute capability, None where none does."""
    number = capability[0] * 10 + capability[1]
    # sm_12x is a different line from sm_10x: it has no tensor memory, and runs the sm_80 forms.
    if number >= 120:
        return 80
    fitting = [a for a in ARCHITECTURES if a <= number]
    return fitting[-1] if fitting else None


def supports(request: Request) -> Supported | Unsupported:
    """Ask every template in order. Where the backward's is another than the forward's, both are named."""
    arch = architecture(request.capability)
    if arch is None:
        major, minor = request.capability
        return Unsupported(f"compute capability {major}.{minor} is older than 8.0, which the templates need")
    general = _general(request)
    if isinstance(general, Unsupported):
        return general
    tma = arch >= 90 and request.tma is not False and request.dtype != "float32"
    passes = [replace(request, backward=False), request]
    forward, backward = (f"sm{arch}-{'tma' if tma else 'pointer'}" if not_hopper(r) else HOPPER for r in passes)
    return Supported(forward if forward == backward else f"{forward}, backward {backward}")


def fp8_refusal(request: Request, format: str) -> str:
    """Why an attention does not run in FP8, "" where it does. ``format``: of templates.quantise.FORMATS."""
    major, minor = request.capability
    if (major, minor) < (8, 9):
        return f"compute capability {major}.{minor} has no FP8 units"
    if FORMATS[format].integer and major in (10, 11):
        # triton 3.6 compiles such products to mma.sync, past the tensor memory.
        return f"8-bit integers are slow on compute capability {major}.{minor}; 'e4m3-rotated' is not"
    if request.backward:
        return "gradients are wanted, and FP8 attention has none"
    if request.dtype not in ("bfloat16", "float16"):
        return f"operands are {request.dtype}"
    for dim in (request.qk_dim, request.v_dim):
        if dim % 16 or not 32 <= dim <= 256:
            return f"the head_dim {dim} is no multiple of 16 from 32 to 256"
    if request.spec.dropout_p:
        return "dropout is active"
    for name, length in (("queries", request.queries), ("keys", request.keys)):
        if length is not None and length < FP8_FEWEST:
            return f"{length} {name}: below {FP8_FEWEST} the cast costs more than FP8 saves"
    return ""


def fp8_supports(request: Request, format: str) -> Supported | Unsupported:
    """As :func:`supports`, for an attention in FP8."""
    reason = fp8_refusal(request, format)
    if reason:
        return Unsupported(reason)
    general = _general(request)
    if isinstance(general, Unsupported):
        return general
    if not not_hopper_fp8(request):
        return Supported(HOPPER_FP8)
    major, minor = request.capability
    arch = architecture(request.capability)
    return Supported(f"sm{major}{minor}-{'tma' if arch and arch >= 90 else 'pointer'}-fp8")


#: The name of the Gluon FP8 kernel for sm_90.
HOPPER_FP8 = "sm90-gluon-fp8"
#: Fewest queries and keys: below, reading and writing the operands for the cast takes as long as the attention.
FP8_FEWEST = 512


def not_hopper_fp8(request: Request) -> str:
    """Why the Gluon FP8 kernel does not run an attention that FP8 supports, "" where it does."""
    return not_hopper(replace(request, tma=True, backward=False), form.fp8_refusal)


#: The name of the Gluon kernels for sm_90. Forward and backward are chosen each for itself.
HOPPER = "sm90-gluon"


def not_hopper(request: Request, refusal: Callable[..., str] | None = None) -> str:
    """Why the Gluon kernels for Hopper do not run a pass, "" where they do. ``refusal``: of another kernel than theirs."""
    if request.general:
        return "kernel='general' was chosen"
    if request.capability != (9, 0) or os.environ.get("TRITON_OVERRIDE_ARCH"):
        return "the device is not sm_90"
    if request.tma is False:
        return "strides or addresses are no multiples of 16 bytes"
    queries, keys, heads = request.queries, request.keys, request.heads
    if queries is None or keys is None or heads is None:
        return "sizes are not known"
    rows, cols = request.facts.q_len, request.facts.kv_len
    spec = Program.under(request.spec, request.facts, rows is not None and cols is not None and rows <= cols).spec
    asked = (spec, request.dtype, request.qk_dim, request.v_dim, queries, keys, heads)
    if request.backward and refusal is None:
        return form.backward_refusal(*asked, request.grad_slots, request.deterministic)
    return (refusal or form.refusal)(*asked)


def _general(request: Request) -> Supported | Unsupported:
    """The template common/forward.py.jinja and its backward companions."""
    if request.dtype not in DTYPES:
        return Unsupported(f"operands are {request.dtype}; the templates take {', '.join(DTYPES)}")
    for name, dim in (("query and key", request.qk_dim), ("value", request.v_dim)):
        if not 1 <= dim <= MAX_HEAD_DIM:
            return Unsupported(f"the head_dim of {name} is {dim}; the templates take 1 to {MAX_HEAD_DIM}")
    try:
        printer = ScorePrinter()
        for e in request.spec.expressions:
            printer.emit(e)
    except Unprintable as e:
        return Unsupported(f"the score program has no Triton form: {e}")
    if request.backward:
        return _backward(request)
    return Supported("general")


def _backward(request: Request) -> Supported | Unsupported:
    loads = tuple(n for n in request.spec.loads() if isinstance(n, Load))
    atomic = [n for n in loads if n.slot in request.grad_slots and not is_unique(n, loads)]
    if request.deterministic and atomic:
        return Unsupported(
            f"torch.use_deterministic_algorithms(True) and the gradient of {atomic[0]} is summed with atomics"
        )
    per_score = [n for n in atomic if n.depends_on(Q_IDX) and n.depends_on(KV_IDX)]
    if per_score and request.keys is not None and request.keys <= FEW_KEYS:
        return Unsupported(
            f"the gradient of {per_score[0]} takes an atomic addition a score, which with {request.keys} keys costs more than"
            " fusing saves"
        )
    return Supported("general")


#: Windows of a Swin transformer (144 keys) trained at 0.82 of the speed of the unfused compiled model on an H200
#: (benchmarks/results/models_h200.json), T5's 4096 keys at 2.8 times it. Nothing in between was measured.
FEW_KEYS = 256
