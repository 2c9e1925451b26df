"""The limits of a pool: what a settled configuration and the tokens that fit allow."""

from __future__ import annotations

import pytest

from setpoint.config.decisions import Decision
from setpoint.config.hardware import Hardware
from setpoint.config.options import OPTION_FIELDS, Options
from setpoint.config.pool import PoolConfig, resolve_pool
from setpoint.config.resolve import resolve
from setpoint.config.resolved import ResolvedConfig
from setpoint.core.errors import OutOfMemoryError
from setpoint.planning.memory import GIB
from setpoint_testing.specs import tiny_spec

CPU = Hardware(device="cpu", num_cores=2, available_bytes=20 * GIB)


def decide(options: Options | None = None) -> ResolvedConfig:
    return resolve(options or Options(), CPU, tiny_spec(context_len=8192))


def reason(pool: PoolConfig, field: str) -> Decision:
    (decision,) = (decision for decision in pool.decisions if decision.field == field)
    return decision


@pytest.mark.parametrize(
    ("asked", "slots", "settled"),
    [
        (None, 64, None),
        (0, 64, None),
        (1, 64, None),
        (3, 64, 3),
        (9, 64, 4),
        (9, 13, 3),
        (2, 7, None),
    ],
)
def test_min_free_slots_delay_is_clipped_by_the_slots(
    asked: int | None, slots: int, settled: int | None
) -> None:
    pool = resolve_pool(
        decide(Options.of(min_free_slots_delay=asked, max_running_requests=slots)), 10**5
    )
    assert pool.min_free_slots == settled
    changed = [decision for decision in pool.decisions if decision.field == "min_free_slots_delay"]
    assert [decision.warn for decision in changed] == (
        [asked > 1] if asked is not None and asked != settled else []
    )


def test_limits_of_a_large_pool() -> None:
    pool = resolve_pool(decide(), 186_413)
    assert (pool.max_running_requests, pool.max_req_len, pool.max_req_input_len) == (
        4096,
        8191,
        8186,
    )
    assert not any(decision.warn for decision in pool.decisions)


def test_limits_of_a_small_pool_are_said() -> None:
    pool = resolve_pool(
        decide(Options.of(max_running_requests=64)), 100, limited_by="--max-total-tokens 100"
    )
    assert (pool.max_running_requests, pool.max_req_len, pool.max_req_input_len) == (50, 99, 94)
    assert reason(pool, "max_running_requests").warn
    assert "64 was asked for" in reason(pool, "max_running_requests").why
    assert reason(pool, "max_req_len").warn
    assert "--max-total-tokens 100" in reason(pool, "max_total_num_tokens").why


def test_a_wish_for_tokens_that_do_not_fit_is_said() -> None:
    config = decide(Options.of(max_total_tokens=1000, page_size=16))
    assert not reason(resolve_pool(config, 992), "max_total_num_tokens").warn
    short = reason(resolve_pool(config, 976, limited_by="memory"), "max_total_num_tokens")
    assert short.warn
    assert "--max-total-tokens 1000 does not fit" in short.why


@pytest.mark.parametrize(("asked", "running"), [(None, 8), (1, 1), (8, 8), (9, 8)])
def test_a_request_needs_two_tokens(asked: int | None, running: int) -> None:
    assert (
        resolve_pool(decide(Options.of(max_running_requests=asked)), 16).max_running_requests
        == running
    )


def test_a_pool_that_holds_no_request_is_refused() -> None:
    assert resolve_pool(decide(), 8).max_req_input_len == 2  # a prompt must be shorter
    with pytest.raises(
        OutOfMemoryError, match="a KV pool of 7 tokens is too small for any request"
    ):
        resolve_pool(decide(), 7)


def test_shortest_context_holds_a_request() -> None:
    (shortest,) = (field.about.low for field in OPTION_FIELDS if field.name == "context_length")
    assert (
        resolve_pool(decide(Options.of(context_length=int(shortest or 0))), 10**6).max_req_input_len
        >= 2
    )
