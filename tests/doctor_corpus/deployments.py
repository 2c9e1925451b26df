"""Servers that the corpus simulates: a model on a device, the server's options, and what follows
from them by the arithmetic of SGLang's memory planning."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from setpoint.core.settings import Settings
from setpoint_testing.simulated import CostModel, Engine

GIB = 1 << 30
RUNTIME_GB = 0.6
"""What a process takes of a GPU besides weights, pool and graphs."""


@dataclass(slots=True, frozen=True)
class Hardware:
    """A model on one kind of device. Costs are of the whole tensor-parallel group."""

    model: str
    architecture: str
    device: str
    total_gb: float
    """The memory of one device that is free before the weights are loaded."""
    weights_gb: float
    """The weights on one device."""
    kv_bytes: int
    """The cache of one token on one device."""
    costs: CostModel
    context_len: int
    tp: int = 1
    is_cpu: bool = False


def gpu(weights_ms: float, token_us: float, kv_ns: float, *, eager_ms: float = 12.0) -> CostModel:
    return CostModel(
        weights_s=weights_ms / 1e3,
        token_s=token_us / 1e6,
        kv_token_s=kv_ns / 1e9,
        eager_s=eager_ms / 1e3,
    )


LLAMA = "LlamaForCausalLM"
LLAMA_8B = "meta-llama/Llama-3.1-8B-Instruct"
H100 = Hardware(LLAMA_8B, LLAMA, "H100", 78.7, 15.1, 131072, gpu(5.5, 28, 44), 131072)
H200 = Hardware(
    "Qwen/Qwen2.5-14B-Instruct", "Qwen2ForCausalLM", "H200", 139.3, 27.8, 196608,
    gpu(7.5, 48, 45), 32768,
)  # fmt: skip
L40S = Hardware(LLAMA_8B, LLAMA, "L40S", 44.0, 15.1, 131072, gpu(19, 80, 160), 131072)
A10G = Hardware(LLAMA_8B, LLAMA, "A10G", 21.9, 15.1, 131072, gpu(27, 230, 220), 131072)
RTX_4090 = Hardware(
    "Qwen/Qwen2.5-7B-Instruct", "Qwen2ForCausalLM", "RTX 4090", 23.1, 14.3, 57344,
    gpu(16, 100, 60), 32768,
)  # fmt: skip
T4 = Hardware(
    "Qwen/Qwen2.5-1.5B-Instruct", "Qwen2ForCausalLM", "T4", 14.6, 2.9, 28672,
    gpu(11, 75, 95), 32768,
)  # fmt: skip
H100_TP4 = Hardware(
    "meta-llama/Llama-3.3-70B-Instruct", LLAMA, "4 x H100", 78.4, 33.0, 81920,
    gpu(15, 80, 27, eager_ms=25), 131072, tp=4,
)  # fmt: skip
A100_TP2 = Hardware(
    "Qwen/Qwen2.5-32B-Instruct", "Qwen2ForCausalLM", "2 x A100", 78.6, 30.7, 131072,
    gpu(21, 120, 66, eager_ms=20), 32768, tp=2,
)  # fmt: skip
A10G_TP4 = Hardware(
    "meta-llama/Llama-3.3-70B-Instruct-AWQ", LLAMA, "4 x A10G", 21.9, 9.9, 81920,
    gpu(35, 560, 135, eager_ms=25), 131072, tp=4,
)  # fmt: skip
CPU = Hardware(
    "HuggingFaceTB/SmolLM2-135M-Instruct", LLAMA, "CPU", 8.46, 0.09, 23040,
    gpu(9, 700, 60, eager_ms=0), 8192, is_cpu=True,
)  # fmt: skip
CPU_SERVER = Hardware(
    "Qwen/Qwen3-0.6B", "Qwen3ForCausalLM", "CPU", 58.2, 1.5, 114688,
    gpu(28, 500, 260, eager_ms=0), 40960, is_cpu=True,
)  # fmt: skip


@dataclass(slots=True, frozen=True)
class Deployment:
    """A server: hardware and the options that its operator gave, by field name of SGLang's server
    args."""

    hardware: Hardware
    options: dict[str, Any] = field(default_factory=dict)
    graph_gb: float = 0.7
    pool_tokens: int | None = None
    """Instead of what follows from the memory."""
    limited_running: int | None = None
    """What the server lowered ``max_running_requests`` to when it started."""

    @property
    def mem_fraction(self) -> float:
        return float(self.options.get("mem_fraction_static", 0.8 if self.hardware.is_cpu else 0.86))

    @property
    def max_total_num_tokens(self) -> int:
        if self.pool_tokens is not None:
            return self.pool_tokens
        hardware = self.hardware
        rest_gb = hardware.total_gb * self.mem_fraction - hardware.weights_gb
        if hardware.is_cpu:
            rest_gb /= 4  # a CPU's pool takes a part of what is free
        tokens = int(rest_gb * GIB / hardware.kv_bytes)
        return min(tokens, self.options.get("max_total_tokens") or tokens)

    @property
    def kv_gb(self) -> float:
        return self.max_total_num_tokens * self.hardware.kv_bytes / GIB

    @property
    def after_load_gb(self) -> float:
        return self.hardware.total_gb - self.hardware.weights_gb - RUNTIME_GB

    @property
    def after_pool_gb(self) -> float:
        return self.after_load_gb - self.kv_gb

    @property
    def available_gb(self) -> float:
        graphs = 0.0 if self.hardware.is_cpu else self.graph_gb
        return self.after_pool_gb - graphs

    @property
    def context_len(self) -> int:
        return int(self.options.get("context_length") or self.hardware.context_len)

    @property
    def max_running_requests(self) -> int:
        if self.limited_running is not None:
            return self.limited_running
        tokens = self.max_total_num_tokens
        default = min(max(int(tokens / self.context_len * 512), 2048), 4096)
        wanted = self.options.get("max_running_requests") or default
        return min(int(wanted), tokens // 2)

    @property
    def chunked_prefill_size(self) -> int:
        small = (
            2048 if self.hardware.total_gb < 35 else 4096 if self.hardware.total_gb < 60 else 8192
        )
        default = 512 if self.hardware.is_cpu else small
        return int(self.options.get("chunked_prefill_size", default))

    @property
    def max_prefill_tokens(self) -> int:
        return int(self.options.get("max_prefill_tokens", 16384))

    @property
    def graph_max_bs(self) -> int:
        if self.options.get("disable_cuda_graph"):
            return 0
        return int(self.options.get("cuda_graph_max_bs") or (4096 if self.hardware.is_cpu else 256))

    def engine(self) -> Engine:
        options = self.options
        chunk = self.chunked_prefill_size
        settings = Settings(
            max_running_requests=self.max_running_requests,
            policy=options.get("schedule_policy", "fcfs"),
            chunked_prefill_size=chunk if chunk > 0 else None,
            max_prefill_tokens=self.max_prefill_tokens,
            conservativeness=options.get("schedule_conservativeness", 1.0),
            max_queued_requests=options.get("max_queued_requests"),
        )
        return Engine(
            costs=self.hardware.costs,
            pool_tokens=self.max_total_num_tokens,
            context_len=self.context_len,
            settings=settings,
            graph_max_rows=self.graph_max_bs,
            prefix_cache=not options.get("disable_radix_cache", False),
        )
