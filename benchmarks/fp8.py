"""FP8 attention: its speed beside bf16 on one GPU, and its accuracy.

    python -m benchmarks.fp8 speed    [--cases d128_s4k ...] [--jobs 14] [--out FILE]
    python -m benchmarks.fp8 tiles    [--cases ...] [--jobs 14]        every tile of TILES, for the table of configurations
    python -m benchmarks.fp8 project  [--out FILE]
    python -m benchmarks.fp8 block    [--jobs 14] [--out FILE]
    python -m benchmarks.fp8 accuracy [--device cpu] [--out FILE]

speed: median of triton.testing.do_bench, unit normal operands, TFLOP/s counted as benchmarks.attention does: SDPA's cuDNN backend
and our kernel in bf16, the FP8 kernel on operands that are cast already, and milliseconds of the cast. Each is compared with
float64 code on a part of the heads first.

project: milliseconds from hidden states to FP8 operands, 16384 tokens, bf16: the library's product alone, with the cast after it,
and the kernel that does both.

block: milliseconds of a compiled transformer block, inference: RMS norm, QKV product, attention, output product, with or without
rotary embeddings; 16384 tokens, hidden size 4096, 32 heads, of keys 8. In bf16, in FP8 with the cast as a kernel of its own,
and with the cast in the projection where nothing lies between; with the kernels of one call, by the profiler.

accuracy: relative error (norm of the difference over norm of the result) and root mean square and largest error against float64
code, on normal operands and with 0.1 % of q, k and v ten and a hundred times as large. ``per tensor`` has one scale for each of q,
k and v. On the CPU, and for ``per tensor`` everywhere, weights are rounded as a kernel with one tile of keys would round them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import _common, _turns
from benchmarks.attention import CASES, Case

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fa_inductor.templates.sm90.fp8_launch import Fp8Config

SPEED = (
    "d64_s4k", "d64_s4k_causal", "d128_s2k", "d128_s2k_causal", "d128_s4k", "d128_s4k_causal", "d128_s16k", "d128_s16k_causal",
    "gqa_s8k_causal", "d256_s4k_causal",
)  # fmt: skip
TILED = ("d64_s4k", "d64_s4k_causal", "d128_s4k", "d128_s4k_causal", "d256_s4k", "d256_s4k_causal")


def tiles(dim: int) -> list[Fp8Config]:
    """Configurations to compare for a head dim, that of the table first."""
    from fa_inductor.templates.sm90.fp8_launch import CONFIGS, Fp8Config

    ours = CONFIGS[dim]
    plain = {
        64: [ours, replace(ours, stages=4), replace(ours, consumers=3, registers=160)],
        128: [ours, replace(ours, stages=3), Fp8Config(64, 4, consumers=3, registers=160)],
        256: [ours, replace(ours, stages=3)],
    }[dim]
    free = [replace(ours, ping_pong=not ours.ping_pong), replace(ours, schedule="tile")]
    return [*plain, *free, replace(ours, two_levels=False, parts=1)]


def operands(case: Case, device: str = "cuda", outliers: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Unit normal q, k, v in bf16, of which one number in a thousand is ``outliers`` times as large."""
    import torch

    g = torch.Generator(device).manual_seed(0)

    def draw(heads: int) -> Tensor:
        x = torch.randn(case.batch, heads, case.length, case.dim, device=device, generator=g)
        large = torch.rand(x.shape, device=device, generator=g) < 1e-3
        return torch.where(large, x * outliers, x).bfloat16()

    return draw(case.heads), draw(case.kv_heads), draw(case.kv_heads)


def program(case: Case) -> str:
    s = f"score * {case.dim**-0.5!r}"
    return f"attention(score=where(kv_idx <= q_idx, {s}, -inf))" if case.form == "causal" else f"attention(score={s})"


