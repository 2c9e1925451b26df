"""Every command line, and every option with a value, in five editions of SGLang's tuning guide:
what people will paste.

They are facts of those pages (docs.sglang.ai, "Hyperparameter Tuning", 2024 to 2026, and a Chinese
translation of 2025), for tests. Where a page names an option and its value in prose, this table has
them as an option.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class GuideCommand:
    guide: str
    text: str
    refused: str = ""
    """A pattern of the refusal, if the command asks for something that is not supported here."""
    without_effect: tuple[str, ...] = ()
    """Fields whose options are accepted and change nothing, which the start says."""

    def argv(self, model: str | None = None) -> list[str]:
        """The words after ``setpoint serve``. model: replaces the guide's model; "" leaves the
        option out."""
        words = shlex.split(self.text.replace("\\\n", " "))
        while words and re.fullmatch(r"\w+=\S*", words[0]):
            del words[0]
        if words[:3] == ["python3", "-m", "sglang.launch_server"]:
            del words[:3]
        if model is not None and words[0] in ("--model", "--model-path"):
            words[:2] = [words[0], model] if model else []
        return words


GRAPHS, HICACHE = ("cuda_graph_max_bs_decode",), ("enable_hierarchical_cache", "hicache_ratio")
FIRST, EXCERPT, CACHE, CHINESE, WORKLOADS = (
    "2024, first",
    "2025, excerpt",
    "2025, torch.compile cache",
    "2025, Chinese",
    "2026, workloads",
)

GUIDE_COMMANDS = (
    *(
        GuideCommand(guide, text)
        for guide in (FIRST, EXCERPT, CACHE)
        for text in (
            "--schedule-policy lpm",
            "--schedule-conservativeness 0.3",
            "--schedule-conservativeness 1.3",
            "--chunked-prefill-size 4096",
            "--chunked-prefill-size 2048",
            "--enable-torch-compile",
        )
    ),
    GuideCommand(FIRST, "--enable-overlap-scheduler", without_effect=("enable_overlap_scheduler",)),
    GuideCommand(FIRST, "--schedule-policy fcfs"),
    GuideCommand(
        CACHE,
        "TORCHINDUCTOR_CACHE_DIR=/root/inductor_root_cache python3 -m sglang.launch_server --model"
        " meta-llama/Llama-3.1-8B-Instruct --enable-torch-compile",
    ),
    GuideCommand(CACHE, "--schedule-policy fcfs"),
    GuideCommand(CHINESE, "--schedule-conservativeness 0.3"),
    GuideCommand(CHINESE, "--schedule-conservativeness 1.3"),
    GuideCommand(CHINESE, "--mem-fraction-static 0.8"),
    GuideCommand(CHINESE, "--mem-fraction-static 0.7"),
    GuideCommand(CHINESE, "--chunked-prefill-size 4096"),
    GuideCommand(CHINESE, "--chunked-prefill-size 2048"),
    GuideCommand(
        CHINESE, "--cuda-graph-max-bs 512 --mem-fraction-static 0.8", without_effect=GRAPHS
    ),
    GuideCommand(
        CHINESE, "--cuda-graph-max-bs 768 --mem-fraction-static 0.8", without_effect=GRAPHS
    ),
    GuideCommand(CHINESE, "--enable-torch-compile"),
    GuideCommand(
        CHINESE,
        "--quantization fp8",
    ),
    GuideCommand(
        CHINESE,
        "--enable-dp-attention --dp-size 8",
        refused="leave --enable-dp-attention out",
    ),
    GuideCommand(CHINESE, "--schedule-policy lpm"),
    GuideCommand(WORKLOADS, "--schedule-conservativeness 0.3"),
    GuideCommand(WORKLOADS, "--schedule-conservativeness 1.3"),
    GuideCommand(WORKLOADS, "--chunked-prefill-size 4096"),
    GuideCommand(WORKLOADS, "--chunked-prefill-size 2048"),
    GuideCommand(WORKLOADS, "--mem-fraction-static 0.8"),
    GuideCommand(WORKLOADS, "--mem-fraction-static 0.7"),
    GuideCommand(
        WORKLOADS,
        "python3 -m sglang.launch_server \\\n  --model-path your-model \\\n  --cuda-graph-max-bs"
        " 512 \\\n  --mem-fraction-static 0.85",
        without_effect=GRAPHS,
    ),
    GuideCommand(WORKLOADS, "--enable-torch-compile"),
    GuideCommand(
        WORKLOADS,
        "--quantization fp8",
    ),
    GuideCommand(
        WORKLOADS,
        "--enable-dp-attention --dp-size 8",
        refused="leave --enable-dp-attention out",
    ),
    GuideCommand(WORKLOADS, "--schedule-policy lpm"),
    GuideCommand(WORKLOADS, "--max-running-requests 128"),
    GuideCommand(WORKLOADS, "--cuda-graph-max-bs 256", without_effect=GRAPHS),
    *(
        GuideCommand(
            WORKLOADS,
            f"--attention-backend {name}",
            refused=rf"--attention-backend {name} is not supported .* NVIDIA GPUs.* take triton",
        )
        for name in ("trtllm_mha", "trtllm_mla")
    ),
    *(
        GuideCommand(
            WORKLOADS,
            f"--attention-backend {name}",
            refused=rf"--attention-backend {name} does not run on --device cpu; use torch_ref",
        )
        for name in ("fa3", "flashinfer")
    ),
    GuideCommand(WORKLOADS, "--schedule-conservativeness 1.2"),
    GuideCommand(WORKLOADS, "--mem-fraction-static 0.90 \\\n--max-running-requests 4096"),
    GuideCommand(WORKLOADS, "--chunked-prefill-size 16384"),
    GuideCommand(WORKLOADS, "--dp-size 8"),
    GuideCommand(
        WORKLOADS,
        "--enable-hierarchical-cache \\\n--hicache-ratio 2 \\\n--hicache-storage-backend hf3fs",
        refused="Write your own storage",
    ),
    GuideCommand(
        WORKLOADS, "--enable-hierarchical-cache --hicache-ratio 2", without_effect=HICACHE
    ),
    GuideCommand(WORKLOADS, "--page-size 64"),
    GuideCommand(WORKLOADS, "--page-size 1"),
    GuideCommand(
        WORKLOADS,
        "--enable-hierarchical-cache \\\n--hicache-storage-backend hf3fs \\\n--disaggregation-mode"
        " decode \\\n--disaggregation-decode-enable-offload-kvcache",
        refused="Write your own storage",
    ),
    GuideCommand(
        WORKLOADS,
        "--disaggregation-mode decode",
    ),
    GuideCommand(
        WORKLOADS,
        "python3 -m sglang.launch_server \\\n  --model-path your-model \\\n  --enable-metrics \\\n "
        " --enable-cache-report",
    ),
    GuideCommand(WORKLOADS, "--kv-cache-dtype fp8_e4m3"),
)
