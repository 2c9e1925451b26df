"""A server of a GGUF file whose file is touched, copied over, replaced or removed."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind

from setpoint.engine.kernels.cpu.build import cache_dir
from setpoint_testing import tiny_gguf
from setpoint_testing.server_process import (
    PATIENCE_S,
    ServerProcess,
    engines_of,
    running_server,
    wait_until,
)

GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}


def written(path: Path, shift: float = 0.0) -> Path:
    """A model; of the same size whatever the shift is."""
    model = tiny_gguf.TinyLlama()
    tensors = tiny_gguf.gguf_tensors(model, model.weights())
    tensors["output_norm.weight"] = np.roll(tensors["output_norm.weight"], 1) + np.float32(shift)
    return tiny_gguf.write(path, tensors, tiny_gguf.metadata(model), kind=Kind.Q4_0)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    own = tmp_path / "cache"
    (own / "setpoint").mkdir(parents=True)
    (own / "setpoint" / "kernels").symlink_to(cache_dir())
    monkeypatch.setenv("XDG_CACHE_HOME", str(own))
    return written(tmp_path / "m.gguf")


@pytest.fixture
def server(path: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    with running_server(
        tmp_path,
        *("--model-path", str(path), "--max-total-tokens", "2048", "--num-threads", "1"),
    ) as server:
        yield server


def ids(server: ServerProcess) -> Any:
    answer = httpx.post(
        f"{server.url}/generate",
        json={"input_ids": [5, 6, 7, 8], "sampling_params": GREEDY},
        timeout=PATIENCE_S,
    )
    return answer.json().get("output_ids", answer.text)


def post(server: ServerProcess, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=PATIENCE_S)


def replace_by_another(path: Path) -> None:
    """Replace the file by one of the same size and time of modification."""
    before = path.stat()
    other = written(path.with_name("other"), shift=3.0)
    assert other.stat().st_size == before.st_size
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)


@pytest.mark.full
def test_a_file_with_the_same_content_serves_on(server: ServerProcess, path: Path) -> None:
    before = ids(server)
    os.utime(path)
    (engine,) = engines_of(server.process.pid)
    os.kill(engine.pid, signal.SIGKILL)
    assert ids(server) == before
    shutil.copy(path, path.with_name("copy")).replace(path)
    assert post(server, "/release_memory_occupation").status_code == 200
    assert post(server, "/resume_memory_occupation").status_code == 200
    assert ids(server) == before
    assert post(server, "/update_weights_from_disk", model_path=str(path)).status_code == 200
    assert ids(server) == before


@pytest.mark.full
def test_another_file_ends_a_restart_at_once(server: ServerProcess, path: Path) -> None:
    replace_by_another(path)
    (engine,) = engines_of(server.process.pid)
    os.kill(engine.pid, signal.SIGKILL)
    assert server.wait_end() == 1
    assert server.errors.count("is started again (") == 1
    assert f"The content of {path} has changed since the server started." in server.messages[-1]
    assert "Traceback" not in server.errors


@pytest.mark.full
def test_a_standby_that_cannot_read_its_file_is_not_tried_again(path: Path, tmp_path: Path) -> None:
    with running_server(
        tmp_path,
        *("--model-path", str(path), "--max-total-tokens", "2048", "--num-threads", "1"),
        "--engine-standby",
    ) as server:
        before = ids(server)
        wait_until(lambda: "The standby engine is ready." in server.errors)
        replace_by_another(path)
        first = min(engines_of(server.process.pid), key=lambda each: each.create_time())
        os.kill(first.pid, signal.SIGKILL)
        assert ids(server) == before
        wait_until(lambda: "The standby engine is not started again. The content" in server.errors)
        assert server.errors.count("The standby engine has ended: ") == 1
        assert ids(server) == before


@pytest.mark.full
def test_another_file_is_not_resumed_and_requests_are_told(
    server: ServerProcess, path: Path
) -> None:
    before = ids(server)
    post(server, "/release_memory_occupation")
    kept = shutil.copy(path, path.with_name("kept"))
    replace_by_another(path)
    refused = post(server, "/resume_memory_occupation")
    assert refused.status_code == 400
    assert "has changed since" in refused.json()["message"]
    ready = httpx.get(f"{server.url}/ready")
    assert ready.status_code == 503
    assert "has changed since" in ready.text
    assert "has changed since" in ids(server)
    kept.replace(path)
    assert post(server, "/resume_memory_occupation").status_code == 200
    wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 200)
    assert ids(server) == before
