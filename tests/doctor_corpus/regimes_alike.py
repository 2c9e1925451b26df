"""Cases that look like another one for a moment, or at one figure."""

from __future__ import annotations

from cases import Label, Simulated
from deployments import A10G, A100_TP2, CPU, H100, H100_TP4, L40S, RTX_4090, Deployment
from generations import Style
from regimes_admission import (
    CLIENT,
    CONSERVATIVE,
    LESS_CAREFUL,
    MAX_RUNNING,
    MEM_FRACTION,
    MORE_CAREFUL,
    NO_RANK,
)
from regimes_healthy import FULL_LOAD, SMALL_POOL

from setpoint_testing.traffic import Arrivals, Load, lognormal, uniform

SETPOINT = Style(begin="2026-11-20 08:00:00")
MIX = Load(uniform(300, 1500), lognormal(300, 0.4, 512), 512)
LONG = Load(uniform(1500, 4000), lognormal(400, 0.4, 640), 640)
KEEN = {"schedule_conservativeness": 0.5}
NO_CHANGE = (LESS_CAREFUL, MORE_CAREFUL, (MAX_RUNNING, "decrease"), (MEM_FRACTION, "decrease"))


def _healthy(why: str, *acceptable: str) -> Label:
    careful = "kv-optimistic" in acceptable
    forbidden = tuple(each for each in NO_CHANGE if each != MORE_CAREFUL or not careful)
    return Label(cause="healthy", why=why, forbidden=forbidden, acceptable=acceptable)


def _late(begin: str, **more: object) -> Style:
    return Style(begin=begin, **more)  # type: ignore[arg-type]


def transient() -> list[Simulated]:
    return [
        Simulated(
            name="alike-low-usage-and-queue-at-the-ramp", generation="sglang-2025", deployment=Deployment(L40S, KEEN),
            label=_healthy("A queue at low usage while 350 users come at once and are prefilled; then the good state."),
            load=MIX, arrivals=Arrivals(users=350), words="350 users at once", style=NO_RANK, seconds=180, max_lines=560,
        ),
        Simulated(
            name="alike-retractions-at-the-ramp-only", generation="sglang-0.5.23", deployment=Deployment(RTX_4090, {"schedule_conservativeness": 0.3}),
            label=_healthy("A handful of retractions soon after the ramp, when all outputs grow together; then the good state.", "kv-optimistic"),
            load=Load(uniform(300, 1500), uniform(150, 500), 512), arrivals=Arrivals(users=200), words="200 users at once",
            style=_late("2026-06-20 10:00:00"), seconds=200, max_lines=560,
        ),
        Simulated(
            name="alike-bursts-of-two-hundred", generation="setpoint", deployment=Deployment(H100, KEEN),
            label=_healthy("Bursts make a queue for a second or two, which drains at once; the server rests in between.", "client-bound", "prefill-budget"),
            load=Load(uniform(100, 500), lognormal(150, 0.4, 256), 256), arrivals=Arrivals(rate=5, bursts=200),
            words="bursts of 200 requests about every 40 s", style=SETPOINT, seconds=180,
        ),
        Simulated(
            name="alike-drain-of-a-benchmark", generation="sglang-2025", deployment=Deployment(A100_TP2, KEEN),
            label=_healthy("A batch job in the good state until it drains: the empty queue at the end is its end, not a slow client."),
            load=LONG, arrivals=Arrivals(rate=420, bursts=420, total=420), words="a batch job of 420 prompts at once",
            style=_late("2025-09-09 10:00:00"), seconds=900, max_lines=560,
        ),
        Simulated(
            name="alike-long-pauses", generation="sglang-2024", deployment=Deployment(L40S, KEEN),
            label=_healthy("Two phases in the good state with a minute without any request between them."),
            load=MIX, arrivals=Arrivals(users=300, ramp_s=4, pause=(50.0, 130.0)), words="300 users, who pause for 80 s",
            style=_late("2024-11-11 10:00:00"), seconds=260, max_lines=560,
        ),
        Simulated(
            name="alike-health-checks-between", generation="sglang-2025", deployment=Deployment(H100_TP4, {"mem_fraction_static": 0.86} | KEEN),
            label=_healthy("The good state; access lines of health checks are mixed in."),
            load=LONG, arrivals=Arrivals(users=260, ramp_s=5), words="260 users", style=_late("2025-09-10 10:00:00", access=0.25, wrapper="kubernetes"),
            seconds=220, max_lines=440,
        ),
    ]  # fmt: skip


def alike() -> list[Simulated]:
    return [
        Simulated(
            name="alike-usage-one", generation="sglang-2025", deployment=Deployment(A100_TP2, {"schedule_conservativeness": 0.2}),
            label=_healthy("The pool is used at 0.97 and more with some 27 waiting and hardly a retraction, like the example of the Chinese guide."),
            load=Load(uniform(2000, 4000), lognormal(250, 0.4, 384), 384), arrivals=Arrivals(users=120, ramp_s=10),
            words="120 users with prompts of 2,000 to 4,000 tokens", style=_late("2025-11-11 13:01:09"), seconds=400, max_lines=560,
        ),
        Simulated(
            name="alike-short-queue-full-pool", generation="sglang-0.5.23", deployment=Deployment(L40S, KEEN),
            label=_healthy("The pool is just full: usage 0.9 and a queue of a few dozen."),
            load=MIX, arrivals=Arrivals(users=205, ramp_s=6), words="205 users", style=_late("2026-06-21 10:00:00"), seconds=200,
        ),
        Simulated(
            name="alike-cap-never-reached", generation="setpoint", deployment=Deployment(L40S, {"max_running_requests": 200} | KEEN),
            label=FULL_LOAD, load=MIX, arrivals=Arrivals(users=330, ramp_s=6), words="330 users; the cap of 200 is not reached",
            style=SETPOINT, seconds=160,
        ),
        Simulated(
            name="alike-high-usage-one-retraction", generation="sglang-2024", deployment=Deployment(A10G, {"mem_fraction_static": 0.88, "schedule_conservativeness": 0.8}),
            label=SMALL_POOL, load=Load(uniform(300, 1200), lognormal(360, 0.3, 512), 512), arrivals=Arrivals(users=55, ramp_s=20),
            words="55 users whose outputs are near max_new_tokens", style=_late("2025-01-15 10:00:00"), seconds=400,
        ),
        Simulated(
            name="alike-client-with-a-low-cap", generation="sglang-0.5.23", deployment=Deployment(H100, {"max_running_requests": 64}),
            label=CLIENT, load=MIX, arrivals=Arrivals(users=40), words="40 users under a cap of 64", style=_late("2026-06-22 10:00:00"),
            seconds=120, max_lines=300,
        ),
        Simulated(
            name="alike-client-cpu-prefix-hits", generation="setpoint", deployment=Deployment(CPU),
            label=CLIENT, load=Load(uniform(10, 40), uniform(20, 80), 128, num_prefixes=2, prefix_tokens=800),
            arrivals=Arrivals(users=3), words="3 users on a CPU whose prompts share a prefix", style=SETPOINT, seconds=120, max_lines=300,
        ),
        Simulated(
            name="alike-conservative-under-a-high-cap", generation="sglang-0.5.23",
            deployment=Deployment(RTX_4090, {"max_running_requests": 2048}), label=CONSERVATIVE,
            load=Load(uniform(100, 500), lognormal(150, 0.5, 8192), 8192), arrivals=Arrivals(users=250),
            words="250 users who ask for up to 8,192 tokens and get 150", style=_late("2026-06-23 10:00:00"), seconds=150,
        ),
    ]  # fmt: skip


ALL = (transient, alike)
