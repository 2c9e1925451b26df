"""Decides which checkpoints the clients of a running server may load: those in the served model's
own folder, and those below the folder that the operator has named. This module reads only
config.json.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from setpoint.checkpoint.folder.other_models import CONFIG_NAME
from setpoint.checkpoint.license import license_of
from setpoint.checkpoint.source import ModelSource
from setpoint.checkpoint.spec import read_spec
from setpoint.config.groups.model import model_overrides
from setpoint.config.options import Options
from setpoint.core.errors import CheckpointError, RequestError
from setpoint.core.excerpt import excerpt, quoted
from setpoint.core.model import ModelSpec
from setpoint.core.weightfiles import weight_files
from setpoint.frontend.checkpoint_names import Checkpoint
from setpoint.frontend.client_paths import check_path

NO_OTHER_GGUF = (
    "Of GGUF files, only the one that the server was started with can be loaded again; start"
    " another server for another one."
)
LOADABLE = ("auto", "safetensors", "dummy")
NO_MATTER = frozenset(
    {
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "pad_token_id",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Keys of config.json in which two checkpoints of one model may differ: they do not change the
computation, or the start has settled them."""
SETTLED = frozenset({"config", "eos_token_ids", "blocks", "pooling", "dtype", "num_parameters"})
"""Fields of a ModelSpec that are not compared as they are."""


class LaunchedCheckpoints:
    """Implements ``frontend.checkpoint_names.Checkpoints``."""

    def __init__(self, options: Options, source: ModelSource, spec: ModelSpec) -> None:
        self._options = options
        self._source = source
        self._spec = spec
        folder = options.server.update_weights_folder
        self._allowed = None if folder is None else Path(folder).resolve()

    def license(self) -> str:
        return license_of(self._source.gguf or self._source.folder)

    def find(self, model_path: str, load_format: str | None) -> Checkpoint:
        load_format = self._options.model.load_format if load_format is None else load_format
        if load_format not in LOADABLE:
            raise RequestError(
                f"load_format is {quoted(load_format)}; it may be {', '.join(LOADABLE)}."
            )
        if model_path in (
            self._source.name,
            self._options.model.model_path,
            str(self._source.folder),
        ):
            return Checkpoint(str(self._source.folder), load_format)
        try:
            return self._allowed_checkpoint(model_path, load_format)
        except CheckpointError as error:
            raise RequestError(str(error)) from None
        except OSError as error:
            raise RequestError(
                f"model_path: {quoted(model_path)} cannot be read: {error.strerror}."
            ) from None

    def _allowed_checkpoint(self, model_path: str, load_format: str) -> Checkpoint:
        folder = self._allowed_folder(model_path)
        if not (folder / CONFIG_NAME).exists() and any(folder.glob("*.gguf")):
            raise RequestError(f"{excerpt(model_path)} is a folder of GGUF files. {NO_OTHER_GGUF}")
        spec = read_spec(folder, overrides=model_overrides(self._options.model))
        if other := _difference(self._spec, spec):
            raise RequestError(
                f"{excerpt(model_path)} is not a checkpoint of the running model: {other}. Start"
                " another server for it."
            )
        if load_format != "dummy" and not weight_files(folder):
            raise RequestError(f"{excerpt(model_path)} has no safetensors weights.")
        return Checkpoint(str(folder), load_format)

    def _allowed_folder(self, model_path: str) -> Path:
        """The folder that a client names, with symbolic links resolved. Raises RequestError (403)
        for a folder that the operator does not allow; the error does not reveal whether the folder
        exists."""
        if self._allowed is None:
            raise RequestError(
                "model_path may only name the model that the server was started with. Start the"
                " server with"
                " --update-weights-folder FOLDER to allow others.",
                status_code=403,
            )
        check_path(model_path, "model_path")
        try:
            folder = Path(model_path).resolve()
            inside = folder.is_relative_to(self._allowed)
        except (OSError, RuntimeError):  # a loop of links
            inside = False
        if not inside:
            raise RequestError(
                "model_path must be a folder below the folder of --update-weights-folder, or the"
                " path of the served model, which /model_info shows.",
                status_code=403,
            )
        if folder.is_file():
            raise RequestError(
                f"{excerpt(model_path)} is a file; a folder with safetensors can be loaded."
                f" {NO_OTHER_GGUF}"
            )
        if not folder.is_dir():
            raise RequestError(f"model_path: the folder {quoted(model_path)} does not exist.")
        return folder


def _difference(running: ModelSpec, other: ModelSpec) -> str:
    """What differs in the computations of two models; "" if nothing does."""
    for field in fields(ModelSpec):
        ours, theirs = getattr(running, field.name), getattr(other, field.name)
        if field.name not in SETTLED and ours != theirs:
            return f"{field.name} is {excerpt(str(theirs))} instead of {excerpt(str(ours))}"
    mine, its = _computing(running.config), _computing(other.config)
    for key in sorted(mine.keys() | its.keys()):
        if mine.get(key) != its.get(key):
            return (
                f"{excerpt(key)} in config.json is {excerpt(str(its.get(key)))} instead of"
                f" {excerpt(str(mine.get(key)))}"
            )
    return ""


def _computing(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in NO_MATTER}
