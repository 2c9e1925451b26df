"""Priority scheduling through real processes: an urgent request overtakes a running one, which
loses nothing."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from setpoint_testing.server_process import PATIENCE_S, running_server, wait_until

SLOW = {
    "text": "a slow one",
    "sampling_params": {"max_new_tokens": 800, "temperature": 0.0, "ignore_eos": True},
}
URGENT = {
    "text": "an urgent one",
    "priority": 20,
    "sampling_params": {"max_new_tokens": 20, "temperature": 0.0, "ignore_eos": True},
}


@pytest.mark.full
def test_an_urgent_request_overtakes_a_running_one(tiny_model: Path, tmp_path: Path) -> None:
    arguments = (
        "--model-path",
        str(tiny_model),
        "--dtype",
        "float64",
        "--schedule-policy",
        "priority",
        "--max-running-requests",
        "1",
    )
    with (
        running_server(tmp_path, *arguments) as server,
        httpx.Client(base_url=server.url, timeout=4 * PATIENCE_S) as client,
    ):
        info = client.get("/server_info").json()
        assert (info["schedule_policy"], info["enable_priority_scheduling"]) == ("fcfs", True)
        alone = client.post("/generate", json=SLOW).json()["output_ids"]
        client.post("/flush_cache")
        answers: list[dict[str, Any]] = []
        slow = threading.Thread(
            target=lambda: answers.append(
                httpx.post(f"{server.url}/generate", json=SLOW, timeout=4 * PATIENCE_S).json()
            )
        )
        lines = server.errors.count("Prefill batch")
        slow.start()
        wait_until(lambda: server.errors.count("Prefill batch") > lines)
        urgent = client.post("/generate", json=URGENT).json()
        assert not answers, "the slow one is still under way"
        slow.join()
        assert len(urgent["output_ids"]) == 20
        assert answers[0]["output_ids"] == alone
        assert answers[0]["meta_info"]["num_retractions"] == 1
        assert "Priority preemption. #preempted_reqs: 1, " in server.errors
