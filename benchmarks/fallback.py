"""Which causal language models of the installed transformers run through the fallback (--model-impl
transformers): a table.

    python benchmarks/fallback.py [NAME …]

Every class gets a tiny random model of its own default configuration with small dimensions, and
goes through the same steps as a real one: config.json, ModelSpec, loading, trial. "works" means
that the trial's logits agreed with the library's own attention; anything else is the error that a
user would see. A default configuration that cannot be made small is marked.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

from setpoint.checkpoint.spec import read_spec
from setpoint.core.errors import SetpointError
from setpoint.engine.executor.build_runner import EngineConfig, build_runner

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 160,
    "max_position_embeddings": 128,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
"""Values of the fields that a configuration class has. The spread of the weights is large enough
for attention to matter."""
PER_LAYER = ("layer_types", "mlp_layer_types")
WORKS = "works"


def tiny_config(kind: type) -> Any:
    """The default configuration of the class, made small. Raises whatever the class raises."""
    default = kind()
    changes = {key: value for key, value in SMALL.items() if hasattr(default, key)}
    for key in PER_LAYER:
        if getattr(default, key, None):
            changes[key] = getattr(default, key)[: SMALL["num_hidden_layers"]]
    return kind(**changes)


def outcome(name: str, kind: type, *, seed: int = 0) -> str:
    """WORKS, or the reason why it does not."""
    try:
        config = tiny_config(kind)
    except Exception as error:
        return f"(no small configuration: {type(error).__name__})"
    config.architectures, config.dtype = [name], "float32"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config.to_dict(), default=str))
        try:
            spec, small = (
                read_spec(Path(folder)),
                {"dtype": "float32", "kv_dtype": "float32", "page_size": 2},
            )
            build_runner(
                EngineConfig(
                    folder, spec, load_format="dummy", model_impl="transformers", seed=seed, **small
                )
            )
        except SetpointError as error:
            return str(error).replace(f"{folder}/", "")
    return WORKS


def classes() -> dict[str, type]:
    """Class name -> configuration class, for every class that the library lists as a causal
    language model."""
    found = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    configs = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    return {
        name: configs[model_type]
        for model_type, name in sorted(found.items())
        if isinstance(name, str)
    }


def main(names: list[str]) -> int:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    known = classes()
    table = {name: outcome(name, known[name]) for name in names or known}
    print(f"| class of transformers {transformers.__version__} | through the fallback |\n|---|---|")
    for name, words in table.items():
        print(f"| {name} | {words} |")
    print(f"\n{sum(words == WORKS for words in table.values())} of {len(table)} work.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
