"""Writes tiny random Llama models as GGUF files, as llama.cpp's converter would, for tests.

Works with numpy and the gguf package's writer. Callers give weights under their Hugging Face names
and in that row order; this file permutes and quantises them, so that a test can compare with the
originals.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, TokenType
from tokenizers.pre_tokenizers import ByteLevel

Array = npt.NDArray[Any]
BLOCK_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content']"
    " }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(slots=True, frozen=True)
class TinyLlama:
    """Dimensions. With the defaults every matrix fits every ggml type with blocks of 32."""

    num_layers: int = 2
    hidden_size: int = 64
    intermediate_size: int = 96
    num_heads: int = 4
    num_kv_heads: int = 2
    vocab_size: int = 320
    context_len: int = 256
    tie: bool = True

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape [out, in] of every tensor by its Hugging Face name."""
        kv = self.hidden_size // self.num_heads * self.num_kv_heads
        hidden, inner = self.hidden_size, self.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        if not self.tie:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        for layer in range(self.num_layers):
            block = dict.fromkeys(BLOCK_NAMES, (hidden,)) | {
                "self_attn.q_proj": (hidden, hidden),
                "self_attn.k_proj": (kv, hidden),
                "self_attn.v_proj": (kv, hidden),
                "self_attn.o_proj": (hidden, hidden),
                "mlp.gate_proj": (inner, hidden),
                "mlp.up_proj": (inner, hidden),
                "mlp.down_proj": (hidden, inner),
            }
            shapes |= {
                f"model.layers.{layer}.{name}.weight": shape for name, shape in block.items()
            }
        return shapes

    def weights(self, seed: int = 0) -> dict[str, Array]:
        """Random float32 weights."""
        rng = np.random.default_rng(seed)
        return {
            name: rng.normal(0, 0.1, shape).astype(np.float32)
            for name, shape in self.shapes().items()
        }


def permuted(weight: Array, num_heads: int) -> Array:
    """The weight in llama.cpp's row order for q and k: the two halves of each head interleaved."""
    return weight.reshape(num_heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def gguf_tensors(model: TinyLlama, weights: dict[str, Array]) -> dict[str, Array]:
    """The same weights under GGUF's names and in GGUF's row order."""
    result = {}
    for name, weight in weights.items():
        if name.endswith("q_proj.weight"):
            weight = permuted(weight, model.num_heads)
        elif name.endswith("k_proj.weight"):
            weight = permuted(weight, model.num_kv_heads)
        result[gguf_name(name)] = weight
    return result


def gguf_name(name: str) -> str:
    """GGUF's name for a tensor with this Hugging Face name."""
    stem = name.removesuffix(".weight")
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{BLOCK_NAMES[part]}.weight"


def random_blocks(shape: tuple[int, ...], kind: GGMLQuantizationType, seed: int = 0) -> Array:
    """Random bytes of a quantised matrix: only small ones, so that every scale is a finite
    float16."""
    block, block_bytes = GGML_QUANT_SIZES[kind]
    return np.random.default_rng(seed).integers(
        0, 0x40, (*shape[:-1], shape[-1] // block * block_bytes), dtype=np.uint8
    )


def metadata(model: TinyLlama) -> dict[str, Any]:
    """Every metadata key of a llama file with a byte-level vocabulary; change or drop some to make
    a test's file."""
    texts = byte_vocabulary(model.vocab_size)
    return {
        "general.name": "tiny",
        "llama.block_count": model.num_layers,
        "llama.context_length": model.context_len,
        "llama.embedding_length": model.hidden_size,
        "llama.feed_forward_length": model.intermediate_size,
        "llama.attention.head_count": model.num_heads,
        "llama.attention.head_count_kv": model.num_kv_heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": model.hidden_size // model.num_heads,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": [
            int(TokenType.CONTROL if text in SPECIALS else TokenType.NORMAL) for text in texts
        ],
        "tokenizer.ggml.merges": ["h e", "l l", "he ll", "hell o", "Ġ w"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def byte_vocabulary(size: int) -> list[str]:
    """Special tokens, the 256 byte letters, a few merged words, and unused fillers up to
    ``size``."""
    texts = [*SPECIALS, *sorted(ByteLevel.alphabet()), "he", "ll", "hell", "hello", "Ġw"]
    return texts + [f"[PAD{index}]" for index in range(len(texts), size)]


def write(
    path: Path,
    tensors: dict[str, Array],
    keys: dict[str, Any],
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    arch: str = "llama",
    raw: dict[str, tuple[Array, GGMLQuantizationType]] | None = None,
) -> Path:
    """Write a GGUF file, with matrices as ``kind`` and vectors as F32; returns its path. raw:
    tensors that are replaced by bytes of the given type."""
    writer = _writer(path, arch, keys)
    for name, tensor in tensors.items():
        if raw and name in raw:
            writer.add_tensor(name, raw[name][0], raw_dtype=raw[name][1])
        elif tensor.ndim == 1 or kind == GGMLQuantizationType.F32:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_split(
    folder: Path,
    tensors: dict[str, Array],
    keys: dict[str, Any],
    *,
    count: int = 3,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    arch: str = "llama",
) -> list[Path]:
    """Write a GGUF file in parts, as llama.cpp's gguf-split would; returns their paths."""
    paths, names = [], list(tensors)
    for number in range(count):
        own = {name: tensors[name] for name in names[number::count]}
        said = {"split.no": number, "split.count": count, "split.tensors.count": len(names)}
        path = folder / f"tiny-{number + 1:05d}-of-{count:05d}.gguf"
        paths.append(write(path, own, said | (keys if number == 0 else {}), kind=kind, arch=arch))
    return paths


def write_header(path: Path, model: TinyLlama) -> Path:
    """Write the header of a GGUF file in float16, and a hole instead of the weights; so a model of
    any size takes no room on the disk. Returns the file's path."""
    writer = _writer(path, "llama", metadata(model))
    num_bytes = 0
    for name, shape in model.shapes().items():
        dtype = np.dtype(np.float16 if len(shape) > 1 else np.float32)
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        writer.add_tensor_info(gguf_name(name), shape, dtype, size)
        num_bytes += size + 32  # a tensor begins at a multiple of 32 bytes
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, path.stat().st_size + num_bytes)
    return path


def _writer(path: Path, arch: str, keys: dict[str, Any]) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, arch)
    add: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in keys.items():
        add[type(value)](key, value)
    return writer
