"""``/metrics`` over HTTP: what a client's requests leave there, and engines that come and go."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as open_metrics_families,
)
from prometheus_client.parser import text_string_to_metric_families
from scraping import OPEN_METRICS, Found, Serve, engine, scrape, value

from setpoint.core.messages import Finish
from setpoint.frontend.telemetry.metrics.metering import MetricsConfig
from setpoint.frontend.warm_up import warm_up
from setpoint.ipc.line import EngineLine
from setpoint.observe.catalogue import BY_NAME, SERIES
from setpoint.observe.engine_metrics import EngineMetrics
from setpoint.observe.figures import Figures
from setpoint.observe.series import COMMON_LABELS, Histogram, Kind, Scope


def test_requests_are_counted_as_their_clients_saw_them(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        await server.generate(text="abcd", sampling_params={"max_new_tokens": 5})
        body = {"text": "ab", "sampling_params": {"max_new_tokens": 3}, "stream": True}
        response = await server.http.post("/generate", json=body)
        assert response.status_code == 200
        found = await scrape(server)
        for name, whole, streamed in (
            ("num_requests", 1, 1),
            ("prompt_tokens", 4, 2),
            ("generation_tokens", 5, 3),
        ):
            assert value(found, f"sglang:{name}_total", is_streaming="false") == whole
            assert value(found, f"sglang:{name}_total", is_streaming="true") == streamed
        for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
            assert value(found, f"sglang:{name}_count", is_streaming="true") == 1
            assert value(found, f"sglang:{name}_count", is_streaming="false") == 1
        # The first token of each has no interval before it.
        assert value(found, "sglang:inter_token_latency_seconds_count") == 4 + 2
        assert value(found, "sglang:request_time_per_output_token_seconds_count") == 2
        assert value(found, "sglang:prompt_tokens_histogram_sum") == 6
        assert value(found, "sglang:prompt_tokens_histogram_bucket", le="100.0") == 2
        assert value(found, "sglang:num_aborted_requests_total") == 0
        assert value(found, "sglang:http_requests_total", endpoint="/generate", method="POST") == 2

    serve(scenario, engine(), metrics=MetricsConfig())


def test_requests_that_fail_are_aborted_ones_and_have_no_latencies(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        response = await server.http.post("/generate", json={"text": "ab"})
        assert response.status_code == 503
        found = await scrape(server)
        assert value(found, "sglang:num_aborted_requests_total") == 1
        assert value(found, "sglang:num_requests_total", is_streaming="false") == 1
        assert value(found, "sglang:e2e_request_latency_seconds_count", is_streaming="false") == 0
        assert value(found, "sglang:http_responses_total", status_code="503") == 1

    full = Finish("abort", message="full", status_code=503, err_type="ServiceUnavailableError")
    serve(scenario, engine(refuse=lambda request: full), metrics=MetricsConfig())


def test_health_checks_and_refused_bodies_are_no_requests(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        assert (await server.http.get("/health_generate")).status_code == 200
        assert (await server.http.post("/generate", json={})).status_code == 400
        await warm_up(server.service.answering)
        found = await scrape(server)
        assert value(found, "sglang:num_requests_total", is_streaming="false") == 0
        assert value(found, "sglang:http_responses_total", status_code="400") == 1

    serve(scenario, engine(), metrics=MetricsConfig())


OF_TWO_SERVERS = {
    *(f"sglang:kv_transfer_{name}" for name in ("alloc_ms", "bootstrap_ms", "latency_ms")),
    *("sglang:kv_transfer_speed_gb_s", "sglang:kv_transfer_total_mb"),
    *("sglang:num_bootstrap_failed_reqs", "sglang:num_transfer_failed_reqs"),
    *(f"sglang:num_prefill_{name}_queue_reqs" for name in ("bootstrap", "inflight")),
    *(f"sglang:num_decode_{name}_queue_reqs" for name in ("prealloc", "transfer")),
    *("setpoint:prefill_server_up", "setpoint:prompts_without_prefill_server"),
}
TIERS = {
    "sglang:prefetched_tokens",
    "sglang:backuped_tokens",
    "sglang:storage_prefetch_unfulfilled_tokens",
    "sglang:hicache_dropped_tokens",
    "setpoint:cache_tier_seconds",
    "setpoint:cache_tier_lost_blocks",
    "setpoint:cache_tier_off",
    "setpoint:cache_tier_thrifty",
    "setpoint:cache_tier_blocks",
    "setpoint:cache_tier_bytes",
}
OF_SEVERAL_MODELS = {
    f"setpoint:model_{each}" for each in ("loaded", "waiting_requests", "loads", "load_seconds")
}
ESTIMATES = {f"sglang:estimated_{each}_per_gpu" for each in ("flops", "read_bytes", "write_bytes")}
"""Only with --enable-mfu-metrics."""


def test_every_series_is_shown_with_its_labels(serve: Serve) -> None:
    config = MetricsConfig(
        extra_labels={"site": "a"}, custom_labels=("team",), startup_s={"tokenizer_e2e": 1.5}
    )

    async def scenario(server: Any) -> None:
        await server.generate(text="abcd")
        for accept in ("", OPEN_METRICS):
            response = await server.http.get("/metrics", headers={"accept": accept})
            parse = open_metrics_families if accept else text_string_to_metric_families
            families = {family.name: family for family in parse(response.text)}
            missing = set()
            for series in SERIES:
                family = families.get(series.name)
                if family is None:
                    missing.add(series.name)
                    continue
                assert family.type == series.kind
                own = () if series.scope is Scope.SERVER else ("site",)
                custom = ("team",) if series.scope is Scope.REQUEST else ()
                wanted = {*COMMON_LABELS[series.scope], *series.labels, *own, *custom}
                for sample in family.samples:
                    bounds = {"le"} if series.kind is Kind.HISTOGRAM else set()
                    assert sample.labels.keys() - bounds == wanted
                    assert "model_name" not in wanted or sample.labels["model_name"] == "org/tiny"
            # What has a label has no sample before anything is counted.
            assert missing - OF_TWO_SERVERS - OF_SEVERAL_MODELS == {
                "sglang:cuda_graph_passes",
                *ESTIMATES,
                "setpoint:queue_refusals",
                *TIERS,
                "setpoint:ended_requests",
                "setpoint:binding_limit",
            }, "a series has no value: frontend/telemetry/metrics/engines.py has those of an engine"
        assert response.headers["content-type"].startswith("application/openmetrics-text")
        assert response.text.endswith("# EOF\n")

    serve(scenario, engine(), metrics=config)


def test_custom_labels_come_from_the_header_and_are_bounded(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("setpoint.frontend.telemetry.metrics.requests.MAX_LABEL_SETS", 3)

    async def scenario(server: Any) -> None:
        async def generate(labels: str) -> None:
            body = {"text": "a", "sampling_params": {"max_new_tokens": 1}}
            headers = {"X-Custom-Labels": labels}
            response = await server.http.post("/generate", json=body, headers=headers)
            assert response.status_code == 200

        for labels in ('{"team": "red", "other": "x"}', '{"team": "red"}', "{nonsense", "[1]"):
            await generate(labels)
        for number in range(4):
            await generate(f'{{"team": "{number}"}}')
        found = await scrape(server)
        counts = {
            dict(labels)["team"]: count
            for (name, labels), count in found.items()
            if name == "sglang:num_requests_total" and ("is_streaming", "false") in labels
        }
        assert counts == {"": 2, "red": 2, "0": 1, "other": 3}

    serve(scenario, engine(), metrics=MetricsConfig(custom_labels=("team",)))


def test_without_the_flag_there_is_no_page(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        response = await server.http.get("/metrics")
        assert response.status_code == 404
        assert "--enable-metrics" in response.json()["message"]

    serve(scenario, engine())


def test_the_page_needs_no_key(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        assert (await server.http.get("/server_info")).status_code == 401
        found = await scrape(server)
        assert value(found, "sglang:http_responses_total", status_code="401") == 1

    serve(scenario, engine(), metrics=MetricsConfig(), api_key="secret")


def test_paths_that_no_route_has_are_one_endpoint(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        for number in range(3):
            await server.http.get(f"/nothing/{number}")
        await server.http.request("BREW", "/generate")
        found = await scrape(server)
        assert value(found, "sglang:http_requests_total", endpoint="unmatched", method="GET") == 3
        assert value(found, "sglang:http_requests_total", method="other") == 1

    serve(scenario, engine(), metrics=MetricsConfig())


def counters(found: Found) -> Found:
    names = {series.shown_name for series in SERIES if series.kind is Kind.COUNTER}
    return {key: value for key, value in found.items() if key[0] in names}


def test_counters_never_go_back_and_a_dead_engine_leaves_its_last_figures(serve: Serve) -> None:
    figures = Figures(decode_log_interval=40)
    first = engine()

    async def scenario(server: Any) -> None:
        figures.totals.retracted, figures.totals.ended = 3, {"stop": 2}
        first.metrics = EngineMetrics(figures).report()
        before = await scrape(server)
        assert value(before, "setpoint:engine_up") == 1
        server.line.died("The test ended it.")
        gone = await scrape(server)
        assert value(gone, "setpoint:engine_up") == 0
        assert value(gone, "sglang:num_retracted_requests_total") == 3
        assert value(gone, "sglang:max_total_num_tokens") == 1000
        figures.totals.retracted, figures.totals.ended = 1, {"stop": 1, "length": 4}
        server.service.engine.attach(EngineLine(engine(metrics=EngineMetrics(figures).report())))
        for _ in range(2):
            after = await scrape(server)
            assert value(after, "setpoint:engine_up") == 1
            assert value(after, "setpoint:engine_starts_total") == 2
            assert value(after, "sglang:num_retracted_requests_total") == 4
            assert value(after, "setpoint:ended_requests_total", how="stop") == 3
            assert value(after, "setpoint:ended_requests_total", how="length") == 4
        old, new = counters(before), counters(after)
        assert all(new[key] >= old[key] for key in old)

    serve(scenario, first, metrics=MetricsConfig())


def test_a_histogram_keeps_labels_that_only_an_earlier_engine_had(serve: Serve) -> None:
    name = "sglang:per_stage_req_latency_seconds"
    first, reports = (
        engine(),
        [EngineMetrics(Figures(decode_log_interval=40)).report() for _ in "ab"],
    )
    observed = Histogram(BY_NAME[name].buckets)
    observed.observe(0.5, times=3)
    reports[0].histograms[name]["earlier"] = observed.snapshot()
    first.metrics = reports[0]

    async def scenario(server: Any) -> None:
        assert value(await scrape(server), f"{name}_count", stage="earlier") == 3
        server.line.died("The test ended it.")
        server.service.engine.attach(EngineLine(engine(metrics=reports[1])))
        for _ in range(2):
            found = await scrape(server)
            assert value(found, "setpoint:engine_starts_total") == 2
            assert value(found, f"{name}_count", stage="earlier") == 3
            assert value(found, f"{name}_count", stage="decode_forward") == 0

    serve(scenario, first, metrics=MetricsConfig())


def test_an_engine_that_does_not_answer_does_not_hold_up_the_page(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("setpoint.frontend.telemetry.metrics.exposition.ANSWER_S", 0.02)

    async def scenario(server: Any) -> None:
        await scrape(server)
        server.engine.mute = True
        found = await asyncio.wait_for(scrape(server), 10)
        assert value(found, "sglang:max_total_num_tokens") == 1000
        assert value(found, "setpoint:engine_figures_age_seconds") > 0
        server.line.suspended(True)
        found = await scrape(server)
        assert value(found, "setpoint:engine_up") == 0
        server.line.suspended(False)

    serve(scenario, engine(), metrics=MetricsConfig())


def test_routing_keys_are_counted_by_how_many_requests_have_them(serve: Serve) -> None:
    engine_of_three = engine(max_running=3, silent=True)

    async def scenario(server: Any) -> None:
        requests = []
        for key in ("many", "many", "one", "many", ""):
            body: dict[str, Any] = {"input_ids": [1], "sampling_params": {"max_new_tokens": 4}}
            body |= {"routing_key": key} if key else {}
            requests.append(asyncio.create_task(server.http.post("/generate", json=body)))
            while len(engine_of_three.running) < len(requests):
                await asyncio.sleep(0.001)
        found = await scrape(server)
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)

        def counts(name: str) -> dict[str, float]:
            bounds = [("0", "1"), ("1", "2"), ("2", "3"), ("200", "+Inf")]
            return {le: value(found, f"sglang:{name}", gt=gt, le=le) for gt, le in bounds}

        assert counts("routing_key_running_req_count") == {"1": 1, "2": 1, "3": 0, "+Inf": 0}
        assert counts("routing_key_all_req_count") == {"1": 1, "2": 0, "3": 1, "+Inf": 0}
        assert value(found, "sglang:num_unique_running_routing_keys") == 2
        assert value(found, "sglang:prefill_queue_depth") == 2

    serve(scenario, engine_of_three, metrics=MetricsConfig())


def test_the_utilization_follows_a_live_change_of_the_slots(serve: Serve) -> None:
    engine_of_eight = engine(max_running=8, silent=True)

    async def scenario(server: Any) -> None:
        body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 4}}
        open_request = asyncio.create_task(server.http.post("/generate", json=body))
        while not engine_of_eight.running:
            await asyncio.sleep(0.001)
        assert value(await scrape(server), "sglang:utilization") == 1 / 8
        engine_of_eight.max_running = 2
        assert value(await scrape(server), "sglang:utilization") == 1 / 2
        await server.http.post("/abort_request", json={"abort_all": True})
        engine_of_eight.silent = False
        await open_request

    serve(scenario, engine_of_eight, metrics=MetricsConfig())


def test_no_label_of_a_client_harms_the_page(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        for labels in (
            '{"team": "\\ud800"}',
            '{"team": "a\\"b\\\\c\\nd"}',
            '{"team": "\\u2028\\u0000"}',
            f'{{"team": "{"x" * 9000}"}}',
            f'{{"team": {"[" * 5000}{"]" * 5000}}}',
            '{"team": {"a": NaN}}',
            "\xff\xfe",
        ):
            body = {"text": "a", "sampling_params": {"max_new_tokens": 1}}
            headers = {b"x-custom-labels": labels.encode("latin-1")}
            response = await server.http.post("/generate", json=body, headers=headers)
            assert response.status_code == 200
        for accept in ("", OPEN_METRICS):
            response = await server.http.get("/metrics", headers={"accept": accept})
            assert response.status_code == 200
            parse = open_metrics_families if accept else text_string_to_metric_families
            (counted,) = (f for f in parse(response.text) if f.name == "sglang:num_requests")
            whole = [s for s in counted.samples if s.labels["is_streaming"] == "false"]
            assert sum(sample.value for sample in whole) == 7
            assert max(len(sample.labels["team"]) for sample in whole) == 128

    serve(scenario, engine(), metrics=MetricsConfig(custom_labels=("team",)))


def test_a_reader_that_fails_does_not_fail_the_request(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(output: Any) -> None:
        raise ValueError("what it cannot write")

    async def scenario(server: Any) -> None:
        await server.generate(text="abc", rid="r1", sampling_params={"max_new_tokens": 1})
        assert "Cannot log the end of request r1." in caplog.text

    serve(scenario, engine(), readers=[broken])


def test_requests_go_on_counting_while_a_page_is_written(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        async def generate(number: int) -> None:
            body = {"text": "a", "sampling_params": {"max_new_tokens": 2}}
            headers = {"x-custom-labels": f'{{"team": "{number}"}}'}
            response = await server.http.post("/generate", json=body, headers=headers)
            assert response.status_code == 200

        async def scrapes() -> None:
            for _ in range(10):
                assert (await server.http.get("/metrics")).status_code == 200

        await asyncio.gather(scrapes(), *map(generate, range(20)))
        found = await scrape(server)
        counted = sum(n for (name, _), n in found.items() if name == "sglang:num_requests_total")
        assert counted == 20

    serve(scenario, engine(), metrics=MetricsConfig(custom_labels=("team",)))
