"""The sampling that a model's authors recommend."""

from __future__ import annotations

from setpoint.checkpoint.source import DEFAULT_SAMPLING, ModelSource
from setpoint.core.errors import CheckpointError, RequestError
from setpoint.core.sampling import SamplingParams

NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def recommended_sampling(source: ModelSource, wanted: str) -> dict[str, float]:
    """The sampling parameters of generation_config.json, and for the default model those of its
    card, if ``wanted`` is "model" (--sampling-defaults); else none. Raises CheckpointError for a
    value that no request may have."""
    if wanted != "model":
        return {}
    given = source.description.generation
    found = dict(DEFAULT_SAMPLING) if source.is_default else {}
    found |= {name: given[name] for name in NAMES if given.get(name) is not None}
    if found.get("top_k") == 0:
        found["top_k"] = -1  # transformers' word for the whole vocabulary
    try:
        SamplingParams.parse(found)
    except RequestError as error:
        raise CheckpointError(
            f"{source.description.generation_path}: {error} Correct it, or start with"
            " --sampling-defaults openai."
        ) from None
    return found
