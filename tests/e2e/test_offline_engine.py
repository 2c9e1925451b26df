"""The offline Engine with a real engine process: the server's answers, from threads, loops and
several engines at once."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from setpoint import Engine, SamplingParams
from setpoint.core.errors import ConfigError, ContextLengthError, EngineDeadError, RequestError
from setpoint_testing.server_process import ServerProcess, wait_until

GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
LONG = {"temperature": 0, "max_new_tokens": 3000, "ignore_eos": True}
PROMPTS = ["Once upon a time", "The capital", "a", "Zwölf Boxkämpfer"]
CONVERSATION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    with Engine(str(tiny_model), dtype="float32") as engine:
        yield engine


def is_idle(engine: Engine) -> bool:
    (state,) = engine.get_server_info()["internal_states"]
    pool = state["pool"]
    return bool(
        state["num_running"] == state["num_queued"] == 0
        and pool["free"] + pool["evictable"] == pool["total"]
    )


def comparable(result: dict[str, Any]) -> dict[str, Any]:
    changing = ("id", "e2e_latency", "cached_tokens", "cached_tokens_details")
    return {
        **result,
        "meta_info": {
            key: value for key, value in result["meta_info"].items() if key not in changing
        },
    }


def test_answers_are_the_servers(engine: Engine, tiny: ServerProcess) -> None:
    logprobs: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 2}
    ours = engine.generate(PROMPTS, GREEDY, **logprobs)
    theirs = tiny.generate(text=PROMPTS, sampling_params=GREEDY, **logprobs)
    assert [comparable(each) for each in ours] == [comparable(each) for each in theirs]
    assert (
        engine.generate(input_ids=[72, 105], sampling_params=SamplingParams(**GREEDY))["text"]
        == engine.generate("Hi", GREEDY)["text"]
    )


def test_nobodys_logging_is_touched(engine: Engine) -> None:
    ours = logging.getLogger("setpoint")
    assert (ours.handlers, ours.level, ours.propagate) == ([], logging.NOTSET, True)
    assert not [
        handler
        for handler in logging.getLogger().handlers
        if type(handler) is logging.StreamHandler
    ]


def test_chat_is_the_servers_chat(engine: Engine, tiny: ServerProcess) -> None:
    body = {"messages": CONVERSATION, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    reply = httpx.post(f"{tiny.url}/v1/chat/completions", json=body, timeout=60).json()
    text = reply["choices"][0]["message"]["content"]
    assert engine.chat(CONVERSATION, GREEDY)["text"] == text
    assert [each["text"] for each in engine.chat([CONVERSATION, CONVERSATION], GREEDY)] == [
        text,
        text,
    ]
    assert "".join(piece["text"] for piece in engine.stream_chat(CONVERSATION, GREEDY)) == text


def test_streams_add_up_to_the_answer(engine: Engine) -> None:
    whole = engine.generate(PROMPTS, GREEDY)
    texts, ids, ends = [""] * 4, [[] for _ in PROMPTS], [None] * 4
    for piece in engine.stream(PROMPTS, GREEDY):
        index = piece["index"]
        texts[index] += piece["text"]
        ids[index] += piece["output_ids"]
        ends[index] = piece["meta_info"]["finish_reason"]
    assert texts == [each["text"] for each in whole]
    assert ids == [each["output_ids"] for each in whole]
    assert ends == [each["meta_info"]["finish_reason"] for each in whole]


def test_a_closed_stream_frees_its_requests(engine: Engine) -> None:
    for stream in (engine.stream(PROMPTS, LONG), engine.stream_chat([CONVERSATION] * 4, LONG)):
        next(stream)
        stream.close()
        wait_until(lambda: is_idle(engine))


def test_more_prompts_than_a_body_may_hold_in_order(engine: Engine) -> None:
    prompts = [chr(97 + index % 26) * (1 + index % 3) for index in range(5000)]
    results = engine.generate(prompts, {"temperature": 0, "max_new_tokens": 1})
    assert [each["meta_info"]["prompt_tokens"] for each in results] == [
        len(prompt) for prompt in prompts
    ]
    samples = engine.generate(["a", "b"], {"n": 2, "max_new_tokens": 2, "sampling_seed": 1})
    assert [each["meta_info"]["prompt_tokens"] for each in samples] == [1] * 4


def test_async_calls_and_sync_ones_in_a_running_loop(engine: Engine) -> None:
    expected = engine.generate(PROMPTS, GREEDY)

    async def program() -> None:
        inside = engine.generate(PROMPTS[0], GREEDY)  # what a notebook's cell does
        gathered = await asyncio.gather(
            *(engine.async_generate(prompt, GREEDY) for prompt in PROMPTS)
        )
        assert [each["text"] for each in gathered] == [each["text"] for each in expected]
        assert inside["text"] == expected[0]["text"]
        streamed = [piece["text"] async for piece in engine.async_stream(PROMPTS[0], GREEDY)]
        assert "".join(streamed) == inside["text"]
        assert (await engine.async_chat(CONVERSATION, GREEDY))["text"] == "".join(
            [piece["text"] async for piece in engine.async_stream_chat(CONVERSATION, GREEDY)]
        )
        task = asyncio.create_task(engine.async_generate(PROMPTS, LONG))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(program())
    wait_until(lambda: is_idle(engine))


def test_ctrl_c_aborts_and_the_engine_stays_usable(engine: Engine) -> None:
    for call in (
        lambda: engine.generate(PROMPTS * 100, LONG),
        lambda: list(engine.stream(PROMPTS, LONG)),
    ):
        threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            call()
        wait_until(lambda: is_idle(engine))
    assert len(engine.generate("x", GREEDY)["output_ids"]) == 12


def test_abort_ends_by_the_beginning_of_a_rid(engine: Engine) -> None:
    answers: list[Any] = []
    thread = threading.Thread(
        target=lambda: answers.append(engine.generate(PROMPTS, LONG, rid="mine"))
    )
    thread.start()
    wait_until(lambda: not is_idle(engine))
    engine.abort("min")
    thread.join(30)
    assert [each["meta_info"]["finish_reason"]["type"] for each in answers[0]] == ["abort"] * 4
    with pytest.raises(RequestError, match="abort_all"):
        engine.abort()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"prompt": ["fine", ""]}, RequestError, "prompt 2 of 2: The prompt is empty"),
        (
            {"prompt": ["fine"], "sampling_params": [{"top_p": 2}]},
            RequestError,
            "prompt 1 of 1: top_p must be",
        ),
        (
            {"prompt": "x", "sampling_params": {"temprature": 1}},
            RequestError,
            "Unknown sampling parameter 'temprature'. Did you mean temperature",
        ),
        (
            {"prompt": "x", "sampling_params": {"max_tokens": 1}},
            RequestError,
            "Did you mean max_new_tokens",
        ),
        (
            {"prompt": "x", "sampling_params": {"regex": "("}},
            RequestError,
            "^Failed to compile regex grammar",
        ),
        ({"prompt": "x", "sampling_params": "hot"}, RequestError, "SamplingParams or a dict"),
        ({"prompt": "x", "input_ids": [1]}, RequestError, "Give prompt or input_ids, not both"),
        (
            {"input_ids": [[1], [9999]]},
            RequestError,
            "prompt 2 of 2: input_ids has the out-of-vocabulary token",
        ),
        ({"prompt": 5}, RequestError, "prompt must be a string or a list of strings, not int"),
        ({"prompt": [1, 2]}, RequestError, "pass token ids as input_ids"),
        ({"prompt": ["x", 2]}, RequestError, "prompt 2 of 2 must be a string, not int"),
        (
            {},
            RequestError,
            "prompt is missing: give a string or a list of strings, or token ids as input_ids",
        ),
        ({"prompt": "x" * 5000}, ContextLengthError, "context length"),
        ({"prompt": "x", "images": ["cat.png"]}, TypeError, "images"),
        ({"prompt": "x", "lora_path": "y"}, RequestError, "lora_path is not supported"),
    ],
)
def test_bad_requests_say_what_is_wrong(
    engine: Engine, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        engine.generate(**arguments)
    with pytest.raises(error, match=message):
        next(engine.stream(**arguments))


def test_an_answer_satisfies_its_expression(engine: Engine) -> None:
    answer = engine.generate("x", {"regex": "[0-9]{3}", "max_new_tokens": 8})
    assert answer["text"].isdigit()
    assert len(answer["text"]) == 3


def test_no_prompts_get_no_answers(engine: Engine) -> None:
    assert engine.generate([], GREEDY) == []
    assert list(engine.stream([], GREEDY)) == []
    with pytest.raises(TypeError, match="unexpected keyword argument 'images'"):
        engine.generate([], images=[])


def test_errors_of_a_call_name_keywords_and_methods(engine: Engine) -> None:
    with pytest.raises(
        RequestError,
        match=(
            r"^This Engine generates text. To get embeddings, create an Engine with is_embedding=True\.$"
        ),
    ):
        engine.encode("x")
    with pytest.raises(RequestError, match="enable allow_auto_truncate=True"):
        engine.generate("x" * 4095, {"max_new_tokens": 1})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modle_path": "x"}, "unknown option modle_path. Did you mean model_path"),
        ({"pipeline_parallel_size": 2}, "pp_size 2 is not supported"),
        ({"port": 1}, "port belongs to 'setpoint serve'"),
        ({"disable_radix_cache": "yes"}, "disable_radix_cache must be true or false"),
        ({"chat_template": "/nope"}, "^chat_template /nope: no such file"),
        ({"context_length": 10**6}, "^context_length 1000000 is more than"),
        (
            {"schedule_policy": "shortest-prefill-first", "disable_radix_cache": True},
            "drop disable_radix_cache=True or use another",
        ),
    ],
)
def test_bad_options_are_named_as_keywords(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine(**options)


def test_several_engines_and_the_death_of_one(engine: Engine, tiny_model: Path) -> None:
    expected = engine.generate(PROMPTS, GREEDY)
    with Engine(
        model_path=str(tiny_model),
        dtype="float32",
        max_total_tokens="20k",
        schedule_policy="lpm",
        max_engine_restarts=0,
    ) as second:
        assert second.get_server_info()["max_total_num_tokens"] == 20000
        assert [each["text"] for each in second.generate(PROMPTS, GREEDY)] == [
            each["text"] for each in expected
        ]
        stream = second.stream(PROMPTS, LONG)
        next(stream)
        (process,) = [each for each in psutil.Process().children() if each.pid == second.pid]
        threading.Timer(0.2, process.kill).start()
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            second.generate(PROMPTS, LONG)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            list(stream)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            second.generate("x")
        assert engine.generate(PROMPTS[0], GREEDY)["text"] == expected[0]["text"]
    with pytest.raises(EngineDeadError, match="shut down"):
        second.generate("x")
    second.shutdown()


@pytest.mark.full
def test_encode_gives_one_vector_per_prompt(tiny_model: Path) -> None:
    with Engine(
        str(tiny_model), dtype="float32", is_embedding=True, max_total_tokens="20k"
    ) as engine:
        one = engine.encode("Once upon a time")
        many = engine.encode(PROMPTS)
        assert engine.encode([]) == []
        assert many[0]["embedding"] == pytest.approx(one["embedding"], abs=1e-5)
        assert [each["meta_info"]["prompt_tokens"] for each in many] == [
            len(prompt.encode()) for prompt in PROMPTS
        ]
        assert (
            asyncio.run(engine.async_encode(input_ids=[[1, 2], [3]]))[1]["meta_info"][
                "prompt_tokens"
            ]
            == 1
        )
        with pytest.raises(RequestError, match="prompt 2 of 2: The prompt is empty"):
            engine.encode(["fine", ""])
        with pytest.raises(RequestError, match="does not generate text; call encode"):
            engine.generate("x")


EXIT = """
import os, sys
from setpoint import Engine
engine = Engine(sys.argv[1], dtype="float32")
if os.fork() == 0:
    try:
        engine.generate("x")
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    engine.shutdown()
    sys.exit(0)  # runs the finalizers, which must leave the parent's engine alone
