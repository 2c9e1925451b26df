"""Turns the engine's pooled hidden state into the vector that a client gets: cut, and scaled to
length 1. Knows nothing of routes."""

from __future__ import annotations

import numpy as np

from setpoint.core.errors import RequestError
from setpoint.core.model import Pooling
from setpoint.core.result import Floats
from setpoint.frontend.jobs import SequenceOutput


def check_dimensions(dimensions: int | None, pooling: Pooling | None) -> None:
    """Raise RequestError (400) for a length to which this model's vectors cannot be cut
    sensibly."""
    if dimensions is None or pooling is None or dimensions == pooling.size:
        return
    if pooling.lengths is None:
        raise RequestError(
            "dimensions: this model was not trained for vectors shorter than"
            f" {pooling.size} numbers."
            ' If it was, say so at start: --json-model-override-args \'{"is_matryoshka":'
            " true}'."
        )
    if not 1 <= dimensions <= pooling.size or (
        pooling.lengths and dimensions not in pooling.lengths
    ):
        allowed = (
            ", ".join(map(str, pooling.lengths)) if pooling.lengths else f"1 to {pooling.size}"
        )
        raise RequestError(f"dimensions must be one of {allowed}; got {dimensions}.")


def vector_of(
    output: SequenceOutput, pooling: Pooling | None, dimensions: int | None = None
) -> Floats:
    """A finished pooled request's vector. Raises RequestError (400) if the request was aborted."""
    assert pooling is not None, "Intake.embedding_request() refuses it"
    if not output.embedding:
        message = None if output.finish is None else output.finish.message
        raise RequestError(message or "The request was aborted.")
    return finished_vector(output.embedding, pooling, dimensions)


def finished_vector(embedding: bytes, pooling: Pooling, dimensions: int | None = None) -> Floats:
    """``TokenEvent.embedding`` as float32 [dimensions or the model's size]: the first numbers,
    normalised if the model's are."""
    vector = np.frombuffer(embedding, "<f4")[:dimensions]
    length = float(np.linalg.norm(vector.astype(np.float64)))
    return (
        (vector / np.float32(length)).astype(np.float32)
        if pooling.normalize and length > 0
        else vector
    )
