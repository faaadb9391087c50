"""From a program and the facts about its operands to the text of a kernel.

Rendering has two stages. The first, here, resolves everything that depends on the score program: ``${ expression }``
and ``<% statement %>``. Its result, :class:`KernelSource`, is a Triton template whose remaining hooks
(``{{def_kernel}}``, ``{{size}}``, ``{{stride}}``, ``{{program_size}}``, ``{{store_output}}``) Inductor fills in when
it knows the operands; :mod:`fa_inductor.templates.standalone` fills them in for kernels that are launched or
compiled without Inductor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from fa_inductor.spec import CacheForm
from fa_inductor.templates import exp2
from fa_inductor.templates.configs import TileConfig
from fa_inductor.templates.score_codegen import DEVICE_FUNCTIONS, CaptureInfo

_HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Problem:
    """What is known about the operands when a kernel is rendered.

    Attributes:
        qk_dim, v_dim: head dims of q, k and of v.
        group: query heads per key head.
        captures: per slot, what is known of the captured tensor.
        wide_sizes: per run-time size n0, n1, ...: whether its value may leave int32.
        wide_tile: whether offsets inside one tile of q, k, v, out may leave int32.
        wide_captures: per slot, whether offsets over q_idx and kv_idx may leave int32.
        even_q, even_kv: whether the length is proven a multiple of 128.
        precision: ``ieee`` or ``tf32``; how float32 operands are multiplied.
        rows, cols: seqlen_q and seqlen_kv where they are numbers, else None.
        square: whether seqlen_q <= seqlen_kv is proven, so that every row has a key of its own index.
        sizes: values of the run-time sizes n0, n1, ... where they are numbers.
        tma: whether strides and alignment allow tensor descriptors (base and outer strides multiples of 16 bytes,
            innermost stride 1: CUDA driver API, cuTensorMapEncodeTiled).
        element: bytes of one operand element.
        cache: how k and v are stored where they are not [B, Hkv, N, D] in q's dtype (forward).
    """

    qk_dim: int
    v_dim: int
    group: int
    captures: tuple[CaptureInfo, ...] = ()
    wide_sizes: tuple[bool, ...] = ()
    wide_tile: bool = False
    wide_captures: tuple[bool, ...] = ()
    even_q: bool = False
    even_kv: bool = False
    precision: str = "ieee"
    rows: int | None = None
    cols: int | None = None
    square: bool = False
    sizes: tuple[int | None, ...] = ()
    tma: bool = False
    element: int = 2
    cache: CacheForm | None = None


@dataclass(frozen=True)
class KernelSource:
    """One rendered kernel.

    Attributes:
        name: unique and stable: kind of kernel and a hash of its text.
        text: second-stage template.
        arguments: names of the tensor arguments in order; those in ``outputs`` are written.
        outputs: names of the arguments that the kernel writes beside its main output.
        output_rank: dimensions of the main output.
        constants: constexpr name -> value.
        num_warps, num_stages: launch options.
    """

    name: str
    text: str
    arguments: tuple[str, ...]
    outputs: tuple[str, ...]
    output_rank: int
    constants: dict[str, Any] = field(hash=False)
    num_warps: int = 4
    num_stages: int = 2


def padded_dim(d: int) -> int:
    """Head dim inside the kernel: a power of two, at least the 16 that a tensor-core dot takes."""
    return max(16, 1 << (d - 1).bit_length())


def is_even(d: int) -> bool:
    """Whether a head dim needs no padding."""
    return padded_dim(d) == d


def _load_mask(*parts: Any) -> str:
    """Text of the mask argument of a load. ``parts`` is (needed, condition, even, condition) of rows and of columns."""
    rows_needed, rows, columns_even, columns = parts
    conditions = [f"({c})" for needed, c in ((rows_needed, rows), (not columns_even, columns)) if needed]
    return f", mask={' & '.join(conditions)}, other=0.0" if conditions else ""


@lru_cache(maxsize=1)
def _environment() -> Any:
    import jinja2

    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        undefined=jinja2.StrictUndefined,
        block_start_string="<%",
        block_end_string="%>",
        variable_start_string="${",
        variable_end_string="}",
        comment_start_string="<#",
        comment_end_string="#>",
        keep_trailing_newline=True,
        autoescape=False,
    )
    env.globals["load_mask"] = _load_mask
    return env


def render(template: str, functions: AbstractSet[str], context: dict[str, Any]) -> tuple[str, str]:
    """The second-stage text of ``template`` under ``context`` and a hash of it."""
    text = _environment().get_template(template).render(context)
    text = "\n".join(line.rstrip() for line in text.splitlines() if line.strip()) + "\n"
    text += "".join({**DEVICE_FUNCTIONS, **exp2.FUNCTIONS}[f] for f in sorted(functions))
    return text, hashlib.sha256(text.encode()).hexdigest()[:12]


def common_constants(problem: Problem, config: TileConfig) -> dict[str, Any]:
    """The constexprs that every kernel of a problem shares."""
    constants: dict[str, Any] = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "QK_DIM": problem.qk_dim,
        "V_DIM": problem.v_dim,
        "QK_PAD": padded_dim(problem.qk_dim),
        "V_PAD": padded_dim(problem.v_dim),
        "GROUP": problem.group,
        "PRECISION": f"'{problem.precision}'",
        "TILE_INDEX": "tl.int64" if problem.wide_tile else "tl.int32",
    }
    for i, wide in enumerate(problem.wide_captures):
        constants[f"CAP{i}_INDEX"] = "tl.int64" if wide else "tl.int32"
    for i, wide in enumerate(problem.wide_sizes):
        constants[f"SIZE{i}_DTYPE"] = "tl.int64" if wide else "tl.int32"
    return constants


def dense_strides(size: Sequence[Any], layout: str) -> list[Any]:
    """Strides of a dense [B, H, L, D], numbers or symbols, stored in the order that ``layout`` names."""
    _, h, length, d = size
    if layout == "bmhd":
        return [length * h * d, d, h * d, 1]
    return [h * length * d, length * d, d, 1]
