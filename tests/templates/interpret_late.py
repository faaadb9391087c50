"""Run the forward that multiplies with V a step late in Triton's interpreter and print what came out as JSON, one line a family.

A program of its own because TRITON_INTERPRET must be set before triton is first imported.
Arguments: dtype, options of the forward as JSON, then family names.
"""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
warnings.filterwarnings("ignore", category=RuntimeWarning)

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from fa_inductor.reference import attention  # noqa: E402
from fa_inductor.templates import direct  # noqa: E402
from fa_inductor.templates.configs import TileConfig  # noqa: E402
from tests.templates import families  # noqa: E402


def forward(o: families.Operands, family: families.Family, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    tile = TileConfig(**{"block_m": 32, "block_n": 16, "num_warps": 4, "num_stages": 1, **options})
    configs = direct.Configs(tile, tile, tile, tile)
    return direct.forward(o.q, o.k, o.v, o.captures, family.sizes, family.spec(), configs)


def same(ours: tuple[Tensor, Tensor], others: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(x.nan_to_num(7.0, 8.0, 9.0), y.nan_to_num(7.0, 8.0, 9.0)) for x, y in zip(ours, others, strict=True))


def infinite_values(o: families.Operands) -> None:
    """Infinities and a NaN among the values of some keys: of the first and of the last one, and of each tile's first."""
    last = o.v.shape[2] - 1
    for key, dim, value in ((0, 0, math.inf), (last, 1, -math.inf), (16, 2, math.inf), (32, 3, math.nan), (15, 4, math.inf)):
        o.v[:, :, min(key, last), dim] = value


def run(name: str, dtype: torch.dtype, options: dict[str, Any]) -> dict[str, Any]:
    family = families.BY_NAME[name]
    o = families.draw(family, dtype, "cpu")
    at_once = {**options, "late_values": ""}
    out, lse = forward(o, family, options)
    exact = [t.to(family.exact) if t.is_floating_point() else t for t in (o.q, o.k, o.v, *o.captures)]
    true_out, true_lse = attention(*exact[:3], exact[3:], family.sizes, family.spec(), family.exact)
    found = {"errors": {"out": families.error(out, true_out), "lse": families.error(lse, true_lse.float())}}
    infinite_values(o)
    late, other = forward(o, family, options), forward(o, family, at_once)
    return {**found, "same": same(late, other), "infinite": int(late[0].isinf().sum())}


if __name__ == "__main__":
    for family_name in sys.argv[3:]:
        answer = run(family_name, getattr(torch, sys.argv[1]), json.loads(sys.argv[2]))
        print(json.dumps({"name": family_name, **answer}), flush=True)
