"""Recognises checkpoints of other kinds than text decoders, so that the error says what they are
instead of what they lack. Works on names of files and keys of config.json; does not know what the
engine can do with a decoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from setpoint.checkpoint.folder.families import WRAPPERS
from setpoint.core.errors import CheckpointError
from setpoint.core.jsonfile import read_object

CONFIG_NAME = "config.json"
ADAPTER_NAME = "adapter_config.json"
"""The config of an adapter made by the peft library."""
PIPELINE_NAME = "model_index.json"
"""The config of a pipeline of the diffusers library."""

ENCODERS = frozenset(
    {
        *("albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "ernie"),
        *("eurobert", "modernbert", "mpnet", "nomic_bert", "roberta", "xlm-roberta", "xmod"),
        "new",  # of Alibaba's gte models
    }
)
"""model_type of encoders, which read a whole text at once and generate no text."""
SPEECH = frozenset(["moonshine", "parakeet", "seamless_m4t", "speecht5", "wav2vec2", "whisper"])

ENDINGS = {
    "ForSequenceClassification": "a classifier, a reranker or a reward model",
    "ForTokenClassification": "a model that classifies tokens",
    "ForQuestionAnswering": "a model that marks spans of a text",
    "ForRewardModel": "a reward model",
}
"""Ending of an architecture's name -> what such a model is."""
TEXT_ONLY = "Setpoint serves decoders, which continue a text."
EMBEDDINGS = f"{TEXT_ONLY} It also serves the embeddings of decoders (--is-embedding)."


def refuse_folder(folder: Path) -> NoReturn:
    """Raise a CheckpointError that says what a folder without a config.json is."""
    if (folder / ADAPTER_NAME).is_file():
        base = read_object(folder / ADAPTER_NAME).get("base_model_name_or_path")
        of = f" for {base}" if isinstance(base, str) and base.isprintable() else ""
        raise CheckpointError(
            f"{folder} is a LoRA adapter{of} ({ADAPTER_NAME}), not a model, and adapters are not"
            " supported. Merge it into its base model with peft's merge_and_unload, save the"
            " result, and name that folder."
        )
    if (folder / PIPELINE_NAME).is_file():
        name = read_object(folder / PIPELINE_NAME).get("_class_name")
        which = f" ({name})" if isinstance(name, str) and name.isprintable() else ""
        raise CheckpointError(f"{folder} is a diffusion pipeline{which}. {TEXT_ONLY}")
    ggufs = sorted(folder.glob("*.gguf"))
    hint = (
        f"name the GGUF file itself, e.g. {ggufs[0]}"
        if ggufs
        else "name a Hugging Face model folder"
    )
    raise CheckpointError(f"{folder} has no {CONFIG_NAME}; {hint}.")


def refuse_other_configs(path: Path, config: Mapping[str, Any]) -> None:
    """Raise CheckpointError if this config is not that of a text decoder. path: the file, for the
    message."""
    named = config.get("architectures") or [config.get("_class_name")]
    architecture = named[0] if isinstance(named, list) and isinstance(named[0], str) else ""
    found = _kind(architecture, config)
    if found is not None:
        what, instead = found
        name = f" ({architecture})" if architecture.isprintable() and architecture else ""
        raise CheckpointError(f"{path.parent} is {what}{name}. {instead}")


def _kind(architecture: str, config: Mapping[str, Any]) -> tuple[str, str] | None:
    """(what the model is, what can be done instead); None if it may be a decoder."""
    model_type = config.get("model_type")
    for ending, what in ENDINGS.items():
        if architecture.endswith(ending):
            return what, TEXT_ONLY
    if "_class_name" in config:
        return "a part of a diffusion model", TEXT_ONLY
    if model_type in SPEECH:
        return "a speech model", TEXT_ONLY
    if architecture not in WRAPPERS:
        if any(config.get(key) is not None for key in ("vision_config", "visual", "vision_tower")):
            return (
                "a vision-language model, which also reads images",
                "Of such models, only the language model of Gemma 3 is served; name a text model of"
                " the same family.",
            )
        if config.get("audio_config") is not None:
            return "a model that also reads audio", TEXT_ONLY
    if config.get("is_encoder_decoder") is True:
        return "an encoder-decoder", TEXT_ONLY
    is_bare = architecture.endswith("Model") and not architecture.endswith("LMHeadModel")
    if architecture.endswith("ForMaskedLM") or (model_type in ENCODERS and is_bare):
        return "an encoder, which generates no text", EMBEDDINGS
    return None
