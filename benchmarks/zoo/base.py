"""The registry, and the few inputs and wrappers that the family files share."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

BATCH, LENGTH, WIDTH, HEADS, VOCAB = 2, 24, 64, 4, 96

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
KINDS = ("pos", "sdpa", "neg", "any")


class Unavailable(RuntimeError):
    """A model needs a library, or a version of one, that is not installed."""


@dataclass(frozen=True)
class ZooModel:
    """One entry.

    ``sites`` is the number of attentions in one forward where the author of the entry counted them. ``kind`` is ``pos``
    (softmax attention spelled out), ``sdpa`` (calls ``scaled_dot_product_attention``), ``neg`` (looks like attention,
    must stay as it is) or ``any`` (may stay or be fused, values decide). ``random`` marks models with live dropout,
    whose values cannot be compared call by call. ``grad_inputs`` are the positions of floating-point arguments that
    take part in the gradient check.
    """

    name: str
    family: str
    make: Callable[[], Built] = field(repr=False)
    sites: int | None = None
    kind: str = "pos"
    needs: tuple[str, ...] = ()
    random: bool = False
    dynamic: bool = False
    grad_inputs: tuple[int, ...] = ()
    note: str = ""

    def build(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> Built:
        """The module with weights, and its inputs, drawn under ``seed`` in float32 and then cast to ``dtype``."""
        for requirement in self.needs:
            require(requirement)
        torch.manual_seed(seed)
        module, args, kwargs = self.make()
        if not self.random:
            silence_dropout(module)
        return cast(module, dtype), cast(args, dtype), cast(kwargs, dtype)


REGISTRY: dict[str, ZooModel] = {}


def register(name: str, family: str, make: Callable[[], Built], **fields: Any) -> None:
    """Add one model; a second use of a name is a mistake of the registry's author."""
    model = ZooModel(name, family, make, **fields)
    if name in REGISTRY:
        raise ValueError(f"zoo model {name!r} is registered twice")
    if model.kind not in KINDS:
        raise ValueError(f"zoo model {name!r}: kind {model.kind!r} is none of {KINDS}")
    REGISTRY[name] = model


def get(name: str) -> ZooModel:
    return REGISTRY[name]


def names(families: Sequence[str] | None = None) -> list[str]:
    """Registered names in registration order, of all families or of those given."""
    return [name for name, model in REGISTRY.items() if families is None or model.family in families]


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors and parameters in ``value`` as ``dtype``; everything else unchanged."""
    if isinstance(value, nn.Module):
        return value.to(dtype)
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(cast(item, dtype) for item in value)
    if isinstance(value, list):
        return [cast(item, dtype) for item in value]
    if isinstance(value, Mapping):
        return {key: cast(item, dtype) for key, item in value.items()}
    return value


def silence_dropout(module: nn.Module) -> None:
    """Set every dropout probability to 0, in ``nn.Dropout`` modules and in plain float attributes alike.

    Libraries keep the probability of the attention weights in a float attribute and pass it to ``F.dropout``; such
    attributes all have "drop" in their name.
    """
    for child in module.modules():
        if isinstance(child, nn.modules.dropout._DropoutNd):
            child.p = 0.0
        for name, value in vars(child).items():
            if "drop" in name and isinstance(value, float):
                setattr(child, name, 0.0)


def require(name: str) -> Any:
    """Import ``name`` or raise :class:`Unavailable` with the reason."""
    if name in ("timm", "open_clip"):
        torchvision_python_half()
    try:
        return importlib.import_module(name)
    except Exception as error:  # a broken optional library must not end the whole run
        raise Unavailable(f"{name}: {type(error).__name__}: {error}") from error


_LIBRARIES: list[torch.library.Library] = []


def torchvision_python_half() -> None:
    """Make torchvision importable where its compiled operators do not load.

    timm and open_clip import torchvision for image transforms, which nothing here calls. Beside a torch build that the
    wheel was not compiled for, its import fails on the first ``register_fake`` of an operator with no schema. Declaring
    those schemas is enough. ``BENCHMARK_TORCHVISION`` (or ``FA_TV``) may name a folder that holds torchvision.
    """
    if _LIBRARIES or "torchvision" in sys.modules:
        return
    folder = os.environ.get("BENCHMARK_TORCHVISION") or os.environ.get("FA_TV")
    if folder and folder not in sys.path:
        sys.path.append(folder)
    library = torch.library.Library("torchvision", "FRAGMENT")
    _LIBRARIES.append(library)
    for _ in range(64):
        try:
            importlib.import_module("torchvision")
            return
        except ImportError as error:
            raise Unavailable(f"torchvision: {error}") from error
        except RuntimeError as error:
            head, found, _ = str(error).partition(" does not exist")
            operator = head.rpartition("torchvision::")[2]
            if not found or not operator.isidentifier():
                raise Unavailable(f"torchvision: {error}") from error
            library.define(f"{operator}(Tensor x) -> Tensor")
            for loaded in [key for key in sys.modules if key.split(".")[0] == "torchvision"]:
                del sys.modules[loaded]
    raise Unavailable("torchvision: its operators could not be declared")


class First(nn.Module):
    """Calls a library module and returns the tensor that a user would take from its output.

    ``pick`` names an attribute of the output; without it the first tensor is taken. ``cache`` adds the key and value
    tensors of a returned cache.
    """

    def __init__(self, module: nn.Module, pick: str | None = None, cache: bool = False) -> None:
        super().__init__()
        self.module, self.pick, self.cache = module, pick, cache

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.module(*args, **kwargs)
        if self.pick is not None:
            return getattr(output, self.pick)
        if isinstance(output, Tensor):
            return output
        if self.cache:
            layers = output.past_key_values.layers
            return (output[0], *(tensor for layer in layers for tensor in (layer.keys, layer.values)))
        return output[0]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def floats(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(*shape, generator=generator(seed))


def tokens(batch: int = BATCH, length: int = LENGTH, seed: int = 1) -> Tensor:
    """Token ids that avoid the low ids, which configurations use for padding and sentinels."""
    return torch.randint(5, VOCAB - 3, (batch, length), generator=generator(seed))


def right_padding(batch: int = BATCH, length: int = LENGTH) -> Tensor:
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[-1, length - 5 :] = 0
    return mask


def left_padding(batch: int = BATCH, length: int = LENGTH) -> Tensor:
    return right_padding(batch, length).flip(1)


def image(size: int = 32, channels: int = 3, batch: int = BATCH) -> Tensor:
    return floats(batch, channels, size, size, seed=2)
