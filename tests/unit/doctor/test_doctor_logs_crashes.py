"""Logs of servers that fail, and of servers whose memory is badly divided, in several generations:
what is found, and which option is to change in which direction."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from setpoint.doctor.checks.diagnose import diagnose
from setpoint.doctor.findings import Report
from setpoint.doctor.readers.log.reader import read_chunks

ARGS = "server_args=ServerArgs(model_path='/models/m', tp_size={tp}, mem_fraction_static={fraction}, max_running_requests=None, chunked_prefill_size={chunk}, disable_cuda_graph={eager}, cuda_graph_max_bs=None, attention_backend={backend}, schedule_conservativeness=1.0, max_total_tokens=None)"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 79.10 GiB of which 98.00 MiB is free. Process 3877 has 78.89 GiB memory in use."
OLD_OOM = "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB (GPU 0; 79.10 GiB total capacity; 77.00 GiB already allocated; 98.00 MiB free; 77.50 GiB reserved in total by PyTorch)"
BEGIN = "Load weight begin. avail mem=78.60 GB"
END = "Load weight end. type=M, dtype=torch.bfloat16, avail mem=63.00 GB, mem usage=15.60 GB."
POOL = "KV Cache is allocated. #tokens: 400000, K size: 24.41 GB, V size: 24.41 GB"
POOL_END = "Memory pool end. avail mem=12.10 GB"
READY = "max_total_num_tokens=400000, chunked_prefill_size={chunk}, max_prefill_tokens=16384, max_running_requests=2048, context_len=32768, available_gpu_mem={free} GB"
STAMPS = {
    "2024": "[{time} TP0] ",
    "2025": "[2025-05-01 {time} TP0] ",
    "2026": "[2026-05-01 {time}.250 DP0 TP0] ",
}


class Log:
    """Lines of one generation, one second apart."""

    def __init__(self, generation: str = "2025", **options: Any) -> None:
        self.generation = generation
        self.options = {
            "tp": 1,
            "fraction": 0.88,
            "chunk": 8192,
            "eager": False,
            "backend": None,
            "free": 6.5,
        } | options
        self.lines: list[str] = []
        self._clock = itertools.count()

    def say(self, *texts: str) -> Log:
        for text in texts:
            second = next(self._clock)
            time = f"{10 + second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}"
            self.lines.append(
                STAMPS[self.generation].format(time=time) + text.format(**self.options)
            )
        return self

    def raw(self, *texts: str) -> Log:
        self.lines += texts
        return self

    def crash(self, oom: str, *frames: str) -> Log:
        self.say("Scheduler hit an exception: Traceback (most recent call last):")
        for frame in frames:
            self.raw(f'  File "/sgl/srt/x.py", line 1, in {frame}', "    call()")
        return self.raw(oom, "").say(
            "Received sigquit from a child process. It usually means the child failed."
        )

    def start(self) -> Log:
        return self.say(
            ARGS, BEGIN, END, POOL, POOL_END, READY, "The server is fired up and ready to roll!"
        )

    def decode(
        self, running: int, queue: int, usage: float, graph: bool = True, tokens: int = 0
    ) -> Log:
        mark, shown = (
            "," if self.generation == "2026" else ".",
            f"cuda graph: {graph}, " if self.generation != "2024" else "",
        )
        return self.say(
            f"Decode batch{mark} #running-req: {running}, #token: {tokens or int(usage * 4e5)}, token usage: {usage:.2f}, {shown}gen throughput (token/s): {running * 20.5:.2f}, #queue-req: {queue}"
        )

    def prefill(self, new: int, queue: int, running: int, usage: float) -> Log:
        mark, rate = ",.", "cache hit rate: 1.00%, "
        return self.say(
            f"Prefill batch{mark[self.generation != '2026']} #new-seq: 1, #new-token: {new}, #cached-token: 0, {rate if self.generation == '2024' else ''}token usage: {usage:.2f}, #running-req: {running}, #queue-req: {queue}"
        )

    def serve(
        self, running: int, queue: int, usage: float, graph: bool = True, num: int = 40
    ) -> Log:
        for index in range(num):
            self.decode(running + index % 3, max(queue + index % 5 - 2, 0), usage, graph)
            if index % 5 == 0:
                self.prefill(500, queue, running, usage)
        return self

    def report(self) -> Report:
        (seen,) = read_chunks("server.log", ["\n".join(self.lines).encode() + b"\n"])
        return diagnose(seen)


def asked(report: Report) -> tuple[str, str | None, str | None, Any]:
    action = report.findings[0].action
    return report.verdict, action.flag, action.direction, action.value


@pytest.fixture(params=STAMPS)
def generation(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_weights_that_do_not_fit_need_more_devices(generation: str) -> None:
    log = Log(generation).say(ARGS, BEGIN).crash(OOM, "load_model", "_initialize_model")
    assert asked(log.report()) == ("oom-init", "--tp-size", "increase", 2)


def test_another_process_on_the_device_is_named() -> None:
    log = Log().say(ARGS, BEGIN.replace("78.60", "30.20")).crash(OOM, "load_model")
    report = log.report()
    assert asked(report) == ("oom-init", None, None, None)
    assert "30.2 of 79.1 GB" in report.summary


def test_a_static_share_without_room_for_a_pool_must_go_up(generation: str) -> None:
    end = "Load weight end. type=M, avail mem=14.00 GB, mem usage=64.60 GB."
    error = "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: self.server_args.mem_fraction_static=0.8"
    log = Log(generation, fraction=0.8).say(ARGS, BEGIN, end).crash(error, "init_memory_pool")
    assert asked(log.report()) == ("oom-init", "--mem-fraction-static", "increase", 0.92)


def test_a_pool_that_does_not_fit_must_shrink(generation: str) -> None:
    log = (
        Log(generation, fraction=0.95)
        .say(ARGS, BEGIN, END)
        .crash(OOM, "init_memory_pool", "_create_buffers")
    )
    verdict, flag, direction, value = asked(log.report())
    assert (verdict, flag, direction) == ("oom-init", "--mem-fraction-static", "decrease")
    assert 0.85 < value < 0.93


def test_graphs_that_do_not_fit_lower_the_share(generation: str) -> None:
    log = Log(generation, fraction=0.9).say(
        ARGS,
        BEGIN,
        END,
        POOL,
        POOL_END,
        "Capture cuda graph begin. This can take up to several minutes. avail mem=1.10 GB",
    )
    log.crash(f"Exception: Capture cuda graph failed: {OOM[24:]}", "init_cuda_graphs").raw(
        "Possible solutions:", "1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)"
    )
    verdict, flag, direction, value = asked(log.report())
    assert (verdict, flag, direction) == ("oom-init", "--mem-fraction-static", "decrease")
    assert value < 0.88


def test_graphs_for_large_batches_are_too_many() -> None:
    log = (
        Log()
        .say(
            ARGS.replace("cuda_graph_max_bs=None", "cuda_graph_max_bs=512"),
            BEGIN,
            END,
            POOL,
            POOL_END,
        )
        .crash(OOM, "capture_one_batch_size", "CudaGraphRunner")
    )
    assert asked(log.report()) == ("oom-init", "--cuda-graph-max-bs", "decrease", 256)


@pytest.mark.parametrize(
    "oom", [OOM, OLD_OOM, "RuntimeError: HIP out of memory. Tried to allocate 1.50 GiB."]
)
def test_memory_that_runs_out_in_a_prefill(generation: str, oom: str) -> None:
    log = Log(generation).start().serve(40, 5, 0.4).decode(40, 5, 0.4).crash(oom, "forward_extend")
    assert asked(log.report()) == ("oom-prefill", "--chunked-prefill-size", "decrease", 4096)


def test_small_chunks_leave_the_pool_to_shrink() -> None:
    log = Log(chunk=2048).start().serve(40, 5, 0.4).crash(OOM, "forward_extend")
    verdict, flag, direction, value = asked(log.report())
    assert (verdict, flag, direction) == ("oom-prefill", "--mem-fraction-static", "decrease")
    assert value == 0.84


def test_prompts_in_one_piece_are_to_be_split() -> None:
    log = Log(chunk=-1).start().serve(40, 5, 0.4).crash(OOM, "forward_extend")
    assert asked(log.report()) == ("oom-prefill", "--chunked-prefill-size", "set", 4096)


def test_memory_that_runs_out_in_decode(generation: str) -> None:
    log = Log(generation).start().serve(200, 5, 0.7).crash(OOM, "forward_decode")
    assert asked(log.report()) == ("oom-decode", "--max-running-requests", "decrease", 160)


def test_without_a_traceback_the_last_batch_tells_where() -> None:
    start = Log().start().serve(200, 5, 0.7)
    assert Log.raw(start.decode(200, 5, 0.7), OOM).report().verdict == "oom-decode"
    start = Log().start().serve(200, 5, 0.7)
    assert Log.raw(start.prefill(8192, 5, 10, 0.7), OOM).report().verdict == "oom-prefill"


def test_decode_with_few_requests_needs_a_smaller_pool() -> None:
    log = Log().start().serve(4, 0, 0.7).crash(OOM, "forward_decode")
    assert asked(log.report())[:3] == ("oom-decode", "--mem-fraction-static", "decrease")


@pytest.mark.parametrize(
    "texts",
    [
        ["Watchdog timeout (self.watchdog_timeout=300)"],
        [
            "Scheduler hit an exception: Traceback (most recent call last):",
            "Received sigquit from a child process. It usually means the child failed.",
        ],
        ["SIGQUIT received. signum=None, frame=None. It usually means one child failed."],
        ["RuntimeError: CUDA error: an illegal memory access was encountered"],
    ],
)
def test_a_server_that_ended(generation: str, texts: list[str]) -> None:
    report = Log(generation).start().serve(40, 5, 0.4).say(*texts).report()
    assert asked(report) == ("server-dead", None, None, None)


def test_a_killed_process_points_to_the_machines_memory() -> None:
    log = (
        Log()
        .start()
        .serve(40, 5, 0.4)
        .raw("./run.sh: line 22: 103525 Killed                  python -m sglang.launch_server")
    )
    assert "machine's own memory" in log.report().summary


def test_the_device_error_of_a_traceback_is_the_reason() -> None:
    log = Log().start().serve(40, 5, 0.4)
    report = log.crash("RuntimeError: CUDA error: an illegal memory access", "forward").report()
    assert report.verdict == "server-dead"
    assert "device error" in report.summary


def test_a_traceback_of_one_request_is_no_end() -> None:
    log = (
        Log()
        .start()
        .serve(40, 5, 0.4)
        .raw(
            "ERROR:    Exception in ASGI application",
            "Traceback (most recent call last):",
            '  File "a.py", line 1',
            "ValueError: bad json",
        )
    )
    assert log.serve(40, 5, 0.4).report().verdict not in ("server-dead", "oom-prefill")


@pytest.mark.parametrize(
    "message",
    [
        "ValueError: token_to_kv_pool_allocator memory leak detected! self.max_total_num_tokens=270331, available_size=644, evictable_size=269628, protected_size=0",
        "Warning: available_size=35244, max_total_num_token=42308\nKV cache pool leak detected!",
        "UserWarning: req_to_token_pool memory leak detected!available_size=3756, total_size=3757",
        "KV cache accounting is broken and was rebuilt empty: free + evictable is 3 short",
    ],
)
def test_a_leak_is_an_error_of_the_server(generation: str, message: str) -> None:
    log = (
        Log(generation)
        .start()
        .serve(40, 5, 0.4)
        .say("Scheduler hit an exception: Traceback (most recent call last):")
        .raw(*message.split("\n"))
    )
    report = log.say(
        "Received sigquit from a child process. It usually means the child failed."
    ).report()
    assert asked(report) == ("pool-leak", None, None, None)
    assert report.findings[0].evidence[0].line > 50
    assert all(source.notes == [] for source in report.sources)


def test_more_tokens_than_the_contexts_can_hold_are_lost() -> None:
    log = Log().start().serve(40, 5, 0.4)
    for _ in range(12):
        log.decode(2, 30, 0.96, tokens=384_000)  # two contexts hold 65,536
    assert log.report().verdict == "pool-leak"


def test_idle_memory_and_a_full_pool(generation: str) -> None:
    report = Log(generation, fraction=0.6, free=27.5).start().serve(60, 80, 0.96).report()
    verdict, flag, direction, value = asked(report)
    assert (verdict, flag, direction) == ("mem-underused", "--mem-fraction-static", "increase")
    assert value == pytest.approx(0.6 + (27.5 - 6.4) / 78.6, abs=0.01)


@pytest.mark.parametrize(("free", "usage", "queue"), [(27.5, 0.4, 0), (7.5, 0.96, 80)])
def test_memory_that_is_not_needed_or_not_there(free: float, usage: float, queue: int) -> None:
    report = Log(free=free).start().serve(60, queue, usage).report()
    assert "mem-underused" not in [finding.cause for finding in report.findings]


def test_hardly_any_memory_left(generation: str) -> None:
    report = Log(generation, fraction=0.93, free=1.8).start().serve(160, 100, 0.93).report()
    verdict, flag, direction, value = asked(report)
    assert (verdict, flag, direction) == ("mem-headroom-low", "--mem-fraction-static", "decrease")
    assert value == pytest.approx(0.93 - (6.4 - 1.8) / 78.6, abs=0.01)


def test_the_guides_good_range_is_no_finding(generation: str) -> None:
    for free in (4.64, 6.5, 8.0):
        assert (
            Log(generation, free=free).start().serve(160, 200, 0.93).report().verdict == "healthy"
        )


@pytest.mark.parametrize("generation", ["2025", "2026"])
def test_batches_larger_than_the_largest_graph(generation: str) -> None:
    log = Log(generation).start().say("Capture cuda graph bs [1, 2, 4, 8, 16, 24, 32]")
    assert asked(log.serve(165, 120, 0.91, graph=False).report()) == (
        "graph-miss",
        "--cuda-graph-max-bs",
        "increase",
        256,
    )


def test_graphs_that_are_switched_off(generation: str) -> None:
    report = Log(generation, eager=True).start().serve(165, 120, 0.91, graph=False).report()
    assert asked(report) == ("graph-miss", "--disable-cuda-graph", "set", False)


def test_missed_graphs_that_a_larger_one_would_not_change() -> None:
    log = (
        Log()
        .start()
        .say("Capture cuda graph bs [1, 2, 4, 8, 256]")
        .serve(165, 120, 0.91, graph=False)
    )
    assert "graph-miss" not in [finding.cause for finding in log.report().findings]


def test_a_small_model_over_several_devices() -> None:
    assert Log(tp=4).start().serve(160, 200, 0.93).report().verdict == "healthy"
    log = (
        Log(tp=4)
        .say(ARGS, BEGIN, END.replace("15.60", "3.90"), POOL, POOL_END, READY)
        .serve(160, 200, 0.93)
    )
    assert asked(log.report()) == ("parallelism-suboptimal", "--tp-size", "decrease", 1)


def test_a_slow_backend() -> None:
    report = Log(backend="'torch_native'").start().serve(160, 200, 0.93).report()
    assert asked(report) == ("backend-suboptimal", "--attention-backend", "set", "fa3")


LOST = (
    "Prefill out of memory: CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total"
    " capacity of 79.10 GiB of which 98.00 MiB is free"
)
"""What Setpoint says of a step that its device has no memory for."""


def test_a_step_that_setpoint_lost_twice_is_an_oom_of_its_kind() -> None:
    log = Log("2026").start().serve(20, 0, 0.5)
    log.say("Fallback: a step computes at most 4096 prompt tokens (" + LOST + "; a start with …)")
    log.serve(20, 0, 0.5, num=2).say("The engine ends: a step failed as a whole. Requests: a")
    log.raw(
        "Traceback (most recent call last):",
        '  File "/x/site-packages/setpoint/scheduler/loop.py", line 1, in _lose',
        "setpoint.core.errors.OutOfMemoryError: " + LOST + ". What would fit: a"
        " --mem-fraction-static that is 0.02 (1536 MiB) lower, a smaller --chunked-prefill-size",
    )
    verdict, flag, direction, _ = asked(log.report())
    assert (verdict, flag, direction) == ("oom-prefill", "--chunked-prefill-size", "decrease")


def test_graphs_that_were_left_out_are_no_failure() -> None:
    log = Log("2026").say(ARGS, BEGIN, END, POOL, POOL_END)
    log.say(
        "Fallback: steps run partly eagerly (there is no memory for graphs of decode steps with 512"
        " requests (CUDA out of memory. Tried to allocate 1.50 GiB). Lower --cuda-graph-max-bs)"
    )
    log.say(READY, "The server is fired up and ready to roll!").serve(20, 0, 0.5, num=3)
    assert not any(found.cause.startswith("oom") for found in log.report().findings)


def test_a_start_without_memory_for_a_graph_is_told() -> None:
    log = Log("2026").say(ARGS, BEGIN, END, POOL, POOL_END)
    log.say(
        "Engine 0 died: Capture of CUDA graphs failed: there is no memory for a single one of decode"
        " steps: CUDA out of memory. Tried to allocate 512.00 MiB. Lower --cuda-graph-max-bs"
    )
    report = log.report()
    assert report.verdict == "oom-init"
    assert "capturing the CUDA graphs failed" in report.findings[0].summary
