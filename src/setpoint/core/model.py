"""What both planes know of a model: its dimensions, read from config.json without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from setpoint.core.request import PoolingKind


@dataclass(slots=True, frozen=True)
class Pooling:
    """How a model's hidden states become embeddings; written once by ``checkpoint``."""

    kind: PoolingKind
    normalize: bool
    """Scale every vector to length 1."""
    size: int
    """Numbers in a vector."""
    lengths: tuple[int, ...] | None
    """Lengths to which a vector may be cut (a matryoshka model): () = any, None = none."""
    why: str
    """Where this was found, for the decisions."""


BLOCKS_FILE = "model.blocks"
"""Next to a converted GGUF's weights in bfloat16: those matrices whose blocks can be multiplied as
they are. "NAME.KIND" is the tensor NAME as uint8 [rows, bytes of a row]. In the safetensors format
but without its ending: other engines load every file that has it."""

BLOCK = 32
"""Values of a block, neighbours in a row."""

BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
"""Kinds of blocks that are kept, by ggml's name -> bytes of a block
(https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h)."""


@dataclass(slots=True, frozen=True)
class KeptBlocks:
    """What of a model lies in its BLOCKS_FILE; written once by ``checkpoint``."""

    num_parameters: int
    num_bytes: int
    kinds: tuple[str, ...]
    embedding_bytes: int
    """Of the embedding if it is among them, else 0; tied to the head it is held once."""


LANGUAGE_MODEL = (
    ("language_model.", ""),
    ("model.language_model.", "model."),
    ("lm_head.", "lm_head."),
)
"""How the names of a language model's tensors begin in a model of more than text (before
transformers 4.52, and since), and alone."""


def language_tensor(stored: str) -> str | None:
    """The name in the language model of a tensor of a model of more than text; None for a tensor of
    its other parts."""
    return next(
        (
            alone + stored.removeprefix(begin)
            for begin, alone in LANGUAGE_MODEL
            if stored.startswith(begin)
        ),
        None,
    )


@dataclass(slots=True, frozen=True)
class ModelSpec:
    """The numbers of a decoder that planning and the frontend need; written once by
    ``checkpoint``."""

    architecture: str
    """E.g. "LlamaForCausalLM"; the key into the engine's model table."""
    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_len: int
    """max_position_embeddings, or what a rope scaling makes of it."""
    tie_embeddings: bool
    dtype: str
    """The checkpoint's own dtype: "bfloat16", "float16", "float32", "float64"."""
    num_parameters: int
    """Distinct parameters, tied ones counted once."""
    num_rotaries: int = 1
    """Rotation tables the engine keeps, each a row of head_dim numbers per position."""
    eos_token_ids: tuple[int, ...] = ()
    """What ends a turn: of the model's configs, and once an engine is started those of the
    tokenizer, too."""
    head_norms: bool = False
    """A norm over each head of q and of k."""
    num_norms: int = 2
    """Norms over the hidden size in a layer: before its two branches, or before and behind them."""
    rope_by_context: bool = False
    """Positions are rotated otherwise for a longer context; the engine decides once, by the
    configured length."""
    blocks: KeptBlocks | None = None
    """Quantised matrices that a converted GGUF holds as they were, in addition to all of them in
    ``dtype``."""
    wrapper: str = ""
    """The architecture that takes more than text and whose language model this is; empty for a
    model of its own."""
    windows: tuple[int | None, ...] = ()
    """Per layer the positions that a token sees there, its own included; None = all before it.
    Empty if no layer has a window."""
    pooling: Pooling | None = None
    """Set when the model is served for embeddings."""
    config: dict[str, Any] = field(default_factory=dict)
    """config.json as read, for the engine's model declaration."""

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """K and V of one token over all layers, in bytes (docs/sglang/options.md#pool-limits).

        What a pool keeps of it: ``core.cachegroups``."""
        return 2 * self.num_kv_heads * self.head_dim * self.num_layers * element_bytes
