"""The process of a rank but the first ends without a traceback when rank 0 does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from resolving import decide

from setpoint.checkpoint.spec import read_spec
from setpoint.config.hardware import Hardware
from setpoint.config.options import Options
from setpoint.launch.job import EngineJob, encode_job
from setpoint.launch.ranks import MEMORY_BYTES
from setpoint_testing.tiny_models import write_tiny_llama

CPU = Hardware(device="cpu", num_cores=2, available_bytes=1 << 34)


def test_rank_0_is_killed_before_it_reads_an_answer(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    spec = read_spec(folder)
    job = EngineJob(decide(Options.of(tp_size=2), CPU, spec), spec, str(folder), *[None] * 3, False)
    memory = os.memfd_create("memory")
    os.ftruncate(memory, MEMORY_BYTES)
    ours, theirs = socket.socketpair()
    with theirs:
        rank = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "setpoint.launch.child.rank",
                f"{theirs.fileno()}",
                f"{memory}",
                "1",
            ],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[theirs.fileno(), memory],
        )
    os.close(memory)
    with Connection(ours.detach()) as link:
        link.send_bytes(encode_job(job))
        assert link.poll(120)  # it says that it has its weights
    # The link is closed with an answer unread, which resets it.
    with rank:
        code = rank.wait(60)
        assert rank.stderr is not None
        errors = rank.stderr.read().decode()
    assert (code, "Traceback" in errors) == (0, False), errors
