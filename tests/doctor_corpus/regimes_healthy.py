"""Servers that are well: full load in the guides' good state, and loads that are served without a
limit."""

from __future__ import annotations

from cases import Label, Simulated
from deployments import (
    A10G,
    A100_TP2,
    CPU,
    CPU_SERVER,
    H100,
    H100_TP4,
    L40S,
    RTX_4090,
    T4,
    Deployment,
)
from generations import Style
from regimes_admission import LESS_CAREFUL, MAX_RUNNING, MEM_FRACTION, MORE_CAREFUL, NO_RANK

from setpoint_testing.traffic import Arrivals, Load, lognormal, uniform

SETPOINT = Style(begin="2026-11-20 08:00:00")
NO_CHANGE = (LESS_CAREFUL, MORE_CAREFUL, (MAX_RUNNING, "decrease"), (MEM_FRACTION, "decrease"))
FULL_LOAD = Label(
    cause="healthy",
    why="The guides' good state: usage above 0.9, a queue of tens to hundreds, at most one"
    " retraction a minute, graphs on, a few gigabytes free.",
    forbidden=NO_CHANGE,
)
SMALL_POOL = Label(
    cause="healthy",
    why="The guides' good state: usage above 0.9, a queue of tens, at most one retraction a minute,"
    " graphs on. (kv-full is acceptable: some 35 requests fill this pool and twice as many wait, so"
    " that its size is a limit as well.)",
    forbidden=NO_CHANGE,
    acceptable=("kv-full",),
)
SERVED = Label(
    cause="healthy",
    why="Hundreds of independent users are served at once and no limit binds: requests hardly ever"
    " wait, the pool is used well and has room.",
    forbidden=NO_CHANGE,
    acceptable=("client-bound",),
)
TRANSIENT = Label(
    cause="healthy",
    why="A burst makes a queue for a moment, which drains by itself; the rest of the time nothing"
    " waits.",
    forbidden=NO_CHANGE,
    acceptable=("client-bound",),
)
MIX = Load(uniform(300, 1500), lognormal(300, 0.4, 512), 512)
KEEN = {"schedule_conservativeness": 0.5}


def _late(begin: str, **more: object) -> Style:
    return Style(begin=begin, **more)  # type: ignore[arg-type]


def full_load() -> list[Simulated]:
    return [
        Simulated(
            name="healthy-l40s-2025", label=FULL_LOAD, generation="sglang-2025", deployment=Deployment(L40S, KEEN),
            load=MIX, arrivals=Arrivals(users=300, ramp_s=5), words="300 users", style=NO_RANK, seconds=150,
        ),
        Simulated(
            name="healthy-l40s-2024", label=FULL_LOAD, generation="sglang-2024", deployment=Deployment(L40S, KEEN),
            load=MIX, arrivals=Arrivals(users=400, ramp_s=8), words="400 users", style=_late("2024-11-20 10:00:00"), seconds=150,
        ),
        Simulated(
            name="healthy-a10g-0523", label=SMALL_POOL, generation="sglang-0.5.23",
            deployment=Deployment(A10G, {"mem_fraction_static": 0.88, "schedule_conservativeness": 0.5}), load=MIX,
            arrivals=Arrivals(users=110, ramp_s=5), words="110 users", style=_late("2026-09-10 10:00:00", access=0.15), seconds=250,
        ),
        Simulated(
            name="healthy-4090-setpoint", label=FULL_LOAD, generation="setpoint",
            deployment=Deployment(RTX_4090, {"mem_fraction_static": 0.86, "schedule_conservativeness": 0.5}), load=MIX,
            arrivals=Arrivals(users=220, ramp_s=5), words="220 users", style=SETPOINT, seconds=150,
        ),
        Simulated(
            name="healthy-h100-offline", label=FULL_LOAD, generation="sglang-2025", deployment=Deployment(H100, KEEN),
            load=Load(uniform(1500, 4000), lognormal(400, 0.4, 640), 640), arrivals=Arrivals(rate=900, bursts=900, total=900),
            words="a batch job of 900 prompts at once", style=_late("2025-06-01 12:00:00", trailing_comma=True), seconds=150,
        ),
        Simulated(
            name="healthy-tp4-70b", label=FULL_LOAD, generation="sglang-0.5.23",
            deployment=Deployment(H100_TP4, {"mem_fraction_static": 0.88, "schedule_conservativeness": 0.5}),
            load=Load(uniform(2000, 5000), lognormal(400, 0.4, 640), 640), arrivals=Arrivals(users=230, ramp_s=10),
            words="230 users with prompts of 2,000 to 5,000 tokens", style=_late("2026-08-12 10:00:00"), seconds=250,
        ),
        Simulated(
            name="healthy-tp2-benchmark", label=FULL_LOAD, generation="sglang-2025", deployment=Deployment(A100_TP2, KEEN),
            load=Load(uniform(600, 2000), lognormal(300, 0.4, 512), 512), arrivals=Arrivals(rate=1000, bursts=1000, total=1000),
            words="a benchmark of 1,000 prompts at once, with its ramp and its drain", style=_late("2025-04-01 10:00:00"), seconds=600, max_lines=560,
        ),
    ]  # fmt: skip


