"""Compile one kernel for an NVIDIA architecture that need not be present, and report what came out.

Shared by ``aot_table.py`` and the tests. One compile a process: a compile for an architecture that the source does not fit
can abort. :func:`compiled` starts this file as a program once, which has imported everything and copies itself for each
compile; its input on stdin are pickled requests, its output a line of JSON for each.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import json
import math
import os
import pickle
import re
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fa_inductor.spec import AttentionSpec
from fa_inductor.templates import backward, forward, quantise
from fa_inductor.templates.configs import TileConfig
from fa_inductor.templates.program import Program
from fa_inductor.templates.rendering import KernelSource, Problem
from fa_inductor.templates.sm90.backward_launch import BackwardConfig
from fa_inductor.templates.sm90.fp8_launch import Fp8Config
from fa_inductor.templates.sm90.launch import GluonConfig
from fa_inductor.templates.standalone import Known

#: Largest shared memory of one program, bytes: 163 KiB, 99 KiB and 227 KiB. CUDA C++ programming guide, table "Technical
#: Specifications per Compute Capability", row "Maximum amount of shared memory per thread block".
SHARED_LIMIT = {
    80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 103: 227 * 1024, 120: 99 * 1024
}  # fmt: skip

_INSTRUCTIONS = {
    "mma.sync": r"\bmma\.sync", "fp8": r"mma\S*e4m3|kind::f8f6f4",
    "int8": r"mma\S*\.s8|kind::i8", "cp.async": r"cp\.async\.c[ag]", "wgmma": r"wgmma\.mma_async",
    "tcgen05": r"tcgen05\.mma", "bulk_load": r"cp\.async\.bulk\.tensor\.\dd\.shared",
    "saturating_cast": r"cvt\.rn\.satfinite\.e4m3x2", "trap": r"^\s*trap;", "ex2": r"ex2\.approx",
}  # fmt: skip


@dataclass(frozen=True)
class Request:
    """A kernel, a target, the type of each pointer argument (``bf16``, ``fp32``, ``i64``, ...) and known sizes."""

    kernel: KernelSource
    arch: int
    pointers: dict[str, str]
    out: str
    known: Known = ()


def render(program: str, problem: Problem, which: str, config: TileConfig, slots: tuple[int, ...] = ()) -> KernelSource:
    """The kernel of one pass (``forward``, ``fp8``, ``dkdv``, ``dq``, ``rows``); ``slots``: captures whose gradient dq computes."""
    spec = AttentionSpec.parse(program)
    if which == "fp8":
        return forward.forward_kernel(spec, quantise.fp8_problem(problem), config, fp8=True)
    if which == "forward":
        return forward.forward_kernel(spec, problem, config)
    if which == "dq":
        return backward.dq_kernel(spec, problem, config, slots)
    return {"dkdv": backward.dkdv_kernel, "rows": backward.rows_kernel}[which](spec, problem, config)


def request(
    arch: int, kernel: KernelSource, element: str = "bf16", scores: str = "fp8e4nv", **captures: str
) -> Request:
    """A request for a rendered kernel; ``captures`` gives the type of each ``CAP<i>``, ``scores`` that of FP8 q and k."""
    pointers = {a: "fp32" if a[:3] in ("LSE", "DEL", "ROW", "GRA") else element for a in kernel.arguments}
    if "QS" in kernel.arguments:
        pointers |= {"Q": scores, "K": scores, "V": "fp8e4nv", "QS": "fp32", "KS": "fp32", "VS": "fp32"}
    pointers |= {name: kind for name, kind in captures.items() if name in kernel.arguments}
    for name, kind in captures.items():
        summaries = {f"{end}{name[3:]}": "i8" if kind == "i1" else kind for end in ("LOW", "TOP")}
        pointers |= {n: x for n, x in summaries.items() if n in kernel.arguments}
    return Request(kernel, arch, pointers, "fp32" if kernel.output_rank == 3 else element)


class CompileError(Exception):
    """A compiler gave up; the message ends with the last lines that it printed."""


def compiled(asked: Request | GluonRequest | CastRequest, timeout: float = 250) -> dict[str, Any]:
    """What :func:`report` says of a kernel, compiled in a process of its own; raises CompileError where that fails."""
    answer = _server().ask(asked, timeout)
    if isinstance(answer, str):
        raise CompileError(answer)
    return answer


class _Server:
    """A process without threads that has imported torch and triton (2 s) and makes a copy of itself for each compile."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks._aot"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        atexit.register(self.process.communicate)  # the end of its input is its own

    def ask(self, asked: Request | GluonRequest | CastRequest, timeout: float) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        pickle.dump((asked, timeout), self.process.stdin)
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            _server.cache_clear()
            return f"the compiling process ended with status {self.process.wait()}"
        return json.loads(line)


