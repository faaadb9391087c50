"""Rewritten graphs of head groups, layouts, composite calls and checkpoint bodies."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from tests.patterns.forms import BATCH, DIM, HEADS, INF, KEYS, ROWS, Draw, scores
from tests.patterns.golden import GoldenCase


class GoldensOfLayouts(GoldenCase):
    def test_gqa_repeat_kv(self) -> None:
        self.call("gqa_repeat_kv", """\
attention(score=score * 0.35355339059327373)
""", kv_heads=2)

    def test_gqa_grouped_einsum(self) -> None:
        self.form("gqa_grouped_einsum", """\
k: f32[2, 14, 2, 8]
q: f32[2, 10, 4, 8]
v: f32[2, 14, 2, 8]
permute = permute(q, [0, 2, 1, 3]): f32[2, 4, 10, 8]
permute_1 = permute(k, [0, 2, 1, 3]): f32[2, 2, 14, 8]
permute_2 = permute(v, [0, 2, 1, 3]): f32[2, 2, 14, 8]
attention = flash_attention(permute, permute_1, permute_2)
    attention(score=score * 0.3535533905932738)
item = attention[0]: f32[2, 4, 10, 8]
reshape = reshape(item, [2, 2, 2, 10, 8]): f32[2, 2, 2, 10, 8]
permute_3 = permute(reshape, [0, 3, 1, 2, 4]): f32[2, 10, 2, 2, 8]
permute_4 = permute(permute_3, [0, 2, 1, 3, 4]): f32[2, 2, 10, 2, 8]
contiguous = contiguous(permute_4): f32[2, 2, 10, 2, 8]
permute_5 = permute(contiguous, [0, 2, 1, 3, 4]): f32[2, 10, 2, 2, 8]
flatten = flatten(permute_5, 2, 3): f32[2, 10, 4, 8]
return flatten
""")

    def test_gqa_broadcast(self) -> None:
        self.form("gqa_broadcast", """\
k: f32[2, 2, 14, 8]
q: f32[2, 4, 10, 8]
v: f32[2, 2, 14, 8]
attention = flash_attention(q, k, v)
    attention(score=score * 0.35355339059327373)
item = attention[0]: f32[2, 4, 10, 8]
clone = clone(item): f32[2, 4, 10, 8]
reshape = reshape(clone, [2, 2, 2, 10, 8]): f32[2, 2, 2, 10, 8]
flatten = flatten(reshape, 1, 2): f32[2, 4, 10, 8]
return flatten
""")

    def test_mqa_einsum(self) -> None:
        self.form("mqa_einsum", """\
k: f32[2, 14, 8]
q: f32[2, 4, 10, 8]
v: f32[2, 14, 8]
unsqueeze = unsqueeze(k, 1): f32[2, 1, 14, 8]
unsqueeze_1 = unsqueeze(v, 1): f32[2, 1, 14, 8]
attention = flash_attention(q, unsqueeze, unsqueeze_1)
    attention(score=score * 0.25)
item = attention[0]: f32[2, 4, 10, 8]
clone = clone(item): f32[2, 4, 10, 8]
return clone
""")

    def test_mla(self) -> None:
        self.form("mla", """\
k: f32[2, 4, 14, 8]
q: f32[2, 4, 10, 8]
v: f32[2, 4, 14, 12]
getitem = getitem(k, (Ellipsis, :4)): f32[2, 4, 14, 4]
getitem_1 = getitem(k, (:, :1, :, 4:)): f32[2, 1, 14, 4]
expand = expand(getitem_1, -1, 4, -1, -1): f32[2, 4, 14, 4]
cat = cat([getitem, expand], dim=-1): f32[2, 4, 14, 8]
attention = flash_attention(q, cat, v)
    attention(score=score * 0.35355339059327373)
item = attention[0]: f32[2, 4, 10, 12]
clone = clone(item): f32[2, 4, 10, 12]
return clone
""")

    def test_channels_first(self) -> None:
        self.form("channels_first", """\
