"""Models of published shapes with random weights, and the peers' copies of them, so that engines
can be compared at sizes whose weights this machine cannot download.

    python benchmarks/peers/install.py                   # the peers, once
    python benchmarks/shapes.py llama-3.2-1b             # 12 GB and three minutes on two cores
    python benchmarks/compare.py --shape llama-3.2-1b

Speed does not depend on the values of the weights, and every engine gets the same ones: one set of
bf16 values, and roundings of it. The tokenizer is the default model's. Answers consist of the ids
that the workloads' prompts also have, because an id without text would give a stream no chunk.
Existing files are kept. A peer that is not installed gets no copy.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from peers import quantize_w8a8
from peers.catalog import Copies, shape_copies
from peers.install import (
    DEFAULT_DIR,
    GGUF_TYPES,
    OPENVINO_WEIGHTS,
    export_openvino,
    packaged_model,
    run,
)
from workloads import VOCAB

from setpoint.checkpoint.source import locate

SEED = 0
SHAPES: dict[str, dict[str, object]] = {
    # https://huggingface.co/meta-llama/Llama-3.2-1B/blob/main/config.json
    "llama-3.2-1b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
    },
    # https://huggingface.co/Qwen/Qwen3-1.7B/blob/main/config.json
    "qwen3-1.7b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 2048,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 6144,
        "vocab_size": 151936,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
    },
    # https://huggingface.co/google/gemma-3-1b-pt/blob/main/config.json
    "gemma-3-1b": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": 1152,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "intermediate_size": 6912,
        "vocab_size": 262144,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
    },
}
COMMON = {"tie_word_embeddings": True, "hidden_act": "silu", "torch_dtype": "bfloat16"}
CONVERTER_NEEDS = ("sentencepiece", "pyyaml")
"""Packages that llama.cpp's converter needs in addition to those of vLLM's environment."""


def write_model(config: dict[str, object], tokenizer: Path, folder: Path) -> None:
    """Write a checkpoint as on the hub: ``config``, bf16 weights with a standard deviation of 0.02,
    and the tokenizer's files. The embeddings of ids outside ``VOCAB`` are zeros, so that their
    logits are 0, which is never the largest of thousands."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    special = json.loads((tokenizer / "config.json").read_text())
    ends = {name: special[name] for name in ("bos_token_id", "eos_token_id")}
    unfinished = folder.with_suffix(".partial")
    unfinished.mkdir(parents=True, exist_ok=True)
    (unfinished / "config.json").write_text(json.dumps(config | COMMON | ends, indent=1))
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(unfinished), dtype=torch.bfloat16
    )
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding[: VOCAB[0]] = 0
        embedding[VOCAB[1] :] = 0
    model.save_pretrained(unfinished)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, unfinished)
    # transformers writes its own newer form of the config, which not every peer reads.
    (unfinished / "config.json").write_text(json.dumps(config | COMMON | ends, indent=1))
    unfinished.rename(folder)


def write_gguf(copies: Copies, peers_dir: Path) -> None:
    """Write llama.cpp's copies with its own converter and quantizer."""
    llama, python = peers_dir / "llama.cpp", peers_dir / "vllm" / "venv" / "bin" / "python"
    for kind in GGUF_TYPES:
        target = copies.gguf(kind)
        partial = target.with_suffix(".partial")
        if target.exists():
            continue
        if kind == GGUF_TYPES[0]:
            run(python, "-m", "pip", "install", "-q", *CONVERTER_NEEDS)
            script = llama / "source" / "llama.cpp" / "convert_hf_to_gguf.py"
            run(python, script, copies.bf16, "--outtype", kind.lower(), "--outfile", partial)
        else:
            quantize = llama / "build" / "bin" / "llama-quantize"
            run(quantize, copies.gguf(GGUF_TYPES[0]), partial, kind)
        partial.rename(target)


def make(name: str, peers_dir: Path) -> None:
    """Write the model of one shape and all copies of it."""
    copies = shape_copies(peers_dir, name)
    if not copies.bf16.exists():
        write_model(
            SHAPES[name], locate(str(packaged_model(peers_dir)), log=print).folder, copies.bf16
        )
    if (peers_dir / "llama.cpp").exists():
        write_gguf(copies, peers_dir)
    if (peers_dir / "vllm").exists() and not (copies.w8a8 / "config.json").exists():
        script = Path(quantize_w8a8.__file__)
        run(sys.executable, script, copies.bf16, copies.w8a8)
    if (peers_dir / "openvino").exists():
        for weights in OPENVINO_WEIGHTS:
            export_openvino(peers_dir / "openvino", copies.bf16, copies.openvino(weights), weights)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shapes", nargs="+", choices=list(SHAPES))
    parser.add_argument("--peers-dir", type=Path, default=DEFAULT_DIR)
    args = parser.parse_args()
    for name in args.shapes:
        make(name, args.peers_dir)


if __name__ == "__main__":
    main()
