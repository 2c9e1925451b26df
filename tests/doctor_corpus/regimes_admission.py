"""Cases in which something keeps waiting requests out: the client, the slots, the reserve for
outputs, the pool."""

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
    Deployment,
)
from generations import Style

from setpoint_testing.traffic import Arrivals, Load, lognormal, uniform

CONSERVATIVENESS = "--schedule-conservativeness"
MAX_RUNNING = "--max-running-requests"
MEM_FRACTION = "--mem-fraction-static"
LESS_CAREFUL = (CONSERVATIVENESS, "decrease")
MORE_CAREFUL = (CONSERVATIVENESS, "increase")
NO_RANK = Style(rank="")

CLIENT = Label(
    cause="client-bound",
    why="The server never has more to do than the clients give it, and could take much more.",
    forbidden=(LESS_CAREFUL, (MAX_RUNNING, "decrease"), (MEM_FRACTION, "increase")),
)
CHAT = Load(uniform(80, 900), lognormal(220, 0.6, 1024), 1024)


def client_bound() -> list[Simulated]:
    alone = Load(uniform(2200, 2600), uniform(2200, 2600), 4096)
    return [
        Simulated(
            name="client-one-user", label=CLIENT, generation="sglang-2025",
            deployment=Deployment(H100), load=Load(uniform(60, 200), uniform(300, 700), 1024),
            arrivals=Arrivals(users=1, think_s=1.5), words="one user, who reads 1.5 s on average",
            style=Style(rank="", access=0.3), seconds=400, max_lines=150,
        ),
        Simulated(
            name="client-thirty-users", label=CLIENT, generation="sglang-2024",
            deployment=Deployment(H100), load=alone, arrivals=Arrivals(users=30, ramp_s=40),
            words="30 users without a pause, prompts and outputs of about 2,400 tokens",
            style=Style(begin="2025-01-27 11:10:00"), max_lines=250,
        ),
        Simulated(
            name="client-benchmark-concurrency-16", label=CLIENT, generation="sglang-0.5.23",
            deployment=Deployment(A100_TP2), load=CHAT, arrivals=Arrivals(users=16),
            words="a benchmark with 16 requests at a time", style=Style(begin="2026-09-01 10:00:00"),
        ),
        Simulated(
            name="client-slow-arrivals", label=CLIENT, generation="setpoint",
            deployment=Deployment(L40S), load=CHAT, arrivals=Arrivals(rate=0.8),
            words="0.8 requests a second come on their own", seconds=500,
            style=Style(begin="2026-11-20 08:00:00"),
        ),
        Simulated(
            name="client-cpu-two-users", label=CLIENT, generation="setpoint",
            deployment=Deployment(CPU, {"max_running_requests": 32}),
            load=Load(uniform(30, 120), uniform(60, 200), 256),
            arrivals=Arrivals(users=2, think_s=0.5), words="two users on a CPU", seconds=500,
            style=Style(begin="2026-11-20 08:00:00"),
        ),
        Simulated(
            name="client-tp4-eight-users", label=CLIENT, generation="sglang-2025",
            deployment=Deployment(H100_TP4, {"mem_fraction_static": 0.88}), load=CHAT,
            arrivals=Arrivals(users=8, think_s=0.3), words="8 users with short pauses",
            style=Style(trailing_comma=True, wrapper="docker"), seconds=400,
        ),
        Simulated(
            name="client-no-start-lines", label=CLIENT, generation="sglang-2024",
            deployment=Deployment(A10G), load=Load(uniform(50, 300), uniform(100, 400), 512),
            arrivals=Arrivals(users=4), words="4 users; the log begins after the start",
            style=Style(stamps="time", begin="2024-09-20 16:43:29"), with_start=False, skip=12,
        ),
    ]  # fmt: skip


CAP = Label(
    cause="seq-cap",
    why="Requests wait only for a slot; more than half of the pool stays free.",
    action=(MAX_RUNNING, "increase"),
    forbidden=(LESS_CAREFUL, MORE_CAREFUL, (MAX_RUNNING, "decrease")),
)
REDUCED = Label(
    cause="seq-cap",
    why="Requests wait only for a slot: the server lowered max_running_requests when it started, as"
    " in https://github.com/sgl-project/sglang/issues/30160.",
    forbidden=(LESS_CAREFUL, MORE_CAREFUL, (MAX_RUNNING, "decrease")),
)


