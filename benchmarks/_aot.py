"""Compile one kernel for an NVIDIA architecture that need not be present, and report what came out.

Shared by ``aot_table.py`` and the tests. :func:`compiled` runs this file as a program, one compile a process: a compile
for an architecture that the source does not fit can abort. Its input on stdin is a pickled :class:`Request`,
:class:`GluonRequest` or :class:`GluonBackwardRequest`, its output JSON.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fa_inductor.spec import AttentionSpec
from fa_inductor.templates import backward, forward
from fa_inductor.templates.configs import TileConfig
from fa_inductor.templates.rendering import KernelSource, Problem
from fa_inductor.templates.sm90.backward_launch import BackwardConfig
from fa_inductor.templates.sm90.launch import GluonConfig
from fa_inductor.templates.standalone import Known

#: Largest shared memory of one program, bytes: 163 KiB, 99 KiB and 227 KiB. CUDA C++ programming guide, table "Technical
#: Specifications per Compute Capability", row "Maximum amount of shared memory per thread block".
SHARED_LIMIT = {
    80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 103: 227 * 1024, 120: 99 * 1024
}  # fmt: skip

_INSTRUCTIONS = {
    "mma.sync": r"\bmma\.sync", "cp.async": r"cp\.async\.c[ag]", "wgmma": r"wgmma\.mma_async",
    "tcgen05": r"tcgen05\.mma", "bulk_load": r"cp\.async\.bulk\.tensor\.\dd\.shared",
    "trap": r"^\s*trap;", "ex2": r"ex2\.approx",
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
    """The kernel of one pass (``forward``, ``dkdv``, ``dq`` or ``rows``); ``slots``: captures whose gradient dq computes."""
    spec = AttentionSpec.parse(program)
    if which == "forward":
        return forward.forward_kernel(spec, problem, config)
    if which == "dq":
        return backward.dq_kernel(spec, problem, config, slots)
    return {"dkdv": backward.dkdv_kernel, "rows": backward.rows_kernel}[which](spec, problem, config)


def request(arch: int, kernel: KernelSource, element: str = "bf16", **captures: str) -> Request:
    """A request for a rendered kernel; ``captures`` gives the type of each ``CAP<i>``."""
    pointers = {a: "fp32" if a[:3] in ("LSE", "DEL", "ROW", "GRA") else element for a in kernel.arguments}
    pointers |= {name: kind for name, kind in captures.items() if name in kernel.arguments}
    for name, kind in captures.items():
        summaries = {f"{end}{name[3:]}": "i8" if kind == "i1" else kind for end in ("LOW", "TOP")}
        pointers |= {n: x for n, x in summaries.items() if n in kernel.arguments}
    return Request(kernel, arch, pointers, "fp32" if kernel.output_rank == 3 else element)


class CompileError(Exception):
    """A compiler gave up; the message ends with the last lines that it printed."""


def compiled(asked: Request | GluonRequest | GluonBackwardRequest, timeout: float = 250) -> dict[str, Any]:
    """What :func:`report` says of a kernel, compiled in a process of its own; raises CompileError where that fails."""
    command = [sys.executable, "-m", "benchmarks._aot"]
    try:
        done = subprocess.run(command, input=pickle.dumps(asked), capture_output=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired as e:
        raise CompileError(f"longer than {timeout:.0f} s") from e
    if done.returncode:
        raise CompileError(done.stderr.decode(errors="replace")[-3000:])
    return json.loads(done.stdout)


def forked(asked: Request | GluonRequest | GluonBackwardRequest) -> dict[str, Any]:
    """As :func:`compiled`, in a copy of this process, which saves imports. Not for a process with threads."""
    import triton.compiler  # noqa: F401

    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp(prefix="fa_inductor_aot_"))
            answer = json.dumps(BY_NAME[type(asked).__name__](asked))
        except BaseException as e:  # nothing may run on in the copy
            answer = json.dumps(f"{type(e).__name__}: {e}"[-3000:])
        with open(writer, "w") as f:
            f.write(answer)
        os._exit(0)
    os.close(writer)
    with open(reader) as f:
        text = f.read()
    status = os.waitpid(child, 0)[1]
    found = json.loads(text) if text else f"the compiler ended with status {status}"
    if isinstance(found, str):
        raise CompileError(found)
    return found


@dataclass(frozen=True)
class GluonRequest:
    """The Gluon forward for sm_90: padded head dims, its configuration and what the program has."""

    qk_dim: int
    v_dim: int
    config: GluonConfig
    even: bool = True
    has_low: bool = False
    has_high: bool = False
    softcap: bool = False


def compile_gluon_backward(request: GluonBackwardRequest) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from fa_inductor.templates.sm90.gluon_backward import flash_backward
    from fa_inductor.templates.sm90.gluon_backward_wide import flash_backward_wide

    def descriptor(element: str, *block: int) -> str:
        layout = gl.NVMMASharedLayout.get_default_for(list(block), {"bf16": gl.bfloat16, "fp32": gl.float32}[element])
        return f"tensordesc<{element}{list(block)},{layout!r}>"

    c = request.config
    kernel = flash_backward_wide if c.wide else flash_backward
    d, dv = c.width(request.qk_dim), c.width(request.v_dim)
    keys = {name: descriptor("bf16", 1, 1, 64, dim) for name, dim in (("k", d), ("v", dv), ("dk", d), ("dv", dv))}
    signature = {
        **{f"{name}_desc": text for name, text in keys.items()},
        "q_desc": descriptor("bf16", 1, 1, c.rows, d), "do_desc": descriptor("bf16", 1, 1, c.rows, dv),
        "lse_desc": descriptor("fp32", 1, c.rows), "delta_desc": descriptor("fp32", 1, c.rows),
        "dq_desc": descriptor("fp32", 1, 1, 64, c.dq_columns(request.qk_dim)), "scale": "fp32", "cap": "fp32", "factor": "fp32",
    }  # fmt: skip
    constants = {
        **c.constants(), "EVEN": request.even, "SKIP": True, "HAS_LOW": request.has_low, "HAS_HIGH": request.has_high,
        "SOFTCAP": request.softcap,
    }  # fmt: skip
    names = kernel.arg_names
    types = {n: "constexpr" if n in constants else signature.get(n, "i32") for n in names}
    source = GluonASTSource(
        fn=kernel, signature=types, constexprs={(names.index(n),): x for n, x in constants.items()}, attrs={}
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    return {**report(compiled), "assembler": assembler_says(compiled.asm["ptx"])}


def assembler_says(ptx: str) -> str:
    """ptxas's remarks on a kernel for sm_90a, such as that it serialises wgmma."""
    import triton

    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "ptxas")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.ptx")
        with open(path, "w") as f:
            f.write(ptx)
        command = [tool, "-v", "--gpu-name=sm_90a", path, "-o", os.path.join(folder, "kernel.cubin")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def compile_gluon(request: GluonRequest) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from fa_inductor.templates.sm90 import launch
    from fa_inductor.templates.sm90.gluon_forward import flash_forward

    def descriptor(rows: int, dim: int) -> str:
        block = [1, 1, rows, dim]
        return f"tensordesc<bf16{block},{gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)!r}>"

    c, keys = request.config, request.config.keys
    signature = {
        "q_desc": descriptor(64, request.qk_dim), "k_desc": descriptor(keys, request.qk_dim),
        "v_desc": descriptor(keys, request.v_dim), "o_desc": descriptor(64, request.v_dim),
        "lse": "*fp32", "counter": "*i32", "scale": "fp32", "cap": "fp32",
    }  # fmt: skip
    constants = {
        **launch.constants(c, request.qk_dim, request.v_dim),
        "EVEN": request.even, "HAS_LOW": request.has_low, "HAS_HIGH": request.has_high, "SOFTCAP": request.softcap,
        "DEAD_ZERO": False,
    }  # fmt: skip
    names = flash_forward.arg_names
    types = {n: "constexpr" if n in constants else signature.get(n, "i32") for n in names}
    source = GluonASTSource(
        fn=flash_forward, signature=types, constexprs={(names.index(n),): x for n, x in constants.items()}, attrs={}
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    return report(compiled)


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
class GluonBackwardRequest:
    """The Gluon backward for sm_90, described as the forward is."""

    qk_dim: int
    v_dim: int
    config: BackwardConfig
    even: bool = True
    has_low: bool = False
    has_high: bool = False
    softcap: bool = False


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
    "Request": compile_kernel, "GluonRequest": compile_gluon, "GluonBackwardRequest": compile_gluon_backward
}  # fmt: skip


if __name__ == "__main__":
    os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp(prefix="fa_inductor_aot_"))
    request_ = pickle.load(sys.stdin.buffer)
    print(json.dumps(BY_NAME[type(request_).__name__](request_)))
