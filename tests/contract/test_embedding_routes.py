"""/v1/embeddings through the openai client, and SGLang's /encode; refusals on both kinds of
server."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import numpy as np
import openai
import pytest

from setpoint.core.messages import Finish
from setpoint.core.model import Pooling
from setpoint_testing.fake_engine import EMBEDDING_SIZE, FakeEngine

Serve = Callable[..., None]
LAST = Pooling("last", True, EMBEDDING_SIZE, None, "test")
MATRYOSHKA = Pooling("mean", True, EMBEDDING_SIZE, (), "test")


def unit(*numbers: float) -> list[float]:
    vector = np.resize(np.array(numbers, np.float32), EMBEDDING_SIZE)
    return (vector / np.linalg.norm(vector)).tolist()


def test_the_openai_client_gets_vectors(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        answer = await server.openai.embeddings.create(model="m", input=["ab", "abcdef"])
        assert [item.index for item in answer.data] == [0, 1]
        np.testing.assert_allclose(answer.data[0].embedding, unit(97, 98), rtol=1e-6)
        np.testing.assert_allclose(answer.data[1].embedding, unit(97, 98, 99, 100), rtol=1e-6)
        assert (answer.object, answer.model, answer.data[0].object) == (
            "list",
            "org/tiny",
            "embedding",
        )
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (8, 8)
        first, second = server.engine.submitted
        assert (first.options.pooling, first.sampling.max_new_tokens) == ("last", 0)
        assert first.rid.endswith("_0")
        assert first.rid[:-1] == second.rid[:-1]

    serve(scenario, pooling=LAST)


@pytest.mark.parametrize(
    ("given", "prompts"),
    [("ab", [[97, 98]]), (["ab"], [[97, 98]]), ([5, 6], [[5, 6]]), ([[5], [6, 7]], [[5], [6, 7]])],
)
def test_every_form_of_input(serve: Serve, given: Any, prompts: list[list[int]]) -> None:
    async def scenario(server: Any) -> None:
        answer = (await server.http.post("/v1/embeddings", json={"input": given})).json()
        assert [request.prompt().tolist() for request in server.engine.submitted] == prompts
        assert answer["model"] == "org/tiny"
        for item, prompt in zip(answer["data"], prompts, strict=True):
            np.testing.assert_allclose(item["embedding"], unit(*prompt), rtol=1e-6)

    serve(scenario, pooling=LAST)


def test_base64_is_the_float32_bytes(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        body = {
            "input": "ab",
            "encoding_format": "base64",
            "extra_key": "tenant",
            "priority": 3,
            "routing_key": "r",
        }
        data = (await server.http.post("/v1/embeddings", json=body)).json()["data"]
        np.testing.assert_allclose(
            np.frombuffer(base64.b64decode(data[0]["embedding"]), "<f4"), unit(97, 98), rtol=1e-6
        )
        (request,) = server.engine.submitted
        assert (
            request.options.namespace,
            request.options.priority,
            request.options.routing_key,
        ) == ("6:tenant", 3, "r")

    serve(scenario, pooling=LAST)


def test_a_matryoshka_model_gives_shorter_vectors_of_length_one(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        answer = await server.openai.embeddings.create(model="m", input=[3, 4, 12], dimensions=2)
        np.testing.assert_allclose(answer.data[0].embedding, [0.6, 0.8], rtol=1e-6)
        encoded = (
            await server.http.post("/encode", json={"input_ids": [3, 4, 12], "dimensions": 2})
        ).json()
        np.testing.assert_allclose(encoded["embedding"], [0.6, 0.8], rtol=1e-6)
        with pytest.raises(openai.BadRequestError, match="1 to 4"):
            await server.openai.embeddings.create(model="m", input="a", dimensions=9)

    serve(scenario, pooling=MATRYOSHKA)


def test_encode_answers_one_or_a_list(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        one = (
            await server.http.post(
                "/encode", json={"text": "ab", "rid": "mine", "sampling_params": {}}
            )
        ).json()
        np.testing.assert_allclose(one["embedding"], unit(97, 98), rtol=1e-6)
        meta = one["meta_info"]
        assert (meta["id"], meta["prompt_tokens"], meta["finish_reason"]) == (
            "mine",
            2,
            {"type": "length", "length": 0},
        )
        many = (await server.http.post("/encode", json={"text": ["ab", "c"], "rid": "mine"})).json()
        assert [item["meta_info"]["id"] for item in many] == ["mine_0", "mine_1"]

    serve(scenario, pooling=LAST)


def test_the_two_kinds_of_server_refuse_each_others_work(serve: Serve) -> None:
    async def embeds(server: Any) -> None:
        assert (await server.http.get("/model_info")).json()["is_generation"] is False
        native = await server.http.post("/generate", json={"text": "a"})
        assert native.status_code == 400
        assert "--is-embedding" in native.json()["error"]["message"]
        for route, body in (
            ("completions", {"prompt": "a"}),
            ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            answer = await server.http.post(f"/v1/{route}", json=body)
            assert (answer.status_code, answer.json()["type"]) == (400, "invalid_request_error")
            assert "--is-embedding" in answer.json()["message"]
        assert (await server.http.get("/health_generate")).status_code == 200

    async def generates(server: Any) -> None:
        assert (await server.http.get("/model_info")).json()["is_generation"] is True
        native = await server.http.post("/encode", json={"text": "a"})
        assert native.status_code == 400
        assert "--is-embedding" in native.json()["error"]["message"]
        with pytest.raises(openai.BadRequestError, match="--is-embedding"):
            await server.openai.embeddings.create(model="m", input="a")

    serve(embeds, pooling=LAST)
    serve(generates)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "input"),
        ({"input": []}, "must not be empty"),
        ({"input": ""}, "empty"),
        ({"input": ["a", 1]}, "not both"),
        ({"input": [{"text": "a"}]}, "input"),
        ({"input": [1, 100_000]}, "out-of-vocabulary"),
        ({"input": "a" * 300}, "context length"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "dimensions": 2}, "is_matryoshka"),
        ({"input": "a", "model": "m:lora"}, "LoRA"),
        ({"input": "a", "stream": True}, "stream"),
    ],
)
def test_bad_bodies_are_refused(serve: Serve, body: dict[str, Any], words: str) -> None:
    async def scenario(server: Any) -> None:
        answer = await server.http.post("/v1/embeddings", json=body)
        assert (answer.status_code, answer.json()["object"]) == (400, "error")
        assert words in answer.json()["message"]
        assert not server.engine.submitted

    serve(scenario, pooling=LAST)


def test_an_abort_is_an_error_and_no_empty_vector(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        answer = await server.http.post("/v1/embeddings", json={"input": "a"})
        assert (answer.status_code, answer.json()["message"]) == (400, "Aborted")

    serve(
        scenario,
        FakeEngine(refuse=lambda request: Finish("abort", message="Aborted")),
        pooling=LAST,
    )