k: f32[2, 8, 14]
q: f32[2, 8, 10]
v: f32[2, 8, 14]
permute = permute(q, [0, 2, 1]): f32[2, 10, 8]
unsqueeze = unsqueeze(permute, 1): f32[2, 1, 10, 8]
permute_1 = permute(k, [0, 2, 1]): f32[2, 14, 8]
unsqueeze_1 = unsqueeze(permute_1, 1): f32[2, 1, 14, 8]
permute_2 = permute(v, [0, 2, 1]): f32[2, 14, 8]
unsqueeze_2 = unsqueeze(permute_2, 1): f32[2, 1, 14, 8]
attention = flash_attention(unsqueeze, unsqueeze_1, unsqueeze_2)
    attention(score=score * 0.3535533905932738)
item = attention[0]: f32[2, 1, 10, 8]
clone = clone(item): f32[2, 1, 10, 8]
select = select(clone, 1, 0): f32[2, 10, 8]
permute_3 = permute(select, [0, 2, 1]): f32[2, 8, 10]
contiguous = contiguous(permute_3): f32[2, 8, 10]
return contiguous
""")

    def test_packed_qkv(self) -> None:
        self.form("packed_qkv", """\
x: f32[2, 10, 96]
view = view(x, 2, 10, 3, 4, 8): f32[2, 10, 3, 4, 8]
permute = permute(view, 2, 0, 3, 1, 4): f32[3, 2, 4, 10, 8]
item = permute[0]: f32[2, 4, 10, 8]
item_1 = permute[1]: f32[2, 4, 10, 8]
item_2 = permute[2]: f32[2, 4, 10, 8]
attention = flash_attention(item, item_1, item_2)
    attention(score=score * 0.35355339059327373, layout='bmhd')
item_3 = attention[0]: f32[2, 4, 10, 8]
transpose = transpose(item_3, 1, 2): f32[2, 10, 4, 8]
reshape = reshape(transpose, 2, 10, -1): f32[2, 10, 32]
return reshape
""")

    def test_kv_cache(self) -> None:
        self.form("kv_cache", """\
k_new: f32[2, 4, 14, 8]
k_old: f32[2, 4, 6, 8]
q: f32[2, 4, 3, 8]
v_new: f32[2, 4, 14, 8]
v_old: f32[2, 4, 6, 8]
cat = cat([k_old, k_new], dim=2): f32[2, 4, 20, 8]
cat_1 = cat([v_old, v_new], dim=2): f32[2, 4, 20, 8]
attention = flash_attention(q, cat, cat_1)
    attention(score=where((q_idx + 18) <= kv_idx, -inf, score * 0.35355339059327373))
item = attention[0]: f32[2, 4, 3, 8]
clone = clone(item): f32[2, 4, 3, 8]
return clone, cat, cat_1
""")

    def test_sdpa(self) -> None:
        self.call("sdpa", """\
attention(score=where(kv_idx <= q_idx, score * 0.35355339059327373, -inf), dead_rows='zero')
""")

    def test_sdpa_mask(self) -> None:
        self.form("sdpa_mask", """\
k: f32[2, 4, 14, 8]
mask: bool[2, 1, 10, 14]
q: f32[2, 4, 10, 8]
v: f32[2, 4, 14, 8]
attention = flash_attention(q, k, v, captures=[mask])
    attention(score=where(m0[b, 0, q_idx, kv_idx], score * 0.3, -inf), dead_rows='zero')
item = attention[0]: f32[2, 4, 10, 8]
clone = clone(item): f32[2, 4, 10, 8]
return clone
""")

    def test_sdpa_grouped(self) -> None:
        self.call("sdpa_grouped", """\
attention(score=score * 0.35355339059327373, dead_rows='zero')
""", kv_heads=2)

    def test_multihead_attention_module(self) -> None:
        self.form("MultiheadAttention", """\
