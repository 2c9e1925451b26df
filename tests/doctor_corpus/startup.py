"""The lines of a server's start, per generation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deployments import Deployment
from generations import Generation, Style, Writer

FIRED_UP = "The server is fired up and ready to roll!"
_SIZES = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 513, 16), *range(544, 1025, 32)]


def server_args(deployment: Deployment, generation: Generation) -> str:
    """SGLang prints all options, Setpoint those that differ from the defaults. Here: those that
    matter for load and memory, in SGLang's order."""
    hardware, options = deployment.hardware, deployment.options
    shown: dict[str, Any] = {"model_path": hardware.model, "tokenizer_path": hardware.model}
    if generation == "setpoint":
        shown |= {"device": "cpu" if hardware.is_cpu else "cuda"}
        shown |= {"mem_fraction_static": deployment.mem_fraction} | options
    else:
        shown |= {
            "tokenizer_mode": "auto", "skip_tokenizer_init": False, "load_format": "auto",
            "trust_remote_code": False, "dtype": "auto", "kv_cache_dtype": "auto",
            "quantization": None, "context_length": options.get("context_length"),
            "device": "cpu" if hardware.is_cpu else "cuda", "served_model_name": hardware.model,
            "host": "0.0.0.0", "port": 30000, "mem_fraction_static": deployment.mem_fraction,
            "max_running_requests": options.get("max_running_requests"),
            "max_queued_requests": options.get("max_queued_requests"),
            "max_total_tokens": options.get("max_total_tokens"),
            "chunked_prefill_size": deployment.chunked_prefill_size,
            "max_prefill_tokens": deployment.max_prefill_tokens,
            "schedule_policy": options.get("schedule_policy", "fcfs"),
            "schedule_conservativeness": options.get("schedule_conservativeness", 1.0),
            "cpu_offload_gb": 0, "page_size": 1, "tp_size": hardware.tp, "stream_interval": 1,
            "random_seed": 42 + hardware.tp, "watchdog_timeout": 300, "log_level": "info",
            "decode_log_interval": 40, "dp_size": options.get("dp_size", 1),
            "load_balance_method": "round_robin", "ep_size": 1, "attention_backend": None,
            "disable_radix_cache": options.get("disable_radix_cache", False),
            "disable_cuda_graph": options.get("disable_cuda_graph", False),
            "cuda_graph_max_bs": options.get("cuda_graph_max_bs"), "enable_torch_compile": False,
            "enable_mixed_chunk": False, "enable_dp_attention": False,
        }  # fmt: skip
        if generation == "sglang-2024":
            for name in ("max_queued_requests", "page_size", "kv_cache_dtype"):
                shown.pop(name, None)
    return (
        f"server_args=ServerArgs({', '.join(f'{key}={value!r}' for key, value in shown.items())})"
    )


def ready(deployment: Deployment, generation: Generation) -> str:
    tokens, chunk = deployment.max_total_num_tokens, deployment.chunked_prefill_size
    sizes = (
        f"max_prefill_tokens={deployment.max_prefill_tokens},"
        f" max_running_requests={deployment.max_running_requests},"
        f" context_len={deployment.context_len}"
    )
    if generation == "sglang-2024":
        return f"max_total_num_tokens={tokens}, {sizes}"
    label = "available_cpu_mem" if deployment.hardware.is_cpu else "available_gpu_mem"
    return (
        f"max_total_num_tokens={tokens}, chunked_prefill_size={chunk}, {sizes},"
        f" {label}={deployment.available_gb:.2f} GB"
    )


def start_up(
    deployment: Deployment,
    generation: Generation,
    style: Style,
    writer: Writer,
    *,
    upto: str = "fired up",
    took_s: float = 40.0,
) -> Iterator[str]:
    """``upto``: the last line begins with this or contains it."""
    for share, rank, message in _messages(deployment, generation, style.rank):
        at = -took_s * (1 - share)
        if message.startswith(("INFO: ", "Loading safetensors", "Capturing batches", "  0%")):
            yield writer.bare(at, message)
        else:
            yield writer.stamped(at, rank, message)
        if upto in message:
            return