def seq_cap() -> list[Simulated]:
    short = Load(uniform(100, 700), lognormal(180, 0.5, 512), 512)
    return [
        Simulated(
            name="cap-16-of-many", label=CAP, generation="sglang-2025",
            deployment=Deployment(H100, {"max_running_requests": 16}), load=short,
            arrivals=Arrivals(users=64), words="64 users", style=NO_RANK, seconds=120,
        ),
        Simulated(
            name="cap-32-open-loop", label=CAP, generation="sglang-0.5.23",
            deployment=Deployment(L40S, {"max_running_requests": 32}), load=short,
            arrivals=Arrivals(rate=9, bursts=4), words="9 requests a second in bursts of 4",
            style=Style(access=0.2, begin="2026-08-03 10:11:12"), seconds=150,
        ),
        Simulated(
            name="cap-48-2024", label=CAP, generation="sglang-2024",
            deployment=Deployment(A100_TP2, {"max_running_requests": 48}), load=CHAT,
            arrivals=Arrivals(users=150, ramp_s=10), words="150 users within 10 s",
            style=Style(begin="2024-11-02 23:59:00"),
        ),
        Simulated(
            name="cap-8-setpoint-cpu", label=CAP, generation="setpoint",
            deployment=Deployment(CPU, {"max_running_requests": 8}),
            load=Load(uniform(30, 200), uniform(80, 200), 256), arrivals=Arrivals(users=24),
            words="24 users on a CPU", style=Style(begin="2026-11-20 08:00:00"),
        ),
        Simulated(
            name="cap-reduced-128-to-50", label=REDUCED, generation="sglang-0.5.23",
            deployment=Deployment(H100, {"max_running_requests": 128}, limited_running=50),
            load=CHAT, arrivals=Arrivals(users=120), words="120 users",
            style=Style(begin="2026-07-08 12:00:00"),
        ),
        Simulated(
            name="cap-reduced-64-to-24-2025", label=REDUCED, generation="sglang-2025",
            deployment=Deployment(H100_TP4, {"max_running_requests": 64}, limited_running=24),
            load=CHAT, arrivals=Arrivals(users=90, ramp_s=5), words="90 users within 5 s",
        ),
        Simulated(
            name="cap-latency-profile-overrun", label=CAP, generation="setpoint",
            deployment=Deployment(H100, {"max_running_requests": 24, "schedule_conservativeness": 1.2}),
            load=short, arrivals=Arrivals(users=100), words="100 users",
            style=Style(begin="2026-11-20 08:00:00"), seconds=100,
        ),
    ]  # fmt: skip


CONSERVATIVE = Label(
    cause="kv-conservative",
    why="Outputs end long before max_new_tokens, so the reserve for them keeps requests out of a"
    " pool that has room.",
    action=LESS_CAREFUL,
    forbidden=(MORE_CAREFUL, (MAX_RUNNING, "decrease"), (MEM_FRACTION, "decrease")),
)


def kv_conservative() -> list[Simulated]:
    early = Load(uniform(150, 600), lognormal(150, 0.6, 4096), 4096)
    return [
        Simulated(
            name="conservative-a10g-4096", label=CONSERVATIVE, generation="sglang-2025",
            deployment=Deployment(A10G, {"mem_fraction_static": 0.9}), load=early,
            arrivals=Arrivals(users=120), words="120 users who ask for up to 4,096 tokens and get 150",
            style=NO_RANK,
        ),
        Simulated(
            name="conservative-l40s-setpoint", label=CONSERVATIVE, generation="setpoint",
            deployment=Deployment(L40S, {"schedule_conservativeness": 1.3}), load=early,
            arrivals=Arrivals(users=250, ramp_s=8), words="250 users who ask for 4,096 tokens and get 150",
            style=Style(begin="2026-11-20 08:00:00"),
        ),
        Simulated(
            name="conservative-tp4-2024", label=CONSERVATIVE, generation="sglang-2024",
            deployment=Deployment(H100_TP4, {"mem_fraction_static": 0.55}),
            load=Load(uniform(200, 900), lognormal(250, 0.6, 8192), 8192),
            arrivals=Arrivals(users=260), words="260 users who ask for 8,192 tokens and get 250",
            style=Style(begin="2024-10-10 10:10:10"),
        ),
        Simulated(
            name="conservative-high-setting", label=CONSERVATIVE, generation="sglang-0.5.23",
            deployment=Deployment(RTX_4090, {"schedule_conservativeness": 1.4}),
            load=Load(uniform(100, 500), lognormal(120, 0.5, 2048), 2048),
            arrivals=Arrivals(users=200), words="200 users who ask for 2,048 tokens and get 120",
            style=Style(begin="2026-05-05 05:05:05"),
        ),
        Simulated(
            name="conservative-open-loop-stop-strings", label=CONSERVATIVE, generation="sglang-2024",
            deployment=Deployment(A10G, {"mem_fraction_static": 0.9}),
            load=Load(uniform(100, 400), lognormal(80, 0.5, 3000), 3000),
            arrivals=Arrivals(rate=11), words="11 requests a second that end at a stop string after 80 of 3,000 tokens",
            style=Style(stamps="time", begin="2024-08-01 09:00:00", oldest_retraction=True),
        ),
        Simulated(
            name="conservative-cpu-server", label=CONSERVATIVE, generation="setpoint",
            deployment=Deployment(CPU_SERVER, {"mem_fraction_static": 0.35, "max_running_requests": 256}),
            load=Load(uniform(100, 400), lognormal(100, 0.5, 4096), 4096),
            arrivals=Arrivals(users=120), words="120 users who ask for 4,096 tokens and get 100",
            style=Style(begin="2026-11-20 08:00:00"),
        ),
        Simulated(
            name="conservative-k8s-2025", label=CONSERVATIVE, generation="sglang-2025",
            deployment=Deployment(L40S), load=early, arrivals=Arrivals(rate=20),
            words="20 requests a second that ask for 4,096 tokens and get 150",
            style=Style(wrapper="kubernetes", trailing_comma=True, access=0.15),
        ),
    ]  # fmt: skip


