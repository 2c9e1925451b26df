"""Gemma 2 and Gemma 3 (text): norms before and after each branch, windows, capped scores.

The files add one to the weights of norms, and do not have the scale of attention.
"""

from __future__ import annotations

from collections.abc import Iterator

from setpoint.checkpoint.folder.layer_windows import FULL, SLIDING
from setpoint.checkpoint.gguf.architecture import (
    Config,
    DecoderArchitecture,
    LayerTensors,
    TensorMapping,
    attention,
    mlp,
    plain,
)
from setpoint.checkpoint.gguf.checked_numbers import count, positive
from setpoint.checkpoint.gguf.config_json import architecture, base, heads
from setpoint.checkpoint.gguf.header import GGUFFile
from setpoint.checkpoint.gguf.rotation import rope_base, rope_scaling
from setpoint.core.errors import CheckpointError

WINDOW = "attention.sliding_window"
WINDOW_PATTERN = f"{WINDOW}_pattern"
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
BY_HIDDEN_SIZE = {"gemma2": 46, "gemma3": 62}
"""Architecture -> the number of layers of its 27B model, whose attention divides by the root of
hidden size / heads; that of all others divides by the root of the head size."""


def _layer(layer: LayerTensors) -> Iterator[TensorMapping]:
    hidden = layer.config["hidden_size"]
    for old, new in (
        ("attn_norm", "input_layernorm"),
        ("post_attention_norm", "post_attention_layernorm"),
        ("ffn_norm", "pre_feedforward_layernorm"),
        ("post_ffw_norm", "post_feedforward_layernorm"),
    ):
        yield plain(f"{old}.weight", f"{new}.weight", hidden)
    yield from attention(layer)
    yield from mlp(layer)


def _gemma(file: GGUFFile, decoder: DecoderArchitecture) -> Config:
    arch = architecture(file)
    found = base(file, decoder) | heads(file, decoder)
    scalar = found["head_dim"]
    if found["num_hidden_layers"] == BY_HIDDEN_SIZE[arch]:
        scalar = found["hidden_size"] // found["num_attention_heads"]
    del found["hidden_act"]
    return found | {"query_pre_attn_scalar": scalar, "hidden_activation": "gelu_pytorch_tanh"}


def _gemma2(file: GGUFFile, decoder: DecoderArchitecture) -> Config:
    found = _gemma(file, decoder)
    for key, default in zip(CAPS, (50.0, 30.0), strict=True):
        name = f"gemma2.{key}"
        found[key] = positive(file, name) if file.get(name, float) is not None else default
    return found | {
        "sliding_window": count(file, f"gemma2.{WINDOW}", default=4096),
        "layer_types": _layer_types(file, found["num_hidden_layers"], period=2),
        "rope_scaling": rope_scaling(file, "gemma2", found["head_dim"]),
    }


def _gemma3(file: GGUFFile, decoder: DecoderArchitecture) -> Config:
    found = _gemma(file, decoder)
    num_layers = found["num_hidden_layers"]
    window = count(file, f"gemma3.{WINDOW}", default=0, low=0)
    cap = f"gemma3.{CAPS[1]}"
    return found | {
        "final_logit_softcapping": positive(file, cap) if file.get(cap, float) else None,
        # A model without windows has none in any layer; the key must be there nevertheless.
        "sliding_window": window or found["max_position_embeddings"],
        "layer_types": _layer_types(file, num_layers, period=6) if window else [FULL] * num_layers,
        "rope_local_base_freq": rope_base(file, "gemma3.rope.freq_base_swa"),
        "rope_scaling": rope_scaling(file, "gemma3", found["head_dim"]),
    }


def _layer_types(file: GGUFFile, num_layers: int, *, period: int) -> list[str]:
    """The kind of each layer: as the file says, or all but every ``period``-th have a window."""
    arch = architecture(file)
    given = file.metadata.get(f"{arch}.{WINDOW_PATTERN}", period)
    if type(given) is int and given > 0:
        given = [(index + 1) % given > 0 for index in range(num_layers)]
    if (
        not isinstance(given, list)
        or len(given) < num_layers
        or not all(type(each) in (bool, int) for each in given)
    ):
        raise CheckpointError(
            f"{file.path}: {arch}.{WINDOW_PATTERN} must be a number above zero, or say of each"
            f" of {num_layers} layers whether it has a window."
        )
    return [SLIDING if has_window else FULL for has_window in given[:num_layers]]


GEMMA2 = DecoderArchitecture(
    "Gemma2ForCausalLM",
    "gemma2",
    config=_gemma2,
    layer=_layer,
    reads=frozenset({WINDOW, *CAPS}),
    norm_offset=1.0,
)
GEMMA3 = DecoderArchitecture(
    "Gemma3ForCausalLM",
    "gemma3_text",
    config=_gemma3,
    layer=_layer,
    reads=frozenset({WINDOW, CAPS[1]}),
    norms="head",
    norm_offset=1.0,
)