attention_in_proj_bias: f32[96]
attention_in_proj_weight: f32[96, 32]
out_proj_bias: f32[32]
out_proj_weight: f32[32, 32]
x: f32[2, 10, 32]
transpose = transpose(x, 1, 0): f32[10, 2, 32]
clone = clone(transpose, memory_format=contiguous_format): f32[10, 2, 32]
view = view(clone, [20, 32]): f32[20, 32]
permute = permute(attention_in_proj_weight, [1, 0]): f32[32, 96]
mm = mm(view, permute): f32[20, 96]
view_1 = view(mm, [10, 2, 96]): f32[10, 2, 96]
add = add(view_1, attention_in_proj_bias): f32[10, 2, 96]
view_2 = view(add, [10, 2, 3, 32]): f32[10, 2, 3, 32]
unsqueeze = unsqueeze(view_2, 0): f32[1, 10, 2, 3, 32]
permute_1 = permute(unsqueeze, [3, 1, 2, 0, 4]): f32[3, 10, 2, 1, 32]
squeeze = squeeze(permute_1, -2): f32[3, 10, 2, 32]
clone_1 = clone(squeeze, memory_format=contiguous_format): f32[3, 10, 2, 32]
select = select(clone_1, 0, 0): f32[10, 2, 32]
view_3 = view(select, [10, 8, 8]): f32[10, 8, 8]
permute_2 = permute(view_3, [1, 0, 2]): f32[8, 10, 8]
view_4 = view(permute_2, [2, 4, 10, 8]): f32[2, 4, 10, 8]
select_1 = select(clone_1, 0, 1): f32[10, 2, 32]
view_5 = view(select_1, [10, 8, 8]): f32[10, 8, 8]
permute_3 = permute(view_5, [1, 0, 2]): f32[8, 10, 8]
view_6 = view(permute_3, [2, 4, 10, 8]): f32[2, 4, 10, 8]
select_2 = select(clone_1, 0, 2): f32[10, 2, 32]
view_7 = view(select_2, [10, 8, 8]): f32[10, 8, 8]
permute_4 = permute(view_7, [1, 0, 2]): f32[8, 10, 8]
view_8 = view(permute_4, [2, 4, 10, 8]): f32[2, 4, 10, 8]
attention = flash_attention(view_4, view_6, view_8)
    attention(score=score * 0.35355339059327373, dead_rows='zero')
item = attention[0]: f32[2, 4, 10, 8]
clone_2 = clone(item): f32[2, 4, 10, 8]
permute_5 = permute(clone_2, [2, 0, 1, 3]): f32[10, 2, 4, 8]
clone_3 = clone(permute_5, memory_format=contiguous_format): f32[10, 2, 4, 8]
view_9 = view(clone_3, [20, 32]): f32[20, 32]
permute_6 = permute(out_proj_weight, [1, 0]): f32[32, 32]
addmm = addmm(out_proj_bias, view_9, permute_6): f32[20, 32]
view_10 = view(addmm, [10, 2, 32]): f32[10, 2, 32]
transpose_1 = transpose(view_10, 1, 0): f32[2, 10, 32]
return transpose_1
""")

    def test_checkpointed(self) -> None:
        self.form("checkpointed", """\
k: f32[2, 4, 14, 8]
q: f32[2, 4, 10, 8]
v: f32[2, 4, 14, 8]
body:
    k_1: f32[2, 4, 14, 8]
    q_1: f32[2, 4, 10, 8]
    v_1: f32[2, 4, 14, 8]
    attention = flash_attention(q_1, k_1, v_1)
        attention(score=score * 0.35355339059327373)
    item = attention[0]: f32[2, 4, 10, 8]
    clone = clone(item): f32[2, 4, 10, 8]
    mul = mul(clone, 2.0): f32[2, 4, 10, 8]
    return mul
tag_activation_checkpoint = tag_activation_checkpoint(body, k, q, v): (f32[2, 4, 10, 8])
item_1 = tag_activation_checkpoint[0]: f32[2, 4, 10, 8]
return item_1
""")

    def test_attention_of_attention(self) -> None:
        self.form("attention_of_attention", """\
k: f32[2, 4, 14, 8]
q: f32[2, 4, 10, 8]
v: f32[2, 4, 14, 8]
attention = flash_attention(q, k, k)
    attention(score=score * 0.35355339059327373)
item = attention[0]: f32[2, 4, 10, 8]
attention_1 = flash_attention(item, k, v)
    attention(score=score * 0.35355339059327373)
item_1 = attention_1[0]: f32[2, 4, 10, 8]
clone = clone(item_1): f32[2, 4, 10, 8]
return clone
""")

    def test_checkpoint_with_a_mask_from_outside(self) -> None:
        def body(q, k, v, keep):
            return scores(q, k).masked_fill(~keep, -INF).softmax(-1) @ v

        def fn(q, k, v):
            keep = torch.ones(ROWS, KEYS, dtype=torch.bool).tril()
            return checkpoint(body, q, k, v, keep, use_reentrant=False) + 1.0

        self.assertExpectedInline(self.text(fn, *(x.requires_grad_() for x in self.qkv())), """\
