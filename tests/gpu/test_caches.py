"""Caches in pages and in 8 bits on the GPU: values as eager's, and no copy of what is looked up or dequantised."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from fa_inductor.backend import fa_inductor
from tests.patterns import test_stored_keys as forms

pytestmark = pytest.mark.gpu

BATCH, HEADS, KV, DIM = 4, 16, 4, 64


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """k, v [B, N, Hkv, D]."""
    k, v = (x.transpose(1, 2).repeat_interleave(HEADS // KV, 1) for x in (k, v))
    keep = torch.arange(k.shape[2], device=q.device) < lengths[:, None, None, None]
    return (q @ k.transpose(-1, -2) * DIM**-0.5).masked_fill(~keep, float("-inf")).softmax(-1) @ v


def close(fn: Callable, *inputs: Tensor, **how: bool) -> None:
    """Compiled as eager in bfloat16, against eager with float64 operands behind the lookup."""
    run = torch.compile(fn, backend=fa_inductor, options={"strict": True}, **how)
    with torch.no_grad():
        ours, theirs = run(*inputs).double(), fn(*inputs).double()
    assert (ours - theirs).norm() <= 1e-2 * theirs.norm()


def cache(page: int, keys: int, kind: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(k, v, table, lengths) with a third more pages than are used, in random order."""
    blocks = keys // page
    pool = BATCH * blocks * 4 // 3
    k, v = (torch.randn(pool, page, KV, DIM, device="cuda") for _ in range(2))
    table = torch.randperm(pool, device="cuda")[: BATCH * blocks].view(BATCH, blocks)
    scale = 30 if kind == torch.int8 else 1
    lengths = torch.tensor([keys, 1, keys // 2, keys - 3], device="cuda")
    return (k * scale).to(kind), (v * scale).to(kind), table, lengths


def query(rows: int) -> Tensor:
    return torch.randn(BATCH, HEADS, rows, DIM, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("page", "rows", "keys"), [(16, 1, 1024), (64, 3, 1024), (1, 1, 1024), (128, 200, 1024), (16, 1, 4096), (128, 2, 4096)]
)
def test_pages(page: int, rows: int, keys: int, dynamic: bool) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        return attend(q, k[table].flatten(1, 2), v[table].flatten(1, 2), lengths)

    k, v, table, lengths = cache(page, keys)
    table = torch.where(torch.rand(table.shape, device="cuda") < 0.3, table - k.shape[0], table)  # counted from the end
    if dynamic:
        torch._dynamo.mark_dynamic(table, 1)
    close(fn, query(rows), k, v, table, lengths)


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("page", [0, 16])
def test_stored_bits(page: int, kind: torch.dtype) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, ks: Tensor, vs: Tensor) -> Tensor:
        if page:
            k, v, ks = (x[table].flatten(1, 2) for x in (k, v, ks))
        return attend(q, k.to(q.dtype) * ks, (v.float() * vs).to(q.dtype), lengths)

    k, v, table, lengths = cache(page or 16, 512, kind)
    if not page:
        k, v = (x[table].flatten(1, 2) for x in (k, v))
    ks = torch.rand(*k.shape[:-1], 1, device="cuda", dtype=torch.bfloat16) * 0.1
    close(fn, query(1), k, v, table, lengths, ks, torch.rand(KV, 1, device="cuda"))


def test_nothing_is_copied() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        return attend(q, k[table].flatten(1, 2), v[table].flatten(1, 2), lengths)

    k, v, table, lengths = cache(16, 32768)
    q = query(1)
    run = torch.compile(fn, backend=fa_inductor, options={"strict": True})
    with torch.no_grad():
        run(q, k, v, table, lengths)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(q, k, v, table, lengths)
    copied = 2 * BATCH * 32768 * KV * DIM * 2
    assert torch.cuda.max_memory_allocated() - before < copied // 16


@pytest.mark.parametrize("entry", [10**6, -(10**6)])
def test_entries_outside_read_inside(entry: int) -> None:
    """PyTorch's lookup stops the device; the kernel reads the nearest page."""
    q, k, v, table, lengths = query(1), *cache(16, 512)
    run = torch.compile(
        lambda q, k, v, table: attend(q, k[table].flatten(1, 2), v[table].flatten(1, 2), lengths),
        backend=fa_inductor, options={"strict": True},
    )  # fmt: skip
    with torch.no_grad():
        out = run(q, k, v, torch.full_like(table, entry))
        near = run(q, k, v, torch.full_like(table, k.shape[0] - 1 if entry > 0 else 0))
    assert torch.equal(out, near)


def test_spellings() -> None:
    """Those of the CPU tests, on the GPU."""
    for name, fn in forms.PAGED.items():
        torch._dynamo.reset()
        inputs = [x.cuda() for x in forms.operands(name in ("indexed", "indexed_flat", "cast_table", "heads_first", "one_pool"))]
        run = torch.compile(fn, backend=fa_inductor, options={"strict": True})
        with torch.no_grad():
            torch.testing.assert_close(run(*inputs), fn(*inputs), rtol=1e-4, atol=1e-5)
