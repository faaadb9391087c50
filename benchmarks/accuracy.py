"""How exact is attention: the error against float64 of ours, of SDPA and of eager code, forward and gradients.

    python -m benchmarks.accuracy --jobs 12 --out benchmarks/results/accuracy_h200.json
    python -m benchmarks.accuracy --device cpu --programs causal padding --dtypes float32
    python -m benchmarks.accuracy --show benchmarks/results/accuracy_h200.json

Each program is spelled out as eager code does it, softmax in float32. ``ours`` is that code under torch.compile with our
backend, ``eager`` the code itself, SDPA a call of scaled_dot_product_attention where it has the form (it has neither softcap nor
sinks, and takes float masks in the dtype of q), its kernel left to torch. True is the same code in float64 on the same, already
rounded, operands: unit normal, as is the gradient of the output. An error is the norm of the difference over the norm of what is
true; of the gradients (q, k, v, and the program's own tensors where they are trained) the largest counts. One process a program.
The exit code is 1 where ours is more than twice as far off as eager, and more than two units in the last place.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks import _common, _turns

Row = dict[str, Any]
DTYPES = ("float32", "bfloat16", "float16")
SIDES = ("ours", "sdpa", "eager")
CAP = 20.0


@dataclass(frozen=True)
class Sizes:
    """q [batch, heads, length, dim]; k and v with ``kv_heads`` in the program with grouped heads."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    dim: int


FULL = {"cuda": Sizes(2, 8, 2, 1024, 128), "cpu": Sizes(1, 4, 2, 1024, 64)}


