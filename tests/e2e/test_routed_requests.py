"""One of two engines gets a request: the one that its room names, or the one that holds its
prefix."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from setpoint_testing.server_process import (
    PATIENCE_S,
    ServerProcess,
    running_server,
    wait_until,
)

SAMPLING = {"max_new_tokens": 40, "ignore_eos": True, "temperature": 0}
TURNS = [f"{number} of the turns of a session. " * 5 for number in range(4)]
BLOCK = 64
"""The engines tell their prefixes in steps of so many tokens, which are bytes here."""


def post(server: ServerProcess, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=PATIENCE_S)


def ranks(server: ServerProcess) -> list[dict[str, Any]]:
    return list(httpx.get(f"{server.url}/server_info", timeout=PATIENCE_S).json()["ranks"])


def held(server: ServerProcess) -> list[bool]:
    """Whether the cache of each rank holds anything."""
    info = httpx.get(f"{server.url}/server_info", timeout=PATIENCE_S).json()
    return [each["pool"]["evictable"] > 0 for each in info["internal_states"]]


def flush(server: ServerProcess) -> None:
    answer = httpx.post(f"{server.url}/flush_cache?timeout=30", timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text


def serve(tiny_model: Path, folder: Path, *options: str) -> Any:
    return running_server(
        folder,
        *("--model-path", str(tiny_model), "--dtype", "float32", "--num-threads", "1"),
        *("--dp-size", "2", "--enable-cache-report", *options),
    )


@pytest.mark.full
def test_a_room_chooses_the_engine(tiny_model: Path, tmp_path: Path) -> None:
    message = {"role": "user", "content": "abcdefgh"}
    bodies: dict[str, dict[str, Any]] = {
        "/generate": {"text": "abcdefgh", "sampling_params": {"max_new_tokens": 2}},
        "/v1/completions": {"model": "default", "prompt": "abcdefgh", "max_tokens": 2},
        "/v1/chat/completions": {"model": "default", "messages": [message], "max_tokens": 2},
    }
    with serve(tiny_model, tmp_path, "--load-balance-method", "follow_bootstrap_room") as server:
        for path, body in bodies.items():
            for room in (6, 5):
                flush(server)
                answer = post(server, path, **body, bootstrap_room=room)
                assert answer.status_code == 200, answer.text
                assert "warnings" not in answer.json()
                assert held(server) == [room == 6, room == 5]
                if path == "/generate":
                    assert answer.json()["meta_info"]["dp_rank"] == room % 2
            refused = post(server, path, **body)
            assert refused.status_code == 400
            assert "bootstrap_room is missing" in refused.json()["message"]
            flush(server)
            assert post(server, path, **body, routed_dp_rank=1).status_code == 200
            assert held(server) == [False, True]


def test_without_rooms_the_field_is_accepted_and_does_nothing(tiny: ServerProcess) -> None:
    answer = post(tiny, "/generate", text="a", bootstrap_room=5, sampling_params=SAMPLING)
    assert answer.status_code == 200
    assert "warnings" not in answer.json()["meta_info"]
    refused = post(tiny, "/generate", text="a", bootstrap_host="10.0.0.1")
    assert refused.status_code == 400
    assert "bootstrap_host is not supported" in refused.text


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serve(tiny_model, tmp_path_factory.mktemp("server")) as server:
        yield server


class Session:
    """A session whose first turn goes to rank 1, which nothing else would choose: two idle engines
    are equal, and the first one gets what neither has."""

    def __init__(self, server: ServerProcess) -> None:
        flush(server)
        self.server = server
        answer = post(server, "/open_session", capacity_of_str_len=100_000)
        self.id: str = answer.json()
        self.texts: list[str] = []
        self.num_tokens = 0
        """The tokens of the last turn, with its answer."""
        self.turn(routed_dp_rank=1)
        assert held(server) == [False, True]

    def turn(self, **body: Any) -> int:
        """Take the next turn; returns how many of its tokens were cached."""
        number = len(self.texts)
        params = {"id": self.id, **({"rid": f"{self.id}-{number - 1}"} if number else {})}
        answer = self.server.generate(
            text=TURNS[number],
            rid=f"{self.id}-{number}",
            session_params=params,
            sampling_params=SAMPLING,
            **body,
        )
        self.texts.append(answer["text"])
        meta = answer["meta_info"]
        self.num_tokens = meta["prompt_tokens"] + meta["completion_tokens"]
        return int(meta["cached_tokens"])

    def follows(self) -> None:
        """The next turn goes where the last one was."""
        before = self.num_tokens
        assert self.turn() >= before // BLOCK * BLOCK


@pytest.mark.full
def test_a_session_stays_where_its_prefix_is(server: ServerProcess) -> None:
    session = Session(server)
    for _ in TURNS[1:]:
        session.follows()
    assert held(server) == [False, True]


def test_a_chat_stays_where_its_prefix_is(server: ServerProcess) -> None:
    flush(server)
    messages: list[dict[str, str]] = []
    before = 0
    for number, text in enumerate(TURNS):
        messages.append({"role": "user", "content": text})
        first = {} if number else {"routed_dp_rank": 1}
        body = {
            "model": "default",
            "messages": messages,
            "max_tokens": 20,
            "temperature": 0,
            **first,
        }
        answer = post(server, "/v1/chat/completions", **body).json()
        usage = answer["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= before // BLOCK * BLOCK
        before = usage["prompt_tokens"]
        content = answer["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": content})
    assert held(server) == [False, True]


@pytest.mark.full
def test_a_session_moves_for_good_when_its_engine_dies(server: ServerProcess) -> None:
    undisturbed = Session(server)
    for _ in TURNS[1:]:
        undisturbed.follows()
    session = Session(server)
    session.follows()
    os.kill(ranks(server)[1]["pid"], signal.SIGKILL)
    wait_until(lambda: ranks(server)[1]["state"] != "ready")
    session.turn()
    wait_until(lambda: ranks(server)[1]["state"] == "ready", timeout_s=2 * PATIENCE_S)
    session.follows()
    assert held(server) == [True, False]
    assert session.texts == undisturbed.texts


@pytest.mark.full
def test_a_session_leaves_an_engine_that_has_much_more_to_do(server: ServerProcess) -> None:
    session = Session(server)
    session.follows()
    texts, open_streams = list(session.texts), []
    with ExitStack() as streams:
        for number in range(12):  # each weighs as much as 64 tokens
            body = {
                "text": f"stream {number}",
                "stream": True,
                "routed_dp_rank": 1,
                "sampling_params": {**SAMPLING, "max_new_tokens": 3000},
            }
            response = streams.enter_context(
                httpx.stream("POST", f"{server.url}/generate", json=body, timeout=PATIENCE_S)
            )
            assert response.status_code == 200
            open_streams.append(response.iter_lines())  # one that is dropped closes its stream
            next(open_streams[-1])
        assert ranks(server)[1]["num_requests"] == 12
        assert session.turn() == 0
        session.follows()
    assert session.texts[:2] == texts
    wait_until(lambda: not ranks(server)[1]["num_requests"])
