"""What both planes know about a model: its dimensions, read from config.json without torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from setpoint.core.quantised import QuantisedMatrix
from setpoint.core.request import PoolingKind

MAX_LAYERS = 1 << 12
"""Largest accepted number of layers. The deepest models have a few hundred. The number is bounded
because objects are made for every layer before a missing weight is noticed."""


@dataclass(slots=True, frozen=True)
class Pooling:
    """How a model's hidden states become embeddings; written once by ``checkpoint``."""

    kind: PoolingKind
    normalize: bool
    """Scale every vector to length 1."""
    size: int
    """Number of elements in a vector."""
    lengths: tuple[int, ...] | None
    """Lengths to which a vector may be cut (a matryoshka model): () means any length, None means it
    may not be cut."""
    why: str
    """Where the pooling was declared, for the log of start-up decisions."""


@dataclass(slots=True, frozen=True)
class BlockKind:
    """A way to quantise neighbours in a row together."""

    num_values: int
    """Values in a block."""
    num_bytes: int
    """Bytes of a block in a file."""
    held_bytes: int
    """Bytes of a block in memory, in the layout of ``engine.kernels.cpu`` (blocks.h)."""
    scales: tuple[int, ...] = (0,)
    """Where a block has its fp16 numbers: the first byte of each."""
    row_end: int = 0
    """Bytes behind the last block of a row."""

    def row_bytes(self, num_values: int) -> int:
        """Bytes that a row takes in a file. ``num_values`` is a multiple of the block's."""
        return num_values // self.num_values * self.num_bytes + self.row_end

    def in_memory(self, num_bytes: int) -> int:
        """Bytes that blocks of ``num_bytes`` in a file take in memory."""
        return num_bytes // self.num_bytes * self.held_bytes


BLOCK_KINDS = {
    "Q4_0": BlockKind(32, 18, 18),
    "Q4_1": BlockKind(32, 20, 20, (0, 2)),
    "Q5_0": BlockKind(32, 22, 26),
    "Q5_1": BlockKind(32, 24, 28, (0, 2)),
    "Q8_0": BlockKind(32, 34, 34),
    "Q2_K": BlockKind(256, 84, 164, (80, 82)),
    "Q3_K": BlockKind(256, 110, 146, (108,)),
    "Q4_K": BlockKind(256, 144, 148, (0, 2)),
    "Q5_K": BlockKind(256, 176, 212, (0, 2)),
    "Q6_K": BlockKind(256, 210, 210, (208,)),
    "IQ4_NL": BlockKind(32, 18, 18),
    "IQ4_XS": BlockKind(256, 136, 138),
    "MXFP4": BlockKind(32, 17, 17, ()),
    "INT4Z": BlockKind(32, 19, 19),
    "INT8Z": BlockKind(32, 37, 37, ()),
    "FP8": BlockKind(32, 36, 36, ()),
    "W8A8": BlockKind(1, 1, 1, (), row_end=8),
}
"""Kinds of blocks that are kept, by ggml's names
(https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h). The last four are made of the
tensors of a quantised folder (decision 0080): INT4Z is an fp16 scale, a zero and codes of 4 bits,
in Q4_0's order; INT8Z an fp32 scale, a zero and codes of 8 bits, which hold any whole numbers of up
to 8 bits; FP8 an fp32 scale and codes in E4M3; W8A8 a row of 8-bit codes, then its scale and that
of the activations that it meets (0: each row has its own), both fp32."""

W8A8 = "W8A8"
"""The kind of block that meets activations of 8 bits by itself."""
ROUNDED = ("w8a8_int8", "fp8")
"""The values of --quantization that round weights to 8 bits when they are loaded. fp8 may also name
what a folder has, and is None once it is settled."""
BLOCKS_INT8 = "blocks_int8"
"""The value of --quantization with which kept blocks meet activations that are rounded to 8
bits."""
INT8_KINDS = frozenset(("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"))
"""The kinds for which there are such products (rounded_blocks.cpp)."""

MXFP4_SUFFIXES = ("_blocks", "_scales")
"""Endings of the names of the two tensors in which a checkpoint of gpt-oss has the codes and the
scales of MXFP4: codes [..., 16] for every scale [...] and 32 values."""


@dataclass(slots=True, frozen=True)
class KeptBlocks:
    """The blocks of a model: those that stay in a GGUF file (``core.blocksfile``), and those that
    the engine makes of a quantised folder's tensors; written once by ``checkpoint``."""

    num_parameters: int
    num_bytes: int
    """Bytes in the files."""
    held_bytes: int
    """Bytes in memory if all blocks are kept. Those of a gate and an up that differ in kind are
    not."""
    kinds: tuple[str, ...]
    embedding_bytes: int
    """Bytes in memory of the embedding's blocks, or 0 if it has none. An embedding that is tied to
    the head is held once."""
    experts_parameters: int = 0
    experts_bytes: int = 0
    """Bytes in memory of the experts' blocks."""


