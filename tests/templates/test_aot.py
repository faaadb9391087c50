"""Every kernel compiles for sm_80, sm_90 and sm_100 on a machine without a GPU, and comes out as it should.

The instructions are those of the architecture, shared memory fits, there is no trap stub (what Triton leaves where
tensor memory ran out) and the default configurations do not spill. The table of test_aot_table.py covers the other targets.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from benchmarks import _common
from benchmarks._aot import SHARED_LIMIT, GluonRequest, compiled, render, request
from fa_inductor._compat import triton_version, version_tuple
from fa_inductor.spec import AttentionSpec, CacheForm
from fa_inductor.templates import select, tiles
from fa_inductor.templates.configs import TileConfig, Use, candidates, deep_rows, few_rows
from fa_inductor.templates.program import Program
from fa_inductor.templates.rendering import KernelSource, Problem
from fa_inductor.templates.score_codegen import CaptureInfo
from fa_inductor.templates.sm90 import backward_launch
from fa_inductor.templates.sm90.launch import config_of
from fa_inductor.templates.standalone import _value, complete
from tests.templates.families import BY_NAME

pytest.importorskip("triton")

TABLE = json.loads((_common.RESULTS / "aot_table.json").read_text())
CAUSAL = "attention(score=where(q_idx >= kv_idx, score * 0.088, -inf))"

#: Bytes of stack of default configurations with a triton that they were not chosen with.
SPILLS: dict[tuple[str, int, int], int] = {}
if version_tuple(triton_version() or "3.7") >= (3, 9):
    SPILLS = {("dkdv", 90, 256): 168, ("dq", 80, 128): 24}


def from_table(arch: int, which: str, dim: int, config: TileConfig, source: str) -> dict[str, Any] | None:
    """The row of a kernel in the committed table, where it is of this text, these tiles and this triton.

    What a row says is held to a fresh compile of some of them by test_aot_table.py.
    """
    if triton_version() != TABLE["triton"]:
        return None
    wanted = {"arch": arch, "kernel": "general", "which": which, "dim": dim, "mask": "causal", "source": source}
    found = [r for r in TABLE["rows"] if {k: r[k] for k in wanted} == wanted and r["config"] == asdict(config)]
    return found[0] if found else None


def compile_for(arch: int, kernel: KernelSource, element: str = "bf16", **captures: str) -> dict[str, Any]:
    return compiled(request(arch, kernel, element, **captures))


def check(arch: int, report: dict[str, Any], config: TileConfig, element: str = "bf16") -> None:
    found = report["instructions"]
    assert report["shared"] <= SHARED_LIMIT[arch]
    assert report["tmem"] <= 512
    assert found["trap"] == 0
    if element != "bf16":
        return
    if arch == 80:
        assert found["mma.sync"] > 0
        assert found["cp.async"] > 0 or config.num_stages == 1
    else:
        # Below 64 rows wgmma and tcgen05 do not apply, and Triton falls back to mma.sync.
        wide = {90: "wgmma", 100: "tcgen05"}[arch]
        assert found[wide] > 0 or min(config.block_m, config.block_n) < 64
        assert found["bulk_load"] > 0 or not config.tma


@pytest.mark.parametrize("dim", [64, 128, 256, 512])
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("which", ["forward", "dkdv", "dq"])
def test_default_configuration(which: str, arch: int, dim: int) -> None:
    problem = Problem(dim, dim, 1, tma=arch >= 90)
    config = tiles.choose(Program.of(AttentionSpec.parse(CAUSAL), problem), problem, arch, which)[0]
    kernel = render(CAUSAL, problem, which, config)
    report = from_table(arch, which, dim, config, kernel.name) or compile_for(arch, kernel)
    check(arch, report, config)
    assert report["local"] == 0
    assert report["stack"] <= SPILLS.get((which, arch, dim), 0)


@pytest.mark.parametrize(
    ("arch", "rows", "dim", "splits"),
    [(80, 4, 128, 4), (80, 64, 128, 1), (90, 16, 64, 1), (90, 32, 256, 4), (90, 64, 64, 4), (100, 8, 128, 4)],
)
def test_few_queries(arch: int, rows: int, dim: int, splits: int) -> None:
    """The tile of a decoding step, its keys shared out or not."""
    use = Use(arch=arch, element=2, qk_pad=dim, v_pad=dim, rows=rows)
    config = few_rows(use)
    assert config is not None
    assert candidates(use, "forward")[0] == config
    config = replace(config, splits=splits)
    program = "attention(score=where(kv_idx <= q_idx + (kv_len - q_len), score * 0.088, -inf))"
    report = compile_for(arch, render(program, Problem(dim, dim, group=4, rows=rows // 4), "forward", config))
    check(arch, report, config)
    assert report["stack"] == report["local"] == 0


@pytest.mark.parametrize(("rows", "dim", "splits"), [(4, 128, 1), (32, 128, 2), (4, 64, 16), (32, 64, 1)])
@pytest.mark.parametrize("score", ["where(kv_idx <= q_idx + (kv_len - q_len), score * 0.088, -inf)", "score * 0.088 * f0[h]"])
def test_few_queries_on_every_multiprocessor(score: str, rows: int, dim: int, splits: int) -> None:
    config = deep_rows(Use(arch=90, element=2, qk_pad=dim, v_pad=dim, rows=rows))
    assert config is not None
    captures = (CaptureInfo(1, (frozenset({"h"}),)),) if "f0" in score else ()
    problem = Problem(dim, dim, group=4, rows=rows // 4, captures=captures, wide_captures=(False,) * len(captures))
    kinds = {"CAP0": "fp32"} if captures else {}
    kernel = render(f"attention(score={score})", problem, "forward", replace(config, splits=splits))
    report = compile_for(90, kernel, **kinds)
    check(90, report, config)
    assert report["stack"] == report["local"] == 0


def test_what_no_deep_tile_is_for() -> None:
    use = Use(arch=90, element=2, qk_pad=128, v_pad=128, rows=4)
    assert deep_rows(use) == TileConfig(16, 128, 4, 3)
    others: list[dict[str, Any]] = [
        {"arch": 80}, {"element": 4}, {"qk_pad": 256}, {"rows": None}, {"rows": 64}, {"bits": True}, {"shared": 99 * 1024},
        {"loads_tiles": True},
    ]  # fmt: skip
    for other in others:
        assert deep_rows(replace(use, **other)) is None


@pytest.mark.parametrize(
    ("arch", "form", "stored"),
    [(80, CacheForm(16), "bf16"), (90, CacheForm(64), "bf16"), (90, CacheForm(1, False), "bf16"),
     (80, CacheForm(k="bfloat16", v="bfloat16", k_scaled=True, v_scaled=True), "i8"),
     (90, CacheForm(16, True, "bfloat16", "float32", True, True), "fp8e4nv"), (100, CacheForm(16, k="bfloat16"), "i8")],
)  # fmt: skip
def test_caches(arch: int, form: CacheForm, stored: str) -> None:
    """The tile of a decoding step over pages, 8-bit elements or both."""
    kind = {"pages": form.page > 0, "bits": bool(form.k or form.v)}
    use = Use(arch=arch, element=2, qk_pad=128, v_pad=128, rows=4, **kind)
    config = deep_rows(use) or few_rows(use)
    assert config is not None
    program = "attention(score=where(kv_idx < i0[b], score * 0.088, -inf))"
    captures = (CaptureInfo(1, (frozenset({"b"}),)),)
    problem = Problem(128, 128, group=4, rows=1, captures=captures, wide_captures=(False,), cache=form)
    kinds = {"TABLE": "i64", "K": stored if form.k else "bf16", "V": stored if form.v else "bf16", "CAP0": "i64"}
    kernel = render(program, problem, "forward", replace(config, splits=4))
    # Sizes and strides are numbers, as Inductor writes them under static shapes.
    batch, keys = 16, 8192
    cached = (batch * keys // form.page, form.page, 8, 128) if form.page else (batch, keys, 8, 128)
    shapes = {"Q": (batch, 32, 1, 128), "LSE": (2, 4, batch, 32, 1), "OUT": (4, batch, 32, 1, 128), "CAP0": (batch,),
              "TABLE": (batch, keys // (form.page or 1)), "KS": (batch, 8, keys), "VS": (batch, 8, keys)}  # fmt: skip
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    tensors |= {name: torch.empty(cached, device="meta").transpose(1, 2) for name in ("K", "V")}
    known = tuple((s, _value(tensors, [keys], s)) for s in complete(kernel).scalars)
    report = compiled(replace(request(arch, kernel, "bf16", **kinds), known=known))
    check(arch, report, config)
    assert report["stack"] == report["local"] == 0


@pytest.mark.parametrize("which", ["forward", "dkdv", "dq", "rows"])
@pytest.mark.parametrize("arch", [80, 100, 120])
def test_float32(which: str, arch: int) -> None:
    family = select.architecture((arch // 10, arch % 10))
    assert family is not None
    for precision in ("ieee", "tf32"):
        problem = Problem(64, 64, 1, precision=precision, element=4)
        program = Program.of(AttentionSpec.parse(CAUSAL), problem)
        config = tiles.choose(program, problem, family, which, SHARED_LIMIT[arch])[0]
        check(arch, compile_for(arch, render(CAUSAL, problem, which, config), "fp32"), config, "fp32")


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_float32_rows_stay_in_registers(arch: int, dim: int) -> None:
    """Two products of float32 numbers, whose operands must not be loaded at once."""
    problem = Problem(dim, dim, 1, element=4)
    config = tiles.choose(Program.of(AttentionSpec.parse(CAUSAL), problem), problem, arch, "rows")[0]
    report = compile_for(arch, render(CAUSAL, problem, "rows", config), "fp32")
    check(arch, report, config, "fp32")
    assert report["local"] == 0
    assert report["stack"] <= 8


_PROGRAMS = {
    "softcap_bias": ({"CAP0": "bf16"}, (0,)),
    "padding_causal_finfo": ({"CAP0": "i1"}, ()),
    "document": ({"CAP0": "i64"}, ()),
    "alibi": ({"CAP0": "fp32"}, (0,)),
    "sinks_window": ({"CAP0": "bf16"}, (0,)),
    "dropout": ({"CAP0": "i64"}, ()),
    "relative": ({"CAP0": "fp32"}, (0,)),
    "run_time_sizes": ({}, ()),
    "functions": ({}, ()),
    "ids_narrow": ({"CAP0": "u8", "CAP1": "i8"}, ()),
    "key_lengths_without_limit": ({"CAP0": "i32", "CAP1": "i64"}, ()),
    "windows_without_limit": ({}, ()),
}


@pytest.mark.parametrize(("name", "arch"), [(n, (80, 90, 100)[i % 3]) for i, n in enumerate(_PROGRAMS)])
def test_programs(name: str, arch: int) -> None:
    """The kernels of programs with captures, dropout, sinks and run-time sizes; sizes are arguments, nothing is even."""
    kinds, slots = _PROGRAMS[name]
    family = BY_NAME[name]
    ranks = {n.slot: len(n.index) for n in family.spec().loads()}
    if family.spec().dropout_p:
        ranks[0] = 1
    captures = tuple(CaptureInfo(ranks[i]) for i in sorted(ranks))
    problem = Problem(
        64, 64, 2, captures, (False,) * len(family.sizes), False, (False,) * len(captures), tma=arch >= 90
    )  # fmt: skip
    for which in ("forward", "dkdv", "dq", "rows"):
        program = Program.of(family.spec(), problem)
        if which == "rows" and not program.wide:
            continue
        config = tiles.choose(program, problem, arch, which)[0]
        check(arch, compile_for(arch, render(family.program, problem, which, config, slots), **kinds), config)


@pytest.mark.parametrize(
    ("dims", "options", "keys", "stack"),
    [
        # Bytes that spill: windows at 64, which the general kernel takes, and a softcap in a window of uneven lengths, since the
        # kernel has one loop (the two loops before had none, and were slower in each case that was timed; these were not).
        ((64, 64), {}, 4096, 0),
        ((64, 64), {"has_high": True}, 4096, 0),
        ((64, 64), {"has_high": True, "has_low": True}, 4096, 0),
        ((64, 64), {"has_high": True, "even": False}, 4096, 0),
        ((64, 64), {"has_high": True, "has_low": True, "even": False}, 4096, 24),
        ((128, 128), {}, 4096, 0),
        ((128, 128), {"has_high": True}, 4096, 0),
        ((128, 128), {"even": False, "has_high": True, "has_low": True, "softcap": True}, 4096, 8),
        ((128, 128), {"even": False, "has_high": True, "has_low": True, "softcap": True}, 500, 0),
        ((128, 128), {"has_high": True}, 512, 0),
        ((128, 64), {"has_high": True}, 4096, 0),
        ((256, 256), {"has_high": True, "even": False}, 4096, 0),
        ((256, 128), {"has_high": True, "has_low": True}, 4096, 0),
    ],
)
def test_gluon_forward(dims: tuple[int, int], options: dict[str, bool], keys: int, stack: int) -> None:
    check_gluon(compiled(GluonRequest(*dims, config_of(dims[0], keys, "has_high" in options), **options)), stack)


@pytest.mark.parametrize("documents", [False, True])
def test_gluon_forward_in_one_loop(documents: bool) -> None:
    """The two forms that were timed."""
    if documents:
        config = config_of(128, 4096, True, True)
        check_gluon(compiled(GluonRequest(128, 128, config, program=_DOCUMENTS, captures=(_IDS,), length=4096)), 0)
    else:
        check_gluon(compiled(GluonRequest(128, 128, config_of(128, 512, True), has_high=True)), 0)


def check_gluon(found: dict[str, Any], stack: int) -> None:
    assert found["shared"] <= SHARED_LIMIT[90]
    assert found["instructions"]["wgmma"] > 0
    assert found["instructions"]["bulk_load"] > 0
    assert found["instructions"]["trap"] == found["instructions"]["mma.sync"] == 0
    assert "serialized" not in found["assembler"], found["assembler"]
    assert found["local"] == 0
    assert found["stack"] <= stack


@pytest.mark.parametrize(
    ("dims", "options", "stack"),
    [
        ((128, 128), {}, 0),
        ((128, 128), {"has_high": True}, 0),
        ((128, 128), {"even": False, "has_high": True, "has_low": True, "softcap": True}, 0),
        ((128, 64), {"has_high": True}, 0),
        ((64, 64), {"has_high": True}, 0),
        ((64, 64), {"has_high": True, "softcap": True}, 0),
        ((256, 256), {}, 0),
        ((256, 256), {"even": False, "has_high": True, "has_low": True, "softcap": True}, 0),
        ((128, 128), {"deterministic": True}, 0),
        ((128, 128), {"has_high": True, "deterministic": True}, 0),
        ((128, 64), {"has_high": True, "deterministic": True}, 0),
        ((64, 64), {"has_high": True, "deterministic": True}, 8),  # none with triton 3.7
        ((256, 256), {"has_high": True, "deterministic": True}, 0),
        ((256, 256), {"even": False, "has_high": True, "has_low": True, "softcap": True, "deterministic": True}, 0),
    ],
)
def test_gluon_backward(dims: tuple[int, int], options: dict[str, bool], stack: int) -> None:
    configs = backward_launch.SOFTCAP_CONFIGS if options.get("softcap") else backward_launch.CONFIGS
    found = compiled(GluonRequest(*dims, configs[dims[0]], **options))
    assert found["shared"] <= SHARED_LIMIT[90]
    assert found["instructions"]["wgmma"] > 0
    assert found["instructions"]["bulk_load"] > 0
    assert found["instructions"]["trap"] == found["instructions"]["mma.sync"] == 0
    assert "serialized" not in found["assembler"], found["assembler"]
    assert found["local"] == 0
    assert found["stack"] <= stack


_PADDING = "attention(score=where(m0[b, kv_idx], score * 0.088, -inf), dead_rows='zero')"
_ADDED = "attention(score=score * 0.088 + (1.0 - cast_float(i0[b, kv_idx])) * -3.3e38)"


_ALIBI = "attention(score=where(q_idx >= kv_idx, score * 0.088 + f0[h] * cast_float(kv_idx - q_idx), -inf))"
_DOCUMENTS = "attention(score=where((q_idx >= kv_idx) & (i0[b, q_idx] == i0[b, kv_idx]), score * 0.088, -inf))"
_SLOPES, _IDS, _TILE = ("fp32", (16,)), ("i64", (4, 4096)), ("i1", (4, 1, 4096, 4096))


@pytest.mark.parametrize(
    ("program", "captures", "dim", "length", "stack"),
    [
        # What spills was measured as faster than the general kernels all the same (templates/sm90/form.py, MOST_TERMS).
        (_ALIBI, (_SLOPES,), 128, 4096, 32),
        (_ALIBI, (_SLOPES,), 64, 4096, 64),
        (_ALIBI, (_SLOPES,), 64, 4000, 0),
        (_DOCUMENTS, (_IDS,), 128, 4000, 64),
        (_DOCUMENTS, (_IDS,), 64, 4096, 144),
        ("attention(score=where(q_idx >= kv_idx, score * f0[h], -inf))", (_SLOPES,), 128, 4096, 128),
        ("attention(score=where(q_idx >= kv_idx, score * f0[h], -inf))", (_SLOPES,), 64, 4096, 0),
        ("attention(score=minimum(maximum(score * 0.1, -5.0), 5.0))", (), 128, 4096, 128),
        # An index that is not proven to lie inside, and functions from the printer.
        ("attention(score=score * f0[h, i1[b, q_idx]] + sigmoid(erf(score)))", (("fp32", (16, 32)), _IDS), 64, 4096, 208),
        ("attention(score=where(m0[b, 0, q_idx, kv_idx], score, -inf), dead_rows='zero')", (_TILE,), 128, 4096, 208),
    ],
)
def test_gluon_backward_of_programs(program: str, captures: Any, dim: int, length: int, stack: int) -> None:
    heavy = program not in (_ALIBI, _DOCUMENTS) or length % 128 != 0
    config = (backward_launch.SOFTCAP_CONFIGS if heavy else backward_launch.CONFIGS)[dim]
    sized = tuple((kind, tuple(length if n == 4096 else n for n in sizes)) for kind, sizes in captures)
    found = compiled(GluonRequest(dim, dim, config, program=program, captures=sized, length=length))
    assert found["shared"] <= SHARED_LIMIT[90]
    assert found["instructions"]["wgmma"] > 0
    assert found["instructions"]["trap"] == found["instructions"]["mma.sync"] == 0
    assert "serialized" not in found["assembler"], found["assembler"]
    assert found["local"] == 0
    assert found["stack"] <= stack


_KEEP = ("i1", (4, 4096))


@pytest.mark.parametrize(
    ("program", "captures", "dim", "length", "stack"),
    [
        (_ALIBI, (_SLOPES,), 128, 4096, 0),
        (_ALIBI, (_SLOPES,), 256, 4096, 0),
        (_DOCUMENTS, (_IDS,), 128, 4096, 0),
        # What spills does so in edge tiles alone, and was measured as faster than the general kernel all the same.
        (_DOCUMENTS, (_IDS,), 128, 4000, 64),
        (_PADDING, (_KEEP,), 128, 4096, 48),
        (_PADDING, (_KEEP,), 64, 4096, 128),
        (_ADDED, (_IDS,), 128, 4096, 64),
        ("attention(score=where(kv_idx < i0[b], score, -inf), dead_rows='zero')", (("i64", (4,)),), 128, 4096, 32),
        ("attention(score=where(q_idx >= kv_idx, score * f0[h], -inf), sinks=[f0[h]])", (_SLOPES,), 128, 4096, 0),
        ("attention(score=minimum(maximum(score * 0.1, -5.0), 5.0))", (), 128, 4096, 0),
        ("attention(score=score * f0[h, i1[b, q_idx]] + sigmoid(erf(score)))", (("fp32", (16, 32)), _IDS), 128, 4096, 16),
        ("attention(score=where(m0[b, 0, q_idx, kv_idx], score, -inf), dead_rows='zero')", (_TILE,), 128, 4096, 48),
        ("attention(score=score * 0.088 + f0[h, q_idx, kv_idx])", (("bf16", (16, 4096, 4096)),), 128, 4096, 48),
    ],
)
def test_gluon_forward_of_programs(program: str, captures: Any, dim: int, length: int, stack: int) -> None:
    sized = tuple((kind, tuple(length if n == 4096 else n for n in sizes)) for kind, sizes in captures)
    config = config_of(dim, length, "q_idx >= kv_idx" in program, program == _DOCUMENTS)
    found = compiled(GluonRequest(dim, dim, config, program=program, captures=sized, length=length))
    assert found["shared"] <= SHARED_LIMIT[90]
    assert found["instructions"]["wgmma"] > 0
    assert found["instructions"]["trap"] == found["instructions"]["mma.sync"] == 0
    assert "serialized" not in found["assembler"], found["assembler"]
    assert found["local"] == 0
    assert found["stack"] <= stack
