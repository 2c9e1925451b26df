"""The scales of a KV cache in 8 bits: their names in checkpoints, and the file of
--quantization-param-path.

A layer has one for K and one for V. The cache holds K and V divided by them, so that they fit into
the range of fp8.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from setpoint.core.errors import ConfigError
from setpoint.core.jsonfile import parse_json
from setpoint.core.plain_file import SETTINGS_MIB, read_plain

OPTION = "--quantization-param-path"
LayerScales = Mapping[int, tuple[float, float]]
"""Layer -> (scale of K, scale of V)."""

ATTENTION = re.compile(r"(?:^|\.)layers\.(\d+)\.self_attn\.([a-z_.]+)$")
PARTS = {
    **{f"{where}{part}_scale": part for where in ("", "attn.") for part in ("k", "v", "kv", "q")},
    **{f"qkv_proj.{part}_scale": part for part in ("k", "v")},
    **{f"{part}_proj.{end}": part for part in ("k", "v", "q") for end in ("output_scale",)},
    **{f"{part}_proj.{part}_scale": part for part in ("k", "v", "q")},
    **{f"attn_mqa.{part}_scale": part for part in ("k", "v")},
    **dict.fromkeys(("prob_scale", "attn.prob_scale", "prob_output_scale"), "prob"),
}
"""The name of a scale in the attention of a layer -> what it is of. llm-compressor writes scales
into the attention, NVIDIA's Model Optimizer into k_proj and v_proj, and AutoFP8 and Quark write
those of the outputs of k_proj and v_proj; a scale of both is an old spelling. The others are names
in vLLM and SGLang, whose loaders take all of them."""
STORED_DTYPE = "float8_e4m3fn"
"""The dtype that a file of scales must name; SGLang and vLLM know no other."""


@dataclass(slots=True, frozen=True)
class Place:
    """What a scale in a checkpoint is of."""

    layer: int
    part: str
    """k, v, kv (both), q (queries) or prob (probabilities)."""


def place_of(name: str) -> Place | None:
    """What the tensor of this name is a scale of; None: it is no scale of a cache."""
    found = ATTENTION.search(name)
    part = PARTS.get(found[2]) if found else None
    return Place(int(found[1]), part) if found and part else None


def is_scale(value: object) -> bool:
    """Whether it is a number above zero, finite in fp32."""
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e38:
        return False
    return 0 < float(np.float32(value)) < math.inf


def scales_in_file(
    path: str, *, num_layers: int, rank: int, num_ranks: int, model_type: str
) -> LayerScales:
    """The scales of a rank from a JSON file as SGLang and vLLM take it: {"model_type": …,
    "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {rank: {layer: scale}}}}. K and V share
    a scale. Raises ConfigError unless every layer of every rank has one."""
    try:
        content = parse_json(read_plain(path, SETTINGS_MIB).decode())
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigError(f"{OPTION} {path} cannot be read: {why}.") from None
    cache = _object(path, content, "kv_cache", "the file")
    if content.get("model_type") not in (None, model_type):
        _fail(path, f"is for the model type {content['model_type']!r}, not {model_type!r}")
    if cache.get("dtype") != STORED_DTYPE:
        _fail(path, f"has scales of a cache in {cache.get('dtype')!r}, not {STORED_DTYPE!r}")
    ranks = _object(path, cache, "scaling_factor", "kv_cache")
    if set(ranks) != {str(each) for each in range(num_ranks)}:
        _fail(path, f"must have scales of {num_ranks} ranks, 0 to {num_ranks - 1}")
    for each in ranks:
        layers = _object(path, ranks, each, "scaling_factor")
        if set(layers) != {str(layer) for layer in range(num_layers)}:
            _fail(path, f"must have a scale for each of the {num_layers} layers in rank {each}")
        for layer, scale in layers.items():
            if not is_scale(scale):
                _fail(path, f"has the scale {scale!r} for layer {layer}; it must be above zero")
    own = ranks[str(rank)]
    return {layer: (float(own[str(layer)]),) * 2 for layer in range(num_layers)}


def _object(path: str, inside: Any, key: str, where: str) -> dict[str, Any]:
    found = inside.get(key) if isinstance(inside, dict) else None
    if not isinstance(found, dict):
        _fail(path, f"must have an object {key!r} in {where}")
    return found


def _fail(path: str, problem: str) -> NoReturn:
    raise ConfigError(f"{OPTION} {path} {problem}.")
