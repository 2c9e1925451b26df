"""Log lines that people published: in SGLang's guides and in GitHub threads. Only the lines that a
verdict needs."""

from __future__ import annotations

from cases import Change, Label, Written

SGLANG = "https://github.com/sgl-project/sglang"


def public(
    name: str,
    cause: str,
    source: str,
    why: str,
    lines: str,
    *,
    acceptable: tuple[str, ...] = (),
    action: Change | None = None,
    other_actions: tuple[Change, ...] = (),
    forbidden: tuple[Change, ...] = (),
    generation: str = "sglang-2025",
) -> Written:
    label = Label(
        cause=cause, why=why, acceptable=acceptable, action=action, other_actions=other_actions, forbidden=forbidden
    )  # fmt: skip
    return Written(
        name=f"public-{name}", label=label, generation=generation, text=lines.lstrip("\n").replace(",\n", ", \n").encode(),
        made_by=f"Public lines. {why}", source=source,
    )  # fmt: skip


LESS_CAREFUL = ("--schedule-conservativeness", "decrease")
SHORT = ("not-enough-evidence",)
EXAMPLE = (
    "One line shows no lasting state. The guide prints it as what full load looks like, although its"
    " own rule (usage below 0.9 and a queue) would call it too conservative."
)

GUIDES = (
    public(
        "guide-2024", "not-enough-evidence", "SGLang's guide on hyperparameter tuning, 2024", EXAMPLE,
        """
Decode batch. #running-req: 233, #token: 370959, token usage: 0.82, gen throughput (token/s): 4594.01, #queue-req: 317
""", acceptable=("healthy",), generation="sglang-2024",
    ),
    public(
        "guide-zh-2025", "not-enough-evidence", "A Chinese guide on hyperparameter tuning of SGLang, 2025",
        "A ready line and one decode line show no lasting state; both are the guide's examples of a good one.",
        """
[2025-11-11 13:01:09 TP0] max_total_num_tokens=1522816, chunked_prefill_size=1024, max_prefill_tokens=2048, max_running_requests=4096, context_len=32768, available_gpu_mem=4.64 GB
Decode batch. #running-req: 229, #token: 1320576, token usage: 1.00, cuda graph: True, gen throughput (token/s): 2498.69, #queue-req: 27,
""", acceptable=("healthy",),
    ),
    public(
        "guide-2026", "not-enough-evidence", "SGLang's guide on hyperparameter tuning, 2026",
        "The examples of the guide, one line of each kind: no lasting state.",
        """
max_total_num_tokens=665690, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=4096, context_len=65536, available_gpu_mem=13.50 GB
Decode batch. #running-req: 233, #token: 370959, token usage: 0.82, cuda graph: True, gen throughput (token/s): 4594.01, #queue-req: 317
KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_token_ratio: 0.9998 -> 1.0000
""", acceptable=("healthy",),
    ),
)  # fmt: skip

FIVE_RUN = "\n".join(
    f"[2025-03-11 16:44:{27 + second}] [2025-03-11 01:44:{27 + second} TP0] Decode batch."
    f" #running-req: 5, #token: {tokens}, token usage: 0.61, gen throughput (token/s): {rate},"
    " #queue-req: 0"
    for second, tokens, rate in (
        (0, 266623, "136.00"), (1, 266823, "136.01"), (3, 267023, "135.96"), (4, 267223, "136.00"),
        (6, 267423, "135.96"), (7, 267623, "135.95"), (9, 267823, "135.92"),
    )
)  # fmt: skip

