"""Cases in which the computation of prompts, the batch, the memory plan or the prefix cache is what
limits the server."""

from __future__ import annotations

from cases import Label, Simulated
from deployments import (
    A10G,
    A10G_TP4,
    A100_TP2,
    CPU,
    CPU_SERVER,
    H100,
    H100_TP4,
    H200,
    L40S,
    Deployment,
)
from generations import Style
from regimes_admission import (
    LESS_CAREFUL,
    MAX_RUNNING,
    MEM_FRACTION,
    MORE_CAREFUL,
    NO_RANK,
)

from setpoint_testing.traffic import Arrivals, Load, lognormal, mixed, uniform

CHUNK = "--chunked-prefill-size"
SETPOINT = Style(begin="2026-11-20 08:00:00")


def _late(begin: str, **more: object) -> Style:
    return Style(begin=begin, **more)  # type: ignore[arg-type]


CHUNKS = Label(
    cause="prefill-budget",
    why="Prompts wait for room in the prefill batches, which are all as large as the chunk size"
    " allows; slots and pool have room.",
    action=(CHUNK, "increase"),
    forbidden=(LESS_CAREFUL, (CHUNK, "decrease"), (MAX_RUNNING, "increase")),
)
WHOLE = Label(
    cause="prefill-budget",
    why="Prompts wait because max_prefill_tokens ends each prefill batch; chunks are off, slots and"
    " pool have room.",
    action=("--max-prefill-tokens", "increase"),
    forbidden=(LESS_CAREFUL, ("--max-prefill-tokens", "decrease"), (MAX_RUNNING, "increase")),
)


def prefill_budget() -> list[Simulated]:
    retrieval = Load(uniform(900, 2200), uniform(8, 30), 64)
    return [
        Simulated(
            name="prefill-chunk-1024", label=CHUNKS, generation="sglang-2025",
            deployment=Deployment(A10G, {"chunked_prefill_size": 1024, "mem_fraction_static": 0.9}), load=Load(uniform(900, 2200), uniform(2, 6), 16),
            arrivals=Arrivals(rate=2.9), words="2.9 prompts of 900 to 2,200 tokens a second, outputs of 2 to 6",
            style=NO_RANK, seconds=150,
        ),
        Simulated(
            name="prefill-chunk-512-tp4", label=CHUNKS, generation="sglang-0.5.23",
            deployment=Deployment(H100_TP4, {"chunked_prefill_size": 512, "mem_fraction_static": 0.88}), load=retrieval,
            arrivals=Arrivals(users=120, think_s=0.5), words="120 users with prompts of 900 to 2,200 tokens and outputs of 8 to 30",
            style=_late("2026-03-03 03:03:03"), seconds=60,
        ),
        Simulated(
            name="prefill-chunk-1024-a100", label=CHUNKS, generation="sglang-2024",
            deployment=Deployment(A100_TP2, {"chunked_prefill_size": 1024}), load=Load(uniform(2500, 3500), uniform(10, 40), 64),
            arrivals=Arrivals(rate=4), words="4 prompts of about 3,000 tokens a second, outputs of 10 to 40",
            style=_late("2024-11-11 11:11:11"), seconds=120,
        ),
        Simulated(
            name="prefill-cpu-128", label=CHUNKS, generation="setpoint",
            deployment=Deployment(CPU, {"chunked_prefill_size": 128}), load=Load(uniform(200, 600), uniform(3, 12), 32),
            arrivals=Arrivals(rate=4.5), words="4.5 prompts of 200 to 600 tokens a second, outputs of 3 to 12",
            style=SETPOINT, seconds=150,
        ),
        Simulated(
            name="prefill-max-tokens-1024", label=WHOLE, generation="sglang-2025",
            deployment=Deployment(H100, {"chunked_prefill_size": -1, "max_prefill_tokens": 1024}), load=Load(uniform(150, 600), uniform(2, 10), 16),
            arrivals=Arrivals(rate=105), words="105 prompts of 150 to 600 tokens a second, outputs of 2 to 10",
            style=_late("2025-10-01 01:01:01", trailing_comma=True), seconds=60,
        ),
        Simulated(
            name="prefill-max-tokens-setpoint", label=WHOLE, generation="setpoint",
            deployment=Deployment(L40S, {"chunked_prefill_size": -1, "max_prefill_tokens": 2048}), load=Load(uniform(300, 900), uniform(4, 16), 32),
            arrivals=Arrivals(rate=22), words="22 prompts of 300 to 900 tokens a second, outputs of 4 to 16",
            style=SETPOINT, seconds=60,
        ),
    ]  # fmt: skip


