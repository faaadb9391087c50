"""Which kernel runs a proven site: asked before the rewrite, so that a site nothing can run stays as the user wrote it."""

from __future__ import annotations

from dataclasses import dataclass

from fa_inductor.config import Options
from fa_inductor.patterns import AttentionMatch
from fa_inductor.patterns.terms import value_of


@dataclass(frozen=True)
class Choice:
    """``kernel`` is the op's kernel argument, or None with the reason; ``template`` is its name in the report."""

    kernel: str | None
    template: str = ""
    reason: str = ""


def choose_kernel(match: AttentionMatch, options: Options) -> Choice:
    """The kernel for one match, or why there is none."""
    if match.dropout_p and not options.dropout:
        return Choice(None, reason="dropout is active and options={'dropout': False} forbids fusing it")
    if options.kernel == "reference":
        return Choice("reference", "reference")
    device = value_of(match.q.node).device.type  # type: ignore[attr-defined]
    if device == "cpu":
        return _cpu(match, options)
    return Choice(None, reason=f"no kernel for device {device} in this version")


def _cpu(match: AttentionMatch, options: Options) -> Choice:
    return Choice(None, reason="no kernel for CPU in this version")
