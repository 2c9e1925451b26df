"""Makes the ModelSpec that both planes and planning use of a model's description.

Works on the content of JSON files and headers; imports no torch. It knows the keys that
decoders share; keys that only one architecture has stay in ``ModelSpec.config``, where the engine's
declaration of the model reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from setpoint.checkpoint.folder.config_names import usual_config
from setpoint.checkpoint.folder.configfile import MAX_POSITIONS, ConfigFile, short_repr
from setpoint.checkpoint.folder.description import Description
from setpoint.checkpoint.folder.families import FAMILIES, OTHER_NAMES, WRAPPERS, Family
from setpoint.checkpoint.folder.safetensors_file import TensorInfo
from setpoint.checkpoint.quantised.folders import FORMATS, planned_kind
from setpoint.checkpoint.read_folder import read_description
from setpoint.core.model import BLOCK_KINDS, MAX_LAYERS, KeptBlocks, Latent, ModelSpec
from setpoint.core.quantised import KEY, method_of

EMBEDDING = "model.embed_tokens.weight"
EXPERTS = ".experts."
"""What the names of the tensors of experts have in common."""
MAX_HEADS = 1 << 16
NUMBERS = (
    *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "rope_theta"),
    *("rope_local_base_freq", "query_pre_attn_scalar"),
    *("attn_logit_softcapping", "final_logit_softcapping"),
)
"""Keys of numbers in the computation, which must be above zero or null. The engine reads them later
than this, in a process of its own."""
ROPES_THAT_STRETCH = ("linear", "dynamic", "yarn")
"""Rope types whose factor multiplies the original context length, which may give more than
max_position_embeddings."""
ROPES_BY_CONTEXT = ("dynamic", "longrope", "su")
"""Rope types whose frequencies depend on the context length in use; "su" is Phi-3's older name for
longrope."""


def read_spec(folder: Path, *, overrides: dict[str, Any] | None = None) -> ModelSpec:
    """``spec_of`` the model in ``folder``."""
    return spec_of(read_description(folder), overrides=overrides)


def spec_of(description: Description, *, overrides: dict[str, Any] | None = None) -> ModelSpec:
    """The ModelSpec of a described model. overrides: replaces top-level keys of its config
    (``--json-model-override-args``).

    Raises a CheckpointError that names the key and the file if anything is missing or invalid.
    """
    path = description.path
    config, wrapper = _language_config(path, description.config | (overrides or {}))
    config = usual_config(path, config)
    family = FAMILIES.get(str(config.get("model_type", "")), Family())
    config = {**family.defaults, **config}
    reader = ConfigFile(path, {**_usual_names(config), **config})
    architecture = reader.architecture()
    _check_quantised(reader, family)
    hidden = reader.positive("hidden_size")
    heads = _latent_heads(reader) if family.latent else _heads(reader, hidden)
    for key in NUMBERS:
        reader.check_number(key)
    stored = description.language_tensors if wrapper else description.tensors
    tie = reader.flag("tie_word_embeddings")
    num_layers = reader.positive("num_hidden_layers", at_most=MAX_LAYERS)
    tensors = [each for each in stored if _counts(each.name, tie, num_layers)]
    spec: dict[str, Any] = {
        "num_layers": num_layers,
        "hidden_size": hidden,
        "intermediate_size": reader.positive("intermediate_size"),
        **heads,
        "vocab_size": reader.positive("vocab_size"),
    }
    mixture = family.mixture(reader, num_layers)
    head_norms = family.head_norms or reader.flag("use_qk_norm")
    planned = ModelSpec(
        architecture=architecture,
        model_type=str(config.get("model_type", "")),
        context_len=_context_len(reader, family),
        tie_embeddings=tie,
        dtype=reader.dtype(tensors),
        num_parameters=sum(tensor.num_elements for tensor in tensors),
        eos_token_ids=_eos_ids(description, reader),
        num_rotaries=family.num_rotaries,
        head_norms=head_norms,
        whole_norms=family.whole_norms,
        mixture=mixture,
        num_norms=family.num_norms,
        rope_by_context=_rope(reader)[0] in ROPES_BY_CONTEXT,
        blocks=_blocks(description.blocks, tensors),
        quantised=description.matrices,
        wrapper=wrapper,
        windows=family.windows(reader, num_layers),
        config=config,
        **spec,
    )
    if planned.num_parameters:
        return planned
    return replace(
        planned,
        num_parameters=_count_planned(planned, family),
        blocks=_planned_blocks(planned, planned_kind(planned.config)),
    )


def _check_quantised(reader: ConfigFile, family: Family) -> None:
    """Raise CheckpointError if the checkpoint is quantised in a way in which the family's are not
    served."""
    value, method = reader.config.get(KEY), method_of(reader.config)
    if value is not None and method not in FORMATS and method != (family.quantised or None):
        key, shown = (f"{KEY}.quant_method", method) if method else (KEY, value)
        reader.fail(
            key,
            f"is {short_repr(shown)}, which is not supported: use the checkpoint that it was made"
            " from, whose weights --quantization w8a8_int8 can round to 8 bits when they are"
            f" loaded, or one whose quant_method is one of {', '.join(FORMATS)}",
        )


def _heads(reader: ConfigFile, hidden: int) -> dict[str, Any]:
    """The fields of the spec about heads."""
    num_heads = reader.positive("num_attention_heads", at_most=MAX_HEADS)
    num_kv_heads = reader.positive("num_key_value_heads", num_heads)
    head_dim = reader.positive("head_dim", hidden // num_heads)
    if num_heads % num_kv_heads:
        reader.fail(
            "num_key_value_heads",
            f"is {num_kv_heads}, which does not divide the {num_heads} attention heads evenly",
        )
    if head_dim % 2:
        reader.fail("head_dim", f"is {head_dim}; rotary positions need an even size")
    return {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}


def _latent_heads(reader: ConfigFile) -> dict[str, Any]:
    """The same with latent attention, by DeepSeek's keys."""
    num_heads = reader.positive("num_attention_heads", at_most=MAX_HEADS)
    if (given := reader.positive("num_key_value_heads", num_heads)) != num_heads:
        reader.fail(
            "num_key_value_heads",
            f"is {given}; with latent attention it must be num_attention_heads, {num_heads}",
        )
    latent = Latent(
        rank=reader.positive("kv_lora_rank"),
        rope_size=reader.positive("qk_rope_head_dim"),
        key_size=reader.positive("qk_nope_head_dim"),
        value_size=reader.positive("v_head_dim"),
        q_rank=reader.positive("q_lora_rank") if reader.config["q_lora_rank"] is not None else 0,
    )
    if latent.rope_size % 2:
        reader.fail("qk_rope_head_dim", f"is {latent.rope_size}; rotations need an even size")
    head_dim = latent.rank + latent.rope_size
    return {"num_heads": num_heads, "num_kv_heads": 1, "head_dim": head_dim, "latent": latent}


