"""Loads a decoder of the transformers library whose architecture has no declaration here, to run on
our attention, cache and linear layers (``library_model``).

This is the only module that imports transformers, and it does so when it is used. A model that
cannot be run this way is refused with the reason: here if its config or class shows it, otherwise
in the first forward pass (``executor.trial``).
"""

from __future__ import annotations

import importlib.util
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from setpoint.core.blocksfile import BLOCKS_FILE
from setpoint.core.cache_scales import place_of
from setpoint.core.errors import CheckpointError, OutOfMemoryError, SetpointError
from setpoint.core.model import ModelSpec
from setpoint.engine.models.library_model import (
    TransformersModel,
    Undrivable,
    library_attention,
    trial_ids,
)
from setpoint.engine.models.weight_sources import CheckpointFiles, check_finite, values_in
from setpoint.engine.quant.linear_method import LinearMethod

NAME = "setpoint"
"""The name of our attention in the library's registry."""

OLDEST = 5
"""The oldest major version whose interfaces are used here; pyproject.toml requires it."""

LAYER_TYPES = {"full_attention", "sliding_attention"}
ROPES_OF_THE_BATCH = ("dynamic", "longrope")
"""Rope types whose frequencies the library chooses by the longest sequence of a batch, so that
cached keys would depend on the other sequences."""


def load_transformers_model(
    spec: ModelSpec,
    folder: str,
    *,
    load_format: str,
    dtype: torch.dtype,
    device: torch.device,
    method: LinearMethod,
    seed: int,
    values: torch.dtype = torch.bfloat16,
) -> tuple[TransformersModel, int]:
    """(model with its weights, size of the weights in bytes). values: see ``CheckpointFiles``.
    Reads only safetensors and a GGUF's blocks, runs no code of the checkpoint and uses no network.

    Raises CheckpointError for a model that cannot be served this way, and OutOfMemoryError.
    """
    _check_library(spec)
    import transformers

    try:
        transformers.AttentionInterface.register(NAME, library_attention)
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        causal_lm = (
            _load(
                _config(spec),
                spec,
                folder,
                load_format=load_format,
                dtype=dtype,
                seed=seed,
                values=values,
            )
            .to(device)
            .eval()
        )
        _check_loaded(causal_lm, spec)
        expected = _own_logits(causal_lm, spec)
    except SetpointError:
        raise
    except Exception as error:  # the library's loaders and models can raise anything
        if isinstance(error, RuntimeError | MemoryError) and "memory" in str(error):
            raise OutOfMemoryError(
                f"The weights do not fit into the memory of {device}: {error}"
            ) from None
        raise refusal(spec, error) from error
    model = TransformersModel(causal_lm, spec, expected, method)
    return model, model.num_bytes


def _check_library(spec: ModelSpec) -> None:
    """Raise CheckpointError if the library is missing or too old."""
    if importlib.util.find_spec("transformers") is None:
        raise CheckpointError(
            f"Architecture {spec.architecture!r} needs the transformers library, which is not"
            " installed: `.venv/bin/pip install -e '.[transformers]'`."
        )
    import transformers

    if int(transformers.__version__.partition(".")[0]) < OLDEST:
        raise CheckpointError(
            f"transformers {transformers.__version__} is too old;"
            " `.venv/bin/pip install -U -e '.[transformers]'`."
        )


def check_config(spec: ModelSpec) -> None:
    """Raise CheckpointError if the config shows that the model cannot be served this way. A model
    that passes may still be refused when it is loaded."""
    _check_library(spec)
    try:
        _config(spec)
    except SetpointError:
        raise
    except Exception as error:  # the library's configs can raise anything
        raise refusal(spec, error) from error


def refusal(spec: ModelSpec, why: str | Exception) -> CheckpointError:
    """The error for an architecture that cannot be served through transformers: one sentence."""
    words = (str(why).strip() or "no reason was given").splitlines()[0].rstrip(".")
    name = (
        f"{type(why).__name__}: "
        if isinstance(why, Exception) and not isinstance(why, Undrivable)
        else ""
    )
    return CheckpointError(
        f"{spec.architecture} cannot be served through transformers: {name}{words}."
    )


