"""Builds a runner: chooses implementations, builds the model and loads its weights.

It writes nothing to the log; its report says what was done.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from setpoint.core.cache_scales import LayerScales, scales_in_file
from setpoint.core.errors import ConfigError
from setpoint.core.expert_placement import Placement, first_placements
from setpoint.core.graph_sizes import NO_GRAPHS, GraphSizes
from setpoint.core.model import BLOCKS_INT8, INT8_KINDS, ROUNDED, W8A8, ModelSpec
from setpoint.core.plain_file import SETTINGS_MIB, read_plain
from setpoint.core.records import Fallback
from setpoint.engine.attention.attention_backend import (
    AttentionBackend,
    AttentionShape,
    choose_attention,
)
from setpoint.engine.attention.split_attention import SplitAttention
from setpoint.engine.executor.trial import check_logits
from setpoint.engine.kernels.cpu.build import is_emulated, why_no_better
from setpoint.engine.kernels.cpu.choices import summary
from setpoint.engine.kernels.cpu.library import load
from setpoint.engine.kernels.device import check_device, reading_is_free
from setpoint.engine.kernels.host_memory import noted_mappings, why_small_pages
from setpoint.engine.kernels.kernel_registry import ChosenKernel, choose_ops
from setpoint.engine.kernels.ops import Ops
from setpoint.engine.kernels.weight_file import WeightFile
from setpoint.engine.layers.context import (
    Backends,
    multiply,
    multiply_grouped,
    multiply_grouped_invariant,
    multiply_invariant,
)
from setpoint.engine.models.cache_scales import (
    CacheScales,
    number_of_scales,
    scales_in_folder,
    with_ranges,
)
from setpoint.engine.models.loader import load_weights
from setpoint.engine.models.model_registry import build_model, is_native
from setpoint.engine.models.transformers_model import load_transformers_model
from setpoint.engine.parallel.data_ranks import DataRanks, SameTokens
from setpoint.engine.parallel.group import ALONE, Group
from setpoint.engine.parallel.split import mixtures, rank_spec, split_model
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
    decode_attention_backend: str | None = None
    """Backend of decode steps; None: the same."""
    model_impl: str = "auto"
    """"setpoint", "transformers", or "auto": transformers only if Setpoint does not know the
    architecture."""
    num_threads: int = 0
    """Torch's CPU threads; 0 leaves the number to torch."""
    seed: int = 0
    """Seed of dummy weights."""
    capture: bool = True
    """Whether small steps are captured and replayed if possible (runner.replay_way)."""
    graph_sizes: GraphSizes = NO_GRAPHS
    """The sizes for which steps are captured on a device with graphs (runner.graph_way)."""
    ep_size: int = 1
    """Number of ranks that divide the experts, each expert whole: all ranks, or 1: every rank has
    a part of every expert."""
    ep_num_redundant_experts: int = 0
    """Slots for experts of a layer besides one for each."""
    init_expert_location: str = "trivial"
    """Which experts are in which slots at first: "trivial", or a file (``read_placements``)."""
    weights_folder: str = ""
    """Keep the weights in a file on the disk of this folder, mapped into memory, so that they can
    be let go and taken again at once (``kernels.weight_file``); "": in memory of their own."""
    quantization_param_path: str | None = None
    """A JSON file with the scales of a KV cache in fp8 (``core.cache_scales``); None: those of the
    checkpoint, if it has any."""
    moe_dense_tp_size: int | None = None
    """1: every rank has all of the MLPs that are not experts; None: they are divided."""
    invariant: bool = False
    """Whether, on a GPU, the bits of a token's results must depend on the tokens before it alone:
    neither on its batch nor on its chunk. What cannot promise it must be refused
    (``launch.child.loading``)."""


@dataclass(slots=True, frozen=True)
class _Chosen:
    """The implementations chosen for this machine."""

    ops: ChosenKernel[Ops]
    linear: ChosenKernel[LinearMethod]
    attention: ChosenKernel[AttentionBackend]

    def by_part(self) -> dict[str, ChosenKernel[Any]]:
        return {"kernels": self.ops, "linear layers": self.linear, "attention": self.attention}


