"""Finds what is wrong before anything is started or loaded: missing files that options name,
missing devices that they ask for. It takes milliseconds."""

from __future__ import annotations

import os
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

from setpoint.checkpoint.source import ModelSource
from setpoint.config.groups.traces import otlp_url
from setpoint.config.hardware import available_bytes, why_no_cuda
from setpoint.config.live import Asked
from setpoint.config.options import Options
from setpoint.config.pool import memory_model
from setpoint.config.resolved import ResolvedConfig
from setpoint.core.errors import CheckpointError, ConfigError, OutOfMemoryError
from setpoint.core.weightfiles import weight_files
from setpoint.planning.fit import Choices, check_fit
from setpoint.planning.memory import format_bytes

GGUF_FAMILY = "LlamaForCausalLM"
"""The architecture that is served from GGUF files (``checkpoint.gguf_convert``)."""
OTLP_MODULE = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


def preflight(options: Options) -> None:
    """Raises ConfigError, RecordingError for a recording that cannot be made, or CheckpointError
    for a chat template that cannot be compiled. What only few starts need is imported on use."""
    if options.execution.device == "cuda" and (why := why_no_cuda()):
        raise ConfigError(
            f"--device cuda was asked for, but {why}; use --device cpu, or leave it out."
        )
    if options.recording.record is not None:
        from setpoint.recording.segments import check_new

        check_new(Path(options.recording.record))
    if options.metrics.export_metrics_to_file:
        assert options.metrics.export_metrics_to_file_dir is not None, "check_metrics refuses it"
        _check_folder(
            "--export-metrics-to-file-dir", Path(options.metrics.export_metrics_to_file_dir)
        )
    if options.traces.enable_trace:
        otlp_url(options.traces.otlp_traces_endpoint)
        _check_extra("--enable-trace", "trace", "opentelemetry.sdk.trace", OTLP_MODULE)
    if options.execution.grammar_backend == "xgrammar":
        # It imports the two others, and can be installed without them.
        _check_extra(
            "--grammar-backend xgrammar", "xgrammar", "xgrammar", "tvm_ffi", "transformers"
        )
    if options.model.chat_template is not None:
        _check_template(options.model.chat_template)


def _check_template(path: str) -> None:
    """Raise CheckpointError if the template in a file cannot be compiled or exceeds a limit. It
    runs in its own process even here: what it computes may take for ever."""
    from setpoint.frontend.text.template_process import TemplateProcess
    from setpoint.frontend.text.template_source import find_chat_template

    source = find_chat_template("", override=path) or ""
    try:
        template = TemplateProcess(source)
    except CheckpointError as error:
        raise CheckpointError(f"--chat-template {path}: {error}") from None
    with closing(template):
        if (limit := template.exceeded()) is not None:
            raise CheckpointError(f"--chat-template {path} cannot be used: {limit}.")


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


def check_room(config: ResolvedConfig, asked: Asked, source: ModelSource) -> None:
    """Raises OutOfMemoryError if the model cannot fit, or not even one page of KV cache, into the
    memory that is free before the weights are loaded."""
    model, options = asked.model, config.options
    on_cpu = options.execution.device == "cpu"
    free = available_bytes() if on_cpu else asked.hardware.gpu_bytes
    if free is None:  # the size of the GPU is not known; the engine will see
        return
    page = model.kv_bytes_per_token(config.kv_element_bytes) * options.memory.page_size
    if on_cpu and page > free:
        raise OutOfMemoryError(
            f"--page-size {options.memory.page_size} is too large: one page of KV cache would take"
            f" {format_bytes(page)}, and {format_bytes(free)} are free."
        )
    check_fit(
        memory_model(config, model),
        free,
        name=source.name,
        is_stored=bool(weight_files(source.folder)),
        choices=Choices(
            int8=on_cpu and options.model.model_impl != "transformers",
            gguf=on_cpu and model.architecture == GGUF_FAMILY,
        ),
    )
