"""Checks that this machine has the memory for a model, before anything of it is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from setpoint.config.live_changes import ConfigInputs
from setpoint.config.pool import memory_model
from setpoint.config.resolved import ResolvedConfig
from setpoint.core.errors import ConfigError, OutOfMemoryError
from setpoint.core.model import ModelSpec
from setpoint.planning.fit import Choices, check_fit
from setpoint.planning.memory import MemoryModel, format_bytes, graph_bytes


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
    if not on_cpu:
        _check_graphs(asked, config, free)
    page = (
        memory_model(config, model).spec.kv_bytes_per_token(config.kv_element_bytes)
        * config.page_size
    )
    if on_cpu and page > free:
        raise OutOfMemoryError(
            f"--page-size {config.page_size} is too large: one page of KV cache would"
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
            divided=() if on_cpu else tuple(_divided(model, config)),
        ),
        num_ranks=options.parallel.ranks_per_engine // options.parallel.nnodes if on_cpu else 1,
    )


def _check_graphs(asked: ConfigInputs, config: ResolvedConfig, gpu_bytes: int) -> None:
    """Raise ConfigError for sizes of graphs that were asked for and that never run, or that have no
    room besides weights and KV cache."""
    graphs, running = asked.options.graphs, asked.options.scheduling.max_running_requests
    rows = max((graphs.cuda_graph_max_bs_decode or 0, *graphs.cuda_graph_bs_decode))
    if running is not None and rows > running:
        raise ConfigError(
            f"graphs of decode steps were asked for up to {rows} requests, of which"
            f" --max-running-requests lets {running} run at a time; lower"
            f" --cuda-graph-max-bs-decode to {running}, or raise --max-running-requests."
        )
    sizes, needed = config.graph_sizes, graph_bytes(config.graph_sizes)
    left = round(gpu_bytes * (1 - config.mem_fraction_static))
    asked_for = rows or graphs.cuda_graph_max_bs_prefill or graphs.cuda_graph_bs_prefill
    if asked_for and needed > left:
        raise ConfigError(
            f"graphs of up to {max(sizes.rows, default=0)} requests and of"
            f" {len(sizes.tokens)} sizes of prompt steps take about {format_bytes(needed)}, and"
            f" --mem-fraction-static {config.mem_fraction_static:g} of {format_bytes(gpu_bytes)}"
            f" leaves {format_bytes(left)} for them; lower it, or ask for smaller or fewer sizes."
        )


def _divided(model: ModelSpec, config: ResolvedConfig) -> Iterator[tuple[str, MemoryModel]]:
    """The memory models of the ranks of this model on more GPUs."""
    for size in model.rank_counts:
        if size > config.options.parallel.tp_size:
            options = config.options.replace(tp_size=size)
            yield (
                f"--tp-size {size} on {size} such GPUs",
                memory_model(replace(config, options=options), model),
            )
