"""Program families that the kernels must compute: one entry a family, with operands drawn from a seed.

Shared by the interpreter tests (CPU) and the GPU tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fa_inductor.diagonal import COLUMN, ROW, ROWS
from fa_inductor.reference import Env, attention, attention_grads, evaluate, keep_mask
from fa_inductor.spec import AttentionSpec

Generator = torch.Generator


@dataclass(frozen=True)
class Family:
    """One program and the shapes to try it with.

    Attributes:
        shape: (batch, query heads, key heads, seqlen_q, seqlen_kv, qk head dim, v head dim).
        captures: draws the captured tensors for a shape, float32 and int64 and bool, on the CPU.
        layout: how q, k, v lie in memory: ``bhmd``, ``bmhd`` (transposed view), ``packed`` (slices of one qkv tensor).
        exact: dtype of the truth. float32 where the meaning of the program lies in float32's rounding: added to -1e9,
            scores vanish in float32 and do not in float64.
    """

    name: str
    program: str
    shape: tuple[int, int, int, int, int, int, int] = (2, 4, 2, 37, 45, 24, 40)
    captures: Callable[[tuple[int, ...], Generator], list[Tensor]] = lambda shape, g: []
    sizes: tuple[int, ...] = ()
    layout: str = "bhmd"
    exact: torch.dtype = torch.float64

    def spec(self) -> AttentionSpec:
        return AttentionSpec.parse(self.program)

    def with_shape(self, *shape: int) -> Family:
        return replace(self, shape=shape)  # type: ignore[arg-type]


@dataclass
class Operands:
    """Tensors of one case: q, k, v, grad_out, captures."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    captures: list[Tensor]

    @property
    def needs_grad(self) -> list[bool]:
        return [True] * 3 + [t.is_floating_point() for t in self.captures]


def draw(family: Family, dtype: torch.dtype, device: str, seed: int = 0) -> Operands:
    """Operands of a family, unit normal."""
    g = Generator().manual_seed(seed)
    b, h, hkv, m, n, d, dv = family.shape

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=g).to(device, dtype)

    if family.layout == "packed":
        q, k, v = normal(b, m, 3, h, d).permute(2, 0, 3, 1, 4).unbind(0)
    elif family.layout == "bmhd":
        q, k, v = (normal(b, s, x, e).transpose(1, 2) for s, x, e in ((m, h, d), (n, hkv, d), (n, hkv, dv)))
    else:
        q, k, v = normal(b, h, m, d), normal(b, hkv, n, d), normal(b, hkv, n, dv)
    captures = [c.to(device) for c in family.captures(family.shape, g)]
    return Operands(q, k, v, normal(b, h, m, dv), captures)


def eager(o: Operands, spec: AttentionSpec, sizes: Sequence[int]) -> tuple[Tensor, list[Tensor | None]]:
    """(out, gradients) as eager code of the operands' precision gives them: both matmuls and P in their dtype.

    The error of this against float64 is the yardstick for the kernels' error.
    """
    dtype = o.q.dtype
    leaves = [
        t.detach().clone().requires_grad_(need) for t, need in zip([o.q, o.k, o.v, *o.captures], o.needs_grad, strict=True)
    ]
    q, k, v, *captures = leaves
    b, h, m, _ = q.shape
    n, group = k.shape[2], h // k.shape[1]
    score = (q @ k.repeat_interleave(group, 1).mT).float()
    env = Env.full((b, h, m, n), captures, sizes, q.device, torch.float32, score)
    logits = evaluate(spec.score, env).expand(b, h, m, n)
    sinks = [evaluate(s, env).expand(b, h, m, 1) for s in spec.sinks]
    row = torch.cat([logits, *sinks], -1)
    if spec.dead_rows == "zero":
        dead = (row == -torch.inf).all(-1, keepdim=True)
        probs = torch.softmax(row.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)[..., :n]
    else:
        probs = torch.softmax(row, -1)[..., :n]
    if spec.dropout_p:
        probs = probs * keep_mask(captures[spec.seed_slot], spec.dropout_p, (b, h, m, n)) / (1 - spec.dropout_p)
    out = probs.to(dtype) @ v.repeat_interleave(group, 1)
    wanted = [t for t, need in zip(leaves, o.needs_grad, strict=True) if need]
    grads = iter(torch.autograd.grad(out, wanted, o.grad_out, allow_unused=True))
    return out.detach(), [next(grads) if need else None for need in o.needs_grad]


