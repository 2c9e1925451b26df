"""An engine in which every control operation fails: each client is told, nobody else notices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from setpoint.checkpoint.read_folder import read_description
from setpoint.checkpoint.source import ModelSource
from setpoint.checkpoint.spec import read_spec
from setpoint.config.options import Options
from setpoint.frontend.checkpoint_names import Checkpoint
from setpoint.launch.parent.checkpoints import LaunchedCheckpoints
from setpoint_testing.fake_engine import FakeEngine
from setpoint_testing.tiny_models import write_tiny_llama

Serve = Callable[..., None]
CONTROLS = [
    ("GET", "/server_info", None),
    ("GET", "/v1/loads", None),
    ("GET", "/get_load", None),
    ("GET", "/api/ps", None),
    ("POST", "/flush_cache", None),
    ("POST", "/pause_generation", {}),
    ("POST", "/continue_generation", {}),
    ("POST", "/release_memory_occupation", {"tags": ["weights"]}),
    ("POST", "/release_memory_occupation", {}),
    ("POST", "/resume_memory_occupation", {"tags": ["weights"]}),
    ("POST", "/update_weights_from_disk", {"model_path": "x"}),
    ("POST", "/update_weights_from_disk", {"model_path": "x", "abort_all_requests": True}),
    ("POST", "/start_profile", {}),
    ("POST", "/stop_profile", {}),
    ("POST", "/freeze_gc", {}),
]


class Anything:
    def license(self) -> str:
        return ""

    def find(self, model_path: str, load_format: str | None) -> Checkpoint:
        return Checkpoint("/folder", "auto")


@pytest.mark.parametrize(("method", "path", "body"), CONTROLS)
def test_the_client_of_a_failed_operation_is_told(
    serve: Serve, tmp_path: Path, method: str, path: str, body: Any
) -> None:
    async def scenario(server: Any) -> None:
        server.engine.fail_controls = True
        response = await server.http.request(method, path, json=body)
        assert response.status_code == 500
        assert "It raised." in response.text
        out = await server.generate(text="x", sampling_params={"max_new_tokens": 1})
        assert out["meta_info"]["finish_reason"]["type"] == "length"

    serve(scenario, FakeEngine(), profiles_folder=str(tmp_path), checkpoints=Anything())


def test_probes_and_what_only_looks_go_on(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        server.engine.fail_controls = True
        for path in ("/health", "/health_generate", "/ready", "/v1/models"):
            assert (await server.http.get(path)).status_code == 200
        server.engine.step_s = 0.05
        asked = asyncio.create_task(
            server.generate(text="x", sampling_params={"max_new_tokens": 5, "ignore_eos": True})
        )
        while not server.engine.running:
            await asyncio.sleep(0.01)
        assert (await server.http.get("/health_generate")).status_code == 200
        await server.service.watch.look()
        assert (await asked)["meta_info"]["completion_tokens"] == 5

    serve(scenario, FakeEngine(), health_generates=True)


@pytest.mark.parametrize(
    "name",
    ["a" * 256, "ä" * 128, "/".join("a" * 1000), "x" * 5000, "a\0b", "a/" * 500, "../" * 400],
    ids=["long", "bytes", "deep", "endless", "null", "many", "up"],
)
def test_a_path_that_cannot_be_is_a_bad_request(serve: Serve, tmp_path: Path, name: str) -> None:
    """Red before: the 256 characters were a 500, and the thousand levels ended the engine."""

    async def scenario(server: Any) -> None:
        for path, body in (
            ("/update_weights_from_disk", {"model_path": f"{tmp_path}/{name}"}),
            ("/update_weights_from_disk", {"model_path": name}),
            ("/start_profile", {"output_dir": name}),
            ("/start_profile", {"output_dir": f"{tmp_path}/{name}"}),
        ):
            response = await server.http.post(path, json=body)
            assert response.status_code == 400, (path, response.text)
            assert next(iter(body)) in response.text
        assert not server.engine.operations

    served = write_tiny_llama(tmp_path / "served")
    found = LaunchedCheckpoints(
        Options.of(model_path=str(served), update_weights_folder=str(tmp_path)),
        ModelSource(served, str(served), "folder", False, read_description(served)),
        read_spec(served),
    )
    serve(scenario, profiles_folder=str(tmp_path), checkpoints=found)