def full_load_of_many_kinds() -> list[Simulated]:
    return [
        Simulated(
            name="healthy-cpu-full", label=FULL_LOAD, generation="setpoint",
            deployment=Deployment(CPU, {"max_running_requests": 256, "max_total_tokens": 24000, "schedule_conservativeness": 0.5}),
            load=Load(uniform(100, 400), lognormal(150, 0.4, 256), 256), arrivals=Arrivals(users=130, ramp_s=10),
            words="130 users on a CPU, pool limited to 24,000 tokens", style=SETPOINT, seconds=250,
        ),
        Simulated(
            name="healthy-occasional-retraction", label=SMALL_POOL, generation="sglang-2025",
            deployment=Deployment(A10G, {"mem_fraction_static": 0.88, "schedule_conservativeness": 0.8}),
            load=Load(uniform(300, 1500), lognormal(380, 0.3, 512), 512), arrivals=Arrivals(users=100, ramp_s=20),
            words="100 users whose outputs are near max_new_tokens", style=NO_RANK, seconds=400,
        ),
        Simulated(
            name="healthy-occasional-retraction-2024", label=SMALL_POOL, generation="sglang-2024",
            deployment=Deployment(A10G, {"mem_fraction_static": 0.88, "schedule_conservativeness": 0.9}),
            load=Load(uniform(300, 1500), lognormal(380, 0.3, 512), 512), arrivals=Arrivals(users=90, ramp_s=20),
            words="90 users whose outputs are near max_new_tokens", style=_late("2024-08-15 10:00:00", stamps="time", oldest_retraction=True), seconds=400,
        ),
        Simulated(
            name="healthy-two-ranks", label=FULL_LOAD, generation="sglang-2025",
            deployment=Deployment(L40S, {"dp_size": 2, "schedule_conservativeness": 0.5}), load=MIX, arrivals=Arrivals(users=280, ramp_s=5),
            ranks=(Arrivals(users=290, ramp_s=5),), words="280 and 290 users on two ranks", seconds=150, max_lines=540,
        ),
        Simulated(
            name="healthy-four-ranks-0523", label=SMALL_POOL, generation="sglang-0.5.23",
            deployment=Deployment(A10G, {"dp_size": 4, "mem_fraction_static": 0.88, "schedule_conservativeness": 0.5}), load=MIX,
            arrivals=Arrivals(users=90, ramp_s=5), ranks=tuple(Arrivals(users=users, ramp_s=5) for users in (95, 88, 92)),
            words="90, 95, 88 and 92 users on four ranks", style=_late("2026-03-30 10:00:00"), seconds=150, max_lines=560,
        ),
        Simulated(
            name="healthy-conversations", label=FULL_LOAD, generation="sglang-0.5.23",
            deployment=Deployment(L40S, KEEN | {"cuda_graph_max_bs": 768}), load=Load(uniform(50, 300), lognormal(250, 0.4, 512), 512, num_prefixes=3, prefix_tokens=1200, turns=5),
            arrivals=Arrivals(users=520, think_s=3, ramp_s=10), words="520 users in conversations of 5 turns with 3 system prompts",
            style=_late("2026-01-20 10:00:00"), seconds=300, skip=420, max_lines=800,
        ),
    ]  # fmt: skip


