"""A rid that is used again while events of its last use are still on the way: the new request gets
its own tokens and no others."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from setpoint_testing.server_process import PATIENCE_S, ServerProcess, wait_until

TIMES = 40
LONG = 200


def body(text: str, num_tokens: int) -> dict[str, Any]:
    return {
        "text": text,
        "sampling_params": {"max_new_tokens": num_tokens, "temperature": 0, "ignore_eos": True},
    }


def num_tokens(line: str) -> int:
    """How many tokens of output an answer has in this line of its stream."""
    return int(json.loads(line.removeprefix("data: "))["meta_info"]["completion_tokens"])


def use_again(server: ServerProcess, http: httpx.Client, rid: str) -> list[int]:
    """The ids of a short request under a rid that may be busy for a moment yet."""
    found: list[httpx.Response] = []

    def is_taken() -> bool:
        found.append(http.post(f"{server.url}/generate", json={**body("new", 12), "rid": rid}))
        return found[-1].status_code == 200

    wait_until(is_taken, every_s=0.0)
    return list(found[-1].json()["output_ids"])


@pytest.mark.cases(1)
@pytest.mark.parametrize("when", ["in mid-stream", "near the end"])
def test_a_reused_rid_gets_its_own_tokens(tiny: ServerProcess, when: str) -> None:
    own = tiny.generate(**body("new", 12))["output_ids"]
    with httpx.Client(timeout=PATIENCE_S) as http:
        for number in range(TIMES):
            rid = f"{when}-{number}"
            with http.stream(
                "POST",
                f"{tiny.url}/generate",
                json={**body("an old one", LONG), "rid": rid, "stream": True},
            ) as stream:
                # One chunk has several tokens where the frontend was busy meanwhile.
                awaited = 5 if when == "in mid-stream" else LONG - 3
                for line in stream.iter_lines():
                    if line and num_tokens(line) >= awaited:
                        break
            assert use_again(tiny, http, rid) == own, (when, number)
    wait_until(tiny.is_idle)
