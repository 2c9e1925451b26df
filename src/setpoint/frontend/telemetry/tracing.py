"""Spans of requests for an OpenTelemetry collector (--enable-trace). They are made when a sequence
has ended, from the times that its output has kept, so tokens cost nothing. Imported only with the
flag: the library is the extra ``trace``."""

from __future__ import annotations

import time
from collections.abc import Iterator

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from setpoint.frontend.telemetry.measured_sequence import MeasuredSequence

SERVICE = "setpoint"
REQUEST = "request"
"""Name of the span of a whole sequence; those of its stages have SGLang's names."""


def sending_to(url: str, service_name: str | None) -> TracerProvider:
    """A provider whose spans go to ``url`` as OTLP over HTTP, from a thread of its own. Its
    ``shutdown`` waits until they are sent, for up to half a minute; the end of the process does
    not. service_name: None means SERVICE."""
    provider = TracerProvider(
        resource=Resource.create({SERVICE_NAME: service_name or SERVICE}), shutdown_on_exit=False
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    return provider


class RequestTracer:
    def __init__(self, provider: TracerProvider, *, model_name: str) -> None:
        self._tracer = provider.get_tracer(SERVICE)
        self._model_name = model_name
        self._propagator = TraceContextTextMapPropagator()

    def finished(self, output: MeasuredSequence) -> None:
        """Make the spans of a sequence that has ended, below the span that the client's header
        ``traceparent`` names, if it has one."""
        offset = time.time() - time.perf_counter()
        ended_at = output.finished_at or time.perf_counter()
        parent = self._propagator.extract(output.headers)
        attributes = _attributes(output, self._model_name)
        whole = self._span(REQUEST, parent, output.arrived_at + offset, attributes)
        inside = set_span_in_context(whole, parent)
        for name, begin, end in stages(output, ended_at):
            span = self._span(name, inside, begin + offset, {})
            span.end(_ns(end + offset))
        if not output.is_complete:
            message = output.finish.message if output.finish is not None else None
            whole.set_status(Status(StatusCode.ERROR, message or "The client left."))
        whole.end(_ns(ended_at + offset))

    def _span(
        self, name: str, parent: Context, at: float, attributes: dict[str, AttributeValue]
    ) -> Span:
        """at: Unix time."""
        return self._tracer.start_span(
            name, context=parent, start_time=_ns(at), attributes=attributes
        )


def stages(output: MeasuredSequence, ended_at: float) -> Iterator[tuple[str, float, float]]:
    """Name, begin and end of each stage that the sequence has reached, on the output's clock. Each
    begins where the one before ends; none ends after the sequence."""
    if output.submitted_at is None:
        return
    at = output.submitted_at
    yield "tokenize", output.arrived_at, at
    if output.timing is None:
        yield "prefill_waiting", at, ended_at
        return
    for name, seconds in (
        ("prefill_waiting", output.timing.waiting_s),
        ("prefill_forward", output.timing.prefill_s),
    ):
        end = min(at + seconds, ended_at)
        yield name, at, end
        at = end
    if output.first_token_at is not None:
        yield "decode_forward", at, ended_at


def _attributes(output: MeasuredSequence, model_name: str) -> dict[str, AttributeValue]:
    """The attributes of a span under SGLang's names."""
    sampling, finish = output.request.sampling, output.finish
    found: dict[str, AttributeValue] = {
        "gen_ai.request.id": output.rid,
        "gen_ai.response.model": model_name,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.usage.prompt_tokens": output.num_prompt,
        "gen_ai.usage.completion_tokens": output.num_outputs,
        "gen_ai.usage.cached_tokens": output.num_cached,
        "gen_ai.latency.e2e": output.e2e_s,
    }
    if sampling.max_new_tokens is not None:
        found["gen_ai.request.max_tokens"] = sampling.max_new_tokens
    if output.first_token_at is not None:
        first_s = output.first_token_at - output.arrived_at
        found["gen_ai.latency.time_to_first_token"] = first_s
    if output.timing is not None:
        found["gen_ai.latency.time_in_queue"] = output.timing.waiting_s
    if finish is not None:
        found["gen_ai.response.finish_reasons"] = [finish.type]
    return found


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
