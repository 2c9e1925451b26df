"""Builds a runner: chooses implementations, builds the model and loads its weights.

It writes nothing to the log; its report says what was done.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from setpoint.core.errors import ConfigError
from setpoint.core.model import ModelSpec
from setpoint.core.records import Fallback
from setpoint.engine.attention.attention_backend import (
    AttentionBackend,
    AttentionShape,
    choose_attention,
)
from setpoint.engine.executor.trial import check_logits
from setpoint.engine.kernels.cpu.build import is_emulated, why_no_better
from setpoint.engine.kernels.cpu.choices import summary
from setpoint.engine.kernels.cpu.library import load
from setpoint.engine.kernels.device import check_device
from setpoint.engine.kernels.host_memory import why_small_pages
from setpoint.engine.kernels.kernel_registry import Choice, choose_ops
from setpoint.engine.kernels.ops import Ops
from setpoint.engine.layers.context import Backends, multiply, multiply_grouped
from setpoint.engine.models.loader import load_weights
from setpoint.engine.models.model_registry import build_model, is_native
from setpoint.engine.models.transformers_model import load_transformers_model
from setpoint.engine.parallel.group import ALONE, Group
from setpoint.engine.parallel.split import rank_spec, split_model
from setpoint.engine.quant.linear_method import LinearMethod, choose_blocks, choose_linear
from setpoint.engine.runner.model_runner import LoadReport, ModelRunner

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
KV_DTYPES = {**DTYPES, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@dataclass(slots=True, frozen=True)
class EngineConfig:
    """The data plane's whole configuration. Values are already resolved: "auto" remains only where
    the engine's tables of implementations decide."""

    model_folder: str
    """Folder with safetensors files; not read for load_format "dummy"."""
    spec: ModelSpec
    load_format: str = "auto"
    dtype: str = "bfloat16"
    """Dtype of weights and activations: one of DTYPES."""
    quantization: str | None = None
    """Quantization method; None keeps the weights as they are in the checkpoint."""
    kv_dtype: str = "bfloat16"
    """Dtype of the KV cache: one of KV_DTYPES."""
    device: str = "cpu"
    page_size: int = 1
    attention_backend: str = "auto"
    model_impl: str = "auto"
    """"setpoint", "transformers", or "auto": transformers only if Setpoint does not know the
    architecture."""
    num_threads: int = 0
    """Torch's CPU threads; 0 leaves the number to torch."""
    seed: int = 0
    """Seed of dummy weights."""
    capture: bool = True
    """Whether small steps are captured and replayed if possible (runner.replay_way)."""


@dataclass(slots=True, frozen=True)
class _Chosen:
    """The implementations chosen for this machine."""

    ops: Choice[Ops]
    linear: Choice[LinearMethod]
    attention: Choice[AttentionBackend]

    def by_part(self) -> dict[str, Choice[Any]]:
        return {"kernels": self.ops, "linear layers": self.linear, "attention": self.attention}


def build_runner(config: EngineConfig, group: Group = ALONE) -> ModelRunner:
    """A runner with its weights loaded; call ``allocate`` on it next. group: the ranks that compute
    the model. Raises CheckpointError, ConfigError or OutOfMemoryError."""
    begin = time.perf_counter()
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    spec, device = rank_spec(config.spec, group.rank, group.size), torch.device(config.device)
    check_device(device)
    chosen = _choose(config, spec, device)
    native = config.model_impl == "setpoint" or (config.model_impl == "auto" and is_native(spec))
    model, weight_bytes = _load(config, native, device, chosen.linear.impl, group)
    runner = ModelRunner(
        model=model,
        spec=spec,
        backends=Backends(
            chosen.ops.impl, chosen.attention.impl, multiply, multiply_grouped, group
        ),
        page_size=config.page_size,
        dtype=_dtype(config.dtype),
        kv_dtype=_dtype(config.kv_dtype, KV_DTYPES),
        device=device,
        report=LoadReport(
            load_seconds=time.perf_counter() - begin,
            weight_bytes=weight_bytes,
            weights=_weights(model, config) if native else config.dtype,
            model_impl="setpoint" if native else "transformers",
            ops=chosen.ops.name,
            linear=chosen.linear.name,
            attention=chosen.attention.name,
            level=_level(chosen),
            choices=summary(load().choices) if _level(chosen) else "",
            emulated=is_emulated(_level(chosen)),
            fallbacks=_fallbacks(config, native, chosen),
        ),
        capture=config.capture,
    )
    if not native:
        check_logits(runner)
    return runner


