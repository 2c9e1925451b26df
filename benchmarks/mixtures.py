"""Mixtures of experts in GGUF files: one stream and 16 beside llama.cpp, and the share of the
memory's bandwidth that one stream reaches.

    python benchmarks/peers/install.py llama.cpp
    python benchmarks/mixtures.py --shape olmoe-1b-7b  # 4 GB, and some minutes
    python benchmarks/mixtures.py --precision BF16  # 14 GB, and as much again for our conversion
    python benchmarks/mixtures.py --shape qwen3-30b-a3b --layers 24 --only W1

Writes a file of the published shape with random weights, tensor by tensor, and keeps it in
--folder. Both engines serve this file with the same number of threads, in turns. The bytes of a
token are those that llama.cpp reads as well: the file's own of every matrix but the embedding, with
those of the experts that a token uses. The bandwidth is that of reading half a GiB in order, before
the turns and after them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from compare import Run, compare, peer_entrant, setpoint_entrant, table
from gguf.constants import GGMLQuantizationType as Kind
from gguf_shapes import Tensor, num_bytes, write_streamed
from machine import bandwidth, environment
from peers.catalog import llama_cpp
from peers.install import DEFAULT_DIR
from report import DECODE, Report
from serving import NUM_THREADS, PACKAGES
from workloads import Workload

from setpoint.core.model import BLOCK_KINDS
from setpoint_testing.tiny_gguf import byte_vocabulary

WORKLOADS = (
    Workload("W1", "one stream, 32 in, 96 out", 1, 0, 32, 96),
    Workload("W2", "16 × (32 in, 64 out)", 16, 0, 32, 64),
)
Q4_K_M, BF16 = "Q4_K_M", "BF16"
SAMPLE = 1 << 16
"""Number of random blocks, or values, of a kind, which are repeated."""


@dataclass(slots=True, frozen=True)
class Shape:
    """A published mixture (config.json on the hub)."""

    architecture: str
    """GGUF's name."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    chosen: int
    inner: int
    vocab: int
    whole_norms: bool

    def tensors(self, layers: int, precision: str) -> Iterator[tuple[str, tuple[int, ...], Kind]]:
        """(name, shape, kind) of all tensors in a file of this precision."""
        for name, shape, kind in self._tensors(layers):
            yield name, shape, Kind.BF16 if precision == BF16 and kind != Kind.F32 else kind

    def _tensors(self, layers: int) -> Iterator[tuple[str, tuple[int, ...], Kind]]:
        """The tensors of a Q4_K_M file; llama.cpp's rules choose the kinds (use_more_bits in
        src/llama-quant.cpp)."""
        hidden, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "token_embd.weight", (self.vocab, hidden), Kind.Q4_K
        for layer in range(layers):
            more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
            finer = Kind.Q6_K if more else Kind.Q4_K
            norms = (q, kv) if self.whole_norms else (self.head_dim, self.head_dim)
            for name, shape, kind in (
                ("attn_norm", (hidden,), Kind.F32),
                ("attn_q", (q, hidden), Kind.Q4_K),
                ("attn_k", (kv, hidden), Kind.Q4_K),
                ("attn_v", (kv, hidden), finer),
                ("attn_output", (hidden, q), Kind.Q4_K),
                ("attn_q_norm", norms[:1], Kind.F32),
                ("attn_k_norm", norms[1:], Kind.F32),
                ("ffn_norm", (hidden,), Kind.F32),
                ("ffn_gate_inp", (self.experts, hidden), Kind.F32),
                ("ffn_gate_exps", (self.experts, self.inner, hidden), Kind.Q4_K),
                ("ffn_up_exps", (self.experts, self.inner, hidden), Kind.Q4_K),
                ("ffn_down_exps", (self.experts, hidden, self.inner), finer),
            ):
                yield f"blk.{layer}.{name}.weight", shape, kind
        yield "output_norm.weight", (hidden,), Kind.F32
        yield "output.weight", (self.vocab, hidden), Kind.Q6_K

    def active_bytes(self, layers: int, precision: str) -> float:
        """Bytes of the file that one token reads."""
        total = 0.0
        for name, shape, kind in self.tensors(layers, precision):
            share = self.chosen / self.experts if "_exps" in name else 1
            total += share * num_bytes(shape, kind) * (name != "token_embd.weight")
        return total


SHAPES = {
    # https://huggingface.co/allenai/OLMoE-1B-7B-0924/blob/main/config.json
    "olmoe-1b-7b": Shape("olmoe", 16, 2048, 16, 16, 128, 64, 8, 1024, 50304, True),
    # https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json
    "qwen3-30b-a3b": Shape("qwen3moe", 48, 2048, 32, 4, 128, 128, 8, 768, 151936, False),
}


