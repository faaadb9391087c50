"""``python -m fa_inductor demo | explain | doctor``."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from . import __version__
from .errors import FaInductorError, OptionError

EXPLAIN_HELP = """\
Compile a model with fa_inductor, run it once and print what was fused and what was not, and why.

MODULE:CALLABLE names a function without arguments that returns (model, args) or (model, args, kwargs): a tuple with
the module or function to compile, the tuple of its positional arguments and, if need be, the dict of the others."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fa_inductor", description="Fused attention for torch.compile.")
    parser.add_argument("--version", action="version", version=f"fa_inductor {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="run three models with and without fa_inductor (needs transformers)")
    demo.add_argument("--seqlen", type=int, default=2048, help="tokens a sequence (default: %(default)s)")
    demo.add_argument("--device", default="cpu", help="device to run on (default: %(default)s)")

    explain = commands.add_parser(
        "explain",
        help="report the attention sites of a model",
        description=EXPLAIN_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    explain.add_argument("target", metavar="MODULE:CALLABLE")
    explain.add_argument("--dynamic", action="store_true", help="compile for any size")
    explain.add_argument("--no-grad", action="store_true", help="compile and run under torch.no_grad(), as in inference")
    explain.add_argument("--profile", action="store_true", help="run again under a profiler: the time of each site's kernel")
    explain.add_argument("--json", action="store_true", help="print the report as JSON")

    commands.add_parser("doctor", help="print versions, devices, kernels, options and caches")
    return parser


def load_target(target: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(model, args, kwargs) from a ``module:callable`` text; see `EXPLAIN_HELP`. Raises `OptionError`."""
    module_name, colon, name = target.partition(":")
    if not colon or not module_name or not name:
        raise OptionError.invalid("explain", target, "MODULE:CALLABLE, e.g. my_models:tiny_llama")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A module missing inside the user's own module is the user's error, with its own traceback.
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise
        raise OptionError(f"explain: there is no module {module_name!r} here; run it from the folder it is in.") from None
    if not hasattr(module, name):
        raise OptionError(f"explain: module {module_name!r} has no {name!r}, expected a function without arguments of that name.")
    factory = getattr(module, name)
    if not callable(factory):
        raise OptionError.invalid(f"explain: {target}", factory, "a function without arguments")
    made = factory()
    shape_is_right = isinstance(made, tuple) and len(made) in (2, 3) and callable(made[0]) and isinstance(made[1], tuple)
    if not shape_is_right or (len(made) == 3 and not isinstance(made[2], dict)):
        raise OptionError.invalid(f"what {target}() returns", made, "(model, args) or (model, args, kwargs)")
    return made[0], made[1], made[2] if len(made) == 3 else {}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0, 1 (the command failed) or 2 (it was not understood)."""
    arguments = _parser().parse_args(argv)
    try:
        # Torch's profiler prints a line at each start and stop, unless told so before torch loads.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        if arguments.command == "demo":
            from .demo import demo

            return demo(seqlen=arguments.seqlen, device=arguments.device)
        if arguments.command == "doctor":
            from .doctor import doctor

            print(doctor())
            return 0
        import torch

        from .entry import explain

        model, args, kwargs = load_target(arguments.target)
        dynamic = {"dynamic": True} if arguments.dynamic else {}
        with torch.set_grad_enabled(torch.is_grad_enabled() and not arguments.no_grad):
            report = explain(model, profile=arguments.profile, **dynamic)(*args, **kwargs)
        print(report.to_json() if arguments.json else report)
        return 0
    except FaInductorError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2 if isinstance(error, OptionError) else 1


if __name__ == "__main__":
    sys.exit(main())
