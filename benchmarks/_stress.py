"""Random attentions for ``stress.py``: what is compiled in, what varies at run time, and the references for some rows."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

#: Head dims by what they are padded to.
DIMS = {
    (64, 64): [(64, 64), (40, 64), (64, 24)],
    (128, 128): [(128, 128), (80, 72), (96, 96)],
    (128, 64): [(128, 64), (96, 48)],
    (256, 128): [(192, 128), (256, 120)],
    (256, 256): [(256, 256), (192, 136), (200, 256)],
}
LAYOUTS = ("bhmd", "bmhd", "packed", "every_second", "wide_rows", "expanded")
#: Rows of a head that are compared, and of keys.
ROWS = 48
DEVICE = "cuda"


@dataclass(frozen=True)
class Variant:
    """What is compiled in."""

    backward: bool
    dtype: torch.dtype
    padded: tuple[int, int]
    low: bool
    high: bool
    softcap: bool
    dead_zero: bool
    even: bool
    deterministic: bool
    format: str = ""  # of an FP8 forward

    @staticmethod
    def draw(r: random.Random) -> Variant:
        backward = r.random() < 0.45
        # The wide backward has no tiles of V narrower than those of K.
        padded = r.choice([d for d in DIMS if not backward or d != (256, 128)])
        low, high, softcap, dead_zero, even, deterministic = (r.random() < p for p in (0.4, 0.7, 0.25, 0.5, 0.4, 0.4))
        dtype = r.choice([torch.bfloat16, torch.bfloat16, torch.float16])
        return Variant(backward, dtype, padded, low, high, softcap, dead_zero, even, backward and deterministic)

    @property
    def name(self) -> str:
        if not self.backward:
            return f"forward {self.format}".rstrip()
        return ("wide " if self.padded[0] > 128 else "") + "backward" + (", deterministic" if self.deterministic else "")


@dataclass(frozen=True)
class Launch:
    """What varies at run time, drawn from ``r``: (B, Hq, Hkv, M, N), and the band of keys from m + low to m + high."""

    variant: Variant
    r: random.Random
    dims: tuple[int, int] = field(init=False)
    shape: tuple[int, int, int, int, int] = field(init=False)
    band: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        r, v = self.r, self.variant
        longest = r.choices([1000, 5000], [0.97, 0.03])[0]
        m, n = (min(longest, int(longest ** r.uniform(0.0, 1.05)) + r.randint(0, 3)) for _ in range(2))
        n = max(n // 128, 1) * 128 if v.even else n + (n % 64 == 0)
        group, kv_heads, batch = r.choice([1, 1, 2, 3, 4, 7, 8, 16]), r.randint(1, 3), r.randint(1, 3)
        if max(m, n) > 1000:
            group, kv_heads, batch = min(group, 4), 1, 1
        high = r.choice([0, n - m, r.randint(-m - 5, n + 5)])
        low = high - r.randint(0, 300) if r.random() < 0.7 else r.randint(-m - 5, n + 5)
        # Rows of FP8 operands are multiples of 16 bytes.
        object.__setattr__(self, "dims", r.choice([d for d in DIMS[v.padded] if not v.format or d[0] % 16 == d[1] % 16 == 0]))
        object.__setattr__(self, "shape", (batch, group * kv_heads, kv_heads, m, n))
        object.__setattr__(self, "band", (low, high))

    @property
    def factors(self) -> tuple[float, float]:
        """(factor of the score before tanh, 1 where there is none; factor of the logit)."""
        return (1.5 / self.dims[0] ** 0.5, 3.0) if self.variant.softcap else (1.0, self.dims[0] ** -0.5)

    @property
    def program(self) -> str:
        """The attention as the ops take it, with the band's ends as run-time sizes."""
        v, (cap, scale) = self.variant, self.factors
        score = f"tanh(score * {cap!r}) * {scale!r}" if v.softcap else f"score * {scale!r}"
        ends = ["(kv_idx >= q_idx + n0)"] * v.low + ["(kv_idx <= q_idx + n1)"] * v.high
        score = f"where({' & '.join(ends)}, {score}, -inf)" if ends else score
        layout = ", layout='bmhd'" if self.shape[3] % 2 else ""
        return f"attention(score={score}, dead_rows={'zero' if v.dead_zero else 'nan'!r}{layout})"

    def __str__(self) -> str:
        return f"{self.variant}, {self.program}, dims {self.dims}, [B, Hq, Hkv, M, N] {self.shape}, n0 and n1 {self.band}"

    # ---------------------------------------------------------------------------------------------------------- tensors
    def tensor(self, heads: int, length: int, dim: int) -> Tensor:
        """[B, heads, length, dim] with strides of a random kind."""
        b, layout = self.shape[0], self.r.choice(LAYOUTS)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, device=DEVICE, dtype=self.variant.dtype)

        if layout == "bmhd":
            return normal(b, length, heads, dim).transpose(1, 2)
        if layout == "packed":
            return normal(b, length, 3, heads, dim)[:, :, 1].transpose(1, 2)
        if layout == "every_second":
            return normal(b, heads, 2 * length, dim)[:, :, ::2]
        if layout == "wide_rows":
            return normal(b, heads, length, dim + 16)[..., 8 : dim + 8]
        if layout == "expanded":
            return normal(1, heads, length, dim).expand(b, -1, -1, -1)
        return normal(b, heads, length, dim)

    # ------------------------------------------------------------------------------------------------------- references
    def logits(self, s: Tensor, rows: Tensor, cols: Tensor) -> tuple[Tensor, Tensor]:
        """(logits of scores ``s`` [..., rows, cols], slope of tanh there)."""
        v, (cap, scale) = self.variant, self.factors
        if v.softcap:
            s = (s * cap).tanh()
        slope = 1.0 - s * s if v.softcap else torch.ones_like(s)
        keep = torch.ones(len(rows), len(cols), dtype=torch.bool, device=s.device)
        if v.low:
            keep &= cols >= rows[:, None] + self.band[0]
        if v.high:
            keep &= cols <= rows[:, None] + self.band[1]
        return torch.where(keep, s * scale, -torch.inf), slope

    def out(
        self, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, low: torch.dtype, high: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """(out, lse) of rows of a head: products in ``high``, P and out rounded to ``low``."""
        x, _ = self.logits(q[rows].to(high) @ k.to(high).T, rows, torch.arange(len(k), device=q.device))
        top = x.amax(-1, keepdim=True)
        p = (x - (top.clamp_min(-1e30) if self.variant.dead_zero else top)).exp()
        denom = p.sum(-1, keepdim=True)
        p = p.to(low).to(high) @ v.to(high) / torch.where(denom == 0, 1.0, denom)
        return p.to(low), x.logsumexp(-1)

    def part(
        self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, out: Tensor, lse: Tensor, rows: Tensor, cols: Tensor,
        low: torch.dtype, high: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """(dQ, dK, dV) in ``high`` of what ``rows`` of q [heads, M, D] and ``cols`` of k [N, D] give each other."""
        q, do, out = (t[:, rows].to(high) for t in (q, do, out))
        k, v = k[cols].to(high), v[cols].to(high)
        x, slope = self.logits(q @ k.T, rows, cols)
        lse = lse[:, rows, None].to(high)
        if self.variant.dead_zero:
            lse = torch.where(lse == -torch.inf, torch.inf, lse)
        p = (x - lse).exp()
        ds = p * slope * (do @ v.T - (do * out).sum(-1, keepdim=True))
        ds = torch.where(x == -torch.inf, 0.0, ds).to(low).to(high) * (self.factors[0] * self.factors[1])
        p = p.to(low).to(high)
        return ds @ k, (ds.mT @ q).sum(0), (p.mT @ do).sum(0)

    # ------------------------------------------------------------------------------------------------------------- runs
    def run(self) -> Tensor:
        """The worst error over what is allowed, a scalar on the device; infinite where NaN or bits differ."""
        from fa_inductor.templates.sm90 import backward_launch, launch

        r, (b, hq, hkv, m, n), (d, dv), low = self.r, self.shape, self.dims, self.variant.dtype
        torch.manual_seed(r.getrandbits(32))
        precisions = ((torch.float64, torch.float64), (low, torch.float32))
        q, k, v = self.tensor(hq, m, d), self.tensor(hkv, n, d), self.tensor(hkv, n, dv)
        if self.variant.format:
            return self.run_fp8(q, k, v)
        out, lse = launch.attention(q, k, v, self.band, self.program)
        i, h = r.randrange(b), r.randrange(hq)
        kv = h // (hq // hkv)
        rows, cols = (torch.randint(x, (min(x, ROWS),), device=DEVICE) for x in (m, n))
        rows[0], rows[-1], cols[0], cols[-1] = 0, m - 1, 0, n - 1
        if not self.variant.backward:
            exact, same = (self.out(q[i, h], k[i, kv], v[i, kv], rows, *p) for p in precisions)
            ratio = error_ratio(out[i, h][rows], exact[0], same[0], low)
            return torch.maximum(ratio, error_ratio(lse[i, h][rows], exact[1], same[1], torch.float16))
        do = self.tensor(hq, m, dv)
        torch.use_deterministic_algorithms(self.variant.deterministic)
        runs = [
            backward_launch.attention_backward(do, q, k, v, out, lse, self.band, self.program)
            for _ in range(1 + self.variant.deterministic)
        ]
        torch.use_deterministic_algorithms(False)
        every_row, every_col = (torch.arange(x, device=DEVICE) for x in (m, n))
        sides = []
        for p in precisions:
            heads, group = slice(h, h + 1), slice(kv * (hq // hkv), (kv + 1) * (hq // hkv))
            parts = [
                self.part(q[i, x], k[i, kv], v[i, kv], do[i, x], out[i, x], lse[i, x], row, col, *p)
                for x, row, col in ((heads, rows, every_col), (group, every_row, cols))
            ]
            sides.append((parts[0][0][0], parts[1][1], parts[1][2]))
        found = (runs[0][0][i, h][rows], runs[0][1][i, kv][cols], runs[0][2][i, kv][cols])
        ratios = [error_ratio(x, y, z.to(low), low) for x, y, z in zip(found, *sides, strict=True)]
        for x, y in zip(runs[0], runs[-1], strict=True):
            if self.variant.deterministic:
                ratios.append(torch.where((x.view(torch.int16) == y.view(torch.int16)).all(), 0.0, torch.inf))
        return torch.stack([x.double() for x in ratios]).amax()

    def run_fp8(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The same of an FP8 forward, against float64 of what the cast made of the operands.

        A weight in e4m3 is off by 1/16 of itself at most, or by half a unit of the smallest number; products of e4m3 lose what
        tests/gpu/test_fp8.py says.
        """
        from fa_inductor import fp8
        from fa_inductor.templates.quantise import quantise
        from fa_inductor.templates.sm90 import fp8_launch

        r, (b, hq, hkv, m, _) = self.r, self.shape
        out, lse = fp8_launch.attention(q, k, v, self.band, self.program, self.variant.format)
        i, h = r.randrange(b), r.randrange(hq)
        rows = torch.randint(m, (min(m, ROWS),), device=DEVICE)
        rows[0], rows[-1] = 0, m - 1
        q64, k64, v64 = (t.double() for t in fp8.widened(quantise(q, k, v, self.variant.format)))
        q64, k64, v64 = q64[i, h], k64[i, h // (hq // hkv)], v64[i, h // (hq // hkv)]
        exact, exact_lse = self.out(q64, k64, v64, rows, torch.float64, torch.float64)
        most, _ = self.out(q64, k64, v64.abs(), rows, torch.float64, torch.float64)
        # The drift of a score moves every weight of its row by as much.
        drift = 0.0 if self.variant.format == "int8-e4m3" else 2.0**-11 * (q64[rows] @ k64.T).abs().amax() * math.prod(self.factors)
        allowed = (1 / 16 + 2 * drift + 2 * torch.finfo(q.dtype).eps) * most + 2.0**-10 / 448 * v64.abs().sum(0) + 1e-6
        kept = exact_lse.isfinite()
        apart = torch.where(kept[:, None], (out[i, h][rows].double() - exact).abs() / allowed, 0.0).amax()
        lse_apart = torch.where(kept, (lse[i, h][rows].double() - exact_lse).abs() / (drift + 1e-4 + 1e-5 * exact_lse.abs()), 0.0)
        same_nan = torch.equal(out[i, h][rows].isnan(), exact.isnan())
        return torch.where(torch.tensor(same_nan, device=DEVICE), torch.maximum(apart, lse_apart.amax()), torch.inf)


def error_ratio(ours: Tensor, exact: Tensor, same: Tensor, dtype: torch.dtype) -> Tensor:
    """Norm of ``ours - exact`` over what is allowed; infinite where NaN and infinities are not the same."""
    finite = exact.isfinite()
    agree = torch.where(finite, ours.isfinite(), (ours.isnan() & exact.isnan()) | (ours == exact)).all()
    ours, same, exact = (torch.where(finite, t.double(), 0.0) for t in (ours, same, exact))
    # Of gradients that are zero, such as those of rows of one key, only the rounding of float32 sums is left.
    rounding = 2.0 * torch.finfo(dtype).eps * exact.norm() + 2e-5 * exact.numel() ** 0.5
    return torch.where(agree, (ours - exact).norm() / (2.0 * (same - exact).norm() + rounding), torch.inf)