LOADS = (
    public(
        "3186-slow-h200", "client-bound", f"{SGLANG}/issues/3186",
        "28 requests run on an H200 with a small model, the pool is at 0.02 and nothing waits.",
        """
[2025-01-27 11:13:24 TP0] Prefill batch. #new-seq: 2, #new-token: 791, #cached-token: 180, cache hit rate: 11.56%, token usage: 0.02, #running-req: 28, #queue-req: 0
""", acceptable=SHORT, forbidden=(LESS_CAREFUL,), generation="sglang-2024",
    ),
    public(
        "10053-one-user", "client-bound", f"{SGLANG}/issues/10053",
        "One request at a time, with pauses between.",
        """
[2025-09-03 18:33:18 TP0] Prefill batch. #new-seq: 1, #new-token: 103, #cached-token: 1, token usage: 0.00, #running-req: 0, #queue-req: 0,
[2025-09-03 18:33:19 TP0] Decode batch. #running-req: 1, #token: 137, token usage: 0.00, cuda graph: True, gen throughput (token/s): 1.06, #queue-req: 0,
[2025-09-03 18:33:19 TP0] Decode batch. #running-req: 1, #token: 177, token usage: 0.00, cuda graph: True, gen throughput (token/s): 84.20, #queue-req: 0,
[2025-09-03 18:33:31] INFO:     192.168.30.81:35262 - "POST /v1/chat/completions HTTP/1.1" 200 OK
[2025-09-03 18:33:31 TP0] Prefill batch. #new-seq: 1, #new-token: 18, #cached-token: 184, token usage: 0.00, #running-req: 0, #queue-req: 0,
[2025-09-03 18:33:32 TP0] Decode batch. #running-req: 1, #token: 234, token usage: 0.00, cuda graph: True, gen throughput (token/s): 3.17, #queue-req: 0,
[2025-09-03 18:33:32 TP0] Decode batch. #running-req: 1, #token: 274, token usage: 0.00, cuda graph: True, gen throughput (token/s): 81.97, #queue-req: 0,
[2025-09-03 18:33:41] INFO:     192.168.30.81:40312 - "POST /v1/chat/completions HTTP/1.1" 200 OK
[2025-09-03 18:33:41 TP0] Prefill batch. #new-seq: 1, #new-token: 15, #cached-token: 275, token usage: 0.00, #running-req: 0, #queue-req: 0,
""", acceptable=SHORT, forbidden=(LESS_CAREFUL,),
    ),
    public(
        "4305-five-requests", "client-bound", f"{SGLANG}/issues/4305",
        "Five long requests run for a while, nothing waits and the pool has room.", FIVE_RUN + "\n",
        acceptable=(*SHORT, "healthy"), forbidden=(LESS_CAREFUL,), generation="sglang-2024",
    ),
    public(
        "22166-concurrency-32", "client-bound", f"{SGLANG}/pull/22166",
        "A benchmark keeps 32 requests open: each answer is followed by one new prompt.",
        """
[2026-04-05 20:02:51] Decode batch, #running-req: 32, #token: 11179, token usage: 0.08, cuda graph: True, gen throughput (token/s): 1635.11, #queue-req: 0
[2026-04-05 20:02:51] INFO:     127.0.0.1:40052 - "POST /v1/chat/completions HTTP/1.1" 200 OK
[2026-04-05 20:02:51] Prefill batch, #new-seq: 1, #new-token: 158, #cached-token: 0, token usage: 0.08, #running-req: 31, #queue-req: 0, cuda graph: True, input throughput (token/s): 559.53
[2026-04-05 20:02:51] INFO:     127.0.0.1:40086 - "POST /v1/chat/completions HTTP/1.1" 200 OK
[2026-04-05 20:02:52] Prefill batch, #new-seq: 1, #new-token: 290, #cached-token: 0, token usage: 0.08, #running-req: 31, #queue-req: 0, cuda graph: True, input throughput (token/s): 1670.03
[2026-04-05 20:02:52] INFO:     127.0.0.1:40180 - "POST /v1/chat/completions HTTP/1.1" 200 OK
[2026-04-05 20:02:52] Prefill batch, #new-seq: 1, #new-token: 160, #cached-token: 0, token usage: 0.08, #running-req: 31, #queue-req: 0, cuda graph: True, input throughput (token/s): 4099.38
""", acceptable=SHORT, forbidden=(LESS_CAREFUL,), generation="sglang-2026",
    ),
    public(
        "938-queue-12279", "queue-too-long", f"{SGLANG}/issues/938",
        "12,279 requests wait although the pool is used at 0.93; the thread has this one line.",
        """
Decode batch. #running-req: 1010, #token: 55006, token usage: 0.93, gen throughput (token/s): 1397.13, #queue-req: 12279
""", acceptable=SHORT, generation="sglang-2024",
    ),
    public(
        "4184-retractions-on-every-rank", "kv-optimistic", f"{SGLANG}/issues/4184",
        "Three retractions within 18 seconds, at ratios of 0.1; each is logged by every rank of a tensor-parallel group.",
        "\n".join(
            f"[2025-03-07 21:49:{second} TP{rank}] Decode out of memory happened. #retracted_reqs: 1, #new_token_ratio: {ratio}"
            for second, ratio, ranks in (
                (33, "0.1474 -> 0.1845", (13, 12, 10)), (45, "0.0980 -> 0.1919", (9, 11, 8, 12, 14, 13, 15, 10)), (51, "0.1207 -> 0.2033", (9, 11, 8)),
            )
            for rank in ranks
        ) + "\n",
        acceptable=SHORT, action=("--schedule-conservativeness", "increase"), forbidden=(LESS_CAREFUL,), generation="sglang-2024",
    ),
    public(
        "26248-full-pool", "kv-full", f"{SGLANG}/issues/26248",
        "Four requests fill the pool of the full-attention layers to 1.00 and three wait; the window's pool is nearly empty.",
        """
[2026-05-24 03:51:44 TP0] Decode batch, #running-req: 4, #full token: 2642688, full token usage: 1.00, #swa token: 14592, swa token usage: 0.06, cuda graph: True, gen throughput (token/s): 429.34, #queue-req: 3
[2026-05-24 03:51:45 TP0] Decode batch, #running-req: 4, #full token: 2642688, full token usage: 1.00, #swa token: 14592, swa token usage: 0.06, cuda graph: True, gen throughput (token/s): 429.52, #queue-req: 3
[2026-05-24 03:51:45 TP0] Decode batch, #running-req: 4, #full token: 2642688, full token usage: 1.00, #swa token: 14592, swa token usage: 0.06, cuda graph: True, gen throughput (token/s): 429.74, #queue-req: 3
""", acceptable=(*SHORT, "kv-optimistic"), forbidden=(LESS_CAREFUL,), generation="sglang-2026",
    ),
    public(
        "14972-small-pool", "not-enough-evidence", f"{SGLANG}/issues/14972",
        "Five lines of one second.",
        "".join(
            f"[2025-12-12 08:43:59 TP0] Decode batch, #running-req: 6, #token: 1920, token usage: 0.94, cuda graph: True, gen throughput (token/s): {rate}, #queue-req: 5,\n"
            for rate in ("446.45", "445.85", "443.41", "440.85", "445.73")
        ), acceptable=("kv-full", "healthy"), generation="sglang-2025",
    ),
    public(
        "1612-ramp-of-a-batch", "not-enough-evidence", f"{SGLANG}/issues/1612",
        "The first five seconds of a batch of prompts: no decode line yet.",
        """
[16:43:29] Prompts loaded.
[16:43:29] SGLang Generating!
[16:43:29 TP0] Prefill batch. #new-seq: 1, #new-token: 2062, #cached-token: 0, cache hit rate: 0.00%, token usage: 0.00, #running-req: 0, #queue-req: 0
[16:43:29 TP0] Prefill batch. #new-seq: 4, #new-token: 8192, #cached-token: 291, cache hit rate: 2.76%, token usage: 0.04, #running-req: 1, #queue-req: 38
[16:43:30 TP0] Prefill batch. #new-seq: 6, #new-token: 8192, #cached-token: 2753, cache hit rate: 14.16%, token usage: 0.18, #running-req: 4, #queue-req: 34
[16:43:30 TP0] Prefill batch. #new-seq: 5, #new-token: 8192, #cached-token: 897, cache hit rate: 12.89%, token usage: 0.33, #running-req: 9, #queue-req: 30
[16:43:31 TP0] Prefill batch. #new-seq: 5, #new-token: 8192, #cached-token: 523, cache hit rate: 11.36%, token usage: 0.48, #running-req: 13, #queue-req: 26
[16:43:32 TP0] Prefill batch. #new-seq: 5, #new-token: 8192, #cached-token: 632, cache hit rate: 10.59%, token usage: 0.62, #running-req: 17, #queue-req: 22
[16:43:33 TP0] Prefill batch. #new-seq: 5, #new-token: 8192, #cached-token: 1832, cache hit rate: 11.92%, token usage: 0.77, #running-req: 21, #queue-req: 18
""", acceptable=("prefill-budget",), forbidden=(LESS_CAREFUL,), generation="sglang-2024",
    ),
    public(
        "30047-ramp-npu", "not-enough-evidence", f"{SGLANG}/pull/30047",
        "The first 12 seconds of a benchmark on an NPU: no decode line yet.",
        """
[2026-07-04 04:31:24 TP0] Prefill batch, #new-seq: 12, #new-token: 43008, #cached-token: 0, full token usage: 0.14, mamba usage: 0.20, #running-req: 1, #queue-req: 97, #pending-token: 109585, npu graph: False, input throughput (token/s): 15734.14
[2026-07-04 04:31:27 TP0] Prefill batch, #new-seq: 12, #new-token: 43264, #cached-token: 0, full token usage: 0.20, mamba usage: 0.30, #running-req: 13, #queue-req: 85, #pending-token: 340001, npu graph: False, input throughput (token/s): 14947.07
[2026-07-04 04:31:30 TP0] Prefill batch, #new-seq: 12, #new-token: 43008, #cached-token: 0, full token usage: 0.27, mamba usage: 0.40, #running-req: 25, #queue-req: 73, #pending-token: 298084, npu graph: False, input throughput (token/s): 13410.89
[2026-07-04 04:31:33 TP0] Prefill batch, #new-seq: 12, #new-token: 43904, #cached-token: 0, full token usage: 0.33, mamba usage: 0.50, #running-req: 37, #queue-req: 61, #pending-token: 255240, npu graph: False, input throughput (token/s): 15159.92
[2026-07-04 04:31:36 TP0] Prefill batch, #new-seq: 12, #new-token: 43008, #cached-token: 0, full token usage: 0.40, mamba usage: 0.60, #running-req: 49, #queue-req: 49, #pending-token: 213301, npu graph: False, input throughput (token/s): 15985.33
""", acceptable=("prefill-budget",), forbidden=(LESS_CAREFUL,), generation="sglang-2026",
    ),
)  # fmt: skip

