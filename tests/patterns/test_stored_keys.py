"""Caches in pages and in 8 bits: what reaches the op as it is stored, what is copied first as the graph says, and their values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch import Tensor

from fa_inductor import caches, ops
from fa_inductor.errors import ProgramError
from fa_inductor.spec import CacheForm
from tests.compiling import fuse, rewriting
from tests.patterns.printing import graph_text

B, HEADS, KV, DIM, POOL, PAGE, RUN = 2, 4, 2, 8, 9, 4, 3
KEYS = RUN * PAGE


def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """k, v [B, N, Hkv, D]; keys from ``lengths`` on are masked."""
    k, v = (x.transpose(1, 2).repeat_interleave(HEADS // KV, 1) for x in (k, v))
    keep = torch.arange(k.shape[2], device=q.device) < lengths[:, None, None, None]
    return (q @ k.transpose(-1, -2) * DIM**-0.5).masked_fill(~keep, float("-inf")).softmax(-1) @ v


def indexed(q, k, v, table, lengths):
    return attend(q, k[table].reshape(B, -1, KV, DIM), v[table].reshape(B, -1, KV, DIM), lengths)


def indexed_flat(q, k, v, table, lengths):
    return attend(q, *(x[table.reshape(-1)].view(B, -1, KV, DIM) for x in (k, v)), lengths)


def cast_table(q, k, v, table, lengths):
    return attend(q, *(x[table.int().long()].flatten(1, 2) for x in (k, v)), lengths)


def heads_first(q, k, v, table, lengths):
    k, v = (x.transpose(1, 2).contiguous()[table].permute(0, 1, 3, 2, 4).reshape(B, -1, KV, DIM) for x in (k, v))
    return attend(q, k, v, lengths)


def one_pool(q, k, v, table, lengths):
    pool = torch.stack([k, v], 1)
    return attend(q, *(pool[:, i][table].flatten(1, 2) for i in (0, 1)), lengths)


def selected(q, k, v, table, lengths):
    return attend(q, *(x.index_select(0, table.flatten()).view(B, -1, KV, DIM) for x in (k, v)), lengths)


def embedded(q, k, v, table, lengths):
    return attend(q, *(F.embedding(table, x.view(x.shape[0], -1)).view(B, -1, KV, DIM) for x in (k, v)), lengths)


def gathered(q, k, v, table, lengths):
    def take(x: Tensor) -> Tensor:
        rows = table.reshape(-1, 1, 1, 1).expand(-1, PAGE, KV, DIM)
        return torch.gather(x, 0, rows).view(B, -1, KV, DIM)

    return attend(q, take(k), take(v), lengths)


def by_token(q, k, v, table, lengths):
    at = torch.arange(KEYS, device=q.device)
    slots = table[:, at // PAGE] * PAGE + at % PAGE
    return attend(q, *(x.view(-1, KV, DIM)[slots] for x in (k, v)), lengths)


def first_keys(q, k, v, table, lengths):
    return attend(q, *(x[table].flatten(1, 2)[:, :10] for x in (k, v)), lengths)


def whole_sequences(q, k, v, table, lengths):
    return attend(q, *(x.index_select(0, table) for x in (k, v)), lengths)


PAGED = {f.__name__: f for f in (indexed, indexed_flat, cast_table, heads_first, one_pool, selected, embedded, gathered, by_token,
                                 first_keys)}  # fmt: skip


def operands(wraps: bool = True) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    k, v = (torch.randn(POOL, PAGE, KV, DIM, generator=g) for _ in range(2))
    table = torch.randint(-POOL if wraps else 0, POOL, (B, RUN), generator=g)
    return torch.randn(B, HEADS, 1, DIM, generator=g), k, v, table, torch.tensor([5, 11])


def compiled(fn: Callable, *inputs: Tensor) -> tuple[Tensor, str]:
    """(output, text of the rewritten graph), the output compared with eager's."""
    run, backend = fuse(fn, rewriting(), dynamic=None)
    with torch.no_grad():
        out = run(*inputs)
        expected = fn(*(x.clone() for x in inputs))
    assert (out.double() - expected.double()).norm() <= 4 * torch.finfo(out.dtype).eps * expected.double().norm()
    assert backend.fused == 1, backend.reasons
    return out, graph_text(backend.graphs[0])


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", PAGED)
def test_pages_are_not_copied(name: str, dynamic: bool) -> None:
    fn = PAGED[name]
    wraps = name in ("indexed", "indexed_flat", "cast_table", "heads_first", "one_pool")
    inputs = operands(wraps)
    if dynamic:
        for x, dim in zip(inputs[1:4], (0, 0, 1), strict=True):
            torch._dynamo.mark_dynamic(x, dim)
    _, text = compiled(fn, *inputs)
    expected = "cache(page=1)" if name == "by_token" else "cache(page=4)"
    if name in ("selected", "embedded", "gathered"):
        expected = "cache(page=4, wraps=False)"
    assert expected in text
    assert "f32[2, 3, 4" not in text
    assert "[2, 12, 2, 8]" not in text


