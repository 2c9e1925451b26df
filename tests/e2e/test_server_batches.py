"""Batches of a real server: killed in the middle, together with whatever it was writing, and in the
end every request is answered exactly once; a client beside a batch does not wait for it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import openai
import pytest

from setpoint_testing.server_process import PATIENCE_S, ServerProcess, running_server, wait_until


def options(model: Path, storage: Path) -> list[str]:
    return [
        *("--model-path", str(model), "--dtype", "float32", "--num-threads", "1"),
        *("--max-total-tokens", "8192", "--max-running-requests", "16"),
        *("--file-storage-path", str(storage), "--skip-server-warmup"),
    ]


def client_of(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60, max_retries=0)


def upload(client: openai.OpenAI, count: int, *, max_tokens: int) -> str:
    lines = [
        {
            "custom_id": f"id-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": f"Prompt {number}", "max_tokens": max_tokens, "ignore_eos": True},
        }
        for number in range(count)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    return client.files.create(file=("in.jsonl", content), purpose="batch").id


def num_done(client: openai.OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    assert counts is not None
    return counts.completed


def test_a_batch_of_a_server(tiny: ServerProcess) -> None:
    with client_of(tiny) as client:
        batch = client.batches.create(
            input_file_id=upload(client, 5, max_tokens=4),
            endpoint="/v1/completions",
            completion_window="24h",
        )
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
        batch = client.batches.retrieve(batch.id)
        assert batch.output_file_id is not None
        assert len(client.files.content(batch.output_file_id).content.splitlines()) == 5


@pytest.mark.full
def test_killed_again_and_again_every_request_is_answered_exactly_once(
    tiny_model: Path, tmp_path: Path
) -> None:
    rng = random.Random(1)
    batch_id, storage = "", tmp_path / "storage"
    for life in range(4):
        with (
            running_server(tmp_path / str(life), *options(tiny_model, storage)) as server,
            client_of(server) as client,
        ):
            if not batch_id:
                batch_id = client.batches.create(
                    input_file_id=upload(client, 1500, max_tokens=8),
                    endpoint="/v1/completions",
                    completion_window="24h",
                ).id
            target = num_done(client, batch_id) + rng.randrange(100, 300)
            wait_until(lambda: num_done(client, batch_id) >= min(target, 1400))  # noqa: B023
            assert server.engine is not None
            server.process.kill()
            server.process.wait()
            server.engine.wait(PATIENCE_S)
    with (
        running_server(tmp_path / "last", *options(tiny_model, storage)) as server,
        client_of(server) as client,
    ):
        wait_until(lambda: client.batches.retrieve(batch_id).status == "completed", every_s=0.2)
        batch = client.batches.retrieve(batch_id)
        assert batch.error_file_id is None
        assert batch.output_file_id is not None
        content = client.files.content(batch.output_file_id).content
        ids = [json.loads(line)["custom_id"] for line in content.splitlines()]
        assert sorted(ids) == sorted(f"id-{number}" for number in range(1500))
        assert "Traceback" not in server.errors


@pytest.mark.full
def test_clients_beside_a_batch(tiny_model: Path, tmp_path: Path) -> None:
    with (
        running_server(tmp_path / "s", *options(tiny_model, tmp_path / "storage")) as server,
        client_of(server) as client,
    ):
        batch = client.batches.create(
            input_file_id=upload(client, 200, max_tokens=400),
            endpoint="/v1/completions",
            completion_window="24h",
        )
        wait_until(lambda: server.state()["num_running"] >= 14)
        for _ in range(5):
            state: dict[str, Any] = server.state()
            assert (state["num_running"], state["num_queued"]) == (14, 0)
            server.generate(text="Hello", sampling_params={"max_new_tokens": 2})
        client.batches.cancel(batch.id)
        wait_until(lambda: client.batches.retrieve(batch.id).status == "cancelled")
        wait_until(server.is_idle)