def write(path: Path, shape: Shape, layers: int, precision: str) -> None:
    """Write the file."""
    rng = np.random.default_rng(0)
    samples = {kind: _random(rng, kind) for kind in (Kind.Q4_K, Kind.Q6_K, Kind.BF16)}

    def data(tensor: Tensor) -> Iterator[bytes]:
        _, extents, kind = tensor
        if kind == Kind.F32:
            is_norm = len(extents) == 1
            values = np.ones(extents) if is_norm else rng.normal(0, 0.02, extents)
            yield values.astype(np.float32).tobytes()
            return
        size, sample = num_bytes(extents, kind), samples[kind]
        yield (sample * (size // len(sample) + 1))[:size]

    tensors = list(shape.tensors(layers, precision))
    write_streamed(
        path, shape.architecture, lambda writer: _add_metadata(writer, shape, layers), tensors, data
    )


def _random(rng: np.random.Generator, kind: Kind) -> bytes:
    if kind == Kind.BF16:
        values = rng.normal(0, 0.02, SAMPLE).astype(np.float32)
        return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    block = BLOCK_KINDS[kind.name]
    raw = rng.integers(0, 256, (SAMPLE, block.num_bytes), dtype=np.uint8)
    for at in block.scales:
        scales = rng.normal(0, 3e-5, SAMPLE).astype(np.float16)
        raw[:, at : at + 2] = scales[:, None].view(np.uint8)
    return raw.tobytes()


def _add_metadata(writer: gguf.GGUFWriter, shape: Shape, layers: int) -> None:
    writer.add_block_count(layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_expert_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.chosen)
    texts = byte_vocabulary(shape.vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(texts)
    writer.add_token_types([3 if text.startswith("<|") else 1 for text in texts])
    writer.add_token_merges(["h e", "l l", "he ll", "hell o", "Ġ w"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="olmoe-1b-7b")
    parser.add_argument(
        "--layers", type=int, help="a part of the model's layers, if it is too large"
    )
    parser.add_argument("--precision", choices=[Q4_K_M, BF16], default=Q4_K_M)
    parser.add_argument("--folder", type=Path, default=DEFAULT_DIR / "shapes")
    parser.add_argument("--peers-dir", type=Path, default=DEFAULT_DIR)
    parser.add_argument("--only", default="W1,W2")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--write-only", action="store_true", help="write the file and end")
    args = parser.parse_args()
    shape, layers = SHAPES[args.shape], args.layers or SHAPES[args.shape].layers
    path = args.folder / f"{args.shape}-{layers}-{args.precision}.gguf"
    if not path.exists():
        args.folder.mkdir(parents=True, exist_ok=True)
        write(path.with_suffix(".partial"), shape, layers, args.precision)
        path.with_suffix(".partial").rename(path)
    if args.write_only:
        return 0
    print(f"{environment(*PACKAGES)}; load average before: {os.getloadavg()[0]:.2f}\n", flush=True)
    # A file of 18.6 GB needs more than the default share of 24 GiB.
    options = ["--max-total-tokens", "4096", "--mem-fraction-static", "0.93"]
    ours = setpoint_entrant("setpoint", args.precision, str(path), options, {})
    peer = llama_cpp(
        args.peers_dir / "llama.cpp",
        path,
        args.precision,
        args.precision,
        NUM_THREADS,
        num_slots=16,
        slot_tokens=256,
    )
    rival = peer_entrant(peer)
    workloads = [workload for workload in WORKLOADS if workload.name in args.only.split(",")]
    run, rates = Run({workload.name: {} for workload in workloads}), [bandwidth(NUM_THREADS)]
    asyncio.run(compare(ours, [rival], workloads, run, reps=args.reps, patience_s=0))
    rates.append(bandwidth(NUM_THREADS))
    print(table(ours, [rival], workloads, run))
    active, rate = shape.active_bytes(layers, args.precision), statistics.median(rates)
    print(f"\nBandwidth {rates[0] / 1e9:.1f} and {rates[1] / 1e9:.1f} GB/s", end="; ")
    print(f"a token reads {active / 1e9:.2f} GB of the file.")
    for name in (ours.name, rival.name):
        if values := Report(workloads, run.results).values(workloads[0], name, DECODE):
            print(f"{name}: {statistics.median(values) * active / rate:.0%} of the bandwidth")
    return int(bool(run.skipped))


if __name__ == "__main__":
    sys.exit(main())