os.wait()
engine.generate("x")
stream = engine.stream("Once", {"max_new_tokens": 3000, "ignore_eos": True})
next(stream)
print(engine.pid, sorted({"torch", "starlette"} & set(sys.modules)))
"""


@pytest.mark.full
def test_an_interpreter_may_exit_without_shutdown(tiny_model: Path) -> None:
    # From 3.12 on Python warns of any fork in a process with threads; here the child's own threads
    # are none of the parent's business.
    command = [
        sys.executable,
        "-W",
        "ignore:This process (pid=:DeprecationWarning",
        "-c",
        EXIT,
        str(tiny_model),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    # On a busy machine the start takes long enough to be spoken of, and not every processor has
    # all instructions.
    complaints = [
        line
        for line in done.stderr.splitlines()
        if not line.startswith("setpoint: Loading ") and "WARNING: Fallback: " not in line
    ]
    assert (done.returncode, complaints) == (0, [])
    child, parent = done.stdout.splitlines()
    assert (
        child
        == "EngineDeadError This Engine belongs to another process; create one after the fork."
    )
    pid, heavy = parent.split(" ", 1)
    assert heavy == "[]"
    wait_until(lambda: not psutil.pid_exists(int(pid)))


def test_an_engine_that_cannot_start_leaves_nothing_behind(
    tmp_path: Path, tiny_model: Path
) -> None:
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(Exception, match="nowhere"):
        Engine(str(tmp_path / "nowhere"))
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        Engine(str(tiny_model))
    assert {child.pid for child in psutil.Process().children()} == before


@pytest.mark.full
def test_hidden_states(tiny_model: Path) -> None:
    options = {"dtype": "float32", "enable_return_hidden_states": True}
    with Engine(str(tiny_model), **options) as engine:
        sampling = {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True}
        result = engine.generate(PROMPTS[0], sampling, return_hidden_states=True)
        meta = result["meta_info"]
        prompt, *rest = meta["hidden_states"]
        assert (len(prompt), len(rest)) == (meta["prompt_tokens"], 2)
        assert {len(state) for state in (*prompt, *rest)} == {48}
        with pytest.raises(TypeError, match="session_params"):
            engine.generate(PROMPTS[0], sampling, session_params={"id": "x"})