FAILURES = (
    public(
        "322-init", "oom-init", f"{SGLANG}/issues/322",
        "The message of a start whose weights leave no room in the static share; the thread asks which way to turn.",
        """
Process Process-1:
router init state: Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/sglang/srt/managers/router/manager.py", line 68, in start_router_process
RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.
""", action=("--mem-fraction-static", "increase"), forbidden=(("--mem-fraction-static", "decrease"),), generation="sglang-2024",
    ),
    public(
        "gpustack-3831-init", "oom-init", "https://github.com/gpustack/gpustack/issues/3831",
        "A static share of 0.2 is too small for the weights.",
        """
RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: self.server_args.mem_fraction_static=0.2
""", action=("--mem-fraction-static", "increase"), forbidden=(("--mem-fraction-static", "decrease"),),
    ),
    public(
        "5285-graphs", "oom-init", f"{SGLANG}/issues/5285",
        "The capture of graphs fails: the pool took the memory that they need.",
        """
Traceback (most recent call last):
  File "/sgl-workspace/sglang/python/sglang/srt/managers/scheduler.py", line 2009, in run_scheduler_process
    scheduler = Scheduler(server_args, port_args, gpu_id, tp_rank, dp_rank)
  File "/sgl-workspace/sglang/python/sglang/srt/model_executor/model_runner.py", line 934, in init_cuda_graphs
    self.cuda_graph_runner = CudaGraphRunner(self)
Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 448.00 MiB. GPU 7 has a total capacity of 95.00 GiB
""", action=("--mem-fraction-static", "decrease"), other_actions=(("--cuda-graph-max-bs", "decrease"),), forbidden=(("--mem-fraction-static", "increase"),),
    ),
    public(
        "7553-watchdog", "server-dead", f"{SGLANG}/issues/7553", "The watchdog ends a scheduler that hangs.",
        """
[2025-06-26 07:25:31 DP4 TP4] Pyspy failed to dump PID 113688. Error: /bin/bash: line 1: py-spy: command not found

[2025-06-26 07:25:31 DP4 TP4] Watchdog timeout (self.watchdog_timeout=300)
""",
    ),
    public(
        "soft-thinking-10-watchdog", "server-dead", "https://github.com/UCSB-AI/Soft-Thinking/issues/10", "The watchdog ends a scheduler that hangs.",
        """
[2025-06-22 16:13:55 TP0] Watchdog timeout (self.watchdog_timeout=300)
[2025-06-22 16:13:55 TP0] self.cur_batch.batch_size()=26,  self.cur_batch.reqs=[Req(rid=d4424f3eb90345f0a863068978c0f17c
[2025-06-22 16:13:55 TP0] Pyspy failed to dump PID 63217.   Error: /bin/sh: py-spy: command not found
[2025-06-22 16:14:00] Received sigquit from a child process.   It usually means the child failed.
""",
    ),
    public(
        "lmcache-869-exception", "server-dead", "https://github.com/LMCache/LMCache/pull/869", "An exception in the scheduler ends it.",
        """
[2025-06-26 02:16:20 TP0] Decode batch. #running-req: 1, #token: 2102, token usage: 0.51, cuda graph: True, gen throughput (token/s): 93.51, #queue-req: 0
[2025-06-26 02:16:20 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "/sgl-workspace/sglang/python/sglang/srt/managers/scheduler.py", line 2620, in run_scheduler_process
    scheduler.event_loop_overlap()
ValueError: Failed to allocate token prealloc indices
""",
    ),
    public(
        "verl-1611-illegal-access", "server-dead", "https://github.com/verl-project/verl/issues/1611", "A CUDA error ends the scheduler.",
        """
(WorkerDict pid=859188)     seq_lens_cpu = self.seq_lens.cpu()
(WorkerDict pid=859188) RuntimeError: CUDA error: an illegal memory access was encountered
(WorkerDict pid=859188) CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
(WorkerDict pid=859188) [2025-05-23 18:02:42] Received sigquit from a child process. It usually means the child failed.
""",
    ),
    public(
        "11970-leak", "pool-leak", f"{SGLANG}/issues/11970", "The idle server says that tokens of the pool belong to nobody.",
        """
ValueError: token_to_kv_pool_allocator memory leak detected! self.max_total_num_tokens=270331, available_size=644, evictable_size=269628, protected_size=0
""",
    ),
    public(
        "6888-leak", "pool-leak", f"{SGLANG}/issues/6888", "The accounting of the pool does not add up, and the process ends because of it.",
        """
ValueError: token_to_kv_pool_allocator memory leak detected! available_size=3189424, protected_size=0, self.max_total_num_tokens=3185200
self.token_to_kv_pool_allocator.available_size()=2864304
self.tree_cache.evictable_size()=325120


[2025-06-06 01:56:27] Received sigquit from a child process. It usually means the child failed.
./run.sh: line 22: 103525 Killed                  python -m sglang.launch_server --host 0.0.0.0 --port 8188 --dtype auto --mem-fraction-static 0.95 --tp-size 2
""",
    ),
    public(
        "105-leak-2024", "pool-leak", f"{SGLANG}/issues/105", "The idle server warns that tokens of the pool belong to nobody.",
        """
 UserWarning: Warning: available_size=35244, max_total_num_token=42308
KV cache pool leak detected!
""", generation="sglang-2024",
    ),
    public(
        "4602-decode", "oom-decode", f"{SGLANG}/issues/4602",
        "The pool cannot give the next tokens of a batch and the server crashes.",
        """
RuntimeError: Decode out of memory. Try to lower your batch size.
Try to allocate 148 tokens.
Avaliable tokens: 2048
self.token_to_kv_pool_allocator.available_size()=2048
self.tree_cache.evictable_size()=0
""", acceptable=("server-dead",),
    ),
)  # fmt: skip

ALL = (*GUIDES, *LOADS, *FAILURES)
