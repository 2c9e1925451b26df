"""What a real server says about its requests: the engine and the frontend agree on every series,
and spans, log and files have every request."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from setpoint.observe.catalogue import SERIES
from setpoint_testing.otlp import collecting
from setpoint_testing.server_process import ServerProcess, running_server, wait_until

ABSENT = {
    "sglang:kv_transfer_alloc_ms",
    "sglang:kv_transfer_bootstrap_ms",
    "sglang:kv_transfer_latency_ms",
    "sglang:kv_transfer_speed_gb_s",
    "sglang:kv_transfer_total_mb",
    "sglang:num_bootstrap_failed_reqs_total",
    "sglang:num_decode_prealloc_queue_reqs",
    "sglang:num_decode_transfer_queue_reqs",
    "sglang:num_prefill_bootstrap_queue_reqs",
    "sglang:num_prefill_inflight_queue_reqs",
    "sglang:num_transfer_failed_reqs_total",
    "setpoint:binding_limit",
    "setpoint:model_loaded",
    "setpoint:model_waiting_requests",
    "setpoint:model_loads_total",
    "setpoint:model_load_seconds_total",
    "setpoint:prefill_server_up",
    "setpoint:prompts_without_prefill_server_total",
    "setpoint:expert_balancedness",
    "setpoint:expert_rank_tokens",
    "setpoint:expert_rebalances",
    "setpoint:unused_experts",
    "sglang:eplb_balancedness",
    "sglang:prefetched_tokens_total",
    "sglang:backuped_tokens_total",
    "sglang:storage_prefetch_unfulfilled_tokens_total",
    "sglang:hicache_dropped_tokens_total",
    "setpoint:cache_tier_seconds_total",
    "setpoint:cache_tier_lost_blocks_total",
    "setpoint:cache_tier_off",
    "setpoint:cache_tier_thrifty",
    "setpoint:cache_tier_blocks",
    "setpoint:cache_tier_bytes",
}
"""Series of the catalogue that this server does not show: no limit has bound, the model has no
experts, is the only one, no other server computes a part, and there are no cache tiers."""


def samples(url: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Name of a sample and those of its labels that differ between samples -> its value."""
    common = {"model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank"}
    return {
        (sample.name, tuple(sorted((k, v) for k, v in sample.labels.items() if k not in common))): (
            sample.value
        )
        for family in text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=30).text)
        for sample in family.samples
    }


def page(url: str) -> dict[str, float]:
    """Name of a sample -> the sum of its values."""
    response = httpx.get(f"{url}/metrics", timeout=30)
    assert response.status_code == 200
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


def test_a_real_server_shows_its_work(tiny_model: Path, tmp_path: Path) -> None:
    """Metrics, traces, request logs and files of figures, all of one run."""
    options = ["--model-path", str(tiny_model), "--dtype", "float32", "--skip-server-warmup"]
    options += ["--enable-metrics", "--enable-mfu-metrics", "--max-running-requests", "1"]
    options += ["--log-requests", "--log-requests-format", "json", "--log-requests-level", "1"]
    options += ["--enable-request-time-stats-logging", "--enable-trace"]
    options += ["--export-metrics-to-file", "--export-metrics-to-file-dir", str(tmp_path / "out")]
    with collecting() as collector:
        options += ["--otlp-traces-endpoint", collector.url]
        with running_server(tmp_path / "server", *options) as server:
            sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
            answers = server.generate(text=["a b c", "d e f"], sampling_params=sampling)
            check_metrics(server, answers)
    ids = {answer["meta_info"]["id"] for answer in answers}
    lines = [json.loads(line) for line in server.errors.splitlines() if line.startswith("{")]
    assert [line["event"] for line in lines] == ["request.received", *["request.finished"] * 2]
    assert sum("ReqTimeStats(rid=" in line for line in server.messages) == 2
    (file,) = (tmp_path / "out").iterdir()
    assert {json.loads(line)["id"] for line in file.read_text().splitlines()} == ids
    # Sent at the latest when the server ends.
    assert collector.services == {"setpoint"}
    assert sum(span.name == "request" for span in collector.spans) == 2
    assert len(collector.spans) == 2 * 5


