"""``/fault_tolerance``: an operator sees each engine, and pauses it, takes it out of service or has it
started again, while streams run."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from setpoint_testing.server_process import (
    PATIENCE_S,
    ServerProcess,
    engines_of,
    running_server,
    stop_next_engine,
    wait_until,
)

NUM_STREAMS = 12
LEFT = "It is not started again: --max-engine-restarts is 1 an hour."
SAMPLING = {"max_new_tokens": 400, "ignore_eos": True, "temperature": 1}


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running_server(
        tmp_path_factory.mktemp("server"),
        *("--model-path", str(tiny_model), "--dtype", "float32", "--num-threads", "1"),
        *("--dp-size", "2", "--max-engine-restarts", "1"),
    ) as server:
        yield server


def status(server: ServerProcess) -> Any:
    answer = httpx.get(f"{server.url}/fault_tolerance/status", timeout=PATIENCE_S)
    assert answer.status_code == 200
    return answer.json()


def statuses(server: ServerProcess) -> list[str]:
    return [each["status"] for each in status(server)["engines"]]


def send(server: ServerProcess, instruction: str, **params: Any) -> httpx.Response:
    return httpx.post(
        f"{server.url}/fault_tolerance/apply",
        json={"instruction": instruction, "params": params},
        timeout=PATIENCE_S,
    )


def apply(server: ServerProcess, instruction: str, **params: Any) -> str:
    answer = send(server, instruction, **params)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["request_id"])


def all_healthy(server: ServerProcess) -> None:
    """Both engines serve, with all restarts."""
    apply(server, "retry")
    wait_until(lambda: statuses(server) == ["healthy"] * 2, timeout_s=2 * PATIENCE_S)
    assert status(server)["restarts_left"] == 1


def answer(server: ServerProcess, number: int) -> str:
    body = {"text": f"prompt {number}", "sampling_params": {**SAMPLING, "sampling_seed": number}}
    return str(server.generate(**body)["text"])


def answers(server: ServerProcess, disturb: Any = lambda: None) -> list[str]:
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        asked = [pool.submit(answer, server, number) for number in range(NUM_STREAMS)]
        disturb()
        return [each.result(PATIENCE_S) for each in asked]


def kill(server: ServerProcess, rank: int) -> None:
    """Kill the engine of a rank, and wait until the server knows."""
    pid = status(server)["engines"][rank]["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: statuses(server)[rank] != "healthy")


def both_compute(server: ServerProcess) -> bool:
    return all(each["num_requests"] for each in status(server)["engines"])


def test_the_status_of_engines_that_serve(server: ServerProcess) -> None:
    all_healthy(server)
    found = status(server)
    assert (found["schema_version"], found["total_engines"]) == (1, 2)
    assert found["max_engine_restarts"] == 1
    assert [each["id"] for each in found["engines"]] == [0, 1]
    pids = {each.pid for each in engines_of(server.process.pid)}
    assert {each["pid"] for each in found["engines"]} == pids
    assert all(each["state"] == "ready" and each["paused"] is None for each in found["engines"])
    assert httpx.get(f"{server.url}/v1/fault_tolerance/status", timeout=PATIENCE_S).json() == found


@pytest.mark.full
def test_a_paused_rank_keeps_its_requests_and_gets_no_others(server: ServerProcess) -> None:
    all_healthy(server)
    undisturbed = answers(server)

    def disturb() -> None:
        wait_until(lambda: both_compute(server))
        name = apply(server, "pause", dp_ranks=[1])
        found = status(server)
        assert statuses(server) == ["healthy", "paused"]
        assert [each["last_ft_request_id"] == name for each in found["engines"]] == [False, True]
        wait_until(lambda: not status(server)["engines"][0]["num_requests"])
        kept = status(server)["engines"][1]["num_requests"]
        assert kept
        for number in range(3):  # they are answered, although a rank is paused
            assert answer(server, number) == undisturbed[number]
        assert status(server)["engines"][1]["num_requests"] == kept
        apply(server, "retry", dp_ranks=[1])

    assert answers(server, disturb) == undisturbed


@pytest.mark.full
def test_a_pause_of_all_ranks_loses_nothing(server: ServerProcess) -> None:
    all_healthy(server)
    undisturbed = answers(server)

    def disturb() -> None:
        wait_until(lambda: both_compute(server))
        apply(server, "pause")
        assert statuses(server) == ["paused"] * 2
        with ThreadPoolExecutor(1) as pool:
            later = pool.submit(answer, server, 0)
            wait_until(
                lambda: (
                    sum(each["num_requests"] for each in status(server)["engines"])
                    > NUM_STREAMS / 2
                )
            )
            assert not later.done()
            apply(server, "retry")
            assert later.result(PATIENCE_S) == undisturbed[0]

    assert answers(server, disturb) == undisturbed


def test_new_weights_leave_a_paused_rank_paused(server: ServerProcess, tiny_model: Path) -> None:
    all_healthy(server)
    apply(server, "pause", dp_ranks=[1])
    changed = httpx.post(
        f"{server.url}/update_weights_from_disk",
        json={"model_path": str(tiny_model), "abort_all_requests": True},
        timeout=PATIENCE_S,
    )
    assert changed.json()["success"], changed.text
    assert statuses(server) == ["healthy", "paused"]
    httpx.post(f"{server.url}/continue_generation", json={}, timeout=PATIENCE_S)
    assert statuses(server) == ["healthy"] * 2


def test_a_paused_rank_cannot_take_over_the_requests_of_the_last_one(server: ServerProcess) -> None:
    all_healthy(server)
    apply(server, "pause", dp_ranks=[1])
    refused = send(server, "scale_down", removed_dp_ranks=[0])
    assert refused.status_code == 400
    assert "The engines that would be left are paused" in refused.text
    assert statuses(server) == ["healthy", "paused"]
    apply(server, "retry")


@pytest.mark.full
def test_a_rank_is_taken_out_of_service_under_streams_and_comes_back(
    server: ServerProcess,
) -> None:
    all_healthy(server)
    undisturbed = answers(server)
    ended = psutil.Process(status(server)["engines"][1]["pid"])

    def disturb() -> None:
        wait_until(lambda: both_compute(server))
        apply(server, "scale_down", removed_dp_ranks=[1])
        rank = status(server)["engines"][1]
        assert (rank["status"], rank["num_requests"]) == ("dead", 0)
        assert rank["last_death"] == "The engine was taken out of service (scale_down)."
        assert "ft_error" not in rank

    assert answers(server, disturb) == undisturbed
    wait_until(lambda: not ended.is_running() or ended.status() == psutil.STATUS_ZOMBIE)
    assert " died: " not in server.errors
    assert httpx.get(f"{server.url}/ready", timeout=PATIENCE_S).status_code == 200
    assert answers(server) == undisturbed
    refused = send(server, "scale_down", removed_dp_ranks=[0])
    assert refused.status_code == 400
    assert "No engine that takes requests would be left" in refused.text
    apply(server, "scale_down", removed_dp_ranks=[1])  # once more changes nothing

    def back() -> None:
        wait_until(lambda: status(server)["engines"][0]["num_requests"])
        apply(server, "retry", dp_ranks=[1])
        wait_until(lambda: statuses(server) == ["healthy"] * 2, timeout_s=2 * PATIENCE_S)

    assert answers(server, back) == undisturbed
    assert status(server)["restarts_left"] == 1
    assert status(server)["engines"][1]["num_restarts"] > 0


@pytest.mark.full
def test_a_rank_may_come_back_while_it_is_still_ending(server: ServerProcess) -> None:
    """It costs none of the restarts, and the status keeps why the engine before it ended."""
    all_healthy(server)
    before = status(server)["engines"][1]["num_restarts"]
    apply(server, "scale_down", removed_dp_ranks=[1])
    apply(server, "retry", dp_ranks=[1])
    wait_until(lambda: statuses(server) == ["healthy"] * 2, timeout_s=2 * PATIENCE_S)
    now = status(server)
    assert now["restarts_left"] == 1
    assert now["engines"][1]["num_restarts"] == before + 1
    assert now["engines"][1]["last_death"] == "The engine was taken out of service (scale_down)."
    assert "Engine 1 is started again, because an operator asked for it." in server.errors


@pytest.mark.full
def test_a_rank_that_loads_is_taken_out_at_once(server: ServerProcess) -> None:
    all_healthy(server)
    before = {each.pid for each in engines_of(server.process.pid)}
    os.kill(status(server)["engines"][1]["pid"], signal.SIGKILL)
    loading = stop_next_engine(server.process.pid, before)
    apply(server, "scale_down", removed_dp_ranks=[1])
    wait_until(lambda: loading not in {each.pid for each in engines_of(server.process.pid)})
    assert statuses(server) == ["healthy", "dead"]


@pytest.mark.full
def test_a_rank_that_was_given_up_is_tried_again(server: ServerProcess) -> None:
    all_healthy(server)
    kill(server, 1)
    wait_until(lambda: status(server)["restarts_left"] == 0)
    wait_until(lambda: statuses(server) == ["healthy"] * 2, timeout_s=2 * PATIENCE_S)
    kill(server, 1)
    wait_until(lambda: statuses(server) == ["healthy", "dead"])
    assert LEFT in status(server)["engines"][1]["last_death"]
    before = {each.pid for each in engines_of(server.process.pid)}
    apply(server, "retry", dp_ranks=[1])
    late = stop_next_engine(server.process.pid, before)
    apply(server, "pause", dp_ranks=[1])
    assert statuses(server) == ["healthy", "unhealthy"]
    os.kill(late, signal.SIGKILL)  # a restart follows, and the pause holds for that engine, too
    wait_until(lambda: statuses(server) == ["healthy", "paused"], timeout_s=2 * PATIENCE_S)
    apply(server, "retry", dp_ranks=[1])
    assert statuses(server) == ["healthy"] * 2
    for _ in range(2):
        wait_until(lambda: statuses(server)[1] == "healthy", timeout_s=2 * PATIENCE_S)
        kill(server, 1)
    wait_until(lambda: statuses(server) == ["healthy", "dead"])
    assert LEFT in status(server)["engines"][1]["ft_error"]  # the retry has not helped


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "instruction"),
        ({"instruction": "explode"}, "instruction must be 'pause', 'retry' or 'scale_down', not"),
        (
            {"instruction": "pause", "params": {"ranks": [1]}},
            "params.ranks is not known. Known here: dp_ranks,",
        ),
        ({"instruction": "scale_down"}, "params.removed_dp_ranks must name at least one rank"),
        ({"instruction": "scale_down", "params": {"removed_dp_ranks": []}}, "at least one rank"),
        ({"instruction": "scale_down", "params": {"dp_ranks": [1]}}, "use params.removed_dp_ranks"),
        ({"instruction": "scale_down", "params": {"removed_dp_ranks": [0, 1]}}, "would be left"),
        ({"instruction": "pause", "params": {"dp_ranks": [2]}}, "has the ranks 0 to 1"),
        ({"instruction": "pause", "params": {"dp_ranks": [-1]}}, "has the ranks 0 to 1"),
        ({"instruction": "pause", "params": {"dp_ranks": ["0"]}}, "dp_ranks"),
        ({"instruction": "pause", "params": {"dp_ranks": []}}, "at least one rank"),
        ({"instruction": "retry", "params": {"removed_dp_ranks": [0]}}, "use params.dp_ranks"),
        ({"instruction": "retry", "params": None}, "params"),
        ({"instruction": "retry", "request_id": "a\nb"}, "request_id"),
        ({"instruction": "retry", "request_id": 7}, "request_id"),
    ],
)
def test_a_wrong_instruction_changes_nothing(
    server: ServerProcess, body: dict[str, Any], words: str
) -> None:
    all_healthy(server)
    before = status(server)
    answer = httpx.post(f"{server.url}/fault_tolerance/apply", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["message"]
    assert status(server) == before


def test_a_param_without_effect_is_told(server: ServerProcess) -> None:
    body = {"instruction": "retry", "request_id": "mine", "params": {"timeout": 30}}
    answer = httpx.post(f"{server.url}/v1/fault_tolerance/apply", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 202
    assert answer.json()["request_id"] == "mine"
    assert "params.timeout" in answer.json()["warnings"][0]


def test_the_only_engine_cannot_be_taken_out(tiny: ServerProcess) -> None:
    refused = send(tiny, "scale_down", removed_dp_ranks=[0])
    assert refused.status_code == 400
    assert statuses(tiny) == ["healthy"]
    tiny.generate(text="a", sampling_params={"max_new_tokens": 2})
