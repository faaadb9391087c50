"""Rewritten graphs of softmax spellings, masks, score functions, dropout, casts and run-time sizes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compiling import fuse, rewriting
from tests.patterns.forms import DIM, HEADS, INF, scores
from tests.patterns.golden import GoldenCase
from tests.patterns.printing import graph_text


class Goldens(GoldenCase):
    def test_plain(self) -> None:
        self.call("plain", """\
attention(score=score * 0.35355339059327373)
""")

    def test_hand_written_softmax(self) -> None:
        self.call("hand_written_softmax", """\
attention(score=score * 0.35355339059327373)
""")

    def test_exp_logsumexp(self) -> None:
        self.call("exp_logsumexp", """\
attention(score=score * 0.35355339059327373)
""")

    def test_deferred_division(self) -> None:
        self.call("deferred_division", """\
attention(score=score * 0.35355339059327373)
""")

    def test_gate_of_each_query(self) -> None:
        self.form("gate_of_each_query", """\
gate: f32[2, 10, 4]
k: f32[2, 4, 14, 8]
q: f32[2, 4, 10, 8]
v: f32[2, 4, 14, 8]
sigmoid = sigmoid(gate): f32[2, 10, 4]
attention = flash_attention(q, k, v)
    attention(score=score * 0.35355339059327373)
item = attention[0]: f32[2, 4, 10, 8]
clone = clone(item): f32[2, 4, 10, 8]
permute = permute(sigmoid, [0, 2, 1]): f32[2, 4, 10]
unsqueeze = unsqueeze(permute, 3): f32[2, 4, 10, 1]
expand = expand(unsqueeze, [-1, -1, -1, 8]): f32[2, 4, 10, 8]
mul = mul(clone, expand): f32[2, 4, 10, 8]
return mul
""")

    def test_rows_zeroed_then_scaled(self) -> None:
        self.form("rows_zeroed_then_scaled", """\
gate: f32[4]
k: f32[2, 4, 14, 8]
ok: bool[2, 10]
q: f32[2, 4, 10, 8]
v: f32[2, 4, 14, 8]
attention = flash_attention(q, k, v)
    attention(score=score * 0.35355339059327373, dead_rows='zero')
item = attention[0]: f32[2, 4, 10, 8]
clone = clone(item): f32[2, 4, 10, 8]
item_1 = attention[1]: f32[2, 4, 10]
detach = detach(item_1): f32[2, 4, 10]
isneginf = isneginf(detach): bool[2, 4, 10]
scalar_tensor = scalar_tensor(nan, dtype=float32, device=cpu): f32[]
unsqueeze = unsqueeze(isneginf, -1): bool[2, 4, 10, 1]
where = where(unsqueeze, scalar_tensor, clone): f32[2, 4, 10, 8]
unsqueeze_1 = unsqueeze(ok, 1): bool[2, 1, 10]
unsqueeze_2 = unsqueeze(unsqueeze_1, 3): bool[2, 1, 10, 1]
expand = expand(unsqueeze_2, [-1, 4, -1, 8]): bool[2, 4, 10, 8]
scalar_tensor_1 = scalar_tensor(0.0, dtype=float32, device=cpu): f32[]
where_1 = where(expand, where, scalar_tensor_1): f32[2, 4, 10, 8]
unsqueeze_3 = unsqueeze(gate, 0): f32[1, 4]
unsqueeze_4 = unsqueeze(unsqueeze_3, 2): f32[1, 4, 1]
unsqueeze_5 = unsqueeze(unsqueeze_4, 3): f32[1, 4, 1, 1]
expand_1 = expand(unsqueeze_5, [2, -1, 10, 8]): f32[2, 4, 10, 8]
mul = mul(where_1, expand_1): f32[2, 4, 10, 8]
mul_1 = mul(mul, 0.5): f32[2, 4, 10, 8]
return mul_1
""")

    def test_causal_top_left(self) -> None:
        self.call("causal_top_left", """\
attention(score=where((q_idx + 1) <= kv_idx, -inf, score * 0.35355339059327373))
""")

    def test_causal_bottom_right(self) -> None:
        self.call("causal_bottom_right", """\