LANGUAGE_MODEL = (
    ("language_model.", ""),
    ("model.language_model.", "model."),
    ("lm_head.", "lm_head."),
)
"""(prefix of the language model's tensor names in a multimodal checkpoint, prefix in a text-only
one). The first pair is the naming before transformers 4.52, the second the naming since."""


def language_tensor(stored: str) -> str | None:
    """The name of a multimodal checkpoint's tensor within its language model; None for a tensor of
    another part."""
    return next(
        (
            text_prefix + stored.removeprefix(prefix)
            for prefix, text_prefix in LANGUAGE_MODEL
            if stored.startswith(prefix)
        ),
        None,
    )


@dataclass(slots=True, frozen=True)
class Mixture:
    """The experts of a model, MLPs of which each token uses a few; written once by
    ``checkpoint``."""

    num_experts: int
    num_chosen: int
    """Experts that a token uses."""
    size: int
    """Inner size of an expert's MLP."""
    layers: frozenset[int]
    """The layers that have experts. The others have one MLP of the model's intermediate size."""
    shared_size: int = 0
    """Inner size of the MLP that every token uses besides its experts; 0: there is none."""
    shared_is_gated: bool = False
    """True if the router also weighs that MLP."""
    is_corrected: bool = False
    """True if a number per expert is added to the scores for the choice."""
    biases: bool = False
    """True if the router and the experts' matrices have biases."""

    def expert_parameters(self, hidden_size: int) -> int:
        """Parameters of all experts of a layer."""
        biases = 2 * self.size + hidden_size if self.biases else 0
        return (3 * hidden_size * self.size + biases) * self.num_experts

    def other_parameters(self, hidden_size: int) -> int:
        """Parameters of a layer's router, and of its shared expert with the gate of that."""
        shared = (3 * self.shared_size + self.shared_is_gated) * hidden_size
        return self.num_experts * (hidden_size + self.is_corrected + self.biases) + shared

    def used(self, num_tokens: int) -> float:
        """The share of the experts that a step of so many tokens reads, if all are equally
        likely."""
        return float(1.0 - (1.0 - self.num_chosen / self.num_experts) ** num_tokens)


@dataclass(slots=True, frozen=True)
class Latent:
    """Latent attention (MLA, arXiv 2405.04434): K and V of all heads are made of one cached vector
    per token; written once by ``checkpoint``. Such a model has one K and V head, of ``rank`` +
    ``rope_size`` numbers (decision 0066)."""

    rank: int
    """Numbers of the cached vector that K and V are made of."""
    rope_size: int
    """Numbers of a key that are rotated; all heads share them."""
    key_size: int
    """Numbers of a head's query and key that are not rotated."""
    value_size: int
    """Numbers of a head's output."""
    q_rank: int = 0
    """Size of the vector that queries are made of; 0: they are made of the hidden state."""

    @property
    def query_size(self) -> int:
        """Numbers of a head's query before its unrotated part meets K's part of kv_b_proj."""
        return self.key_size + self.rope_size

    @property
    def up_size(self) -> int:
        """A head's rows of kv_b_proj, which has ``rank`` columns."""
        return self.key_size + self.value_size


@dataclass(slots=True, frozen=True)
class CachePart:
    """One of the arrays that a layer caches: ``heads`` · ``size`` numbers for each token."""

    name: str
    heads: int
    size: int


