"""Servers that fail: a simulated server's first minutes, and then the messages that SGLang writes
when memory runs out, a process dies or the pool's accounting breaks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cases import Change, Label, Written
from deployments import A10G, A100_TP2, H100, H100_TP4, L40S, RTX_4090, Deployment
from generations import Generation, Style, Writer
from simulate import simulate
from startup import start_up

from setpoint_testing.traffic import Arrivals, Load, lognormal, uniform

MEM_FRACTION = "--mem-fraction-static"
SIGQUIT = {
    "sglang-2024": "Received sigquit from a child proces. It usually means the child failed.",
    "sglang-2025": "Received sigquit from a child process. It usually means the child failed.",
    "sglang-0.5.23": "SIGQUIT received. signum=None, frame=None. It usually means one child failed.",
}
"""https://github.com/sgl-project/sglang/issues/3685, /5448 and /20010."""
ROOT = "/sgl-workspace/sglang/python/sglang/srt"
ISSUES = "https://github.com/sgl-project/sglang/issues"


def memory_error(tried: str, total: float, free: str) -> str:
    used = total - 0.02
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried}. GPU 0 has a total"
        f" capacity of {total:.2f} GiB of which {free} is free. Process 4242 has {used:.2f} GiB"
        f" memory in use. Of the allocated memory {used - 1.4:.2f} GiB is allocated by PyTorch, and"
        " 312.51 MiB is reserved by PyTorch but unallocated."
    )


def traceback(*places: tuple[str, int, str]) -> list[str]:
    lines = []
    for path, number, function in places:
        lines.append(f'  File "{ROOT}/{path}", line {number}, in {function}')
        lines.append(
            f"    self.{function}()" if "load" in function else "    return self._step(batch)"
        )
    return lines


PREFILL_FRAMES = traceback(
    ("managers/scheduler.py", 2261, "run_scheduler_process"),
    ("managers/scheduler.py", 1401, "run_batch"),
    ("model_executor/model_runner.py", 1190, "forward"),
    ("model_executor/model_runner.py", 1148, "forward_extend"),
    ("models/llama.py", 96, "forward"),
)
DECODE_FRAMES = traceback(
    ("managers/scheduler.py", 2261, "run_scheduler_process"),
    ("managers/scheduler.py", 1401, "run_batch"),
    ("model_executor/model_runner.py", 1187, "forward"),
    ("model_executor/model_runner.py", 1115, "forward_decode"),
    ("layers/sampler.py", 88, "forward"),
)
START_FRAMES = traceback(
    ("managers/scheduler.py", 2255, "run_scheduler_process"),
    ("managers/tp_worker.py", 74, "__init__"),
    ("model_executor/model_runner.py", 207, "initialize"),
)


@dataclass(slots=True, frozen=True, kw_only=True)
class Failing:
    """The lines of a server's start up to one of them, some load, and the last lines."""

    name: str
    label: Label
    generation: Generation
    deployment: Deployment
    end: Sequence[str]
    """A line that begins with "|" has no prefix."""
    source: str
    load: Load | None = None
    arrivals: Arrivals = field(default_factory=lambda: Arrivals(users=40))
    upto: str = "fired up"
    """The last line of the start."""
    num_lines: int = 120
    silence_s: float = 0.0
    """Before the last lines."""
    style: Style = field(default_factory=Style)

    def write(self, seed: int) -> Written:
        writer = Writer(self.generation, self.style, seed)
        text = list(start_up(self.deployment, self.generation, self.style, writer, upto=self.upto))
        at = 0.0
        if self.load is not None:
            lines, _ = simulate(
                self.deployment.engine(), self.load, self.arrivals, seed=seed, seconds=120.0, max_lines=self.num_lines
            )  # fmt: skip
            text += writer.lines(lines)
            at = lines[-1].at
        at += self.silence_s + 0.4
        shown = "ERROR: " if self.generation == "setpoint" else ""
        for line in self.end:
            text.append(
                writer.bare(at, line[1:])
                if line.startswith("|")
                else writer.stamped(at, self.style.rank, shown + line)
            )
        return Written(
            name=self.name,
            label=self.label,
            generation=self.generation,
            text=("\n".join(text) + "\n").encode(),
            made_by=f"Written: the start and the load of {self.deployment.hardware.model} on"
            f" {self.deployment.hardware.device} are simulated (seed {seed}), the last lines are the"
            f" messages of that generation. {self.label.why}",
            source=self.source,
            compress=True,
        )


