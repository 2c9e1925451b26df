"""Reads the models of a server with several (``--model-path NAME=PATH``, given several times), and
refuses what has no meaning for them."""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from pathlib import Path
from typing import TypeVar

from setpoint.config.groups.declare import flag_of
from setpoint.config.options import Options
from setpoint.core.errors import ConfigError

T = TypeVar("T")
NAME = re.compile(r"[A-Za-z0-9._/-]+")

_ONE_MODEL = "it would be for all models, but belongs to one"
_ONE_ENGINE = "a model has one engine then, in one process"
_WEIGHTS = "it needs weights that stay where they are"
_TIERS = "a cache that outlives an unloaded model is not built yet"
REFUSED = {
    "served_model_name": "each --model-path gives its model a name",
    "tokenizer_path": _ONE_MODEL,
    "chat_template": _ONE_MODEL,
    "revision": _ONE_MODEL,
    "json_model_override_args": _ONE_MODEL,
    "weight_version": _ONE_MODEL,
    "dp_size": _ONE_ENGINE,
    "tp_size": _ONE_ENGINE,
    "pp_size": _ONE_ENGINE,
    "nnodes": _ONE_ENGINE,
    "ep_size": _ONE_ENGINE,
    "engine_standby": _ONE_ENGINE,
    "enable_dp_attention": _ONE_ENGINE,
    "enable_torch_compile": _WEIGHTS,
    "update_weights_folder": _WEIGHTS,
    "enable_hierarchical_cache": _TIERS,
    "hicache_storage_backend": _TIERS,
    "disaggregation_mode": "a pair of servers has one model",
    "disaggregation_prefill_servers": "a pair of servers has one model",
    "record": "a recording is of one engine",
    "kv_events_config": "events do not name their model",
    "export_metrics_to_file": "the lines of the file do not name their model",
    "file_storage_path": "batches do not choose among models yet",
}
"""Option -> why it is refused if there are several models."""


def named_model(value: str) -> tuple[str, str]:
    """The path of a model that is the only one, and its name if the value is NAME=PATH. What looks
    like a path, or is one, has no name."""
    name, equals, path = value.partition("=")
    is_path = value.startswith(("/", ".", "~")) or Path(value).exists()
    if equals and path and NAME.fullmatch(name) and not is_path:
        return path, name
    return value, ""


def each_model(options: Options, models: Sequence[str], given: Set[str]) -> list[Options]:
    """The options of each model. models: the values of --model-path. given: names of the options
    that the user wrote. Raises ConfigError."""
    found: dict[str, Options] = {}
    for value in models:
        name, equals, path = value.partition("=")
        if not (equals and path and NAME.fullmatch(name)):
            raise ConfigError(
                f"--model-path {value!r}: with several models, each needs a name, as in"
                f" --model-path small={value.rpartition('=')[2] or 'PATH'}; a name has letters,"
                " digits and . _ - / only."
            )
        if name in found or name == "default":
            why = "means the first model" if name == "default" else "is given twice"
            raise ConfigError(f"--model-path {value!r}: the name {name!r} {why}. Choose another.")
        found[name] = options.replace(model_path=path, served_model_name=name)
    for option, why in REFUSED.items():
        if option in given and options.get(option) != Options().get(option):
            raise ConfigError(f"{flag_of(option)} cannot be combined with several models: {why}.")
    if options.execution.device not in ("auto", "cpu"):
        raise ConfigError(
            f"--device {options.execution.device} cannot be combined with several models: they are"
            " loaded and unloaded on a CPU only."
        )
    if options.parallel.max_loaded_models > len(found):
        raise ConfigError(
            f"--max-loaded-models {options.parallel.max_loaded_models} is more than the"
            f" {len(found)} models that there are; lower it."
        )
    return [each.replace(device="cpu") for each in found.values()]


def in_order_of_loading(models: Sequence[T], max_loaded: int) -> list[T]:
    """The models in the order in which they are loaded at the start: the first ones come last,
    because they stay loaded."""
    return [*models[max_loaded:], *models[:max_loaded]]