k: f32[2, 4, 14, 8]
q: f32[2, 4, 10, 8]
v: f32[2, 4, 14, 8]
ones = ones(10, 14, dtype=bool): bool[10, 14]
tril = tril(ones): bool[10, 14]
body:
    k_1: f32[2, 4, 14, 8]
    q_1: f32[2, 4, 10, 8]
    v_1: f32[2, 4, 14, 8]
    attention = flash_attention(q_1, k_1, v_1)
        attention(score=where((q_idx + 1) <= kv_idx, -inf, score * 0.35355339059327373))
    item = attention[0]: f32[2, 4, 10, 8]
    return item
tag_activation_checkpoint = tag_activation_checkpoint(body, k, q, tril, v): (f32[2, 4, 10, 8])
item_1 = tag_activation_checkpoint[0]: f32[2, 4, 10, 8]
add = add(item_1, 1.0): f32[2, 4, 10, 8]
return add
""")

    def test_two_layers_share_a_mask(self) -> None:
        def fn(x, keep):
            mask = torch.where(keep[:, None, None, :], 0.0, torch.finfo(x.dtype).min)
            for _ in range(2):
                h = x.view(BATCH, ROWS, HEADS, DIM).transpose(1, 2)
                h = (scores(h, h) + mask).softmax(-1) @ h
                x = x + h.transpose(1, 2).reshape(x.shape)
            return x

        d = Draw()
        x, keep = d.normal(BATCH, ROWS, HEADS * DIM).float(), d.keep(BATCH, ROWS)
        self.assertExpectedInline(self.text(fn, x, keep), """\
keep: bool[2, 10]
x: f32[2, 10, 32]
reshape = reshape(x, [2, 10, 4, 8]): f32[2, 10, 4, 8]
permute = permute(reshape, [0, 2, 1, 3]): f32[2, 4, 10, 8]
reshape_1 = reshape(x, [2, 10, 4, 8]): f32[2, 10, 4, 8]
permute_1 = permute(reshape_1, [0, 2, 1, 3]): f32[2, 4, 10, 8]
reshape_2 = reshape(x, [2, 10, 4, 8]): f32[2, 10, 4, 8]
permute_2 = permute(reshape_2, [0, 2, 1, 3]): f32[2, 4, 10, 8]
attention = flash_attention(permute, permute_1, permute_2, captures=[keep])
    attention(score=(score * 0.35355339059327373) + where(m0[b, kv_idx], 0.0, -3.4028234663852886e+38), layout='bmhd')
item = attention[0]: f32[2, 4, 10, 8]
transpose = transpose(item, 1, 2): f32[2, 10, 4, 8]
reshape_3 = reshape(transpose, (2, 10, 32)): f32[2, 10, 32]
add = add(x, reshape_3): f32[2, 10, 32]
reshape_4 = reshape(add, [2, 10, 4, 8]): f32[2, 10, 4, 8]
permute_3 = permute(reshape_4, [0, 2, 1, 3]): f32[2, 4, 10, 8]
reshape_5 = reshape(add, [2, 10, 4, 8]): f32[2, 10, 4, 8]
permute_4 = permute(reshape_5, [0, 2, 1, 3]): f32[2, 4, 10, 8]
reshape_6 = reshape(add, [2, 10, 4, 8]): f32[2, 10, 4, 8]
permute_5 = permute(reshape_6, [0, 2, 1, 3]): f32[2, 4, 10, 8]
attention_1 = flash_attention(permute_3, permute_4, permute_5, captures=[keep])
    attention(score=(score * 0.35355339059327373) + where(m0[b, kv_idx], 0.0, -3.4028234663852886e+38), layout='bmhd')
item_1 = attention_1[0]: f32[2, 4, 10, 8]
transpose_1 = transpose(item_1, 1, 2): f32[2, 10, 4, 8]
reshape_7 = reshape(transpose_1, (2, 10, 32)): f32[2, 10, 32]
add_1 = add(add, reshape_7): f32[2, 10, 32]
return add_1
""")