def _bare(lines: Sequence[str]) -> list[str]:
    return [f"|{line}" for line in lines]


def _init(why: str, action: Change | None, forbidden: tuple[Change, ...], *others: Change) -> Label:
    return Label(
        cause="oom-init", why=why, action=action, forbidden=forbidden, other_actions=others
    )  # fmt: skip


RAISE = _init(
    "The weights leave nothing of the static share for the pool, so the share must grow.",
    (MEM_FRACTION, "increase"),
    ((MEM_FRACTION, "decrease"),),
)
LOWER = _init(
    "Weights and pool fit; the graphs did not find room beside them, so the static share must"
    " shrink or the graphs must.",
    (MEM_FRACTION, "decrease"),
    ((MEM_FRACTION, "increase"), ("--cuda-graph-max-bs", "increase")),
    ("--cuda-graph-max-bs", "decrease"),
)
TOO_LARGE = _init(
    "The weights are larger than the device: no static share helps, only more devices or fewer"
    " bits.",
    None,
    (),
)
SOLUTIONS = [
    "Possible solutions:",
    "1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)",
    "2. set --cuda-graph-max-bs to a smaller value (e.g., 16)",
    "3. disable torch compile by not using --enable-torch-compile",
    "4. disable CUDA graph by --disable-cuda-graph. (Not recommended. Huge performance loss)",
]


def oom_init() -> list[Failing]:
    enough = "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."
    hit = "Scheduler hit an exception: Traceback (most recent call last):"
    failed = "Exception: Capture cuda graph failed: " + memory_error(
        "448.00 MiB", 78.7, "210.44 MiB"
    )
    return [
        Failing(
            name="init-raise-2024", label=RAISE, generation="sglang-2024", deployment=Deployment(A10G, {"mem_fraction_static": 0.65}),
            upto="Load weight end", source=f"{ISSUES}/322",
            end=["Traceback (most recent call last):", *_bare(START_FRAMES), f"|{enough}", "|", SIGQUIT["sglang-2024"]],
            style=Style(begin="2024-10-01 10:00:00"),
        ),
        Failing(
            name="init-raise-2025", label=RAISE, generation="sglang-2025", deployment=Deployment(RTX_4090, {"mem_fraction_static": 0.6}),
            upto="Load weight end", source=f"{ISSUES}/4330",
            end=[hit, *_bare(START_FRAMES), f"|{enough}", "|", SIGQUIT["sglang-2025"]], style=Style(rank=""),
        ),
        Failing(
            name="init-raise-0523", label=RAISE, generation="sglang-0.5.23", deployment=Deployment(A100_TP2, {"mem_fraction_static": 0.35}),
            upto="Load weight end", source="https://github.com/gpustack/gpustack/issues/3831",
            end=[hit, *_bare(START_FRAMES), f"|{enough} Current value: self.server_args.mem_fraction_static=0.35", "|", SIGQUIT["sglang-0.5.23"], "|Killed"],
            style=Style(begin="2026-09-01 10:00:00"),
        ),
        Failing(
            name="init-graphs-2025", label=LOWER, generation="sglang-2025", deployment=Deployment(H100, {"mem_fraction_static": 0.98, "cuda_graph_max_bs": 512}),
            upto="Capture cuda graph begin", source=f"{ISSUES}/5285",
            end=[hit, *_bare(START_FRAMES), f"|{failed}", *_bare(SOLUTIONS), "|", SIGQUIT["sglang-2025"]], style=Style(rank=""),
        ),
        Failing(
            name="init-graphs-0523", label=LOWER, generation="sglang-0.5.23", deployment=Deployment(H100_TP4, {"mem_fraction_static": 0.97, "cuda_graph_max_bs": 512}),
            upto="Capture target decode", source=f"{ISSUES}/5285",
            end=[hit, *_bare(START_FRAMES), f"|{failed}", *_bare(SOLUTIONS), "|", SIGQUIT["sglang-0.5.23"]], style=Style(begin="2026-09-01 10:00:00"),
        ),
        Failing(
            name="init-weights-too-large", label=TOO_LARGE, generation="sglang-2025", deployment=Deployment(RTX_4090),
            upto="Load weight begin", source=f"{ISSUES}/1869",
            end=[
                hit, *_bare(traceback(("model_executor/model_runner.py", 431, "load_model"), ("layers/linear.py", 330, "create_weights"))),
                f"|{memory_error('896.00 MiB', 23.53, '20.38 MiB')}", "|", SIGQUIT["sglang-2025"],
            ], style=Style(rank=""),
        ),
    ]  # fmt: skip


