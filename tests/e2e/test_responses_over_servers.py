"""Responses in the background of a real server that is killed, or asked to end, in the middle of
them: the next server with the same folder goes on, and all of them end as in a run that nobody
disturbed."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from setpoint_testing.server_process import PATIENCE_S, ServerProcess, running_server, wait_until

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "integer"}, "minItems": 40}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}
LONG = {"max_output_tokens": 1500, "ignore_eos": True}
BODIES: dict[str, dict[str, Any]] = {
    "greedy": {**LONG, "temperature": 0},
    "streamed": {**LONG, "temperature": 0, "stream": True},
    "seeded": {**LONG, "temperature": 1, "seed": 5, "stream": True},
    "penalties": {**LONG, "seed": 6, "temperature": 1, "frequency_penalty": 0.5},
    "schema": {
        "max_output_tokens": 1500,
        "temperature": 1,
        "seed": 7,
        "text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}},
    },
    "tool": {
        "max_output_tokens": 1500,
        "temperature": 1,
        "seed": 8,
        "stream": True,
        "tools": [TOOL],
        "tool_choice": "required",
    },
}
UNSEEDED = {**LONG, "temperature": 1}
MEASURED = ("created_at", "completed_at", "id", "item_id", "call_id", "previous_response_id")


def serving(model: Path, storage: Path, folder: Path) -> Any:
    return running_server(
        folder,
        *("--model-path", str(model), "--dtype", "float32", "--num-threads", "1"),
        *("--file-storage-path", str(storage), "--skip-server-warmup"),
    )


def ask(server: ServerProcess, method: str, path: str, **options: Any) -> Any:
    answer = httpx.request(
        method, f"{server.url}/v1/responses{path}", timeout=PATIENCE_S, **options
    )
    assert answer.status_code == 200, answer.text
    return answer


def begin(server: ServerProcess, body: dict[str, Any]) -> str:
    """Create a response; a stream is left after its first event."""
    body = {"model": "tiny", "input": "abc", "background": True, **body}
    if not body.get("stream"):
        created = ask(server, "POST", "", json=body).json()
        assert created["status"] == "queued"
        return str(created["id"])
    url = f"{server.url}/v1/responses"
    with httpx.stream("POST", url, json=body, timeout=PATIENCE_S) as answer:
        data = next(line for line in answer.iter_lines() if line.startswith("data: "))
    event = json.loads(data.removeprefix("data: "))
    assert (event["sequence_number"], event["response"]["status"]) == (0, "queued")
    return str(event["response"]["id"])


def state(server: ServerProcess, own_id: str) -> dict[str, Any]:
    return dict(ask(server, "GET", f"/{own_id}").json())


def ends(server: ServerProcess, own_id: str) -> dict[str, Any]:
    wait_until(
        lambda: state(server, own_id)["status"] not in ("queued", "in_progress"),
        timeout_s=4 * PATIENCE_S,
        every_s=0.1,
    )
    return state(server, own_id)


class Follower:
    """Follows a response over the lives of its servers, as a client does that takes up a stream
    where it was cut."""

    def __init__(self, own_id: str) -> None:
        self.own_id = own_id
        self.events: list[dict[str, Any]] = []

    def follow(self, server: ServerProcess, *, most: int | None = None) -> None:
        """Read until the end of the stream, or until there are so many events."""
        after = {} if not self.events else {"starting_after": len(self.events) - 1}
        url, query = f"{server.url}/v1/responses/{self.own_id}", {"stream": "true", **after}
        with httpx.stream("GET", url, params=query, timeout=4 * PATIENCE_S) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    assert event["sequence_number"] == len(self.events), event
                    self.events.append(event)
                    if most is not None and len(self.events) >= most:
                        return


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: timeless(each) for key, each in value.items() if key not in MEASURED}
    return [timeless(each) for each in value] if isinstance(value, list) else value


def results(server: ServerProcess, followers: dict[str, Follower]) -> dict[str, Any]:
    found = {}
    for name, follower in followers.items():
        last = ends(server, follower.own_id)
        follower.follow(server)
        assert follower.events[-1]["response"] == last
        found[name] = timeless([last, follower.events])
    return found


def without_cache(found: dict[str, Any]) -> str:
    """How much of a prompt is cached depends on which request came first."""
    text = json.dumps(found, sort_keys=True)
    for count in range(64):
        text = text.replace(f'"cached_tokens": {count}}}', "}").replace(
            f'"cached_tokens": {count},', ""
        )
    return text


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_responses_survive_the_end_of_their_server(
    tiny_model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    storage = tmp_path / "storage"
    with serving(tiny_model, tmp_path / "alone", tmp_path / "0") as server:
        followers = {name: Follower(begin(server, body)) for name, body in BODIES.items()}
        undisturbed = results(server, followers)
        assert [undisturbed[name][0]["status"] for name in ("greedy", "schema")] == [
            "incomplete",
            "completed",
        ]
    followers, unseeded = {}, Follower("")
    for life in range(3):
        with serving(tiny_model, storage, tmp_path / f"life{life}") as server:
            if not followers:
                followers = {name: Follower(begin(server, body)) for name, body in BODIES.items()}
                unseeded = Follower(begin(server, UNSEEDED))
            for follower in (followers["streamed"], followers["tool"], unseeded):
                if follower.events[-1:] == [] or "response" not in follower.events[-1]:
                    follower.follow(server, most=len(follower.events) + 20)
            server.process.send_signal(number)
            assert server.wait_end() == (0 if number == signal.SIGTERM else -number)
            assert "Traceback" not in server.errors
    with serving(tiny_model, storage, tmp_path / "last") as server:
        wait_until(lambda: "in the background go on where an earlier server" in server.errors)
        assert without_cache(results(server, followers)) == without_cache(undisturbed)
        last = ends(server, unseeded.own_id)
        unseeded.follow(server)
        assert unseeded.events[-1]["response"] == last
        assert last["usage"]["output_tokens"] == 1500
        again = Follower(unseeded.own_id)
        again.follow(server)
        assert again.events == unseeded.events
        assert "Traceback" not in server.errors


@pytest.mark.full
def test_a_response_can_be_cancelled_by_the_next_server(tiny_model: Path, tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    with serving(tiny_model, storage, tmp_path / "0") as server:
        own_id = begin(server, {**UNSEEDED, "max_output_tokens": 3500})
        wait_until(lambda: state(server, own_id)["status"] == "in_progress")
        server.process.kill()
        server.wait_end()
    with serving(tiny_model, storage, tmp_path / "1") as server:
        assert state(server, own_id)["status"] == "in_progress"
        cancelled = ask(server, "POST", f"/{own_id}/cancel").json()
        assert cancelled["status"] == "cancelled"
        wait_until(server.is_idle)
        server.process.kill()
        server.wait_end()
    with serving(tiny_model, storage, tmp_path / "2") as server:
        assert state(server, own_id) == cancelled


def test_a_second_server_on_a_folder_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    arguments = ("--model-path", str(tiny_model), "--file-storage-path", str(tmp_path / "storage"))
    with (
        running_server(tmp_path / "0", *arguments) as server,
        running_server(tmp_path / "1", *arguments, ready=False) as second,
    ):
        assert second.wait_end() == 2
        assert "is in use by another server; each server needs a folder" in second.messages[-1]
        own_id = begin(server, {**LONG, "max_output_tokens": 5})
        assert ends(server, own_id)["status"] == "incomplete"