attention(score=where((q_idx + 5) <= kv_idx, -inf, score * 0.35355339059327373))
""")

    def test_causal_finite_fill(self) -> None:
        self.call("causal_finite_fill", """\
attention(score=where((q_idx + 1) <= kv_idx, -3.4028234663852886e+38, score * 0.35355339059327373))
""")

    def test_window(self) -> None:
        self.call("window", """\
attention(score=where((kv_idx <= q_idx) & (q_idx <= (kv_idx + 3)), score * 0.35355339059327373, -inf))
""")

    def test_prefix(self) -> None:
        self.form("prefix", """\
k: f32[2, 4, 14, 8]
length: i64[2]
q: f32[2, 4, 10, 8]
v: f32[2, 4, 14, 8]
attention = flash_attention(q, k, v, captures=[length])
    attention(score=where(((q_idx + 1) <= kv_idx) & (~(kv_idx < i0[b])), -inf, score * 0.35355339059327373))
item = attention[0]: f32[2, 4, 10, 8]
clone = clone(item): f32[2, 4, 10, 8]
return clone
""")

    def test_documents(self) -> None:
        self.form("documents", """\
k: f32[2, 4, 10, 8]
q: f32[2, 4, 10, 8]
segment: i64[2, 10]
v: f32[2, 4, 10, 8]
attention = flash_attention(q, k, v, captures=[segment])
    attention(score=where((~(i0[b, q_idx] == i0[b, kv_idx])) | ((q_idx + 1) <= kv_idx), -inf, score * 0.35355339059327373))
item = attention[0]: f32[2, 4, 10, 8]
clone = clone(item): f32[2, 4, 10, 8]
return clone
""")

    def test_chunked(self) -> None:
        self.call("chunked", """\
