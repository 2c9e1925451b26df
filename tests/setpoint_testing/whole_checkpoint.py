"""Writes the folder of a converted GGUF file as a whole checkpoint, with every weight in bfloat16,
for programs that read such checkpoints only."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path

from safetensors.torch import save_file

from setpoint.core.weightfiles import SINGLE_NAME
from setpoint.engine.models.weight_sources import CheckpointFiles


def write_whole(folder: Path, target: Path) -> Path:
    """Write the model in ``folder`` into ``target``, which it returns."""
    target.mkdir(parents=True, exist_ok=True)
    for path in (*folder.glob("*.json"), *folder.glob("*.jinja")):
        shutil.copy(path, target)
    with ExitStack() as stack:
        tensors = CheckpointFiles(folder, stack).read_all()
        save_file(tensors, target / SINGLE_NAME, {"format": "pt"})
    return target
