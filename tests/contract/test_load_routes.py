"""How busy the engine is, in the shapes that balancers know; and what became of requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from setpoint import __version__
from setpoint.core.messages import Finish
from setpoint.core.request import Request
from setpoint.frontend.warm_up import warm_up
from setpoint_testing.fake_engine import FakeEngine

Serve = Callable[..., None]


def test_loads_of_a_busy_engine(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        server.engine.silent = True
        body = {"text": "abcd", "sampling_params": {"max_new_tokens": 2, "n": 3}}
        task = asyncio.create_task(server.generate(**body))
        while len(server.engine.running) < 3:
            await asyncio.sleep(0)
        answer = (await server.http.get("/v1/loads")).json()
        (load,) = answer.pop("loads")
        assert answer.pop("timestamp").startswith("20")
        assert answer == {"version": __version__, "accelerator": None, "num_accelerators": 1}
        assert load.pop("timestamp") > 0
        assert load == {
            "dp_rank": 0,
            "num_running_reqs": 2,
            "num_waiting_reqs": 1,
            "num_paused_reqs": 0,
            "num_waiting_uncached_tokens": 4,
            "num_used_tokens": 2,
            "num_total_tokens": 6,
            "num_active_tokens": 6,
            "max_total_num_tokens": 1000,
            "max_running_requests": 2,
            "token_usage": 0.002,
            "gen_throughput": 0.0,
            "cache_hit_rate": 0.0,
            "utilization": 1.0,
            "memory": {
                "weight_gb": 0.25,
                "kv_cache_gb": 0.5,
                "graph_gb": 0.125,
                "token_capacity": 1000,
            },
            "queues": {"waiting": 1, "grammar": 0, "paused": 0, "retracted": 0},
        }
        (core,) = (await server.http.get("/v1/loads?include=core,queues")).json()["loads"]
        assert "memory" not in core
        assert "queues" in core
        text = (await server.http.get("/v1/loads?format=prometheus")).text
        found = {
            sample.name: (sample.value, sample.labels)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        rank = {"dp_rank": "0"}
        assert found["sglang:num_running_reqs"] == (2.0, rank)
        assert found["sglang:memory_weight_gb"] == (0.25, rank)
        assert found["sglang:queues_waiting"] == (1.0, rank)
        assert (await server.http.get("/get_load")).json() == [
            {"dp_rank": 0, "num_reqs": 3, "num_waiting_reqs": 1, "num_tokens": 6}
        ]
        server.engine.silent = False
        server.engine.max_running = 3
        server.engine._tick_later()
        await task

    serve(scenario, FakeEngine(max_running=2))


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("dp_rank=1", "the last rank is 0"),
        ("dp_rank=x", "dp_rank"),
        ("format=xml", "format must be json or prometheus"),
        ("include=core,all,memry", "'memry'; it may name core, memory"),
    ],
)
def test_a_wrong_query_is_refused(serve: Serve, query: str, words: str) -> None:
    async def scenario(server: Any) -> None:
        response = await server.http.get(f"/v1/loads?{query}")
        assert response.status_code == 400
        assert words in response.json()["message"]

    serve(scenario)


def test_what_became_of_requests_is_counted(serve: Serve) -> None:
    """Answers by their ends, errors by their status, and what was cut; warm-up and probes are
    nobody's requests."""

    async def scenario(server: Any) -> None:
        http = server.http
        await warm_up(server.service.answering)
        await server.generate(text="abc", sampling_params={"max_new_tokens": 10, "n": 2})
        await server.generate(text="x" * 400, sampling_params={"max_new_tokens": 4})
        await server.generate(text="abc", sampling_params={"max_new_tokens": 400})
        stream = await http.post(
            "/generate", json={"text": "full", "stream": True, "sampling_params": {"n": 2}}
        )
        assert stream.status_code == 503
        assert (await http.post("/generate", json={"text": 1})).status_code == 400
        assert (await http.post("/generate", json={"text": "x" * 5000})).status_code == 413
        assert (await http.get("/nowhere")).status_code == 404
        info = (await http.get("/server_info")).json()["requests"]
        assert info == {
            "num_sequences": 6,
            "num_aborted": 2,
            "prompt_tokens": 3 + 3 + 250 + 3 + 4 + 4,
            "cached_tokens": 0,
            "output_tokens": 10 + 10 + 4 + 253,
            "refused": {"503": 1, "400": 1, "413": 1, "404": 1},
            "truncated_prompts": 1,
            "lowered_limits": 1,
            "warned_bodies": 0,
            "unenforced_schemas": 0,
            "lost_exports": 0,
        }

    def refuse(request: Request) -> Finish | None:
        full = bytes(request.prompt().astype("u1")) == b"full"
        return Finish("abort", message="full", status_code=503) if full else None

    serve(scenario, FakeEngine(refuse=refuse), allow_auto_truncate=True, max_body_bytes=4096)
