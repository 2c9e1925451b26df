"""Each cause of the doctor: when it is found, and what looks like it."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from doctor_cases import decode, prefill, rank, retract, seen

import setpoint.doctor.checks
from setpoint.core.moments import Moment
from setpoint.doctor.binding_limit import SchedulerLimits, binding_limit
from setpoint.doctor.checks.diagnose import diagnose
from setpoint.doctor.contract import contract
from setpoint.doctor.findings import Report
from setpoint.doctor.observations import Rank, SourceKind

READY: dict[str, Any] = {
    "max_running_requests": 2048,
    "max_total_num_tokens": 100_000,
    "chunked_prefill_size": 8192,
    "max_prefill_tokens": 16384,
}


def judge(lines: list[Moment], **facts: Any) -> Report:
    return diagnose(seen(rank(lines), **{**READY, **facts}))


def causes(report: Report) -> list[str]:
    return [finding.cause for finding in report.findings]


def asked(report: Report) -> tuple[str | None, str | None]:
    action = report.findings[0].action
    return action.flag, action.direction


def steady(running: int, queue: float, usage: float, count: int = 40) -> list[Moment]:
    """Decode lines whose figures vary a little, with an admission every few lines."""
    lines = []
    for i in range(count):
        lines.append(decode(running + i * 7 % 11 - 5, max(queue + i * 5 % 9, 0), usage))
        if i % 4 == 0:
            lines.append(prefill(1, 300, queue, running - 1, usage))
    return lines


def test_nothing_at_all_is_not_enough_evidence() -> None:
    report = diagnose(seen())
    assert (report.verdict, report.findings) == ("not-enough-evidence", [])
    assert report.missing


def test_a_few_lines_are_not_enough_evidence() -> None:
    assert judge(steady(100, 50, 0.5, 3)).verdict == "not-enough-evidence"


def test_lines_that_could_not_be_read_are_no_evidence() -> None:
    observations = seen(rank(steady(100, 50, 0.5)), **READY)
    observations.sources[0].num_understood //= 4
    report = diagnose(observations)
    assert (report.verdict, report.findings) == ("not-enough-evidence", [])


class TestClientBound:
    def test_an_empty_queue_with_room_is_the_clients_doing(self) -> None:
        report = judge([decode(12, 0, 0.08) for _ in range(30)])
        assert report.verdict == "client-bound"
        assert asked(report) == (None, None)
        action = report.findings[0].action
        assert action.value > 12
        assert str(action.value) in action.text

    def test_one_request_after_the_other_too(self) -> None:
        lines = [prefill(1, 40, 0, 0, 0.0), *(decode(1, 0, 0.01) for _ in range(20))]
        report = judge(lines, max_running_requests=64)
        assert report.verdict == "client-bound"
        why = {each.cause: each.why for each in report.findings[0].ruled_out}
        assert why["seq-cap"] == "At most 1 request ran at once; the limit is 64."

    def test_the_end_of_a_benchmark_is_not(self) -> None:
        full = [decode(200 + i % 3, 300 - 10 * i, 0.95) for i in range(30)]
        drain = [decode(200 - 5 * i, 0, 0.9 - 0.02 * i) for i in range(39)]
        assert judge(full + drain).verdict == "healthy"

    def test_a_pool_in_good_use_is_not(self) -> None:
        assert judge([decode(200 + i % 5, 0, 0.93) for i in range(30)]).verdict == "healthy"

    def test_all_slots_in_use_without_a_queue_are_not(self) -> None:
        report = judge([decode(64, 0, 0.4) for _ in range(30)], max_running_requests=64)
        assert report.verdict == "healthy"


class TestSeqCap:
    def test_requests_that_stand_at_the_cap_with_room_in_the_pool(self) -> None:
        lines = [decode(64, 300 + i % 7, 0.41) for i in range(30)]
        report = judge(lines, max_running_requests=64)
        assert report.verdict == "seq-cap"
        assert asked(report) == ("--max-running-requests", "increase")
        assert 64 < report.findings[0].action.value <= 64 * 0.9 / 0.41

    def test_one_change_lets_all_in_that_wait(self) -> None:
        """... if the pool is as good as empty, so that it says nothing of how many would fit, and
        the steps do not take longer with a larger batch."""
        ramp = [decode(1 + i // 8, 0, 0.0, tokens=100) for i in range(32)]
        lines = ramp + [decode(4, 20, 0.0, tokens=443) for _ in range(30)]
        report = judge(lines, max_running_requests=4)
        assert asked(report) == ("--max-running-requests", "increase")
        assert 24 <= report.findings[0].action.value <= 32

    def test_twice_the_cap_where_the_source_does_not_tell_what_a_larger_batch_brings(self) -> None:
        report = judge([decode(4, 20, 0.0, tokens=443) for _ in range(30)], max_running_requests=4)
        assert report.findings[0].action.value == 8
        assert "measure again" in report.findings[0].action.text

    def test_a_cap_that_no_line_names(self) -> None:
        lines = [decode(50, 300 + i % 7, 0.3) for i in range(30)]
        assert diagnose(seen(rank(lines))).verdict == "seq-cap"

    def test_the_option_holds_for_all_ranks_together(self) -> None:
        ranks = [rank([decode(32, 90, 0.3) for _ in range(20)], f"DP{i}") for i in range(2)]
        options = {"max_running_requests": 64, "dp_size": 2}
        assert diagnose(seen(*ranks, options=options)).verdict == "seq-cap"

    def test_a_cap_at_a_full_pool_costs_nothing(self) -> None:
        lines = [decode(64, 100 + i % 7, 0.94) for i in range(30)]
        assert judge(lines, max_running_requests=64).verdict in ("healthy", "kv-full")

    def test_the_schedulers_own_reason_counts(self) -> None:
        lines = [decode(40, 30, 0.3, refusals={"no_slot": 40, "blocked": 900}) for _ in range(30)]
        report = diagnose(seen(rank(lines), max_running_requests=40))
        assert report.verdict == "seq-cap"


class TestKvConservative:
    def test_a_queue_with_room_and_nothing_else_is_the_reserve(self) -> None:
        report = judge(steady(100, 200, 0.6))
        assert report.verdict == "kv-conservative"
        assert asked(report) == ("--schedule-conservativeness", "decrease")
        assert 0.1 <= report.findings[0].action.value < 0.3
        assert {each.cause for each in report.findings[0].ruled_out} >= {
            "seq-cap",
            "prefill-budget",
            "kv-full",
        }

    def test_a_value_that_cannot_go_lower_is_not_lowered(self) -> None:
        report = judge(steady(100, 200, 0.3), options={"schedule_conservativeness": 0.1})
        assert report.verdict == "kv-conservative"
        assert asked(report) == (None, None)

    def test_not_while_the_load_builds_up(self) -> None:
        ramp = [prefill(8, 8000, 900 - 8 * i, 8 * i, 0.01 * i) for i in range(25)]
        report = judge(ramp + [decode(200 + i % 4, 700 - i, 0.94) for i in range(40)])
        assert report.verdict == "healthy"

    def test_not_with_frequent_retractions(self) -> None:
        lines = [decode(100 + i % 5, 50, 0.84 + 0.03 * (i % 3)) for i in range(60)]
        report = diagnose(seen(retract(rank(lines), 12), **READY))
        assert report.verdict == "kv-optimistic"

    def test_not_when_another_pool_is_full(self) -> None:
        lines = [decode(100 + i % 7, 50, 0.4, other_usage={"swa": 0.99}) for i in range(30)]
        report = judge(lines)
        assert report.verdict == "other-pool-full"
        assert asked(report) == ("--swa-full-tokens-ratio", "increase")

    def test_memory_refused_by_the_scheduler(self) -> None:
        reasons = {"no_memory": 40, "blocked": 300}
        lines = [decode(64, 30, 0.5, refusals=reasons) for _ in range(30)]
        assert diagnose(seen(rank(lines))).verdict == "kv-conservative"


class TestKvOptimistic:
    def test_frequent_retractions_at_a_full_pool(self) -> None:
        observations = seen(retract(rank(steady(100, 30, 0.97)), 10, 0.84), **READY)
        report = diagnose(observations)
        assert report.verdict == "kv-optimistic"
        assert asked(report) == ("--schedule-conservativeness", "increase")
        assert report.findings[0].action.value == pytest.approx(0.84 / 0.7, abs=0.01)

    def test_one_a_minute_is_fine(self) -> None:
        observations = seen(retract(rank(steady(200, 60, 0.95, 120)), 4), **READY)
        assert diagnose(observations).verdict == "healthy"

    def test_at_the_effective_maximum_the_pool_is_too_small(self) -> None:
        options = {"schedule_conservativeness": 1.5}
        observations = seen(retract(rank(steady(100, 30, 0.97)), 10), **READY, options=options)
        assert diagnose(observations).verdict == "kv-full"


class TestKvFull:
    def test_a_queue_that_grows_at_a_full_pool(self) -> None:
        lines = [decode(90 + i % 5, 40 + 8 * i, 0.98) for i in range(40)]
        report = judge(lines, available_gb=5.5)
        assert report.verdict == "kv-full"
        assert asked(report) == ("--kv-cache-dtype", "set")

    def test_a_small_batch_behind_which_more_wait(self) -> None:
        assert judge([decode(20 + i % 2, 70, 0.97) for i in range(30)]).verdict == "kv-full"

    def test_an_option_that_limits_the_pool_is_raised(self) -> None:
        lines = [decode(20 + i % 2, 70, 0.97) for i in range(30)]
        report = judge(lines, options={"max_total_tokens": 100_000})
        assert asked(report) == ("--max-total-tokens", "increase")

    def test_a_moderate_queue_is_healthy(self) -> None:
        assert judge(steady(230, 300, 0.96)).verdict == "healthy"

    def test_the_queue_of_an_offline_batch_shrinks(self) -> None:
        lines = [decode(230 + i % 4, 1500 - 30 * i, 0.97) for i in range(45)]
        assert judge(lines).verdict == "healthy"


class TestPrefill:
    def test_full_batches_of_many_prompts(self) -> None:
        lines: list[Moment] = []
        for i in range(20):
            lines += [prefill(9, 8192, 400 + i, 40, 0.3) for _ in range(3)]
            lines.append(decode(45 + i % 4, 400, 0.32))
        report = judge(lines)
        assert report.verdict == "prefill-budget"
        assert asked(report) == ("--chunked-prefill-size", "increase")

    def test_the_smaller_budget_is_raised(self) -> None:
        lines = [prefill(9, 4096, 400, 40 + i % 3, 0.3) for i in range(40)]
        report = judge(lines, max_prefill_tokens=4096)
        assert asked(report) == ("--max-prefill-tokens", "increase")

    def test_chunks_of_one_prompt_while_others_wait(self) -> None:
        lines: list[Moment] = []
        for i in range(8):
            lines += [prefill(1, 8192, 12 + i, 6, 0.4) for _ in range(9)]
            lines += [prefill(7, 1900, 3, 6, 0.45), decode(13, 4, 0.5), decode(11, 5, 0.5)]
        report = judge(lines)
        assert report.verdict == "long-prompt-blocking"
        assert asked(report) == ("--chunked-prefill-size", "increase")

    @pytest.mark.parametrize("engine", ["setpoint", "sglang"])
    def test_on_a_cpu_of_ours_smaller_chunks_shorten_pauses(self, engine: str) -> None:
        """docs/tuning.md: larger ones compute no faster there, and a decode step follows each."""
        lines: list[Moment] = []
        for _ in range(10):
            for _ in range(9):
                lines += [prefill(1, 512, 0, 6, 0.04), prefill(1, 512, 0, 6, 0.04)]
            lines += [prefill(4, 120, 0, 6, 0.04), decode(6, 0, 0.05)]
        facts: dict[str, Any] = {"engine": engine, "device": "cpu", "chunked_prefill_size": 512}
        report = judge(lines, **facts)
        assert report.verdict == "long-prompt-blocking"
        (found, *_) = report.findings
        if engine == "sglang":  # all chunks of a prompt follow each other
            assert asked(report) == ("--chunked-prefill-size", "increase")
            return
        assert asked(report) == ("--chunked-prefill-size", "decrease")
        assert (found.action.value, found.action.live) == (256, True)
        assert found.effect is not None
        assert found.effect.figure == "longest time between the tokens of a stream"
        small = judge(lines, **{**facts, "chunked_prefill_size": 200})
        assert asked(small)[1] != "decrease", "smaller ones cost more than they gain"

    def test_on_a_cpu_of_ours_no_chunk_helps_prompts_that_wait(self) -> None:
        lines: list[Moment] = []
        for i in range(20):
            lines += [prefill(9, 512, 40 + i, 10, 0.1) for _ in range(3)]
            lines.append(decode(12 + i % 4, 40, 0.1))
        facts: dict[str, Any] = {"device": "cpu", "chunked_prefill_size": 512}
        report = judge(lines, engine="setpoint", **facts)
        assert report.verdict == "prefill-budget"
        assert asked(report) == (None, None)
        assert report.findings[0].effect is None
        assert "more cores" in report.findings[0].action.text

    def test_full_batches_without_a_queue_are_no_limit_unless_they_take_most_of_the_time(
        self,
    ) -> None:
        lines = [decode(42, 0, 0.3) if i % 3 else prefill(2, 8192, 0, 40, 0.3) for i in range(40)]
        assert judge(lines).verdict == "client-bound"
        lines = [prefill(2, 8192, 0, 40, 0.3) if i % 3 else decode(42, 0, 0.3) for i in range(40)]
        assert judge(lines).verdict == "prefill-budget"


class TestQueueTooLong:
    def test_more_than_the_guides_bound(self) -> None:
        report = judge(steady(230, 5200, 0.96))
        assert report.verdict == "queue-too-long"
        assert asked(report) == ("--max-queued-requests", "set")

    def test_the_cap_that_holds_it_up_comes_first(self) -> None:
        lines = [decode(32, 5200 + i, 0.2) for i in range(30)]
        report = judge(lines, max_running_requests=32)
        assert report.verdict == "seq-cap"
        assert "queue-too-long" in [finding.cause for finding in report.findings]


class TestPrefixMiss:
    @staticmethod
    def lines(hits: list[int]) -> list[Moment]:
        lines: list[Moment] = []
        for i in range(40):
            cached = hits[i % len(hits)]
            lines.append(prefill(2, 4000 - cached, 90, 100, 0.93, cached_tokens=cached))
            lines.append(decode(100 + i % 5, 90, 0.93))
        return lines

    def test_some_batches_find_their_prefix_and_most_do_not(self) -> None:
        report = judge(self.lines([3200, 0, 0, 0]), options={"schedule_policy": "fcfs"})
        assert report.verdict == "prefix-miss"
        assert (*asked(report), report.findings[0].action.value) == (
            "--schedule-policy",
            "set",
            "lpm",
        )

    @pytest.mark.parametrize("hits", [[0, 0, 4], [900, 940, 910], [3600, 3500, 3550]])
    def test_no_sharing_or_the_same_share_everywhere_is_not(self, hits: list[int]) -> None:
        assert judge(self.lines(hits)).verdict == "healthy"

    def test_not_if_the_policy_sorts_already(self) -> None:
        report = judge(self.lines([3200, 0, 0, 0]), options={"schedule_policy": "lpm"})
        assert report.verdict == "healthy"


class TestBatchTooLarge:
    @staticmethod
    def lines(itl: float) -> list[Moment]:
        return [
            decode(n, 5, 0.7, gen_throughput=n / (0.02 + 0.0006 * n), quantiles={"itl_p50": itl})
            for n in [200, 220, 240, 260, 280, 300] * 5
        ]

    def test_slow_tokens_of_a_large_batch(self) -> None:
        report = judge(self.lines(0.17))
        assert report.verdict == "batch-too-large"
        assert asked(report) == ("--max-running-requests", "decrease")
        assert report.findings[0].action.value == pytest.approx((0.1 - 0.02) / 0.0006, rel=0.15)
        effect = report.findings[0].effect
        assert effect.low < 0.1 / 0.17 < effect.high < 1

    def test_not_if_a_step_takes_as_long_with_a_small_batch(self) -> None:
        lines = [
            decode(n, 5, 0.7, gen_throughput=n / 0.17, quantiles={"itl_p50": 0.17})
            for n in [20, 40, 80, 160, 200, 240] * 5
        ]
        assert "batch-too-large" not in [found.cause for found in judge(lines).findings]

    def test_never_without_latencies(self) -> None:
        lines = [decode(300, 0, 0.95, gen_throughput=500) for _ in range(30)]
        assert judge(lines).verdict == "healthy"


class TestOthers:
    def test_one_rank_waits_while_another_has_room(self) -> None:
        busy = rank([decode(200 + i % 5, 80, 0.95) for i in range(30)], "DP0")
        idle = rank([decode(20, 0, 0.1) for _ in range(30)], "DP1")
        report = diagnose(seen(busy, idle, **READY))
        assert report.verdict == "rank-imbalance"

    def test_requests_that_wait_for_grammars(self) -> None:
        lines = [decode(8, 0, 0.1, preparing=24) for _ in range(30)]
        assert judge(lines).verdict == "grammar-queue"

    def test_a_loop_that_is_busy_outside_the_model(self) -> None:
        lines = [decode(100 + i % 5, 9, 0.9, busy_s=0.97, model_s=0.3) for i in range(40)]
        for line in lines:
            line.seconds = 1.0
        report = diagnose(seen(rank(lines, gap=1.0), **READY))
        assert report.verdict == "host-bound"

    @pytest.mark.parametrize(
        ("cpu_s", "verdict"),
        [(0.08, "cpu-contended"), (0.0, "cpu-contended"), (0.95, "client-bound")],
    )
    def test_a_cpu_that_others_take(self, cpu_s: float, verdict: str) -> None:
        """Red before: the server waited for requests, and no option could raise its throughput."""
        lines = [decode(4, 0, 0.1, busy_s=1.0, model_s=0.98, cpu_s=cpu_s) for _ in range(40)]
        for line in lines:
            line.seconds = 1.0
        report = diagnose(seen(rank(lines, gap=1.0), **READY))
        assert report.verdict == verdict
        if verdict == "cpu-contended":
            effect = report.findings[0].effect
            assert effect is not None
            assert effect.expected == (12.5 if cpu_s else 100)

    @pytest.mark.parametrize(
        ("cpu_s", "queue", "limit"),
        [
            (0.08, 0, "cpu-contended"),
            (0.08, 9, "cpu-contended"),
            (0.95, 0, "client-bound"),
            (0.95, 9, "prefill-budget"),
            (None, 0, "client-bound"),
        ],
    )
    def test_the_limit_of_a_moment_in_which_others_take_the_cpu(
        self, cpu_s: float | None, queue: int, limit: str
    ) -> None:
        """Red before: the console's band said that the server waited for requests."""
        refusals = {"token_budget": 30} if queue else {}
        moment = decode(4, queue, 0.1, busy_s=1.0, cpu_s=cpu_s, refusals=refusals)
        assert binding_limit(moment, SchedulerLimits(reasons=True)) == limit
        moment.busy_s, moment.cpu_s = 0.01, 0.0
        assert binding_limit(moment, SchedulerLimits(reasons=True)) != "cpu-contended"

    def test_a_limit_of_the_scheduler_stands_although_others_take_the_cpu(self) -> None:
        moment = decode(4, 9, 0.1, busy_s=1.0, cpu_s=0.1, refusals={"no_slot": 30})
        assert binding_limit(moment, SchedulerLimits(reasons=True)) == "seq-cap"

    def test_a_cpu_that_others_took_a_while_ago(self) -> None:
        lines = [decode(4, 0, 0.1, busy_s=1.0, cpu_s=0.1 if i < 9 else 0.99) for i in range(40)]
        assert "cpu-contended" not in causes(judge(lines))

    def test_an_option_that_makes_admission_wait(self) -> None:
        lines = [decode(50, 9, 0.4, refusals={"decode_turn": 30}) for _ in range(30)]
        report = judge(lines, options={"prefill_decode_interval": 16})
        assert asked(report) == ("--prefill-decode-interval", "decrease")

    def test_admission_that_no_option_delays(self) -> None:
        """The advice is never to remove a flag that is not there."""
        lines = [decode(50, 9, 0.4, refusals={"decode_turn": 30}) for _ in range(30)]
        options = {
            "prefill_decode_interval": 0,
            "num_continuous_decode_steps": 1,
            "enable_prefill_delayer": False,
        }
        assert "admission-delayed" not in causes(judge(lines, options=options))

    def test_the_advice_names_the_option_that_is_set(self) -> None:
        for options, asks in (
            ({"prefill_decode_interval": 1}, ("--prefill-decode-interval", "decrease", 0)),
            ({"num_continuous_decode_steps": 3}, ("--num-continuous-decode-steps", "decrease", 1)),
            ({"min_free_slots_delay": 8}, ("--min-free-slots-delay", "decrease", 4)),
            ({"enable_prefill_delayer": True}, ("--enable-prefill-delayer", "set", False)),
        ):
            refusals = {"delayed" if "delay" in next(iter(options)) else "decode_turn": 30}
            lines = [decode(50, 9, 0.4, refusals=refusals) for _ in range(30)]
            action = judge(lines, options=options).findings[0].action
            assert action is not None
            assert (action.flag, action.direction, action.value) == asks
            assert action.live


