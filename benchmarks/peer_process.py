"""Peers as contenders: a program of another engine in a process of its own, driven through its
standard input and output."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from contenders import START_TIMEOUT_S, CpuMeter, Sample, StartError
from workloads import Workload


class PeerProcess:
    """A peer that reads one JSON line per job from its standard input and answers with one (see
    peers/)."""

    def __init__(
        self, name: str, command: Sequence[str], *, environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self._log = tempfile.NamedTemporaryFile("w+", prefix="peer-", suffix=".log")  # noqa: SIM115 - closed by close()
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    async def ready(self) -> None:
        """Wait for the peer's first line, which says that it has loaded its model."""
        try:
            line = await asyncio.wait_for(asyncio.to_thread(self._read), START_TIMEOUT_S)
        except TimeoutError:
            raise StartError(f"{self.name} was not ready after {START_TIMEOUT_S:.0f} s") from None
        if line is None:
            raise StartError(
                f"{self.name} ended; the end of its"
                f" log:\n{Path(self._log.name).read_text()[-2000:]}"
            )

    async def run(self, workload: Workload, repetition: int) -> Sample:
        job = {"prompts": workload.prompts(repetition), "num_outputs": workload.output_tokens}
        meter = CpuMeter(
            {"client": [psutil.Process()], "peer": [psutil.Process(self._process.pid)]}
        )
        answer = await asyncio.to_thread(self._ask, json.dumps(job))
        if answer is None:
            return Sample(
                0.0, errors=(f"the process ended:\n{Path(self._log.name).read_text()[-2000:]}",)
            )
        if answer["num_generated"] != workload.num_outputs:
            return Sample(
                0.0,
                errors=(f"asked for {workload.num_outputs} tokens, got {answer['num_generated']}",),
            )
        return Sample(answer["wall_s"], answer["ttft_s"], answer["decode_s"], None, *meter.read())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(
            BrokenPipeError
        ):  # it still holds what a process that ended could not be told
            self._process.stdin.close()
        self._process.stdout.close()
        self._log.close()

    def _ask(self, line: str) -> dict[str, Any] | None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        return self._read()

    def _read(self) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else None


def transformers_peer(folder: str, *, num_threads: int) -> PeerProcess:
    """transformers' eager ``generate`` on a static batch, in bfloat16, on the weights in
    ``folder``."""
    script = Path(__file__).parent / "peers" / "transformers_peer.py"
    command = [sys.executable, str(script), folder, "--num-threads", str(num_threads)]
    return PeerProcess("transformers", command, environment={"OMP_NUM_THREADS": str(num_threads)})
