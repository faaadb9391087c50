"""Compile every default kernel ahead of time for GPUs that need not be present, and record what came out.

    python -m benchmarks.aot_table                                       # writes results/aot_table.json and notes/aot.md
    python -m benchmarks.aot_table --resume                              # only what changed since: source, tile or triton
    python -m benchmarks.aot_table --archs 86 120 --dims 128 --out some.json --notes some.md
    python -m benchmarks.aot_table --show benchmarks/results/aot_table.json

The default configuration (the one taken without max-autotune) of the forward, dK/dV and dQ kernels of the general
templates, bfloat16, head dims 64, 128 and 256, without a mask and causal, and the Gluon kernels for sm_90. Once nothing is
known of the lengths, so that every loop has its edges, the largest form of each kernel, and once (``length``) they are
numbers, as under static shapes, which may mean other tiles. A row has ``problems`` where it would not launch
(``shared``: more shared memory than a block may have there), where registers spill, or where it lacks the instructions of
the architecture. Where the shared memory does not fit, ``fits`` holds what would: the first of the other candidates,
which is what runs, and the largest smaller tile. All of it takes about 16 minutes on one core.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import _aot, _common
from fa_inductor.spec import AttentionSpec
from fa_inductor.templates import select, tiles
from fa_inductor.templates.configs import TileConfig
from fa_inductor.templates.program import Program
from fa_inductor.templates.rendering import Problem
from fa_inductor.templates.sm90 import backward_launch, form, launch

ARCHITECTURES = (80, 86, 89, 90, 100, 103, 120)
HEAD_DIMS = (64, 128, 256)
PASSES = ("forward", "dkdv", "dq")
PROGRAMS = {
    "plain": "attention(score=score * 0.088)",
    "causal": "attention(score=where(q_idx >= kv_idx, score * 0.088, -inf))",
}
NOTES = _common.ROOT / "benchmarks" / "notes" / "aot.md"
#: Lengths of queries and keys: unknown, long, and on sm_90, which has tiles of its own for them, short.
LENGTHS = (None, 4096, 512)
#: Columns of tensor memory of one SM (PTX ISA, "Tensor Memory": 512 columns and 128 rows of 32 bits a block).
TENSOR_MEMORY = 512


@dataclass(frozen=True)
class Case:
    """One kernel: ``kernel`` is ``general`` (the templates in templates/common) or ``gluon`` (templates/sm90).

    ``length``: of queries and keys, where it is known. Gluon kernels know no more of it than that tiles divide it.
    """

    arch: int
    kernel: str
    which: str
    dim: int
    mask: str
    length: int | None = None

    @property
    def key(self) -> tuple[int, str, str, int, str, int | None]:
        return self.arch, self.kernel, self.which, self.dim, self.mask, self.length


#: What names a row.
KEY = ("arch", "kernel", "which", "dim", "mask", "length")


def current(row: dict[str, Any], case: Case) -> bool:
    """Whether a row is of the configuration and the source that the case has now."""
    return row["config"] == described(case) and row["source"] == source(case)


def cases(archs: tuple[int, ...] = ARCHITECTURES, dims: tuple[int, ...] = HEAD_DIMS) -> list[Case]:
    """All rows of the table, in its order."""
    found = []
    for arch in archs:
        for which in PASSES:
            known = LENGTHS if arch == 90 else LENGTHS[:2]
            found += [Case(arch, "general", which, dim, mask, n) for n in known for dim in dims for mask in PROGRAMS]
        if arch == 90:
            of = [(which, n, d) for which in ("forward", "backward") for n in LENGTHS[:2] for d in dims]
            found += [Case(90, "gluon", which, d, mask, n) for which, n, d in of for mask in PROGRAMS]
    return [c for c in found if c.kernel == "general" or not _refused(c)]


def _refused(case: Case) -> str:
    """Why the Gluon kernels leave a case to the general ones, at lengths where that is no question of size."""
    refusal = form.refusal if case.which == "forward" else form.backward_refusal
    spec = AttentionSpec.parse(PROGRAMS[case.mask])
    return refusal(spec, "bfloat16", case.dim, case.dim, 4096, 4096, 64)


def templates_of(arch: int) -> int:
    """The architecture whose configurations serve compute capability ``arch``."""
    found = select.architecture((arch // 10, arch % 10))
    assert found is not None
    return found


def problem_of(case: Case) -> Problem:
    """What a general kernel is made for."""
    tma, n = templates_of(case.arch) >= 90, case.length
    if n is None:
        return Problem(case.dim, case.dim, 1, tma=tma)
    return Problem(case.dim, case.dim, 1, tma=tma, even_q=True, even_kv=True, rows=n, cols=n, square=True)


def candidates(case: Case) -> list[TileConfig]:
    """The configurations of a general kernel, the default first."""
    family, problem = templates_of(case.arch), problem_of(case)
    program = Program.of(AttentionSpec.parse(PROGRAMS[case.mask]), problem)
    return tiles.choose(program, problem, family, case.which, _aot.SHARED_LIMIT[case.arch])


def source(case: Case, config: TileConfig | None = None) -> str:
    """A digest of the text that is compiled; what it does not cover is in ``config``."""
    if case.kernel == "general":
        return _aot.render(PROGRAMS[case.mask], problem_of(case), case.which, config or candidates(case)[0]).name
    folder = _common.ROOT / "templates" / "sm90"
    files = [folder / "gluon_parts.py"]
    if case.which == "forward":
        files += [folder / "gluon_forward.py"]  # no row has the kernel with one loop
    if case.which == "backward":
        files += [folder / "gluon_order.py", *sorted(folder.glob("gluon_backward*.py"))]
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()[:16]


def described(case: Case, config: TileConfig | None = None) -> dict[str, Any]:
    """The configuration as the table holds it."""
    if case.kernel == "general":
        return asdict(config or candidates(case)[0])
    return asdict((launch.CONFIGS if case.which == "forward" else backward_launch.CONFIGS)[case.dim])


def compile_case(
    case: Case, config: TileConfig | None = None, compiled: Callable[[Any], dict[str, Any]] = _aot.compiled
) -> dict[str, Any]:
    """The row of a case, without ``fits``; ``config`` other than the default for a general kernel."""
    asked: _aot.Request | _aot.GluonRequest
    has_high, even = case.mask == "causal", case.length is not None
    if case.kernel == "general":
        chosen = config or candidates(case)[0]
        asked = _aot.request(case.arch, _aot.render(PROGRAMS[case.mask], problem_of(case), case.which, chosen))
    elif case.which == "forward":
        asked = _aot.GluonRequest(case.dim, case.dim, launch.CONFIGS[case.dim], even=even, has_high=has_high)
    else:
        backward = backward_launch.CONFIGS[case.dim]
        asked = _aot.GluonRequest(case.dim, case.dim, backward, even=even, has_high=has_high)
    row: dict[str, Any] = {**asdict(case), "config": described(case, config), "source": source(case, config)}
    row["shared_limit"] = _aot.SHARED_LIMIT[case.arch]
    try:
        made = compiled(asked)
    except _aot.CompileError as e:
        return {**row, "problems": [f"compile: {str(e).strip().splitlines()[-1][:200]}"]}
    made.pop("assembler", None)
    row.update(made)
    row["problems"] = problems(row)
    return row


def problems(row: dict[str, Any]) -> list[str]:
    """What is wrong with a compiled kernel."""
    found, made, config = [], row["instructions"], row["config"]
    if row["shared"] > row["shared_limit"]:
        found.append(f"shared: {row['shared']} bytes of {row['shared_limit']}")
    if row["tmem"] > TENSOR_MEMORY or made["trap"]:
        found.append(f"tensor memory: {row['tmem']} of {TENSOR_MEMORY} columns")
    if row["stack"] or row["local"]:
        found.append(f"spills: {row['stack']} bytes of stack, {row['local']} of local memory")
    product, load = {80: ("mma.sync", "cp.async"), 90: ("wgmma", "bulk_load"), 100: ("tcgen05", "bulk_load")}[
        templates_of(row["arch"])
    ]
    if not made[product]:
        found.append(f"no {product}")
    copies = config["num_stages"] > 1 if load == "cp.async" else config.get("tma", True)
    if copies and not made[load]:
        found.append(f"no {load}")
    return found


def smaller(config: TileConfig) -> Iterator[TileConfig]:
    """Tiles that need less shared memory, the largest first: two stages, then half the keys, half the queries, and so on."""
    m, n, stages = config.block_m, config.block_n, config.num_stages
    while min(m, n) >= 16:
        for s in range(stages, min(stages, 2) - 1, -1):
            yield replace(config, block_m=m, block_n=n, num_stages=s)
        if n >= m:
            n //= 2
        else:
            m //= 2


def _first(case: Case, configs: Iterable[TileConfig]) -> dict[str, Any] | None:
    """What fits and does not spill, None where nothing does."""
    for config in configs:
        row = compile_case(case, config, _aot.forked)
        if not row["problems"]:
            return {k: row[k] for k in ("config", "shared", "registers", "stack")}
    return None


def complete(case: Case) -> dict[str, Any]:
    """A row of the table."""
    row = compile_case(case, None, _aot.forked)
    if case.kernel == "general" and any(p.startswith("shared") for p in row["problems"]):
        default, *others = candidates(case)
        row["fits"] = {"candidate": _first(case, others), "smaller": _first(case, [c for c in smaller(default) if c != default])}
    return row


def config_text(row: dict[str, Any]) -> str:
    """A configuration in the form that tune_tiles.py takes, as ``64x128w8s3T``; of Gluon kernels the keyword arguments."""
    c = row["config"]
    if "block_m" in c:
        return f"{c['block_m']}x{c['block_n']}w{c['num_warps']}s{c['num_stages']}{'T' * c['tma']}"
    return "64 keys, wide" if c.get("wide") else f"{c.get('rows') or 64 * c['consumers']}x{c.get('keys', 128)}s{c['stages']}"


_SHORT = {"mma.sync": "mma", "cp.async": "cp", "wgmma": "wgmma", "tcgen05": "tcgen05", "bulk_load": "bulk", "ex2": "ex2"}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a table in Markdown."""
    cells = []
    for r in rows:
        what = [f"sm_{r['arch']}", r["kernel"], r["which"], r["dim"], r["mask"], r["length"] or "", config_text(r)]
        if "registers" not in r:
            cells.append([*what, *[""] * 5, "; ".join(r["problems"])])
            continue
        counts = " ".join(f"{_SHORT[n]} {x}" for n, x in r["instructions"].items() if x and n in _SHORT)
        share = f"{r['shared']} ({100 * r['shared'] / r['shared_limit']:.0f} %)"
        cells.append([*what, r["registers"], r["stack"] + r["local"], share, r["tmem"], counts, "; ".join(
            p.split(":")[0] for p in r["problems"])])  # fmt: skip
    headers = ["arch", "kernel", "pass", "D", "mask", "length", "tile", "registers", "spill", "shared", "TMEM", "PTX", "problems"]
    return _common.table(cells, headers)


