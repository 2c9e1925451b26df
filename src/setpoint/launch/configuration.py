"""Settles what is served and how before weights are loaded: the model on disk, its configuration,
and the sampling that its authors recommend. Starts nothing and reads no weights.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Set
from dataclasses import replace
from pathlib import Path

from setpoint.checkpoint.end_tokens import tokenizer_end_ids
from setpoint.checkpoint.pooling import MODULES_NAME, read_pooling
from setpoint.checkpoint.source import DEFAULT_SAMPLING, ModelSource, locate, tokenizer_folder
from setpoint.checkpoint.spec import GENERATION_NAME, read_spec
from setpoint.config.environment import EnvSettings
from setpoint.config.groups.chat_formats import NONE
from setpoint.config.groups.model import model_overrides
from setpoint.config.hardware import probe_hardware
from setpoint.config.live import Asked
from setpoint.config.options import Options
from setpoint.config.resolved import ResolvedConfig
from setpoint.core.errors import CheckpointError, RequestError
from setpoint.core.jsonfile import read_object
from setpoint.core.model import ModelSpec
from setpoint.core.sampling import SamplingParams

logger = logging.getLogger(__name__)


def configured(
    options: Options, env: EnvSettings, given: Set[str]
) -> tuple[ModelSource, Asked, ResolvedConfig]:
    """The model on disk, the options asked for, and the resolved configuration. Raises
    SetpointError for a model or options that cannot be served."""
    source = locate(
        options.model.model_path,
        revision=options.model.revision,
        load_format=options.model.load_format,
        log=logger.info,
    )
    spec = read_spec(source.folder, overrides=model_overrides(options.model))
    ends = dict.fromkeys(spec.eos_token_ids)
    if options.model.skip_tokenizer_init:
        why = "--skip-tokenizer-init leaves text out"
        formats = dict.fromkeys(("tool_call_parser", "reasoning_parser"), (NONE, why))
    else:
        text_folder = (
            source.folder
            if options.model.tokenizer_path is None
            else tokenizer_folder(options.model.tokenizer_path, log=logger.info)
        )
        ends |= dict.fromkeys(tokenizer_end_ids(text_folder))
        formats = chat_formats(options, text_folder)
    # A tokenizer may know more ids than the model, which never generates those.
    spec = replace(
        spec, eos_token_ids=tuple(token_id for token_id in ends if token_id < spec.vocab_size)
    )
    if options.model.is_embedding:
        spec = replace(spec, pooling=read_pooling(source.folder, spec))
    else:
        _check_generates(source.folder, spec)
    found = {
        "model_path": (source.name, "the default model"),
        "tokenizer_path": (str(source.folder), "the model's own"),
        **formats,
    }
    asked = Asked(
        options=options,
        given=frozenset(given),
        hardware=probe_hardware(),
        model=spec,
        found=found,
        env=env,
        drawn_seed=secrets.randbelow(1 << 30),
    )
    return source, asked, asked.resolve()


def _check_generates(folder: Path, spec: ModelSpec) -> None:
    """Raise CheckpointError for a decoder without its head; warn of a whole one that its authors
    made for embeddings."""
    if spec.architecture.endswith("Model") and not spec.architecture.endswith("LMHeadModel"):
        raise CheckpointError(
            f"{folder} is an embedding model ({spec.architecture}), which generates no text; add"
            " --is-embedding to serve its embeddings."
        )
    if (folder / MODULES_NAME).is_file():
        logger.warning(
            "%s is an embedding model (%s), and what it generates will be of no use;"
            " --is-embedding serves its embeddings.",
            folder,
            MODULES_NAME,
        )


def chat_formats(options: Options, folder: Path) -> dict[str, tuple[str, str]]:
    """How the model writes tool calls and reasoning, and why it is believed to. folder: the
    tokenizer's."""
    # The tokenizers library comes with this; by now the engine process is importing torch.
    from setpoint.frontend.chat.formats.detect import detect
    from setpoint.frontend.text.template_source import find_chat_template

    seen = detect(find_chat_template(folder, override=options.model.chat_template) or "")
    return {
        "tool_call_parser": (seen.tool or NONE, seen.tool_why),
        "reasoning_parser": (seen.reasoning or NONE, seen.reasoning_why),
    }


def sampling_defaults(wanted: str, source: ModelSource) -> dict[str, float]:
    """With ``--sampling-defaults model``: the sampling that the model's authors recommend, for
    requests to OpenAI's routes and for chats."""
    if wanted != "model":
        return {}
    recommended = dict(DEFAULT_SAMPLING) if source.is_default else {}
    path = source.folder / GENERATION_NAME
    if path.exists():
        given = read_object(path)
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        recommended |= {name: given[name] for name in names if given.get(name) is not None}
        if recommended.get("top_k") == 0:
            recommended["top_k"] = -1  # transformers' word for the whole vocabulary
        try:
            SamplingParams.parse(recommended)
        except RequestError as error:
            raise CheckpointError(
                f"{path}: {error} Correct it, or start with --sampling-defaults openai."
            ) from None
    if recommended:
        logger.debug(
            "Default sampling of chats and of OpenAI's routes: %s",
            ", ".join(f"{name}={value}" for name, value in recommended.items()),
        )
    return recommended
