"""Settles once, before weights are loaded, what is served and how: the model on disk, its tokenizer
and chat template, and the options. Starts nothing and reads no weights.

A model that cannot fit is refused as soon as that is known: for a hub id and a GGUF file, before
weights are downloaded or converted.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Set
from dataclasses import replace
from functools import partial
from typing import Any

from setpoint.checkpoint.end_tokens import tokenizer_end_ids
from setpoint.checkpoint.folder.description import Description
from setpoint.checkpoint.folder.families import GATED, IN_GGUF
from setpoint.checkpoint.pooling import check_generates, is_for_embeddings, read_pooling
from setpoint.checkpoint.recommended import recommended_sampling
from setpoint.checkpoint.source import DEFAULT_MODEL, ModelSource, locate, tokenizer_folder
from setpoint.checkpoint.spec import spec_of
from setpoint.config.devices import with_own_gpus
from setpoint.config.environment import EnvSettings
from setpoint.config.groups.chat_formats import NONE
from setpoint.config.groups.model import ModelOptions, model_overrides
from setpoint.config.hardware import probe_hardware
from setpoint.config.live_changes import ConfigInputs
from setpoint.config.memory_check import require_memory
from setpoint.config.options import Options
from setpoint.config.resolved import ResolvedConfig
from setpoint.launch.parent.served_model import MachineShare, ServedModel

KEY_BYTES = 32
"""Size of the key of a prefill server."""

logger = logging.getLogger(__name__)

NO_TEXT = "--skip-tokenizer-init leaves text out"


def asking_for(
    options: Options, env: EnvSettings, given: Set[str], share: MachineShare | None = None
) -> Callable[..., ConfigInputs]:
    """Makes the inputs of a configuration of a ``model`` and what was ``found`` about it. Raises
    ConfigError if the machine has too few cores for the engines."""
    machine = probe_hardware()
    hardware = (
        machine.divided(options.parallel.dp_size)
        if share is None
        else machine.divided(share.max_loaded, by="--max-loaded-models")
    )
    return partial(
        ConfigInputs,
        options=options,
        given=frozenset(given),
        hardware=with_own_gpus(hardware, options.parallel),
        env=env,
        drawn_seed=secrets.randbelow(1 << 30),
    )


def check_memory(asked: ConfigInputs, config: ResolvedConfig, description: Description) -> None:
    """Raise OutOfMemoryError if the model certainly does not fit (``config.memory_check``)."""
    is_counted = asked.model.model_type in GATED or bool(description.tensors)
    name = asked.options.model.model_path or DEFAULT_MODEL
    in_gguf = asked.model.architecture in IN_GGUF
    require_memory(asked, config, name=name, is_counted=is_counted, in_gguf=in_gguf)


def _located(
    model: ModelOptions, asking: Callable[..., ConfigInputs], overrides: dict[str, Any]
) -> ModelSource:
    """The model, which may fit into memory. Raises SetpointError."""

    def admit(description: Description) -> None:
        asked = asking(model=spec_of(description, overrides=overrides), found={})
        check_memory(asked, asked.resolve(), description)

    source = locate(
        model.model_path,
        revision=model.revision,
        load_format=model.load_format,
        log=logger.info,
        admit=admit,
    )
    admit(source.description)
    return source


def settle(
    options: Options, env: EnvSettings, given: Set[str], share: MachineShare | None = None
) -> ServedModel:
    """Returns what a server with these options serves: the model, its tokenizer and the resolved
    configuration. Raises SetpointError for a model or options that cannot be served."""
    model, overrides = options.model, model_overrides(options.model)
    asking = asking_for(options, env, given, share)
    source = _located(model, asking, overrides)
    spec = spec_of(source.description, overrides=overrides)
    if share is not None and is_for_embeddings(source.folder, spec):
        logger.info("%s was made for embeddings, which it serves.", model.served_model_name)
        options = options.replace(is_embedding=True)
        model, asking = options.model, partial(asking, options=options)
    if not model.is_embedding:
        check_generates(source.folder, spec, log=logger.warning)
    else:
        spec = replace(spec, pooling=read_pooling(source.folder, spec))
    sampling = recommended_sampling(source, options.answers.sampling_defaults)
    # The tokenizers library comes with these; by now the engine process is importing torch.
    from setpoint.frontend.chat.formats.detect import Detected, detect
    from setpoint.frontend.text.template_source import find_chat_template

    tokenizer, template, formats = None, None, Detected(None, NO_TEXT, None, NO_TEXT)
    if not model.skip_tokenizer_init:
        named = model.tokenizer_path
        tokenizer = source.folder if named is None else tokenizer_folder(named, log=logger.info)
        ends = dict.fromkeys((*spec.eos_token_ids, *tokenizer_end_ids(tokenizer)))
        # A tokenizer may know more ids than the model; the model never generates these.
        spec = replace(spec, eos_token_ids=tuple(each for each in ends if each < spec.vocab_size))
        template = find_chat_template(tokenizer, override=model.chat_template)
        formats = detect(template or "")
    asked = asking(
        model=spec,
        found={
            "model_path": (source.name, "the default model"),
            "tokenizer_path": (str(source.folder), "the model's own"),
            "tool_call_parser": (formats.tool or NONE, formats.tool_why),
            "reasoning_parser": (formats.reasoning or NONE, formats.reasoning_why),
        },
    )
    key = secrets.token_hex(KEY_BYTES) if options.disaggregation.role == "prefill" else ""
    return ServedModel(
        source,
        tokenizer,
        template,
        asked,
        asked.resolve(),
        sampling,
        handover_key=key,
        share=share,
    )