def load_model(config: EngineConfig, runner: ModelRunner) -> nn.Module:
    """The model of ``config`` with weights loaded, for a runner whose configuration differs at most
    in the place of the weights. Raises CheckpointError, ConfigError or OutOfMemoryError."""
    linear = _choose(config, runner.spec, runner.device).linear.impl
    native, group = runner.report.model_impl == "setpoint", runner.backends.group
    model, _ = _load(config, native, runner.device, linear, group)
    return model


def _choose(config: EngineConfig, spec: ModelSpec, device: torch.device) -> _Chosen:
    dtype = _dtype(config.dtype)
    shape = AttentionShape(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        page_size=config.page_size,
        dtype=dtype,
        kv_dtype=_dtype(config.kv_dtype, KV_DTYPES),
        device=device,
    )
    return _Chosen(
        choose_ops(device, dtype),
        choose_linear(device, dtype, config.quantization),
        choose_attention(config.attention_backend, shape),
    )


def _load(
    config: EngineConfig, native: bool, device: torch.device, method: LinearMethod, group: Group
) -> tuple[nn.Module, int]:
    """Returns (model, size of its weights in bytes)."""
    if not native and config.quantization == "w8a8_int8":
        raise ConfigError(
            "--quantization w8a8_int8 needs a model of Setpoint's own;"
            f" {config.spec.architecture} runs on transformers' model, where wrong answers cannot"
            " be distinguished from rounding errors."
        )
    if not native and group.size > 1:
        raise ConfigError(
            f"--tp-size {group.size} needs a model of Setpoint's own; {config.spec.architecture}"
            " runs on transformers' model, which cannot be divided here."
        )
    load = (
        partial(_load_native, quantization=config.quantization, group=group)
        if native
        else load_transformers_model
    )
    return load(
        config.spec,
        config.model_folder,
        load_format=config.load_format,
        dtype=_dtype(config.dtype),
        device=device,
        method=method,
        seed=config.seed,
    )


def _load_native(
    spec: ModelSpec,
    folder: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str | None,
    group: Group,
    **how: Any,
) -> tuple[nn.Module, int]:
    model = build_model(spec)
    if group.size > 1:
        split_model(model, group)
    blocks = choose_blocks(device, dtype) if quantization is None else None
    return model, load_weights(
        model,
        folder,
        wrapped=bool(spec.wrapper),
        dtype=dtype,
        device=device,
        exact=choose_linear(device, dtype, None).impl,
        blocks=blocks,
        **how,
    )


def _weights(model: nn.Module, config: EngineConfig) -> str:
    kinds = Counter(module.blocks for module in model.modules() if hasattr(module, "keep_blocks"))
    kept = [f"{count} {kind}" for kind, count in sorted(kinds.items()) if kind]
    rest = config.quantization if config.quantization == "w8a8_int8" else config.dtype
    return (
        f"{' and '.join(kept)} matrices in the GGUF's own blocks, {kinds['']} in {rest}"
        if kept
        else rest
    )


def _fallbacks(config: EngineConfig, native: bool, chosen: _Chosen) -> tuple[Fallback, ...]:
    """A Fallback for every part that does not run in its best implementation."""
    found = [
        Fallback(f"{what} uses {choice.name}", choice.fallback)
        for what, choice in chosen.by_part().items()
        if choice.fallback
    ]
    if not native and config.model_impl == "auto":
        architecture = config.spec.architecture
        why = f"Setpoint has no model of its own for {architecture}, which would be faster"
        found.insert(0, Fallback("model uses transformers", why))
    level = _level(chosen)
    if level and (why := why_no_better(level)):
        found.append(Fallback(f"C++ kernels run at the level {level}", why))
    if level and (why := why_small_pages()):
        why += "; reading them costs up to a fifth more"
        found.append(Fallback("weights lie in small pages", why))
    return tuple(found)


def _level(chosen: _Chosen) -> str:
    """The instruction set of the C++ kernels, which all come from one library; empty if none was
    chosen."""
    impls = (choice.impl for choice in chosen.by_part().values())
    return next((impl.level for impl in impls if hasattr(impl, "level")), "")


def _dtype(name: str, dtypes: Mapping[str, torch.dtype] = DTYPES) -> torch.dtype:
    if name not in dtypes:
        raise ConfigError(f"Unknown dtype {name!r}; choose one of {', '.join(dtypes)}.")
    return dtypes[name]
