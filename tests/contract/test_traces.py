"""Spans of requests, as a collector on loopback receives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from setpoint.core.messages import Finish
from setpoint.frontend.telemetry.tracing import RequestTracer, sending_to
from setpoint_testing.fake_engine import FakeEngine
from setpoint_testing.otlp import Collector, collecting

Serve = Callable[..., None]
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
STAGES = ("tokenize", "prefill_waiting", "prefill_forward", "decode_forward")


def traced(serve: Serve, engine: FakeEngine, body: Any, headers: dict[str, str]) -> Collector:
    with collecting() as collector:
        provider = sending_to(f"{collector.url}/v1/traces", "here")
        tracer = RequestTracer(provider, model_name="org/tiny")

        async def scenario(server: Any) -> None:
            response = await server.http.post("/generate", json=body, headers=headers)
            assert response.status_code in (200, 503)
            provider.shutdown()

        serve(scenario, engine, readers=[tracer.finished])
    return collector


def attributes(span: Any) -> dict[str, Any]:
    return {
        each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes
    }


def test_a_request_is_a_span_with_its_stages(serve: Serve) -> None:
    body = {"text": "abc", "rid": "r1", "sampling_params": {"max_new_tokens": 4, "top_p": 0.5}}
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    collector = traced(serve, FakeEngine(step_s=0.01, num_cached=1), body, headers)
    assert collector.services == {"here"}
    spans = collector.by_name()
    assert spans.keys() == {"request", *STAGES}
    whole = spans["request"]
    assert whole.trace_id.hex() == TRACE
    assert whole.parent_span_id.hex() == PARENT
    assert (
        attributes(whole).items()
        >= {
            "gen_ai.request.id": "r1",
            "gen_ai.response.model": "org/tiny",
            "gen_ai.request.top_p": 0.5,
            "gen_ai.request.max_tokens": 4,
            "gen_ai.usage.prompt_tokens": 3,
            "gen_ai.usage.completion_tokens": 4,
            "gen_ai.usage.cached_tokens": 1,
            "gen_ai.latency.time_in_queue": 0.25,
        }.items()
    )
    at = whole.start_time_unix_nano
    for name in STAGES:
        span = spans[name]
        assert (span.trace_id, span.parent_span_id) == (whole.trace_id, whole.span_id)
        assert at == span.start_time_unix_nano <= span.end_time_unix_nano, "a gap, or an overlap"
        at = span.end_time_unix_nano
    assert at == whole.end_time_unix_nano


def test_without_a_parent_a_request_begins_a_trace(serve: Serve) -> None:
    for headers in ({}, {"traceparent": "nonsense"}):
        body = {"text": "abc", "sampling_params": {"max_new_tokens": 1}}
        whole = traced(serve, FakeEngine(), body, headers).by_name()["request"]
        assert whole.trace_id
        assert not whole.parent_span_id


def test_what_the_client_does_not_sample_is_not_sent(serve: Serve) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 1}}
    assert traced(serve, FakeEngine(), body, headers).spans == []


def test_a_failed_request_is_an_error_with_its_reason(serve: Serve) -> None:
    full = Finish("abort", message="The request queue is full.", status_code=503)
    engine = FakeEngine(refuse=lambda request: full)
    whole = traced(serve, engine, {"text": "abc"}, {}).by_name()["request"]
    assert whole.status.code == 2
    assert whole.status.message == "The request queue is full."


def test_each_of_several_sequences_has_a_span(serve: Serve) -> None:
    body = {"text": "abc", "rid": "r", "sampling_params": {"max_new_tokens": 1, "n": 2}}
    spans = traced(serve, FakeEngine(), body, {}).spans
    rids = {attributes(span)["gen_ai.request.id"] for span in spans if span.name == "request"}
    assert rids == {"r_0", "r_1"}
