"""Implements ``/v1/score`` and ``/v1/rerank`` (docs/scoring.md) from body to reply, without HTTP:
the probabilities of next tokens, and the relevance of documents for a query."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from setpoint.core.errors import RequestError
from setpoint.core.request import Ids, LogprobOptions, Request, RequestOptions
from setpoint.core.sampling import SamplingParams
from setpoint.frontend.answering import Answering
from setpoint.frontend.apis.openai.bodies.openai_bodies import AnyBody
from setpoint.frontend.apis.openai.bodies.prompt_fields import read_prompts
from setpoint.frontend.embedding import vector_of
from setpoint.frontend.intake import MAX_SEQUENCES, namespace, new_rid
from setpoint.frontend.jobs import Job, SequenceOutput

SCORE_ROUTE = "/v1/score"
RERANK_ROUTE = "/v1/rerank"

ONE_TOKEN = SamplingParams(max_new_tokens=1, temperature=1.0)
"""Parameters that return the logprobs of the next token, without the effects of sampling."""


_Judge = Callable[[Sequence[SequenceOutput]], list[float]]
"""Makes the score of each document from the outputs of the job."""


class ScoreBody(AnyBody, kw_only=True):
    query: str | list[int]
    items: str | list[Any]
    """Texts if the query is a text, otherwise lists of token ids."""
    label_token_ids: list[int]
    apply_softmax: bool | None = False
    item_first: bool | None = False


class RerankBody(AnyBody, kw_only=True):
    query: str
    documents: list[str]
    instruct: str | None = None
    """A description of relevance, for the chat template of a reranker."""
    top_n: int | None = None
    return_documents: bool | None = True


class ScoringExchange:
    """One request between its checked body and its reply."""

    def __init__(self, job: Job, reply: Callable[[Sequence[SequenceOutput]], Any]) -> None:
        self.job = job
        self.reply = reply
        """Makes the reply from the job's outputs at its end. Raises RequestError (400) if one of
        them was aborted."""


class ScoringApi:
    def __init__(self, answering: Answering) -> None:
        self._answering = answering

    async def score(self, raw: dict[str, Any]) -> ScoringExchange:
        """Check and tokenize a body. Raises RequestError for one that cannot be honoured."""
        body, warnings = self._answering.parser.read(raw, ScoreBody, route=SCORE_ROUTE)
        body.check()
        if not body.label_token_ids:
            raise RequestError("label_token_ids must not be empty.")
        size = self._answering.config.vocab_size
        for label in body.label_token_ids:
            if not 0 <= label < size:
                raise RequestError(
                    f"label_token_ids: Token ID {label} is out of vocabulary; valid ids are 0 to"
                    f" {size - 1}."
                )
        prompts = await self._pairs(body)
        warnings += body.other_model(self._answering.config.served_model_name)
        job = self._next_token_job(prompts, body, tuple(body.label_token_ids), raw)

        def reply(outputs: Sequence[SequenceOutput]) -> dict[str, Any]:
            num_prompt = sum(output.num_prompt for output in outputs)
            return {
                "scores": [_scores(output, softmax=bool(body.apply_softmax)) for output in outputs],
                "model": self._answering.config.served_model_name,
                "usage": {
                    "prompt_tokens": num_prompt,
                    "completion_tokens": 0,
                    "total_tokens": num_prompt,
                },
                "object": "scoring",
                **({"warnings": warnings} if warnings else {}),
            }

        return ScoringExchange(job, reply)

    async def rerank(self, raw: dict[str, Any]) -> ScoringExchange:
        """Like ``score``. Also raises RequestError (400) for a model that cannot rank."""
        # The answer is a plain list, which has no place for warnings.
        body, _ = self._answering.parser.read(raw, RerankBody, route=RERANK_ROUTE)
        body.check()
        _check_documents(body)
        judge = self._by_vectors if self._answering.config.pooling else self._by_answers
        job, scores = await judge(body, raw)

        def reply(outputs: Sequence[SequenceOutput]) -> list[dict[str, Any]]:
            documents = outputs[-len(body.documents) :]
            ranked = sorted(enumerate(scores(outputs)), key=lambda entry: -entry[1])
            return [
                {
                    "score": score,
                    "document": body.documents[index] if body.return_documents else None,
                    "index": index,
                    "meta_info": {
                        "id": documents[index].rid,
                        "prompt_tokens": documents[index].num_prompt,
                    },
                }
                for index, score in ranked[: body.top_n]
            ]

        return ScoringExchange(job, reply)

    async def _pairs(self, body: ScoreBody) -> list[Ids]:
        """The prompts: the query with each item after it, or before it."""
        intake = self._answering.intake
        items = [body.items] if isinstance(body.items, str) else body.items
        if not items:
            return []
        if isinstance(body.query, str):
            if not all(isinstance(item, str) for item in items):
                raise RequestError("items must be strings if query is a string.")
            query = body.query
            return await read_prompts(
                [item + query if body.item_first else query + item for item in items],
                intake,
                name="items",
            )
        if not all(isinstance(item, list) for item in items):
            raise RequestError("items must be lists of token ids if query is a list of token ids.")
        lists = await read_prompts(items, intake, name="items")
        asked = intake.prompt_ids(body.query, name="query")
        return [np.concatenate((ids, asked) if body.item_first else (asked, ids)) for ids in lists]

    def _next_token_job(
        self, prompts: Sequence[Ids], body: AnyBody, labels: tuple[int, ...], raw: dict[str, Any]
    ) -> Job:
        options = RequestOptions(
            logprobs=LogprobOptions(ids=labels),
            namespace=namespace(body.extra_key, body.cache_salt),
            priority=body.priority,
            routing_key=body.routing_key or "",
        )
        requests: list[Request] = []
        rid = body.rid or new_rid()
        for index, prompt in enumerate(prompts):
            requests += self._answering.intake.requests(
                prompt, ONE_TOKEN, options, rid=f"{rid}_{index}"
            )
        return self._answering.jobs.make(requests, received=raw, api="OpenAI")

    async def _by_vectors(self, body: RerankBody, raw: dict[str, Any]) -> tuple[Job, _Judge]:
        """The job and the judge of an embedding model: scores are cosines between the vectors of
        the query and of each document."""
        if body.instruct:
            raise RequestError(
                "instruct is for rerankers only. For an embedding model, write it into query as the"
                " model card says."
            )
        intake, pooling = self._answering.intake, self._answering.config.pooling
        shared = namespace(body.extra_key, body.cache_salt)
        options = RequestOptions(
            namespace=shared, priority=body.priority, routing_key=body.routing_key or ""
        )
        rid = body.rid or new_rid()
        requests = [
            intake.embedding_request(await intake.encode(text), options, rid=f"{rid}_{index}")
            for index, text in enumerate((body.query, *body.documents))
        ]

        def scores(outputs: Sequence[SequenceOutput]) -> list[float]:
            query, *documents = [
                vector_of(output, pooling).astype(np.float64) for output in outputs
            ]
            return [_cosine(query, document) for document in documents]

        return self._answering.jobs.make(requests, received=raw, api="OpenAI"), scores

    async def _by_answers(self, body: RerankBody, raw: dict[str, Any]) -> tuple[Job, _Judge]:
        """The job and the judge of a reranker: scores say how much likelier the model answers "yes"
        than "no"."""
        text = self._answering.text
        if not text.template_reads("instruct"):
            raise RequestError(
                f"{RERANK_ROUTE} needs an embedding model (--is-embedding), or a model that answers"
                " yes or no with the chat template of a reranker, which has the variable instruct."
                f" For another template, {text.template_advice}."
            )
        labels = tuple([await self._single_token(word) for word in ("yes", "no")])
        variables = {} if body.instruct is None else {"instruct": body.instruct}
        prompts = []
        for document in body.documents:
            pair = [
                {"role": "query", "content": body.query},
                {"role": "document", "content": document},
            ]
            prompt = await text.render_chat(pair, variables=variables)
            prompts.append(await self._answering.intake.encode(prompt, add_special_tokens=False))
        job = self._next_token_job(prompts, body, labels, raw)
        return job, lambda outputs: [_scores(output, softmax=True)[0] for output in outputs]

    async def _single_token(self, word: str) -> int:
        ids = await self._answering.text.encode(word, add_special_tokens=False)
        if len(ids) != 1:
            raise RequestError(
                f"{RERANK_ROUTE}: the tokenizer of this model has no token {word!r}."
            )
        return int(ids[0])


def _check_documents(body: RerankBody) -> None:
    if not body.query.strip():
        raise RequestError("query must not be empty.")
    if not body.documents:
        raise RequestError("documents must not be empty.")
    if len(body.documents) >= MAX_SEQUENCES:
        raise RequestError(f"documents must have at most {MAX_SEQUENCES - 1} entries.")
    for index, document in enumerate(body.documents):
        if not document.strip():
            raise RequestError(f"documents[{index}] must not be empty.")
    if body.top_n is not None and body.top_n < 1:
        raise RequestError(f"top_n must be at least 1, got {body.top_n}.")


def _scores(output: SequenceOutput, *, softmax: bool) -> list[float]:
    """The probability of each label as the next token; with softmax, relative to the labels
    only."""
    finish = output.finish
    if finish is not None and finish.type == "abort":
        raise RequestError(finish.message or "The request was aborted.")
    logprobs = output.logprobs.block().picked[0]
    highest = max(logprobs) if softmax else 0.0
    weights = [math.exp(value - highest) for value in logprobs]
    total = sum(weights) if softmax else 1.0
    return [weight / total for weight in weights]


def _cosine(one: Any, other: Any) -> float:
    length = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) / length if length else 0.0
