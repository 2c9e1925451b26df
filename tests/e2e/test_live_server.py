"""Live options on a real server under load: each is changed while requests run, answers stay the
same, and what the log and ``/server_info`` show follows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from setpoint.cli import main
from setpoint.config.live_changes import LIVE
from setpoint_testing.server_process import PATIENCE_S, ServerProcess, running_server, wait_until

VALUES: dict[str, Any] = {
    "schedule_policy": "lof",
    "enable_priority_scheduling": True,
    "schedule_low_priority_values_first": True,
    "default_priority_value": 3,
    "priority_scheduling_preemption_threshold": 1,
    "disable_priority_preemption": True,
    "abort_on_priority_when_disabled": True,
    "retraction_policy": "priority",
    "prefill_decode_interval": 2,
    "prefill_decode_interval_min_bs": 2,
    "num_continuous_decode_steps": 3,
    "enable_prefill_delayer": True,
    "prefill_delayer_max_delay_passes": 5,
    "prefill_delayer_max_delay_ms": 20.0,
    "prefill_delayer_token_usage_low_watermark": 0.001,
    "prefill_delayer_queue_min_ratio": 0.1,
    "min_free_slots_delay": 2,
    "schedule_conservativeness": 0.3,
    "max_running_requests": 3,
    "max_queued_requests": 500,
    "chunked_prefill_size": 64,
    "max_prefill_tokens": 500,
    "prefill_max_requests": 2,
    "enable_mixed_chunk": True,
    "stream_interval": 4,
    "drain_timeout": 20.0,
    "log_level": "debug",
    "log_level_http": "info",
    "log_requests": True,
    "log_requests_level": 0,
    "log_requests_format": "json",
    "enable_request_time_stats_logging": True,
    "decode_log_interval": 3,
}
"""Option -> a value that is not the start's; set one after the other, and all kept."""

PROMPTS = [f"Request {number}: " + "words and " * (20 * number % 90) for number in range(6)]


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    arguments = ("--model-path", str(tiny_model), "--dtype", "float64", "--num-threads", "1")
    with running_server(
        tmp_path_factory.mktemp("live"),
        *arguments,
        "--strict-accounting",
        "--disable-radix-cache",
        "--max-total-tokens",
        "6000",
        "--max-running-requests",
        "8",
    ) as server:
        yield server


def answer(server: ServerProcess, prompt: str) -> Any:
    body = {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    return server.generate(text=prompt, sampling_params=body)["output_ids"]


def log_after(server: ServerProcess, do: Callable[[], Any]) -> list[str]:
    """The lines that the server logs while something is done."""
    before = len(server.messages)
    do()
    return server.messages[before:]


def one_set(server: ServerProcess, **values: Any) -> dict[str, tuple[Any, Any]]:
    response = httpx.post(
        f"{server.url}/set_internal_state", json={"server_args": values}, timeout=PATIENCE_S
    )
    assert response.status_code == 200, response.text
    return {each["option"]: (each["old"], each["new"]) for each in response.json()[0]["changes"]}


class Clients:
    """Three, who ask for the same answers again and again until the block ends."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._expected = {prompt: answer(server, prompt) for prompt in PROMPTS}
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(each,)) for each in range(3)]
        self.wrong: list[str] = []
        self.rounds = [0] * len(self._threads)

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        while not self._over.is_set():
            for prompt in PROMPTS[number:] + PROMPTS[:number]:
                self.check(prompt)
            self.rounds[number] += 1

    def check(self, prompt: str) -> None:
        if answer(self._server, prompt) != self._expected[prompt]:
            self.wrong.append(prompt)


def test_every_live_option_changes_under_load(
    server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    assert VALUES.keys() == {each.name for each in LIVE}
    start = httpx.get(f"{server.url}/server_info", timeout=PATIENCE_S).json()
    with Clients(server) as clients:
        for name, value in VALUES.items():
            assert one_set(server, **{name: value})[name][1] == value
            assert (
                httpx.get(f"{server.url}/get_server_info", timeout=PATIENCE_S).json()[name] == value
            )
        wait_until(lambda: min(clients.rounds) >= 1, timeout_s=4 * PATIENCE_S)
    lines = [line for line in server.messages if line.startswith("Settings changed by 127.0.0.1: ")]
    assert len(lines) == len(VALUES)
    settings = server.state()["settings"]
    assert (settings["chunked_prefill_size"], settings["mixed_chunk"]) == (64, True)
    assert settings["priority"]["threshold"] == 1
    steps = [line for line in server.messages if line.startswith("Prefill batch")]
    assert "#new-token: 64," in " ".join(steps), "a chunk of the new size"
    # back, all at once
    back = {name: start[name] for name in VALUES}
    assert main(["set", server.url, "--why", "it is over", *_words(back)]) == 0
    out = capsys.readouterr().out
    assert "max_running_requests: 3 -> 8\n" in out
    assert "chunked_prefill_size: 64 -> 512\n" in out
    assert any(line.endswith(" (it is over)") for line in server.messages)
    info = httpx.get(f"{server.url}/server_info", timeout=PATIENCE_S).json()
    assert {name: info[name] for name in VALUES} == back
    clients.check(PROMPTS[3])
    assert not clients.wrong


def _words(values: dict[str, Any]) -> list[str]:
    return [f"{name}={'none' if value is None else value}" for name, value in values.items()]


def test_the_logs_options_take_effect(server: ServerProcess) -> None:
    def ask() -> None:
        answer(server, "one more")

    def has(lines: list[str], beginning: str) -> bool:
        return any(line.startswith(beginning) for line in lines)

    assert has(log_after(server, ask), "Prefill batch")
    one_set(server, log_level="warning", log_level_http="info")
    before = len(server.messages)
    ask()
    wait_until(lambda: any("POST /generate" in line for line in server.messages[before:]))
    assert not has(server.messages[before:], "Prefill batch")
    one_set(
        server,
        log_level="info",
        log_level_http="warning",
        log_requests=True,
        log_requests_format="text",
    )
    loud = log_after(server, ask)
    assert has(loud, "Prefill batch")
    assert has(loud, "Finish: obj=")
    assert "one more" in " ".join(loud)
    assert not any("POST /generate" in line for line in loud)
    one_set(server, log_requests_level=0)
    less = log_after(server, ask)
    assert has(less, "Receive: obj=")
    assert "one more" not in " ".join(less)
    one_set(server, log_requests_format="json")
    assert has(log_after(server, ask), '{"timestamp": ')
    one_set(server, log_requests=False)
    assert not has(log_after(server, ask), "Receive")


def test_what_is_refused_harms_nobody(
    server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    before = httpx.get(f"{server.url}/server_info", timeout=PATIENCE_S).json()
    for word, message in (
        ("chunked_prefil_size=64", "Did you mean chunked_prefill_size?"),
        (
            "page_size=16",
            "page_size cannot change while the server runs; restart the server with the new value.",
        ),
        ("max_running_requests=9", "more than the 8 requests for which this engine has room"),
        ("chunked_prefill_size=1024", "memory was planned for 512"),
        ("schedule_policy=best", "schedule_policy must be one of"),
        ("stream_interval=0", "stream_interval must be at least 1"),
    ):
        assert main(["set", server.url, "decode_log_interval=7", word]) == 1
        assert message in capsys.readouterr().err
    after = httpx.get(f"{server.url}/server_info", timeout=PATIENCE_S).json()
    assert after["decode_log_interval"] == before["decode_log_interval"]
    assert server.is_idle()