def findings(rows: list[dict[str, Any]]) -> list[str]:
    """One line for each row that would not run."""
    lines = []
    for r in rows:
        bad = [p for p in r["problems"] if not p.startswith("spills")]
        if not bad:
            continue
        line = f"- sm_{r['arch']} {r['kernel']} {r['which']} D{r['dim']} {r['mask']}, {config_text(r)}: {'; '.join(bad)}."
        for name, meaning in (("candidate", "Of the other candidates"), ("smaller", "Of smaller tiles")):
            fits = r.get("fits", {}).get(name)
            if fits:
                line += f" {meaning} {config_text(fits)} fits ({fits['shared']} bytes, {fits['registers']} registers)."
        lines.append(line)
    return lines


def notes(payload: dict[str, Any]) -> str:
    """The text of notes/aot.md."""
    rows = payload["rows"]
    too_large, slow, spilled = (
        [r for r in rows if any(p.startswith(kind) for p in r["problems"])] for kind in ("shared", "no ", "spills")
    )
    return "\n".join(
        [
            "# Default kernels compiled ahead of time",
            "",
            f"Written by `{payload['command']}` with triton {payload['triton']}; no GPU had a part in it. What is",
            "compiled is said at the head of `aot_table.py`. Tile: queries x keys, w warps, s stages, T tensor descriptors. Spill:",
            "bytes of stack and local memory. Shared: bytes of a block, and the share of what it may have. PTX: instructions.",
            "",
            f"{len(rows)} kernels. {len(too_large)} do not launch, for lack of shared memory; the first other candidate that",
            f"compiles is taken then. {len(slow)} lack the products of their architecture. {len(spilled)} spill.",
            "",
            "## Would not run, or without the architecture's instructions",
            "",
            *(findings(rows) or ["None."]),
            "",
            "## All",
            "",
            table(rows),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(_common.RESULTS / "aot_table.json"))
    parser.add_argument("--notes", default=str(NOTES), help="where the Markdown goes")
    parser.add_argument("--archs", nargs="+", type=int, default=list(ARCHITECTURES), choices=ARCHITECTURES)
    parser.add_argument("--dims", nargs="+", type=int, default=list(HEAD_DIMS), choices=HEAD_DIMS)
    parser.add_argument("--resume", action="store_true", help="keep the rows of --out by this triton that are done")
    parser.add_argument("--show", metavar="FILE", help="print an earlier table and stop")
    args = parser.parse_args()
    if args.show:
        payload = json.loads(Path(args.show).read_text())
        print(table(payload["rows"]), *findings(payload["rows"]), sep="\n")
        return
    import triton

    command = " ".join(["python -m benchmarks.aot_table", *_common.arguments()]).replace(" --resume", "")
    payload = {"triton": triton.__version__, "command": command, "programs": PROGRAMS, "dtype": "bfloat16", "rows": []}
    done: dict[Any, dict[str, Any]] = {}
    if args.resume and Path(args.out).exists():
        earlier = json.loads(Path(args.out).read_text())
        if earlier["triton"] == triton.__version__:
            done = {Case(*(r.get(k) for k in KEY)).key: {"length": None, **r} for r in earlier["rows"]}
    for case in cases(tuple(args.archs), tuple(args.dims)):
        row = done.get(case.key)
        if row is None or not current(row, case):
            row = complete(case)
            print(*case.key, config_text(row), row.get("registers"), row.get("shared"), *row["problems"], flush=True)
        payload["rows"].append(row)
        # A run that is stopped keeps what it has, and what the earlier one had behind it.
        left = [r for k, r in done.items() if k not in {Case(*(x[k] for k in KEY)).key for x in payload["rows"]}]
        _common.save(args.out, {**payload, "rows": [*payload["rows"], *left]})
    _common.save(args.out, payload)
    Path(args.notes).write_text(notes(payload))


if __name__ == "__main__":
    main()