def build_runner(
    config: EngineConfig, group: Group = ALONE, data: DataRanks | None = None
) -> ModelRunner:
    """A runner with its weights loaded; call ``allocate`` on it next. group: the ranks that compute
    the model. data: the engines that compute its experts together, if they are others. Raises
    CheckpointError, ConfigError or OutOfMemoryError."""
    data = data or SameTokens(group)
    begin = time.perf_counter()
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    spec, device = rank_spec(config.spec, group.rank, group.size), torch.device(config.device)
    check_device(device)
    chosen = _choose(config, spec, device)
    scales, about_scales = _cache_scales(config, group)
    native = config.model_impl == "setpoint" or (config.model_impl == "auto" and is_native(spec))
    weight_file = None
    with noted_mappings() as noted:
        model, weight_bytes = _load(config, native, device, chosen.linear.impl, data)
        model.take_cache_scales(scales)
        if config.weights_folder:
            weight_file = WeightFile(Path(config.weights_folder), model, noted)
    runner = ModelRunner(
        model=model,
        spec=spec,
        backends=_backends(config, chosen, group, data),
        page_size=config.page_size,
        dtype=_dtype(config.dtype),
        kv_dtype=_dtype(config.kv_dtype, KV_DTYPES),
        device=device,
        report=LoadReport(
            load_seconds=time.perf_counter() - begin,
            weight_bytes=weight_bytes,
            weights=_weights(model, config) if native else config.dtype,
            cache_scales=about_scales,
            experts=_experts(model, spec),
            model_impl="setpoint" if native else "transformers",
            ops=chosen.ops.name,
            linear=f"{chosen.linear.name}{', invariant' if config.invariant else ''}",
            attention=chosen.attention.name,
            level=_level(chosen),
            choices=summary(load().choices) if _level(chosen) else "",
            emulated=is_emulated(_level(chosen)),
            fallbacks=_fallbacks(config, native, chosen),
        ),
        capture=config.capture,
        weight_file=weight_file,
        graph_sizes=config.graph_sizes,
    )
    if not native:
        check_logits(runner)
    return runner


def _backends(config: EngineConfig, chosen: _Chosen, group: Group, data: DataRanks) -> Backends:
    products: tuple[Any, Any] = multiply, multiply_grouped
    if config.invariant and chosen.ops.name == "triton":
        products = multiply_invariant, multiply_grouped_invariant
    return Backends(chosen.ops.impl, chosen.attention.impl, *products, group, data)


def load_model(config: EngineConfig, runner: ModelRunner) -> nn.Module:
    """The model of ``config`` with weights loaded, for a runner whose configuration differs at most
    in the place of the weights. Raises CheckpointError, ConfigError or OutOfMemoryError."""
    linear = _choose(config, runner.spec, runner.device).linear.impl
    native = runner.report.model_impl == "setpoint"
    scales, _ = _cache_scales(config, runner.backends.group)
    model, _ = _load(config, native, runner.device, linear, runner.backends.data)
    model.take_cache_scales(scales)
    return model


def load_experts(
    config: EngineConfig, runner: ModelRunner, layer: int, placement: Placement
) -> None:
    """Load the experts that this rank needs for a placement in a layer (counted among those with
    experts) and does not hold. config: the runner's. Raises CheckpointError or OutOfMemoryError
    with nothing changed."""
    slots = mixtures(runner.model)[layer].expert_slots
    try:
        taken = slots.take(placement)
        method = _choose(config, runner.spec, runner.device).linear.impl
        how = _how(config, runner.device, method)
        load_weights(runner.model, config.model_folder, only=set(taken), **how)
    except BaseException:
        slots.drop()
        raise


