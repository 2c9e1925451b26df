"""A model, two machines, and resolution in one call, for the tests of it."""

from __future__ import annotations

from typing import Any

from setpoint.config.decisions import Decision
from setpoint.config.hardware import Hardware
from setpoint.config.options import Options
from setpoint.config.pool import PoolConfig
from setpoint.config.resolve import resolve
from setpoint.config.resolved import ResolvedConfig
from setpoint.core.model import ModelSpec
from setpoint.planning.memory import GIB

SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    model_type="llama",
    num_layers=30,
    hidden_size=576,
    intermediate_size=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=49152,
    context_len=8192,
    tie_embeddings=True,
    dtype="bfloat16",
    num_parameters=134_515_008,
)
"""The default model, SmolLM2-135M-Instruct."""
CPU = Hardware(device="cpu", num_cores=2, available_bytes=20 * GIB)
GPU = Hardware(device="cuda", num_cores=16, available_bytes=100 * GIB, gpu_bytes=80 * GIB)


def decide(
    options: Options | None = None, hardware: Hardware = CPU, spec: ModelSpec = SPEC, **more: Any
) -> ResolvedConfig:
    return resolve(options or Options(), hardware, spec, **more)


def reason(config: ResolvedConfig | PoolConfig, field: str) -> Decision:
    (decision,) = (decision for decision in config.decisions if decision.field == field)
    return decision
