"""Run the polynomial exp2 and the conditional rescale in Triton's interpreter and print what came out as JSON.

A program of its own because TRITON_INTERPRET must be set before triton is first imported. Argument: ``sweep``,
``rows``, or ``families`` with a dtype, options of the forward as JSON and names.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
import tempfile
import warnings
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
warnings.filterwarnings("ignore", category=RuntimeWarning)

import numpy as np  # noqa: E402
import torch  # noqa: E402

from fa_inductor.reference import attention  # noqa: E402
from fa_inductor.spec import AttentionSpec  # noqa: E402
from fa_inductor.templates import direct, exp2  # noqa: E402
from fa_inductor.templates.configs import TileConfig  # noqa: E402
from tests.templates import families  # noqa: E402

_KERNEL = """
import triton
import triton.language as tl

{functions}

@triton.jit
def kernel(X, OUT, DEGREE: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = tl.load(X + at)
    if DEGREE == 3:
        tl.store(OUT + at, _exp2_poly3(x))
    else:
        tl.store(OUT + at, _exp2_poly4(x))
"""


def polynomial(x: np.ndarray, degree: int) -> np.ndarray:
    """The device function on float32 numbers."""
    path = Path(tempfile.mkdtemp(prefix="fa_inductor_exp2_")) / "kernel.py"
    path.write_text(_KERNEL.format(functions="".join(exp2.FUNCTIONS.values())))
    spec = importlib.util.spec_from_file_location("exp2_kernel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    size = 1 << 16
    padded = torch.zeros(-(-len(x) // size) * size)
    padded[: len(x)] = torch.from_numpy(x)
    out = torch.empty_like(padded)
    module.kernel[(len(padded) // size,)](padded, out, DEGREE=degree, SIZE=size)
    return out.numpy()[: len(x)]


def sweep() -> dict[str, object]:
    """Largest relative errors by degree, and values at the ends."""
    # Every 7th float32 of a step around each of some integers, and evenly spaced numbers over the whole range.
    bits = np.arange(np.float32(0.25).view(np.int32), np.float32(1.0).view(np.int32), 7, dtype=np.int32)
    unit = bits.view(np.float32)
    dense = np.concatenate([unit - np.float32(n) for n in (1, 2, 9, 100)] + [np.linspace(-126, 127, 1 << 20, dtype=np.float32)])
    ends = np.array([-math.inf, -3e38, -1e4, -127.0, -126.75, math.nan, 0.0, -0.0, 8.0, 127.0], np.float32)
    result: dict[str, object] = {"points": len(dense)}
    for degree in exp2.COEFFICIENTS:
        got = polynomial(dense, degree).astype(np.float64)
        result[f"error{degree}"] = float(np.abs(got / np.exp2(dense.astype(np.float64)) - 1).max())
        result[f"ends{degree}"] = [str(v) for v in polynomial(ends, degree)]
        whole = polynomial(np.arange(-125, 127, dtype=np.float32), degree)
        result[f"integers{degree}"] = bool((whole == whole[125] * np.exp2(np.arange(-125.0, 127.0))).all())
    return result


#: Keys a tile of :func:`rows`.
KEYS = 16


def patterns(tiles: int) -> torch.Tensor:
    """Logits [rows, tiles * KEYS], base 2: rows whose maximum grows, shrinks or jumps from tile to tile."""
    g = torch.Generator().manual_seed(0)
    steps = torch.arange(tiles).double()
    spike = torch.zeros(tiles).double()
    spike[tiles // 2] = 120.0
    late = torch.zeros(tiles).double()
    late[-1] = 7.9
    shapes = [s * steps for s in (0.0, 1.0, 7.5, 7.99, 8.0, 8.01, 9.0, 30.0, -1.0, -8.0, -30.0)]
    shapes += [spike, -spike, late, 8.0 * (steps % 2), 9.0 * (steps % 2), 7.9 * (steps % 3), -200.0 + 7.5 * steps]
    tops = torch.stack(shapes)[:, :, None] + torch.zeros(KEYS, dtype=torch.float64)
    noise = torch.rand(tops.shape, generator=g, dtype=torch.float64)
    # One entry of a tile is its maximum, the others lie up to 20 below.
    noise[..., 3] = 0.0
    return (tops - 20.0 * noise).flatten(1)


def rows(threshold: int, degree: int, quarters: int) -> dict[str, float]:
    """Relative errors of the output and absolute ones of lse, with operands that make the logits what they shall be."""
    logits = patterns(8)
    m, n = logits.shape
    q, k = logits.float()[None, None], torch.eye(n)[None, None]
    g = torch.Generator().manual_seed(1)
    v = torch.randn(1, 1, n, 16, generator=g)
    spec = AttentionSpec.parse(f"attention(score=score * {math.log(2)!r})")
    tile = TileConfig(16, KEYS, 4, 1, poly_degree=degree, poly_quarters=quarters, rescale_threshold=threshold)
    out, lse = direct.forward(q, k, v, [], (), spec, direct.Configs(tile, tile, tile, tile))
    exact = logits.float().double() * math.log(2)
    want = torch.softmax(exact, -1) @ v[0, 0].double()
    assert out.shape == (1, 1, m, 16)
    # Relative to the largest value that a row averages: the weights add up to 1.
    return {
        "out": float((out[0, 0].double() - want).abs().max() / v.abs().max()),
        "lse": float((lse[0, 0].double() - torch.logsumexp(exact, -1)).abs().max()),
    }


def nan_key(threshold: int, degree: int) -> bool:
    """Whether a key of NaN makes the rows that see it NaN, and no other."""
    g = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, 1, 64, 16, generator=g) for _ in range(3))
    k[0, 0, 33] = math.nan
    spec = AttentionSpec.parse("attention(score=where(q_idx >= kv_idx, score * 4.0, -inf))")
    tile = TileConfig(16, KEYS, 4, 1, poly_degree=degree, rescale_threshold=threshold)
    out, lse = direct.forward(q, k, v, [], (), spec, direct.Configs(tile, tile, tile, tile))
    return all(bool(t[0, 0, 33:].isnan().all() and t[0, 0, :33].isfinite().all()) for t in (out, lse))


def family(name: str, dtype: torch.dtype, options: dict[str, int]) -> dict[str, float]:
    """Errors of the forward of one family."""
    chosen = families.BY_NAME[name]
    o = families.draw(chosen, dtype, "cpu")
    tile = TileConfig(32, 16, 4, 1, **options)
    out, lse = direct.forward(
        o.q, o.k, o.v, o.captures, chosen.sizes, chosen.spec(), direct.Configs(tile, tile, tile, tile)
    )  # fmt: skip
    exact = [t.to(chosen.exact) if t.is_floating_point() else t for t in (o.q, o.k, o.v, *o.captures)]
    true_out, true_lse = attention(*exact[:3], exact[3:], chosen.sizes, chosen.spec(), chosen.exact)
    return {"out": families.error(out, true_out), "lse": families.error(lse, true_lse.float())}


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    if what == "sweep":
        print(json.dumps(sweep()))
    elif what == "rows":
        found = {f"{t} {d} {s}": rows(t, d, s) for t in (0, 8) for d, s in ((0, 1), (3, 1), (3, 4), (4, 4))}
        print(json.dumps({"rows": found, "nan": all(nan_key(t, d) for t in (0, 8) for d in (0, 3, 4))}))
    else:
        kind, options_text, *names = rest
        chosen_options = json.loads(options_text)
        print(json.dumps({n: family(n, getattr(torch, kind), chosen_options) for n in names}))
