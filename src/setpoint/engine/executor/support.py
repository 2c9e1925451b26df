"""Which code runs a model, if any does: Setpoint's own or the transformers library's. Looks at the
architecture and the config; loads nothing."""

from __future__ import annotations

from setpoint.core.errors import CheckpointError, UnsupportedModelError
from setpoint.core.model import ModelSpec
from setpoint.engine.models.model_registry import MODELS, build_model, is_native
from setpoint.engine.models.transformers_model import check_config


def model_code(spec: ModelSpec, model_impl: str) -> str:
    """Whose code it is: "setpoint" or "transformers". model_impl: the option of that name. Raises
    CheckpointError for a model that neither runs; the library's are tried out only when they are
    loaded."""
    if model_impl == "setpoint" or (model_impl == "auto" and is_native(spec)):
        build_model(spec)
        return "setpoint"
    try:
        check_config(spec)
    except CheckpointError as error:
        raise UnsupportedModelError(
            str(error), architecture=spec.architecture, supported=MODELS.keys()
        ) from None
    return "transformers"
