"""The scales of a KV cache in fp8: found in a checkpoint or a file, checked, and given to the
attention of a model (``core.cache_scales``)."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from setpoint.core.cache_scales import LayerScales, is_scale, place_of
from setpoint.core.errors import CheckpointError
from setpoint.core.model import ModelSpec
from setpoint.core.quantised import KEY
from setpoint.engine.models.stored_tensors import StoredTensor
from setpoint.engine.models.weight_sources import CheckpointFiles

WHY_UNUSED = {
    "q": "queries are not rounded",
    "prob": "probabilities are not rounded",
    "v": "the values of latent attention are a part of its keys and have their scale",
}


@dataclass(slots=True, frozen=True)
class CacheScales:
    """The scales that a checkpoint has for the KV cache."""

    by_layer: LayerScales = field(default_factory=dict)
    """Empty: it has none."""
    unused: Mapping[str, int] = field(default_factory=dict)
    """What has scales that nothing here uses (``Place.part``) -> in how many layers."""

    def notes(self) -> list[str]:
        """What is not used, and why, in words."""
        return [
            f"{part}_scale of {count} layers is not used: {WHY_UNUSED[part]}"
            for part, count in sorted(self.unused.items())
        ]


def with_ranges(scales: LayerScales) -> str:
    """The ranges of the scales, in words."""
    ranges = []
    for name, values in zip("kv", zip(*scales.values(), strict=True), strict=True):
        least, most = (f"{each:g}" for each in (min(values), max(values)))
        ranges.append(f"{name} {least}" if least == most else f"{name} {least} to {most}")
    return f"{', '.join(ranges)} in {len(scales)} layers"


def number_of_scales(folder: str, spec: ModelSpec) -> int:
    """The number of tensors in the safetensors files of a folder that are scales of the KV cache,
    good or bad."""
    with ExitStack() as stack:
        return len(_tensors(folder, spec, stack))


def scales_in_folder(folder: str, spec: ModelSpec) -> CacheScales:
    """The scales in the safetensors files of a folder. Raises CheckpointError for scales of another
    kind than one number for K and one for V of each layer, and where a layer has none and others
    do."""
    with ExitStack() as stack:
        found = _by_part(_tensors(folder, spec, stack), spec)
    if found:
        _check_scheme(spec, folder)
    unused = Counter(part for parts in found.values() for part in parts if part in ("q", "prob"))
    scales = {}
    for layer, parts in found.items():
        k, v = (parts.get(part, parts.get("kv")) for part in ("k", "v"))
        if spec.latent is not None:
            unused["v"] += "v" in parts
            v = k
        if k is not None and v is not None:
            scales[layer] = k, v
        elif not (k is v is None):
            _lacks(folder, "k" if k is None else "v", layer)
    for layer in range(spec.num_layers):
        if scales and layer not in scales:
            _lacks(folder, "k", layer)
    return CacheScales(dict(sorted(scales.items())), {k: n for k, n in unused.items() if n})


def _tensors(folder: str, spec: ModelSpec, stack: ExitStack) -> Mapping[str, StoredTensor]:
    return CheckpointFiles(Path(folder), stack, wrapped=bool(spec.wrapper)).cache_scales


def _by_part(tensors: Mapping[str, StoredTensor], spec: ModelSpec) -> dict[int, dict[str, float]]:
    """Layer -> ``Place.part`` -> its scale."""
    found: dict[int, dict[str, float]] = defaultdict(dict)
    further = spec.config.get("num_nextn_predict_layers")
    most = spec.num_layers + (further if isinstance(further, int) else 0)
    for name, tensor in tensors.items():
        place = place_of(name)
        assert place is not None, "CheckpointFiles.cache_scales"
        if place.layer >= most:
            _fail(tensor, f"is of layer {place.layer}; the model has {spec.num_layers} layers")
        if place.layer >= spec.num_layers:
            continue  # of the layers that predict further tokens, which are not computed
        value, parts = _number(tensor), found[place.layer]
        if parts.setdefault(place.part, value) != value:
            _fail(tensor, f"is {value:g}; another tensor says {parts[place.part]:g}")
    return found


def _number(tensor: StoredTensor) -> float:
    if math.prod(tensor.shape) != 1:
        _fail(
            tensor,
            f"has shape {list(tensor.shape)}; only one scale for K and one for V of a layer are"
            " served, not those of heads or channels",
        )
    value = float(tensor.read().float())
    if not is_scale(value):
        _fail(tensor, f"is {value:g}; a scale must be above zero and finite")
    return value


def _check_scheme(spec: ModelSpec, folder: str) -> None:
    """Raise CheckpointError if the config says that the scales are for another type than fp8."""
    section = spec.config.get(KEY)
    scheme = section.get("kv_cache_scheme") if isinstance(section, Mapping) else None
    if not isinstance(scheme, Mapping):
        return
    for key, served in (("type", ("float",)), ("num_bits", (8,)), ("strategy", ("tensor", None))):
        if scheme.get(key) not in served:
            raise CheckpointError(
                f"{folder}: the scales of the KV cache are for another cache than one in fp8 with a"
                f" scale for each layer: kv_cache_scheme.{key} is {scheme.get(key)!r}."
            )


def _lacks(folder: str, part: str, layer: int) -> NoReturn:
    raise CheckpointError(
        f"{folder} has scales of the KV cache, but no {part}_scale of layer {layer}."
    )


def _fail(tensor: StoredTensor, problem: str) -> NoReturn:
    raise CheckpointError(f"Tensor {tensor.name!r} in {tensor.file} {problem}.")