def _cache_scales(config: EngineConfig, group: Group) -> tuple[LayerScales, str]:
    """(the scales of the KV cache, ``LoadReport.cache_scales``)."""
    folder = None if config.load_format == "dummy" else config.model_folder
    kind = _dtype(config.kv_dtype, KV_DTYPES)
    if kind.itemsize > 1:
        count = 0 if folder is None else number_of_scales(folder, config.spec)
        return {}, f"{count} are not used: a cache in {config.kv_dtype} needs none" if count else ""
    found = CacheScales() if folder is None else scales_in_folder(folder, config.spec)
    scales, origin = found.by_layer, "the checkpoint"
    if config.quantization_param_path is not None:
        origin = config.quantization_param_path
        scales = scales_in_file(
            origin,
            num_layers=config.spec.num_layers,
            rank=group.rank,
            num_ranks=group.size,
            model_type=config.spec.model_type,
        )
    largest = f"all are 1; K and V beyond {torch.finfo(kind).max:g} are cut off"
    said = f"{with_ranges(scales)} ({origin})" if scales else largest
    return scales, "; ".join((said, *found.notes()))


def about_cache_scales(config: EngineConfig) -> bytes:
    """What decides the scales of the KV cache on all ranks; empty: all are 1. Raises
    CheckpointError or OSError."""
    if _dtype(config.kv_dtype, KV_DTYPES).itemsize > 1:
        return b""
    if config.quantization_param_path is not None:
        return read_plain(config.quantization_param_path, SETTINGS_MIB)
    if config.load_format == "dummy":
        return b""
    scales = scales_in_folder(config.model_folder, config.spec).by_layer
    return repr(scales).encode() if scales else b""


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
        v_head_dim=spec.value_dim,
        invariant=config.invariant,
    )
    return _Chosen(
        choose_ops(device, dtype),
        choose_linear(device, dtype, config.quantization),
        _attention(config, shape),
    )


def _attention(config: EngineConfig, shape: AttentionShape) -> ChosenKernel[AttentionBackend]:
    chosen = choose_attention(config.attention_backend, shape)
    if config.decode_attention_backend is None:
        return chosen
    decode = choose_attention(config.decode_attention_backend, shape)
    return ChosenKernel(
        f"{chosen.name} and, for decode steps, {decode.name}",
        SplitAttention(chosen.impl, decode.impl),
        "; ".join(filter(None, (chosen.fallback, decode.fallback))),
    )


def _load(
    config: EngineConfig,
    native: bool,
    device: torch.device,
    method: LinearMethod,
    data: DataRanks,
) -> tuple[nn.Module, int]:
    """Returns (model, size of its weights in bytes)."""
    if not native and config.quantization in ROUNDED:
        raise ConfigError(
            f"--quantization {config.quantization} needs a model of Setpoint's own;"
            f" {config.spec.architecture} runs on transformers' model, where wrong answers cannot"
            " be distinguished from rounding errors."
        )
    if not native and data.experts.size > 1:
        raise ConfigError(
            f"--tp-size {data.experts.size} needs a model of Setpoint's own;"
            f" {config.spec.architecture} runs on transformers' model, which cannot be divided"
            " here."
        )
    how = _how(config, device, method)
    if not native:
        del how["exact"], how["blocks"], how["wrapped"], how["matrices"]
        return load_transformers_model(config.spec, config.model_folder, **how)
    model = build_model(config.spec)
    if data.experts.size > 1:
        placements = None if config.ep_size == 1 else _placements(config)
        split_model(
            model,
            data.experts,
            placements,
            whole_mlps=config.moe_dense_tp_size == 1,
            only_experts=data.size > 1,
        )
    weight_bytes = load_weights(model, config.model_folder, **how)
    for mixture in mixtures(model):
        mixture.expert_slots.count_on(device)
    return model, weight_bytes


def _how(config: EngineConfig, device: torch.device, method: LinearMethod) -> dict[str, Any]:
    """The arguments of ``load_weights``."""
    dtype = _dtype(config.dtype)
    # What w8a8_int8 rounds are the same values under every dtype.
    is_exact = dtype.itemsize >= 4 and config.quantization in (None, "unquant")
    return {
        "load_format": config.load_format,
        "dtype": dtype,
        "device": device,
        "method": method,
        "exact": choose_linear(device, dtype, None).impl,
        "blocks": choose_blocks(device, dtype, config.quantization),
        "seed": config.seed,
        "wrapped": bool(config.spec.wrapper),
        "matrices": config.spec.quantised,
        "values": torch.float32 if is_exact else torch.bfloat16,
    }