attention(score=where((~((kv_idx // 4) == (q_idx // 4))) | ((q_idx + 1) <= kv_idx), -inf, score * 0.35355339059327373))
""")

    def test_padding(self) -> None:
        self.form("padding", """\
k: f32[2, 4, 14, 8]
keep: bool[2, 14]
q: f32[2, 4, 10, 8]
v: f32[2, 4, 14, 8]
attention = flash_attention(q, k, v, captures=[keep])
    attention(score=where(~m0[b, kv_idx], -inf, score * 0.35355339059327373))
item = attention[0]: f32[2, 4, 10, 8]
clone = clone(item): f32[2, 4, 10, 8]
return clone
""")

    def test_padding_additive(self) -> None:
        self.form("padding_additive", """\
k: f32[2, 4, 14, 8]
keep: i64[2, 14]
q: f32[2, 4, 10, 8]
v: f32[2, 4, 14, 8]
attention = flash_attention(q, k, v, captures=[keep])
    attention(score=(score * 0.35355339059327373) + ((1.0 - cast_float(i0[b, kv_idx])) * -10000.0))
item = attention[0]: f32[2, 4, 10, 8]
clone = clone(item): f32[2, 4, 10, 8]
return clone
""")

    def test_additive_bias(self) -> None:
        self.form("additive_bias", """\
bias: f32[4, 10, 14]
k: f32[2, 4, 14, 8]
q: f32[2, 4, 10, 8]
v: f32[2, 4, 14, 8]
attention = flash_attention(q, k, v, captures=[bias])
    attention(score=(score * 0.35355339059327373) + f0[h, q_idx, kv_idx])
item = attention[0]: f32[2, 4, 10, 8]
clone = clone(item): f32[2, 4, 10, 8]
return clone
""")

    def test_alibi(self) -> None:
        self.form("alibi", """\
k: f32[2, 4, 10, 8]
q: f32[2, 4, 10, 8]
slopes: f32[4]
v: f32[2, 4, 10, 8]
attention = flash_attention(q, k, v, captures=[slopes])
    attention(score=((score * 0.3535533905932738) + (f0[h] * cast_float(kv_idx))) + where((q_idx + 1) <= kv_idx, -inf, 0.0))
item = attention[0]: f32[2, 4, 10, 8]
clone = clone(item): f32[2, 4, 10, 8]
flatten = flatten(clone, 0, 1): f32[8, 10, 8]
view = view(flatten, 2, 4, 10, 8): f32[2, 4, 10, 8]
return view
""")

    def test_softcap(self) -> None:
        self.call("softcap", """\
attention(score=tanh(score * 0.17677669529663687) * 2.0)
""")

    def test_temperature(self) -> None:
        self.form("temperature", """\
k: f32[2, 4, 10, 8]
q: f32[2, 4, 10, 8]
tau: f32[4]
v: f32[2, 4, 10, 8]
normalize = normalize(q, dim=-1): f32[2, 4, 10, 8]
normalize_1 = normalize(k, dim=-1): f32[2, 4, 10, 8]
attention = flash_attention(normalize, normalize_1, v, captures=[tau])
    attention(score=score * exp(where(f0[h] > 2.0, 2.0, f0[h])))
item = attention[0]: f32[2, 4, 10, 8]
clone = clone(item): f32[2, 4, 10, 8]
return clone
""")

    def test_t5(self) -> None:
        self.form("t5", """\
k: f32[2, 4, 10, 8]
q: f32[2, 4, 10, 8]
table: f32[32, 4]
v: f32[2, 4, 10, 8]
arange = arange(10): i64[10]
getitem = getitem(arange, (None, :)): i64[1, 10]
arange_1 = arange(10): i64[10]
getitem_1 = getitem(arange_1, (:, None)): i64[10, 1]
sub = sub(getitem, getitem_1): i64[10, 10]
clamp = clamp(sub, -15, 15): i64[10, 10]
add = add(clamp, 15): i64[10, 10]
embedding = embedding(add, table): f32[10, 10, 4]
attention = flash_attention(q, k, v, captures=[embedding])
    attention(score=score + f0[q_idx, kv_idx, h])
item = attention[0]: f32[2, 4, 10, 8]
clone = clone(item): f32[2, 4, 10, 8]
return clone
""")

    def test_swin(self) -> None:
        self.form("swin", """\
index: i64[4, 4]
k: f32[8, 4, 4, 8]
mask: f32[4, 4, 4]
q: f32[8, 4, 4, 8]
table: f32[9, 4]
v: f32[8, 4, 4, 8]
view = view(index, -1): i64[16]
getitem = getitem(table, view): f32[16, 4]
attention = flash_attention(q, k, v, captures=[getitem, mask])
    attention(score=((score * 0.3535533905932738) + f0[(q_idx * 4) + kv_idx, h]) + f1[b % 4, q_idx, kv_idx])
item = attention[0]: f32[8, 4, 4, 8]
clone = clone(item): f32[8, 4, 4, 8]
return clone
""")

    def test_sinks(self) -> None:
        self.form("sinks", """\
k: f32[2, 4, 10, 8]
q: f32[2, 4, 10, 8]
sink: f32[4]
v: f32[2, 4, 10, 8]
attention = flash_attention(q, k, v, captures=[sink])
    attention(score=(score * 0.35355339059327373) + where((q_idx + 1) <= kv_idx, -inf, 0.0), sinks=[f0[h]])
item = attention[0]: f32[2, 4, 10, 8]
clone = clone(item): f32[2, 4, 10, 8]
return clone
""")

    def test_dropout(self) -> None:
        def fn(q, k, v):
            return F.dropout(scores(q, k).softmax(-1), 0.1) @ v

        self.assertExpectedInline(self.text(fn, *self.qkv()), """\
k: f32[2, 4, 14, 8]
q: f32[2, 4, 10, 8]
v: f32[2, 4, 14, 8]
dropout_seed = dropout_seed(q): i64[2]
attention = flash_attention(q, k, v, captures=[dropout_seed])
    attention(score=score * 0.35355339059327373, dropout=(0.1, 0))
item = attention[0]: f32[2, 4, 10, 8]
return item
""")

    def test_dropout_in_float32(self) -> None:
        """As under autocast: only what goes into the product is rounded."""

        def fn(q, k, v):
            q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
            weights = F.dropout(scores(q, k).softmax(-1, dtype=torch.float32), 0.1)
            return weights.bfloat16() @ v

        self.assertExpectedInline(self.text(fn, *self.qkv()), """\
k: f32[2, 4, 14, 8]
q: f32[2, 4, 10, 8]
v: f32[2, 4, 14, 8]
to = to(q, bfloat16): bf16[2, 4, 10, 8]
to_1 = to(k, bfloat16): bf16[2, 4, 14, 8]
to_2 = to(v, bfloat16): bf16[2, 4, 14, 8]
dropout_seed = dropout_seed(to): i64[2]
attention = flash_attention(to, to_1, to_2, captures=[dropout_seed])
    attention(score=score * 0.35355339059327373, dropout=(0.1, 0))
item = attention[0]: bf16[2, 4, 10, 8]
return item
""")

    def test_dropout_in_eval_mode(self) -> None:
        def fn(q, k, v):
            return F.dropout(scores(q, k).softmax(-1), 0.1, training=False) @ v

        self.assertExpectedInline(self.text(fn, *self.qkv()), """\
k: f32[2, 4, 14, 8]
q: f32[2, 4, 10, 8]
v: f32[2, 4, 14, 8]
attention = flash_attention(q, k, v)
    attention(score=score * 0.35355339059327373)
item = attention[0]: f32[2, 4, 10, 8]
return item
""")

    def test_run_time_lengths(self) -> None:
        def fn(q, k, v):
            rows, keys = q.shape[-2], k.shape[-2]
            keep = torch.arange(keys)[None, :] <= torch.arange(rows)[:, None] + (keys - rows)
            s = scores(q, k).masked_fill(~keep, -INF)
            return (s.softmax(-1) @ v).transpose(1, 2).reshape(q.shape[0], rows, HEADS * DIM)

        inputs = self.qkv()
        for x in inputs:
            torch._dynamo.mark_dynamic(x, 2)
        self.assertExpectedInline(self.text(fn, *inputs), """\
k: f32[2, 4, s0, 8]
q: f32[2, 4, s1, 8]
v: f32[2, 4, s0, 8]
attention = flash_attention(q, k, v)
    attention(score=where(((q_idx + kv_len) + 1) <= (kv_idx + q_len), -inf, score * 0.35355339059327373), layout='bmhd')
item = attention[0]: f32[2, 4, s1, 8]
transpose = transpose(item, 1, 2): f32[2, s1, 4, 8]
reshape = reshape(transpose, 2, s1, 32): f32[2, s1, 32]
return reshape
""")

    def test_run_time_scale(self) -> None:
        """A Python float of a module is a run-time number under dynamic shapes."""

        class Scaled(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.scaling = 0.3

            def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return ((q @ k.mT) * self.scaling).softmax(-1) @ v

        compiled, backend = fuse(Scaled(), rewriting(), dynamic=True)
        compiled(*self.qkv())
        self.assertExpectedInline(graph_text(backend.graphs[0]), """\
k: f32[s0, s1, s2, s3]
q: f32[s0, s1, s4, s3]
self_scaling: f64[]
v: f32[s0, s1, s2, s3]
attention = flash_attention(q, k, v, captures=[self_scaling])
    attention(score=score * f0[()])
item = attention[0]: f32[s0, s1, s4, s3]
return item
""")

    def test_autocast(self) -> None:
        def fn(q, k, v):
            with torch.autocast("cpu", torch.bfloat16):
                return scores(q, k).softmax(-1) @ v

        self.assertExpectedInline(self.text(fn, *self.qkv()), """\
k: f32[2, 4, 14, 8]
q: f32[2, 4, 10, 8]
v: f32[2, 4, 14, 8]
to = to(q, bfloat16): bf16[2, 4, 10, 8]
to_1 = to(k, bfloat16): bf16[2, 4, 14, 8]
to_2 = to(v, bfloat16): bf16[2, 4, 14, 8]
attention = flash_attention(to, to_1, to_2)
    attention(score=score * 0.35355339059327373)
item = attention[0]: bf16[2, 4, 10, 8]
return item
""")