def normal(*dims: str, scale: float = 1.0) -> Callable[[tuple[int, ...], Generator], list[Tensor]]:
    """One float32 capture whose dimensions are named: b h m n, or a number."""

    def make(shape: tuple[int, ...], g: Generator) -> list[Tensor]:
        b, h, _, m, n, *_ = shape
        table = {"b": b, "h": h, "m": m, "n": n, "rel": m + n}
        return [torch.randn(*(table.get(d) or int(d) for d in dims), generator=g) * scale]

    return make


def _padding(shape: tuple[int, ...], g: Generator) -> list[Tensor]:
    """A bool [B, N]: keys of the first batch are padded on the left, of the others on the right."""
    b, n = shape[0], shape[4]
    keep = torch.ones(b, n, dtype=torch.bool)
    keep[0, : n // 3] = False
    keep[1:, n - n // 4 :] = False
    return [keep]


def _last_row_masked(shape: tuple[int, ...], g: Generator) -> list[Tensor]:
    """A float [M, N] that leaves the last query none of the keys up to its own."""
    m, n = shape[3:5]
    mask = torch.randn(m, n, generator=g)
    mask[-1, :m] = -torch.inf
    return [mask]


def documents(shape: tuple[int, ...], g: Generator) -> list[Tensor]:
    """Documents of 100 tokens, and of random lengths in the other sequences; a tile's edge is rarely a document's."""
    b, n = shape[0], shape[4]
    ids = [torch.arange(n) // 100]
    ids += [(torch.rand(n, generator=g) < 0.02).long().cumsum(0) for _ in range(b - 1)]
    return [torch.stack(ids)]


def _diagonals(shape: tuple[int, ...], g: Generator) -> list[Tensor]:
    """[H, ROWS, columns]: one vector of the differences' numbers, each row of it shifted by one more."""
    _, h, _, m, n, *_ = shape
    vector = torch.randn(h, m + n - 1, generator=g)
    columns = torch.arange((m + n + 6) // 8 * 8)
    at = (columns[None, :] - torch.arange(ROWS)[:, None] + (m - 1) % ROWS).clamp(0, m + n - 2)
    return [vector[:, at].contiguous()]


def _left_padding_bias(shape: tuple[int, ...], g: Generator) -> list[Tensor]:
    b, _, _, m, n, *_ = shape
    bias = torch.zeros(b, 1, m, n).masked_fill(torch.ones(m, n).triu(1).bool(), -1e9)
    bias[-1, :, :, :3] = -1e9
    return [bias]


CAUSAL = "q_idx >= kv_idx"
BOTTOM_RIGHT = "(q_idx + (kv_len - q_len)) >= kv_idx"

FAMILIES = [
    Family("plain", "attention(score=score * 0.2)"),
    Family("plain_bmhd", "attention(score=score * 0.2, layout='bmhd')", layout="bmhd"),
    Family("packed_qkv", "attention(score=score * 0.2)", (2, 4, 4, 40, 40, 32, 32), layout="packed"),
    Family("negative_scale", "attention(score=score * -0.3)"),
    Family("no_scale", "attention(score=score)", (1, 2, 1, 20, 33, 16, 16)),
    Family("head_dims", "attention(score=score * 0.1)", (1, 2, 2, 33, 17, 80, 7)),
    Family("one_query", "attention(score=score * 0.2)", (2, 8, 2, 1, 65, 32, 32)),
    Family("one_key", "attention(score=score * 0.2)", (2, 2, 2, 5, 1, 16, 16)),
    Family("even", f"attention(score=where({CAUSAL}, score * 0.2, -inf))", (1, 2, 2, 128, 128, 16, 16)),
    Family("causal", f"attention(score=where({CAUSAL}, score * 0.2, -inf))", (2, 4, 2, 70, 70, 24, 40)),
    Family("causal_more_keys", f"attention(score=where({CAUSAL}, score * 0.2, -inf))", (1, 2, 1, 37, 70, 16, 16)),
    Family("causal_more_queries", f"attention(score=where({CAUSAL}, score * 0.2, -inf))", (1, 2, 1, 70, 37, 16, 16)),
    Family("bottom_right", f"attention(score=where({BOTTOM_RIGHT}, score * 0.2, -inf))", (1, 2, 1, 37, 70, 16, 16)),
    Family(
        "bottom_right_dead_zero",
        f"attention(score=where({BOTTOM_RIGHT}, score * 0.2, -inf), dead_rows='zero')",
        (1, 2, 1, 70, 37, 16, 16),
    ),
    Family(
        "bottom_right_dead_nan",
        f"attention(score=where({BOTTOM_RIGHT}, score * 0.2, -inf))",
        (1, 2, 1, 70, 37, 16, 16),
    ),
    Family(
        "row_scale_dead_nan",
        f"attention(score=where({BOTTOM_RIGHT}, score * f0[q_idx], -inf))",
        (1, 2, 1, 70, 37, 16, 16),
        normal("m"),
    ),
    Family(
        "biases_under_masks_dead_nan",
        # What is added to a masked score gets no gradient, not even a row's NaN; what is added to the whole row does.
        f"attention(score=(where({BOTTOM_RIGHT}, score + f0[kv_idx] - where(kv_idx < 9, f0[kv_idx], 0.0) * 0.5, -inf) + f1[b, h])"
        " * 0.7)",
        (1, 2, 1, 70, 37, 16, 16),
        lambda shape, g: [*normal("n")(shape, g), *normal("b", "h")(shape, g)],
    ),
    Family(
        "mask_multiplied_dead_nan",
        # Eager code multiplies the gradient by that mask, and a row's NaN passes.
        "attention(score=(score * 0.3 + where(kv_idx >= i0[b], -inf, 0.0)) * where(kv_idx <= q_idx, 1.0, 0.0)"
        " - where(kv_idx <= q_idx, 0.0, 10000.0))",
        (2, 2, 1, 60, 37, 16, 16),
        lambda shape, g: [torch.tensor([0, 9])],
    ),
    Family("causal_finite", f"attention(score=where({CAUSAL}, score * 0.2, -1000000000.0))", (1, 2, 1, 70, 70, 16, 16)),
    Family(
        "mask_added_under_causal_dead_nan",
        f"attention(score=where({CAUSAL}, score * 0.2, -inf) + f0[q_idx, kv_idx])",
        (1, 2, 1, 37, 45, 16, 16),
        captures=_last_row_masked,
    ),
    Family(
        "logarithm_under_causal_dead_nan",
        f"attention(score=where({CAUSAL}, score * 0.2 + log(cast_float(36 - q_idx)), -inf))",
        (1, 2, 1, 37, 45, 16, 16),
    ),
    Family("constant", f"attention(score=where({CAUSAL}, floor(score * 0.2), -inf))", (1, 2, 1, 37, 45, 16, 16)),
    Family("sharp", "attention(score=score * 14.0)", (1, 2, 1, 37, 45, 16, 16)),
    Family("dead_1e9", "attention(score=where(q_idx >= kv_idx + 5, score * 0.2, -1000000000.0))"),
    Family("dead_finfo", "attention(score=where(q_idx >= kv_idx + 5, score * 0.2, -3.4028234663852886e+38))"),
    Family("dead_minus_5", "attention(score=where(q_idx >= kv_idx + 5, score * 0.2, -5.0))"),
    Family(
        "window",
        f"attention(score=where(({CAUSAL}) & (q_idx - kv_idx < 20), score * 0.2, -inf))",
        (1, 2, 1, 100, 100, 16, 16),
    ),
    Family(
        "window_dead_zero",
        f"attention(score=where(({CAUSAL}) & (q_idx - kv_idx < 20), score * 0.2, -inf), dead_rows='zero')",
        (1, 2, 1, 100, 40, 16, 16),
    ),
    Family(
        "prefix_lm", f"attention(score=where(({CAUSAL}) | (kv_idx < 30), score * 0.2, -inf))", (1, 2, 1, 80, 80, 16, 16)
    ),
    Family(
        "chunked",
        f"attention(score=where(({CAUSAL}) & (q_idx // 16 == kv_idx // 16), score * 0.2, -inf))",
        (1, 2, 1, 80, 80, 16, 16),
    ),
    Family(
        "document",
        f"attention(score=where(({CAUSAL}) & (i0[b, q_idx] == i0[b, kv_idx]), score * 0.2, -inf))",
        (2, 2, 1, 70, 70, 16, 16),
        lambda shape, g: [torch.arange(shape[0] * shape[3]).view(shape[0], shape[3]) // 23],
    ),
    Family("padding_nan", "attention(score=where(m0[b, kv_idx], score * 0.2, -inf))", captures=_padding),
    Family(
        "padding_dead_zero",
        f"attention(score=where(({CAUSAL}) & m0[b, kv_idx], score * 0.2, -inf), dead_rows='zero')",
        (2, 4, 2, 90, 90, 16, 16),
        _padding,
    ),
    Family(
        "positions",
        "attention(score=where(i0[b, q_idx] >= i0[b, kv_idx], score * 0.2, -inf))",
        (2, 4, 2, 90, 90, 16, 16),
        lambda shape, g: [torch.randint(0, 50, (shape[0], shape[3]), generator=g)],
    ),
    Family(
        "documents_long",
        f"attention(score=where(({CAUSAL}) & (i0[b, q_idx] == i0[b, kv_idx]), score * 0.2, -inf))",
        (2, 2, 1, 330, 330, 16, 16),
        documents,
    ),
    Family(
        "documents_scattered",
        "attention(score=where(i0[b, q_idx] == i0[b, kv_idx], score * 0.2, -inf))",
        (1, 2, 1, 300, 330, 16, 16),
        lambda shape, g: [torch.arange(shape[0] * shape[4]).view(shape[0], shape[4]) // 70 % 3 + 2**40],
    ),
    Family(
        "positions_long",
        "attention(score=where(i0[b, q_idx] >= i1[b, kv_idx], score * 0.2, -inf), dead_rows='zero')",
        (1, 2, 1, 330, 200, 16, 16),
        lambda shape, g: [torch.arange(shape[3])[None] // 3, torch.arange(shape[4])[None].flip(1) // 2 + 5],
    ),
    Family(
        "padding_long",
        f"attention(score=where(({CAUSAL}) & m0[b, kv_idx], score * 0.2, -inf), dead_rows='zero')",
        (2, 2, 2, 330, 330, 16, 16),
        _padding,
    ),
    Family(
        "padding_turned_long",
        "attention(score=where(~m0[b, kv_idx], score * 0.2, -inf), dead_rows='zero')",
        (2, 2, 2, 200, 330, 16, 16),
        lambda shape, g: [~_padding(shape, g)[0]],
    ),
    Family(
        "padding_causal_finfo",
        f"attention(score=where(({CAUSAL}) & m0[b, kv_idx], score * 0.2, -3.4028234663852886e+38))",
        (2, 2, 1, 45, 45, 16, 16),
        _padding,
    ),
    # Padding on the left that is added: its rows keep keys by their positions, all of which are as low as the fill.
    Family(
        "padding_added_finfo",
        f"attention(score=where({CAUSAL}, score * 0.2 + f0[b, kv_idx], -3.4028234663852886e+38))",
        (2, 2, 1, 45, 45, 16, 16),
        lambda shape, g: [torch.zeros(2, 45).index_fill(1, torch.arange(3), torch.finfo(torch.float32).min)],
        exact=torch.float32,
    ),
    Family(
        "key_lengths",
        "attention(score=where(kv_idx < i0[b], score * 0.2, -inf))",
        (3, 2, 1, 37, 70, 16, 16),
        lambda shape, g: [torch.tensor([70, 33, 5])],
    ),
    # Static caches: -1 leaves a row without keys, which then averages all of them.
    Family(
        "cache_finfo",
        "attention(score=score * 0.2 + where(kv_idx <= i0[b], 0.0, -3.4028234663852886e+38))",
        (3, 4, 2, 1, 130, 16, 16),
        lambda shape, g: [torch.tensor([70, -1, 3])],
        exact=torch.float32,
    ),
    Family(
        "cache_window_1e9",
        "attention(score=where((kv_idx <= q_idx + i0[b]) & (kv_idx >= q_idx + i0[b] - 40), score * 0.2, -1000000000.0))",
        (2, 2, 1, 37, 150, 16, 16),
        lambda shape, g: [torch.tensor([100, -20])],
        exact=torch.float32,
    ),
    Family(
        "threshold_keys",
        "attention(score=where(score * f0[b, kv_idx] > 0.0, score * 0.2, -inf), dead_rows='zero')",
        captures=normal("b", "n"),
    ),
    Family(
        "threshold_rows",
        "attention(score=where(cast_int(score) + q_idx >= i0[b, kv_idx], score * 0.2, -inf), dead_rows='zero')",
        captures=lambda shape, g: [torch.randint(-1, 40, (shape[0], shape[4]), generator=g)],
    ),
    # Differences, sums and ends of ranges leave the narrow dtypes of what is captured.
    Family(
        "ids_narrow",
        "attention(score=where((i0[b, q_idx] + 100 >= i0[b, kv_idx]) & (i1[h, q_idx] < i0[b, kv_idx]), score * 0.2, -inf),"
        " dead_rows='zero')",
        captures=lambda shape, g: [
            torch.randint(100, 256, (shape[0], shape[4]), generator=g).to(torch.uint8),
            torch.randint(-100, 128, (shape[1], shape[3]), generator=g).to(torch.int8),
        ],
    ),
    Family(
        "ids_narrow_long",
        "attention(score=where(i1[h, q_idx] < i0[b, kv_idx], score * 0.2, -inf), dead_rows='zero')",
        (2, 2, 1, 150, 90, 16, 16),
        lambda shape, g: [
            torch.randint(0, 256, (shape[0], shape[4]), generator=g).to(torch.uint8),
            torch.randint(-100, 128, (shape[1], shape[3]), generator=g).to(torch.int8),
        ],
    ),
    Family(
        "key_lengths_narrow",
        "attention(score=where((kv_idx >= i0[b] - 10) & (kv_idx < i1[b] + 30), score * 0.2, -inf))",
        captures=lambda shape, g: [torch.tensor([5, 20], dtype=torch.uint8), torch.tensor([100, 4], dtype=torch.int8)],
    ),
    Family(
        "key_lengths_without_limit",
        "attention(score=where((kv_idx <= i0[b]) & (kv_idx - q_idx <= i1[b]), score * 0.2, -inf))",
        captures=lambda shape, g: [torch.tensor([2**31 - 1, 40], dtype=torch.int32), torch.tensor([30, 2**63 - 1])],
    ),
    Family(
        "key_lengths_summed",
        "attention(score=where(kv_idx < i0[b] - i1[b], score * 0.2, -inf))",
        captures=lambda shape, g: [torch.tensor([2**60 + 9, 2**60 + 40]), torch.tensor([2**60, 2**60])],
    ),
    Family(
        "windows_without_limit",
        "attention(score=where((q_idx - kv_idx < 9223372036854775807) & (kv_idx - q_idx <= 2147483647)"
        " & (q_idx - kv_idx > n0) & (kv_idx - q_idx <= n1) & (kv_idx < 1099511627776), score * 0.2, -inf))",
        sizes=(-(2**63), 2**63 - 1),
    ),
    Family("bias_full", "attention(score=score * 0.2 + f0[b, h, q_idx, kv_idx])", captures=normal("b", "h", "m", "n")),
    Family("bias_heads", "attention(score=score * 0.2 + f0[0, h, q_idx, kv_idx])", captures=normal("1", "h", "m", "n")),
    Family("bias_batch", "attention(score=score * 0.2 + f0[b, 0, q_idx, kv_idx])", captures=normal("b", "1", "m", "n")),
    Family("bias_keys", "attention(score=score * 0.2 + f0[b, 0, 0, kv_idx])", captures=normal("b", "1", "1", "n")),
    Family("bias_rows", "attention(score=score * 0.2 + f0[h, q_idx, 0])", captures=normal("h", "m", "1")),
    Family("bias_1e9", "attention(score=score * 0.25 + f0[b, 0, q_idx, kv_idx])", captures=_left_padding_bias,
           exact=torch.float32),
    Family(
        "alibi",
        f"attention(score=where({CAUSAL}, score * 0.2 + f0[h] * cast_float(kv_idx - q_idx), -inf))",
        (2, 4, 2, 45, 45, 24, 40),
        normal("h", scale=0.1),
    ),
    Family(
        "reciprocal_distance",
        "attention(score=score * 0.2 + minimum(1.0 / cast_float(-(abs(q_idx - kv_idx))), 0.5))",
    ),
    Family(
        "diagonals", f"attention(score=score * 0.2 + f0[h, {ROW}, {COLUMN}])", (2, 4, 2, 150, 45, 24, 40), captures=_diagonals
    ),
    Family("relative", "attention(score=score * 0.2 + f0[q_idx - kv_idx + 44, h])", captures=normal("rel", "h")),
    Family("gather_outside", "attention(score=score * 0.2 + f0[q_idx - kv_idx])", captures=normal("20")),
    Family("softcap", f"attention(score=where({CAUSAL}, tanh(score * 0.02) * 50.0, -inf))"),
    Family("softcap_bias", "attention(score=tanh(score * 0.05) * 20.0 + f0[h, q_idx, kv_idx])",
           captures=normal("h", "m", "n")),
    Family("temperature", "attention(score=score * f0[()])", captures=lambda shape, g: [torch.tensor(0.3)]),
    Family("temperature_heads", "attention(score=score * exp(f0[h, 0, 0]))", captures=normal("h", "1", "1", scale=0.5)),
    Family("sinks", "attention(score=score * 0.2, sinks=[f0[h]])", captures=normal("h")),
    Family(
        "sinks_window",
        f"attention(score=where(({CAUSAL}) & (q_idx - kv_idx < 9), score * 0.2, -inf), sinks=[f0[h], -1.5])",
        (2, 4, 2, 45, 45, 24, 40),
        normal("h"),
    ),
    Family(
        "sinks_dead_1e9",
        "attention(score=where(q_idx >= kv_idx + 5, score * f1[()], -1000000000.0), sinks=[f0[h]])",
        captures=lambda shape, g: [torch.randn(shape[1], generator=g), torch.tensor(0.3)],
    ),
    Family(
        "dropout",
        "attention(score=score * 0.2, dropout=(0.3, 0))",
        captures=lambda shape, g: [torch.tensor([123, 45])],
    ),
    Family(
        "run_time_sizes",
        "attention(score=where(q_idx + n0 >= kv_idx, score * 0.2 + cast_float(n1 - q_idx) * 0.01, -inf))",
        sizes=(9, -3),
    ),
    Family(
        "functions",
        "attention(score=sigmoid(score) + sin(score * 0.3) * cos(score) + relu(score) * 0.1 + erf(score * 0.1)"
        " + log1p(abs(score)) + expm1(minimum(score, 0.0)) + pow(score * 0.1, 2.0))",
        (1, 2, 1, 20, 20, 16, 16),
    ),
    Family(
        "integers",
        "attention(score=score * 0.2 + cast_float((kv_idx - q_idx) % 5) - cast_float((kv_idx - q_idx) // 3)"
        " + cast_float(isnan(f0[kv_idx])))",
        captures=normal("n"),
    ),
]  # fmt: skip

#: Rows in which one weight is 1 in float32 and large scores multiply what is left of their gradient, in truth nearly nothing. For
#: float32 alone: with 16 bits the output's rounding is left, of which delta = sum(out * grad_out) is made.
_PEAK = "where(kv_idx == q_idx, 1000.0, 0.0)"
SATURATED = [
    Family("saturated", f"attention(score=score * 8.0 + {_PEAK})"),
    Family("saturated_below_zero", f"attention(score=score * 8.0 - 2000.0 + {_PEAK})"),
    Family("saturated_head_dims", f"attention(score=score * 8.0 + {_PEAK})", (1, 3, 1, 33, 37, 16, 80)),
    Family("saturated_causal", f"attention(score=where({CAUSAL}, score * 8.0 + {_PEAK}, -inf))", (2, 4, 2, 70, 70, 24, 40)),
    Family("saturated_padding_dead_zero",
           f"attention(score=where(({CAUSAL}) & m0[b, q_idx] & m0[b, kv_idx], score * 8.0 + {_PEAK}, -inf), dead_rows='zero')",
           (2, 4, 4, 45, 45, 16, 16), _padding, layout="packed"),
    Family("saturated_bias", f"attention(score=score * 8.0 + {_PEAK} + f0[h, q_idx, kv_idx])", captures=normal("h", "m", "n")),
    Family("saturated_factors", f"attention(score=score * f0[h] * f1[kv_idx] + {_PEAK})",
           captures=lambda shape, g: [torch.randn(shape[1], generator=g) + 8.0, torch.randn(shape[4], generator=g)]),
    Family("saturated_dropout", f"attention(score=score * 8.0 + {_PEAK}, dropout=(0.3, 0))",
           captures=lambda shape, g: [torch.tensor([123, 45])]),
    Family("saturated_sinks", f"attention(score=score * 8.0 + {_PEAK}, sinks=[f0[h], -1.5])", captures=normal("h")),
    # No weight is 1, and yet the rows' sums are computed anew.
    Family("far_from_zero",
           f"attention(score=where({CAUSAL}, score * 0.2 + 40.0, -inf), sinks=[f0[h] + 41.0], dropout=(0.3, 1))",
           captures=lambda shape, g: [*normal("h")(shape, g), torch.tensor([123, 45])]),
]  # fmt: skip

BY_NAME = {f.name: f for f in (*FAMILIES, *SATURATED)}


def truth(o: Operands, family: Family) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """(out, lse, gradients) of the reference in the family's exact dtype."""
    exact = family.exact
    q, k, v, grad_out, *captures = (
        t.to(exact) if t.is_floating_point() else t for t in (o.q, o.k, o.v, o.grad_out, *o.captures)
    )
    spec = family.spec()
    out, lse = attention(q, k, v, captures, family.sizes, spec, exact)
    return out, lse, attention_grads(grad_out, q, k, v, captures, family.sizes, spec, o.needs_grad, exact)


def error(value: Tensor, true: Tensor) -> float:
    """Norm of the difference over norm of the truth; infinite where NaN or infinity do not agree.

    A gradient that is zero or nearly so everywhere is compared with the size that gradients of such operands have.
    """
    value, true = value.double(), true.double()
    if not (torch.equal(value.isnan(), true.isnan()) and torch.equal(value.isinf(), true.isinf())):
        return float("inf")
    finite = true.isfinite()
    least = 0.1 * max(int(finite.sum()), 1) ** 0.5
    return float((value - true)[finite].norm() / true[finite].norm().clamp_min(least))


def names(o: Operands) -> list[str]:
    """What the gradients are of, in order."""
    return ["dq", "dk", "dv", *(f"dcapture{i}" for i in range(len(o.captures)))]
