"""Converts a GGUF file into a cache of the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from setpoint.checkpoint.gguf.convert import converted_folder


def converted_under(cache: Path, path: Path) -> Path:
    """The checkpoint of a GGUF file. Only the conversion sees this cache: without the usual one the
    kernels would be compiled again, for a minute of a core."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        return converted_folder(path, log=lambda line: None)