BLOCKING = Label(
    cause="long-prompt-blocking",
    why="Only one prompt at a time is computed in chunks: while a very long one is, the short ones"
    " behind it wait, and the queue empties as soon as it is done.",
    forbidden=(LESS_CAREFUL, (MAX_RUNNING, "increase"), (MAX_RUNNING, "decrease")),
)


def long_prompts() -> list[Simulated]:
    rare = Load(
        mixed(0.02, uniform(60000, 90000), uniform(100, 400)), lognormal(120, 0.5, 512), 512
    )
    return [
        Simulated(
            name="blocking-rare-60k", label=BLOCKING, generation="sglang-2025",
            deployment=Deployment(H100), load=rare, arrivals=Arrivals(rate=6),
            words="6 requests a second, of which 2 % have 60,000 to 90,000 prompt tokens", style=NO_RANK, seconds=150,
        ),
        Simulated(
            name="blocking-tp4-chunk-4096", label=BLOCKING, generation="sglang-0.5.23",
            deployment=Deployment(H100_TP4, {"chunked_prefill_size": 4096, "mem_fraction_static": 0.9}),
            load=Load(mixed(0.03, uniform(80000, 110000), uniform(100, 600)), lognormal(100, 0.5, 512), 512),
            arrivals=Arrivals(rate=2.5), words="2.5 requests a second, of which 3 % have 80,000 to 110,000 prompt tokens",
            style=_late("2026-08-20 20:20:20"), seconds=300,
        ),
        Simulated(
            name="blocking-2024", label=BLOCKING, generation="sglang-2024",
            deployment=Deployment(L40S, {"mem_fraction_static": 0.9}),
            load=Load(mixed(0.02, uniform(40000, 60000), uniform(100, 400)), lognormal(100, 0.5, 512), 512),
            arrivals=Arrivals(rate=4), words="4 requests a second, of which 2 % have 40,000 to 60,000 prompt tokens",
            style=_late("2024-12-24 18:00:00"), seconds=200,
        ),
        Simulated(
            name="blocking-setpoint-cpu", label=BLOCKING, generation="setpoint",
            deployment=Deployment(CPU), load=Load(mixed(0.03, uniform(5000, 7500), uniform(20, 60)), uniform(20, 60), 64),
            arrivals=Arrivals(rate=2), words="2 requests a second on a CPU, of which 3 % have 5,000 to 7,500 prompt tokens",
            style=SETPOINT, seconds=300,
        ),
    ]  # fmt: skip


QUEUE = Label(
    cause="queue-too-long",
    why="More than 2,000 requests wait while the pool is full: the clients send far more than the"
    " server can serve.",
    forbidden=(LESS_CAREFUL, (MAX_RUNNING, "decrease"), (MEM_FRACTION, "decrease")),
    acceptable=("kv-full",),
)


def queue_too_long() -> list[Simulated]:
    load = Load(uniform(400, 1500), lognormal(300, 0.4, 512), 512)
    return [
        Simulated(
            name="queue-5000-at-once", label=QUEUE, generation="sglang-2025",
            deployment=Deployment(L40S, {"schedule_conservativeness": 0.6}), load=load, arrivals=Arrivals(rate=5000, bursts=5000, total=5000),
            words="5,000 requests at once", style=NO_RANK, seconds=200,
        ),
        Simulated(
            name="queue-overload-open-loop", label=QUEUE, generation="sglang-0.5.23",
            deployment=Deployment(A10G, {"mem_fraction_static": 0.9, "schedule_conservativeness": 0.6}), load=load, arrivals=Arrivals(rate=40),
            words="40 requests a second, many times what the server can do", style=_late("2026-09-09 09:09:09"), seconds=250, skip=60,
        ),
        Simulated(
            name="queue-12279-lpm", label=QUEUE, generation="sglang-2024",
            deployment=Deployment(A10G, {"mem_fraction_static": 0.9, "schedule_conservativeness": 0.5, "schedule_policy": "lpm"}), load=load,
            arrivals=Arrivals(rate=9000, bursts=9000, total=9000), words="9,000 requests at once", style=_late("2024-08-05 12:00:00"), seconds=250,
        ),
        Simulated(
            name="queue-setpoint-3000", label=QUEUE, generation="setpoint",
            deployment=Deployment(L40S, {"schedule_conservativeness": 0.6}), load=load, arrivals=Arrivals(rate=3500, bursts=3500, total=3500),
            words="3,500 requests at once", style=SETPOINT, seconds=200,
        ),
    ]  # fmt: skip


