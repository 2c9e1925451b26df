"""Profiles over HTTP: where clients may have them written; and routes that say what is missing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from setpoint.core.operations import FreezeGarbage, StartProfile, StopProfile
from setpoint.frontend.apis.sglang.missing import MISSING

Serve = Callable[..., None]


def test_profiles(serve: Serve, tmp_path: Path) -> None:
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
        engine.refuse_operation = "No profile is running."
        assert (await http.post("/stop_profile")).status_code == 400

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


@pytest.mark.parametrize("path", MISSING)
def test_what_is_missing_is_named(serve: Serve, path: str) -> None:
    async def scenario(server: Any) -> None:
        for method in ("GET", "POST"):
            response = await server.http.request(method, path)
            assert response.status_code == 501
            assert f"{path} is not supported by this server yet" in response.json()["message"]

    serve(scenario)
