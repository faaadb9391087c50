"""Values and gradients of the kernels on the GPU, against float64, for every program family, dtype and shape class.

Bound: the error is at most twice that of eager code of the same precision (both matmuls and P in the operands' dtype),
plus a rounding of the result (float32: of a sum of a few hundred terms, taken in another order).
"""

from __future__ import annotations

import pytest
import torch

from fa_inductor.templates import direct, select
from tests.templates import families
from tests.templates.families import FAMILIES, SATURATED, Family

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CAUSAL = "attention(score=where(q_idx >= kv_idx, score * 0.125, -inf))"
DOCUMENTS = "attention(score=where((q_idx >= kv_idx) & (i0[b, q_idx] == i0[b, kv_idx]), score * 0.125, -inf))"

SHAPES = [
    *(Family(f"d{d}", CAUSAL, (1, 2, 1, 200, 200, d, d)) for d in (1, 8, 40, 64, 72, 96, 128, 160, 192, 256, 320, 512)),
    *(Family(f"gqa{g}", CAUSAL, (2, 16, 16 // g, 130, 130, 64, 64)) for g in (1, 2, 4, 8, 16)),
    Family("d192_v128", CAUSAL, (1, 4, 2, 190, 190, 192, 128)),
    Family("d64_v256", CAUSAL, (1, 4, 2, 190, 190, 64, 256)),
    Family("decode", "attention(score=score * 0.125)", (4, 16, 4, 1, 777, 128, 128)),
    Family("few_queries", "attention(score=score * 0.125)", (2, 8, 2, 7, 333, 128, 128)),
    Family("plain_d128", "attention(score=score * 0.1)", (1, 2, 1, 200, 333, 128, 128)),
    Family("plain_even_d128", "attention(score=score * 0.1)", (2, 2, 2, 1280, 1408, 128, 128)),
    Family("plain_short_d128", "attention(score=score * 0.1)", (2, 2, 2, 512, 512, 128, 128)),
    Family("causal_short_d128", CAUSAL, (2, 2, 2, 512, 512, 128, 128)),
    Family("softcap_short_d128", "attention(score=tanh(score * 0.1 * 0.04) * 25.0)", (2, 2, 2, 512, 512, 128, 128)),
    Family("gqa_uneven_short_d128", "attention(score=score * 0.1)", (2, 4, 2, 300, 500, 128, 128)),
    Family("plain_even_d64", "attention(score=score * 0.125)", (2, 2, 2, 1280, 1408, 64, 64)),
    Family("causal_heads_d128", CAUSAL, (1, 2, 2, 300, 333, 128, 128)),
    Family("causal_even_d128", CAUSAL, (1, 2, 2, 1280, 1280, 128, 128)),
    Family(
        "bias_d128",
        "attention(score=score * 0.1 + f0[h, q_idx, kv_idx])",
        (1, 2, 2, 300, 333, 128, 128),
        families.normal("h", "m", "n"),
    ),
    Family(
        "bias_even_d128",
        "attention(score=score * 0.1 + f0[h, q_idx, kv_idx])",
        (2, 2, 2, 384, 512, 128, 128),
        families.normal("h", "m", "n"),
    ),
    Family("documents_d128", DOCUMENTS, (2, 2, 2, 1280, 1280, 128, 128), families.documents),
    Family("documents_uneven_d128", DOCUMENTS, (2, 4, 2, 700, 700, 128, 128), families.documents),
    Family("long", CAUSAL, (1, 2, 1, 1000, 1111, 128, 128)),
    Family("even_long", CAUSAL, (2, 4, 2, 1024, 1024, 128, 128), layout="bmhd"),
    Family("packed_long", CAUSAL, (2, 4, 4, 640, 640, 64, 64), layout="packed"),
]


def run(family: Family, o: families.Operands, arch: int, index: int, options: dict[str, str]) -> tuple:
    """(out, lse, gradients) with the ``index``-th configurations, or the next that fit, as lowering takes them."""
    from triton.runtime.errors import OutOfResources

    spec, sizes = family.spec(), family.sizes
    problem = direct.problem_of(o.q, o.k, o.v, o.captures, sizes, [o.grad_out])
    for i in range(index, index + 3):
        tile = direct.choose_all(spec, problem, arch, i)
        try:
            out, lse = direct.forward(o.q, o.k, o.v, o.captures, sizes, spec, tile, **options)
            grads = direct.backward(
                o.grad_out, o.q, o.k, o.v, out, lse, o.captures, sizes, spec, o.needs_grad, tile, **options
            )
        except OutOfResources:
            continue
        return out, lse, grads
    raise AssertionError("no configuration fits in shared memory")


def check(family: Family, dtype: torch.dtype, index: int = 0, arch: int | None = None) -> None:
    o = families.draw(family, dtype, "cuda")
    spec = family.spec()
    options = {}
    if arch is None:
        arch = select.architecture(torch.cuda.get_device_capability())
        assert arch is not None
    else:
        options["arch"] = f"sm{arch}"
    out, lse, grads = run(family, o, arch, index, options)
    true_out, true_lse, true_grads = families.truth(o, family)
    eager_out, eager_grads = families.eager(o, spec, family.sizes)
    assert families.error(lse, true_lse) < 2e-3
    rounding = (16.0 if dtype == torch.float32 else 2.0) * torch.finfo(dtype).eps
    compared = [("out", out, eager_out, true_out)]
    compared += list(zip(families.names(o), grads, eager_grads, true_grads, strict=True))
    for name, ours, eager, true in compared:
        if ours is None or true is None or eager is None:
            continue
        allowed = 2.0 * families.error(eager, true) + rounding
        assert families.error(ours, true) <= allowed, (name, families.error(ours, true), allowed)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_family(family: Family, dtype: torch.dtype) -> None:
    check(family, dtype)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("family", SATURATED, ids=lambda f: f.name)
def test_saturated(family: Family, index: int) -> None:
    check(family, torch.float32, index)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("family", SHAPES, ids=lambda f: f.name)
def test_shape(family: Family, dtype: torch.dtype) -> None:
    check(family, dtype)


@pytest.mark.parametrize("index", [1, 2])
@pytest.mark.parametrize("name", ["causal", "softcap_bias", "dead_1e9", "dropout", "sinks_window"])
def test_every_candidate(name: str, index: int) -> None:
    """The configurations that only max-autotune or a failing first choice would take."""
    for d in (64, 128, 256):
        family = families.BY_NAME[name]
        b, h, hkv, m, n, _, _ = family.shape
        check(family.with_shape(b, h, hkv, m, n, d, d), torch.bfloat16, index)


@pytest.mark.parametrize("family", [*FAMILIES, *SHAPES[:3]], ids=lambda f: f.name)
def test_sm80_form(family: Family) -> None:
    """The sm_80 configurations compiled for sm_80 (mma.sync, cp.async) and run on the GPU at hand."""
    check(family, torch.bfloat16, arch=80)


def test_strides_past_int32() -> None:
    family = Family("wide", CAUSAL, (2, 2, 1, 300, 300, 64, 64))
    o = families.draw(family, torch.bfloat16, "cuda")
    backing = torch.empty(2**31 + 2**27, dtype=torch.bfloat16, device="cuda")
    far = backing.as_strided((2, 1, 300, 64), (2**20, 64, 7_300_000, 1))
    far.copy_(o.k)
    o.k = far
    spec = family.spec()
    tile = direct.choose_all(spec, direct.problem_of(o.q, o.k, o.v, [], ()), 90)
    out, _ = direct.forward(o.q, o.k, o.v, [], (), spec, tile)
    true_out, _, _ = families.truth(o, family)
    eager_out, _ = families.eager(o, family.spec(), ())
    assert families.error(out, true_out) <= 2 * families.error(eager_out, true_out) + 0.01
