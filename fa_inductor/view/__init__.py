"""The functional ATen view: what a Dynamo graph computes, for analysis only, never run.

:func:`build` makes it; :class:`AtenView` answers which Dynamo node holds which ATen value.
"""

from fa_inductor.view.aten_view import AtenView, DynamoValue, Path, ViewError
from fa_inductor.view.builder import build
from fa_inductor.view.leaves import DETACH, OPAQUE, SDPA

__all__ = ["DETACH", "OPAQUE", "SDPA", "AtenView", "DynamoValue", "Path", "ViewError", "build"]
