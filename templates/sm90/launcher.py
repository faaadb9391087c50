"""Launches of one compiled Gluon kernel again and again, without what triton does of every call to find it.

A call through ``kernel[grid](...)`` binds and specialises all arguments, and making a ``TensorDescriptor`` checks its fields
and derives the shared memory layout; together that is most of a launch's host time. A :class:`Launcher` goes through the
jit once and hands later arguments to the compiled kernel, a :class:`DescriptorForm` checks once for equal shapes and strides.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)


@lru_cache(maxsize=64)
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    """The shared memory layout of a tile."""
    from triton.experimental.gluon import language as gl

    element = {
        torch.bfloat16: gl.bfloat16,
        torch.float16: gl.float16,
        torch.float32: gl.float32,
        torch.float8_e4m3fn: gl.float8e4nv,
        torch.int8: gl.int8,
    }[dtype]
    return gl.NVMMASharedLayout.get_default_for(list(block), element)


def overlaps(t: Tensor) -> bool:
    """Whether elements of ``t`` share memory, as after ``expand``: descriptors are made for tensors that do not."""
    return any(s == 0 and n > 1 for n, s in zip(t.shape, t.stride(), strict=True))


class DescriptorForm:
    """TMA descriptors of [1, ..., *tile] tiles, for tensors of one shape, strides and dtype: bf16, fp16, float32, e4m3, int8.

    Raises AssertionError where TMA cannot read such a tensor: strides that are no multiples of 16 bytes.
    """

    def __init__(self, like: Tensor, *tile: int) -> None:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        block = (*[1] * (like.dim() - len(tile)), *tile)
        # A dimension of one element may have any stride; TMA wants multiples of 16 bytes.
        free = max(8, 16 // like.element_size())
        strides = [s if n > 1 else free for n, s in zip(like.shape[:-1], like.stride()[:-1], strict=True)]
        self._type = TensorDescriptor
        made = TensorDescriptor(like, list(like.shape), [*strides, 1], list(block), _layout(block, like.dtype))
        self._fields = {**vars(made), "base": None}

    def of(self, t: Tensor) -> Any:
        """The descriptor of ``t``, which has the form's shape and strides and is 16-byte aligned."""
        # Its constructor would check the same fields again.
        made = object.__new__(self._type)
        made.__dict__.update(self._fields)
        made.base = t
        return made


class Launcher:
    """``function`` on ``grid``, with the given compile-time arguments, which are the last in its signature.

    Every call must have run-time arguments of the same types and alignment; integers must be ``do_not_specialize``.
    """

    def __init__(self, function: Any, grid: tuple[int, int, int], constants: Mapping[str, Any], num_warps: int = 4) -> None:
        self._function, self._grid = function, grid
        self._constants, self._num_warps = dict(constants), num_warps
        self._last = tuple(constants[name] for name in function.arg_names[-len(constants) :])
        self._compiled: Any = None
        self._direct = True

    def __call__(self, device: int, *args: Any) -> None:
        """Launch on the current stream of ``device``, which must be the current device."""
        compiled = self._compiled
        if compiled is not None:
            try:
                return _launch(compiled, self._grid, device, (*args, *self._last))
            except TypeError as e:  # the arguments did not match, so nothing was launched
                log.info("%s goes through the jit, a compiled kernel is launched in another way: %s", self._function, e)
                self._compiled, self._direct = None, False
        made = self._function[self._grid](*args, **self._constants, num_warps=self._num_warps)
        if self._direct and all(hasattr(made, name) for name in ("run", "function", "packed_metadata")):
            self._compiled = made
        return None


def _launch(compiled: Any, grid: tuple[int, int, int], device: int, args: tuple[Any, ...]) -> None:
    """What triton's ``JITFunction.run`` ends with (3.6 to 3.9); a profiler's launch hooks are called as there."""
    from triton import knobs
    from triton.runtime import driver

    runtime = knobs.runtime
    if _has_calls(runtime.launch_enter_hook) or _has_calls(runtime.launch_exit_hook):
        compiled[grid](*args)
        return
    stream = driver.active.get_current_stream(device)
    compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *args)


def _has_calls(hook: Any) -> bool:
    return bool(getattr(hook, "calls", hook))
