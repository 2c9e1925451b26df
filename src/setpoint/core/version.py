"""The version of this package, for every module that writes it into a log, an answer or a file, and
the folder of its sources, for what must know whether two processes run the same code."""

from __future__ import annotations

from pathlib import Path

__version__ = "0.1.0"

PACKAGE = Path(__file__).parents[1]
"""The folder ``setpoint``."""
