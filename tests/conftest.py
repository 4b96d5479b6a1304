from __future__ import annotations

import importlib.util
import sys

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if any(item.get_closest_marker("gpu") or item.get_closest_marker("te") for item in items):
        import torch

        if not torch.cuda.is_available():
            _skip(items, "gpu", "no CUDA device")
        if importlib.util.find_spec("transformer_engine") is None:
            _skip(items, "te", "TransformerEngine is not installed")


def _skip(items: list[pytest.Item], marker: str, reason: str) -> None:
    for item in items:
        if item.get_closest_marker(marker):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_sessionfinish() -> None:
    if "tests.spawn" in sys.modules:
        sys.modules["tests.spawn"].stop()
