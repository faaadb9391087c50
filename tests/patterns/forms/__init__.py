"""Attention as people spell it: one function a form, with inputs drawn in float64.

Shared by the tests of values and of rewritten graphs. ``FORMS`` has them all by name.
"""

from tests.patterns.forms import composites, layouts, masks, score, softmax  # noqa: F401  (they fill the table)
from tests.patterns.forms.base import BATCH, DIM, FORMS, HEADS, INF, KEYS, ROWS, Draw, Form, scores

__all__ = ["BATCH", "DIM", "FORMS", "HEADS", "INF", "KEYS", "ROWS", "Draw", "Form", "scores"]
