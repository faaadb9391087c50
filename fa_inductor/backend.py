"""The torch.compile backend: our pass, then Inductor."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from fa_inductor import cache_key, report
from fa_inductor.config import Options
from fa_inductor.errors import OptionError, StrictModeError
from fa_inductor.graph_pass import AttentionPass, PassResult

log = logging.getLogger("fa_inductor")


def fa_inductor(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable:
    """``torch.compile(model, backend="fa_inductor", mode=..., options=...)``.

    Args:
        gm: Dynamo's graph; its attention is rewritten in place.
        example_inputs: Dynamo's example inputs.
        mode: as for the Inductor backend ("default", "reduce-overhead", "max-autotune", ...).
        options: ours (:class:`fa_inductor.Options`) and Inductor's, told apart by name.

    Raises:
        OptionError: an option nobody knows or of a wrong type.
        StrictModeError: ``strict`` is set and an attention stays unfused.
    """
    ours, inductor = Options.from_user(options)
    ours.apply_log_level()
    compiled, _ = compile_with(gm, example_inputs, ours, {**_mode_patches(mode), **inductor})
    return compiled


def _mode_patches(mode: str | None) -> dict[str, Any]:
    if mode is None or mode == "default":
        return {}
    from torch._inductor import list_mode_options

    known = list_mode_options()
    if mode not in known:
        raise OptionError.invalid("mode", mode, f"one of {', '.join(sorted({'default', *known}))}")
    return dict(known[mode])


def compile_with(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    options: Options,
    inductor_options: dict[str, Any],
    inner_compile: Callable | None = None,
) -> tuple[Callable, PassResult]:
    """The pass and Inductor under ``options``: (compiled callable, what the pass did)."""
    from torch._inductor.compile_fx import compile_fx

    original = verify_copy(gm) if options.verify and options.enabled else None
    result = AttentionPass(options)(gm)
    if options.enabled:
        report.record_graph(result.sites, result.seconds)
    if result.fused:
        from fa_inductor import lowerings

        lowerings.register()
    unfused = [s for s in result.sites if s.status != "fused" and not s.fused_already]
    if options.strict and unfused:
        raise StrictModeError(unfused)
    if options.strict and options.enabled:
        other = [s for s in result.sites if options.fp8 not in ("off", s.fp8)]
        if other:
            raise StrictModeError(other, "out of FP8")
    patches = dict(inductor_options)
    if options.enabled:
        patches["joint_custom_pre_pass"] = cache_key.with_key(options, patches.get("joint_custom_pre_pass"))
    more = {} if inner_compile is None else {"inner_compile": inner_compile}
    compiled = compile_fx(gm, example_inputs, config_patches=patches, **more)
    if original is not None and result.fused:
        from fa_inductor.verify import checked

        compiled = checked(original, compiled, result)
    return compiled, result


def verify_copy(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph as the user's code gave it, for the unfused path of ``verify``."""
    return fx.GraphModule(gm, _copy_graph(gm.graph), class_name="Unfused")


def _copy_graph(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph(tracer_cls=graph._tracer_cls)
    table: dict[fx.Node, fx.Node] = {}
    out = copy.graph_copy(graph, table)
    copy.output(out)
    return copy


__all__ = ["compile_with", "fa_inductor"]
