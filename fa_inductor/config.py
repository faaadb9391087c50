"""Every option, its default and its environment variable.

An option comes from, strongest first: ``FA_INDUCTOR=0`` (switches everything off), ``options={...}`` of torch.compile
or `fa_inductor.enable`, the variable ``FA_INDUCTOR_<NAME>``, the default below.
"""

from __future__ import annotations

import difflib
import logging
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from . import _compat
from .errors import OptionError

__all__ = ["ENV_PREFIX", "ENV_SWITCH", "Options"]

ENV_SWITCH = "FA_INDUCTOR"
ENV_PREFIX = "FA_INDUCTOR_"

KERNELS = ("auto", "general", "reference", "aten")
FP8_FORMATS = ("off", "e4m3", "e4m3-rotated", "int8-e4m3")
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


def _bool(where: str, value: object) -> bool:
    if isinstance(value, str) and value.lower() in _TRUE | _FALSE and where.startswith(ENV_PREFIX):
        return value.lower() in _TRUE
    if not isinstance(value, bool):
        raise OptionError.invalid(where, value, "True or False (in the environment 1 or 0)")
    return value


def _length(where: str, value: object) -> int | None:
    if isinstance(value, str) and value.isdecimal() and where.startswith(ENV_PREFIX):
        value = int(value)
    # bool is an int in Python, but True is no sequence length.
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise OptionError.invalid(where, value, "None or an integer >= 0 (tokens)")
    return value


def _choice(choices: tuple[str, ...], optional: bool) -> Callable[[str, object], str | None]:
    def check(where: str, value: object) -> str | None:
        if value is None and optional:
            return None
        if not isinstance(value, str) or value not in choices:
            expected = " or ".join([*(["None"] if optional else []), *(repr(c) for c in choices)])
            close = difflib.get_close_matches(value, choices, n=1, cutoff=0.6) if isinstance(value, str) else []
            raise OptionError.invalid(where, value, expected + (f" (did you mean {close[0]!r}?)" if close else ""))
        return value

    return check


def _option(default: Any, check: Callable[[str, object], Any], doc: str, in_key: bool = True) -> Any:
    return field(default=default, metadata={"check": check, "doc": doc, "in_key": in_key})


