"""Empties the folder in which the package is built. pip builds in the clone and leaves
``build/lib`` there, and the next build would package modules that were deleted since.
Everything else is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup

shutil.rmtree(Path(__file__).parent / "build" / "lib", ignore_errors=True)
setup()