def test_the_limit_that_binds_most_of_the_time_is_the_verdict() -> None:
    lines = [decode(64, 80, 0.4) for _ in range(15)] + steady(40, 80, 0.5, 60)
    report = judge(lines, max_running_requests=64)
    assert report.verdict == "kv-conservative"
    lines = steady(40, 80, 0.5, 15) + [decode(64, 80, 0.4) for _ in range(60)]
    assert judge(lines, max_running_requests=64).verdict == "seq-cap"


def test_health_checks_are_no_load() -> None:
    lines = [prefill(1, 12, 0, 0, 0.0) if i % 12 else decode(1, 0, 0.0) for i in range(60)]
    assert judge(lines).verdict == "not-enough-evidence"


def test_at_a_full_pool_full_prefill_batches_between_decode_steps_show_memory() -> None:
    lines: list[Moment] = []
    for i in range(20):
        lines += [prefill(1, 8192, 60 + 4 * i, 25, 0.95) for _ in range(3)]
        lines.append(decode(26 + i % 2, 60 + 4 * i, 0.97))
    assert judge(lines).verdict == "kv-full"


def test_prompts_that_are_not_split_fill_a_batch_when_the_next_does_not_fit() -> None:
    lines = [prefill(2, 700 + 40 * (i % 8), 90, 300 + i, 0.5) for i in range(40)]
    report = judge(lines, chunked_prefill_size=-1, max_prefill_tokens=1024)
    assert report.verdict == "prefill-budget"
    assert asked(report) == ("--max-prefill-tokens", "increase")