@dataclass(frozen=True)
class Options:
    """The options of one compile. Frozen; the constructor checks every value and raises `OptionError`.

    `Options()` is the defaults alone; `Options.from_user` adds the environment and what the user passed.
    """

    enabled: bool = _option(True, _bool, "rewrite attention at all; False compiles with plain Inductor")
    strict: bool = _option(False, _bool, "raise StrictModeError where an attention stays unfused")
    verify: bool = _option(False, _bool, "run fused and unfused path on first use, raise VerificationError on a mismatch")
    dropout: bool = _option(True, _bool, "allow fusing attention with active dropout (other random numbers than eager)")
    min_seqlen: int | None = _option(
        None, _length, "on CPU, decline sites with fewer keys than this many tokens; None uses the measured threshold"
    )
    kernel: str = _option(
        "auto",
        _choice(KERNELS, optional=False),
        "'auto' lets the device decide, 'general' leaves out kernels that are hand-scheduled for one GPU architecture, 'aten' "
        "allows ATen's kernels only, 'reference' is the testing mode: every "
        "recognised site is rewritten whatever the device and runs the dense reference kernel",
    )
    fp8: str = _option(
        "off",
        _choice(FP8_FORMATS, optional=False),
        "'e4m3' computes attention in FP8 where no gradient is wanted and the GPU multiplies it, 'e4m3-rotated' does so after a "
        "Hadamard rotation of q and k, which spreads outliers, 'int8-e4m3' besides multiplies q and k as 8-bit integers, which are "
        "finer; where a site does not, the report says why and strict raises",
    )
    fp8_projection: bool = _option(
        False,
        _bool,
        "with fp8, compute q, k and v where they are plain linear layers of the same hidden states by a kernel that casts them at "
        "once; on an H200 3 to 4 % faster than the library's product and a cast at head dim 128 with a rotation, 4 to 8 % slower "
        "without",
    )
    log_level: str | None = _option(
        None,
        _choice(LOG_LEVELS, optional=True),
        "level of the logger 'fa_inductor'; None leaves it alone",
        in_key=False,
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            f.metadata["check"](f.name, getattr(self, f.name))

    @classmethod
    def from_user(cls, options: Mapping[str, Any] | None = None) -> tuple[Options, dict[str, Any]]:
        """Split what the user passed to torch.compile into (our options, Inductor's options).

        A name of ours is taken; a name that ``torch._inductor.config`` knows, dashes read as underscores as
        torch.compile does, is passed on after the same type check. Anything else raises `OptionError` with the
        nearest names.
        """
        if options is not None and not isinstance(options, Mapping):
            raise OptionError.invalid("options", options, "a mapping of option names to values")
        ours, inductor = _from_env(cls), {}
        known = {f.name for f in fields(cls)}
        for name, value in (options or {}).items():
            if not isinstance(name, str):
                raise OptionError.invalid("an option's name", name, "a string")
            if name.replace("-", "_") in known:
                ours[name.replace("-", "_")] = value
            else:
                inductor[_inductor_name(name, known)] = value
        for name, value in inductor.items():
            expected = _compat.inductor_option_type(name)
            if expected is not None and not isinstance(value, expected):
                raise OptionError.invalid(f"Inductor option {name}", value, expected.__name__)
        switch = os.environ.get(ENV_SWITCH, "").strip().lower()
        if switch in _FALSE:
            ours["enabled"] = False
        elif switch and switch not in _TRUE:
            close = difflib.get_close_matches(switch, sorted(_FALSE), n=1, cutoff=0.5)
            hint = f" Did you mean {ENV_SWITCH}={close[0]}?" if close else ""
            warnings.warn(f"{ENV_SWITCH}={switch} switches nothing off; 0 does.{hint}", stacklevel=2)
        return cls(**ours), inductor

    def key(self) -> str:
        """Stable text of everything that can change a compiled graph, for cache keys. Equal options give equal text."""
        return ";".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.metadata["in_key"])

    def apply_log_level(self) -> None:
        """Set the level of the logger ``fa_inductor`` if `log_level` asks for one, with a handler if there is none."""
        if self.log_level is None:
            return
        logger = logging.getLogger("fa_inductor")
        logger.setLevel(self.log_level)
        if not logger.hasHandlers():  # logging's handler of last resort drops everything below WARNING
            logger.addHandler(logging.StreamHandler())

    @classmethod
    def describe(cls) -> list[tuple[str, Any, str, str]]:
        """(name, default, environment variable, meaning) of every option."""
        return [(f.name, f.default, ENV_PREFIX + f.name.upper(), f.metadata["doc"]) for f in fields(cls)]


def _inductor_name(name: str, ours: set[str]) -> str:
    normal = name.replace("-", "_")
    known = _compat.inductor_config().get_config_copy()
    if normal in known:
        return normal
    close = difflib.get_close_matches(normal, sorted(ours), n=2, cutoff=0.6) or difflib.get_close_matches(
        normal, sorted(known), n=2, cutoff=0.75
    )
    raise OptionError.unknown(name, close, [f.name for f in fields(Options)])


def _from_env(cls: type[Options]) -> dict[str, Any]:
    """Options set by FA_INDUCTOR_<NAME>. An unknown variable of that prefix warns: it may belong to a later version."""
    found: dict[str, Any] = {}
    known = {ENV_PREFIX + f.name.upper(): f for f in fields(cls)}
    for variable in sorted(v for v in os.environ if v.startswith(ENV_PREFIX)):
        option = known.get(variable)
        if option is None:
            close = difflib.get_close_matches(variable, sorted(known), n=1, cutoff=0.6)
            hint = f" Did you mean {close[0]}?" if close else ""
            warnings.warn(f"environment variable {variable} is not one of fa_inductor's.{hint}", stacklevel=4)
            continue
        text = os.environ[variable].strip()
        if text == "" or (text.lower() == "none" and option.default is None):
            continue
        found[option.name] = option.metadata["check"](variable, text)
    return found