OPTIMISTIC = Label(
    cause="kv-optimistic",
    why="Outputs are much longer than the reserve assumes, so running requests are sent back again"
    " and again.",
    action=MORE_CAREFUL,
    forbidden=(LESS_CAREFUL, (MAX_RUNNING, "increase")),
)


def kv_optimistic() -> list[Simulated]:
    long = Load(uniform(100, 500), uniform(1400, 2000), 2048)
    return [
        Simulated(
            name="optimistic-low-setting", label=OPTIMISTIC, generation="sglang-2025",
            deployment=Deployment(A10G, {"mem_fraction_static": 0.9, "schedule_conservativeness": 0.3}),
            load=long, arrivals=Arrivals(users=100, ramp_s=150), words="100 users within 150 s whose outputs take 1,400 to 2,000 of 2,048 tokens",
            style=NO_RANK, seconds=400,
        ),
        Simulated(
            name="optimistic-default-reasoning", label=OPTIMISTIC, generation="sglang-0.5.23",
            deployment=Deployment(L40S), load=Load(uniform(100, 400), uniform(2500, 4000), 4096),
            arrivals=Arrivals(users=140, ramp_s=250), words="140 users, within 250 s, of a reasoning model, outputs of 2,500 to 4,000 of 4,096 tokens",
            style=Style(begin="2026-04-04 04:04:04"), seconds=600,
        ),
        Simulated(
            name="optimistic-2024-message", label=OPTIMISTIC, generation="sglang-2024",
            deployment=Deployment(A10G, {"mem_fraction_static": 0.9, "schedule_conservativeness": 0.2}),
            load=long, arrivals=Arrivals(users=80, ramp_s=120), words="80 users within 120 s whose outputs take 1,400 to 2,000 of 2,048 tokens",
            style=Style(begin="2025-02-01 01:02:03"), seconds=400,
        ),
        Simulated(
            name="optimistic-oldest-message", label=OPTIMISTIC, generation="sglang-2024",
            deployment=Deployment(RTX_4090, {"schedule_conservativeness": 0.1}),
            load=Load(uniform(200, 800), uniform(700, 1000), 1024), arrivals=Arrivals(users=200, ramp_s=60),
            words="200 users within 60 s whose outputs take 700 to 1,000 of 1,024 tokens",
            style=Style(stamps="time", begin="2024-07-30 07:00:00", oldest_retraction=True, rank=""),
        ),
        Simulated(
            name="optimistic-setpoint-cpu", label=OPTIMISTIC, generation="setpoint",
            deployment=Deployment(CPU, {"schedule_conservativeness": 0.5, "max_total_tokens": 24000, "max_running_requests": 128}),
            load=Load(uniform(40, 120), uniform(500, 1000), 1024), arrivals=Arrivals(users=70, ramp_s=60),
            words="70 users within 60 s whose outputs take 500 to 1,000 of 1,024 tokens, pool limited to 24,000 tokens",
            style=Style(begin="2026-11-20 08:00:00"), seconds=300,
        ),
        Simulated(
            name="optimistic-throughput-profile", label=OPTIMISTIC, generation="sglang-0.5.23",
            deployment=Deployment(H100_TP4, {"mem_fraction_static": 0.55, "schedule_conservativeness": 0.3, "max_running_requests": 4096}),
            load=Load(uniform(100, 700), uniform(900, 1500), 1536), arrivals=Arrivals(users=260, ramp_s=50),
            words="260 users within 50 s whose outputs take 900 to 1,500 of 1,536 tokens",
            style=Style(begin="2026-10-01 10:00:00", access=0.05), seconds=400,
        ),
    ]  # fmt: skip


