"""Random attention graphs: no wrong value, no crash, and most of what must fuse fuses.

``FA_INDUCTOR_FUZZ_EXAMPLES`` sets how many examples all shards run together, ``FA_INDUCTOR_FUZZ_SEED`` where they start.
"""

from __future__ import annotations

import os
from collections import Counter

import hypothesis
import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st

from tests.fuzz.generate import Example, generate
from tests.fuzz.running import run, valid

SHARDS = 16
EXAMPLES = int(os.environ.get("FA_INDUCTOR_FUZZ_EXAMPLES", "2000"))
SEED = int(os.environ.get("FA_INDUCTOR_FUZZ_SEED", "0"))
#: Share of the examples without a near miss in them that must have fused, so that the fuzzer cannot degenerate unseen.
HEALTHY = 0.85


class _Draws:
    def __init__(self, draw):  # type: ignore[no-untyped-def]
        self.pick = lambda options: draw(st.sampled_from(options))


@st.composite
def examples(draw: st.DrawFn) -> Example:
    return generate(_Draws(draw))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_attention(shard: int) -> None:
    counts: Counter[str] = Counter()

    @hypothesis.seed(SEED * SHARDS + shard)
    @hypothesis.settings(
        max_examples=max(1, EXAMPLES // SHARDS),
        deadline=None,
        database=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(examples())
    def body(example: Example) -> None:
        hypothesis.assume(valid(example))
        hypothesis.note(example.repro(0))
        fused = run(example, dynamo=example.full or example.dynamic)
        counts["must" if example.must_match else "may"] += 1
        counts["must fused" if example.must_match else "may fused"] += bool(fused)

    body()
    assert counts["must fused"] >= HEALTHY * counts["must"] - 2, dict(counts)  # a short run may meet two of the rest
    assert counts["must"] > 0, dict(counts)