PREFILL = Label(
    cause="oom-prefill",
    why="The allocation fails in forward_extend, right after large prefill batches: activations of"
    " a chunk do not fit beside the pool.",
    action=("--chunked-prefill-size", "decrease"),
    other_actions=((MEM_FRACTION, "decrease"),),
    forbidden=(("--chunked-prefill-size", "increase"), (MEM_FRACTION, "increase")),
)
DECODE = Label(
    cause="oom-decode",
    why="The allocation fails in forward_decode under a large batch.",
    action=("--max-running-requests", "decrease"),
    other_actions=((MEM_FRACTION, "decrease"),),
    forbidden=(("--max-running-requests", "increase"), (MEM_FRACTION, "increase")),
)


def oom_runtime() -> list[Failing]:
    long = Load(uniform(6000, 16000), uniform(50, 200), 512)
    chat = Load(uniform(50, 300), lognormal(400, 0.4, 1024), 1024)
    hit = "Scheduler hit an exception: Traceback (most recent call last):"
    failing = [
        ("prefill-oom-2024", PREFILL, "sglang-2024", Deployment(H100, {"mem_fraction_static": 0.95, "chunked_prefill_size": 16384}), long, "2.51 GiB", 78.7, f"{ISSUES}/4547"),
        ("prefill-oom-2025", PREFILL, "sglang-2025", Deployment(H100_TP4, {"mem_fraction_static": 0.94, "chunked_prefill_size": 32768}), long, "1.98 GiB", 78.4, f"{ISSUES}/4730"),
        ("prefill-oom-0523", PREFILL, "sglang-0.5.23", Deployment(L40S, {"mem_fraction_static": 0.93, "chunked_prefill_size": 16384}), long, "616.00 MiB", 44.0, f"{ISSUES}/4730"),
        ("decode-oom-2024", DECODE, "sglang-2024", Deployment(L40S, {"mem_fraction_static": 0.95}), chat, "502.00 MiB", 44.0, f"{ISSUES}/1087"),
        ("decode-oom-2025", DECODE, "sglang-2025", Deployment(H100, {"mem_fraction_static": 0.96, "max_running_requests": 2048}), chat, "1.02 GiB", 78.7, f"{ISSUES}/1087"),
        ("decode-oom-0523", DECODE, "sglang-0.5.23", Deployment(A100_TP2, {"mem_fraction_static": 0.96, "max_running_requests": 1024}), chat, "774.00 MiB", 78.6, f"{ISSUES}/1087"),
    ]  # fmt: skip
    begin = {"sglang-2024": "2024-10-20 20:20:20", "sglang-2025": "2025-05-05 05:05:05", "sglang-0.5.23": "2026-08-08 08:08:08"}  # fmt: skip
    return [
        Failing(
            name=name, label=label, generation=generation, deployment=deployment, load=load,  # type: ignore[arg-type]
            arrivals=Arrivals(users=24) if load is long else Arrivals(users=220, ramp_s=10),
            num_lines=90 if load is long else 300, source=source, style=Style(begin=begin[generation]),
            end=[
                hit, *_bare(PREFILL_FRAMES if label is PREFILL else DECODE_FRAMES),
                f"|{memory_error(tried, total, '20.00 MiB')}", "|", SIGQUIT[generation],
            ],
        )
        for name, label, generation, deployment, load, tried, total, source in failing
    ]  # fmt: skip


