"""Profiles over HTTP: where clients may have them written; and routes that say what is missing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from setpoint.core.operations import FreezeGarbage, StartProfile, StopProfile
from setpoint.frontend.apis.sglang.missing import MISSING

Serve = Callable[..., None]


def test_profiles(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("setpoint.frontend.apis.sglang.profiles.WRITTEN_S", 0.2)
    (tmp_path / "x.gz").touch()  # where the fake engine says that its file is

    async def scenario(server: Any) -> None:
        http, engine = server.http, server.engine
        body = {
            "output_dir": str(tmp_path / "runs" / "one"),
            "num_steps": 5,
            "start_step": 2,
            "activities": ["CPU"],
            "with_stack": True,
            "profile_id": "mine",
            "profile_prefix": "exp",
            "profile_by_stage": False,
        }
        answer = await http.post("/start_profile", json=body)
        assert answer.status_code == 200
        assert answer.text.startswith("Start profiling.")
        path = str(tmp_path / "runs" / "one" / "exp-mine-TP-0.trace.json.gz")
        assert engine.operations == [
            StartProfile(path, start_step=2, num_steps=5, gpu=False, with_stack=True)
        ]
        assert (await http.post("/stop_profile")).text.startswith("Stop profiling.")
        for method in ("GET", "POST"):  # with no body at all
            assert (await http.request(method, "/start_profile")).status_code == 200
            assert engine.operations[-1].num_steps is None
            assert Path(engine.operations[-1].path).parent == tmp_path
            await http.request(method, "/stop_profile")
        assert engine.operations[-1] == StopProfile()
        assert (await http.post("/freeze_gc", json={})).text == "Garbage collection frozen.\n"
        assert engine.operations[-1] == FreezeGarbage()
        (tmp_path / "x.gz").unlink()
        late = await http.post("/stop_profile")
        assert late.status_code == 503
        assert "is not there after" in late.text
        engine.refuse_operation = "No profile is running."
        assert (await http.post("/stop_profile")).status_code == 400

    serve(scenario, profiles_folder=str(tmp_path))


def test_records_of_experts(serve: Serve, tmp_path: Path) -> None:
    async def scenario(server: Any) -> None:
        http, engine = server.http, server.engine
        for method in ("GET", "POST"):
            for action in ("start", "stop", "dump"):
                answer = await http.request(method, f"/{action}_expert_distribution_record")
                assert answer.status_code == 200
                assert engine.operations[-1].action == action
                path = engine.operations[-1].path
            assert Path(path).parent == tmp_path
        engine.refuse_operation = "There are no experts."
        answer = await http.post("/start_expert_distribution_record")
        assert answer.status_code == 400
        assert "There are no experts." in answer.text

    serve(scenario, expert_records_folder=str(tmp_path))


def test_a_relative_output_dir_is_below_the_servers_folder(serve: Serve, tmp_path: Path) -> None:
    async def scenario(server: Any) -> None:
        body = {"output_dir": "runs/one", "profile_id": "mine"}
        answer = await server.http.post("/start_profile", json=body)
        path = str(tmp_path / "runs" / "one" / "mine-TP-0.trace.json.gz")
        assert answer.status_code == 200
        assert server.engine.operations[-1].path == path

    serve(scenario, profiles_folder=str(tmp_path))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"output_dir": "/etc"}, "output_dir must be"),
        ({"output_dir": "../elsewhere"}, "output_dir must be"),
        ({"output_dir": "a\0b"}, "output_dir must not"),
        ({"output_dir": "link/x"}, "output_dir must be"),
        ({"output_dir": 3}, "output_dir"),
        ({"profile_id": "../../x"}, "profile_id"),
        ({"profile_id": ""}, "profile_id"),
        ({"profile_prefix": "x" * 200}, "profile_prefix"),
        ({"num_steps": 0}, "num_steps"),
        ({"num_steps": 1 << 40}, "num_steps"),
        ({"start_step": -1}, "start_step"),
        ({"activities": ["RPD"]}, "activities"),
        ({"activities": "CPU"}, "activities"),
        ({"profile_by_stage": True}, "profile_by_stage"),
        ({"merge_profiles": True}, "merge_profiles"),
    ],
)
def test_wrong_bodies_are_refused(
    serve: Serve, tmp_path: Path, body: dict[str, Any], words: str
) -> None:
    (tmp_path / "link").symlink_to("/etc")

    async def scenario(server: Any) -> None:
        response = await server.http.post("/start_profile", json=body)
        assert response.status_code == 400
        assert words in response.json()["message"]
        assert not server.engine.operations

    serve(scenario, profiles_folder=str(tmp_path))


def test_what_is_missing_is_named(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        for path, method in product(MISSING, ("GET", "POST")):
            response = await server.http.request(method, path)
            assert response.status_code == 501
            assert f"{path} is not supported by this server yet" in response.json()["message"]

    serve(scenario)


SGLANG_ROUTES = """
    / /abort_request /add_external_corpus /api/chat /api/generate /api/show /api/tags
    /begin_weight_update /classify /close_session /configure_logging /continue_generation
    /destroy_weights_update_group /detokenize /dump_expert_distribution_record /dumper/configure
    /encode /end_weight_update /flush_cache /freeze_gc /generate /get_hicache_l3_cache_layout
    /get_model_info /get_remote_instance_transfer_engine_info /get_server_info
    /get_weights_by_name /health /health_generate /hicache/storage-backend
    /hicache/storage-backend/clear /init_weights_send_group_for_remote_instance
    /init_weights_update_group /invocations /list_external_corpora /load_lora_adapter
    /load_lora_adapter_from_tensors /model_info /open_session /parse_function_call
    /pause_generation /pd_role_switch /ping /ready /release_memory_occupation
    /remote_instance_transfer_engine_info /remove_external_corpus /resume_memory_occupation
    /send_weights_to_remote_instance /separate_reasoning /server_info /set_internal_state
    /set_trace_level /slow_down /start_expert_distribution_record /start_profile
    /stop_expert_distribution_record /stop_profile /tokenize /unload_lora_adapter
    /update_weight_version /update_weights_from_disk /update_weights_from_distributed
    /update_weights_from_ipc /update_weights_from_tensor /v1/audio/transcriptions
    /v1/chat/completions /v1/classify /v1/completions /v1/decisions /v1/detokenize
    /v1/embeddings /v1/loads /v1/messages /v1/messages/count_tokens /v1/models
    /v1/models/default /v1/realtime /v1/rerank /v1/responses /v1/score /v1/systemone
    /v1/tokenize /vertex_generate /weights_checker
"""
"""Every path of SGLang 0.5.23 but /metrics, which only a server with --enable-metrics has."""


def test_no_route_of_sglang_is_unknown(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("setpoint.frontend.apis.sglang.profiles.WRITTEN_S", 0.2)

    async def scenario(server: Any) -> None:
        for path, method in product(SGLANG_ROUTES.split(), ("GET", "POST")):
            response = await server.http.request(method, path, content=b"")
            assert response.status_code != 404, path

    serve(scenario)