UNDERUSED = Label(
    cause="mem-underused",
    why="The pool is full and requests wait for it, while much of the device's memory was free when"
    " the server was ready.",
    action=(MEM_FRACTION, "increase"),
    forbidden=(LESS_CAREFUL, (MEM_FRACTION, "decrease"), (MAX_RUNNING, "increase")),
)


def mem_underused() -> list[Simulated]:
    long = Load(uniform(2500, 5000), uniform(300, 500), 512)
    return [
        Simulated(
            name="underused-h100-0.4", label=UNDERUSED, generation="sglang-2025",
            deployment=Deployment(H100, {"mem_fraction_static": 0.4}), load=long, arrivals=Arrivals(users=90, ramp_s=15),
            words="90 users with prompts of 2,500 to 5,000 tokens", style=NO_RANK, seconds=150,
        ),
        Simulated(
            name="underused-l40s-0.5", label=UNDERUSED, generation="sglang-0.5.23",
            deployment=Deployment(L40S, {"mem_fraction_static": 0.5}), load=long, arrivals=Arrivals(users=40, ramp_s=10),
            words="40 users with prompts of 2,500 to 5,000 tokens", style=_late("2026-01-15 15:15:15"), seconds=300,
        ),
        Simulated(
            name="underused-tp4-0.55", label=UNDERUSED, generation="sglang-2025",
            deployment=Deployment(H100_TP4, {"mem_fraction_static": 0.55}), load=long, arrivals=Arrivals(users=90, ramp_s=20),
            words="90 users with prompts of 2,500 to 5,000 tokens", style=_late("2025-08-08 08:08:08", trailing_comma=True), seconds=300,
        ),
        Simulated(
            name="underused-setpoint-cpu", label=UNDERUSED, generation="setpoint",
            deployment=Deployment(CPU_SERVER, {"mem_fraction_static": 0.15}), load=Load(uniform(500, 1500), uniform(150, 250), 256),
            arrivals=Arrivals(users=60, ramp_s=60), words="60 users with prompts of 500 to 1,500 tokens on a CPU with 58 GB", style=SETPOINT, seconds=500,
        ),
        Simulated(
            name="underused-h200-0.6", label=UNDERUSED, generation="setpoint",
            deployment=Deployment(H200, {"mem_fraction_static": 0.35}), load=long, arrivals=Arrivals(users=80, ramp_s=20),
            words="80 users with prompts of 2,500 to 5,000 tokens", style=SETPOINT, seconds=200,
        ),
    ]  # fmt: skip


HEADROOM = Label(
    cause="mem-headroom-low",
    why="The load is served well, but when the server was ready about one gigabyte or less of a"
    " large device was free: the next long prompt may fail.",
    action=(MEM_FRACTION, "decrease"),
    forbidden=((MEM_FRACTION, "increase"),),
)


def mem_headroom() -> list[Simulated]:
    load = Load(uniform(300, 1500), lognormal(300, 0.4, 512), 512)
    long = Load(uniform(2500, 5000), lognormal(350, 0.4, 512), 512)
    return [
        Simulated(
            name="headroom-h100-0.97", label=HEADROOM, generation="sglang-2025",
            deployment=Deployment(H100, {"mem_fraction_static": 0.975}), load=long, arrivals=Arrivals(users=150, ramp_s=5),
            words="150 users with prompts of 2,500 to 5,000 tokens", style=NO_RANK, seconds=100,
        ),
        Simulated(
            name="headroom-l40s-0.96", label=HEADROOM, generation="sglang-0.5.23",
            deployment=Deployment(L40S, {"mem_fraction_static": 0.96, "schedule_conservativeness": 0.7}), load=load, arrivals=Arrivals(users=330, ramp_s=10),
            words="330 users", style=_late("2026-07-07 07:07:07"), seconds=150,
        ),
        Simulated(
            name="headroom-tp4-0.98", label=HEADROOM, generation="sglang-2025",
            deployment=Deployment(H100_TP4, {"mem_fraction_static": 0.98}), load=long, arrivals=Arrivals(users=170, ramp_s=10),
            words="170 users with prompts of 2,500 to 5,000 tokens", style=_late("2025-11-30 10:10:10"), seconds=200,
        ),
        Simulated(
            name="headroom-setpoint-h200", label=HEADROOM, generation="setpoint",
            deployment=Deployment(H200, {"mem_fraction_static": 0.985}), load=long, arrivals=Arrivals(users=180, ramp_s=10),
            words="180 users with prompts of 2,500 to 5,000 tokens", style=SETPOINT, seconds=200,
        ),
    ]  # fmt: skip