class TestMomentsOfSeveralBatches:
    """A second of a live server, or a stretch of a long log."""

    @staticmethod
    def judge(**fields: Any) -> Report:
        values = {"running": 30.0, "queue": 0.0, "usage": 0.2, "num_decode": 50, "num_prefill": 2}
        moments = [Moment(at=2.0 * i, seconds=2.0, **{**values, **fields}) for i in range(30)]
        return diagnose(seen(Rank("", moments)))

    def test_a_queue_of_a_few_steps_is_none(self) -> None:
        assert self.judge(queue=0.04, queue_max=1.0).verdict == "client-bound"

    def test_a_cap_that_no_source_names(self) -> None:
        assert self.judge(queue=20.0, running=47.6, running_max=48.0).verdict == "seq-cap"

    def test_a_step_that_refuses_nobody_is_no_limit(self) -> None:
        moments = [decode(30, 2, 0.3, refusals={"no_slot": 1} if not i else {}) for i in range(30)]
        assert judge(moments).verdict == "healthy"


ONE_OF_MANY = re.compile(
    r"(?<![\d.,])1 (?:running )?(?:requests|lines|tokens|moments) |1 running request, which use "
)


@pytest.mark.parametrize("usage", [0.001, 0.3, 0.97])
@pytest.mark.parametrize("queue", [0, 1, 3])
@pytest.mark.parametrize("running", [1, 2])
@pytest.mark.parametrize("slots", [1, 2, 64])
def test_one_request_is_spoken_of_in_the_singular(
    running: int, queue: int, usage: float, slots: int
) -> None:
    """Red before: "only 1 running request, which use 0 %", "8 instead of 1 requests"."""
    moments = [decode(running, queue, usage) for _ in range(20)]
    moments += [prefill(1, 2048, queue, running, usage) for _ in range(20)]
    report = diagnose(
        seen(rank(moments), max_running_requests=slots, chunked_prefill_size=2048, device="cpu")
    )
    text = str(contract(report))
    assert not ONE_OF_MANY.search(text), ONE_OF_MANY.search(text)
    assert "instead of 1 requests" not in text
    assert "request, which uses 0 %" not in text


