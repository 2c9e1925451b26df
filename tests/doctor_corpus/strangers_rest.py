"""Logs of servers that fail, that do well, and that say too little, painted by hand."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from strangers_load import (
    CAP,
    CAP_WRONG,
    CHUNK,
    CONS,
    CONS_WRONG,
    DOWN,
    FULL_WRONG,
    GRAPH,
    MEM,
    UNDER_WRONG,
    UP,
    Painter,
    Written,
    _done,
)
from strangers_paper import (
    A10G,
    A100_40,
    A100_80,
    A100_TP2,
    H100_8B,
    H100_70B,
    H200_V3,
    L4,
    L4_7B,
    RTX_4090,
    Machine,
    Paper,
    load,
    paper,
)

ROOT = "/usr/local/lib/python3.10/dist-packages/sglang/srt"


def _trace(
    sheet: Paper,
    frames: Sequence[tuple[str, int, str]],
    error: str,
    head: str = "Scheduler hit an exception: ",
) -> None:
    if sheet.era == "2024":
        head = r"Exception in run_tp_server: " if head.startswith("Sched") else head
    sheet.say(f"{head}Traceback (most recent call last):")
    for path, line, function in frames:
        sheet.bare(f'  File "{ROOT}/{path}", line {line}, in {function}')
        sheet.bare(f"    {function}(*args, **kwargs)")
    sheet.bare(error)
    sheet.bare("")


def _killed(sheet: Paper) -> None:
    sheet.say(
        {
            "2024": "Received sigquit from a child proces. It usually means the child failed.",
            "2025": "Received sigquit from a child process. It usually means the child failed.",
        }.get(
            sheet.era,
            "SIGQUIT received. signum=None, frame=None. It usually means one child failed.",
        ),
        "",
    )
    if sheet.random.random() < 0.5:
        sheet.bare("Killed")


def _no_memory(sheet: Paper, tried: str, free: str) -> str:
    total = sheet.machine.gb
    name = "torch.cuda.OutOfMemoryError" if sheet.era == "2024" else "torch.OutOfMemoryError"
    return f"{name}: CUDA out of memory. Tried to allocate {tried}. GPU 0 has a total capacity of {total:.2f} GiB of which {free} is free. Including non-PyTorch memory, this process has {total - 0.1:.2f} GiB memory in use. Of the allocated memory {total - 2.2:.2f} GiB is allocated by PyTorch, and 201.44 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."


BEGIN = (
    ("managers/scheduler.py", 2215, "run_scheduler_process"),
    ("managers/scheduler.py", 265, "__init__"),
    ("managers/tp_worker.py", 78, "__init__"),
    ("model_executor/model_runner.py", 199, "initialize"),
)
LOOP = (
    ("managers/scheduler.py", 2230, "run_scheduler_process"),
    ("managers/scheduler.py", 655, "event_loop_overlap"),
    ("managers/scheduler.py", 1416, "run_batch"),
    ("managers/tp_worker.py", 175, "forward_batch_generation"),
    ("model_executor/model_runner.py", 1102, "forward"),
)


def init_weights(r: Random) -> Written:
    sheet = paper(r, A100_80, RTX_4090, A10G, H100_70B)
    sheet.fraction = round(sheet.machine.weights / sheet.machine.gb - 0.01, 2)
    sheet.start("weights", mem_fraction_static=sheet.fraction)
    sheet.say(
        f"Load weight end. type=Qwen2ForCausalLM, dtype=torch.bfloat16, avail mem={sheet.machine.gb - 0.4 - sheet.machine.weights:.2f} GB"
    )
    _trace(
        sheet,
        (*BEGIN, ("model_executor/model_runner.py", 841, "init_memory_pool")),
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
    )
    _killed(sheet)
    return _done(
        sheet,
        "oom-init",
        "static-share",
        "The weights fill the static share, nothing is left of it for the pool: raise the share.",
        ((MEM, UP),),
        ((MEM, DOWN),),
    )


def init_graphs(r: Random) -> Written:
    sheet = paper(
        r, H100_8B, H100_70B, A100_TP2, A100_40, RTX_4090, era=r.choice(("2025", "0.5.23"))
    )
    sheet.fraction = 0.97
    sheet.start("graphs")
    _trace(
        sheet,
        (*BEGIN, ("model_executor/cuda_graph_runner.py", 331, "capture")),
        "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 258.00 MiB. GPU 0 has a total capacity of "
        f"{sheet.machine.gb:.2f} GiB of which 102.44 MiB is free.",
    )
    sheet.bare("Possible solutions:")
    sheet.bare("1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)")
    sheet.bare("2. set --cuda-graph-max-bs to a smaller value (e.g., 16)")
    sheet.bare("3. disable torch compile by not using --enable-torch-compile")
    _killed(sheet)
    return _done(
        sheet,
        "oom-init",
        "graphs",
        "Graph capture finds no memory: a smaller static share or fewer graphs.",
        ((MEM, DOWN), (GRAPH, DOWN)),
        ((MEM, UP), (GRAPH, UP)),
    )


def init_too_large(r: Random) -> Written:
    sheet = paper(r, RTX_4090, A10G, L4_7B)
    sheet.machine = Machine(
        sheet.machine.device, sheet.machine.gb, "meta-llama/Llama-3.3-70B-Instruct", 40.0, 163840
    )
    sheet.start("weights")
    _trace(
        sheet,
        (
            *BEGIN,
            ("model_executor/model_runner.py", 610, "load_model"),
            ("models/llama.py", 380, "__init__"),
        ),
        _no_memory(sheet, "448.00 MiB", "190.69 MiB"),
    )
    _killed(sheet)
    return _done(
        sheet,
        "oom-init",
        "too-large",
        "The weights themselves do not fit on the device.",
        (),
        ((MEM, UP),),
    )


def oom_prefill(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_40, A100_80, H100_70B)
    chunk = r.choice((8192, 16384))
    sheet.start(chunked_prefill_size=chunk, free=r.uniform(2, 4))
    load(sheet, r.randint(15, 50), running=(20, 60), usage=(0.5, 0.9), queue=(0, 25))
    sheet.prefill(3, chunk, 0, 0.8, 40, 12)
    _trace(
        sheet,
        (
            *LOOP,
            ("model_executor/model_runner.py", 1060, "forward_extend"),
            ("models/llama.py", 93, "forward"),
            ("layers/activation.py", 44, "forward_native"),
        ),
        _no_memory(sheet, f"{chunk * 0.00010681:.2f} GiB", "411.50 MiB"),
    )
    _killed(sheet)
    return _done(
        sheet,
        "oom-prefill",
        "forward-extend",
        f"CUDA runs out of memory in forward_extend of a batch of {chunk} tokens.",
        ((CHUNK, DOWN), (MEM, DOWN)),
        ((CHUNK, UP), (MEM, UP), (CAP, UP)),
    )


def oom_prefill_by_line(r: Random) -> Written:
    sheet = paper(r, A100_40, H100_8B, RTX_4090)
    sheet.start(free=1.4)
    load(sheet, r.randint(10, 30), running=(10, 30), usage=(0.4, 0.7), queue=(0, 5))
    sheet.prefill(2, sheet.machine.chunk, 0, 0.6, 20, 9)
    _trace(
        sheet,
        (
            *LOOP[:3],
            ("models/qwen2.py", 88, "forward"),
            ("layers/logits_processor.py", 190, "forward"),
        ),
        _no_memory(sheet, "2.32 GiB", "1.02 GiB"),
    )
    _killed(sheet)
    return _done(
        sheet,
        "oom-prefill",
        "last-line",
        "The last batch before the memory error is a prefill batch as large as the chunk size.",
        ((CHUNK, DOWN), (MEM, DOWN)),
        ((CHUNK, UP), (MEM, UP), (CAP, UP)),
    )


def oom_prefill_headroom(r: Random) -> Written:
    sheet = paper(r, H100_8B, H100_70B, era=r.choice(("2025", "0.5.23")))
    sheet.fraction = 0.95
    sheet.start(free=0.9)
    load(sheet, r.randint(30, 60), running=(80, 140), usage=(0.9, 0.97), queue=(40, 140))
    _trace(
        sheet,
        (
            *LOOP,
            ("model_executor/model_runner.py", 1060, "forward_extend"),
            ("models/llama.py", 290, "forward"),
        ),
        _no_memory(sheet, "1.75 GiB", "602.00 MiB"),
    )
    _killed(sheet)
    return _done(
        sheet,
        "oom-prefill",
        "after-low-headroom",
        "Little was free at the ready line, and then a prefill batch ran out of memory: that is what happened.",
        ((CHUNK, DOWN), (MEM, DOWN)),
        ((CHUNK, UP), (MEM, UP), (CAP, UP)),
    )


DECODE_WRONG = ((CAP, UP), (MEM, UP), (CHUNK, UP))


def oom_decode(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_40, A100_TP2, L4)
    sheet.start(free=r.uniform(1.5, 3))
    load(sheet, r.randint(20, 60), running=(150, 320), usage=(0.7, 0.95), queue=(0, 40))
    sheet.decode(r.randint(280, 330), 0.94, 5100.2, 3)
    _trace(
        sheet,
        (
            *LOOP,
            ("model_executor/model_runner.py", 1015, "forward_decode"),
            ("models/llama.py", 400, "forward"),
        ),
        _no_memory(sheet, "1.18 GiB", "822.00 MiB"),
    )
    _killed(sheet)
    return _done(
        sheet,
        "oom-decode",
        "forward-decode",
        "CUDA runs out of memory in forward_decode under a large batch.",
        ((CAP, DOWN), (MEM, DOWN)),
        DECODE_WRONG,
    )


def oom_decode_sampler(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_40, H100_70B)
    load(sheet, r.randint(20, 40), running=(180, 280), usage=(0.8, 0.95), queue=(0, 10))
    for _ in range(3):
        sheet.at += 1
        sheet.decode(r.randint(270, 290), 0.95, 4800.1, 2)
    _trace(
        sheet,
        (*LOOP[:3], ("layers/sampler.py", 91, "forward")),
        _no_memory(sheet, "288.00 MiB", "120.88 MiB"),
    )
    _killed(sheet)
    return _done(
        sheet,
        "oom-decode",
        "sampler",
        "The sampler of a large decode batch finds no memory; only decode batches ran before.",
        ((CAP, DOWN), (MEM, DOWN)),
        DECODE_WRONG,
    )


def oom_decode_pool(r: Random) -> Written:
    sheet = paper(r, A10G, L4_7B, RTX_4090, era=r.choice(("2024", "2025")))
    sheet.start(free=1.4)
    load(sheet, r.randint(12, 30), running=(20, 30), usage=(0.95, 1.0), queue=(0, 10))
    sheet.decode(27, 1.0, 611.4, 6)
    _trace(
        sheet,
        (
            LOOP[0],
            LOOP[1],
            ("managers/schedule_batch.py", 1301, "prepare_for_decode"),
            ("managers/schedule_batch.py", 702, "alloc_token_slots"),
        ),
        "RuntimeError: Decode out of memory. Try to lower your batch size.\nTry to allocate 27 tokens.\nAvailable tokens: 11\nself.tree_cache.evictable_size()=0",
    )
    _killed(sheet)
    return _done(
        sheet,
        "oom-decode",
        "slots",
        "The pool cannot give the next tokens of the running batch and the server stops.",
        ((CAP, DOWN), (MEM, DOWN), (CONS, UP), (MEM, UP)),
        ((CAP, UP), (CONS, DOWN)),
    )


def oom_decode_short(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_40, era="2025")
    sheet.stamp = "full"
    for _ in range(r.randint(8, 12)):
        sheet.at += 2
        sheet.decode(
            r.randint(330, 360), r.uniform(0.8, 0.9), r.uniform(5000, 6000), r.randint(0, 3)
        )
    _trace(
        sheet,
        (
            *LOOP[:2],
            ("model_executor/cuda_graph_runner.py", 540, "replay"),
            ("model_executor/model_runner.py", 1015, "forward_decode"),
        ),
        _no_memory(sheet, "640.00 MiB", "210.12 MiB"),
    )
    _killed(sheet)
    return _done(
        sheet,
        "oom-decode",
        "short",
        "A short end of a log: decode batches only, then CUDA out of memory.",
        ((CAP, DOWN), (MEM, DOWN)),
        DECODE_WRONG,
    )


LEAK_WRONG = ((MEM, UP), (MEM, DOWN), (CONS, UP), (CONS, DOWN), (CAP, UP))


def leak(r: Random) -> Written:
    sheet = paper(r)
    sheet.start()
    load(sheet, r.randint(15, 50), running=(6, 30), usage=(0.1, 0.5), queue=(0, 0))
    for running in (5, 2, 1):
        sheet.at += 1
        sheet.decode(running, 0.02 * running, 60.0 * running, 0)
    sheet.at += 1
    lost = r.randint(30, 4000)
    error = {
        "2024": f"Warning: available_size={sheet.pool - lost}, max_total_num_token={sheet.pool}\nKV cache pool leak detected!",
        "2025": f"ValueError: token_to_kv_pool_allocator memory leak detected! available_size={sheet.pool - lost - 900}, protected_size=0, self.max_total_num_tokens={sheet.pool}\nself.token_to_kv_pool_allocator.available_size()={sheet.pool - lost - 900}\nself.tree_cache.evictable_size()=900",
        "0.5.23": f"ValueError: token_to_kv_pool_allocator memory leak detected! self.max_total_num_tokens={sheet.pool}, available_size={sheet.pool - lost - 2000}, evictable_size=2000, protected_size=0",
    }[sheet.era]
    if sheet.era == "2024":
        for line in error.split("\n"):
            sheet.bare(line)
    else:
        _trace(sheet, (LOOP[0], LOOP[1], ("managers/scheduler.py", 1510, "check_memory")), error)
        _killed(sheet)
    return _done(
        sheet,
        "pool-leak",
        "message",
        "The idle server finds that tokens of the pool belong to nobody.",
        (),
        LEAK_WRONG,
    )


def leak_req(r: Random) -> Written:
    sheet = paper(r, H100_8B, H100_70B, era="2025")
    sheet.start()
    load(sheet, r.randint(20, 40), running=(6, 30), usage=(0.1, 0.5), queue=(0, 0))
    _trace(
        sheet,
        (LOOP[0], ("managers/scheduler.py", 1522, "check_memory")),
        "ValueError: req_to_token_pool memory leak detected!available_size=4090, total_size=4096",
    )
    _killed(sheet)
    return _done(
        sheet, "pool-leak", "requests", "The pool of request slots has lost some.", (), LEAK_WRONG
    )


DEAD_WRONG = ((MEM, UP), (CONS, UP), (CONS, DOWN))


def dead_watchdog(r: Random) -> Written:
    sheet = paper(r)
    sheet.start()
    load(sheet, r.randint(20, 50), running=(10, 60), usage=(0.2, 0.8), queue=(0, 0))
    sheet.at += 300
    if sheet.era == "2024":
        sheet.say("Watchdog timeout (self.watchdog_timeout=300)")
    else:
        sheet.say(
            "Watchdog timeout (self.watchdog_timeout=300, self.soft=False)"
            if sheet.era == "0.5.23"
            else "Watchdog timeout (self.watchdog_timeout=300)"
        )
        sheet.bare("Pyspy dump for PID 1207:")
        sheet.bare("Thread 1207 (active): MainThread")
        sheet.bare("    all_reduce (torch/distributed/distributed_c10d.py:2501)")
    _killed(sheet)
    return _done(
        sheet,
        "server-dead",
        "watchdog",
        "Five minutes of silence, then the watchdog ends the server.",
        (),
        DEAD_WRONG,
    )


def dead_access(r: Random) -> Written:
    sheet = paper(r, H100_8B, H100_70B, A100_40)
    load(sheet, r.randint(20, 50), running=(10, 60), usage=(0.2, 0.8), queue=(0, 20))
    _trace(
        sheet,
        LOOP,
        "RuntimeError: CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.",
    )
    _killed(sheet)
    return _done(
        sheet,
        "server-dead",
        "illegal-access",
        "An illegal memory access ends the scheduler.",
        (),
        DEAD_WRONG,
    )


def dead_nccl(r: Random) -> Written:
    sheet = paper(r, H100_70B, A100_TP2, H200_V3)
    sheet.start()
    load(sheet, r.randint(20, 40), running=(10, 60), usage=(0.2, 0.8), queue=(0, 0))
    sheet.at += 600
    sheet.bare(
        "[rank2]:[E304 10:21:44.120 ProcessGroupNCCL.cpp:629] [Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=120231, OpType=ALLREDUCE, NumelIn=8192, NumelOut=8192, Timeout(ms)=600000) ran for 600032 milliseconds before timing out."
    )
    sheet.bare("terminate called after throwing an instance of 'c10::DistBackendError'")
    sheet.bare("Fatal Python error: Aborted")
    _killed(sheet)
    return _done(
        sheet,
        "server-dead",
        "nccl",
        "A collective hangs and NCCL's watchdog aborts the process.",
        (),
        DEAD_WRONG,
    )


def dead_assert(r: Random) -> Written:
    sheet = paper(r, H100_8B, L4, RTX_4090, era=r.choice(("2025", "0.5.23")))
    sheet.start()
    load(sheet, r.randint(20, 40), running=(10, 30), usage=(0.3, 0.7), queue=(0, 0))
    _trace(
        sheet,
        (LOOP[0], LOOP[1], ("managers/schedule_batch.py", 1450, "retract_decode")),
        "AssertionError: running batch is empty",
    )
    _killed(sheet)
    return _done(
        sheet,
        "server-dead",
        "assertion",
        "A failed assertion in the scheduler takes the server down.",
        (),
        DEAD_WRONG,
    )


# healthy

WELL_WRONG = (
    (CONS, DOWN),
    (CONS, UP),
    (CAP, DOWN),
    (MEM, DOWN),
    (MEM, UP),
    (CHUNK, DOWN),
    (GRAPH, DOWN),
)


def healthy_guide(r: Random) -> Written:
    sheet = paper(r, H100_8B, H100_70B, A100_TP2, H200_V3)
    sheet.start(free=r.uniform(5.1, 7.6))
    load(
        sheet,
        r.randint(35, 80),
        running=(120, 230),
        usage=(0.91, 0.97),
        queue=(90, 480),
        hit=(0.1, 0.3),
    )
    return _done(
        sheet,
        "healthy",
        "guide",
        "The guides' good state: usage above 0.9, a queue of hundreds, graphs on, 5 to 8 GB free, no retraction.",
        (),
        WELL_WRONG,
    )


def healthy_no_start(r: Random) -> Written:
    sheet = paper(r, H100_8B, H100_70B)
    load(sheet, r.randint(40, 90), running=(200, 260), usage=(0.92, 0.98), queue=(100, 320))
    return _done(
        sheet,
        "healthy",
        "no-start",
        "The guides' good state without the start's lines.",
        (),
        WELL_WRONG,
    )


def healthy_retraction(r: Random) -> Written:
    sheet = paper(r, H100_8B, H100_70B, A100_TP2)
    sheet.start(free=5.9)
    for _ in range(2):
        load(sheet, r.randint(45, 60), running=(110, 200), usage=(0.92, 0.99), queue=(60, 240))
        sheet.retract(1, 0.3012, 0.3355)
        load(sheet, 12, running=(110, 200), usage=(0.92, 0.98), queue=(60, 240))
    return _done(
        sheet,
        "healthy",
        "rare-retraction",
        "As the guides want it, with a single retraction every two minutes.",
        (),
        WELL_WRONG,
    )


def healthy_bursts(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_40, H100_70B)
    sheet.start(free=6.1 if sheet.machine.gb > 50 else 3.0)
    for _ in range(r.randint(5, 8)):
        load(
            sheet,
            r.randint(6, 10),
            running=(20, 50),
            usage=(0.2, 0.45),
            queue=(0, 0),
            hit=(0.3, 0.6),
        )
        queue, running = r.randint(20, 50), 40
        while queue > 0:
            took = r.randint(8, 16)
            queue = max(0, queue - took)
            running += took
            sheet.at += 0.25
            sheet.prefill(took, r.randint(1500, 4000), r.randint(1500, 4000), 0.35, running, queue)
        for _ in range(5):
            sheet.at += 1
            sheet.decode(running, 0.5, running * 34.0, 0)
            running = int(running * 0.8)
        sheet.at += r.uniform(2, 9)
    return _done(
        sheet,
        "healthy",
        "bursts",
        "Bursts of tens of requests wait a second and are served; between them nobody waits, and most slots are used.",
        (),
        WELL_WRONG,
        ("client-bound",),
    )


def healthy_night(r: Random) -> Written:
    sheet = paper(r, H100_8B, H100_70B)
    sheet.start(free=6.5)
    for _ in range(2):
        load(sheet, r.randint(35, 50), running=(130, 200), usage=(0.91, 0.96), queue=(50, 220))
        for _ in range(5):
            sheet.at += r.uniform(600, 3000)
            load(sheet, 1, running=(1, 3), usage=(0.004, 0.01), queue=(0, 0))
        sheet.at += 9000
    return _done(
        sheet, "healthy", "night", "Busy and well by day, nearly idle at night.", (), WELL_WRONG
    )


def healthy_cache(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_TP2, H100_70B)
    sheet.start(free=6.0)
    load(
        sheet,
        r.randint(40, 75),
        running=(110, 190),
        usage=(0.91, 0.97),
        queue=(40, 190),
        hit=(0.75, 0.93),
    )
    return _done(
        sheet,
        "healthy",
        "cache",
        "The good state with nine tenths of the prompts from the cache.",
        (),
        WELL_WRONG,
    )


def healthy_dp(r: Random) -> Written:
    sheet = paper(r, H100_8B, era=r.choice(("2025", "0.5.23")))
    sheet.rank = "DP0 TP0"
    sheet.start(free=6.2, dp_size=2)
    for _ in range(16):
        for rank in ("DP0 TP0", "DP1 TP0"):
            part = sheet.on(rank)
            load(part, 3, running=(120, 170), usage=(0.92, 0.97), queue=(70, 180))
        sheet.at = part.at
    return _done(
        sheet, "healthy", "dp", "Two ranks side by side, both in the good state.", (), WELL_WRONG
    )


def healthy_short(r: Random) -> Written:
    sheet = paper(r, H100_8B, H100_70B, era="2025")
    sheet.stamp = "full"
    load(sheet, 20, running=(190, 233), usage=(0.92, 0.96), queue=(200, 317), prefill_share=0.3)
    return _done(sheet, "healthy", "short", "Twenty decode lines as in the guide.", (), WELL_WRONG)


# too little to say

LITTLE_WRONG = (
    (CONS, DOWN),
    (CONS, UP),
    (CAP, DOWN),
    (CAP, UP),
    (MEM, DOWN),
    (MEM, UP),
    (CHUNK, DOWN),
    (CHUNK, UP),
)


def little_start(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_40, H100_70B)
    sheet.start(free=5.9)
    return _done(
        sheet,
        "not-enough-evidence",
        "start",
        "A start with the warm-up request and nothing after it.",
        (),
        LITTLE_WRONG,
    )


def little_lines(r: Random) -> Written:
    sheet = paper(r, H100_8B, L4)
    sheet.start(free=5.9)
    sheet.prefill(1, 420, 0, 0.0, 0, 0)
    sheet.at += 1
    sheet.decode(1, 0.01, 71.2, 0)
    return _done(
        sheet,
        "not-enough-evidence",
        "one-request",
        "One request after the start.",
        (),
        LITTLE_WRONG,
    )


def little_access(r: Random) -> Written:
    sheet = paper(r)
    for _ in range(60):
        sheet.at += r.uniform(0.1, 4)
        sheet.access = 0.9
        sheet._visit()
        if r.random() < 0.2:
            sheet.bare(
                f'INFO:     127.0.0.1:{r.randint(30000, 60000)} - "GET /health HTTP/1.1" 200 OK'
            )
    return _done(
        sheet,
        "not-enough-evidence",
        "access-only",
        "Only access lines, no batch line.",
        (),
        LITTLE_WRONG,
    )


def little_vllm(r: Random) -> Written:
    sheet = paper(r, H100_8B)
    for _ in range(40):
        sheet.at += 10
        sheet.bare(
            f"INFO 03-04 09:{r.randint(10, 59)}:11 [metrics.py:481] Avg prompt throughput: {r.uniform(10, 900):.1f} tokens/s, Avg generation throughput: {r.uniform(100, 900):.1f} tokens/s, Running: {r.randint(1, 90)} reqs, Swapped: 0 reqs, Pending: {r.randint(0, 40)} reqs, GPU KV cache usage: {r.uniform(10, 90):.1f}%, CPU KV cache usage: 0.0%."
        )
    return _done(sheet, "not-enough-evidence", "vllm", "Another engine's log.", (), LITTLE_WRONG)


def little_two(r: Random) -> Written:
    sheet = paper(r, H100_8B, H100_70B, era=r.choice(("2025", "0.5.23")))
    sheet.decode(41, 0.53, 1800.0, 12)
    sheet.at += 1
    sheet.decode(44, 0.55, 1890.0, 9)
    return _done(sheet, "not-enough-evidence", "two-lines", "Two decode lines.", (), LITTLE_WRONG)


# two things to see, one of which binds


def cap_beside_free_memory(r: Random) -> Written:
    sheet = paper(r, H100_8B, H100_70B, era=r.choice(("2025", "0.5.23")))
    sheet.fraction = 0.7
    cap = r.choice((32, 64))
    sheet.start(running=cap, max_running_requests=cap)
    load(sheet, r.randint(35, 60), running=(cap, cap), cap=cap, usage=(0.3, 0.5), queue=(40, 160))
    return _done(
        sheet,
        "seq-cap",
        "beside-free-memory",
        "Much memory is free, but the pool is half empty: requests wait for a slot.",
        ((CAP, UP),),
        CAP_WRONG,
    )


def cap_beside_no_hits(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_TP2)
    cap = 48
    sheet.start(running=cap, max_running_requests=cap, disable_radix_cache=True)
    load(
        sheet,
        r.randint(35, 60),
        running=(cap, cap),
        cap=cap,
        usage=(0.3, 0.5),
        queue=(40, 160),
        hit=(0, 0),
    )
    return _done(
        sheet,
        "seq-cap",
        "beside-no-cache",
        "The cache is off, as it may be; requests wait because all 48 slots are taken.",
        ((CAP, UP),),
        CAP_WRONG,
    )


def full_beside_long_queue(r: Random) -> Written:
    sheet = paper(r, A100_80, A10G)
    sheet.start(free=5.6 if sheet.machine.gb > 50 else 2.0)
    load(sheet, r.randint(35, 60), running=(4, 9), usage=(0.97, 1.0), queue=(200, 900))
    return _done(
        sheet,
        "kv-full",
        "few-and-many-wait",
        "Four to nine long requests fill the pool, hundreds wait.",
        (),
        FULL_WRONG,
    )


def conservative_after_startup_retractions(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_40)
    sheet.start(schedule_conservativeness=1.3)
    load(sheet, 4, running=(140, 170), usage=(0.97, 1.0), queue=(300, 400), retract=1.0)
    load(sheet, r.randint(70, 90), running=(60, 100), usage=(0.5, 0.7), queue=(150, 400))
    return _done(
        sheet,
        "kv-conservative",
        "early-retractions",
        "A few retractions in the first seconds; for minutes since, the pool has had room and hundreds wait.",
        ((CONS, DOWN),),
        CONS_WRONG,
    )


def underused_beside_long_queue(r: Random) -> Written:
    sheet = paper(r, H100_8B, A100_TP2, era=r.choice(("2025", "0.5.23")))
    sheet.fraction = 0.55
    sheet.start()
    load(sheet, r.randint(35, 60), running=(10, 30), usage=(0.97, 1.0), queue=(300, 900))
    return _done(
        sheet,
        "mem-underused",
        "beside-queue",
        "Hundreds wait for a full pool while a third of the device is free.",
        ((MEM, UP),),
        UNDER_WRONG,
    )


PAINTERS: tuple[Painter, ...] = (
    init_weights, init_graphs, init_too_large, oom_prefill, oom_prefill_by_line, oom_prefill_headroom, oom_decode,
    oom_decode_sampler, oom_decode_pool, oom_decode_short, leak, leak_req, dead_watchdog, dead_access, dead_nccl, dead_assert,
    healthy_guide, healthy_no_start, healthy_retraction, healthy_bursts, healthy_night, healthy_cache, healthy_dp, healthy_short,
    little_start, little_lines, little_access, little_vllm, little_two, cap_beside_free_memory, cap_beside_no_hits,
    full_beside_long_queue, conservative_after_startup_retractions, underused_beside_long_queue,
)  # fmt: skip