GRAPHS = Label(
    cause="graph-miss",
    why="The load is served in a good state (a full pool and a moderate queue, or no queue), but"
    " decode batches are larger than the largest captured graph, so every step pays for launches.",
    action=("--cuda-graph-max-bs", "increase"),
    forbidden=(("--cuda-graph-max-bs", "decrease"), (MEM_FRACTION, "increase")),
)
NO_GRAPHS = Label(
    cause="graph-miss",
    why="CUDA graphs were switched off, so every decode step pays for launches; the load is served"
    " in a good state otherwise.",
    forbidden=((MEM_FRACTION, "increase"),),
)


def graph_miss() -> list[Simulated]:
    load = Load(uniform(300, 1500), lognormal(300, 0.4, 512), 512)
    return [
        Simulated(
            name="graph-max-bs-32", label=GRAPHS, generation="sglang-2025",
            deployment=Deployment(L40S, {"cuda_graph_max_bs": 32, "schedule_conservativeness": 0.6}), load=load, arrivals=Arrivals(users=300, ramp_s=5),
            words="300 users", style=NO_RANK, seconds=120,
        ),
        Simulated(
            name="graph-max-bs-8-0523", label=GRAPHS, generation="sglang-0.5.23",
            deployment=Deployment(A10G, {"cuda_graph_max_bs": 8, "mem_fraction_static": 0.88, "schedule_conservativeness": 0.6}), load=load, arrivals=Arrivals(users=130, ramp_s=5),
            words="130 users", style=_late("2026-05-15 05:15:00"), seconds=200,
        ),
        Simulated(
            name="graph-disabled", label=NO_GRAPHS, generation="sglang-2025",
            deployment=Deployment(H100_TP4, {"disable_cuda_graph": True, "mem_fraction_static": 0.6, "schedule_conservativeness": 0.6}), load=load, arrivals=Arrivals(users=260, ramp_s=5),
            words="260 users", style=_late("2025-05-25 05:25:00", trailing_comma=True), seconds=120,
        ),
        Simulated(
            name="graph-max-bs-64-tp2", label=GRAPHS, generation="sglang-0.5.23",
            deployment=Deployment(A100_TP2, {"cuda_graph_max_bs": 64, "schedule_conservativeness": 0.6}), load=load, arrivals=Arrivals(users=420, ramp_s=20),
            words="420 users", style=_late("2026-06-16 16:16:16"), seconds=120,
        ),
    ]  # fmt: skip


MISS = Label(
    cause="prefix-miss",
    why="Every prompt begins with one of a few long prefixes, but the prefix cache is switched off,"
    " so they are computed and stored again and again. (Other verdicts are acceptable because a log"
    " does not show that prompts are alike.)",
    forbidden=(LESS_CAREFUL, MORE_CAREFUL),
    acceptable=("prefill-budget", "kv-full"),
)
THRASH = Label(
    cause="prefix-miss",
    why="Every prompt begins with one of 60 prefixes, but in the order of arrival they evict one"
    " another; under --schedule-policy lpm most of them would be found.",
    forbidden=(LESS_CAREFUL,),
    acceptable=("kv-full", "prefill-budget"),
)


def prefix_miss() -> list[Simulated]:
    agent = Load(uniform(50, 300), uniform(40, 120), 256, num_prefixes=4, prefix_tokens=3000)
    return [
        Simulated(
            name="prefix-disabled", label=MISS, generation="sglang-2025",
            deployment=Deployment(L40S, {"disable_radix_cache": True}), load=agent, arrivals=Arrivals(rate=4.5),
            words="4.5 requests a second that share 4 prefixes of 3,000 tokens", style=NO_RANK, seconds=150,
        ),
        Simulated(
            name="prefix-disabled-2024", label=MISS, generation="sglang-2024",
            deployment=Deployment(A100_TP2, {"disable_radix_cache": True, "mem_fraction_static": 0.9}), load=agent, arrivals=Arrivals(rate=2.6),
            words="2.6 requests a second that share 4 prefixes of 3,000 tokens", style=_late("2024-09-19 19:19:19"), seconds=250,
        ),
        Simulated(
            name="prefix-disabled-setpoint", label=MISS, generation="setpoint",
            deployment=Deployment(CPU, {"disable_radix_cache": True}), load=Load(uniform(20, 80), uniform(20, 60), 128, num_prefixes=2, prefix_tokens=900),
            arrivals=Arrivals(rate=1.1), words="1.1 requests a second on a CPU that share 2 prefixes of 900 tokens", style=SETPOINT, seconds=300,
        ),
        Simulated(
            name="prefix-thrash-fcfs", label=THRASH, generation="sglang-0.5.23",
            deployment=Deployment(A10G, {"mem_fraction_static": 0.9}), load=Load(uniform(50, 300), uniform(60, 150), 256, num_prefixes=60, prefix_tokens=2500),
            arrivals=Arrivals(users=60), words="60 users whose prompts begin with one of 60 prefixes of 2,500 tokens", style=_late("2026-10-20 10:20:30"), seconds=250,
        ),
    ]  # fmt: skip