def test_whole_sequences() -> None:
    """Beams that share prefixes: one page a sequence."""
    q, k, v, table, lengths = operands(False)
    _, text = compiled(whole_sequences, q, k, v, table[:, 0].contiguous(), lengths.clamp_max(4))
    assert "cache(page=4, wraps=False)" in text


class Goldens(TestCase):
    maxDiff = None

    def test_pages(self) -> None:
        self.assertExpectedInline(compiled(indexed, *operands())[1], """\
k: f32[9, 4, 2, 8]
lengths: i64[2]
q: f32[2, 4, 1, 8]
table: i64[2, 3]
v: f32[9, 4, 2, 8]
select = select(q, 2, 0): f32[2, 4, 8]
unsqueeze = unsqueeze(select, 2): f32[2, 4, 1, 8]
permute = permute(k, [0, 2, 1, 3]): f32[9, 2, 4, 8]
permute_1 = permute(v, [0, 2, 1, 3]): f32[9, 2, 4, 8]
attention = cached_attention(unsqueeze, permute, permute_1, captures=[lengths], keys=12)
    attention(score=where(~(kv_idx < i0[b]), -inf, score * 0.3535533905932738))
    cache(page=4), table=table
item = attention[0]: f32[2, 4, 1, 8]
select_1 = select(item, 2, 0): f32[2, 4, 8]
unsqueeze_1 = unsqueeze(select_1, 2): f32[2, 4, 1, 8]
return unsqueeze_1
""")

    def test_dequantised_pages(self) -> None:
        def fn(q, k, v, table, lengths, ks, vs):
            k, v = (x[table].float() * s[table] for x, s in ((k, ks), (v, vs)))
            return attend(q, k.flatten(1, 2), v.flatten(1, 2), lengths)

        q, k, v, table, lengths = operands()
        ks, vs = (x.abs().amax(-1, keepdim=True) / 127 for x in (k, v))
        k, v = ((x / s).round().to(torch.int8) for x, s in ((k, ks), (v, vs)))
        self.assertExpectedInline(compiled(fn, q, k, v, table, lengths, ks, vs)[1], """\
k: torch.int8[9, 4, 2, 8]
ks: f32[9, 4, 2, 1]
lengths: i64[2]
q: f32[2, 4, 1, 8]
table: i64[2, 3]
v: torch.int8[9, 4, 2, 8]
vs: f32[9, 4, 2, 1]
getitem = getitem(ks, table): f32[2, 3, 4, 2, 1]
getitem_1 = getitem(vs, table): f32[2, 3, 4, 2, 1]
select = select(q, 2, 0): f32[2, 4, 8]
unsqueeze = unsqueeze(select, 2): f32[2, 4, 1, 8]
permute = permute(k, [0, 2, 1, 3]): torch.int8[9, 2, 4, 8]
permute_1 = permute(v, [0, 2, 1, 3]): torch.int8[9, 2, 4, 8]
select_1 = select(getitem, 4, 0): f32[2, 3, 4, 2]
permute_2 = permute(select_1, [0, 3, 1, 2]): f32[2, 2, 3, 4]
flatten = flatten(permute_2, 2, 3): f32[2, 2, 12]
select_2 = select(getitem_1, 4, 0): f32[2, 3, 4, 2]
permute_3 = permute(select_2, [0, 3, 1, 2]): f32[2, 2, 3, 4]
flatten_1 = flatten(permute_3, 2, 3): f32[2, 2, 12]
attention = cached_attention(unsqueeze, permute, permute_1, captures=[lengths], keys=12)
    attention(score=where(~(kv_idx < i0[b]), -inf, score * 0.3535533905932738))
    cache(page=4, k='float32', v='float32', k_scaled=True, v_scaled=True), table=table, k_scale=flatten, v_scale=flatten_1
item = attention[0]: f32[2, 4, 1, 8]
select_3 = select(item, 2, 0): f32[2, 4, 8]
unsqueeze_1 = unsqueeze(select_3, 2): f32[2, 4, 1, 8]
return unsqueeze_1
""")