DEAD = Label(
    cause="server-dead",
    why="The last lines say that the server's process ended or hangs; the load before it is"
    " ordinary.",
)
CUDA = [
    "RuntimeError: CUDA error: an illegal memory access was encountered",
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.",
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
]
SEGMENTATION = [
    "Fatal Python error: Segmentation fault",
    "",
    "Thread 0x00007ee43dfff640 (most recent call first):",
    f'  File "{ROOT}/managers/scheduler.py", line 1419 in watchdog_thread',
    '  File "/usr/lib/python3.10/threading.py", line 953 in run',
]


def server_dead() -> list[Failing]:
    chat = Load(uniform(100, 800), lognormal(250, 0.5, 1024), 1024)
    hit = "Scheduler hit an exception: Traceback (most recent call last):"
    stuck = "self.cur_batch.batch_size()=40, self.cur_batch.reqs=[Req(rid=d4424f3eb90345f0a863068978c0f17c, input_ids=[1, 2])]"
    return [
        Failing(
            name="dead-watchdog-2025", label=DEAD, generation="sglang-2025", deployment=Deployment(L40S), load=chat, silence_s=300,
            end=[stuck, "Pyspy failed to dump PID 113688. Error: /bin/bash: line 1: py-spy: command not found", "Watchdog timeout (self.watchdog_timeout=300)", SIGQUIT["sglang-2025"]],
            source=f"{ISSUES}/7553", style=Style(rank=" TP0"),
        ),
        Failing(
            name="dead-watchdog-2024", label=DEAD, generation="sglang-2024", deployment=Deployment(H100_TP4), load=chat, silence_s=300,
            end=["Watchdog timeout (self.watchdog_timeout=300)", stuck, SIGQUIT["sglang-2024"]], source=f"{ISSUES}/3752",
            style=Style(begin="2025-02-21 02:21:00"),
        ),
        Failing(
            name="dead-watchdog-0523", label=DEAD, generation="sglang-0.5.23", deployment=Deployment(A100_TP2), load=chat, silence_s=301,
            end=["Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)", stuck, SIGQUIT["sglang-0.5.23"]], source=f"{ISSUES}/33393",
            style=Style(begin="2026-08-01 08:01:00"),
        ),
        Failing(
            name="dead-illegal-access-2025", label=DEAD, generation="sglang-2025", deployment=Deployment(H100), load=chat,
            end=[hit, *_bare(DECODE_FRAMES), *_bare(CUDA), "|", SIGQUIT["sglang-2025"]], source=f"{ISSUES}/8011", style=Style(rank=""),
        ),
        Failing(
            name="dead-illegal-access-0523", label=DEAD, generation="sglang-0.5.23", deployment=Deployment(H100_TP4), load=chat,
            end=[hit, *_bare(PREFILL_FRAMES), *_bare(CUDA), "|", SIGQUIT["sglang-0.5.23"]], source=f"{ISSUES}/22987", style=Style(begin="2026-04-16 13:00:00"),
        ),
        Failing(
            name="dead-segmentation-fault", label=DEAD, generation="sglang-2025", deployment=Deployment(RTX_4090), load=chat,
            end=[*_bare(SEGMENTATION), SIGQUIT["sglang-2025"]], source=f"{ISSUES}/12526", style=Style(begin="2025-11-03 03:03:00", trailing_comma=True),
        ),
        Failing(
            name="dead-killed-by-the-system", label=DEAD, generation="sglang-2024", deployment=Deployment(A10G), load=chat,
            end=[SIGQUIT["sglang-2024"], "|./run.sh: line 22: 103525 Killed                  python -m sglang.launch_server --host 0.0.0.0 --port 8188"],
            source=f"{ISSUES}/6888", style=Style(begin="2024-12-06 01:56:00"),
        ),
        Failing(
            name="dead-setpoint-engine", label=DEAD, generation="setpoint", deployment=Deployment(L40S), load=chat,
            end=[
                "The engine ends: a step failed as a whole. Requests of the steps in flight: r101, r102, r103",
                "|  Traceback (most recent call last):", '|    File "setpoint/scheduler/loop.py", line 190, in step',
                "|  RuntimeError: CUDA error: an illegal memory access was encountered",
            ], source="src/setpoint/scheduler/loop.py", style=Style(begin="2026-11-20 08:00:00"),
        ),
    ]  # fmt: skip


