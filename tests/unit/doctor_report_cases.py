"""Observations and reports made by hand, as the doctor's pages show them."""

from __future__ import annotations

import math

from setpoint.core.moments import Moment
from setpoint.doctor.findings import Action, Effect, Finding, PhaseSpan, Report, RuledOut
from setpoint.doctor.observations import (
    Event,
    Evidence,
    Facts,
    Observations,
    Rank,
    Source,
)

BEGAN = 1_762_866_069.0


def decode_line(second: int, running: int, usage: float, queue: int, speed: float) -> str:
    clock = f"2025-11-11 13:{1 + second // 60:02d}:{second % 60:02d}"
    return (
        f"[{clock} TP0] Decode batch. #running-req: {running}, #token: {int(usage * 1e6)}, token"
        f" usage: {usage:.2f}, cuda graph: True, gen throughput (token/s): {speed:.2f},"
        f" #queue-req: {queue}"
    )


def moments(*, cap: int = 64, seconds: int = 720, step: int = 4) -> list[Moment]:
    """A ramp, a steady phase at the cap with a queue, and a drain."""
    found = []
    for line, second in enumerate(range(0, seconds, step), 31):
        ramp = min(1.0, second / 60)
        drain = min(1.0, max(0.0, (seconds - second) / 90))
        running = round(cap * min(ramp, drain))
        wobble = math.sin(second / 17) * 0.03 + math.sin(second / 5) * 0.01
        usage = max(0.0, (0.43 + wobble) * min(ramp, drain))
        queue = max(0, round(212 * min(ramp, 2 * drain - 1) + 30 * math.sin(second / 41)))
        speed = 2400 * min(ramp, drain) * (1 + wobble)
        found.append(
            Moment(
                at=BEGAN + second,
                seconds=step,
                line=line,
                text=decode_line(second, running, usage, queue, speed),
                num_decode=1,
                running=running,
                queue=queue,
                usage=usage,
                gen_throughput=speed,
                new_tokens=400,
                cached_tokens=90,
            )
        )
    return found


def facts() -> Facts:
    return Facts(
        engine="sglang",
        version="0.5.4",
        model="meta-llama/Llama-3.1-8B-Instruct",
        device="gpu",
        options={"max_running_requests": 64, "tp_size": 1},
        max_total_num_tokens=1_000_000,
        max_running_requests=64,
        chunked_prefill_size=8192,
        available_gb=6.1,
    )


def seen(*, ranks: int = 1) -> Observations:
    names = [f"DP{index} TP0" for index in range(ranks)] if ranks > 1 else [""]
    return Observations(
        sources=[
            Source(
                name="server.log",
                kind="log",
                generation="SGLang 0.5.4",
                num_lines=12_204,
                num_batch_lines=840,
                num_understood=840,
            )
        ],
        facts=facts(),
        ranks=[
            Rank(
                name,
                moments(),
                [Event("ready", BEGAN - 4, 30, "The server is fired up and ready to roll!")],
            )
            for name in names
        ],
    )


def finding() -> Finding:
    lines = {moment.line: moment.text for moment in moments()}
    return Finding(
        cause="seq-cap",
        confidence=0.94,
        summary=(
            "All 64 slots were taken in 97 % of the time under load while 212 requests waited"
            " (median), and the KV cache was only 43 % full."
        ),
        evidence=(
            Evidence(
                29,
                "[2025-11-11 13:01:04 TP0] max_total_num_tokens=1000000, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=64, context_len=131072, available_gpu_mem=6.10 GB",
            ),
            Evidence(61, lines[61]),
            Evidence(121, lines[121]),
            Evidence(180, lines[180]),
        ),
        action=Action(
            "Let the server run 148 requests at once.",
            "--max-running-requests",
            "increase",
            148,
        ),
        effect=Effect(
            "output throughput",
            1.3,
            1.7,
            2.1,
            "64 requests hold 430,000 tokens of 1,000,000, so about 148 fit (6,719 tokens each);"
            " a decode step over 2.3 times the requests takes 1.1 to 1.8 times as long.",
        ),
        ruled_out=(
            RuledOut(
                "kv-conservative",
                "running requests stand at the limit, so admission never gets to ask for memory",
            ),
            RuledOut("kv-full", "usage stayed below 47 %"),
            RuledOut("prefill-budget", "the largest prefill batch had 400 of 8,192 tokens"),
            RuledOut("client-bound", "212 requests waited"),
        ),
        risk="Each request gets its tokens more slowly: the gap between two tokens grows by 10 % to 80 %.",
        verify="After the restart, #running-req passes 64 and token usage rises towards 0.9 under the same load.",
        falsify="#running-req stays at 64 or below although requests wait.",
        share=0.97,
    )


def second_finding() -> Finding:
    return Finding(
        cause="graph-miss",
        confidence=0.71,
        summary="38 % of the decode batches ran without a captured graph, all of them with more than 32 requests.",
        evidence=(Evidence(75, "[2025-11-11 13:04:00 TP0] Decode batch. … cuda graph: False"),),
        action=Action("Capture graphs up to batches of 64.", "--cuda-graph-max-bs", "increase", 64),
        effect=Effect(
            "output throughput", 1.02, 1.1, 1.2, "Launching kernels one by one costs 10 %."
        ),
    )


def report() -> Report:
    observed = seen()
    end = BEGAN + 720
    return Report(
        verdict="seq-cap",
        summary=finding().summary,
        findings=[finding(), second_finding()],
        coverage=1.0,
        sources=observed.sources,
        phases={
            "": [
                PhaseSpan("ramp", BEGAN, BEGAN + 60),
                PhaseSpan("steady", BEGAN + 60, BEGAN + 630),
                PhaseSpan("drain", BEGAN + 630, end),
            ]
        },
    )


def healthy_report() -> Report:
    return Report(
        verdict="healthy",
        summary="No limit binds: 64 requests run, none wait long, and the KV cache is 43 % full.",
        findings=[],
        coverage=1.0,
        sources=seen().sources,
        phases=report().phases,
    )


def empty_handed_report() -> Report:
    return Report(
        verdict="not-enough-evidence",
        summary="The log has 3 batch lines from 2 s; a diagnosis needs about a minute under load.",
        findings=[],
        coverage=0.62,
        sources=seen().sources,
        missing=(
            "Log a minute or more while clients send requests.",
            "Keep the lines from the start of the server: they say its limits.",
        ),
    )