@dataclass(slots=True, frozen=True)
class ModelSpec:
    """The numbers of a decoder that planning and the frontend need; written once by
    ``checkpoint``."""

    architecture: str
    """E.g. "LlamaForCausalLM". It is the key of the engine's table of models."""
    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_len: int
    """max_position_embeddings, or the length to which a rope scaling stretches it."""
    tie_embeddings: bool
    dtype: str
    """The checkpoint's own dtype: "bfloat16", "float16", "float32", "float64"."""
    num_parameters: int
    """Number of distinct parameters; tied ones count once."""
    num_rotaries: int = 1
    """Number of rotation tables that the engine keeps; each has a row of ``rope_dim`` numbers per
    position."""
    eos_token_ids: tuple[int, ...] = ()
    """Token ids that end a turn: those that the model's configs name and, once an engine has
    started, those of the tokenizer too."""
    head_norms: bool = False
    """True if each head of q and of k has a norm."""
    whole_norms: bool = False
    """True if all heads of q together have a norm, and those of k."""
    latent: Latent | None = None
    """Set if attention is latent attention."""
    mixture: Mixture | None = None
    """The model's experts; None if it has none."""
    num_norms: int = 2
    """Number of norms over the hidden size in a layer: two before its branches, or four before and
    after them."""
    rope_by_context: bool = False
    """True if the rotation of positions depends on the context length. The engine decides once, by
    the configured length."""
    blocks: KeptBlocks | None = None
    """Quantised matrices that are kept unchanged: those of a GGUF file, or those of a quantised
    folder."""
    quantised: tuple[QuantisedMatrix, ...] = field(default=(), repr=False)
    """The matrices that the folder stores as codes and scales, by which the engine reads them."""
    wrapper: str = ""
    """The multimodal architecture whose language model this is; empty for a model of its own."""
    windows: tuple[int | None, ...] = ()
    """For each layer, the number of positions that a token sees, including its own; None: all
    positions up to its own. Empty if no layer has a window."""
    pooling: Pooling | None = None
    """Set when the model serves embeddings."""
    config: dict[str, Any] = field(default_factory=dict)
    """config.json as read, for the engine's declaration of the model."""

    @property
    def cache_parts(self) -> tuple[CachePart, ...]:
        """What a layer caches for each token, in the order of ``ForwardContext.kv``."""
        names = ("latent",) if self.latent else ("k", "v")
        return tuple(CachePart(name, self.num_kv_heads, self.head_dim) for name in names)

    @property
    def value_dim(self) -> int:
        """Numbers of a head's V in the cache, and of its output of attention."""
        return self.latent.rank if self.latent else self.head_dim

    @property
    def rope_dim(self) -> int:
        """Numbers of a head that a row of a rotation table is for."""
        return self.latent.rope_size if self.latent else self.head_dim

    @property
    def attention_matrices(self) -> dict[str, tuple[int, int]]:
        """Name -> (inputs, outputs) of the matrices of a layer's attention."""
        hidden, heads = self.hidden_size, self.num_heads
        if (latent := self.latent) is None:
            q, kv = heads * self.head_dim, self.num_kv_heads * self.head_dim
            return {"q": (hidden, q), "k": (hidden, kv), "v": (hidden, kv), "o": (q, hidden)}
        q = heads * latent.query_size
        queries = (
            {"q_a": (hidden, latent.q_rank), "q_b": (latent.q_rank, q)}
            if latent.q_rank
            else {"q": (hidden, q)}
        )
        return {
            **queries,
            "kv_a": (hidden, latent.rank + latent.rope_size),
            "kv_b": (latent.rank, heads * latent.up_size),
            "o": (heads * latent.value_size, hidden),
        }

    @property
    def attention_numbers(self) -> int:
        """Numbers per token between the projections of a layer's attention: queries, keys, values
        and outputs in all their forms."""
        if (latent := self.latent) is None:
            return 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        each = latent.query_size + self.head_dim + 2 * latent.rank + latent.value_size
        return 2 * latent.q_rank + self.num_heads * each + self.head_dim + latent.rank

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes that all layers cache for one token (docs/sglang/options.md#pool-limits).

        ``core.cachegroups`` says how much of it a pool keeps."""
        return numbers_per_token(self.cache_parts) * self.num_layers * element_bytes

    def with_expert_copies(self, redundant: int) -> ModelSpec:
        """The model with further slots, which hold copies of experts."""
        if self.mixture is None or not redundant:
            return self
        number = self.mixture.num_experts
        each = self.mixture.expert_parameters(self.hidden_size) // number
        return replace(
            self,
            mixture=replace(self.mixture, num_experts=number + redundant),
            num_parameters=self.num_parameters + len(self.mixture.layers) * redundant * each,
        )

    def share_of_experts(self, size: int) -> ModelSpec:
        """The model as one of so many engines sees it that compute the experts together."""
        mixture, blocks = self.mixture, self.blocks
        assert mixture is not None, "it has experts"
        share = replace(mixture, size=-(-mixture.size // size))
        less = len(mixture.layers) * (
            mixture.expert_parameters(self.hidden_size) - share.expert_parameters(self.hidden_size)
        )
        left = 1 - less / self.num_parameters
        return replace(
            self,
            mixture=share,
            num_parameters=self.num_parameters - less,
            blocks=None
            if blocks is None
            else replace(
                blocks,
                num_parameters=int(blocks.num_parameters * left),
                num_bytes=int(blocks.num_bytes * left),
                held_bytes=int(blocks.held_bytes * left),
            ),
        )

    @property
    def rank_counts(self) -> list[int]:
        """The numbers of ranks that can divide the model's heads (``engine.parallel``): up to that
        of the K and V heads, and its multiples up to that of the heads of q. Heads that have a norm
        together are not divided."""
        if self.whole_norms:
            return [1]
        few, all_heads = self.num_kv_heads, self.num_heads
        return [*range(1, few + 1), *range(2 * few, all_heads + 1, few)]


def numbers_per_token(parts: Iterable[CachePart]) -> int:
    """How many numbers a layer with these parts caches for each token."""
    return sum(part.heads * part.size for part in parts)
