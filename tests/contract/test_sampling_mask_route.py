"""``return_sampling_mask`` in native answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from setpoint_testing.fake_engine import FakeEngine

Serve = Callable[..., None]
SAMPLING = {"max_new_tokens": 4, "top_k": 9}
BODY = {"text": "abc", "return_sampling_mask": True, "sampling_params": SAMPLING}


@pytest.mark.parametrize("per_event", [1, 3])
def test_an_answer_has_one_for_each_token(serve: Serve, per_event: int) -> None:
    async def scenario(server: Any) -> None:
        out = await server.generate(**BODY)
        wanted = [[token, token + 1] for token in out["output_ids"]]
        assert out["meta_info"]["output_token_sampling_mask"] == wanted
        assert out["meta_info"]["output_token_sampling_mask_length"] == 4
        both = await server.generate(
            **BODY | {"text": ["ab", "c"], "return_sampling_mask": [False, True]}
        )
        assert "output_token_sampling_mask" not in both[0]["meta_info"]
        assert len(both[1]["meta_info"]["output_token_sampling_mask"]) == 4
        stopped = await server.generate(
            **BODY | {"sampling_params": {**SAMPLING, "max_new_tokens": 9, "stop": ["ab"]}}
        )
        assert len(stopped["meta_info"]["output_token_sampling_mask"]) == 2

    serve(scenario, FakeEngine(tokens_per_event=per_event))


def test_each_chunk_of_a_stream_has_all_so_far(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        response = await server.http.post("/generate", json=BODY | {"stream": True})
        lines = [line[6:] for line in response.text.split("\n") if line.startswith("data: {")]
        chunks = [json.loads(line)["meta_info"] for line in lines]
        assert [chunk["output_token_sampling_mask_length"] for chunk in chunks] == [1, 2, 3, 4]

    serve(scenario)


def test_each_chunk_of_an_incremental_stream_has_its_own(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        response = await server.http.post("/generate", json=BODY | {"stream": True})
        lines = [line[6:] for line in response.text.split("\n") if line.startswith("data: {")]
        for chunk in map(json.loads, lines):
            wanted = [[token, token + 1] for token in chunk["output_ids"]]
            assert chunk["meta_info"]["output_token_sampling_mask"] == wanted
        assert len(lines) >= 2

    serve(scenario, FakeEngine(tokens_per_event=2), incremental_streaming_output=True)


@pytest.mark.parametrize("sampling", [{}, {"top_k": 2000}])
def test_too_many_tokens_are_refused(serve: Serve, sampling: dict[str, Any]) -> None:
    async def scenario(server: Any) -> None:
        answer = await server.http.post("/generate", json=BODY | {"sampling_params": sampling})
        assert answer.status_code == 400
        assert "requires greedy sampling, or a top_k of at most 1024" in answer.text
        greedy = {"temperature": 0, **sampling}
        assert (await server.generate(**BODY | {"sampling_params": greedy}))["meta_info"]

    serve(scenario)


def test_of_several_prompts_the_wrong_one_is_named(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        body = BODY | {"text": ["a", "b"], "sampling_params": [{"temperature": 0}, {"top_k": 2000}]}
        answer = await server.http.post("/generate", json=body)
        assert answer.status_code == 400
        assert answer.json()["message"].startswith("prompt 2 of 2: return_sampling_mask requires")

    serve(scenario)
