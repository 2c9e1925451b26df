"""The environment of a process that uses some of a machine's GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

VARIABLE = "CUDA_VISIBLE_DEVICES"


def with_gpus(environ: Mapping[str, str], gpus: Sequence[int]) -> dict[str, str]:
    """The environment in which only these GPUs are visible: numbers among those visible now. One
    that is not visible now does not become so."""
    visible = environ.get(VARIABLE)
    if visible is None:
        return {**environ, VARIABLE: ",".join(map(str, gpus))}
    names = [name.strip() for name in visible.split(",")]
    return {**environ, VARIABLE: ",".join(names[gpu] for gpu in gpus if gpu < len(names))}