def check_names_of_sglang(found: dict[tuple[str, tuple[tuple[str, str], ...]], float]) -> None:
    """Series that dashboards of SGLang 0.5.23 read, with their labels."""
    bounds = ["0", "1", "2", "3", "5", "7", "10", "20", "50", "100", "200", "+Inf"]
    for name in ("sglang:routing_key_running_req_count", "sglang:routing_key_all_req_count"):
        ranges = {labels for each, labels in found if each == name}
        assert ranges == {(("gt", low), ("le", high)) for low, high in pairwise(bounds)}
    assert found["sglang:prefill_queue_depth", ()] == 0
    assert found["sglang:decode_queue_depth", ()] == 0
    phases = {
        dict(labels)["phase"]: value
        for (name, labels), value in found.items()
        if name == "sglang:startup_time_seconds"
    }
    assert phases.keys() == {"load_weight", "kv_cache_allocation", "scheduler_e2e", "tokenizer_e2e"}
    assert 0 < phases["load_weight"] < phases["scheduler_e2e"] < phases["tokenizer_e2e"]
    assert 0 < phases["kv_cache_allocation"] < phases["scheduler_e2e"]
    assert found["sglang:process_cpu_seconds_total", (("component", "tokenizer"),)] > 0
    assert found["sglang:startup_available_gpu_memory_gb", ()] > 0
    stage = "sglang:scheduler_stage_seconds_total"
    overlap = ("forward_overlap", "false")
    assert found[stage, (("category", "run_batch"), overlap)] > 0


def check_estimates(server: ServerProcess, found: dict[str, float], answers: Any) -> None:
    """The estimated work of these requests by hand, by the tiny model's dimensions: a prompt that
    nothing of is cached, and seven steps of decode for each, because the last token is not computed."""
    layers, hidden, inner, q, kv = 2, 48, 80, 64, 32
    flops = 0
    for answer in answers:
        meta = answer["meta_info"]
        computed = range(
            meta["cached_tokens"], meta["prompt_tokens"] + meta["completion_tokens"] - 1
        )
        weights = 2 * hidden * q + 2 * hidden * kv + 3 * hidden * inner
        pairs = sum(position + 1 for position in computed)
        flops += layers * (2 * weights * len(computed) + 4 * q * pairs)
    assert found["sglang:estimated_flops_per_gpu_total"] == flops
    num_steps = found["sglang:cuda_graph_passes_total"]
    read = found["sglang:estimated_read_bytes_per_gpu_total"]
    assert read > num_steps * found["sglang:weight_memory_usage_gb"] * 2**30 * 0.7
    assert found["sglang:estimated_write_bytes_per_gpu_total"] > 0
    assert any("est. prefill TFLOPS/s (per GPU): " in each for each in server.messages)


def check_metrics(server: ServerProcess, answers: Any) -> None:
    """Every series is there and counts these two requests; a stopped engine leaves its figures."""
    found = page(server.url)
    shown = {*found, *(re.sub("_(bucket|sum|count)$", "", name) for name in found)}
    assert {series.shown_name for series in SERIES} - shown == ABSENT
    check_names_of_sglang(samples(server.url))
    assert found["sglang:generation_tokens_total"] == 16
    check_estimates(server, found, answers)
    assert found["sglang:inter_token_latency_seconds_count"] == 14
    assert found["sglang:queue_time_seconds_count"] == 2
    assert found["setpoint:queue_refusals_total"] > 0
    assert found["sglang:startup_time_seconds"] > 0
    waits = [answer["meta_info"]["queue_time"] for answer in answers]
    assert sum(waits) <= found["sglang:queue_time_seconds_sum"] + 1e-6
    assert max(waits) > 0
    assert all(answer["meta_info"]["prefill_finished_time"] > 0 for answer in answers)
    assert server.engine is not None
    server.engine.suspend()
    wait_until(lambda: page(server.url)["setpoint:engine_up"] == 0)
    stopped = page(server.url)
    assert stopped["sglang:generation_tokens_total"] == 16
    assert stopped["sglang:num_pages"] == found["sglang:num_pages"]
    server.engine.resume()
    wait_until(lambda: page(server.url)["setpoint:engine_up"] == 1)
