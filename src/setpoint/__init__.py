"""Setpoint: an LLM inference server that says what limits it, explains its settings, and replays
what it did.

The names are loaded on first use, so that importing the package costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from setpoint.core.sampling import SamplingParams
    from setpoint.core.version import __version__
    from setpoint.offline.offline_engine import Engine

__all__ = ["Engine", "SamplingParams", "__version__"]

_HOMES = {
    "Engine": "setpoint.offline.offline_engine",
    "SamplingParams": "setpoint.core.sampling",
    "__version__": "setpoint.core.version",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'setpoint' has no attribute {name!r}")
    if name == "Engine":
        from setpoint.config.extras import check_extra

        check_extra("setpoint.Engine", "serve")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
