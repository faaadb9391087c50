"""Run the forward over pages and 8-bit elements in Triton's interpreter, and print errors as JSON, one line a case.

A program of its own because TRITON_INTERPRET must be set before triton is first imported.
"""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import dataclass

os.environ["TRITON_INTERPRET"] = "1"
warnings.filterwarnings("ignore", category=RuntimeWarning)

import torch  # noqa: E402

from fa_inductor import caches, reference  # noqa: E402
from fa_inductor.spec import AttentionSpec, CacheForm  # noqa: E402
from fa_inductor.templates import direct  # noqa: E402
from fa_inductor.templates.configs import TileConfig  # noqa: E402
from tests.templates import families  # noqa: E402

LENGTHS = "attention(score=where(kv_idx < i0[b], score * 0.2, -inf))"
POOL = 11


@dataclass(frozen=True)
class Case:
    """``shape``: queries, keys, head dims of k and v."""

    form: CacheForm
    shape: tuple[int, int, int, int]
    kind: torch.dtype = torch.int8
    splits: int = 1

    @property
    def name(self) -> str:
        return f"{self.form.text} {self.shape} {self.splits}"


SPLIT = (1, 3)
CASES = [
    Case(form, shape, kind, splits)
    for splits in SPLIT
    for form, shape, kind in (
        (CacheForm(4), (3, 45, 24, 40), torch.int8),  # tiles of several pages
        (CacheForm(32), (3, 64, 32, 32), torch.int8),  # a page of several tiles
        (CacheForm(16, False), (3, 50, 32, 32), torch.int8),
        (CacheForm(1, False), (1, 50, 32, 32), torch.int8),
        (CacheForm(5, True, "float16"), (3, 50, 32, 32), torch.int8),
        (CacheForm(0, True, "float32", "float16", True, True), (40, 50, 32, 32), torch.int8),
        (CacheForm(16, True, "", "float16", False, True), (3, 64, 32, 32), torch.float8_e5m2),
    )
]


def run(case: Case) -> float:
    g = torch.Generator().manual_seed(0)
    form, (rows, keys, qk_dim, v_dim) = case.form, case.shape

    def stored(dim: int, small: bool) -> torch.Tensor:
        size = (POOL, form.page, 2, dim) if form.page else (2, keys, 2, dim)
        x = torch.randn(size, generator=g).transpose(1, 2)
        return (x * 30 if case.kind == torch.int8 else x).to(case.kind) if small else x

    q, k, v = torch.randn(2, 4, rows, qk_dim, generator=g), stored(qk_dim, bool(form.k)), stored(v_dim, bool(form.v))
    table = torch.randint(-POOL if form.wraps else 0, POOL, (2, -(-keys // (form.page or 1))), generator=g)
    table = table if form.page else None
    scales = [torch.rand(2, 2, keys, generator=g) * 0.05 if given else None for given in (form.k_scaled, form.v_scaled)]
    lengths, spec = torch.tensor([keys, keys // 2]), AttentionSpec.parse(LENGTHS)
    config = TileConfig(32, 16, 4, 1, splits=case.splits)
    out, lse = direct.cached_forward(q, k, v, table, scales, [lengths], [], keys, spec, form, config)
    k, v = caches.materialised(q, k, v, table, scales, keys, form)
    true_out, true_lse = reference.attention(q, k, v, [lengths], [], spec)
    return max(families.error(out, true_out), families.error(lse, true_lse))


if __name__ == "__main__":
    for each in CASES:
        print(json.dumps({"name": each.name, "error": run(each)}), flush=True)
