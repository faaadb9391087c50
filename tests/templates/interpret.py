"""Run families through the kernels in Triton's interpreter and print their errors as JSON, one line a family.

A program of its own because TRITON_INTERPRET must be set before triton is first imported.
Arguments: dtype, programs that share a tile's keys in the forward, then family names. With shared keys only the forward runs.
"""

from __future__ import annotations

import json
import os
import sys
import warnings

os.environ["TRITON_INTERPRET"] = "1"
warnings.filterwarnings("ignore", category=RuntimeWarning)

import torch  # noqa: E402

from fa_inductor.templates import direct  # noqa: E402
from fa_inductor.templates.configs import TileConfig  # noqa: E402
from tests.templates import families  # noqa: E402


def run(name: str, dtype: torch.dtype, splits: int) -> dict[str, float]:
    family = families.BY_NAME[name]
    spec, sizes = family.spec(), family.sizes
    o = families.draw(family, dtype, "cpu")
    if splits > 1:
        only = TileConfig(32, 16, 4, 1, splits=splits)
        out, lse = direct.forward(o.q, o.k, o.v, o.captures, sizes, spec, direct.Configs(only, only, only, only))
        true_out, true_lse, _ = families.truth(o, family)
        return {"out": families.error(out, true_out), "lse": families.error(lse, true_lse.float())}
    tile = TileConfig(32, 16, 4, 1)
    # Each family takes one of the places where the product of V and dO may start, and descriptors with it.
    place = ("dv", "weights", "score")[list(families.BY_NAME).index(name) % 3]
    tma = {"tma": place != "dv", "pointers_once": place == "score"}
    configs = direct.Configs(tile, TileConfig(16, 32, 4, 1, dp_place=place, **tma), TileConfig(32, 16, 4, 1, **tma), tile)
    out, lse = direct.forward(o.q, o.k, o.v, o.captures, sizes, spec, configs)
    grads = direct.backward(
        o.grad_out, o.q, o.k, o.v, out, lse, o.captures, sizes, spec, o.needs_grad, configs
    )  # fmt: skip
    true_out, true_lse, true_grads = families.truth(o, family)
    result = {"out": families.error(out, true_out), "lse": families.error(lse, true_lse.float())}
    for n, g, t in zip(families.names(o), grads, true_grads, strict=True):
        if g is not None and t is not None:
            result[n] = families.error(g, t)
    return result


if __name__ == "__main__":
    for family_name in sys.argv[3:]:
        errors = run(family_name, getattr(torch, sys.argv[1]), int(sys.argv[2]))
        print(json.dumps({"name": family_name, "errors": errors}), flush=True)
