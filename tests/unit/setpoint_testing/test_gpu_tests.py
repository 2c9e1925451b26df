"""The tests that need a GPU are collected without one, and skipped."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, on which they run")
def test_without_a_gpu_they_are_skipped() -> None:
    given = {name: value for name, value in os.environ.items() if name != "REHEARSE_GPU_TESTS"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-vv", "-m", "gpu", "tests/gpu"],
        cwd=REPOSITORY,
        env=given,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    found = re.findall(r"^tests/gpu/(\w+)\.py::.*? ([A-Z]{4,})\b", done.stdout, re.MULTILINE)
    files = {path.stem for path in (REPOSITORY / "tests/gpu").glob("test_*.py")}
    assert {file for file, _ in found} == files
    assert len(files) >= 5
    assert {outcome for _, outcome in found} == {"SKIPPED"}
