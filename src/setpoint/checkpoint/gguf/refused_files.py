"""Refuses GGUF files without a model that can be converted, and says what they are. Works on a
parsed header.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from setpoint.checkpoint.folder.other_models import EMBEDDINGS, TEXT_ONLY
from setpoint.checkpoint.gguf.header import GGUFFile
from setpoint.core.errors import CheckpointError, UnsupportedModelError
from setpoint.core.excerpt import quoted

PROJECTOR = "mmproj"
TYPES = {
    "adapter": "a LoRA adapter, not a model; adapters are not supported. Merge it into its base"
    " model with llama.cpp's export-lora",
    "imatrix": "an importance matrix, which llama.cpp's quantisation reads, not a model",
}
"""general.type -> what such a file is."""

_VISION = f"a vision-language model, which also reads images. {TEXT_ONLY}"
_ENCODER = f"an encoder, which generates no text. {EMBEDDINGS}"
OTHERS = {
    **dict.fromkeys(
        (
            "cogvlm",
            "deepseek2-ocr",
            "hunyuan_vl",
            "paddleocr",
            "qwen2vl",
            "qwen3vl",
            "qwen3vlmoe",
        ),
        _VISION,
    ),
    **dict.fromkeys(
        (
            "bert",
            "eurobert",
            "gemma-embedding",
            "jina-bert-v2",
            "jina-bert-v3",
            "modern-bert",
            "neo-bert",
            "nomic-bert",
            "nomic-bert-moe",
        ),
        _ENCODER,
    ),
    "t5": f"an encoder-decoder. {TEXT_ONLY}",
    "t5encoder": _ENCODER,
    "wavtokenizer-dec": f"a model of sound. {TEXT_ONLY}",
}
"""general.architecture of files without a text decoder -> what they are."""

FAMILIES = {
    "command-r": "Command R",
    "granite": "Granite",
    "olmo2": "OLMo 2",
    "stablelm": "StableLM",
    "starcoder2": "StarCoder 2",
}
"""general.architecture of families that the transformers library serves (--model-impl
transformers), but not from GGUF files -> their names."""

_REPOSITORIES = ("general.base_model.0.repo_url", "general.repo_url", "general.source.repo_url")
_HUB_URL = re.compile(r"https://huggingface\.co/([A-Za-z0-9][\w.-]*/[\w.-]+)/?")


def check_kind(file: GGUFFile, converted: Collection[str]) -> None:
    """Raise CheckpointError unless the file holds a whole model of an architecture in
    ``converted``."""
    path, kind = file.path, file.get("general.type", str)
    architecture = file.require("general.architecture", str)
    if architecture == "clip" or kind == PROJECTOR:
        raise CheckpointError(
            f"{path} is a vision projector, the part of a vision-language model that reads images;"
            f" {_language_model_hint(path)}."
        )
    if kind in TYPES:
        raise CheckpointError(f"{path} is {TYPES[kind]}.")
    if architecture in OTHERS:
        raise CheckpointError(
            f"{path} (GGUF architecture {architecture!r}) is {OTHERS[architecture]}"
        )
    if architecture not in converted:
        raise UnsupportedModelError(
            _other_family(file, architecture, converted),
            architecture=architecture,
            supported=converted,
        )


def _language_model_hint(path: Path) -> str:
    """Advice that names the file that was probably meant."""
    models = [each for each in path.parent.glob("*.gguf") if not each.name.startswith(PROJECTOR)]
    others = [each for each in models if each != path]
    hint = f", e.g. {others[0]}" if len(others) == 1 else ", which is usually in the same folder"
    return f"name the file with the language model{hint}"


def _other_family(file: GGUFFile, architecture: str, converted: Collection[str]) -> str:
    family = FAMILIES.get(architecture)
    served = ", ".join(sorted(converted))
    name = f"{architecture!r} ({family})" if family else quoted(architecture)
    begin = (
        f"{file.path} has the GGUF architecture {name}, which is not served from GGUF files; these"
        f" are: {served}."
    )
    if family is None:
        return f"{begin} docs/supported-models.md lists the families and formats that are."
    return (
        f"{begin} Serve the safetensors checkpoint of the same model instead: --model-path"
        f" {_repository(file) or 'FOLDER (or a hub id)'}; with --quantization w8a8_int8 its weights"
        " are rounded to 8 bits."
    )


def _repository(file: GGUFFile) -> str | None:
    """The hub id of the checkpoint from which the file was made, if the file names it."""
    for key in _REPOSITORIES:
        url = file.metadata.get(key)
        if isinstance(url, str) and (found := _HUB_URL.fullmatch(url)):
            return found[1]
    return None
