"""Installs the lowering of every op of ours in Inductor."""

from __future__ import annotations

from functools import lru_cache

from fa_inductor import caches, fp8, fp8_lowering, lowering, ops


@lru_cache(maxsize=1)
def register() -> None:
    """Install the lowerings. Idempotent; imports Inductor."""
    from torch._inductor.lowering import register_lowering

    found = {
        ops.flash_attention: lowering.lower_forward,
        ops.flash_attention_backward: lowering.lower_backward,
        caches.cached_attention: lowering.lower_cached,
        fp8.fp8_attention: fp8_lowering.lower,
        fp8.fp8_projected_attention: fp8_lowering.lower_projected,
    }
    for op, lower in found.items():
        register_lowering(op, type_promotion_kind=None)(lower)
