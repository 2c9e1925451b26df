"""Finds errors before anything is started or loaded: missing files and devices that options name.
It takes milliseconds."""

from __future__ import annotations

import os
from pathlib import Path

from setpoint.config.extras import check_extra
from setpoint.config.hardware import probe_hardware, why_no_cuda
from setpoint.config.options import Options
from setpoint.core.constraint import compile_refusal
from setpoint.core.errors import ConfigError, RequestError


def preflight(options: Options) -> None:
    """Check everything that can be checked before anything is loaded. Raises ConfigError,
    RecordingError for a recording that cannot be made, or CheckpointError for a chat template that
    cannot be compiled. Modules that few starts need are imported on use."""
    check_device(options.execution.device)
    if options.metrics.export_metrics_to_file:
        assert options.metrics.export_metrics_to_file_dir is not None, "check_metrics refuses it"
        _check_folder(
            "--export-metrics-to-file-dir", Path(options.metrics.export_metrics_to_file_dir)
        )
    if options.parallel.dp_size > 1:
        probe_hardware().divided(options.parallel.dp_size)
    if options.parallel.engine_standby and options.parallel.dp_size > 1:
        raise ConfigError(
            "--engine-standby is for a server with one engine; with --dp-size"
            f" {options.parallel.dp_size}, the other engines take the requests of one that dies."
            " Leave it out."
        )
    if options.traces.enable_trace:
        check_extra("--enable-trace", "trace")
    if options.execution.grammar_backend == "xgrammar":
        check_extra("--grammar-backend xgrammar", "xgrammar")
    if options.execution.constrained_json_whitespace_pattern is not None:
        _check_whitespace(options.execution.constrained_json_whitespace_pattern)
    if options.recording.record is not None:
        from setpoint.recording.segments import check_new

        check_new(Path(options.recording.record))
    if options.model.chat_template is not None:
        from setpoint.frontend.text.template_process import check_template_file

        check_template_file(options.model.chat_template)


def check_device(device: str) -> None:
    """Raise ConfigError for a device that this machine certainly does not have."""
    if device == "cuda" and (why := why_no_cuda()):
        raise ConfigError(
            f"--device cuda was asked for, but {why}; use --device cpu, or leave it out."
        )


def _check_whitespace(pattern: str) -> None:
    from setpoint.grammar.definition import check_whitespace

    try:
        check_whitespace(pattern)
    except RequestError as error:
        why = error.message.removeprefix(compile_refusal("regex"))
        raise ConfigError(f"--constrained-json-whitespace-pattern {pattern!r}: {why}.") from None


def _check_folder(flag: str, folder: Path) -> None:
    """Create the folder if it is missing. Raises ConfigError if nothing can be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{flag} {folder} cannot be created: {error.strerror}.") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag} {folder} is not writable.")