LEAK = Label(
    cause="pool-leak",
    why="The idle server says that pages of the pool belong to nobody: a fault of the program, not"
    " of its settings.",
    forbidden=((MEM_FRACTION, "increase"), ("--schedule-conservativeness", "increase"), ("--schedule-conservativeness", "decrease")),
)  # fmt: skip


def pool_leak() -> list[Failing]:
    chat = Load(uniform(100, 800), lognormal(150, 0.5, 512), 512)
    few = Arrivals(users=20, until_s=20)
    hit = "Scheduler hit an exception: Traceback (most recent call last):"
    idle = traceback(
        ("managers/scheduler.py", 3253, "run_scheduler_process"),
        ("managers/scheduler.py", 1105, "event_loop_normal"),
    )
    leak = "ValueError: token_to_kv_pool_allocator memory leak detected!"
    return [
        Failing(
            name="leak-2024", label=LEAK, generation="sglang-2024", deployment=Deployment(A10G), load=chat, arrivals=few,
            end=["|UserWarning: Warning: available_size=28244, max_total_num_token=30650", "|KV cache pool leak detected!"],
            source=f"{ISSUES}/105", style=Style(begin="2024-01-26 15:20:00"),
        ),
        Failing(
            name="leak-2025", label=LEAK, generation="sglang-2025", deployment=Deployment(L40S), load=chat, arrivals=few,
            end=[hit, *_bare(idle), f"|{leak} available_size=189424, protected_size=0, self.max_total_num_tokens=186286", "|self.token_to_kv_pool_allocator.available_size()=164304", "|self.tree_cache.evictable_size()=25120", "|", SIGQUIT["sglang-2025"]],
            source=f"{ISSUES}/6888", style=Style(rank=""),
        ),
        Failing(
            name="leak-0523", label=LEAK, generation="sglang-0.5.23", deployment=Deployment(H100), load=chat, arrivals=few,
            end=[hit, *_bare(idle), f"|{leak} self.max_total_num_tokens=430746, available_size=1644, evictable_size=428628, protected_size=0", "|", SIGQUIT["sglang-0.5.23"]],
            source=f"{ISSUES}/11970", style=Style(begin="2026-03-06 00:37:00"),
        ),
        Failing(
            name="leak-setpoint", label=LEAK, generation="setpoint", deployment=Deployment(L40S), load=chat, arrivals=few,
            end=["KV cache accounting is broken and was rebuilt empty: 96 pool tokens are held although no sequence lives"],
            source="src/setpoint/observe/logline.py", style=Style(begin="2026-11-20 08:00:00"),
        ),
    ]  # fmt: skip


ALL = (oom_init, oom_runtime, server_dead, pool_leak)
