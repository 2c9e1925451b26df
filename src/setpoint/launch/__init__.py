"""The composition root: resolves the configuration, builds both planes, starts, supervises and ends the processes."""

from __future__ import annotations

from setpoint.launch.server import serve

__all__ = ["serve"]