# ---------------------------------------------------------------------------------------------------------- 8 bits
def stored(kind: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v [B, N, Hkv, D] and lengths."""
    g = torch.Generator().manual_seed(0)
    k, v = (torch.randn(B, KEYS, KV, DIM, generator=g) * (20 if kind == torch.int8 else 1) for _ in range(2))
    return torch.randn(B, HEADS, 1, DIM, generator=g), k.to(kind), v.to(kind), torch.tensor([5, 11])


SCALES = {
    "per_token": (B, KEYS, KV, 1), "per_position": (KEYS, 1, 1), "per_head": (KV, 1), "per_sequence": (B, 1, 1, 1), "one": (),
}  # fmt: skip


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("scale", SCALES)
def test_dequantised_inside(scale: str, kind: torch.dtype) -> None:
    def fn(q, k, v, lengths, ks, vs):
        return attend(q, k.to(q.dtype) * ks, vs * v.to(q.dtype), lengths)

    g = torch.Generator().manual_seed(1)
    ks, vs = (torch.rand(SCALES[scale], generator=g) for _ in range(2))
    for dtype in (torch.float32, torch.bfloat16):
        torch._dynamo.reset()
        q, k, v, lengths = stored(kind)
        _, text = compiled(fn, q.to(dtype), k, v, lengths, ks.to(dtype), vs.to(dtype))
        name = str(dtype).removeprefix("torch.")
        assert f"cache(k='{name}', v='{name}', k_scaled=True, v_scaled=True)" in text


def test_the_product_keeps_its_dtype() -> None:
    """Multiplied in float32, then rounded to bfloat16 once; and a number as the scale."""

    def fn(q, k, v, lengths, ks):
        return attend(q, (k.float() * ks).to(q.dtype), v.to(q.dtype) * 0.3, lengths)

    q, k, v, lengths = stored(torch.int8)
    _, text = compiled(fn, q.bfloat16(), k, v, lengths, torch.rand(KV, 1))
    assert "cache(k='float32', v='bfloat16', k_scaled=True, v_scaled=True)" in text


def test_values_alone() -> None:
    def fn(q, k, v, lengths):
        return attend(q, k.to(q.dtype) + 1.0, v.to(q.dtype), lengths)

    q, k, v, lengths = stored(torch.float8_e4m3fn)
    assert "cache(v='float32')" in compiled(fn, q, k, v, lengths)[1]


def test_stored_beside_a_cast() -> None:
    """Keys in 8 bits, values in float32 that the user's code rounds."""

    def fn(q, k, v, lengths):
        return attend(q, k.to(q.dtype), v.to(q.dtype), lengths)

    q, k, v, lengths = stored(torch.int8)
    _, text = compiled(fn, q.bfloat16(), k, v.float(), lengths)
    assert "cache(k='bfloat16')" in text


def test_many_queries_copy() -> None:
    def fn(q, k, v, lengths):
        return attend(q.expand(-1, -1, 300, -1), k.to(q.dtype), v.to(q.dtype), lengths)

    assert "cached_attention" not in compiled(fn, *stored(torch.int8))[1]


def test_region_of_several_calls_copies() -> None:
    """A body stands for each of its calls: what one of them hands it says nothing of the others."""

    @torch.compiler.nested_compile_region
    def region(q, keys, values, k, v, lengths):
        return attend(q, keys, values, lengths) + (k.sum() + v.sum()) * 0.0

    def fn(q, k, v, table, lengths):
        first = region(q, k[table].flatten(1, 2), v[table].flatten(1, 2), k, v, lengths)
        return first + region(q, k[table].flatten(1, 2) + 1.0, v[table].flatten(1, 2), k, v, lengths)

    run, backend = fuse(fn, rewriting())
    with torch.no_grad():
        torch.testing.assert_close(run(*operands()), fn(*operands()))
    assert "cached_attention" not in graph_text(backend.graphs[0])


# ------------------------------------------------------------------------------------------------ copied as before
def other_tables(q, k, v, table, lengths):
    return attend(q, k[table].flatten(1, 2), v[table.flip(0)].flatten(1, 2), lengths)


def pages_by_head(q, k, v, table, lengths):
    """Another page for each head."""
    at = torch.arange(KV, device=q.device)
    both = torch.stack([table, table.flip(1)], -1)
    return attend(q, *(x[both[:, :, None], torch.arange(PAGE)[None, None, :, None], at].flatten(1, 2) for x in (k, v)), lengths)


def turned_pages(q, k, v, table, lengths):
    """The keys of a page in reverse order."""
    return attend(q, *(x[table].flip(2).flatten(1, 2) for x in (k, v)), lengths)


def shifted(q, k, v, table, lengths):
    return attend(q, *(x[table].flatten(1, 2)[:, 1:] for x in (k, v)), lengths)


def twice(q, k, v, table, lengths):
    return attend(q, *(x[table[:, :1]][:, 0][torch.arange(B)] for x in (k, v)), lengths.clamp_max(PAGE))


def written_between(q, k, v, table, lengths):
    pages = k + 1.0
    keys = pages[table].flatten(1, 2)
    pages.zero_()
    return attend(q, keys, v[table].flatten(1, 2), lengths) + pages.sum()


COPIED = [other_tables, pages_by_head, turned_pages, shifted, twice, written_between]


@pytest.mark.parametrize("fn", COPIED, ids=lambda f: f.__name__)
def test_other_lookups_are_copied(fn: Callable) -> None:
    text = compiled(fn, *operands())[1]
    assert "cached_attention" not in text
    assert "flash_attention" in text


def test_training_copies() -> None:
    q, k, v, table, lengths = operands()
    k.requires_grad_()
    run, backend = fuse(indexed, rewriting())
    (grad,) = torch.autograd.grad(run(q, k, v, table, lengths).sum(), k)
    assert "cached_attention" not in graph_text(backend.graphs[0])
    (expected,) = torch.autograd.grad(indexed(q, k, v, table, lengths).sum(), k)
    torch.testing.assert_close(grad, expected)


def test_read_without_gradient() -> None:
    """Parameters that are looked up and scaled under no_grad, behind the op again what has no gradient."""

    def fn(q, k, v, table, lengths, scale, weight):
        with torch.no_grad():
            k, v = ((x[table].float() * scale).flatten(1, 2) for x in (k, v))
        out = attend(q, k, v, lengths)
        return out, out * weight

    def run(f: Callable) -> tuple[Tensor, bool, Tensor]:
        out, weighted = f(q, k, v, table, lengths, scale, weight)
        return out, out.requires_grad, torch.autograd.grad(weighted.sum(), weight)[0]

    q, k, v, table, lengths = operands()
    k, v = k.to(torch.int8), v.requires_grad_()
    scale, weight = torch.rand(KV, 1, requires_grad=True), torch.ones(DIM, requires_grad=True)
    compiled_fn, backend = fuse(fn, rewriting())
    torch.testing.assert_close(run(compiled_fn), run(fn))
    assert "cached_attention" not in graph_text(backend.graphs[0])  # values in float32 are copied: one lookup for both
    torch._dynamo.reset()
    v = v.detach().to(torch.int8)
    compiled_fn, backend = fuse(fn, rewriting())
    torch.testing.assert_close(run(compiled_fn), run(fn))
    assert "cached_attention" in graph_text(backend.graphs[0])


@pytest.mark.parametrize("how", ["table", "int32 table", "8 bits", "floats"])
def test_other_devices(how: str) -> None:
    """What lies on the CPU, of which a lookup or a copy makes what the attention reads, is not handed to a kernel."""

    def fn(q, k, v, table, lengths):
        if how == "8 bits":
            k, v = (x.to("meta", torch.float32) for x in (k, v))
        if how == "floats":
            k, v = (x.to("meta") for x in (k, v))
        if how == "int32 table":
            table = table.to("meta", torch.int64)
        return attend(q, *(x[table].flatten(1, 2) for x in (k, v)), lengths)

    q, k, v, table, lengths = operands()
    k, v = (x.to(torch.int8) if how == "8 bits" else x.to("cpu" if how == "floats" else "meta") for x in (k, v))
    table = {"table": table, "int32 table": table.int()}.get(how, table.to("meta"))
    run, backend = fuse(fn, rewriting())
    with torch.no_grad():
        assert run(q.to("meta"), k, v, table, lengths.to("meta")).is_meta
    assert backend.fused == 1, backend.reasons
    for node in backend.graphs[0].graph.nodes:
        if node.target in (caches.cached_attention, ops.flash_attention):
            given = [x for x in node.all_input_nodes if isinstance(x.meta["example_value"], Tensor)]
            assert {x.meta["example_value"].device.type for x in given} == {"meta"}


def test_numbers_beyond_float32() -> None:
    """What float32 has no number for stays with the code that multiplies."""

    def fn(q, k, v, lengths):
        return attend(q, k.to(q.dtype) * 1e39, v.to(q.dtype) * 1e39, lengths)

    q, k, v, lengths = stored(torch.int8)
    run, backend = fuse(fn, rewriting())
    with torch.no_grad():
        torch.testing.assert_close(run(q, k, v, lengths), fn(q, k, v, lengths), equal_nan=True)
    assert backend.fused == 1
    assert "cached_attention" not in graph_text(backend.graphs[0])


@pytest.mark.parametrize("how", ["feature", "group", "twice", "added"])
def test_other_scales_are_multiplied_before(how: str) -> None:
    def fn(q, k, v, lengths):
        def of(x: Tensor) -> Tensor:
            x = x.to(q.dtype)
            if how == "feature":
                return x * torch.linspace(0.5, 1.0, DIM)
            if how == "group":
                return x * torch.linspace(0.5, 1.0, RUN).repeat_interleave(PAGE)[:, None, None].clone() * x.abs()
            if how == "twice":
                return x * torch.linspace(0.5, 1.0, KV)[:, None] * torch.linspace(0.5, 1.0, KEYS)[:, None, None]
            return x + 1.0

        return attend(q, of(k), of(v), lengths)

    assert "cached_attention" not in compiled(fn, *stored(torch.int8))[1]


# ---------------------------------------------------------------------------------------------------------- the op
def test_form_text() -> None:
    for form in (CacheForm(), CacheForm(16), CacheForm(1, False), CacheForm(0, True, "bfloat16", "float32", True, True)):
        assert CacheForm.parse(form.text) == form
    for text in ("cache(", "cached(page=1)", "cache(1)", "cache(page='x')", "cache(k='int8')", "cache(k_scaled=True)"):
        with pytest.raises(ProgramError):
            CacheForm.parse(text)


def call(form: CacheForm, **changed: Tensor | None) -> Tensor:
    q, k, v, table, _ = operands()
    given = {"q": q, "k": k.transpose(1, 2), "v": v.transpose(1, 2), "table": table, "ks": None, "vs": None} | changed
    rest = ([], [], KEYS, "attention(score=score)", form.text, "general")
    return caches.cached_attention(*given.values(), *rest)[0]


def test_op_says_what_does_not_fit() -> None:
    call(CacheForm(PAGE))
    for form, changed in (
        (CacheForm(), {}),
        (CacheForm(PAGE), {"table": None}),
        (CacheForm(PAGE), {"table": torch.zeros(B, RUN)}),
        (CacheForm(PAGE), {"ks": torch.ones(B, KV, KEYS)}),
        (CacheForm(PAGE, k="float32"), {}),
    ):
        with pytest.raises(ProgramError):
            call(form, **changed)


def test_entries_outside_raise() -> None:
    with pytest.raises(IndexError):
        call(CacheForm(PAGE), table=torch.full((B, RUN), POOL))
    with pytest.raises((IndexError, RuntimeError)):
        call(CacheForm(PAGE, False), table=torch.full((B, RUN), -1))


def test_opcheck() -> None:
    q, k, v, table, _ = operands()
    k, v, scale = k.to(torch.int8).transpose(1, 2), v.transpose(1, 2), torch.rand(B, KV, KEYS)
    form = CacheForm(PAGE, True, "float32", "", True)
    args = (q, k, v, table, scale, None, [], [], KEYS, "attention(score=score)", form.text, "general")
    torch.library.opcheck(ops.torch.ops.fa_inductor.cached_attention, args)


def test_gradients_are_refused() -> None:
    """The pass never puts the op where gradients flow; whoever calls it so is told, and gets no gradient of zero."""
    from fa_inductor import caches
    from fa_inductor.spec import CacheForm

    q = torch.randn(1, 2, 1, 8, requires_grad=True)
    k, v = torch.randn(3, 2, 4, 8), torch.randn(3, 2, 4, 8)
    table = torch.tensor([[2, 0]])
    program, form = "attention(score=score)", CacheForm(page=4).text
    out, _ = caches.cached_attention(q, k, v, table, None, None, [], [], 8, program, form, "reference")
    with pytest.raises(NotImplementedError, match="cached_attention has no gradient"):
        out.sum().backward()
