"""Recognition of attention in the ATen view: a softmax anchor becomes an :class:`AttentionMatch` or a Rejection with its reason."""

from fa_inductor.patterns.match import recognise
from fa_inductor.patterns.site import AttentionMatch

__all__ = ["AttentionMatch", "recognise"]