def _language_config(path: Path, config: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """(config of the language model, name of the multimodal architecture that contains it, or "").
    If both configs have a key, the outer one's value counts."""
    if config.get("text_config") is None:
        return config, ""
    reader = ConfigFile(path, config)
    wrapper, inner = reader.architecture(), config["text_config"]
    if wrapper not in WRAPPERS:
        reader.fail(
            "text_config",
            f"is a part of {wrapper}, which reads more than text; only {', '.join(WRAPPERS)} is"
            " supported among such models",
        )
    if not isinstance(inner, dict):
        reader.fail("text_config", f"must be an object, not {short_repr(inner)}")
    architecture, model_type = WRAPPERS[wrapper]
    whole = {key: value for key, value in config.items() if key != "text_config"}
    return {**inner, **whole, "architectures": [architecture], "model_type": model_type}, wrapper


def _usual_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Usual key -> value, for the values that the config gives under other names or by a flag."""
    found = {usual: config[other] for other, usual in OTHER_NAMES if config.get(other) is not None}
    if isinstance(config.get("n_embd"), int):
        found.setdefault(
            "intermediate_size", 4 * config["n_embd"]
        )  # GPT-2's default, which its configs leave out
    if config.get("multi_query") is True:
        found["num_key_value_heads"] = 1
    return found


def _rope(reader: ConfigFile) -> tuple[str, dict[str, Any]]:
    """(rope type, config section that names it)."""
    scaling = _rope_section(reader, "rope_scaling")
    parameters = _rope_section(reader, "rope_parameters")  # transformers 5's name
    return scaling or parameters or ("default", {})


def _rope_section(reader: ConfigFile, key: str) -> tuple[str, dict[str, Any]] | None:
    """(rope type, the value of ``key``); None if it is absent or null."""
    rope = reader.config.get(key)
    if rope is None:
        return None
    if not isinstance(rope, dict):
        reader.fail(key, f"must be an object, not {short_repr(rope)}")
    kinds = [rope[name] for name in ("rope_type", "type") if rope.get(name) is not None]
    if not kinds and key == "rope_parameters" and "factor" not in rope:
        return "default", rope  # only rope_theta, or a section per kind of layer
    if not kinds or not isinstance(kinds[0], str) or not kinds[0]:
        reader.fail(key, f"must name its type, not {short_repr(kinds[0] if kinds else rope)}")
    return kinds[0], rope


def _context_len(reader: ConfigFile, family: Family) -> int:
    length = reader.positive("max_position_embeddings", at_most=MAX_POSITIONS)
    kind, rope = _rope(reader)
    if family.stretched or kind not in ROPES_THAT_STRETCH:
        return length
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings", length)
    if not isinstance(factor, int | float) or not 1 <= factor <= MAX_POSITIONS:
        reader.fail(
            "rope_scaling",
            f"of type {kind} needs a factor of at least 1 and at most {MAX_POSITIONS}, not"
            f" {short_repr(factor)}",
        )
    if type(original) is not int or original < 1:
        reader.fail(
            "rope_scaling",
            f"has an original_max_position_embeddings of {short_repr(original)}; it must be a"
            " positive integer",
        )
    if original * factor > MAX_POSITIONS:
        reader.fail(
            "rope_scaling",
            f"stretches {original} positions {factor} times; the largest supported value is"
            f" {MAX_POSITIONS}",
        )
    return max(length, int(original * factor))


def _eos_ids(description: Description, reader: ConfigFile) -> tuple[int, ...]:
    """The end token ids of generation_config.json, which lists every token that ends a turn, then
    those of the config itself."""
    path = description.generation_path
    generation = ConfigFile(path, usual_config(path, description.generation))
    return tuple(dict.fromkeys(generation.ids("eos_token_id") + reader.ids("eos_token_id")))


def _blocks(stored: Iterable[TensorInfo], tensors: Iterable[TensorInfo]) -> KeptBlocks | None:
    """What the engine keeps of a checkpoint's blocks; None if there are none. tensors: those that
    count."""
    sizes = {tensor.name: tensor.num_elements for tensor in tensors}
    kept, held = {}, {}
    for tensor in stored:
        name, _, kind = tensor.name.rpartition(".")
        if name in sizes and (block := BLOCK_KINDS.get(kind)):
            kept[name, kind] = tensor.num_bytes
            held[name] = block.in_memory(tensor.num_bytes)
    if not kept:
        return None
    return KeptBlocks(
        num_parameters=sum(sizes[name] for name, _ in kept),
        num_bytes=sum(kept.values()),
        held_bytes=sum(held.values()),
        kinds=tuple(sorted({kind for _, kind in kept})),
        embedding_bytes=held.get(EMBEDDING, 0),
        experts_parameters=sum(sizes[name] for name in held if EXPERTS in name),
        experts_bytes=sum(size for name, size in held.items() if EXPERTS in name),
    )


def _planned_blocks(spec: ModelSpec, kind: str) -> KeptBlocks | None:
    """What the engine will keep of a quantised folder whose weights are not here; "": nothing."""
    if not kind:
        return None
    hidden, layers, mixture = spec.hidden_size, spec.num_layers, spec.mixture
    matrices = layers * sum(rows * columns for rows, columns in spec.attention_matrices.values())
    dense, experts = layers, 0
    if mixture:
        dense -= len(mixture.layers)
        experts = len(mixture.layers) * mixture.expert_parameters(hidden)
        matrices += len(mixture.layers) * 3 * mixture.shared_size * hidden
    matrices += dense * 3 * hidden * spec.intermediate_size + experts
    block = BLOCK_KINDS[kind]
    num_bytes, of_experts = (
        count * block.num_bytes // block.num_values for count in (matrices, experts)
    )
    return KeptBlocks(matrices, num_bytes, num_bytes, (kind,), 0, experts, of_experts)


def _counts(name: str, tie: bool, num_layers: int) -> bool:
    """Whether a stored tensor is a parameter of its own. Some checkpoints store a tied head a
    second time, and some have layers after the last, which predict further tokens."""
    layer = name.removeprefix("model.layers.").partition(".")[0]
    beyond = name.startswith("model.layers.") and layer.isdigit() and int(layer) >= num_layers
    return not beyond and not (tie and name == "lm_head.weight")


def _count_planned(spec: ModelSpec, family: Family) -> int:
    """Number of parameters computed from the dimensions, for a folder without weights
    (``--load-format dummy``)."""
    hidden, inner, head_dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
    config, mixture, num_layers = spec.config, spec.mixture, spec.num_layers
    matrices = spec.attention_matrices
    layer = family.num_norms * hidden + sum(rows * columns for columns, rows in matrices.values())
    rows_in = sum(rows for name, (_, rows) in matrices.items() if name in ("q", "k", "v"))
    if latent := spec.latent:
        layer += latent.q_rank + latent.rank  # their norms
        rows_in = sum(rows for name, (_, rows) in matrices.items() if name in ("q_a", "kv_a"))
    if config.get("attention_bias"):
        layer += rows_in + hidden * family.out_bias
    if family.qkv_bias and config.get("qkv_bias", True):
        layer += rows_in
    if spec.head_norms:
        layer += 2 * head_dim
    if spec.whole_norms:
        layer += (spec.num_heads + spec.num_kv_heads) * head_dim
    if family.sinks:
        layer += spec.num_heads
    mlp = 3 * hidden * inner
    if config.get("mlp_bias"):
        mlp += 2 * inner + hidden
    mlps = num_layers * mlp
    if mixture:
        sparse = mixture.expert_parameters(hidden) + mixture.other_parameters(hidden)
        mlps += len(mixture.layers) * (sparse - mlp)
    embeddings = spec.vocab_size * hidden * (1 if spec.tie_embeddings else 2)
    return num_layers * layer + mlps + embeddings + hidden
