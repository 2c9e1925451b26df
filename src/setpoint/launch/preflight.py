"""Finds what is wrong before anything is started or loaded: missing files that options name,
missing devices that they ask for. It takes milliseconds."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from setpoint.config.hardware import available_bytes, why_no_cuda
from setpoint.config.metric_options import otlp_url
from setpoint.config.options import Options
from setpoint.config.resolved import ResolvedConfig
from setpoint.core.errors import ConfigError, OutOfMemoryError
from setpoint.core.model import ModelSpec
from setpoint.planning.memory import format_bytes

OTLP_MODULE = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


def preflight(options: Options) -> None:
    """Raises ConfigError, RecordingError for a recording that cannot be made, or CheckpointError
    for a chat template that cannot be compiled. What only few starts need is imported on use."""
    if options.device == "cuda" and (why := why_no_cuda()):
        raise ConfigError(
            f"--device cuda was asked for, but {why}; use --device cpu, or leave it out."
        )
    if options.record is not None:
        from setpoint.recording.segments import check_new

        check_new(Path(options.record))
    if options.export_metrics_to_file:
        assert options.export_metrics_to_file_dir is not None, "check_metrics refuses it"
        _check_folder("--export-metrics-to-file-dir", Path(options.export_metrics_to_file_dir))
    if options.enable_trace:
        otlp_url(options.otlp_traces_endpoint)
        _check_extra("--enable-trace", "trace", "opentelemetry.sdk.trace", OTLP_MODULE)
    if options.grammar_backend == "xgrammar":
        # It imports the two others, and can be installed without them.
        _check_extra(
            "--grammar-backend xgrammar", "xgrammar", "xgrammar", "tvm_ffi", "transformers"
        )
    if options.chat_template is not None:
        from setpoint.frontend.text.template import ChatTemplate
        from setpoint.frontend.text.template_source import find_chat_template

        ChatTemplate(find_chat_template("", override=options.chat_template) or "")


def _check_extra(flag: str, extra: str, *modules: str) -> None:
    """Raise ConfigError if a module of an optional extra is not installed."""
    try:
        missing = not all(map(find_spec, modules))
    except ModuleNotFoundError:
        missing = True
    if missing:
        raise ConfigError(
            f"{flag} needs packages that are not installed: pip install 'setpoint[{extra}]'."
        )


def _check_folder(flag: str, folder: Path) -> None:
    """Make the folder if it is missing. Raises ConfigError if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{flag} {folder} cannot be created: {error.strerror}.") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag} {folder} is not writable.")


def check_room(config: ResolvedConfig, model: ModelSpec) -> None:
    """Raises OutOfMemoryError if not even one page of KV cache fits into the memory that is free
    before the weights are loaded."""
    if config.options.device == "cpu":
        page, free = (
            model.kv_bytes_per_token(config.kv_element_bytes) * config.options.page_size,
            available_bytes(),
        )
        if page > free:
            raise OutOfMemoryError(
                f"--page-size {config.options.page_size} is too large: one page of KV cache would"
                f" take {format_bytes(page)}, and {format_bytes(free)} are free."
            )