def test_reports_have_no_marks_of_markdown() -> None:
    """Red before: "although `top` shows", which the terminal and the console print as it is."""
    found = []
    for file in Path(setpoint.doctor.checks.__file__).parent.glob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        docs = {
            id(each.value)
            for each in ast.walk(tree)
            if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)
        }
        found += [
            (file.name, each.value)
            for each in ast.walk(tree)
            if isinstance(each, ast.Constant) and id(each) not in docs and "`" in str(each.value)
        ]
    assert not found


@pytest.mark.parametrize(
    ("kind", "words", "span"),
    [
        ("log", "Read a log of", "7 lines (12 s)"),
        ("server", "Watch the server for at least a minute", "12 s"),
        ("live", "Look again when the server", "12 s"),
        ("recording", "Record at least", "12 s"),
        ("metrics", "Read metrics of", "12 s"),
    ],
)
def test_what_is_missing_is_said_for_the_source_that_was_read(
    kind: SourceKind, words: str, span: str
) -> None:
    """Red before: "Read a log", and "7 lines", of a server that was watched."""
    for count in (1, 7):
        observed = seen(rank([decode(2, 0, 0.1) for _ in range(count)]))
        observed.sources[0].kind = kind
        report = diagnose(observed)
        assert (report.verdict == "not-enough-evidence") == (count == 1)
        assert words in report.missing[0]
        text = str(contract(report))
        assert kind == "log" or not re.search("Read a log|A log of| lines", text)
    assert f"This is judged from {span}, so it is less sure." in report.missing[0]
