"""Shared by all tests: one Inductor cache directory for the run, a fresh Dynamo for each test, no user settings."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest

_CACHE = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    # Workers inherit the environment of the controller, so all share one directory that no earlier run has filled.
    if not hasattr(config, "workerinput"):
        config.stash[_CACHE] = os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="fa_inductor_tests_")
    ours = [v for v in os.environ if v == "FA_INDUCTOR" or v.startswith("FA_INDUCTOR_")]
    for variable in [v for v in ours if not v.startswith("FA_INDUCTOR_FUZZ_")]:
        del os.environ[variable]
    # Each worker is one process for one core: no thread pools beside it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_unconfigure(config: pytest.Config) -> None:
    if _CACHE in config.stash:
        shutil.rmtree(config.stash[_CACHE], ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Known random numbers before each test; Dynamo forgets after it: no test meets another's recompile limits."""
    import torch

    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
