"""Fused attention in packages of AOTInductor: `aoti_compile_and_package`.

A package runs without Python, so it can hold generated Triton kernels and ATen ops, but no op whose kernel is Python. What can
only run as such an op stays as the model has it, with the reason in the report. Whatever goes wrong with the fused graph, the
package is compiled again without our pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fa_inductor import cache_key, report
from fa_inductor.config import Options
from fa_inductor.errors import StrictModeError
from fa_inductor.graph_pass import AttentionPass, PassResult
from fa_inductor.report import SiteReport
from fa_inductor.selection import choose_for_export

__all__ = ["aoti_compile_and_package"]

log = logging.getLogger("fa_inductor")


def aoti_compile_and_package(
    exported_program: Any,
    *,
    package_path: Any = None,
    inductor_configs: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> str:
    """``torch._inductor.aoti_compile_and_package`` with the attention fused; gives the path of the package.

    Args:
        exported_program: what ``torch.export.export`` returned.
        package_path: where to write the ``.pt2``, as for torch's function.
        inductor_configs: Inductor's options.
        options: ours, as in ``torch.compile(..., options=...)``; Inductor's may stand beside them.

    The package needs neither Python nor fa_inductor where it runs. Should the fused graph not compile, the package is
    compiled without the rewrite, and its sites are reported as declined with the error.

    Raises:
        OptionError: an option nobody knows or of a wrong type.
        StrictModeError: ``strict`` is set and an attention stays unfused.
    """
    ours, more = Options.from_user(options)
    ours.apply_log_level()
    configs = {**(inductor_configs or {}), **more}
    if not ours.enabled:
        return _package(exported_program, package_path, configs)
    if ours.verify:
        log.warning("options={'verify': True} has no effect on a package: there is no unfused path to compare with")
    fusing = _ExportPass(ours, configs.pop("pre_grad_custom_pass", None))
    patched = {
        **configs,
        "pre_grad_custom_pass": fusing,
        "joint_custom_pre_pass": cache_key.with_key(ours, configs.get("joint_custom_pre_pass")),
    }
    try:
        with _packaged_kernels_only():
            path = _package(exported_program, package_path, patched)
        result = fusing.result
    except Exception as e:
        if not fusing.result.fused or isinstance(e, StrictModeError):
            raise
        log.warning("the package with the fused attention does not compile; it is compiled without", exc_info=True)
        reason = f"the package with the fused attention does not compile: {_first_line(e)}"
        result = replace(fusing.result, fused=0, sites=[_unfused(s, reason) for s in fusing.result.sites])
        _check_strict(ours, result)
        if fusing.user_pass is not None:
            configs["pre_grad_custom_pass"] = fusing.user_pass
        path = _package(exported_program, package_path, configs)
    report.record_graph(result.sites, result.seconds)
    return path


def _package(exported_program: Any, path: Any, configs: dict[str, Any]) -> str:
    from torch._inductor import aoti_compile_and_package as torchs

    original = getattr(torchs, "_fa_inductor_original", torchs)
    return str(original(exported_program, package_path=path, inductor_configs=dict(configs)))


def _packaged_kernels_only() -> Any:
    from fa_inductor import lowering, lowerings

    lowerings.register()
    return lowering.no_python_kernels()


def _first_line(e: Exception) -> str:
    lines = [line.strip() for line in f"{type(e).__name__}: {e}".splitlines() if line.strip()]
    return lines[0][:300]


def _unfused(site: SiteReport, reason: str) -> SiteReport:
    return replace(site, status="declined", reason=reason, template="") if site.status == "fused" else site


def _check_strict(options: Options, result: PassResult) -> None:
    unfused = [s for s in result.sites if s.status != "fused" and not s.fused_already]
    if options.strict and unfused:
        raise StrictModeError(unfused)
    other = [s for s in result.sites if options.fp8 not in ("off", s.fp8)]
    if options.strict and other:
        raise StrictModeError(other, "out of FP8")


class _ExportPass(CustomGraphPass):
    """Our pass over the graph of an exported program, among Inductor's pre-grad passes; then the user's, if any."""

    def __init__(self, options: Options, user_pass: Any = None) -> None:
        from torch._inductor import config

        self.options = options
        self.user_pass = user_pass if user_pass is not None else config.pre_grad_custom_pass
        self.result = PassResult()

    def __deepcopy__(self, memo: Any) -> _ExportPass:
        return self  # compile_fx_aot copies the options, and the result must come back

    def __call__(self, graph: fx.Graph) -> None:
        from torch._inductor import config

        if not getattr(config, "enable_autograd_for_aot", False):
            gm = graph.owning_module
            # A package has no backward: nothing in it asks for gradients, parameters included.
            with _example_values(gm), torch.no_grad():
                self.result = AttentionPass(self.options, choose_for_export)(gm)
            _check_strict(self.options, self.result)
        for own in _as_list(self.user_pass):
            own(graph)

    def uuid(self) -> Any:
        theirs = [getattr(p, "uuid", lambda: None)() for p in _as_list(self.user_pass)]
        if any(u is None for u in theirs):
            return None
        return ("fa_inductor export", cache_key.source_digest(), self.options.key(), *theirs)


def _as_list(passes: Any) -> list[Callable[[fx.Graph], Any]]:
    if passes is None:
        return []
    return list(passes) if isinstance(passes, (list, tuple)) else [passes]


@contextmanager
def _example_values(gm: fx.GraphModule) -> Iterator[None]:
    """Values of nodes under the name that Dynamo's graphs have for them, and under export's afterwards."""
    graphs = [m for m in gm.modules() if isinstance(m, fx.GraphModule)]
    mode = _fake_mode(graphs)
    for module in graphs:
        for n in module.graph.nodes:
            if n.op == "get_attr" and "val" not in n.meta and mode is not None:
                value = _attribute(module, str(n.target))
                if isinstance(value, torch.Tensor):
                    n.meta["val"] = mode.from_tensor(value, static_shapes=True)
            if "val" in n.meta:
                n.meta.setdefault("example_value", n.meta["val"])
    try:
        yield
    finally:
        for module in graphs:
            for n in module.graph.nodes:
                if "example_value" in n.meta:
                    n.meta["val"] = n.meta.pop("example_value")


def _fake_mode(graphs: list[fx.GraphModule]) -> FakeTensorMode | None:
    values = (n.meta.get("val") for module in graphs for n in module.graph.nodes)
    return next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None)


def _attribute(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part, None)
    return module
