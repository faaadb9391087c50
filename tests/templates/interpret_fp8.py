"""Run the cast and the general FP8 forward in Triton's interpreter and check them.

A program of its own because TRITON_INTERPRET must be set before triton is first imported. The interpreter's cast to e4m3 loses
carries and does not saturate; the kernels are asked to round in float32 first (``rounds``).
"""

from __future__ import annotations

import os
import sys
import warnings

os.environ["TRITON_INTERPRET"] = "1"
warnings.filterwarnings("ignore", category=RuntimeWarning)

import torch  # noqa: E402

from fa_inductor import fp8, reference  # noqa: E402
from fa_inductor.templates import direct, projection  # noqa: E402
from fa_inductor.templates.configs import TileConfig  # noqa: E402
from fa_inductor.templates.quantise import quantise  # noqa: E402
from tests.templates import families  # noqa: E402

SHAPE = (2, 4, 2, 37, 150, 32, 48)
_BLOCK = torch.arange(256)
#: Where the Hopper kernel wants each key of V.
PLACE = (_BLOCK & -16) | ((_BLOCK & 6) << 1) | ((_BLOCK & 8) >> 2) | (_BLOCK & 1)


def cast(dim: int, format: str) -> None:
    q, k, v = torch.randn(2, 4, 37, dim), torch.randn(2, 2, 150, dim) * 3, torch.randn(2, 150, 2, dim).transpose(1, 2)
    k[0, 0, 3, 5], q[0, 0, 4], v[1, 1] = 300.0, 0.0, 0.0
    if format == "e4m3":  # a sum of infinities is none
        v[0, 0, 3, 0], q[0, 1, 2, 1] = torch.inf, -torch.inf
    ours = quantise(q, k, v, format, rounds=True)
    want = fp8.cast_operands(q, k, v, format)
    for got, true in zip(ours.tensors()[:3], want.tensors()[:3], strict=True):
        # Scales and the rotation's sums differ in their last bit, and so do a few roundings.
        differ = (got.float() != true.float()).float().mean()
        assert differ < 1e-3, (dim, format, differ)
    for got, true in zip(ours.tensors()[3:], want.tensors()[3:], strict=True):
        torch.testing.assert_close(got, true, rtol=1e-5, atol=0.0)
    moved = quantise(q, k, v, format, permute=True, rounds=True)
    assert torch.equal(moved.v.float()[..., PLACE], ours.v.float())


def forward(name: str, format: str, tma: bool) -> None:
    family = families.BY_NAME[name].with_shape(*SHAPE)
    o = families.draw(family, torch.float32, "cpu")
    o.v[:, :, 128:] *= 50.0  # blocks of V with very different scales
    sizes, spec = family.sizes, family.spec()
    tile = TileConfig(32, 32, 4, 1, tma=tma)
    out, lse = direct.fp8_forward(o.q, o.k, o.v, o.captures, sizes, spec, tile, format=format, rounds=True)
    true, true_lse = reference.attention(*fp8.rounded(o.q, o.k, o.v, format), o.captures, sizes, spec)
    # The weights alone are rounded besides.
    assert families.error(out, true) < 0.03, (name, format, families.error(out, true))
    assert families.error(lse, true_lse) < 1e-5, (name, format, families.error(lse, true_lse))


def projected(heads: int, kv_heads: int, dims: tuple[int, int], length: int, bias: bool, format: str) -> None:
    features = 80
    x = torch.randn(2, length, features)
    rows = (heads * dims[0], kv_heads * dims[0], kv_heads * dims[1])
    weights = [torch.randn(n, features) / features**0.5 for n in rows]
    biases = [torch.randn(n) for n in rows] if bias else []
    ours = projection.project(x, weights, biases, heads, kv_heads, format, rounds=True)
    want = fp8.cast_operands(*fp8.projected(x, weights, biases, heads, kv_heads), format)
    for got, true in zip(ours.tensors()[:3], want.tensors()[:3], strict=True):
        assert (got.float() != true.float()).float().mean() < 2e-3
    for got, true in zip(ours.tensors()[3:], want.tensors()[3:], strict=True):
        torch.testing.assert_close(got, true, rtol=1e-5, atol=0.0)
    moved = projection.project(x, weights, biases, heads, kv_heads, format, permute=True, rounds=True)
    assert torch.equal(moved.v.float()[..., PLACE[: ours.v.shape[3]]], ours.v.float())


if __name__ == "__main__":
    torch.manual_seed(0)
    for dim in (32, 96, 256):
        for format in fp8.FORMATS:
            cast(dim, format)
    projected(4, 2, (32, 48), 150, bias=True, format="e4m3")
    projected(2, 2, (64, 32), 128, bias=False, format="e4m3-rotated")
    projected(2, 1, (32, 32), 130, bias=False, format="int8-e4m3")
    projection.together = lambda *_: 2  # as with TMA
    projected(4, 2, (32, 64), 150, bias=True, format="e4m3")
    projected(2, 2, (64, 32), 130, bias=False, format="e4m3-rotated")
    for name in sys.argv[1:]:
        forward(name, format="e4m3", tma=False)
        forward(name, format="e4m3-rotated", tma=True)
        forward(name, format="int8-e4m3", tma=False)
    print("right")