FULL = Label(
    cause="kv-full",
    why="The pool holds only a few dozen of these long requests at most; the reserve is small beside them, and"
    " neither slots nor memory outside the pool are left unused.",
    forbidden=(LESS_CAREFUL, (MEM_FRACTION, "decrease"), (MAX_RUNNING, "increase")),
)
FULL_NEAR_MAX = Label(
    cause="kv-full",
    why="Some twenty long requests fill the pool and twice as many wait. (kv-optimistic is"
    " acceptable: outputs near max_new_tokens also cause more than one retraction a minute.)",
    forbidden=(LESS_CAREFUL, (MEM_FRACTION, "decrease"), (MAX_RUNNING, "increase")),
    acceptable=("kv-optimistic",),
)
FULL_CAREFUL = Label(
    cause="kv-full",
    why="Requests are retracted although the conservativeness is above 1/0.7, where it has no"
    " further effect: the pool is too small for these outputs.",
    forbidden=(LESS_CAREFUL, (MEM_FRACTION, "decrease"), (MAX_RUNNING, "increase")),
    acceptable=("kv-optimistic",),
)


def kv_full() -> list[Simulated]:
    return [
        Simulated(
            name="full-documents-l40s", label=FULL, generation="sglang-2025",
            deployment=Deployment(L40S, {"mem_fraction_static": 0.9}), load=Load(uniform(5000, 9000), uniform(500, 900), 1000),
            arrivals=Arrivals(rate=0.9), words="0.9 documents of 5,000 to 9,000 tokens a second, outputs of 500 to 900",
            style=NO_RANK, seconds=500,
        ),
        Simulated(
            name="full-documents-a10g", label=FULL, generation="sglang-2024",
            deployment=Deployment(A10G, {"mem_fraction_static": 0.92}), load=Load(uniform(1800, 3000), uniform(300, 500), 512),
            arrivals=Arrivals(rate=0.95), words="0.95 prompts of 1,800 to 3,000 tokens a second",
            style=Style(begin="2024-12-12 12:12:12"), seconds=500,
        ),
        Simulated(
            name="full-tp2-long-context", label=FULL, generation="sglang-0.5.23",
            deployment=Deployment(A100_TP2, {"mem_fraction_static": 0.9}), load=Load(uniform(6000, 10000), uniform(700, 1000), 1000),
            arrivals=Arrivals(users=90, ramp_s=60), words="90 users with prompts of 6,000 to 10,000 tokens",
            style=Style(begin="2026-06-06 06:06:06"), seconds=700,
        ),
        Simulated(
            name="full-setpoint-4090", label=FULL_NEAR_MAX, generation="setpoint",
            deployment=Deployment(RTX_4090, {"mem_fraction_static": 0.88}), load=Load(uniform(3000, 6000), uniform(1500, 2000), 2000),
            arrivals=Arrivals(users=60, ramp_s=60), words="60 users with prompts of 3,000 to 6,000 tokens", style=Style(begin="2026-11-20 08:00:00"), seconds=500,
        ),
        Simulated(
            name="full-most-careful", label=FULL_CAREFUL, generation="sglang-2025",
            deployment=Deployment(A10G, {"mem_fraction_static": 0.9, "schedule_conservativeness": 1.6}),
            load=Load(uniform(60, 200), uniform(3800, 4096), 4096), arrivals=Arrivals(users=60, ramp_s=250),
            words="60 users within 250 s whose outputs take 3,800 to 4,096 of 4,096 tokens", style=NO_RANK, seconds=900,
        ),
        Simulated(
            name="full-most-careful-0523", label=FULL_CAREFUL, generation="sglang-0.5.23",
            deployment=Deployment(RTX_4090, {"mem_fraction_static": 0.88, "schedule_conservativeness": 2.0}),
            load=Load(uniform(60, 200), uniform(7000, 8192), 8192), arrivals=Arrivals(users=90, ramp_s=200),
            words="90 users within 200 s whose outputs take 7,000 to 8,192 of 8,192 tokens",
            style=Style(begin="2026-02-02 02:02:02"), seconds=900,
        ),
    ]  # fmt: skip


ALL = (client_bound, seq_cap, kv_conservative, kv_optimistic, kv_full)
