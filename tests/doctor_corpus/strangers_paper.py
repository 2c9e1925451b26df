"""Paper for logs that are written by hand: the line formats of SGLang's generations, the start of
a server, and the wrappers that containers and collectors put around lines.

Written from the formats and formulas alone, without the project's scheduler and without the
doctor's rules, as somebody would who tests the doctor from outside.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from random import Random

CLIENTS = ("10.42.0.17", "10.42.3.201", "172.18.0.1", "127.0.0.1", "192.168.7.40")
PATHS = ("/v1/chat/completions", "/v1/completions", "/generate")


@dataclass(frozen=True, slots=True)
class Machine:
    """A device of ``gb`` with a model of which ``weights`` GB lie on each; ``cell`` bytes a token."""

    device: str
    gb: float
    model: str
    weights: float
    cell: int
    tp: int = 1
    context: int = 32768
    graph_gb: float = 1.6
    max_bs: int = 256
    chunk: int = 8192

    def pool(self, fraction: float) -> int:
        return max(0, int((self.gb * fraction - self.weights) * 2**30 / self.cell))

    def free(self, fraction: float) -> float:
        return self.gb * (1 - fraction) - self.graph_gb


LLAMA8 = "meta-llama/Llama-3.1-8B-Instruct"
H100_8B = Machine("H100", 79.1, LLAMA8, 15.1, 131072, context=131072)
A100_40 = Machine("A100-40GB", 39.4, LLAMA8, 15.1, 131072, max_bs=32, chunk=4096)
A100_80 = Machine("A100-80GB", 79.2, "Qwen/Qwen2.5-32B-Instruct", 61.6, 262144)
A100_TP2 = Machine("A100-80GB", 79.2, "Qwen/Qwen2.5-32B-Instruct", 30.9, 131072, tp=2)
RTX_4090 = Machine(
    "RTX 4090", 23.5, "Qwen/Qwen2.5-7B-Instruct", 14.3, 57344, max_bs=8, graph_gb=0.7, chunk=2048
)
L4 = Machine("L4", 22.0, "Qwen/Qwen2.5-3B-Instruct", 5.8, 36864, max_bs=8, graph_gb=0.5, chunk=2048)
L4_7B = Machine(
    "L4",
    22.0,
    "mistralai/Mistral-7B-Instruct-v0.3",
    13.6,
    131072,
    max_bs=8,
    graph_gb=0.6,
    chunk=2048,
)
H100_70B = Machine(
    "H100",
    79.1,
    "meta-llama/Llama-3.3-70B-Instruct",
    33.2,
    81920,
    tp=4,
    context=131072,
    graph_gb=2.6,
)
H200_V3 = Machine(
    "H200", 139.8, "deepseek-ai/DeepSeek-V3", 83.4, 70272, tp=8, context=163840, graph_gb=5.1
)
A10G = Machine("A10G", 22.1, LLAMA8, 15.1, 131072, max_bs=8, graph_gb=0.6, chunk=2048)
MACHINES = (H100_8B, A100_40, A100_80, A100_TP2, RTX_4090, L4, L4_7B, H100_70B, H200_V3, A10G)

ERAS = ("2024", "2025", "0.5.23")
STAMPS = {
    "2024": ("full", "clock", "none"),
    "2025": ("full", "full", "none"),
    "0.5.23": ("full", "full", "millis"),
}
WRAPPERS = (
    "plain",
    "plain",
    "plain",
    "compose",
    "docker",
    "k8s",
    "journal",
    "json",
    "ansi",
    "stern",
)


@dataclass(slots=True)
class Paper:
    """A log that grows: ``at`` is the seconds since ``begin``."""

    random: Random
    era: str
    machine: Machine
    fraction: float = 0.88
    stamp: str = "full"
    rank: str = ""
    wrapper: str = "plain"
    access: float = 0.0
    """How many access lines come after a batch line, on average."""
    begin: datetime = field(default_factory=lambda: datetime(2025, 3, 4, 9, 12, 31))
    at: float = 0.0
    pool_tokens: int = 0
    lines: list[str] = field(default_factory=list)
    hits: float = 0.0

    @property
    def pool(self) -> int:
        return self.pool_tokens or self.machine.pool(self.fraction)

    def on(self, rank: str) -> Paper:
        """The same log as another rank writes it."""
        return replace(self, rank=rank)

    def bare(self, text: str) -> None:
        self.lines.append(self._wrapped(text))

    def say(self, text: str, rank: str | None = None) -> None:
        rank = self.rank if rank is None else rank
        now = self.begin + timedelta(seconds=self.at)
        shown = {
            "full": f"{now:%Y-%m-%d %H:%M:%S}",
            "clock": f"{now:%H:%M:%S}",
            "millis": f"{now:%Y-%m-%d %H:%M:%S}.{now.microsecond // 1000:03d}",
            "none": "",
        }[self.stamp]
        if self.era == "2024" and self.stamp == "none":
            self.bare(f"[gpu={(rank or 'TP0')[-1]}] {text}")
            return
        inner = " ".join(part for part in (shown, rank) if part)
        self.bare(f"[{inner}] {text}" if inner else text)

    def _wrapped(self, text: str) -> str:
        now = self.begin + timedelta(seconds=self.at)
        nanos = f"{now:%Y-%m-%dT%H:%M:%S}.{now.microsecond * 1000:09d}Z"
        match self.wrapper:
            case "compose":
                return f"sglang-1  | {text}"
            case "docker":
                return json.dumps({"log": text + "\n", "stream": "stderr", "time": nanos})
            case "k8s":
                return f"{nanos} stderr F {text}"
            case "journal":
                return f"{now:%b %d %H:%M:%S} gpu-node-3 sglang[48213]: {text}"
            case "json":
                return json.dumps(
                    {"ts": nanos, "level": "INFO", "logger": "sglang", "message": text}
                )
            case "ansi":
                return f"\x1b[32mINFO\x1b[0m {text}\x1b[0m"
            case "stern":
                return f"llama-serving-0 sglang {text}"
        return text

    # the start

    def start(
        self,
        upto: str = "ready",
        *,
        args: bool = True,
        running: int = 0,
        free: float | None = None,
        **options: object,
    ) -> None:
        """``running``: max_running_requests of the ready line; 0: SGLang's default."""
        machine = self.machine
        free = machine.free(self.fraction) if free is None else free
        chunk = int(options.get("chunked_prefill_size") or machine.chunk)  # type: ignore[call-overload]
        prefill = int(options.get("max_prefill_tokens") or 16384)  # type: ignore[call-overload]
        if args:
            self._args(chunk, prefill, options)
        self.at += 9
        stages = ["weights", "pool", "graphs", "ready"]
        stages = stages[: stages.index(upto) + 1]
        self.say("Init torch distributed begin." if self.era != "2024" else "Init nccl begin.")
        self.say(f"Load weight begin. avail mem={machine.gb - 0.4:.2f} GB")
        self.at += 14
        shards = max(2, int(machine.weights / 4))
        self.bare(
            f"Loading safetensors checkpoint shards: 100% Completed | {shards}/{shards} [00:{shards:02d}<00:00,  1.02s/it]"
        )
        if stages[-1] == "weights":
            return
        self.say(
            f"Load weight end. type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem={machine.gb - 0.4 - machine.weights:.2f} GB, mem usage={machine.weights:.2f} GB."
        )
        self.at += 1
        size = self.pool * machine.cell / 2**30
        if self.era != "2024":
            self.say(
                f"KV Cache is allocated. #tokens: {self.pool}, K size: {size / 2:.2f} GB, V size: {size / 2:.2f} GB"
            )
        left = machine.gb - 0.4 - machine.weights - size
        self.say(f"Memory pool end. avail mem={left:.2f} GB")
        if stages[-1] == "pool":
            return
        if not options.get("disable_cuda_graph"):
            self.say(
                f"Capture cuda graph begin. This can take up to several minutes. avail mem={left:.2f} GB"
                if self.era != "0.5.23"
                else f"Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, avail mem={left:.2f} GB"
            )
            self.at += 11
            if stages[-1] == "graphs":
                return
            self.say(
                f"Capture cuda graph end. Time elapsed: 10.84 s. mem usage={machine.graph_gb:.2f} GB. avail mem={free:.2f} GB."
            )
        self._ready(running, chunk, prefill, free)

    def _args(self, chunk: int, prefill: int, options: dict[str, object]) -> None:
        machine = self.machine
        known: dict[str, object] = {
            "model_path": machine.model, "tokenizer_path": machine.model, "tokenizer_mode": "auto", "load_format": "auto", "trust_remote_code": True,
            "dtype": "auto", "kv_cache_dtype": "auto", "quantization": None, "context_length": None, "device": "cuda", "served_model_name": machine.model,
            "host": "0.0.0.0", "port": 30000, "mem_fraction_static": self.fraction, "max_running_requests": None, "max_total_tokens": None,
            "chunked_prefill_size": chunk, "max_prefill_tokens": prefill, "schedule_policy": "lpm" if self.era == "2024" else "fcfs",
            "schedule_conservativeness": 1.0, "tp_size": machine.tp, "dp_size": 1, "disable_radix_cache": False, "disable_cuda_graph": False,
        }  # fmt: skip
        if self.era == "0.5.23":
            known |= {"cuda_graph_max_bs_decode": machine.max_bs, "page_size": 1}
        else:
            known |= {"cuda_graph_max_bs": None if self.era == "2024" else machine.max_bs}
        known |= options
        shown = ", ".join(f"{key}={value!r}" for key, value in known.items())
        self.say(f"server_args=ServerArgs({shown})", "")

    def _ready(self, running: int, chunk: int, prefill: int, free: float) -> None:
        machine = self.machine
        cap = running or (4096 if self.era != "2024" else 2049)
        tail = "" if self.era == "2024" else f", available_gpu_mem={free:.2f} GB"
        chunks = "" if self.era == "2024" else f"chunked_prefill_size={chunk}, "
        self.say(
            f"max_total_num_tokens={self.pool}, {chunks}max_prefill_tokens={prefill}, max_running_requests={cap}, context_len={machine.context}{tail}"
        )
        self.at += 1
        for text in (
            "INFO:     Started server process [118]",
            "INFO:     Waiting for application startup.",
            "INFO:     Application startup complete.",
            "INFO:     Uvicorn running on http://0.0.0.0:30000 (Press CTRL+C to quit)",
        ):
            self.bare(text)
        self.at += 2
        self.prefill(1, 7, 0, 0.0, 0, 0)
        self.at += 1
        self.bare('INFO:     127.0.0.1:38712 - "POST /generate HTTP/1.1" 200 OK')
        self.say("The server is fired up and ready to roll!", "")
        self.at += self.random.uniform(5, 40)

    # batches

    def prefill(
        self,
        sequences: int,
        tokens: int,
        cached: int,
        usage: float,
        running: int,
        queue: int,
        graph: bool = False,
    ) -> None:
        counts = f"#new-seq: {sequences}, #new-token: {tokens}, #cached-token: {cached}, "
        self.hits += 0.05 * (100 * cached / max(1, cached + tokens) - self.hits)
        usage = min(1.0, usage)
        match self.era:
            case "2024":
                self.say(
                    f"Prefill batch. {counts}cache hit rate: {self.hits:.2f}%, token usage: {usage:.2f}, #running-req: {running}, #queue-req: {queue}"
                )
            case "2025":
                self.say(
                    f"Prefill batch. {counts}token usage: {usage:.2f}, #running-req: {running}, #queue-req: {queue}, "
                )
            case _:
                pending = int(queue * tokens / max(1, sequences) * self.random.uniform(0.8, 1.2))
                rate = self.random.uniform(0.3, 1.0) * 20000
                self.say(
                    f"Prefill batch, {counts}token usage: {usage:.2f}, #running-req: {running}, #queue-req: {queue}, #pending-token: {pending}, cuda graph: {graph}, input throughput (token/s): {rate:.2f}"
                )
        self._visit()

    def decode(
        self, running: int, usage: float, speed: float, queue: int, graph: bool = True
    ) -> None:
        usage = min(1.0, usage)
        tokens = int(usage * self.pool)
        match self.era:
            case "2024":
                self.say(
                    f"Decode batch. #running-req: {running}, #token: {tokens}, token usage: {usage:.2f}, gen throughput (token/s): {speed:.2f}, #queue-req: {queue}"
                )
            case "2025":
                self.say(
                    f"Decode batch. #running-req: {running}, #token: {tokens}, token usage: {usage:.2f}, cuda graph: {graph}, gen throughput (token/s): {speed:.2f}, #queue-req: {queue}, "
                )
            case _:
                self.say(
                    f"Decode batch, #running-req: {running}, #token: {tokens}, token usage: {usage:.2f}, cuda graph: {graph}, gen throughput (token/s): {speed:.2f}, #queue-req: {queue}"
                )
        self._visit()

    def retract(self, count: int, before: float, after: float) -> None:
        ratio = f"#new_token_ratio: {before:.4f} -> {after:.4f}"
        match self.era:
            case "2024":
                self.say(f"decode out of memory happened, #retracted_reqs: {count}, {ratio}")
            case "2025":
                self.say(
                    f"KV cache pool is full. Retract requests. #retracted_reqs: {count}, {ratio}"
                )
            case _:
                self.say(
                    f"KV cache pool is full. Retract requests. #retracted_reqs: {count}, #new_tokens_gained: {count * self.random.randint(300, 2500)}, {ratio}"
                )

    def _visit(self) -> None:
        while self.random.random() < self.access:
            code = "200 OK"
            self.bare(
                f'INFO:     {self.random.choice(CLIENTS)}:{self.random.randint(32768, 60999)} - "POST {self.random.choice(PATHS)} HTTP/1.1" {code}'
            )

    def text(self) -> bytes:
        return ("\n".join(self.lines) + "\n").encode()


def paper(
    random: Random, *machines: Machine, fraction: float | None = None, era: str | None = None
) -> Paper:
    """Random choices of everything that does not make the cause."""
    era = era or random.choice(ERAS)
    machine = random.choice(machines or MACHINES)
    stamp = random.choice(STAMPS[era])
    lowest = (machine.weights + 1.5) / machine.gb
    fraction = (
        fraction
        if fraction is not None
        else max(round(random.uniform(0.84, 0.9), 2), round(lowest, 2))
    )
    year = {"2024": 2024, "2025": 2025, "0.5.23": 2026}[era]
    return Paper(
        random=random, era=era, machine=machine, fraction=fraction, stamp=stamp, rank=random.choice(("", "TP0")) if machine.tp == 1 else "TP0",
        wrapper=random.choice(WRAPPERS), access=random.choice((0.0, 0.0, 0.3, 0.6)),
        begin=datetime(year, random.randint(1, 12), random.randint(1, 28), random.randint(0, 22), random.randint(0, 59), random.randint(0, 59)),
    )  # fmt: skip
