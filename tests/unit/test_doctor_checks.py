"""Each cause of the doctor: when it is found, and what looks like it."""

from __future__ import annotations

from doctor_cases import decode, prefill, rank, seen

from setpoint.advisor.doctor.diagnose import diagnose


def test_nothing_at_all_is_not_enough_evidence() -> None:
    report = diagnose(seen())
    assert (report.verdict, report.findings) == ("not-enough-evidence", [])
    assert report.missing


def test_an_empty_queue_with_room_is_the_clients_doing() -> None:
    report = diagnose(seen(rank([decode(12, 0, 0.08) for _ in range(30)])))
    assert report.verdict == "client-bound"
    assert report.findings[0].action.flag is None


def test_requests_that_stand_at_the_cap_with_room_in_the_pool() -> None:
    lines = [decode(64, 300 + i % 7, 0.41) for i in range(30)]
    report = diagnose(seen(rank(lines), max_running_requests=64, max_total_num_tokens=100_000))
    assert report.verdict == "seq-cap"
    action = report.findings[0].action
    assert (action.flag, action.direction) == ("--max-running-requests", "increase")
    assert 64 < action.value <= 64 * 0.9 / 0.41


def test_a_queue_with_room_and_nothing_else_is_the_reserve() -> None:
    lines = [decode(100 + i % 9, 200 + i % 5, 0.6 + 0.01 * (i % 4)) for i in range(40)]
    lines += [prefill(1, 300, 200, 100, 0.6) for _ in range(5)]
    report = diagnose(seen(rank(lines), max_running_requests=2048, chunked_prefill_size=8192))
    assert report.verdict == "kv-conservative"
    action = report.findings[0].action
    assert (action.flag, action.direction) == ("--schedule-conservativeness", "decrease")
    assert 0.1 <= action.value < 0.4


def test_the_end_of_a_benchmark_is_not_the_clients_doing() -> None:
    full = [decode(200 + i % 3, 300 - 10 * i, 0.95) for i in range(30)]
    drain = [decode(200 - 5 * i, 0, 0.9 - 0.02 * i) for i in range(40)]
    assert diagnose(seen(rank(full + drain))).verdict != "client-bound"
