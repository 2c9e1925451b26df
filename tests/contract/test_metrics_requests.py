"""What ``/metrics`` and ``meta_info`` say of requests, whichever API they came by."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest
from scraping import Serve, engine, scrape, value

from setpoint.core.model import Pooling
from setpoint.frontend.arrival import arrival
from setpoint.frontend.telemetry.metrics.metering import MetricsConfig
from setpoint_testing.fake_engine import EMBEDDING_SIZE

MESSAGES = [{"role": "user", "content": "abc"}]
STREAMED = [
    ("/generate", {"text": "abc", "sampling_params": {"max_new_tokens": 2}}),
    ("/v1/completions", {"prompt": "abc", "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2}),
    ("/v1/responses", {"input": "abc", "max_output_tokens": 2, "store": False}),
    ("/v1/messages", {"model": "default", "messages": MESSAGES, "max_tokens": 2}),
    ("/api/chat", {"model": "default", "messages": MESSAGES, "options": {"num_predict": 2}}),
    ("/api/generate", {"model": "default", "prompt": "abc", "options": {"num_predict": 2}}),
]


def test_answers_say_where_the_time_went(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        before = time.time()
        meta = (await server.generate(text="ab", sampling_params={"max_new_tokens": 3}))[
            "meta_info"
        ]
        assert before <= meta["request_received_ts"] <= meta["api_server_dispatch_finish_ts"]
        assert meta["response_sent_to_client_ts"] <= meta["request_finished_ts"] <= time.time()
        # What the fake engine says.
        assert meta["queue_time"] == 0.25
        entry = meta["forward_entry_time"]
        assert entry - meta["api_server_dispatch_finish_ts"] == pytest.approx(0.25, abs=1e-3)
        assert meta["prefill_finished_time"] - entry == pytest.approx(0.5, abs=1e-3)
        assert 0 < meta["first_token_latency"] <= meta["e2e_latency"]
        assert meta["decode_throughput"] > 0

    serve(scenario, engine(step_s=0.001), metrics=MetricsConfig())


def test_a_request_arrives_when_its_head_does(serve: Serve) -> None:
    """Its latencies hold the time to read, decode and tokenize it, also where a thread does."""

    async def slow(*args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(0.05)
        return await encode(*args, **kwargs)

    async def scenario(server: Any) -> None:
        nonlocal encode
        encode, server.service.answering.intake.encode = (
            server.service.answering.intake.encode,
            slow,
        )
        sampling = {"max_new_tokens": 1}
        for padding in ("", " " * (1 << 17)):
            body = {"text": "ab", "sampling_params": sampling, "cache_salt": padding.strip()}
            content = msgspec.json.encode(body) + padding.encode()
            headers = {"content-type": "application/json"}
            response = await server.http.post("/generate", content=content, headers=headers)
            meta = response.json()["meta_info"]
            assert meta["first_token_latency"] >= 0.05
            assert meta["api_server_dispatch_finish_ts"] - meta["request_received_ts"] >= 0.05
        assert arrival().at > time.perf_counter() - 1, "the arrival outlived its request"

    encode: Any = None
    serve(scenario, engine(), metrics=MetricsConfig())


@pytest.mark.parametrize(("route", "body"), STREAMED, ids=lambda value: str(value))
def test_every_api_counts_its_requests_from_their_arrival(
    serve: Serve, route: str, body: dict[str, Any]
) -> None:
    arrivals: list[float] = []

    async def scenario(server: Any) -> None:
        for is_streaming in (False, True):
            before = time.perf_counter()
            response = await server.http.post(route, json={**body, "stream": is_streaming})
            assert response.status_code == 200, response.text
            assert before <= arrivals.pop() <= time.perf_counter()
            assert not arrivals
        found = await scrape(server)
        for is_streaming in ("false", "true"):
            one = {"is_streaming": is_streaming}
            assert value(found, "sglang:num_requests_total", **one) == 1
            assert value(found, "sglang:generation_tokens_total", **one) == 2
            assert value(found, "sglang:time_to_first_token_seconds_count", **one) == 1
        assert value(found, "sglang:inter_token_latency_seconds_count") == 2
        assert value(found, "sglang:http_requests_total", endpoint=route) == 2

    readers = [lambda output: arrivals.append(output.arrived_at)]
    serve(scenario, engine(), metrics=MetricsConfig(), readers=readers)


def test_embeddings_are_requests_without_tokens(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        body = {"input": ["abc", "de"]}
        assert (await server.http.post("/v1/embeddings", json=body)).status_code == 200
        found = await scrape(server)
        assert value(found, "sglang:num_requests_total", is_streaming="false") == 2
        assert value(found, "sglang:prompt_tokens_total", is_streaming="false") == 5
        assert value(found, "sglang:time_to_first_token_seconds_count", is_streaming="false") == 0
        assert value(found, "sglang:e2e_request_latency_seconds_count", is_streaming="false") == 2

    pooling = Pooling("last", normalize=True, size=EMBEDDING_SIZE, lengths=None, why="a test")
    serve(scenario, engine(), metrics=MetricsConfig(), pooling=pooling)
