"""Causes that look alike in a log, and the figure that tells each from its neighbour."""

from __future__ import annotations

from pathlib import Path

import pytest
from doctor_cases import decode, prefill, rank, retract, seen

from setpoint.core.moments import Moment
from setpoint.doctor.checks.diagnose import diagnose
from setpoint.doctor.load import weigh
from setpoint.doctor.observations import Event, Observations
from setpoint.doctor.readers.kinds import is_saved
from setpoint.doctor.readers.log.reader import read_chunks

READY = {"max_total_num_tokens": 400_000, "context_len": 32_768}


def verdict(observations: Observations) -> str:
    return diagnose(observations).verdict


def test_an_idle_rank_beside_one_with_a_queue_is_no_lack_of_requests() -> None:
    """Seven of eight ranks have nothing to do: for most of the lines the queue is empty."""
    busy = rank([decode(20, 40, 0.75) for _ in range(20)], "DP0")
    idle = [rank([decode(3, 0, 0.1) for _ in range(20)], f"DP{n}") for n in range(1, 8)]
    report = diagnose(seen(busy, *idle, **READY))
    assert report.verdict == "rank-imbalance"
    assert "client-bound" in [other.cause for other in report.findings[0].ruled_out]


def test_a_line_of_each_rank_shows_an_uneven_load() -> None:
    busy = rank([decode(28, 46, 0.79)], "DP0")
    idle = [rank([decode(4, 0, 0.1) for _ in range(2)], f"DP{n}") for n in range(1, 4)]
    assert verdict(seen(busy, *idle)) == "rank-imbalance"


def delayed(**fields: object) -> list[Moment]:
    """Requests end one after the other; not before most have ended are others admitted."""
    falling = [decode(running, 60 - running, 0.04) for running in (24, 18, 13, 9, 6)]
    return [prefill(20, 4000, 34, 4, 0.02), *falling]


def test_admission_that_an_option_holds_back_is_seen_in_a_log() -> None:
    moments = [moment for _ in range(12) for moment in delayed()]
    options = {"prefill_decode_interval": 200, "max_running_requests": 256}
    report = diagnose(seen(rank(moments), options=options, **READY))
    assert report.verdict == "admission-delayed"
    action = report.findings[0].action
    assert (action.flag, action.direction) == ("--prefill-decode-interval", "decrease")
    assert "--schedule-conservativeness" not in [each.action.flag for each in report.findings]