def _messages(
    deployment: Deployment, generation: Generation, rank: str
) -> Iterator[tuple[float, str, str]]:
    hardware = deployment.hardware
    yield 0.0, "", server_args(deployment, generation)
    if generation == "setpoint":
        yield 0.5, rank, _loaded(deployment, "elapsed=1.93 s, ")
        half = f"{deployment.kv_gb / 2:.2f}"
        tokens = deployment.max_total_num_tokens
        yield (
            0.8,
            rank,
            f"KV Cache is allocated. dtype: bfloat16, #tokens: {tokens}, K size: {half} GB, V size:"
            f" {half} GB",
        )
        yield 0.9, rank, ready(deployment, generation)
        yield 1.0, "", FIRED_UP
        return
    yield 0.1, rank, "Init torch distributed begin."
    yield 0.15, rank, f"Load weight begin. avail mem={hardware.total_gb:.2f} GB"
    yield 0.2, "", "Loading safetensors checkpoint shards:   0% Completed | 0/4 [00:00<?, ?it/s]"
    yield (
        0.3,
        "",
        "Loading safetensors checkpoint shards: 100% Completed | 4/4 [00:05<00:00,  1.34s/it]",
    )
    yield 0.4, rank, _loaded(deployment, "")
    if generation != "sglang-2024":
        half = f"{deployment.kv_gb / 2:.2f}"
        dtype = "dtype: torch.bfloat16, " if generation == "sglang-0.5.23" else ""
        tokens = deployment.max_total_num_tokens
        yield (
            0.5,
            rank,
            f"KV Cache is allocated. {dtype}#tokens: {tokens}, K size: {half} GB, V size: {half} GB",
        )
    yield 0.55, rank, f"Memory pool end. avail mem={deployment.after_pool_gb:.2f} GB"
    if not hardware.is_cpu and deployment.graph_max_bs:
        yield from _capture(deployment, generation, rank)
    yield 0.9, rank, ready(deployment, generation)
    if generation == "sglang-2024" or rank == "":
        yield 0.95, "", "INFO:     Started server process [1]"
        yield 0.95, "", "INFO:     Application startup complete."
        yield 0.96, "", "INFO:     Uvicorn running on http://0.0.0.0:30000 (Press CTRL+C to quit)"
    yield 1.0, "", FIRED_UP


def _loaded(deployment: Deployment, elapsed: str) -> str:
    hardware = deployment.hardware
    dtype = "" if elapsed else "dtype=torch.bfloat16, "
    return (
        f"Load weight end. {elapsed}type={hardware.architecture}, {dtype}avail"
        f" mem={deployment.after_load_gb:.2f} GB, mem usage={hardware.weights_gb:.2f} GB."
    )


def _capture(
    deployment: Deployment, generation: Generation, rank: str
) -> Iterator[tuple[float, str, str]]:
    most, left = deployment.graph_max_bs, f"{deployment.after_pool_gb:.2f}"
    sizes = [*(size for size in _SIZES if size < most), most]
    used = f"{deployment.graph_gb:.2f}"
    if generation == "sglang-0.5.23":
        yield (
            0.6,
            rank,
            f"Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, avail"
            f" mem={left} GB",
        )
        yield (
            0.85,
            rank,
            f"Capture target decode CUDA graph end. bs={sizes}, elapsed=9.41 s, mem usage={used}"
            f" GB, avail mem={deployment.available_gb:.2f} GB.",
        )
        return
    tail = "" if generation == "sglang-2024" else f" avail mem={left} GB"
    yield 0.6, rank, f"Capture cuda graph begin. This can take up to several minutes.{tail}"
    if generation == "sglang-2025":
        yield 0.6, rank, f"Capture cuda graph bs {sizes}"
        bar = f"Capturing batches (bs=1 avail_mem={left} GB): 100%|██████████|"
        yield 0.84, "", f"{bar} {len(sizes)}/{len(sizes)} [00:08<00:00,  2.59it/s]"
        yield (
            0.85,
            rank,
            f"Capture cuda graph end. Time elapsed: 9.41 s. mem usage={used} GB. avail"
            f" mem={deployment.available_gb:.2f} GB.",
        )