def exact(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """float64."""
    return weights(q.double(), k.double(), causal) @ spread(v.double(), q)


def spread(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def weights(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    import torch

    s = q @ spread(k, q).transpose(2, 3) * q.shape[3] ** -0.5
    if causal:
        s = s.masked_fill(torch.ones(s.shape[2:], dtype=torch.bool, device=s.device).triu(1), -torch.inf)
    return torch.softmax(s, -1)


def emulated(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Attention in float32 whose weights are rounded to e4m3, the largest of a row to 448."""
    import torch

    p = weights(q, k, causal)
    unit = p.amax(-1, keepdim=True) / 448.0
    return ((p / unit).to(torch.float8_e4m3fn).float() * unit) @ spread(v, q)


def per_tensor(x: Tensor) -> Tensor:
    import torch

    scale = x.float().abs().amax() / 448.0
    return (x.float() / scale).to(torch.float8_e4m3fn).float() * scale


def errors(got: Tensor, want: Tensor) -> dict[str, float]:
    d = got.double() - want
    return {
        "relative": (d.norm() / want.norm()).item(),
        "rms": d.square().mean().sqrt().item(),
        "largest": d.abs().max().item(),
    }


# ------------------------------------------------------------------------------------------------------------------ kernels
def fp8_kernel(case: Case, q: Tensor, k: Tensor, v: Tensor, config: Fp8Config | None = None, format: str = "e4m3") -> Any:
    """(callable without arguments, cast operands) of the Gluon kernel."""
    from fa_inductor.templates.quantise import quantise
    from fa_inductor.templates.sm90 import fp8_launch

    small = quantise(q, k, v, format, permute=True)
    forward = fp8_launch.prepare(small, q.dtype, [], program(case), config)
    return lambda: forward(small)[0]


def warm(job: tuple[str, Fp8Config | None]) -> str:
    """Compile what a case needs into Triton's cache; the reason where that fails."""
    import torch

    from fa_inductor.templates.sm90 import launch

    case = CASES[job[0]]
    try:
        # The lengths' divisibility is compiled in; nothing else of them.
        q, k, v = operands(replace(case, batch=1, heads=case.heads // case.kv_heads, kv_heads=1, length=512))
        fp8_kernel(case, q, k, v, job[1])()
        if job[1] is None:
            launch.attention(q, k, v, [], program(case))
        torch.cuda.synchronize()
    except Exception as e:
        return f"{job}: {type(e).__name__}: {e}"[:300]
    return ""


def compile_all(jobs: list[tuple[str, Fp8Config | None]], processes: int) -> None:
    with multiprocessing.get_context("spawn").Pool(min(processes, len(jobs))) as pool:
        for failure in pool.imap_unordered(warm, jobs):
            if failure:
                print(failure, flush=True)


def bench(f: Any) -> float:
    from triton.testing import do_bench

    return do_bench(f, warmup=10, rep=50, return_mode="median")


def checked(case: Case, out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> float:
    """The relative error of the first head."""
    return errors(out[:1, :1], exact(q[:1, :1], k[:1, :1], v[:1, :1], case.form == "causal"))["relative"]


def speed(names: list[str], jobs: int) -> list[dict[str, Any]]:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from fa_inductor.templates.quantise import quantise
    from fa_inductor.templates.sm90 import launch

    compile_all([(n, None) for n in names], jobs)
    rows = []
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for case in (CASES[n] for n in names):
        q, k, v = operands(case)
        causal, text, flops = case.form == "causal", program(case), case.flops(False)
        wide = spread(k, q), spread(v, q)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            cudnn = bench(lambda q=q, w=wide, c=causal: sdpa(q, *w, is_causal=c))
        bf16 = bench(lambda q=q, k=k, v=v, t=text: launch.attention(q, k, v, [], t))
        kernel = fp8_kernel(case, q, k, v)
        fp8 = bench(kernel)
        cast, rotated = (bench(lambda q=q, k=k, v=v, r=r: quantise(q, k, v, r, permute=True)) for r in ("e4m3", "e4m3-rotated"))
        row = {
            "case": case.name,
            **{name: flops / ms / 1e9 for name, ms in (("cudnn", cudnn), ("bf16", bf16), ("fp8", fp8))},
            "over cudnn": cudnn / fp8,
            "over bf16": bf16 / fp8,
            "with cast, over cudnn": cudnn / (fp8 + rotated),
            "cast ms": cast,
            "rotated ms": rotated,
            "relative error": checked(case, kernel(), q, k, v),
        }
        rows.append(row)
        print({k: round(x, 4) if isinstance(x, float) else x for k, x in row.items()}, flush=True)
    return rows


def compare_tiles(names: list[str], jobs: int) -> list[dict[str, Any]]:
    compile_all([(n, c) for n in names for c in tiles(CASES[n].dim)], jobs)
    rows = []
    for case in (CASES[n] for n in names):
        q, k, v = operands(case)
        kernels: dict[str, Any] = {}
        for config in tiles(case.dim):
            try:
                kernels[str(config)] = kernel = fp8_kernel(case, q, k, v, config)
                found: dict[str, Any] = {"relative error": checked(case, kernel(), q, k, v)}
            except Exception as e:
                kernels.pop(str(config), None)
                found = {"relative error": f"{type(e).__name__}: {e}"[:60]}
            rows.append({"case": case.name, "tile": str(config), "TFLOP/s": None, **found})
        # In turns, the faster of two rounds: the same kernel differs by up to 10 % with what ran just before it.
        rounds = [{tile: bench(kernel) for tile, kernel in kernels.items()} for _ in range(2)]
        for row in (r for r in rows if r["case"] == case.name):
            if row["tile"] in kernels:
                row["TFLOP/s"] = case.flops(False) / min(times[row["tile"]] for times in rounds) / 1e9
            print(row, flush=True)
    return rows


def projections() -> list[dict[str, Any]]:
    import torch

    from fa_inductor.templates.projection import project
    from fa_inductor.templates.quantise import quantise

    rows = []
    for hidden, heads, kv_heads, dim in ((2048, 16, 16, 128), (4096, 32, 8, 128), (4096, 16, 16, 256), (1024, 16, 16, 64)):
        x = torch.randn(2, 8192, hidden, device="cuda", dtype=torch.bfloat16)
        parts = [n * dim for n in (heads, kv_heads, kv_heads)]
        whole = torch.randn(sum(parts), hidden, device="cuda", dtype=torch.bfloat16) * hidden**-0.5
        weights = list(whole.split(parts))

        def layers(x: Tensor = x, whole: Tensor = whole, parts: list[int] = parts, dim: int = dim) -> list[Tensor]:
            made = torch.nn.functional.linear(x, whole).split(parts, -1)
            return [t.unflatten(-1, (-1, dim)).transpose(1, 2) for t in made]

        def apart(format: str, layers: Any = layers) -> Any:
            q, k, v = layers()
            return quantise(q, k, v, format, permute=True)

        def fused(format: str, x: Tensor = x, w: Any = weights, h: int = heads, kv: int = kv_heads) -> Any:
            return project(x, w, [], h, kv, format, permute=True)

        for format in ("e4m3", "e4m3-rotated"):
            row: dict[str, Any] = {"hidden": hidden, "heads": f"{heads}/{kv_heads}", "dim": dim, "format": format}
            row["product"] = bench(layers)
            row["product and cast"] = bench(lambda f=apart, r=format: f(r))
            row["one kernel"] = bench(lambda f=fused, r=format: f(r))
            row["TFLOP/s"] = 2.0 * x.shape[0] * x.shape[1] * hidden * sum(parts) / row["one kernel"] / 1e9
            rows.append(row)
            print(row, flush=True)
    return rows


BLOCKS = ("bf16", "fp8", "fp8, cast in the projection")
#: (length, causal, rotary) of the blocks.
BLOCK_SHAPES = ((8192, True, False), (8192, True, True), (16384, True, False), (16384, False, False))


def make_block(kv_heads: int, causal: bool, rotary: bool, device: str = "cuda") -> torch.nn.Module:
    """The block; called with hidden states [B, L, 4096] and the tables of cosines and sines [L, 128]."""
    import torch

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.RMSNorm(4096)
            self.qkv = torch.nn.Linear(4096, (32 + 2 * kv_heads) * 128, bias=False)
            self.out = torch.nn.Linear(4096, 4096, bias=False)

        def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            parts = self.qkv(self.norm(x)).split([4096, kv_heads * 128, kv_heads * 128], -1)
            q, k, v = (t.unflatten(-1, (-1, 128)).transpose(1, 2) for t in parts)
            if rotary:
                q, k = (t * cos + torch.cat([-t[..., 64:], t[..., :64]], -1) * sin for t in (q, k))
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
            return x + self.out(y.transpose(1, 2).flatten(2))

    return Block().to(device, torch.bfloat16).eval()


def kernels_of(run: Any) -> dict[str, float]:
    """Milliseconds by name of the kernels that a call launches."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    events = [e for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    found: dict[str, float] = {}
    for event in events:
        found[event.name[:60]] = found.get(event.name[:60], 0.0) + event.device_time / 1e3
    return found


def time_block(length: int, causal: bool, rotary: bool, variant: str) -> None:
    """One variant of one block, in a process of its own."""
    import torch

    import fa_inductor

    torch.manual_seed(0)
    block = make_block(8, causal, rotary)
    x = torch.randn(16384 // length, length, 4096, device="cuda", dtype=torch.bfloat16)
    angles = torch.outer(torch.arange(length, device="cuda"), 1e4 ** (-torch.arange(64, device="cuda") / 64)).repeat(1, 2)
    tables = angles.cos().bfloat16(), angles.sin().bfloat16()
    options: dict[str, Any] = {} if variant == "bf16" else {"fp8": "e4m3", "fp8_projection": variant != "fp8"}
    row: dict[str, Any] = {"length": length, "causal": causal, "rotary": rotary, "variant": variant}
    with torch.no_grad():
        (site,) = fa_inductor.explain(block, options=options)(x, *tables).sites
        run = torch.compile(block, backend="fa_inductor", options=options)
        out = run(x, *tables)
        torch.cuda.synchronize()
        _turns.wait_for_turn()
        row["ms"] = bench(lambda: run(x, *tables))
        row["error of the branch"] = errors(out.double() - x, block(x, *tables).double() - x)["relative"]
        row["template"] = site.template
        row["kernels"] = kernels_of(lambda: run(x, *tables))
    _turns.give(row)


def blocks(jobs: int) -> list[dict[str, Any]]:
    work = [(*shape, variant) for shape in BLOCK_SHAPES for variant in BLOCKS]
    rows: list[dict[str, Any]] = []

    def done(i: int, row: dict[str, Any]) -> None:
        rows.append(row if "error" not in row else {"case": str(work[i]), **row})
        print({k: x for k, x in row.items() if k != "kernels"}, flush=True)

    _turns.run([[sys.executable, "-m", "benchmarks.fp8", "worker", "--job", json.dumps(w)] for w in work], jobs, done)
    base = {(r["length"], r["causal"], r["rotary"]): r["ms"] for r in rows if r.get("variant") == "bf16"}
    for row in rows:
        if "ms" in row:
            row["over bf16"] = base.get((row["length"], row["causal"], row["rotary"]), float("nan")) / row["ms"]
    return rows


def accuracy(device: str) -> list[dict[str, Any]]:
    from fa_inductor import fp8

    case = Case("accuracy", 1, 4 if device == "cuda" else 1, 4 if device == "cuda" else 1, 4096 if device == "cuda" else 2048, 128)
    rows = []
    for form in ("full", "causal"):
        case, causal = replace(case, form=form), form == "causal"
        for outliers in (1.0, 10.0, 100.0):
            q, k, v = operands(case, device, outliers)
            want = exact(q, k, v, causal)
            found = {"per tensor": emulated(per_tensor(q), per_tensor(k), per_tensor(v), causal)}
            for format in fp8.FORMATS:
                if device == "cuda":
                    found[format] = fp8_kernel(case, q, k, v, format=format)()
                else:
                    found[format] = emulated(*fp8.rounded(q, k, v, format), causal)
            for name, out in found.items():
                rows.append({"form": form, "outliers": outliers, "format": name, **errors(out, want)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "tiles", "project", "block", "accuracy", "worker"))
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES))
    parser.add_argument("--jobs", type=int, default=14, help="compiles at a time")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--job", help="of a worker: what it times, JSON")
    a = parser.parse_args()
    if a.what == "worker":
        time_block(*json.loads(a.job))
        return
    if a.what == "accuracy":
        rows = accuracy(a.device)
    elif a.what == "project":
        rows = projections()
    elif a.what == "block":
        rows = blocks(a.jobs)
    else:
        known = SPEED if a.what == "speed" else TILED
        rows = (speed if a.what == "speed" else compare_tiles)(a.cases or list(known), a.jobs)
    names = [name for name in rows[0] if name != "kernels"]
    print(_common.table([[r.get(name) for name in names] for r in rows], names))
    if a.out:
        _common.save(a.out, {"command": _common.arguments(), "environment": _common.environment(), "rows": rows})


if __name__ == "__main__":
    main()