@functools.lru_cache(maxsize=1)
def _server() -> _Server:
    return _Server()


def _serve() -> None:
    """The program: ends with its input."""
    # What compilers print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    while True:
        try:
            asked, timeout = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer: Any = forked(asked, timeout)
        except CompileError as e:
            answer = str(e)
        print(json.dumps(answer), file=answers, flush=True)


def forked(asked: Request | GluonRequest | CastRequest, timeout: float = 250) -> dict[str, Any]:
    """As :func:`compiled`, in a copy of this process. Not for a process with threads."""
    import triton.compiler  # noqa: F401

    with tempfile.TemporaryDirectory(prefix="fa_inductor_aot_") as folder, tempfile.TemporaryFile() as said:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            os.setpgid(0, 0)  # with its ptxas, should it take too long
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            try:
                os.environ["TRITON_CACHE_DIR"] = tempfile.tempdir = folder
                answer = json.dumps(BY_NAME[type(asked).__name__](asked))
            except BaseException:  # nothing may run on in the copy
                answer = json.dumps(traceback.format_exc()[-3000:])
            with open(writer, "w") as f:
                f.write(answer)
            os._exit(0)
        os.close(writer)
        with open(reader) as f:
            text = f.read() if select.select([f], [], [], timeout)[0] else None
        if text is None:
            os.killpg(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        if text is None:
            raise CompileError(f"longer than {timeout:.0f} s")
        said.seek(0)
        last = said.read()[-2000:].decode(errors="replace")
    found = json.loads(text) if text else f"{last}\nthe compiler ended with status {status}"
    if isinstance(found, str):
        raise CompileError(found)
    return found


@dataclass(frozen=True)
class GluonRequest:
    """A Gluon kernel for sm_90, by its configuration the forward, the FP8 forward or the backward: padded head dims, what the
    program has, whether q and k of the FP8 forward are integers.

    ``program``: of a forward or backward with text of its own, which also says where it has a band and a softcap; ``captures``:
    type of the elements and sizes of each captured tensor, of 16 heads and 4 batches.
    """

    qk_dim: int
    v_dim: int
    config: GluonConfig | BackwardConfig | Fp8Config
    even: bool = True
    has_low: bool = False
    has_high: bool = False
    softcap: bool = False
    deterministic: bool = False
    integer: bool = False
    program: str = ""
    captures: tuple[tuple[str, tuple[int, ...]], ...] = ()
    length: int = 4096


def compile_gluon(request: GluonRequest) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    kinds: dict[type, Callable[..., Any]] = {BackwardConfig: _gluon_backward, GluonConfig: _gluon_forward, Fp8Config: _gluon_fp8}
    described = kinds[type(request.config)]
    kernel, signature, constants = described(request, request.config)
    if not request.program:
        constants.update(EVEN=request.even, HAS_LOW=request.has_low, HAS_HIGH=request.has_high, SOFTCAP=request.softcap)
    names = kernel.arg_names
    types = {n: "constexpr" if n in constants else signature.get(n, "i32") for n in names}
    source = GluonASTSource(
        fn=kernel, signature=types, constexprs={(names.index(n),): x for n, x in constants.items()}, attrs={}
    )
    said = io.StringIO()
    knobs = triton.knobs.nvidia
    logged = hasattr(knobs, "dump_ptxas_log")
    if logged:
        knobs.dump_ptxas_log = True
    with contextlib.redirect_stdout(said):
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    remarks = said.getvalue() if logged else assembler_says(compiled.asm["ptx"])
    assert "registers" in remarks, remarks
    return {**report(compiled), "assembler": remarks}


def _descriptor(element: str, *block: int) -> str:
    """The type of a descriptor of tiles of bf16, fp32, fp8e4nv or i8."""
    from triton.experimental.gluon import language as gl

    types = {"bf16": gl.bfloat16, "fp32": gl.float32, "fp8e4nv": gl.float8e4nv, "i8": gl.int8}
    layout = gl.NVMMASharedLayout.get_default_for(list(block), types[element])
    return f"tensordesc<{element}{list(block)},{layout!r}>"


def _gluon_forward(request: GluonRequest, c: GluonConfig) -> tuple[Any, dict[str, str], dict[str, Any]]:
    """(kernel, types of the arguments that are no i32, constants)."""
    from fa_inductor.templates.sm90 import launch

    d, dv = request.qk_dim, request.v_dim
    tiles = {"q": (64, d), "k": (c.keys, d), "v": (c.keys, dv), "o": (64, dv)}
    signature = {f"{name}_desc": _descriptor("bf16", 1, 1, *tile) for name, tile in tiles.items()}
    signature |= {"lse": "*fp32", "counter": "*i32", "scale": "fp32", "cap": "fp32"}
    if not request.program:
        flags = {"EVEN": request.even, "HAS_LOW": request.has_low, "HAS_HIGH": request.has_high, "SOFTCAP": request.softcap}
        kernel, constants = launch.kernel_of(c, d, dv, None, {**flags, "DEAD_ZERO": False})
        return kernel, signature, constants | {name: None for name in ("captures", "ranges") if name in kernel.arg_names}
    from fa_inductor.templates.sm90.form import forward_form_of
    from fa_inductor.templates.sm90.forward_source import forward_source_of

    spec, problem, strides = _operands(request)
    source, form = forward_source_of(spec, problem, strides), forward_form_of(Program.of(spec, problem).spec)
    assert not isinstance(form, str), form
    more, absent = _named(request, source)
    flags = {"EVEN": request.length % c.keys == 0, "DEAD_ZERO": False, **_ends(form)}
    kernel, constants = launch.kernel_of(c, d, dv, source, flags)
    return kernel, signature | more, constants | absent


def _gluon_fp8(request: GluonRequest, c: Fp8Config) -> tuple[Any, dict[str, str], dict[str, Any]]:
    """As :func:`_gluon_forward`."""
    from fa_inductor.templates.sm90 import fp8_launch
    from fa_inductor.templates.sm90.gluon_fp8 import fp8_forward

    d, dv = request.qk_dim, request.v_dim
    tiles = {"q": (64, d), "k": (c.keys, d), "v": (dv, c.keys)}
    kinds = {"q": "i8", "k": "i8"} if request.integer else {}
    signature = {f"{name}_desc": _descriptor(kinds.get(name, "fp8e4nv"), 1, 1, *tile) for name, tile in tiles.items()}
    signature |= {"o_desc": _descriptor("bf16", 1, 1, 64, dv), "counter": "*i32", "scale": "fp32", "cap": "fp32"}
    signature |= dict.fromkeys(("lse", "q_scales", "k_scales", "v_scales"), "*fp32")
    return fp8_forward, signature, {**fp8_launch.constants(c), "DEAD_ZERO": False, "SCALE_KEYS": quantise.SCALE_KEYS}


def _gluon_backward(request: GluonRequest, c: BackwardConfig) -> tuple[Any, dict[str, str], dict[str, Any]]:
    """As :func:`_gluon_forward`."""
    from fa_inductor.templates.sm90 import backward_launch
    from fa_inductor.templates.sm90.gluon_backward import flash_backward
    from fa_inductor.templates.sm90.gluon_backward_wide import flash_backward_wide

    d, dv = c.width(request.qk_dim), c.width(request.v_dim)
    tiles = {"q": (c.rows, d), "do": (c.rows, dv), "k": (64, d), "v": (64, dv), "dk": (64, d), "dv": (64, dv)}
    signature = {f"{name}_desc": _descriptor("bf16", 1, 1, *tile) for name, tile in tiles.items()}
    signature |= {name: _descriptor("fp32", 1, c.rows) for name in ("lse_desc", "delta_desc")}
    signature["dq_desc"] = _descriptor("fp32", 64, c.dq_columns(request.qk_dim))
    signature |= {"scale": "fp32", "cap": "fp32"}
    constants = {**c.constants(request.deterministic), "SKIP": True}
    if request.deterministic:
        signature["turns"] = "*i32"
    else:
        constants["turns"] = None
    if request.program:
        kernel, more, flags = _program(request, c)
        return kernel, signature | more, constants | flags
    if not c.wide:
        constants |= {"captures": None, "ranges": None, **backward_launch.NO_PROGRAM}
    return flash_backward_wide if c.wide else flash_backward, signature, constants


def _operands(request: GluonRequest) -> tuple[AttentionSpec, Problem, list[list[int]]]:
    """The program, its operands and the captured tensors' strides."""
    from fa_inductor.templates.score_codegen import CaptureInfo

    spec, n = AttentionSpec.parse(request.program), request.length
    extents = {"b": 4, "h": 16, "q_idx": n, "kv_idx": n}
    infos = tuple(
        CaptureInfo(len(sizes), tuple(frozenset(k for k, e in extents.items() if s >= e) for s in sizes), sizes)
        for _, sizes in request.captures
    )
    problem = Problem(
        request.qk_dim, request.v_dim, 1, infos, wide_captures=(False,) * len(infos), even_q=n % 128 == 0,
        even_kv=n % 128 == 0, rows=n, cols=n, square=True, tma=True,
    )  # fmt: skip
    return spec, problem, [[math.prod(sizes[d + 1 :]) for d in range(len(sizes))] for _, sizes in request.captures]


def _named(request: GluonRequest, source: Any) -> tuple[dict[str, Any], dict[str, None]]:
    """(types of ``captures`` and ``ranges`` of a program's text, those that it has not)."""
    types = {f"CAP{i}": f"*{kind}" for i, (kind, _) in enumerate(request.captures)}
    given = {"ranges": "*i32" if source.ranges else None, "captures": tuple(types.get(a, "i32") for a in source.arguments)}
    return {k: x for k, x in given.items() if x}, {k: None for k, x in given.items() if not x}


def _ends(form: Any) -> dict[str, bool]:
    return {"HAS_LOW": bool(form.lows), "HAS_HIGH": bool(form.highs), "SOFTCAP": form.softcap is not None}


def _program(request: GluonRequest, c: BackwardConfig) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """As :func:`_gluon_backward`, of what a program adds."""
    from fa_inductor.templates.sm90.form import program_form_of
    from fa_inductor.templates.sm90.program_source import gluon_kernel, source_of

    spec, problem, strides = _operands(request)
    source, form, n = source_of(spec, problem, strides), program_form_of(spec), request.length
    assert not isinstance(form, str), form
    flags: dict[str, Any] = {
        "EVEN": n % 128 == 0, "EVEN_Q": n % c.rows == 0, **_ends(form), "PROGRAM": not source.plain, "MASKED": source.masked,
        "SELECT": source.select, "SKIP": source.skip is not False,
    }  # fmt: skip
    signature, absent = _named(request, source)
    return gluon_kernel(source), signature, flags | absent


def assembler_says(ptx: str) -> str:
    """ptxas's remarks on a kernel for sm_90a, such as that it serialises wgmma, for a triton that keeps them to itself."""
    import triton

    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "ptxas")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.ptx")
        with open(path, "w") as f:
            f.write(ptx)
        command = [tool, "-v", "--gpu-name=sm_90a", path, "-o", os.path.join(folder, "kernel.cubin")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def compile_kernel(request: Request) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fa_inductor.templates import standalone

    function, complete = standalone.load(request.kernel, request.known)
    types = {**request.pointers, standalone.OUTPUT: request.out}
    signature: dict[str, str] = {}
    constants: dict[tuple[int], int] = {}
    attributes: dict[tuple[int], list] = {}
    scalars = dict(zip(function.arg_names[len(request.kernel.arguments) + 1 :], complete.scalars, strict=True))
    for i, name in enumerate(function.arg_names):
        if name in types:
            signature[name] = "*" + types[name]
            attributes[(i,)] = [["tt.divisibility", 16]]
            continue
        tensor, what, dim = scalars[name]
        if what == "stride" and tensor in ("Q", "K", "V", "DO", standalone.OUTPUT) and dim == 3:
            signature[name] = "constexpr"
            constants[(i,)] = 1
        else:
            signature[name] = "i32"
            if tensor and not (tensor == "Q" and what == "size" and dim == 1):
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": request.kernel.num_warps, "num_stages": request.kernel.num_stages}
    return report(triton.compile(source, target=GPUTarget("cuda", request.arch, 32), options=options))


@dataclass(frozen=True)
class CastRequest:
    """The kernel that casts q, k and v of one head dim to FP8, or that projects to them, for an architecture."""

    arch: int
    dim: int
    format: str
    projects: bool = False


def compile_cast(request: CastRequest) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fa_inductor.templates import projection
    from fa_inductor.templates.common.projection import project
    from fa_inductor.templates.common.quantise import quantise as cast

    scores = "*i8" if quantise.FORMATS[request.format].integer else "*fp8e4nv"
    types = {"q8": scores, "k8": scores, "v8": "*fp8e4nv"} | dict.fromkeys(("q_scale", "k_scale", "v_scale"), "*fp32")
    dim, format = request.dim, request.format
    if request.projects:
        kernel, strides = project, ("features", "xb", "xm", "q_row", "k_row", "v_row")
        types |= dict.fromkeys(("x", "wq", "wk", "wv", "bq", "bk", "bv"), "*bf16")
        tma = request.arch in (90, 100)
        heads = projection.together(32, 8, dim, dim, request.arch if tma else None)
        constants = projection.constants(dim, dim, format, bias=True, tma=tma, heads=heads)
        options = projection.options(dim, dim, heads)
    else:
        kernel, strides = cast, ("qb", "qh", "qm", "kb", "kh", "kn", "vb", "vh", "vn")
        types |= dict.fromkeys("qkv", "*bf16")
        constants = quantise.constants(dim, dim, format) | {"qd": 1, "kd": 1, "vd": 1}
        options = {"num_warps": quantise.warps(dim, dim)}
    names = kernel.arg_names
    aligned = [*types, *strides]
    source = ASTSource(
        fn=kernel,
        signature={n: "constexpr" if n in constants else types.get(n, "i32") for n in names},
        constexprs={(names.index(n),): x for n, x in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    return report(triton.compile(source, target=GPUTarget("cuda", request.arch, 32), options=options))


def report(compiled: Any) -> dict[str, Any]:
    """Shared and tensor memory, registers, stack and instruction counts of a compiled kernel."""
    import triton

    ptx = compiled.asm["ptx"]
    result: dict[str, Any] = {
        "shared": compiled.metadata.shared,
        "tmem": getattr(compiled.metadata, "tmem_size", 0) or 0,
        "instructions": {n: len(re.findall(p, ptx, re.MULTILINE)) for n, p in _INSTRUCTIONS.items()},
    }
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(compiled.asm["cubin"])
        f.flush()
        usage = subprocess.run([tool, "-res-usage", f.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage.stdout + usage.stderr)
    assert found is not None, usage.stdout + usage.stderr
    result.update(registers=int(found[1]), stack=int(found[2]), local=int(found[3]))
    return result


#: By name: what was pickled names the module by its import path, not as __main__.
BY_NAME: dict[str, Callable[[Any], dict[str, Any]]] = {
    "Request": compile_kernel, "GluonRequest": compile_gluon, "CastRequest": compile_cast
}  # fmt: skip


if __name__ == "__main__":
    # The classes that a pickle names are those of the imported module.
    from benchmarks import _aot

    _aot._serve()
