"""One class an error.

Every message states what was seen, what was expected and what to do. Errors raised while a graph is being compiled
reach the caller of the compiled model wrapped by Dynamo (``torch._dynamo.exc.BackendCompilerFailed``), whose text
ends with ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = [
    "FaInductorError",
    "InternalError",
    "MissingDependencyError",
    "OptionError",
    "ProgramError",
    "StrictModeError",
    "UnsupportedOptionError",
    "VerificationError",
]


class FaInductorError(Exception):
    """Base class of every error that fa_inductor raises on purpose."""


class OptionError(FaInductorError, ValueError):
    """An option, an environment variable or an argument has an unknown name, a wrong type or a wrong value."""

    @classmethod
    def unknown(cls, name: str, close: Sequence[str], known: Iterable[str]) -> OptionError:
        """The error for an option name nobody knows, with the names it may have meant."""
        hint = f" Did you mean {' or '.join(repr(c) for c in close)}?" if close else ""
        return cls(
            f"unknown option {name!r}.{hint} fa_inductor's options are {', '.join(known)}; "
            "every key of torch._inductor.list_options() is passed on to Inductor."
        )

    @classmethod
    def invalid(cls, where: str, seen: object, expected: str) -> OptionError:
        """The error for a known option (`where` names it) with a value that it cannot take."""
        return cls(f"{where}: got {seen!r} of type {type(seen).__name__}, expected {expected}.")


class UnsupportedOptionError(OptionError):
    """The option is known, but what it asks for is not available in this version or on this machine."""


class MissingDependencyError(FaInductorError, ImportError):
    """A command needs a package that is not installed."""


class StrictModeError(FaInductorError, RuntimeError):
    """`strict` is on and attention stayed unfused, or out of FP8 where that is asked for. `sites` holds the reports of those
    sites."""

    def __init__(self, sites: Sequence[object], stayed: str = "unfused") -> None:
        self.sites = tuple(sites)
        count = len(self.sites)
        lines = "\n".join(f"  {site}" for site in self.sites)
        super().__init__(
            f"strict mode: {count} attention site{'s' if count != 1 else ''} stayed {stayed}:\n{lines}\n"
            f"Change the model as the reasons say, or switch strict off (also FA_INDUCTOR_STRICT) to run them {stayed}."
        )


class VerificationError(FaInductorError, RuntimeError):
    """`verify` is on and the fused path disagrees with the unfused one.

    Attributes: `site` (what was compared), `max_error` (largest absolute difference), `tolerance` (what was allowed).
    """

    def __init__(self, site: object, max_error: float, tolerance: float) -> None:
        self.site, self.max_error, self.tolerance = site, max_error, tolerance
        super().__init__(
            f"verify: the fused attention differs from the unfused graph by {max_error:.3e}, allowed is "
            f"{tolerance:.3e}, at {site}. Please report this; FA_INDUCTOR=0 runs the model without the rewrite."
        )


class ProgramError(FaInductorError, ValueError):
    """The text of an attention program cannot be parsed or does not fit its operands."""


class InternalError(FaInductorError, RuntimeError):
    """An invariant of fa_inductor itself does not hold. Please report it with the message."""
