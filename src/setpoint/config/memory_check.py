"""Checks that this machine has the memory for a model, before anything of it is loaded."""

from __future__ import annotations

from setpoint.config.live_changes import ConfigInputs
from setpoint.config.pool import memory_model
from setpoint.config.resolved import ResolvedConfig
from setpoint.core.errors import ConfigError, OutOfMemoryError
from setpoint.planning.fit import Choices, check_fit
from setpoint.planning.memory import format_bytes


def require_memory(
    asked: ConfigInputs, config: ResolvedConfig, *, name: str, is_counted: bool, in_gguf: bool
) -> None:
    """Raise OutOfMemoryError if the model and at least one page of KV cache do not fit into the
    memory that is free before the weights are loaded. is_counted: whether the number of the model's
    parameters is exact (see ``check_fit``). in_gguf: whether models of this architecture are
    served from GGUF files."""
    model, options = asked.model, config.options
    on_cpu = options.execution.device == "cpu"
    free = asked.hardware.available_bytes if on_cpu else asked.hardware.gpu_bytes
    if free is None:  # the size of the GPU is not known; the engine will see
        return
    if options.parallel.engine_standby:
        if not on_cpu:
            raise ConfigError("--engine-standby does not work on GPUs; leave it out.")
        free -= memory_model(config, model).weights()
    page = (
        memory_model(config, model).spec.kv_bytes_per_token(config.kv_element_bytes)
        * options.memory.page_size
    )
    if on_cpu and page > free:
        raise OutOfMemoryError(
            f"--page-size {options.memory.page_size} is too large: one page of KV cache would"
            f" take {format_bytes(page)}, and only {format_bytes(free)} are free. Lower it."
        )
    check_fit(
        memory_model(config, model),
        free,
        name=name,
        is_counted=is_counted,
        choices=Choices(
            int8=on_cpu and options.model.model_impl != "transformers",
            gguf=on_cpu and in_gguf,
            blocks=on_cpu and options.model.model_impl != "transformers",
        ),
        num_ranks=options.parallel.ranks_per_engine // options.parallel.nnodes if on_cpu else 1,
    )
