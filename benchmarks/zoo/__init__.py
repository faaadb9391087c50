"""A zoo of attention: tiny, randomly initialised instances of real models and of single spellings.

``names()`` lists the registry, ``get(name)`` returns one :class:`~benchmarks.zoo.base.ZooModel`. Nothing is built,
and no optional library is imported, before ``build`` is called.
"""

from __future__ import annotations

from benchmarks.zoo import (  # noqa: F401  (importing a family file registers its models)
    hf_decoders,
    hf_encoders,
    hf_seq2seq,
    hf_vision,
    libraries,
    lookalikes,
    spelled,
    spelled_masks,
    timm_models,
    torch_modules,
)
from benchmarks.zoo.base import REGISTRY, Unavailable, ZooModel, get, names

__all__ = ["REGISTRY", "Unavailable", "ZooModel", "get", "names"]
