"""Models of published shapes with random weights as GGUF files, in the kinds that people download.

    python benchmarks/peers/install.py llama.cpp
    python benchmarks/gguf_shapes.py llama-3.2-1b qwen3-1.7b gemma-3-1b  # 13 GB, some minutes
    python benchmarks/gguf_shapes.py two-layers  # 5 GB: a file of each kind of blocks

Writes SHAPE-KIND.gguf into --folder, with the names, metadata and vocabulary of the published
model's file. Vocabularies are those with which llama.cpp tests its tokenizers; Gemma's is that of
Gemma 4, which is as large. Weights are written in BF16, and llama-quantize makes the kinds of it,
so which matrix gets which blocks is its own choice; in two-layers, which has the matrices of
Llama-3.1-8B, all have the same. Existing files are kept.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, TokenType
from gguf.constants import GGMLQuantizationType as Kind
from peers.install import DEFAULT_DIR, run
from shapes import SEED, SHAPES
from workloads import VOCAB

KINDS = ("Q4_K_M", "Q4_0")
TWO_LAYERS = "two-layers"
BLOCK_KINDS = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
)
MADE_UP: dict[str, dict[str, Any]] = {
    # https://huggingface.co/meta-llama/Llama-3.1-8B/blob/main/config.json, but for layers and
    # vocabulary
    TWO_LAYERS: {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14336,
        "vocab_size": 50257,
        "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
    }
}
CONFIGS: dict[str, dict[str, Any]] = SHAPES | MADE_UP
ALIGNMENT = 32
PART = 1 << 24
"""Number of weights that are made at once."""
GGUF_NAMES = {"llama": "llama", "qwen3": "qwen3", "gemma3_text": "gemma3"}
"""Model type of a config.json -> architecture of a GGUF file."""
VOCABULARIES = {
    "llama-3.2-1b": "llama-bpe",
    "qwen3-1.7b": "qwen2",
    "gemma-3-1b": "gemma-4",
    TWO_LAYERS: "gpt-2",
}
"""Shape -> models/ggml-vocab-NAME.gguf in the sources of llama.cpp."""
SENTENCEPIECE = ("gemma3",)
"""Architectures whose tokenizer merges by scores."""

Tensor = tuple[str, tuple[int, ...], Kind]
"""The name, shape [out, in] and kind of a tensor."""


def num_bytes(shape: tuple[int, ...], kind: Kind) -> int:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    return int(np.prod(shape, dtype=np.int64)) // block * block_bytes


def write_streamed(
    path: Path,
    architecture: str,
    add_metadata: Callable[[gguf.GGUFWriter], None],
    tensors: Sequence[Tensor],
    data: Callable[[Tensor], Iterator[bytes]],
) -> None:
    """Write a GGUF file of which only a part is in memory at a time. data: yields the bytes of a
    tensor, which are called for in order."""
    writer = gguf.GGUFWriter(path, architecture)
    add_metadata(writer)
    for name, extents, kind in tensors:
        size = num_bytes(extents, kind)
        if kind == Kind.F32:
            writer.add_tensor_info(name, extents, np.dtype(np.float32), size)
            continue
        block, block_bytes = GGML_QUANT_SIZES[kind]
        stored = (*extents[:-1], extents[-1] // block * block_bytes)
        writer.add_tensor_info(name, stored, np.dtype(np.uint8), size, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("ab") as file:
        file.write(bytes(-file.tell() % ALIGNMENT))
        for tensor in tensors:
            for part in data(tensor):
                file.write(part)
            file.write(bytes(-num_bytes(*tensor[1:]) % ALIGNMENT))


def dense_tensors(config: dict[str, Any]) -> list[Tensor]:
    """The tensors of a dense model whose embedding is also its head, matrices in BF16. config: its
    config.json."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    architecture = GGUF_NAMES[config["model_type"]]
    norms = {"attn_norm": hidden, "ffn_norm": hidden}
    if architecture in ("qwen3", "gemma3"):
        norms |= {"attn_q_norm": head, "attn_k_norm": head}
    if architecture == "gemma3":
        norms |= {"post_attention_norm": hidden, "post_ffw_norm": hidden}
    matrices = {
        "attn_q": (q, hidden),
        "attn_k": (kv, hidden),
        "attn_v": (kv, hidden),
        "attn_output": (hidden, q),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    found: list[Tensor] = [("token_embd.weight", (config["vocab_size"], hidden), Kind.BF16)]
    if "rope_scaling" in config:
        found.append(("rope_freqs.weight", (head // 2,), Kind.F32))
    for layer in range(config["num_hidden_layers"]):
        place = f"blk.{layer}"
        found += [(f"{place}.{name}.weight", (size,), Kind.F32) for name, size in norms.items()]
        found += [(f"{place}.{name}.weight", shape, Kind.BF16) for name, shape in matrices.items()]
    return [*found, ("output_norm.weight", (hidden,), Kind.F32)]


def add_metadata(writer: gguf.GGUFWriter, config: dict[str, Any], name: str) -> None:
    """What llama.cpp's converter writes about the model, besides its vocabulary."""
    writer.add_type("model")
    writer.add_name(name)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    if config["model_type"] == "llama":
        writer.add_rope_dimension_count(config["head_dim"])
    if "sliding_window" in config:
        writer.add_sliding_window(config["sliding_window"])


def add_vocabulary(writer: gguf.GGUFWriter, architecture: str, path: Path) -> npt.NDArray[np.bool_]:
    """Copy the vocabulary of a GGUF file; returns which ids have a text of their own."""
    fields = gguf.GGUFReader(path).fields
    found = {name: field for name, field in fields.items() if name.startswith("tokenizer.ggml.")}
    texts = found["tokenizer.ggml.tokens"].contents()
    is_byte_level = architecture not in SENTENCEPIECE
    for name, field in found.items():
        value, types = field.contents(), field.types
        if not is_byte_level:
            if name == "tokenizer.ggml.merges":
                continue
            if name == "tokenizer.ggml.model":
                value = "llama"
            if name == "tokenizer.ggml.scores":  # what comes first is merged first
                value = [-float(index) for index in range(len(texts))]
        writer.add_key_value(name, value, types[0], types[1] if len(types) > 1 else None)
    kinds = found["tokenizer.ggml.token_type"].contents()
    return np.array(
        [
            kind == TokenType.NORMAL and (not is_byte_level or is_text(text))
            for text, kind in zip(texts, kinds, strict=True)
        ]
    )


def is_text(token: str) -> bool:
    """Whether a token of a byte-level vocabulary is whole characters, and not a part of one."""
    try:
        bytes(BYTES[letter] for letter in token).decode()
    except UnicodeDecodeError:
        return False
    return True


def _byte_letters() -> dict[str, int]:
    """GPT-2's letter for each byte: itself if it can be seen, else one from 256 on."""
    seen = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {
        chr(256 + index): byte for index, byte in enumerate(hidden)
    }


BYTES = _byte_letters()


def llama3_factors(config: dict[str, Any]) -> npt.NDArray[np.float32]:
    """The divisor of the frequency of each pair in Llama 3 (`rope_type` "llama3" of
    transformers)."""
    scaling, head = config["rope_scaling"], config["head_dim"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength = 2 * np.pi * config["rope_theta"] ** (np.arange(0, head, 2) / head)
    turns = scaling["original_max_position_embeddings"] / wavelength
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / scaling["factor"] + smooth)).astype(np.float32)


def write_bf16(path: Path, name: str, config: dict[str, Any], vocabulary: Path) -> None:
    """Write a model with weights of a standard deviation of 0.02. The embeddings of ids outside
    ``VOCAB``, and of those without a text, are zeros: their logits are 0, which is never the
    largest of thousands, and a stream would have no chunk for them."""
    rng = np.random.default_rng(SEED)
    architecture = GGUF_NAMES[config["model_type"]]
    is_used = np.zeros(config["vocab_size"], np.bool_)

    def add(writer: gguf.GGUFWriter) -> None:
        add_metadata(writer, config, name)
        has_text = add_vocabulary(writer, architecture, vocabulary)
        is_used[slice(*VOCAB)] = has_text[slice(*VOCAB)]

    def data(tensor: Tensor) -> Iterator[bytes]:
        name, shape, kind = tensor
        if kind == Kind.F32:
            is_factor = name == "rope_freqs.weight"
            values = llama3_factors(config) if is_factor else np.ones(shape, np.float32)
            yield values.tobytes()
            return
        rows = PART // shape[1]
        for first in range(0, shape[0], rows):
            size = (min(rows, shape[0] - first), shape[1])
            values = rng.standard_normal(size, np.float32) * np.float32(0.02)
            if name == "token_embd.weight":
                values[~is_used[first : first + size[0]]] = 0
            yield (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()

    write_streamed(path, architecture, add, dense_tensors(config), data)


def gguf_path(folder: Path, shape: str, kind: str) -> Path:
    return folder / f"{shape}-{kind}.gguf"


def kinds_of(shape: str) -> Sequence[str]:
    """The kinds that are made of a shape, as llama-quantize calls them."""
    return BLOCK_KINDS if shape == TWO_LAYERS else KINDS


def make(shape: str, kinds: Sequence[str], folder: Path, peers_dir: Path) -> None:
    """Make the files of a shape that do not exist yet."""
    folder.mkdir(parents=True, exist_ok=True)
    llama, original = peers_dir / "llama.cpp", gguf_path(folder, shape, "BF16")
    unfinished = folder / f"{shape}.partial"
    if not original.exists():
        models = llama / "source" / "llama.cpp" / "models"
        vocabulary = models / f"ggml-vocab-{VOCABULARIES[shape]}.gguf"
        write_bf16(unfinished, shape, CONFIGS[shape], vocabulary)
        unfinished.rename(original)
    for kind in kinds:
        path = gguf_path(folder, shape, kind)
        if not path.exists():
            quantize = llama / "build" / "bin" / "llama-quantize"
            options = ["--pure"] if shape == TWO_LAYERS else []
            run(quantize, *options, original, unfinished, kind)
            unfinished.rename(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shapes", nargs="+", choices=list(CONFIGS))
    parser.add_argument("--folder", type=Path, default=DEFAULT_DIR / "shapes")
    parser.add_argument("--peers-dir", type=Path, default=DEFAULT_DIR)
    args = parser.parse_args()
    for shape in args.shapes:
        make(shape, kinds_of(shape), args.folder, args.peers_dir)


if __name__ == "__main__":
    main()
