"""Whatever the body of a control route holds, the answer is never a 500, and the server goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from setpoint_testing.fake_engine import FakeEngine

Serve = Callable[..., None]
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
words = st.text(max_size=5)
tags = st.lists(st.sampled_from(["kv_cache", "weights", "cuda_graph", "x"]), max_size=3)
KEYS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "/pause_generation": {"mode": st.sampled_from(["abort", "retract", "in_place", "x"])},
    "/continue_generation": {"torch_empty_cache": st.booleans()},
    "/fault_tolerance/apply": {
        "instruction": st.sampled_from(["pause", "retry", "scale_down", "x"]),
        "params": st.dictionaries(
            st.sampled_from(["dp_ranks", "removed_dp_ranks", "timeout"]),
            st.lists(st.integers(-1, 1), max_size=3) | anything,
        ),
        "request_id": words,
    },
    "/release_memory_occupation": {"tags": tags},
    "/resume_memory_occupation": {"tags": tags},
    "/update_weights_from_disk": {
        "model_path": words,
        "load_format": words,
        "abort_all_requests": st.booleans(),
        "keep_pause": st.booleans(),
        "weight_version": words,
    },
    "/update_weight_version": {"new_version": words, "abort_all_requests": st.booleans()},
    "/start_profile": {
        "output_dir": words,
        "num_steps": st.integers(),
        "start_step": st.integers(),
        "activities": st.lists(st.sampled_from(["CPU", "GPU", "MEM", "RPD"]), max_size=3),
        "profile_id": words,
        "profile_prefix": words,
        "with_stack": st.booleans(),
    },
    "/stop_profile": {},
    "/open_session": {
        "capacity_of_str_len": st.integers(),
        "session_id": words,
        "timeout": st.floats(),
        "streaming": st.booleans(),
    },
    "/close_session": {"session_id": words},
    "/generate": {
        "text": words,
        "rid": words,
        "return_hidden_states": st.booleans(),
        "session_params": st.dictionaries(
            st.sampled_from(["id", "rid", "offset", "replace", "drop_previous_output"]),
            words | st.integers() | st.booleans(),
        ),
        "sampling_params": st.just({"max_new_tokens": 2}),
    },
}


def body_of(path: str) -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    """Plausible values, and now and then any value."""
    plausible = KEYS[path]
    bodies = st.fixed_dictionaries(
        {}, optional={key: value | value | value | anything for key, value in plausible.items()}
    )
    return st.tuples(st.just(path), bodies)


@settings(max_examples=15, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from(sorted(KEYS)).flatmap(body_of), min_size=15, max_size=25))
def test_no_body_is_answered_with_500(
    serve: Serve,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    calls: list[tuple[str, dict[str, Any]]],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.gz").touch()  # the profile that the simulated engine says it has written

    async def scenario(server: Any) -> None:
        for path, body in calls:
            if path == "/generate":
                await server.http.post("/continue_generation", json={})
            response = await server.http.post(path, content=encoded(body), headers=JSON)
            event(f"{path} {response.status_code}")  # shown by --hypothesis-show-statistics
            assert response.status_code in (200, 202, 400), (path, body, response.text)
        await server.http.post("/continue_generation", json={})
        out = await server.generate(text="x", sampling_params={"max_new_tokens": 1})
        assert out["meta_info"]["finish_reason"]["type"] == "length"

    engine = FakeEngine(tokens_per_event=64)
    serve(scenario, engine, profiles_folder=str(tmp_path), hidden_size=4)


JSON = {"content-type": "application/json"}


def encoded(body: dict[str, Any]) -> bytes:
    """The body as JSON, with NaN and Infinity as some clients send them."""
    return json.dumps(body).encode("utf-8", "surrogatepass")
