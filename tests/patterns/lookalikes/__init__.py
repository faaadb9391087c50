"""What resembles attention and is none, or cannot be replaced where it stands, with the reason in the report."""

from tests.patterns.lookalikes import computation, placement, weights  # noqa: F401  (they fill the table)
from tests.patterns.lookalikes.base import LOOKALIKES, Lookalike

__all__ = ["LOOKALIKES", "Lookalike"]