def served() -> list[Simulated]:
    return [
        Simulated(
            name="healthy-online-l40s", label=SERVED, generation="sglang-2025", deployment=Deployment(L40S, KEEN),
            load=MIX, arrivals=Arrivals(rate=6), words="6 requests a second", style=_late("2025-05-05 10:00:00", access=0.3), seconds=200,
        ),
        Simulated(
            name="healthy-online-h100", label=SERVED, generation="sglang-0.5.23", deployment=Deployment(H100, KEEN),
            load=Load(uniform(1500, 4000), lognormal(400, 0.4, 640), 640), arrivals=Arrivals(rate=6.5), words="6.5 requests a second",
            style=_late("2026-05-05 10:00:00"), seconds=120, max_lines=550, skip=150,
        ),
        Simulated(
            name="healthy-online-tp4", label=SERVED, generation="sglang-2025",
            deployment=Deployment(H100_TP4, {"mem_fraction_static": 0.88}), load=Load(uniform(2000, 5000), lognormal(400, 0.4, 640), 2048),
            arrivals=Arrivals(rate=2.4), words="2.4 requests a second with prompts of 2,000 to 5,000 tokens",
            style=_late("2025-07-15 10:00:00", trailing_comma=True, wrapper="json"), seconds=250,
        ),
        Simulated(
            name="healthy-online-cpu", label=SERVED, generation="setpoint",
            deployment=Deployment(CPU_SERVER, {"max_running_requests": 128, "max_total_tokens": 9000}), load=Load(uniform(50, 250), lognormal(120, 0.5, 512), 512),
            arrivals=Arrivals(rate=4), words="4 requests a second on a CPU, pool limited to 9,000 tokens", style=SETPOINT, seconds=250,
        ),
        Simulated(
            name="healthy-online-t4-2024", label=SERVED, generation="sglang-2024", deployment=Deployment(T4, {"mem_fraction_static": 0.82, "max_total_tokens": 120000}),
            load=Load(uniform(200, 1200), lognormal(250, 0.5, 768), 768), arrivals=Arrivals(rate=8.5), words="8.5 requests a second",
            style=_late("2024-10-05 10:00:00"), seconds=200,
        ),
        Simulated(
            name="healthy-burst-drains", label=TRANSIENT, generation="sglang-2025", deployment=Deployment(L40S, KEEN),
            load=MIX, arrivals=Arrivals(rate=2.6, bursts=130), words="bursts of 130 requests about every 50 s", style=NO_RANK, seconds=300,
        ),
        Simulated(
            name="healthy-burst-drains-setpoint", label=TRANSIENT, generation="setpoint", deployment=Deployment(A10G, {"mem_fraction_static": 0.88} | KEEN),
            load=MIX, arrivals=Arrivals(rate=0.75, bursts=40), words="bursts of 40 requests about every 53 s", style=SETPOINT, seconds=400,
        ),
        Simulated(
            name="healthy-night-and-day", label=SERVED, generation="sglang-0.5.23", deployment=Deployment(L40S, KEEN), load=MIX,
            arrivals=Arrivals(rate=3.2, pause=(50.0, 110.0)), words="3.2 requests a second, with a minute's pause", style=_late("2026-04-20 10:00:00"), seconds=220,
        ),
    ]  # fmt: skip


ALL = (full_load, full_load_of_many_kinds, served)