def test_the_time_until_the_line_of_the_next_prefill_belongs_to_the_delay() -> None:
    """Decode lines come every 40 steps; most of a long interval passes after the last of them."""
    moments = []
    for _ in range(12):
        falling = [decode(60 - waiting, waiting, 0.04) for waiting in (2, 12, 24)]
        moments += [prefill(20, 4000, 0, 30, 0.02), *falling]
    rows = rank(moments)
    for index, moment in enumerate(rows.moments):
        moment.at = 22.0 * (index // 4) + (1.0, 2.0, 3.5, 5.0)[index % 4]
    options = {"prefill_decode_interval": 120, "max_running_requests": 256}
    assert verdict(seen(rows, options=options, **READY)) == "admission-delayed"


def test_without_such_an_option_no_option_is_blamed() -> None:
    moments = [moment for _ in range(12) for moment in delayed()]
    report = diagnose(seen(rank(moments), options={"max_running_requests": 256}, **READY))
    assert report.verdict != "admission-delayed"


def test_requests_whose_grammar_is_not_ready_in_time_wait_for_it() -> None:
    lines = ["max_total_num_tokens=400000, max_running_requests=2048, context_len=32768"]
    for second in range(40):
        lines.append(f"Decode batch, #running-req: {1 + second % 2}, #token: 800, token usage: 0.00, cuda graph: True, gen throughput (token/s): 90.00, #queue-req: 0")  # fmt: skip
        if second % 8 == 0:
            lines.append("Grammar preprocessing timed out for req.grammar_key=('json', '{\"a\": \"Retract #retracted_reqs: 1\"}')")  # fmt: skip
    text = "\n".join(f"[2026-05-01 10:00:{n:02} TP0] {line}" for n, line in enumerate(lines))
    (observed,) = read_chunks("server.log", [text.encode()])
    report = diagnose(observed)
    assert report.verdict == "grammar-queue"
    assert report.findings[0].evidence[0].text.count("Grammar preprocessing") == 1


def test_a_reserve_that_is_used_up_at_times_is_not_too_large() -> None:
    """Many requests begin together, grow together and end together."""
    usages = (0.74, 0.76, 0.78, 0.8, 0.82, 0.84, 0.86, 0.92, 0.97)
    wave = [decode(200 + n % 5 * 9, 150, usage) for n, usage in enumerate(usages)]
    wave = [moment for _ in range(8) for moment in wave]
    for index, moment in enumerate(wave):
        wave[index] = decode(moment.running or 0, 150, moment.usage or 0)
    assert verdict(seen(rank(wave), **READY)) == "healthy"


def test_a_small_pool_that_waves_fill_is_too_small() -> None:
    """Eight requests begin together and end together, at 0.94, while 16 wait: a smaller reserve would
    only bring retractions. Red before: kv-conservative, or nothing at all."""
    waves = [decode(8, 16, 0.11 + 0.083 * (n % 11)) for n in range(66)]
    facts = {"max_total_num_tokens": 4000, "max_running_requests": 2000}
    report = diagnose(seen(rank(waves), options={"max_total_tokens": 4000}, **facts))
    assert report.verdict == "kv-full"
    assert report.findings[0].action.flag == "--max-total-tokens"
    assert "when it is fullest, 94 %" in report.summary
    flags = [each.action.flag for each in report.findings]
    assert "--schedule-conservativeness" not in flags


def test_a_pool_with_no_room_for_a_request_is_no_cap() -> None:
    """Nine requests hold 0.89 of it: a tenth would not fit, whatever the limit is."""
    report = diagnose(seen(rank([decode(9, 30, 0.89) for _ in range(8)])))
    assert report.verdict == "kv-full"
    assert not [each for each in report.findings if each.action.flag == "--max-running-requests"]


def test_a_number_that_other_lines_pass_is_no_cap() -> None:
    steady = [decode(147, 178, 0.8) for _ in range(4)]
    more = [prefill(4, 8000, 170 - 4 * n, 149 + 4 * n, 0.85) for n in range(4)]
    flags = [each.action.flag for each in diagnose(seen(rank([*steady, *more]))).findings]
    assert "--max-running-requests" not in flags


@pytest.mark.parametrize(("times", "cause"), [(2, "kv-optimistic"), (1, "healthy")])
def test_two_retractions_among_a_few_lines_are_frequent(times: int, cause: str) -> None:
    lines = rank([decode(280 + n, 250, 0.97) for n in range(7)])
    assert verdict(seen(retract(lines, times))) == cause


def chunks(prompt: int, rows: int, queue: int, running: int, usage: float) -> list[Moment]:
    """Prompts of equal length in chunks of 1,024 tokens; the last batch of each has room."""
    found = []
    for _ in range(rows):
        found += [prefill(1, 1024, queue, running, usage) for _ in range(prompt // 1024)]
        found.append(prefill(1, prompt % 1024, queue, running, usage))
    return found


def test_prompts_of_one_length_block_each_other_alike() -> None:
    moments = [*chunks(3_600, 40, 50, 10, 0.2), decode(10, 50, 0.2)]
    report = seen(rank(moments), chunked_prefill_size=1024, **READY)
    assert verdict(report) == "prefill-budget"


def test_one_long_prompt_among_short_ones_blocks_them() -> None:
    short = [prefill(3, 600, 5, 10, 0.2) for _ in range(6)]
    moments = [each for _ in range(6) for each in (*short, *chunks(20_000, 1, 30, 10, 0.2))]
    report = seen(rank(moments), chunked_prefill_size=1024, **READY)
    assert verdict(report) == "long-prompt-blocking"


def test_long_prompts_at_a_full_pool_wait_for_memory() -> None:
    """Each takes twenty chunks, so that few lines are about decode."""
    moments = [each for _ in range(12) for each in (*chunks(20_000, 1, 27, 20, 0.96), decode(21, 27, 0.97))]  # fmt: skip
    report = seen(rank(moments, gap=1.0), chunked_prefill_size=1024, **READY)
    assert verdict(report) == "kv-full"


def test_pages_in_use_while_nothing_runs_are_lost() -> None:
    moments = []
    for index in range(40):
        moments.append(prefill(1, 900, 0, 0, 0.01 + 0.015 * index, running_max=0.0))
        moments.append(decode(1, 0, 0.02 + 0.015 * index, running_max=1.0))
    assert verdict(seen(rank(moments), **READY)) == "pool-leak"


def test_prefixes_that_a_new_request_finds_are_not_lost() -> None:
    moments = []
    for index in range(40):
        cached = 6_000 * index
        moments.append(prefill(1, 900, 0, 0, cached / 400_000, running_max=0.0, cached_tokens=cached))  # fmt: skip
        moments.append(decode(1, 0, 0.02 + cached / 400_000, running_max=1.0))
    assert verdict(seen(rank(moments), **READY)) == "client-bound"


@pytest.mark.parametrize(
    ("prompt", "tried", "where"), [(120, 400.0, "oom-decode"), (4_000, 3_000.0, "oom-prefill")]
)
def test_an_old_server_wrote_the_line_of_a_failed_prefill(
    prompt: int, tried: float, where: str
) -> None:
    """So a prefill of 120 tokens is not what asked for 400 MiB after it."""
    lines = rank([*(decode(28, 0, 0.1) for _ in range(20)), prefill(1, prompt, 0, 28, 0.1), decode(29, 0, 0.1)])  # fmt: skip
    values: dict[str, float | str] = {"where": "decode", "by": "order", "tried_mib": tried}
    lines.events.append(Event("oom", lines.moments[-1].at, 23, "CUDA out of memory.", values))
    observed = seen(lines)
    observed.sources[0].generation = "SGLang 2025"
    assert verdict(observed) == where


def test_a_container_may_be_called_like_the_metrics(tmp_path: Path) -> None:
    for begin, is_page in (
        ("sglang_server_1  | [2026-05-01 10:00:00] Decode batch, #running-req: 1", False),
        ("sglang:num_running_reqs 3.0\n", True),
        ('sglang_num_running_reqs{model="m"} 3.0\n', True),
        ("# HELP setpoint:x x\n", True),
    ):
        path = tmp_path / "source"
        path.write_text(begin)
        assert is_saved(path) is is_page, begin


def test_a_request_that_decodes_alone_is_no_probe_if_it_is_long() -> None:
    lines = rank([decode(1, 0, 0.01, tokens=1300.0 + 40 * n) for n in range(4)] + [prefill(1, 700, 0, 1, 0.01)])  # fmt: skip
    assert verdict(seen(lines)) == "client-bound"


def test_the_time_before_a_load_is_no_part_of_it() -> None:
    """A first line after a pause stands for the usual time between two lines."""
    lines = rank([prefill(1, 200, 0, 0, 0.0) for _ in range(2)], gap=19.0).moments
    lines += rank([prefill(3, 1000, 40, 40, 0.1) for _ in range(60)], gap=0.2, start=19.2).moments
    assert weigh(lines, limit=20.0)[1] == pytest.approx(0.2)


def test_eight_gigabytes_are_not_too_many_on_a_large_device() -> None:
    lines = rank([decode(110 + n % 3, 84, 0.97) for n in range(60)])
    facts = {"available_gb": 7.2, "total_gb": 44.0, "options": {"mem_fraction_static": 0.83}}
    assert verdict(seen(lines, **facts, **READY)) == "healthy"


def test_a_cache_that_is_switched_off_costs_prefill_time_without_a_queue() -> None:
    each = [prefill(1, 4096, 0, 5, 0.1), prefill(1, 3000, 0, 5, 0.1), decode(5, 0, 0.1)]
    moments = [prefill(m.new_seqs, m.new_tokens, 0, 5, 0.1) if m.num_prefill else decode(5, 0, 0.1) for _ in range(20) for m in each]  # fmt: skip
    report = diagnose(
        seen(
            rank(moments), chunked_prefill_size=4096, options={"disable_radix_cache": True}, **READY
        )
    )
    assert report.verdict == "prefix-miss"
    assert report.findings[0].action.flag == "--disable-radix-cache"


def verdict_on(lines: list[str]) -> str:
    (observed,) = read_chunks("server.log", ["\n".join(lines).encode()])
    return diagnose(observed).verdict


def requests_and_tokens(pairs: list[tuple[int, int]], ready: str = "") -> list[str]:
    lines = [
        f"[2026-05-01 10:00:{3 * n:02} TP0] Decode batch, #running-req: {running}, "
        f"#token: {tokens}, token usage: {tokens / 400_000:.2f}, cuda graph: True, "
        f"gen throughput (token/s): 900.00, #queue-req: {400 - running}"
        for n, (running, tokens) in enumerate(pairs, 1)
    ]
    return [f"[2026-05-01 10:00:00 TP0] {ready}", *lines] if ready else lines


def test_the_more_requests_run_the_fewer_tokens_are_in_use_where_the_reserve_decides() -> None:
    traded = [(197, 246_500), (199, 243_600), (203, 240_700), (198, 244_900), (196, 247_200)]
    assert verdict_on(requests_and_tokens(traded)) == "kv-conservative"


def test_a_few_lines_in_which_tokens_follow_the_requests_do_not_show_a_reserve() -> None:
    followed = [(197, 240_500), (199, 243_600), (203, 247_700), (198, 241_900), (196, 239_200)]
    assert verdict_on(requests_and_tokens(followed)) != "kv-conservative"


def test_a_cap_that_is_named_and_far_away_is_not_what_keeps_requests_waiting() -> None:
    pairs = [(37, 113_000), (38, 116_000), (39, 112_000), (38, 114_500)]
    ready = "max_total_num_tokens=400000, max_running_requests=2048, context_len=32768"
    assert verdict_on(requests_and_tokens(pairs, ready)) == "kv-conservative"
    assert verdict_on(requests_and_tokens(pairs)) != "kv-conservative"


def two_excerpts(early: list[tuple[int, int]], late: list[tuple[int, int]]) -> list[str]:
    """Prefill lines, each with (new, cached) tokens of one prompt, with minutes between the two."""
    return [
        f"[2026-05-01 10:{minute:02}:{second:02} TP0] Prefill batch, #new-seq: 1, "
        f"#new-token: {new}, #cached-token: {cached}, token usage: 0.{minute + 1}0, "
        f"#running-req: {5 * minute + second}, #queue-req: 0"
        for minute, part in ((0, early), (4, late))
        for second, (new, cached) in enumerate(part)
    ]


FOUND = [(150, 2786), (122, 2747), (80, 2658)]
LOST = [(3027, 0), (2750, 0), (3171, 0)]


def test_two_excerpts_before_and_after_show_that_prefixes_are_lost() -> None:
    assert verdict_on(two_excerpts(FOUND, LOST)) == "prefix-miss"


@pytest.mark.parametrize(
    ("early", "late"),
    [
        (FOUND, FOUND),
        (LOST, FOUND),
        (LOST, LOST),
        (FOUND, [*LOST[:2], (80, 2658)]),
        (FOUND, [(4 * new, 0) for new, _ in LOST]),
    ],
    ids=["found", "warmed up", "nothing shared", "one is found", "longer prompts"],
)
def test_other_excerpts_do_not(early: list[tuple[int, int]], late: list[tuple[int, int]]) -> None:
    assert verdict_on(two_excerpts(early, late)) != "prefix-miss"


@pytest.mark.parametrize("separator", [":", "-"])
def test_line_numbers_of_grep_may_get_longer(separator: str) -> None:
    """The lines after number 999 are batches, too: the server does not hang at that place."""
    lines = [
        f"{900 + 3 * n}{separator}[2026-05-01 10:{n // 60:02}:{n % 60:02} TP0] Decode batch, "
        "#running-req: 8, #token: 4000, token usage: 0.01, cuda graph: True, "
        "gen throughput (token/s): 180.00, #queue-req: 0"
        for n in range(240)
    ]
    (observed,) = read_chunks("server.log", ["\n".join(lines).encode()])
    assert sum(len(each.moments) for each in observed.ranks) == len(lines)
    assert diagnose(observed).verdict == "client-bound"


def bursts(*places: int) -> list[Moment]:
    """Decode lines of five minutes; at each of these places, four requests are retracted."""
    return [decode(120 + n % 7, 300, 0.97, retractions=4 * (n in places)) for n in range(150)]


def test_retractions_that_come_back_show_that_the_reserve_was_set_too_low() -> None:
    options = {"schedule_conservativeness": 0.2}
    again = seen(rank(bursts(3, 5, 120)), options=options, **READY)
    assert verdict(again) == "kv-optimistic"
    once = seen(rank(bursts(3, 5)), options=options, **READY)
    assert verdict(once) != "kv-optimistic"
    by_default = seen(rank(bursts(3, 5, 120)), **READY)
    assert verdict(by_default) != "kv-optimistic"


def test_batches_of_one_size_for_any_number_of_prompts_have_that_budget() -> None:
    moments = [prefill(1 + n % 3, 128, 9, 20 + n, 0.01) for n in range(11)]
    assert verdict(seen(rank(moments))) == "prefill-budget"
    single = [prefill(1, 128, 9, 20 + n, 0.01) for n in range(11)]
    assert verdict(seen(rank(single))) != "prefill-budget"


def test_a_larger_budget_does_not_help_prompts_that_the_full_pool_keeps_out() -> None:
    """Six documents fill the pool, and the chunks of the next ones take all of the time."""
    chunk = {"new_tokens": 8192, "queue": 20, "running": 6, "usage": 0.93}
    moments = [prefill(1, **chunk) for _ in range(60)]
    report = diagnose(seen(rank(moments), chunked_prefill_size=8192, **READY))
    assert report.verdict == "kv-full"


def test_a_nearly_full_pool_that_stops_admission_below_a_number_is_no_cap() -> None:
    """The number of running requests stood still for three lines, but with 203 or 204 of them the
    next one of 2,990 is not admitted either."""
    moments = [
        decode(205, 2994, 0.84),
        decode(205, 2994, 0.87),
        decode(205, 2994, 0.89),
        prefill(1, 1673, 2993, 203, 0.90),
        prefill(1, 1296, 2992, 203, 0.90),
        decode(205, 2992, 0.89),
        prefill(1, 912, 2990, 202, 0.92),
    ]
    report = diagnose(seen(rank(moments)))
    assert report.verdict in ("kv-full", "queue-too-long", "healthy")
    assert not [each for each in report.findings if each.action.flag == "--max-running-requests"]


def full_prefills(available_gb: float, total_gb: float) -> Observations:
    """Every prefill batch is full, and requests wait for room in the next."""
    moments = [prefill(4, 8192, 60 - 2 * n, 50 + 3 * n, 0.2 + 0.01 * n) for n in range(20)]
    return seen(
        rank(moments),
        available_gb=available_gb,
        total_gb=total_gb,
        chunked_prefill_size=8192,
        options={"mem_fraction_static": 0.98},
        **READY,
    )


@pytest.mark.parametrize(("available_gb", "total_gb"), [(0.81, 141.0), (0.81, 24.0), (2.9, 80.0)])
def test_no_larger_chunk_is_advised_where_no_memory_is_free(
    available_gb: float, total_gb: float
) -> None:
    report = diagnose(full_prefills(available_gb, total_gb))
    raised = [each for each in report.findings if each.action.direction == "increase"]
    assert not raised
    assert report.findings[0].action.flag == "--mem-fraction-static"
    if total_gb > 100:
        assert report.verdict == "mem-headroom-low"
        assert "prefill-budget" in [other.cause for other in report.findings[0].ruled_out]


def test_with_free_memory_the_chunk_may_grow() -> None:
    report = diagnose(full_prefills(20.0, 80.0))
    assert report.verdict == "prefill-budget"
    action = report.findings[0].action
    assert (action.flag, action.direction) == ("--chunked-prefill-size", "increase")
