"""Many clients at once: answers do not depend on the company, and no page stays behind."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest

from setpoint_testing.neartie import Greedy, Tally
from setpoint_testing.server_process import ServerProcess, running_server, wait_until

TOPICS = (
    "rain",
    "bread",
    "chess",
    "glass",
    "maps",
    "salt",
    "trees",
    "clocks",
    "ships",
    "bees",
    "sand",
    "bells",
    "ice",
    "roads",
    "coal",
    "wool",
)
ASKS = (
    "Say one thing about {}.",
    "Where does the word {} come from?",
    "Write a line of verse on {}.",
    "Explain {} to a child.",
)
QUESTIONS = [ask.format(topic) for topic in TOPICS for ask in ASKS]
RETRACTED = "KV cache pool is full. Retract requests. #retracted_reqs: "


def run(work: Callable[[aiohttp.ClientSession], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(1500), read_bufsize=1 << 22
        ) as session:
            return await work(session)

    return asyncio.run(main())


def streamed_chats(
    server: ServerProcess, questions: list[str], *, max_tokens: int, at_once: int
) -> list[Greedy]:
    """Greedy streamed answers; each token's bytes stand for its id."""

    async def main() -> list[Greedy]:
        gate = asyncio.Semaphore(at_once)
        client = openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", timeout=600, max_retries=0
        )

        async def one(question: str) -> Greedy:
            async with gate:
                stream = await client.chat.completions.create(
                    model="default",
                    messages=[{"role": "user", "content": question}],
                    max_tokens=max_tokens,
                    temperature=0,
                    stream=True,
                    logprobs=True,
                    top_logprobs=2,
                )
                tokens, finish = [], None
                async for chunk in stream:
                    tokens += chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
                    finish = chunk.choices[0].finish_reason or finish
            assert finish in ("stop", "length")
            ids = [int.from_bytes([1, *token.bytes]) for token in tokens]
            return Greedy.of_top(
                ids, [[top.logprob for top in token.top_logprobs] for token in tokens]
            )

        async with client:
            return await asyncio.gather(*map(one, questions))

    return asyncio.run(main())


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("num_alone", "max_tokens"),
    [(8, 12), pytest.param(64, 48, marks=pytest.mark.full)],
    ids=["sample", "all"],
)
def test_64_streaming_chats_answer_as_if_alone(
    smol: ServerProcess, num_alone: int, max_tokens: int
) -> None:
    together = streamed_chats(smol, QUESTIONS, max_tokens=max_tokens, at_once=64)
    wait_until(smol.is_idle)
    assert len(together) == 64
    assert len({tuple(answer.ids) for answer in together}) > 40
    alone = streamed_chats(smol, QUESTIONS[:: 64 // num_alone], max_tokens=max_tokens, at_once=1)
    tally = Tally()
    for question, answer, reference in zip(
        QUESTIONS[:: 64 // num_alone], together[:: 64 // num_alone], alone, strict=True
    ):
        tally.check(question, answer.ids, reference)
    print(f"64 chats together against alone: {tally}")


def generated(
    server: ServerProcess, prompts: list[list[int]], *, num_new: int, num_top: int = 0
) -> list[Any]:
    """All at once, each exactly ``num_new`` greedy tokens: /generate's answers."""

    async def work(session: aiohttp.ClientSession) -> list[Any]:
        async def one(index: int) -> Any:
            sampling = {"max_new_tokens": num_new, "min_new_tokens": num_new, "temperature": 0}
            body = {
                "input_ids": prompts[index],
                "sampling_params": sampling,
                "return_logprob": num_top > 0,
                "top_logprobs_num": num_top,
            }
            async with session.post(f"{server.url}/generate", json=body) as response:
                assert response.status == 200, await response.text()
                return await response.json()

        return await asyncio.gather(*map(one, range(len(prompts))))

    return run(work)


def check_small_pool(server: ServerProcess, answers: list[Any]) -> int:
    """All complete, some retracted, said so; nothing stays behind. -> retractions"""
    assert [answer["meta_info"]["completion_tokens"] for answer in answers] == [256] * 64
    num_retracted = sum(answer["meta_info"]["num_retractions"] for answer in answers)
    lines = [line for line in server.messages if RETRACTED in line]
    assert num_retracted == sum(int(line.split(RETRACTED)[1].split(",")[0]) for line in lines) > 0
    wait_until(server.is_idle)
    return num_retracted


def compare_small_pool(
    large: ServerProcess, small: ServerProcess, *, first_id: int, end_id: int
) -> None:
    """64 requests × (256 in, 256 out) on a large pool and on one of 4,000 tokens: the same greedy
    ids, by the near-tie rule."""
    prompts = np.random.default_rng(3).integers(first_id, end_id, (64, 256)).tolist()
    wanted = generated(large, prompts, num_new=256, num_top=2)
    assert sum(answer["meta_info"]["num_retractions"] for answer in wanted) == 0
    answers = generated(small, prompts, num_new=256)
    num_retracted, tally = check_small_pool(small, answers), Tally()
    for index, (answer, reference) in enumerate(zip(answers, wanted, strict=True)):
        tops = [
            [entry[0] for entry in position]
            for position in reference["meta_info"]["output_top_logprobs"]
        ]
        tally.check(str(index), answer["output_ids"], Greedy.of_top(reference["output_ids"], tops))
    print(f"a pool of 4,000 tokens against a large one: {num_retracted} retractions; {tally}")


@pytest.mark.full
def test_a_small_pool_retracts_and_changes_no_token(
    tiny: ServerProcess, tiny_model: Path, tmp_path: Path
) -> None:
    arguments = (
        "--model-path",
        str(tiny_model),
        "--dtype",
        "float32",
        "--max-total-tokens",
        "4000",
        "--strict-accounting",
    )
    with running_server(tmp_path, *arguments) as small:
        compare_small_pool(tiny, small, first_id=0, end_id=256)


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_a_small_pool_retracts_and_changes_no_token_of_the_default_model(
    smol: ServerProcess, tmp_path: Path
) -> None:
    with running_server(tmp_path, "--dtype", "float32", "--max-total-tokens", "4000") as small:
        compare_small_pool(smol, small, first_id=1000, end_id=40_000)


def test_clients_that_leave_free_their_pages(tiny: ServerProcess) -> None:
    """64 of them, each in the middle of a stream of 3,000 tokens."""
    body = {
        "text": "Once",
        "stream": True,
        "sampling_params": {"max_new_tokens": 3000, "temperature": 0.5, "ignore_eos": True},
    }

    async def work(session: aiohttp.ClientSession) -> int:
        responses = await asyncio.gather(
            *(session.post(f"{tiny.url}/generate", json=body) for _ in range(64))
        )
        for response in responses:
            await response.content.readline()
        async with session.get(f"{tiny.url}/server_info") as response:
            num_running = (await response.json())["internal_states"][0]["num_running"]
        for response in responses:
            response.close()
        return int(num_running)

    num_steps = len([line for line in tiny.messages if line.startswith("Decode batch")])
    assert run(work) > 32
    wait_until(tiny.is_idle)
    # 40 steps a line: to the end it would have been 75 lines more.
    assert len([line for line in tiny.messages if line.startswith("Decode batch")]) < num_steps + 40


def test_a_flood_is_refused_at_the_door(tiny_model: Path, tmp_path: Path) -> None:
    """500 at once where 8 run and 32 wait: the others get 503 in the shape of their route, and the
    server goes on."""
    sampling = {"max_new_tokens": 200, "temperature": 0, "ignore_eos": True}

    async def work(session: aiohttp.ClientSession) -> list[tuple[str, int, Any]]:
        async def one(index: int) -> tuple[str, int, Any]:
            route = ("/generate", "/v1/completions")[index % 2]
            body = (
                {"text": "a", "sampling_params": sampling}
                if index % 2 == 0
                else {"model": "m", "prompt": "a", "max_tokens": 200}
            )
            async with session.post(f"{server.url}{route}", json=body) as response:
                return route, response.status, await response.json()

        return await asyncio.gather(*map(one, range(500)))

    arguments = (
        "--model-path",
        str(tiny_model),
        "--max-running-requests",
        "8",
        "--max-queued-requests",
        "32",
    )
    with running_server(tmp_path, *arguments) as server:
        answers = run(work)
        statuses = [status for _, status, _ in answers]
        assert set(statuses) == {200, 503}
        assert 40 <= statuses.count(200) < 400
        for route, status, answer in answers:
            if status == 503:
                said = {
                    "message": "The request queue is full.",
                    "type": "server_error"
                    if route.startswith("/v1/")
                    else "ServiceUnavailableError",
                    "param": None,
                }
                flat = {"object": "error", **said, "code": 503}
                assert answer == {**flat, "error": {**said, "code": None}}, route
        wait_until(server.is_idle)
        assert (
            server.generate(text="a", sampling_params=sampling)["meta_info"]["completion_tokens"]
            == 200
        )
        assert "Traceback" not in server.errors


def test_abort_by_prefix_and_flush_when_busy_and_idle(tiny: ServerProcess) -> None:
    async def work(
        session: aiohttp.ClientSession,
    ) -> tuple[list[Any], tuple[int, str], tuple[int, str]]:
        async def one(rid: str, num_new: int) -> Any:
            body = {
                "text": "x",
                "rid": rid,
                "sampling_params": {
                    "max_new_tokens": num_new,
                    "temperature": 0,
                    "ignore_eos": True,
                },
            }
            async with session.post(f"{tiny.url}/generate", json=body) as response:
                assert response.status == 200
                return (await response.json())["meta_info"]["finish_reason"]

        async def flush(query: str = "") -> tuple[int, str]:
            async with session.post(f"{tiny.url}/flush_cache{query}") as response:
                return response.status, await response.text()

        rids = {"job-a1": 3900, "job-a2": 3900, "job-b": 1500}
        tasks = [asyncio.create_task(one(rid, count)) for rid, count in rids.items()]
        while (await asyncio.to_thread(tiny.state))["num_running"] < 3:
            await asyncio.sleep(0.01)
        busy = await flush()
        for body in ({"rid": "job-a"}, {"rid": ""}):
            async with session.post(f"{tiny.url}/abort_request", json=body) as response:
                assert (response.status, await response.text()) == (200, "")
        reasons = await asyncio.gather(*tasks)
        return reasons, busy, await flush("?timeout=5")

    reasons, busy, idle = run(work)
    assert [reason["type"] for reason in reasons] == ["abort", "abort", "length"]
    assert busy[0] == 400
    assert idle[0] == 200
    assert idle[1].startswith("Cache flushed.")
    pool = tiny.state()["pool"]
    assert pool["free"] == pool["total"]
    assert any("Cache flushed successfully!" in line for line in tiny.messages)
    assert any(
        "Cache not flushed because there are pending requests. #queue-req: 0, #running-req: 3"
        in line
        for line in tiny.messages
    )


def test_json_of_a_stream_is_whole(tiny: ServerProcess) -> None:
    """Cumulative pieces: each text begins with the one before, the last is the answer of a request
    that did not stream."""
    body = {
        "text": "stream me",
        "sampling_params": {"max_new_tokens": 60, "temperature": 0, "ignore_eos": True},
    }

    async def work(session: aiohttp.ClientSession) -> list[str]:
        async with session.post(f"{tiny.url}/generate", json=body | {"stream": True}) as response:
            lines = [line async for line in response.content if line.strip()]
        assert lines.pop() == b"data: [DONE]\n"
        return [json.loads(line.removeprefix(b"data: "))["text"] for line in lines]

    texts = run(work)
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert texts[-1] == tiny.generate(**body)["text"]
    assert len(texts) > 10