def _placements(config: EngineConfig) -> list[Placement]:
    mixture, redundant = config.spec.mixture, config.ep_num_redundant_experts
    if mixture is None:
        raise ConfigError(
            f"--ep-size {config.ep_size} needs a mixture of experts; {config.spec.architecture} has"
            " none."
        )
    return first_placements(
        config.init_expert_location,
        num_layers=len(mixture.layers),
        num_experts=mixture.num_experts,
        num_slots=mixture.num_experts + redundant,
        num_ranks=config.ep_size,
    )


def _weights(model: nn.Module, config: EngineConfig) -> str:
    kinds = Counter(
        module.blocks
        for module in model.modules()
        if hasattr(module, "keep_blocks") and not getattr(module, "is_elsewhere", False)
    )
    rounds = config.quantization == BLOCKS_INT8
    kept = [
        f"{count} {kind}{_in_bfloat16(kind) if rounds else ''}"
        for kind, count in sorted(kinds.items())
        if kind
    ]
    rest = config.quantization if config.quantization in ROUNDED else config.dtype
    how = ""
    if rounds:
        some = any(set(kind.split("+")) & (INT8_KINDS | {W8A8}) for kind in kinds)
        how = f", {'' if some else 'none of them '}multiplied by activations of 8 bits"
    whose = "blocks of the folder's codes" if config.spec.quantised else "the file's own blocks"
    text = f"{' and '.join(kept)} matrices in {whose}{how}, {kinds['']} in {rest}" if kept else rest
    notes: Counter[str] = getattr(model, "weight_notes", Counter())
    return "; ".join((text, *(f"{count} {note}" for note, count in notes.items() if count)))


def _in_bfloat16(kind: str) -> str:
    """Says which of a matrix's kinds of blocks --quantization blocks_int8 leaves in bfloat16."""
    wide = [each for each in kind.split("+") if each not in INT8_KINDS | {W8A8}]
    if not wide:
        return ""
    return " (in bfloat16)" if "+".join(wide) == kind else f" ({'+'.join(wide)} in bfloat16)"


def _experts(model: nn.Module, spec: ModelSpec) -> str:
    mixture, layers = spec.mixture, mixtures(model)
    if mixture is None or not layers:
        return ""
    text = (
        f"{mixture.num_experts} in each of {len(layers)} layers, {mixture.num_chosen} for a token"
    )
    slots = layers[0].expert_slots
    if slots.own is None:
        return text
    begin, end = slots.own
    return f"{text}; this rank has slots {begin} to {end - 1} of {len(slots.placement)}"


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
    found += dequantised_blocks(config, native)
    level = _level(chosen)
    if level and (why := why_no_better(level)):
        found.append(Fallback(f"C++ kernels run at the level {level}", why))
    if level and (why := why_small_pages()):
        why += "; reading them costs up to a fifth more"
        found.append(Fallback("weights lie in small pages", why))
    return tuple(found)


def dequantised_blocks(config: EngineConfig, native: bool) -> list[Fallback]:
    """What blocks cost that a GPU cannot multiply."""
    kept, device, dtype = config.spec.blocks, torch.device(config.device), _dtype(config.dtype)
    is_on_host = reading_is_free(device)  # where blocks are left out only if an option asks for it
    if not native or kept is None or is_on_host or config.quantization is not None:
        return []
    method = choose_blocks(device, dtype)
    if method is not None and method.kinds >= set(kept.kinds):
        return []
    wide = kept.num_parameters * dtype.itemsize
    return [
        Fallback(
            f"weights are dequantized to {config.dtype}",
            f"no product of this GPU takes {' and '.join(kept.kinds)}; they take"
            f" {wide / 1e9:.2f} GB instead of {kept.held_bytes / 1e9:.2f}",
        )
    ]


def _level(chosen: _Chosen) -> str:
    """The instruction set of the C++ kernels, which all come from one library; empty if none was
    chosen."""
    impls = (choice.impl for choice in chosen.by_part().values())
    return next((impl.level for impl in impls if hasattr(impl, "level")), "")


def _dtype(name: str, dtypes: Mapping[str, torch.dtype] = DTYPES) -> torch.dtype:
    if name not in dtypes:
        raise ConfigError(f"Unknown dtype {name!r}; choose one of {', '.join(dtypes)}.")
    return dtypes[name]
