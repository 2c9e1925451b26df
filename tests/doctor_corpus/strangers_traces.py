"""The last lines of servers that fail."""

from __future__ import annotations

from collections.abc import Sequence

from strangers_paper import (
    Paper,
)

ROOT = "/usr/local/lib/python3.10/dist-packages/sglang/srt"
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


def trace(
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


def killed(sheet: Paper) -> None:
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


def no_memory(sheet: Paper, tried: str, free: str) -> str:
    total = sheet.machine.gb
    name = "torch.cuda.OutOfMemoryError" if sheet.era == "2024" else "torch.OutOfMemoryError"
    return f"{name}: CUDA out of memory. Tried to allocate {tried}. GPU 0 has a total capacity of {total:.2f} GiB of which {free} is free. Including non-PyTorch memory, this process has {total - 0.1:.2f} GiB memory in use. Of the allocated memory {total - 2.2:.2f} GiB is allocated by PyTorch, and 201.44 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
