"""Tests of the data plane on an NVIDIA GPU: those of ``tests/golden``, with another device, and a
server. Skipped where there is none.

The modules here import test functions and fixtures; what is tested stands in one place.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "golden"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests here; of what the modules import, leave out tests that do not ask for a
    device."""
    here = [item for item in items if HERE in item.path.parents]
    for item in here:
        item.add_marker(pytest.mark.gpu)
    others = [item for item in here if "device" not in getattr(item, "fixturenames", ())]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]


@pytest.fixture(scope="session")
def device() -> str:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU: this torch sees no CUDA device")
    return "cuda"