class Given:
    """What a program may read beside q, k and v. Masks are made where they are used, as models make them."""

    def __init__(self, s: Sizes, device: str, dtype: Any) -> None:
        import torch

        g = torch.Generator().manual_seed(1)
        n, self.device = s.length, device
        self.length = n
        lengths = torch.tensor([n - n // 4 - b * n // 8 for b in range(s.batch)], device=device)
        self.real = torch.arange(n, device=device) < lengths[:, None]
        self.document = (torch.rand(s.batch, n, generator=g) < 8 / n).cumsum(1).to(device)
        self.slopes = torch.tensor([2.0 ** (-8.0 * (h + 1) / s.heads) for h in range(s.heads)], device=device)[:, None, None]
        self.bias = torch.randn(s.heads, n, n, generator=g).to(device, dtype)
        self.sinks = torch.randn(s.heads, generator=g).to(device, dtype)

    def ahead(self) -> Any:
        """[S, S]: how far the key is behind the row, negative for keys to come."""
        import torch

        at = torch.arange(self.length, device=self.device)
        return at[:, None] - at[None, :]

    def causal(self) -> Any:
        return self.ahead() >= 0

    def window(self) -> Any:
        return self.causal() & (self.ahead() < self.length // 8)

    def documents(self) -> Any:
        return (self.causal() & (self.document[:, :, None] == self.document[:, None, :]))[:, None]

    def padding(self) -> Any:
        return self.real[:, None, None, :]

    def distance(self, dtype: Any) -> Any:
        return self.slopes.to(dtype) * -self.ahead()


def softmax(scores: Any, v: Any) -> Any:
    """In float32, or in float64 where the scores are that."""
    import torch

    return torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(v.dtype)


@dataclass(frozen=True)
class Program:
    """One form of attention.

    Attributes:
        scores: (q @ k.mT * scale, what is given) -> logits.
        sdpa: what is given and the dtype of q -> arguments of SDPA; None where it lacks the form.
        trained: names of what is given that gets a gradient.
        grouped: k and v have fewer heads.
        sinks: whether the rows have a sink beside the keys.
    """

    scores: Callable[[Any, Given], Any]
    sdpa: Callable[[Given, Any], Row] | None = None
    trained: Sequence[str] = field(default=())
    grouped: bool = False
    sinks: bool = False

    def spelled(self, q: Any, k: Any, v: Any, given: Given) -> Any:
        """Attention as eager code has it."""
        import torch

        groups = q.shape[1] // k.shape[1]
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = self.scores(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5, given)
        if not self.sinks:
            return softmax(scores, v) @ v
        sink = given.sinks.view(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)
        return softmax(torch.cat([scores, sink], -1), v)[..., :-1] @ v


def hiding(mask: Callable[[Given], Any]) -> Callable[[Any, Given], Any]:
    return lambda s, given: s.masked_fill(~mask(given), float("-inf"))


def upcast(s: Any) -> Any:
    return s if s.dtype.itemsize == 8 else s.float()


def masked(mask: Callable[[Given], Any]) -> dict[str, Any]:
    """Arguments of a program that is nothing but this mask."""
    return {"scores": hiding(mask), "sdpa": lambda given, dtype: {"attn_mask": mask(given)}}


causal = hiding(Given.causal)
PROGRAMS = {
    "plain": Program(lambda s, given: s, lambda given, dtype: {}),
    "causal": Program(causal, lambda given, dtype: {"is_causal": True}),
    "gqa": Program(causal, lambda given, dtype: {"is_causal": True, "enable_gqa": True}, grouped=True),
    "softcap": Program(lambda s, given: causal((s / CAP).tanh() * CAP, given)),
    "bias": Program(lambda s, given: s + given.bias, lambda given, dtype: {"attn_mask": given.bias[None]}, ("bias",)),
    "alibi": Program(
        lambda s, given: causal(upcast(s) + given.distance(upcast(s).dtype), given),
        lambda given, dtype: {"attn_mask": causal(given.distance(dtype), given)[None]},
    ),
    "sinks": Program(causal, trained=("sinks",), sinks=True),
    "window": Program(**masked(Given.window)),
    "documents": Program(**masked(Given.documents)),
    "padding": Program(**masked(Given.padding)),
}


# ---- one process -----------------------------------------------------------------------------------------------------


class Case:
    """One program in one dtype."""

    def __init__(self, name: str, dtype: str, sizes: Sizes, device: str) -> None:
        import torch

        self.program, self.sizes, self.device = PROGRAMS[name], sizes, device
        self.dtype = getattr(torch, dtype)
        g = torch.Generator().manual_seed(0)
        kv_heads = sizes.kv_heads if self.program.grouped else sizes.heads
        heads = (sizes.heads, kv_heads, kv_heads, sizes.heads)
        draw = lambda h: torch.randn(sizes.batch, h, sizes.length, sizes.dim, generator=g)  # noqa: E731
        *self.operands, self.grad_out = (draw(h).to(device, self.dtype) for h in heads)
        self.given = Given(sizes, device, self.dtype)

    def values(self, function: Callable[..., Any], exact: bool = False) -> dict[str, Any]:
        """The output and every gradient of ``function(q, k, v, given)``, in float64 where ``exact``."""
        import torch

        dtype = torch.float64 if exact else self.dtype
        given = Given(self.sizes, self.device, self.dtype)
        leaves = {n: x.detach().to(dtype) for n, x in zip("qkv", self.operands, strict=True)}
        for name in ("bias", "sinks"):
            setattr(given, name, getattr(given, name).to(dtype))
        leaves |= {name: getattr(given, name) for name in self.program.trained}
        for x in leaves.values():
            x.requires_grad_()
        out = function(leaves["q"], leaves["k"], leaves["v"], given)
        grads = torch.autograd.grad(out, list(leaves.values()), self.grad_out.to(dtype))
        return {"out": out.detach(), **{f"d{n}": g for n, g in zip(leaves, grads, strict=True)}}

    def sdpa(self, q: Any, k: Any, v: Any, given: Given) -> Any:
        import torch

        assert self.program.sdpa is not None
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **self.program.sdpa(given, q.dtype))

    def measure(self, compiling: dict[str, Any]) -> Row:
        """The row: errors of every side by tensor; ``compiling`` are torch.compile's arguments for ours."""
        import torch

        from fa_inductor import report

        torch._dynamo.reset()
        true = self.values(self.program.spelled, exact=True)
        row: Row = {}
        ours = torch.compile(self.program.spelled, dynamic=False, **compiling)
        functions = {"ours": ours, "sdpa": self.sdpa if self.program.sdpa else None, "eager": self.program.spelled}
        for side, function in functions.items():
            if function is None:
                continue
            with report.collecting() as sites:
                found = self.values(function)
            row[side] = {n: float((x.double() - true[n]).norm() / true[n].norm()) for n, x in found.items()}
            if side == "ours":
                row["form"] = "; ".join(sorted({s.form for s in sites.sites}))
                row["kernel"] = ", ".join(sorted({s.template or "fused" for s in sites.fused}))
                row["reason"] = "; ".join(sorted({s.reason for s in sites.unfused}))
        return row


def measure(job: Row, compiling: dict[str, Any] | None = None) -> list[Row]:
    """The rows of one program, a dtype each."""
    compiling = compiling or {"backend": "fa_inductor", "options": job["options"]}
    sizes = Sizes(**job["sizes"])
    return [
        {"program": job["program"], "dtype": dtype, **Case(job["program"], dtype, sizes, job["device"]).measure(compiling)}
        for dtype in job["dtypes"]
    ]


def worker(job: Row) -> None:
    rows = measure(job)
    _turns.wait_for_turn()
    _turns.give(rows)


# ---- the driver ------------------------------------------------------------------------------------------------------


def forward_and_gradients(row: Row, side: str) -> tuple[float, float] | None:
    """Error of the output, largest error of a gradient."""
    if side not in row:
        return None
    return row[side]["out"], _common.largest(e for n, e in row[side].items() if n != "out")


def faults(rows: list[Row]) -> list[str]:
    """Rows whose error is out of proportion to eager's."""
    import torch

    out = []
    for row in rows:
        ours, eager = (forward_and_gradients(row, side) for side in ("ours", "eager"))
        assert ours is not None
        assert eager is not None
        ulp = torch.finfo(getattr(torch, row["dtype"])).eps
        for what, mine, theirs in zip(("output", "gradient"), ours, eager, strict=True):
            if not mine <= max(2 * theirs, 2 * ulp):
                out.append(f"{row['program']} {row['dtype']}: the {what} is {mine:.2e} off, eager's {theirs:.2e}")
    return out


def summary(rows: list[Row]) -> str:
    """One line a program and dtype, ordered by dtype."""
    lines, sides = [], " / ".join(SIDES)
    for row in sorted(rows, key=lambda r: (DTYPES.index(r["dtype"]), list(PROGRAMS).index(r["program"]))):
        pairs = [forward_and_gradients(row, side) for side in SIDES]
        cells = [" / ".join(f"{pair[i]:.1e}" if pair else "-" for pair in pairs) for i in range(2)]
        lines.append([row["dtype"], row["program"], *cells, row["kernel"] or f"not fused: {row['reason']}"[:80]])
    return _common.table(lines, ["dtype", "program", f"output: {sides}", f"gradients: {sides}", "kernel"])


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", nargs="+", default=list(PROGRAMS), choices=list(PROGRAMS), metavar="PROGRAM")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES, metavar="DTYPE")
    parser.add_argument("--length", type=int, help="tokens; default 1024")
    parser.add_argument("--device", default="cuda", choices=list(FULL))
    parser.add_argument("--options", default="{}", help="JSON options of our backend")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one program")
    parser.add_argument("--out", default=str(_common.RESULTS / "accuracy.json"))
    parser.add_argument("--show", metavar="JSON", help="print an earlier run, measure nothing")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> Row:
    """Measures everything that is asked for; the payload that is saved."""
    import torch

    sizes = vars(FULL[options.device]) | ({"length": options.length} if options.length else {})
    job = {"device": options.device, "dtypes": options.dtypes, "sizes": sizes, "options": json.loads(options.options)}
    rows: list[Row] = []
    errors: list[str] = []

    def done(i: int, result: Any) -> None:
        if isinstance(result, dict):
            errors.append(f"{options.programs[i]}: {result['error']}")
        else:
            rows.extend(result)

    commands = [
        _common.worker_command("benchmarks.accuracy", "--worker", json.dumps({**job, "program": p})) for p in options.programs
    ]
    _turns.run(commands, options.jobs, done, options.timeout)
    return {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else options.device,
        "environment": _common.environment(),
        "command": " ".join(["python -m benchmarks.accuracy", *_common.arguments()]),
        "job": job,
        "errors": errors,
        "rows": rows,
    }


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.worker:
        worker(json.loads(options.worker))
        return 0
    payload = _common.shown(options, run)
    wrong = payload["errors"] + faults(payload["rows"])
    print("\n".join([summary(payload["rows"]), *wrong]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
