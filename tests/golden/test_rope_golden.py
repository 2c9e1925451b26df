"""Every rope variant against transformers' own frequencies and attention factors, at short and long
positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from setpoint.engine.layers.rotary import RotaryEmbedding

HEAD_DIM, TRAINED = 64, 2048
FACTORS = {
    "short_factor": [1.0 + pair / 50 for pair in range(32)],
    "long_factor": [1.0 + pair for pair in range(32)],
}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "theta": {"rope_theta": 1e6},
    "partial": {"partial_rotary_factor": 0.5},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "dynamic partial": {
        "rope_scaling": {"rope_type": "dynamic", "factor": 2.5},
        "partial_rotary_factor": 0.75,
    },
    "llama3": {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
    },
    "yarn": {
        "rope_theta": 1e6,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 2048,
        },
    },
    "yarn without an original length": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "yarn betas": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16.0,
            "beta_fast": 16,
            "beta_slow": 2,
            "truncate": False,
        }
    },
    "yarn attention": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.8}
    },
    "yarn mscale": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 40.0,
            "mscale": 0.707,
            "mscale_all_dim": 1.0,
        }
    },
    "yarn partial": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
        "partial_rotary_factor": 0.5,
    },
    "longrope": {
        "rope_scaling": {
            "rope_type": "longrope",
            "original_max_position_embeddings": 512,
            **FACTORS,
        }
    },
    "longrope factor": {"rope_scaling": {"rope_type": "longrope", "factor": 8.0, **FACTORS}},
    "longrope attention": {
        "rope_scaling": {"rope_type": "longrope", "attention_factor": 1.3, **FACTORS}
    },
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("context_len", [300, 2048, 9000])
def test_table_equals_transformers(variant: str, context_len: int) -> None:
    """transformers is told the context length as the sequence's; ours decides by it once
    (docs/decisions/0008)."""
    keys = {"rope_theta": 10000.0, "max_position_embeddings": TRAINED} | VARIANTS[variant]
    theirs = LlamaConfig(hidden_size=4 * HEAD_DIM, num_attention_heads=4, **keys)
    kind = theirs.rope_parameters["rope_type"]
    if kind == "default":
        inv_freq, factor = Phi3RotaryEmbedding.compute_default_rope_parameters(theirs)
    else:
        inv_freq, factor = ROPE_INIT_FUNCTIONS[kind](
            theirs, torch.device("cpu"), seq_len=context_len
        )
    table = RotaryEmbedding.from_config(keys, HEAD_DIM).table(
        context_len, torch.float32, torch.device("cpu")
    )
    assert table.shape == (context_len, 2 * len(inv_freq))
    positions = torch.tensor([0, 1, 2, 17, 255, context_len - 1])
    angles = torch.outer(positions.float(), inv_freq)
    wanted = torch.cat((angles.cos(), angles.sin()), dim=-1) * factor
    torch.testing.assert_close(table[positions], wanted, rtol=0, atol=1e-6)


def test_a_longer_context_takes_the_long_list_for_every_position() -> None:
    keys = {"max_position_embeddings": TRAINED, **VARIANTS["longrope"]}
    rope = RotaryEmbedding.from_config(keys, HEAD_DIM)
    short, long = rope.frequencies(512), rope.frequencies(513)
    assert short[1] == long[1]
    torch.testing.assert_close(
        short[0] * torch.tensor(FACTORS["short_factor"]),
        long[0] * torch.tensor(FACTORS["long_factor"]),
    )


def test_older_name_and_place_of_the_original_length() -> None:
    """Phi-3's first configs say "su" and keep the length beside the section."""
    section = {"type": "su", **FACTORS}
    rope = RotaryEmbedding.from_config(
        {
            "max_position_embeddings": TRAINED,
            "rope_scaling": section,
            "original_max_position_embeddings": 512,
        },
        64,
    )
    assert (rope.kind, rope.original) == ("longrope", 512)
