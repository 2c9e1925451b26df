"""The parts of the installation that some commands need (the extras of pyproject.toml), and the
sentence for somebody who has installed less."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from setpoint.core.errors import ConfigError
from setpoint.core.version import PACKAGE

EXTRAS: dict[str, tuple[str, ...]] = {
    "serve": (
        "gguf",
        "huggingface_hub",
        "jinja2",
        "llguidance",
        "lmdb",
        "psutil",
        "python_multipart",
        "safetensors",
        "tokenizers",
        "torch",
        "uvloop",
        "xxhash",
        "yaml",
        "zstandard",
    ),
    "bench": ("huggingface_hub", "jinja2", "tokenizers", "uvloop"),
    "kv-events": ("zmq",),
    "ray": ("ray",),
    "route": ("smg",),
    "trace": (
        "opentelemetry.sdk.trace",
        "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    ),
    # xgrammar imports the two other packages, but can be installed without them.
    "xgrammar": ("xgrammar", "tvm_ffi", "transformers"),
}
"""Name of an extra -> the modules that it brings."""


def install_line(extra: str) -> str:
    """The command that adds an extra to this environment, run in Setpoint's folder."""
    pip, here = Path(sys.prefix, "bin", "pip"), Path.cwd()
    if here == PACKAGE.parents[1] and pip.is_relative_to(here):
        pip = pip.relative_to(here)
    return f"{pip} install -e '.[{extra}]'"


def is_installed(extra: str) -> bool:
    try:
        return all(map(find_spec, EXTRAS[extra]))
    except ModuleNotFoundError:  # the package that a module is in
        return False


def check_extra(what: str, extra: str) -> None:
    """Raise ConfigError if a module of an extra is not installed. what: needs it."""
    if not is_installed(extra):
        raise ConfigError(
            f"{what} needs packages that are not installed: in Setpoint's folder, run"
            f" {install_line(extra)}."
        )