BATCH = Label(
    cause="batch-too-large",
    why="Nothing waits and every step computes hundreds of rows, so that each request gets only a few"
    " tokens per second: half the rows at a time would give nearly the same throughput.",
    action=(MAX_RUNNING, "decrease"),
    forbidden=((MAX_RUNNING, "increase"), LESS_CAREFUL),
    acceptable=("client-bound", "healthy"),
)


def batch_too_large() -> list[Simulated]:
    load = Load(uniform(100, 400), uniform(300, 500), 512)
    return [
        Simulated(
            name="batch-cpu-server", label=BATCH, generation="setpoint",
            deployment=Deployment(CPU_SERVER, {"max_running_requests": 512, "mem_fraction_static": 0.8}), load=load,
            arrivals=Arrivals(users=190, ramp_s=120), words="190 chat users on a CPU", style=SETPOINT, seconds=400,
        ),
        Simulated(
            name="batch-tp4-awq", label=BATCH, generation="sglang-2025",
            deployment=Deployment(A10G_TP4, {"cuda_graph_max_bs": 256}), load=load,
            arrivals=Arrivals(users=180, ramp_s=20), words="180 chat users", style=NO_RANK, seconds=300,
        ),
        Simulated(
            name="batch-tp4-awq-0523", label=BATCH, generation="sglang-0.5.23",
            deployment=Deployment(A10G_TP4, {"max_running_requests": 256, "mem_fraction_static": 0.9}), load=Load(uniform(60, 200), uniform(300, 500), 512),
            arrivals=Arrivals(users=225, ramp_s=60), words="225 chat users", style=_late("2026-02-22 22:22:22"), seconds=300,
        ),
    ]  # fmt: skip


IMBALANCE = Label(
    cause="rank-imbalance",
    why="One data-parallel rank gets most of the requests and is full, the others have next to"
    " nothing to do.",
    forbidden=(LESS_CAREFUL, (MEM_FRACTION, "increase")),
    acceptable=("kv-full",),
)


def rank_imbalance() -> list[Simulated]:
    load = Load(uniform(800, 2500), lognormal(300, 0.4, 512), 512)
    few = Arrivals(rate=0.15)
    return [
        Simulated(
            name="ranks-dp4-one-full", label=IMBALANCE, generation="sglang-2025",
            deployment=Deployment(L40S, {"dp_size": 4, "schedule_conservativeness": 0.5}), load=load, arrivals=Arrivals(users=220),
            ranks=(few, few, few), words="220 users on rank 0, one request every 7 s on each other rank", seconds=150,
        ),
        Simulated(
            name="ranks-dp2-sticky", label=IMBALANCE, generation="sglang-0.5.23",
            deployment=Deployment(A10G, {"dp_size": 2, "mem_fraction_static": 0.9, "schedule_conservativeness": 0.5}), load=load, arrivals=Arrivals(users=70),
            ranks=(Arrivals(rate=0.1),), words="70 users on rank 0, one request every 10 s on rank 1", style=_late("2026-04-14 14:14:14"), seconds=250,
        ),
        Simulated(
            name="ranks-dp3-2024", label=IMBALANCE, generation="sglang-2024",
            deployment=Deployment(L40S, {"dp_size": 3, "schedule_conservativeness": 0.5}), load=load, arrivals=Arrivals(users=200),
            ranks=(few, few), words="200 users on rank 0, one request every 7 s on each other rank", style=_late("2024-10-31 20:00:00"), seconds=150,
        ),
    ]  # fmt: skip


ALL = (
    prefill_budget, long_prompts, queue_too_long, mem_underused, mem_headroom, graph_miss,
    prefix_miss, batch_too_large, rank_imbalance,
)  # fmt: skip
