"""The ops inside torch.compile on the GPU: generated Triton, with Inductor's fusions, tuning and fallbacks."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from fa_inductor import lowerings, ops
from fa_inductor.templates import configs, tiles
from tests.templates import families
from tests.templates.families import Family

pytestmark = pytest.mark.gpu

CAUSAL = "attention(score=where(q_idx >= kv_idx, score * 0.125, -inf))"
LONG = Family("long", CAUSAL, (2, 4, 2, 300, 300, 64, 64))


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    """Lowerings in place, and no compiled graph taken from a cache, which would pass them by."""
    lowerings.register()
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


def attention(
    q: Tensor, k: Tensor, v: Tensor, captures: Sequence[Tensor], family: Family, kernel: str = "triton"
) -> Tensor:
    return ops.flash_attention(q, k, v, list(captures), list(family.sizes), family.program, kernel)[0]


def close(ours: Tensor, eager: Tensor | None, true: Tensor | None, dtype: torch.dtype) -> None:
    assert true is not None
    assert eager is not None
    assert families.error(ours, true) <= 2.0 * families.error(eager, true) + 2.0 * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    "name",
    ["causal", "plain_bmhd", "alibi", "bias_heads", "padding_causal_finfo", "sinks_window", "dropout", "relative",
     "documents_long", "padding_long"],
)
def test_training_step(name: str) -> None:
    train(families.BY_NAME[name], torch.bfloat16)


@pytest.mark.parametrize("name", ["saturated", "saturated_causal", "saturated_factors", "saturated_dropout"])
def test_training_step_saturated(name: str) -> None:
    train(families.BY_NAME[name], torch.float32)


@pytest.mark.parametrize("shape", [(2, 4, 2, 300, 300, 64, 64), (2, 8, 4, 130, 5000, 64, 64)])
def test_strides_that_inductor_would_pad(shape: tuple[int, ...]) -> None:
    """More than 1024 rows a batch, and not in multiples of 128 bytes; of the second shape the keys are shared out."""
    assert shape[1] * shape[3] > torch._inductor.config.padding_stride_threshold
    assert shape[1] * shape[3] * 4 % torch._inductor.config.padding_alignment_bytes
    train(LONG.with_shape(*shape), torch.bfloat16, "general")


def train(family: Family, dtype: torch.dtype, kernel: str = "triton") -> None:
    """Output and gradients of the compiled op."""
    o = families.draw(family, dtype, "cuda")
    leaves = [
        t.detach().requires_grad_(need) for t, need in zip([o.q, o.k, o.v, *o.captures], o.needs_grad, strict=True)
    ]
    compiled = torch.compile(lambda q, k, v, *c: attention(q, k, v, c, family, kernel))
    out = compiled(*leaves)
    wanted = [t for t in leaves if t.requires_grad]
    grads = iter(torch.autograd.grad(out, wanted, o.grad_out))
    true_out, _, true_grads = families.truth(o, family)
    eager_out, eager_grads = families.eager(o, family.spec(), family.sizes)
    close(out, eager_out, true_out, dtype)
    for leaf, eager, true in zip(leaves, eager_grads, true_grads, strict=True):
        if leaf.requires_grad:
            close(next(grads), eager, true, dtype)


def _code(fn: Any, *args: Any) -> tuple[Tensor, str]:
    with torch.no_grad():
        out, sources = run_and_get_code(torch.compile(fn), *args)
    return out, "\n".join(sources)


def test_epilogue_is_fused() -> None:
    o = families.draw(LONG, torch.bfloat16, "cuda")
    gate = torch.randn_like(o.grad_out)

    def model(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        return attention(q, k, v, [], LONG).float() * gate.sigmoid() + 1.0

    out, code = _code(model, o.q, o.k, o.v, gate)
    assert code.count(".run(") == 1, "one kernel: attention with the gate in its epilogue"
    true = families.truth(o, LONG)[0] * gate.double().sigmoid() + 1.0
    assert families.error(out, true) < 1e-2


def test_dynamic_lengths_do_not_recompile() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, [], LONG), backend=counter, dynamic=True)
    for m in (300, 333, 512, 1000):
        family = LONG.with_shape(2, 4, 2, m, m, 64, 64)
        o = families.draw(family, torch.bfloat16, "cuda")
        with torch.no_grad():
            out = compiled(o.q, o.k, o.v)
        close(out, families.eager(o, family.spec(), ())[0], families.truth(o, family)[0], torch.bfloat16)
    assert counter.frame_count == 1


DECODE = Family(
    "decode",
    "attention(score=where(kv_idx < i0[b], score * 0.125, -inf), sinks=[f1[h]])",
    (3, 8, 2, 2, 3000, 64, 64),
    lambda shape, g: [torch.tensor([3000, 700, 1]), torch.randn(shape[1], generator=g)],
)


@pytest.mark.parametrize("name", ["decode", "dead", "bias", "long"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_few_queries_share_the_keys(name: str, dynamic: bool) -> None:
    """A decoding step: several programs a tile, merged afterwards; gradients from what is merged."""
    family = {
        "decode": DECODE,
        "dead": replace(DECODE, program="attention(score=where(kv_idx < i0[b] - 1, score * 0.125, -inf), dead_rows='zero')",
                        captures=lambda shape, g: [torch.tensor([3000, 700, 1])]),
        "bias": replace(DECODE, program="attention(score=score * 0.125 + f0[h, q_idx, kv_idx])",
                        captures=families.normal("h", "m", "n")),
        "long": Family("long", CAUSAL, (1, 2, 1, 130, 5000, 64, 128)),
    }[name]  # fmt: skip
    o = families.draw(family, torch.bfloat16, "cuda")
    leaves = [t.detach().requires_grad_(need) for t, need in zip([o.q, o.k, o.v, *o.captures], o.needs_grad, strict=True)]
    if dynamic:
        torch._dynamo.mark_dynamic(leaves[1], 2)
        torch._dynamo.mark_dynamic(leaves[2], 2)
    compiled = torch.compile(lambda q, k, v, *c: attention(q, k, v, c, family))
    out, sources = run_and_get_code(compiled, *leaves)
    assert "SPLITS : tl.constexpr = " in sources[0]
    assert "SPLITS : tl.constexpr = 1\n" not in sources[0]
    grads = iter(torch.autograd.grad(out, [t for t in leaves if t.requires_grad], o.grad_out))
    true_out, _, true_grads = families.truth(o, family)
    eager_out, eager_grads = families.eager(o, family.spec(), family.sizes)
    close(out, eager_out, true_out, torch.bfloat16)
    for leaf, eager, true in zip(leaves, eager_grads, true_grads, strict=True):
        if leaf.requires_grad:
            close(next(grads), eager, true, torch.bfloat16)


POSITION = "attention(score=(score * 0.088) + where(kv_idx <= i0[0], 0.0, -3.3895313892515355e+38), layout='bmhd')"


@pytest.mark.parametrize(
    ("family", "splits"),
    [
        (replace(DECODE, shape=(4, 32, 8, 1, 4100, 128, 128),
                 captures=lambda shape, g: [torch.tensor([4100, 700, 1, 3001]), torch.randn(shape[1], generator=g)]), 16),
        (Family("position", POSITION, (16, 16, 8, 2, 1000, 64, 64), lambda shape, g: [torch.tensor([800])]), 1),
        (Family("position", POSITION, (4, 32, 8, 1, 4096, 128, 128), lambda shape, g: [torch.tensor([-1])],
                exact=torch.float32), 4),
        (Family("causal", CAUSAL.replace("q_idx", "q_idx + (kv_len - q_len)"), (2, 32, 32, 16, 2050, 128, 128)), 2),
    ],
    ids=["lengths", "position", "no_key", "heads"],
)  # fmt: skip
@pytest.mark.parametrize("dynamic", [False, True])
def test_one_program_on_each_multiprocessor(family: Family, splits: int, dynamic: bool) -> None:
    """A decoding step whose tiles and parts make one wave, on a GPU of 132 multiprocessors."""
    if torch.cuda.get_device_properties(0).multi_processor_count != 132:
        pytest.skip("the numbers of parts are those of 132 multiprocessors")
    o = families.draw(family, torch.bfloat16, "cuda")
    if dynamic:
        for t in (o.k, o.v):
            torch._dynamo.mark_dynamic(t, 2)
    out, code = _code(lambda q, k, v, *c: attention(q, k, v, c, family), o.q, o.k, o.v, *o.captures)
    assert f"SPLITS : tl.constexpr = {splits}\n" in code
    assert "BLOCK_N : tl.constexpr = 128\n" in code
    close(out, families.eager(o, family.spec(), ())[0], families.truth(o, family)[0], torch.bfloat16)


def test_max_autotune_and_cuda_graphs() -> None:
    o = families.draw(LONG, torch.bfloat16, "cuda")
    for mode in ("max-autotune-no-cudagraphs", "reduce-overhead"):
        torch._dynamo.reset()
        compiled = torch.compile(lambda q, k, v: attention(q, k, v, [], LONG) + 0.0, mode=mode)
        with torch.no_grad():
            for _ in range(3):
                out = compiled(o.q, o.k, o.v).clone()
        close(out, families.eager(o, LONG.spec(), ())[0], families.truth(o, LONG)[0], torch.bfloat16)


@pytest.mark.parametrize("survivors", [1, 0])
def test_configuration_that_cannot_run_is_dropped(
    survivors: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """256 x 256 tiles at head_dim 64 with 8 stages need more shared memory than there is."""
    broken = configs.TileConfig(256, 256, 8, 8)
    good = [configs.TileConfig(64, 64, 4, 2)] * survivors
    monkeypatch.setattr(tiles, "choose", lambda *args: [broken, *good])
    o = families.draw(LONG, torch.bfloat16, "cuda")
    with caplog.at_level(logging.WARNING, logger="fa_inductor.lowering"), torch.no_grad():
        out = torch.compile(lambda q, k, v: attention(q, k, v, [], LONG) * 1.0)(o.q, o.k, o.v)
    assert "dropped" in caplog.text
    assert ("no configuration compiles" in caplog.text) == (survivors == 0)
    close(out, families.eager(o, LONG.spec(), ())[0], families.truth(o, LONG)[0], torch.bfloat16)


def test_deterministic_algorithms() -> None:
    """Gradients of q, k and v use no atomics; where a capture's gradient needs them the eager kernel runs."""
    torch.use_deterministic_algorithms(True)
    try:
        for name in ("causal", "alibi"):
            family = families.BY_NAME[name]
            o = families.draw(family, torch.bfloat16, "cuda")
            runs = []
            for _ in range(3):
                leaves = [
                    t.detach().requires_grad_(need)
                    for t, need in zip([o.q, o.k, o.v, *o.captures], o.needs_grad, strict=True)
                ]
                out = torch.compile(lambda q, k, v, *c, f=family: attention(q, k, v, c, f))(*leaves)
                runs.append(torch.autograd.grad(out, [t for t in leaves if t.requires_grad], o.grad_out))
            for again in runs[1:]:
                assert all(torch.equal(x, y) for x, y in zip(runs[0], again, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)