def _config(spec: ModelSpec) -> Any:
    """The library's config object. Refuses what can be recognised without building the model."""
    import transformers

    known = transformers.CONFIG_MAPPING
    if spec.model_type not in known:
        raise refusal(
            spec,
            f"transformers {transformers.__version__} has no model type {spec.model_type!r}, and"
            " code of a checkpoint is never run",
        )
    values = {
        key: value
        for key, value in spec.config.items()
        if key not in ("model_type", "auto_map", "quantization_config")
    }
    config = transformers.AutoConfig.for_model(spec.model_type, **values)
    kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is None or kind.__name__ != spec.architecture:
        raise refusal(
            spec, f"it is not the causal language model of transformers' {spec.model_type!r}"
        )
    if config.is_encoder_decoder:
        raise refusal(spec, "it is an encoder-decoder")
    if kind._is_stateful:
        raise refusal(spec, "it keeps a recurrent state instead of a KV cache")
    strange = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if strange:
        raise refusal(
            spec,
            f"its layers of type {', '.join(sorted(strange))} have no KV cache of the usual kind",
        )
    if not kind._can_set_attn_implementation():
        raise refusal(spec, "its layers do not use the attention interface")
    return config


def _load(
    config: Any,
    spec: ModelSpec,
    folder: str,
    *,
    load_format: str,
    dtype: torch.dtype,
    seed: int,
    values: torch.dtype,
) -> nn.Module:
    import transformers

    if load_format == "dummy":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return transformers.AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=NAME, trust_remote_code=False
            )
    is_gguf = (Path(folder) / BLOCKS_FILE).is_file()
    with ExitStack() as stack:
        tensors = (
            CheckpointFiles(Path(folder), stack, values=values).read_all() if is_gguf else None
        )
    if spec.quantised:
        tensors = values_in(Path(folder), spec.quantised)
    kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model, found = kind.from_pretrained(
        None if tensors else folder,
        state_dict=tensors,
        config=config,
        dtype=dtype,
        attn_implementation=NAME,
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
        ignore_mismatched_sizes=True,  # so that they are listed
        output_loading_info=True,
    )
    for what, problem in (
        ("missing_keys", "is missing"),
        ("mismatched_keys", "has another shape"),
        ("unexpected_keys", "is unknown"),
    ):
        keys = (key[0] if isinstance(key, tuple) else key for key in found.get(what) or ())
        names = sorted(key for key in keys if not place_of(key))
        if names:
            raise CheckpointError(
                f"{folder}: tensor {names[0]} {problem} in {spec.architecture} ({len(names)} such"
                " tensors)."
            )
    for name, parameter in model.named_parameters():
        check_finite(parameter, name, Path(folder))
    return model


def _check_loaded(causal_lm: nn.Module, spec: ModelSpec) -> None:
    for module in causal_lm.modules():
        ropes = getattr(module, "rope_type", None)
        for rope in ropes.values() if isinstance(ropes, dict) else (ropes,):
            if rope in ROPES_OF_THE_BATCH:
                raise refusal(
                    spec, f"its rope of type {rope} depends on the longest sequence of a batch"
                )
    for name, buffer in causal_lm.named_buffers():
        if buffer.is_meta:
            raise refusal(spec, f"buffer {name} was not initialised")


@torch.inference_mode()
def _own_logits(causal_lm: nn.Module, spec: ModelSpec) -> torch.Tensor:
    """The library's own logits [V] after ``trial_ids``. Call it before any part of the model is
    replaced."""
    causal_lm.set_attn_implementation("eager")
    device = next(causal_lm.parameters()).device
    logits = causal_lm(
        input_ids=torch.tensor([trial_ids(spec)], device=device), use_cache=False, return_dict=True
    ).logits[0, -1]
    causal_lm.set_attn_implementation(NAME)
    return logits
