"""``/v1/score``, ``/v1/rerank`` and the refusal to classify, with a fake engine (docs/scoring.md).
The fake engine gives token n the logprob -n."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from setpoint.core.messages import Finish
from setpoint.core.model import Pooling
from setpoint.frontend.text.template import ChatTemplate
from setpoint_testing.fake_engine import FakeEngine

Serve = Callable[..., None]
SCORE = "/v1/score"
RERANK = "/v1/rerank"
BODY = {"query": "Is it? ", "items": ["a", "bc"], "label_token_ids": [2, 0, 1]}
POOLING = Pooling("last", normalize=True, size=4, lengths=(), why="")
TEMPLATE = (
    "Answer yes or no. {{ instruct | default('Fits?') }} Query: {{ messages[0].content }}"
    " Document: {{ messages[1].content }}\n"
)


async def post(server: Any, route: str, body: dict[str, Any]) -> Any:
    answer = await server.http.post(route, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def prompts_of(server: Any) -> list[str]:
    return [bytes(each.prompt().tolist()).decode() for each in server.engine.submitted]


def test_scores_are_the_probabilities_of_the_labels(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        answer = await post(server, SCORE, BODY)
        num_prompt = 2 * len("Is it? ") + 3
        expected = [math.exp(-2), 1.0, math.exp(-1)]
        assert answer == {
            "scores": [pytest.approx(expected)] * 2,
            "model": "org/tiny",
            "usage": {
                "prompt_tokens": num_prompt,
                "completion_tokens": 0,
                "total_tokens": num_prompt,
            },
            "object": "scoring",
        }
        assert prompts_of(server) == ["Is it? a", "Is it? bc"]
        sampling = server.engine.submitted[0].sampling
        assert (sampling.temperature, sampling.max_new_tokens) == (1.0, 1)
        softmax = await post(server, SCORE, BODY | {"apply_softmax": True})
        assert softmax["scores"][0] == pytest.approx([each / sum(expected) for each in expected])
        assert sum(softmax["scores"][1]) == pytest.approx(1)

    serve(scenario)


@pytest.mark.parametrize(
    ("body", "prompts"),
    [
        ({"items": "a"}, ["Is it? a"]),
        ({"item_first": True}, ["aIs it? ", "bcIs it? "]),
        ({"query": [120], "items": [[97], [98, 99]]}, ["xa", "xbc"]),
        ({"query": [120], "items": [[97]], "item_first": True}, ["ax"]),
    ],
)
def test_the_query_stands_before_or_behind_each_item(
    serve: Serve, body: dict[str, Any], prompts: list[str]
) -> None:
    async def scenario(server: Any) -> None:
        await post(server, SCORE, BODY | body)
        assert prompts_of(server) == prompts

    serve(scenario)


def test_an_embedding_model_ranks_by_cosine(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        documents = ["xy", "ab", "ba"]
        ranked = await post(server, RERANK, {"query": "ab", "documents": documents})
        assert [entry["index"] for entry in ranked] == [1, 0, 2]
        assert [entry["document"] for entry in ranked] == ["ab", "xy", "ba"]
        assert ranked[0]["score"] == pytest.approx(1)
        assert ranked[0]["score"] > ranked[1]["score"] > ranked[2]["score"]
        assert ranked[0]["meta_info"]["prompt_tokens"] == 2
        assert len({entry["meta_info"]["id"] for entry in ranked}) == 3
        few = await post(
            server,
            RERANK,
            {"query": "ab", "documents": documents, "top_n": 1, "return_documents": False},
        )
        assert [(entry["index"], entry["document"]) for entry in few] == [(1, None)]
        refused = await server.http.post(
            RERANK, json={"query": "ab", "documents": documents, "instruct": "Judge."}
        )
        assert refused.status_code == 400

    serve(scenario, pooling=POOLING)


def test_a_reranker_ranks_by_its_answers(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(server: Any) -> None:
        text = server.service.answering.text
        monkeypatch.setattr(text, "_template", ChatTemplate(TEMPLATE))
        words = {"yes": [ord("y")], "no": [ord("n")]}
        encode = text.tokenizer.encode
        monkeypatch.setattr(
            text.tokenizer,
            "encode",
            lambda given, **options: words.get(given) or encode(given, **options),
        )
        body = {"query": "q?", "documents": ["one", "two"], "instruct": "Hm?"}
        ranked = await post(server, RERANK, body)
        assert prompts_of(server) == [
            "Answer yes or no. Hm? Query: q? Document: one",
            "Answer yes or no. Hm? Query: q? Document: two",
        ]
        yes, no = math.exp(-ord("y")), math.exp(-ord("n"))
        assert [entry["score"] for entry in ranked] == pytest.approx([yes / (yes + no)] * 2)
        assert [entry["index"] for entry in ranked] == [0, 1]

    serve(scenario)


BAD_FIELDS: list[tuple[str, dict[str, Any], str]] = [
    (SCORE, {"query": None}, "query must be a string or a list, got null."),
    (SCORE, {"items": [1]}, "items must be strings if query is a string."),
    (SCORE, {"items": ["a", [1]]}, "items must be strings if query is a string."),
    (SCORE, {"query": [1]}, "items must be lists of token ids if query is a list of token ids."),
    (SCORE, {"query": [999], "items": [[1]]}, "query has the out-of-vocabulary token id 999"),
    (SCORE, {"label_token_ids": []}, "label_token_ids must not be empty."),
    (SCORE, {"label_token_ids": [999]}, "label_token_ids: Token ID 999 is out of vocabulary"),
    (SCORE, {"label_token_ids": "yes"}, "label_token_ids must be a list, got a string."),
    (SCORE, {"apply_softmax": 3}, "apply_softmax must be true or false, got a whole number."),
    (SCORE, {"items": ["a" * 300]}, "longer than the model's context length"),
    (RERANK, {"query": " ", "documents": ["a"]}, "query must not be empty."),
    (RERANK, {"documents": []}, "documents must not be empty."),
    (RERANK, {"documents": ["a", ""]}, "documents[1] must not be empty."),
    (RERANK, {"documents": [5]}, "documents[0] must be a string, got a whole number."),
    (RERANK, {"documents": ["a"], "top_n": 0}, "top_n must be at least 1, got 0."),
    (RERANK, {"documents": ["a"]}, "/v1/rerank needs an embedding model (--is-embedding)"),
    ("/v1/classify", {}, "Classification needs a model with a classification head"),
    ("/classify", {}, "Classification needs a model with a classification head"),
]


def test_a_bad_field_is_named(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        for route, changes, message in BAD_FIELDS:
            body = BODY if route == SCORE else {"query": "q"}
            answer = await server.http.post(route, json=body | changes)
            assert answer.status_code == 400, (route, changes, answer.text)
            assert message in answer.json()["error"]["message"], (route, changes)
        assert server.engine.submitted == []

    serve(scenario)


def test_an_aborted_score_is_an_error(serve: Serve) -> None:
    aborted = Finish("abort", message="Aborted.")

    async def scenario(server: Any) -> None:
        answer = await server.http.post(SCORE, json=BODY)
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, "Aborted.")

    serve(scenario, FakeEngine(refuse=lambda request: aborted))


@pytest.mark.parametrize("query", ["q", [1, 2]])
def test_no_items_have_no_scores(serve: Serve, query: Any) -> None:
    async def scenario(server: Any) -> None:
        answer = await post(server, SCORE, BODY | {"query": query, "items": []})
        assert answer["scores"] == []
        assert answer["usage"] == {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        assert server.engine.submitted == []

    serve(scenario)
