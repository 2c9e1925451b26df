"""The environment of a process that uses one of several GPUs."""

from __future__ import annotations

from collections.abc import Mapping


def with_one_gpu(environ: Mapping[str, str], gpu: int) -> dict[str, str]:
    """The environment in which only this GPU is visible: an index among those visible now."""
    visible = [name for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return {**environ, "CUDA_VISIBLE_DEVICES": visible[gpu] if gpu < len(visible) else str(gpu)}
