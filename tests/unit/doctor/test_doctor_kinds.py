"""Kinds of logs that were once misread, each with several wordings, sizes and formats: loggers with
ranks and places, starved decode, growing queues, memory before graphs are captured, allocations that
fail while serving, tracebacks, and logs of other programs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from setpoint.core.errors import SourceError
from setpoint.doctor.checks.diagnose import diagnose
from setpoint.doctor.findings import Report
from setpoint.doctor.observations import Observations
from setpoint.doctor.readers.log.reader import read_chunks

LEADS = {
    "process": "2026-04-15 06:40:{:02d} INFO 4113 [{} scheduler_metrics_mixin.py:222] ",
    "milliseconds": "2026-04-15 06:40:{:02d},318 INFO 71 [{} scheduler.py:1040] ",
    "dash": "2026-04-15 06:40:{:02d},318 - INFO - [{} metrics_mixin.py:9] ",
    "stamp first": "[2026-04-15 06:40:{:02d} {} scheduler_metrics_mixin.py:222] ",
    "no place": "2026-04-15 06:40:{:02d} WARNING 9 [{}] ",
    "usual": "[2026-04-15 06:40:{:02d} {}] ",
}


def read(lines: Sequence[str]) -> Observations:
    (seen,) = read_chunks("server.log", [("\n".join(lines) + "\n").encode()])
    return seen


def report(lines: Sequence[str]) -> Report:
    return diagnose(read(lines))


def stamped(seconds: float) -> str:
    return f"[2025-11-02 10:{int(seconds) // 60:02d}:{int(seconds) % 60:02d} TP0]"


def decode(at: float, running: int, queue: int, usage: float, rate: float = 500.0) -> str:
    return (
        f"{stamped(at)} Decode batch, #running-req: {running}, #token: {int(30000 * usage)},"
        f" token usage: {usage:.2f}, cuda graph: True, gen throughput (token/s): {rate:.2f},"
        f" #queue-req: {queue}, "
    )


def prefill(at: float, tokens: int, running: int, queue: int, usage: float, seqs: int = 2) -> str:
    return (
        f"{stamped(at)} Prefill batch, #new-seq: {seqs}, #new-token: {tokens}, #cached-token: 0,"
        f" token usage: {usage:.2f}, #running-req: {running}, #queue-req: {queue}, "
    )


@pytest.mark.parametrize("lead", LEADS.values(), ids=LEADS)
@pytest.mark.parametrize("names", ["DP{0} TP{0} EP{0}", "DP{0} TP{0}", "DP{0}"])
def test_ranks_are_told_apart_in_every_format_of_a_logger(lead: str, names: str) -> None:
    lines = []
    for second in range(0, 40, 5):
        for rank in range(4):
            running, queue = (40, 61 + second) if rank == 3 else (8, 0)
            lines.append(
                lead.format(second, names.format(rank))
                + f"Decode batch, #running-req: {running}, #token: {2000 * running}, token usage:"
                f" {running / 80:.2f}, cuda graph: True, gen throughput (token/s): 260.00,"
                f" #queue-req: {queue}"
            )
    seen = read(lines)
    assert len(seen.ranks) == 4
    assert diagnose(seen).verdict == "rank-imbalance"


@pytest.mark.parametrize(
    ("size", "running", "usage"), [(1024, 218, 0.92), (512, 60, 0.95), (8192, 24, 0.91)]
)
@pytest.mark.parametrize("between", [5, 9, 40])
def test_decode_that_starves_beside_full_prefill_batches_is_not_healthy(
    size: int, running: int, usage: float, between: int
) -> None:
    lines, at, queue = [], 0.0, 180
    for _ in range(4):
        for _ in range(between):
            lines.append(prefill(at, size, running, queue, usage))
            at, queue = at + 2, queue + 3
        lines.append(decode(at - 1, running, queue, usage, rate=running * 1.03))
    assert report(lines).verdict == "prefill-budget"


def test_a_decode_line_after_every_prefill_is_no_starving() -> None:
    lines = []
    for turn in range(40):
        lines.append(prefill(4 * turn, 1024, 60, 90, 0.95))
        lines.append(decode(4 * turn + 3, 61, 90, 0.95, rate=1400.0))
    assert report(lines).verdict != "prefill-budget"


@pytest.mark.parametrize(("usage", "running"), [(0.89, 14), (0.87, 22), (0.88, 8), (0.86, 40)])
@pytest.mark.parametrize("seconds", [10, 60])
def test_a_queue_that_grows_beside_a_tight_pool_is_not_healthy(
    usage: float, running: int, seconds: int
) -> None:
    lines = [
        decode(seconds * turn, running + 5 * turn % 4, 20 + 11 * turn, usage + 0.01 * (turn % 2))
        for turn in range(24)
    ]
    assert report(lines).verdict == "kv-full"


def test_a_queue_that_stays_short_beside_a_tight_pool_is_healthy() -> None:
    lines = [decode(10 * turn, 60 + turn % 3, 4 + turn % 3, 0.88) for turn in range(24)]
    assert report(lines).verdict == "healthy"


ARGS = "server_args=ServerArgs(model_path='m', mem_fraction_static={}, max_total_tokens=None, tp_size=1)"


@pytest.mark.parametrize(("total", "left"), [(22.9, 3.8), (79.1, 14.5), (44.3, 11.2), (31.4, 9.9)])
def test_memory_before_graphs_are_captured_is_not_free_when_ready(
    total: float, left: float
) -> None:
    lines = [
        f"{stamped(0)} {ARGS.format(0.82)}",
        f"{stamped(1)} Load weight begin. avail mem={total} GB",
        f"{stamped(9)} Load weight end. type=A, dtype=torch.bfloat16, avail mem={total - 14:.2f} GB.",
        f"{stamped(10)} Memory pool end. avail mem={left} GB",
        f"{stamped(11)} Capture cuda graph begin. This can take up to several minutes.",
        f"{stamped(30)} max_total_num_tokens=60000, max_prefill_tokens=16384, context_len=32768",
        *(decode(60 + 5 * turn, 40 + turn % 3, 300, 0.97) for turn in range(30)),
    ]
    found = report(lines)
    raised = [
        finding.action
        for finding in found.findings
        if finding.action.flag == "--mem-fraction-static" and finding.action.direction == "increase"
    ]
    assert found.verdict == "kv-full"
    assert raised == []


SERVING = [
    "Traceback (most recent call last):",
    '  File "/srv/sglang/srt/managers/scheduler.py", line 1196, in run_scheduler_process',
    "    scheduler.event_loop_normal()",
    '  File "/srv/sglang/srt/managers/scheduler.py", line 325, in event_loop_normal',
    "    result = self.run_batch(batch)",
]


@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize("begins", [f"{stamped(0)} ", ""])
def test_a_full_workspace_is_neither_the_start_nor_the_memory_of_the_device(
    kind: str, begins: str
) -> None:
    first, *rest = SERVING
    error = (
        f"RuntimeError: Failed to allocate memory for batch_{kind}_tmp_v with size 402653184 and"
        " alignment 16 in AlignedAllocator"
    )
    found = report([begins + first, *rest, error])
    assert found.verdict == f"oom-{kind}"
    assert "SGLANG_FLASHINFER_WORKSPACE_SIZE" in found.findings[0].action.text


def test_an_allocation_that_fails_in_the_serving_loop_is_not_of_the_start() -> None:
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert report([*SERVING, error]).verdict in ("oom-prefill", "oom-decode")


@pytest.mark.parametrize("flag", ["`--max-running-requests`", "--max-running-requests"])
def test_request_slots_are_no_memory(flag: str) -> None:
    found = report(
        [
            decode(0, 4, 0, 0.01),
            f"{stamped(1)} Scheduler hit an exception: Traceback (most recent call last):",
            '  File "/srv/sglang/srt/mem_cache/common.py", line 299, in alloc_req_slots',
            f"RuntimeError: alloc_req_slots runs out of memory. Please set a smaller number for {flag}.",
        ]
    )
    assert found.verdict == "server-dead"
    action = found.findings[0].action
    assert (action.flag, action.direction) == ("--max-running-requests", "decrease")


@pytest.mark.parametrize("free", ["52 MB", "0 MB", "812 MB", "1 GB"])
def test_a_runtime_without_resources_and_memory_is_out_of_memory(free: str) -> None:
    found = report([*ROCM, f"{HSA} Available Free mem : {free}", "Fatal Python error: Aborted"])
    assert found.verdict == "oom-prefill"


def test_a_runtime_without_resources_beside_free_memory_lacks_others() -> None:
    found = report([*ROCM, f"{HSA} Available Free mem : 41210 MB", "Fatal Python error: Aborted"])
    assert found.verdict == "server-dead"


ROCM = [decode(turn, 4, 0, 0.05) for turn in range(3)] + [prefill(4, 8192, 4, 0, 0.05, seqs=1)]
HSA = (
    ":0:rocdevice.cpp:3582 : Queue 0x7f1c0a400000 aborting with error :"
    " HSA_STATUS_ERROR_OUT_OF_RESOURCES: The runtime failed to allocate the necessary resources."
)


@pytest.mark.parametrize(
    "error",
    [
        "Exception: Capture cuda graph failed: BatchDecode failed with error no kernel image is"
        " available for execution on the device. Possible solutions:",
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        "ValueError: Unsupported head size 80",
        "AssertionError: the page table is broken",
        "torch.AcceleratorError: CUDA error: device-side assert triggered",
    ],
)
def test_the_last_line_of_a_traceback_is_quoted(error: str) -> None:
    found = report(
        [
            "Traceback (most recent call last):",
            '  File "/srv/sglang/srt/model_executor/model_runner.py", line 103, in __init__',
            "    self.init_cuda_graphs()",
            '  File "/usr/lib/python3/site-packages/torch/ops.py", line 7, in __call__',
            "    return self._op(*args)",
            error,
        ]
    )
    first = found.findings[0]
    assert error[:60] in first.summary
    assert "model_runner.py:103" in first.summary
    assert any(each.text == error and each.line == 6 for each in first.evidence)


def test_a_capture_that_fails_on_the_device_is_tried_with_less_memory_first() -> None:
    found = report(
        [
            "Traceback (most recent call last):",
            '  File "/srv/sglang/srt/model_executor/cuda_graph_runner.py", line 201, in __init__',
            "Exception: Capture cuda graph failed: CUDA error: an illegal memory access was"
            " encountered",
        ]
    )
    assert found.findings[0].action.text.startswith("Lower --mem-fraction-static")


@pytest.mark.parametrize("count", [12, 40, 90])
def test_retractions_without_any_batch_line_are_enough(count: int) -> None:
    lines = [
        f"{stamped(3 * turn)} KV cache pool is full. Retract requests. #retracted_reqs: 2,"
        f" #new_token_ratio: 0.5000 -> 0.7300"
        for turn in range(count)
    ]
    assert report(lines).verdict == "kv-optimistic"


@pytest.mark.parametrize("running", [1, 2])
def test_a_pool_that_hardly_holds_two_requests_is_too_small(running: int) -> None:
    lines = [decode(5 * turn, running, 6, 1.0) for turn in range(12)]
    lines.insert(
        6,
        f"{stamped(27)} Decode out of memory happened. #retracted_reqs: 1, #new_token_ratio: 0.7 -> 0.9",
    )
    assert report(lines).verdict in ("kv-full", "kv-optimistic")


def test_three_lines_of_a_beginning_are_said_to_be_one() -> None:
    lines = [prefill(0, 500, 0, 0, 0.0), prefill(1, 500, 2, 1, 0.1), decode(2, 4, 1, 0.2)]
    found = report(lines)
    assert found.verdict == "not-enough-evidence"
    assert "at least 3" not in found.summary
    assert "first seconds" in found.summary


OTHERS = {
    "vLLM": [
        "(APIServer pid=812) INFO 11-20 10:00:00 [loggers.py:236] Engine 000: Avg prompt throughput: 10.1 tokens/s, Avg generation throughput: 99.0 tokens/s, Running: 4 reqs, Waiting: 0 reqs, GPU KV cache usage: 3.1%, Prefix cache hit rate: 0.0%",
        "INFO 02-10 10:00:00 [metrics.py:455] Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 31.2 tokens/s, Running: 1 reqs, Swapped: 0 reqs, Pending: 0 reqs",
        "(EngineCore_DP0 pid=99) INFO 01-20 10:00:00 [core.py:77] Initializing a V1 LLM engine (v0.11.0) with config: model='m'",
        "(Worker_TP1 pid=99) INFO 01-20 10:00:00 [gpu_model_runner.py:2653] Model loading took 14.2 GiB and 9.1 seconds",
        "(APIServer pid=1) INFO 03-02 10:00:00 [loggers.py:257] Engine 001: Avg prompt throughput: 0.0 tokens/s, Running: 4 reqs, Waiting: 9 reqs, KV cache usage: 12.0%",
    ],
    "llama.cpp": [
        "srv  update_slots: all slots are idle",
        "slot update_slots: id  0 | task 12 | prompt processing progress, n_tokens = 512, progress = 0.25",
        "srv  log_server_r: request: POST /v1/chat/completions 127.0.0.1 200",
        "slot print_timing: id  2 | task 7 | prompt eval time =  91.2 ms /  33 tokens",
        "srv    load_model: loading model 'm.gguf'",
        "slot launch_slot_: id  0 | task 0 | processing task",
    ],
}


@pytest.mark.parametrize(
    ("program", "line"), [(name, line) for name, lines in OTHERS.items() for line in lines]
)
def test_the_log_of_another_program_is_named(program: str, line: str) -> None:
    with pytest.raises(SourceError, match=f"is a log of {program}. The doctor reads logs of Set"):
        read([line] * 20)
