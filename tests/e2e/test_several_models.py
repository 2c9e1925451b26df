"""One server with two models, of which one fits: requests of both over real HTTP, with real engines."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from setpoint_testing.byte_tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE, write_byte_tokenizer
from setpoint_testing.server_process import (
    PATIENCE_S,
    ServerProcess,
    engines_of,
    running_server,
    wait_until,
)
from setpoint_testing.tiny_models import write_tiny_llama

COMMON = ("--dtype", "float32", "--max-total-tokens", "8192", "--enable-metrics")
NUM_CLIENTS, NUM_REQUESTS = 3, 4
PROMPTS = ["Hello", "The capital of France is", "1 2 3 4", "Once upon a time"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two architectures with other vocabularies, so that no answer fits the other model."""
    found = {}
    for name, shape in {
        "llama": {},
        "mistral": {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "num_hidden_layers": 3,
            "vocab_size": VOCAB_SIZE + 64,
        },
    }.items():
        ids = {"vocab_size": VOCAB_SIZE, "bos_token_id": BOS_ID, "eos_token_id": EOS_ID}
        folder = tmp_path_factory.mktemp(name)
        config = {**ids, "max_position_embeddings": 4096, **shape}
        found[name] = write_tiny_llama(folder, seed=len(name), **config)
        write_byte_tokenizer(folder)
    return found


def arguments(folders: dict[str, Path]) -> list[str]:
    named = [f"{name}={folder}" for name, folder in folders.items()]
    return [*COMMON, *(word for each in named for word in ("--model-path", each))]


@pytest.fixture(scope="module")
def expected(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], str]:
    """(model, prompt) -> the text that the model gives when it is served alone."""
    found = {}
    for name, folder in folders.items():
        with running_server(
            tmp_path_factory.mktemp("alone"), *COMMON, "--model-path", str(folder)
        ) as server:
            for prompt in PROMPTS:
                found[name, prompt] = complete(server, name, prompt).json()["choices"][0]["text"]
    return found


@pytest.fixture(scope="module")
def server(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    with running_server(tmp_path_factory.mktemp("several"), *arguments(folders)) as server:
        yield server


def body(model: str, prompt: str, *, num_tokens: int = 24) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def complete(server: ServerProcess, model: str, prompt: str, **more: Any) -> httpx.Response:
    response = httpx.post(
        f"{server.url}/v1/completions", json=body(model, prompt, **more), timeout=PATIENCE_S
    )
    assert response.status_code == 200, response.text
    return response


def states(server: ServerProcess) -> dict[str, str]:
    models = httpx.get(f"{server.url}/v1/models", timeout=PATIENCE_S).json()["data"]
    return {each["id"]: each["state"] for each in models}


def post(server: ServerProcess, path: str, content: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=content, timeout=PATIENCE_S)


async def streamed(
    client: httpx.AsyncClient, url: str, model: str, prompt: str, **more: Any
) -> str:
    """The text of a whole stream."""
    text = ""
    wanted = {**body(model, prompt, **more), "stream": True}
    async with client.stream("POST", f"{url}/v1/completions", json=wanted) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                chunk = httpx.Response(200, text=line.removeprefix("data: ")).json()
                assert "error" not in chunk, chunk
                text += chunk["choices"][0]["text"]
            is_whole = line == "data: [DONE]"
            if is_whole:
                return text
    raise AssertionError("the stream ended without its last event")


def load(
    server: ServerProcess, expected: dict[tuple[str, str], str], *, while_running: Any
) -> None:
    """Clients of both models, each of which sends its next request when one has ended; every
    stream must be whole and like that of the model alone."""

    async def client(http: httpx.AsyncClient, model: str, offset: int) -> None:
        for number in range(NUM_REQUESTS):
            prompt = PROMPTS[(number + offset) % len(PROMPTS)]
            assert await streamed(http, server.url, model, prompt) == expected[model, prompt]

    async def run() -> None:
        models = {model for model, _ in expected}
        async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
            await asyncio.gather(
                while_running(),
                *(client(http, model, i) for model in models for i in range(NUM_CLIENTS)),
            )

    asyncio.run(run())


async def nothing() -> None:
    pass


def test_no_stream_is_lost_under_load_from_both_models(
    server: ServerProcess, expected: dict[tuple[str, str], str]
) -> None:
    load(server, expected, while_running=nothing)
    assert sorted(states(server).values()) == ["loaded", "unloaded"]
    assert any("is loaded, which took" in line for line in server.messages)
    page = httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).text
    for model in ("llama", "mistral"):
        (loads,) = [
            line for line in page.splitlines() if f'model_loads_total{{model_name="{model}"' in line
        ]
        # The first one may have answered everything before the other got its room.
        assert float(loads.split()[-1]) >= (model == "mistral")
        assert any(
            line.startswith("sglang:prompt_tokens_total{") and f'model_name="{model}"' in line
            for line in page.splitlines()
        )


def test_a_model_that_is_never_idle_makes_room_for_one_that_waits(
    server: ServerProcess, expected: dict[tuple[str, str], str]
) -> None:
    """Its clients' answers have several lengths, so that they do not end together."""

    async def run() -> None:
        async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
            waiting: list[asyncio.Task[str]] = []

            async def busy(num_tokens: int) -> None:
                while not waiting or not waiting[0].done():
                    await streamed(http, server.url, "llama", "Hello", num_tokens=num_tokens)

            clients = [asyncio.create_task(busy(num)) for num in (200, 330, 470, 610)]
            await asyncio.sleep(0.5)
            waiting.append(asyncio.create_task(streamed(http, server.url, "mistral", "Hello")))
            assert await waiting[0] == expected["mistral", "Hello"]
            await asyncio.gather(*clients)

    asyncio.run(run())


def test_every_dialect_finds_the_model(server: ServerProcess) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    for model in ("llama", "mistral", "llama"):
        bodies: dict[str, dict[str, Any]] = {
            "/v1/chat/completions": {"messages": chat, "max_tokens": 3},
            "/v1/completions": {"prompt": "Hi", "max_tokens": 3},
            "/v1/responses": {"input": "Hi", "max_output_tokens": 3},
            "/v1/messages": {"messages": chat, "max_tokens": 3},
            "/api/chat": {"messages": chat, "stream": False, "options": {"num_predict": 3}},
            "/api/generate": {"prompt": "Hi", "stream": False, "options": {"num_predict": 3}},
        }
        for path, content in bodies.items():
            answer = post(server, path, {"model": model, **content})
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == model
    native = {"text": "Hi", "sampling_params": {"max_new_tokens": 3}}
    assert "warnings" not in post(server, "/generate", {"model": "mistral", **native}).text
    assert post(server, "/generate?model=mistral", native).status_code == 200
    info = httpx.get(f"{server.url}/model_info?model=mistral", timeout=PATIENCE_S).json()
    assert info["model_type"] == "mistral"


def test_the_wait_for_a_model_is_shown(server: ServerProcess) -> None:
    """Red before: load_duration was 0, and the log had only the time to the first token."""

    def ask() -> dict[str, Any]:
        content = {"model": "mistral", "prompt": "Hi", "options": {"num_predict": 2}}
        return dict(post(server, "/api/generate", {**content, "stream": False}).json())

    complete(server, "llama", "Hello")
    wait_until(lambda: states(server)["mistral"] == "unloaded")
    found = ask()
    assert found["load_duration"] > 0
    parts = ("load_duration", "prompt_eval_duration", "eval_duration")
    assert sum(found[part] for part in parts) <= found["total_duration"]
    assert ask()["load_duration"] == 0

    def lines() -> list[str]:
        return [each for each in server.messages if '"POST /api/generate' in each]

    wait_until(lambda: len(lines()) > 1 and "load " in lines()[-2])
    assert re.search(r", load \d+\.\d{3} s, queue \d", lines()[-2])
    assert "load " not in lines()[-1]


def test_a_request_without_a_model_is_for_the_first(server: ServerProcess) -> None:
    for model in ({}, {"model": "default"}, {"model": ""}):
        answer = post(server, "/v1/completions", {**model, "prompt": "Hi", "max_tokens": 1})
        assert answer.json()["model"] == "llama", answer.text
    answer = post(server, "/v1/completions", {"model": 5, "prompt": "Hi", "max_tokens": 1})
    assert answer.status_code == 400
    other_name = {"model": "mistral", "name": {"of": "something"}, "prompt": "Hi", "max_tokens": 1}
    assert post(server, "/v1/completions", other_name).json()["model"] == "mistral"
    answer = post(server, "/api/show", {"name": "mistral:latest"})
    assert answer.json()["details"]["family"] == "mistral", answer.text


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/v1/chat/completions", lambda answer: answer["error"]["message"]),
        ("/v1/embeddings", lambda answer: answer["error"]["message"]),
        ("/v1/messages", lambda answer: answer["error"]["message"]),
        ("/api/chat", lambda answer: answer["error"]),
        ("/generate", lambda answer: answer["error"]["message"]),
    ],
)
def test_an_unknown_model_is_answered_with_the_names(
    server: ServerProcess, path: str, message: Callable[[Any], str]
) -> None:
    answer = post(server, path, {"model": "other"})
    assert answer.status_code == 404
    expected = "The model 'other' does not exist; there are llama, mistral."
    assert message(answer.json()) == expected
    answer = httpx.get(f"{server.url}/v1/models/other", timeout=PATIENCE_S)
    assert answer.json()["error"]["message"] == expected


def test_controls_name_their_model_or_are_refused(server: ServerProcess) -> None:
    answer = post(server, "/set_internal_state", {"server_args": {"stream_interval": 2}})
    assert answer.status_code == 400
    assert "?model=NAME" in answer.text
    change = {"server_args": {"stream_interval": 2}}
    assert post(server, "/set_internal_state?model=mistral", change).status_code == 200
    values = {
        model: httpx.get(f"{server.url}/server_info?model={model}", timeout=PATIENCE_S).json()[
            "stream_interval"
        ]
        for model in ("llama", "mistral")
    }
    assert values == {"llama": 1, "mistral": 2}
    answer = post(server, "/release_memory_occupation?model=mistral", {})
    assert answer.status_code == 400
    assert "/models/unload" in answer.text


def test_models_are_loaded_and_unloaded_when_a_client_asks(server: ServerProcess) -> None:
    assert post(server, "/models/load", {"model": "mistral"}).json() == {"success": True}
    assert states(server) == {"llama": "unloaded", "mistral": "loaded"}
    assert post(server, "/models/unload", {"model": "mistral"}).json() == {"success": True}
    wait_until(lambda: states(server)["mistral"] == "unloaded")
    assert httpx.get(f"{server.url}/health", timeout=PATIENCE_S).status_code == 200
    assert httpx.get(f"{server.url}/ready", timeout=PATIENCE_S).status_code == 200
    assert httpx.get(f"{server.url}/api/ps", timeout=PATIENCE_S).json() == {"models": []}
    tags = httpx.get(f"{server.url}/api/tags", timeout=PATIENCE_S).json()["models"]
    assert [each["name"] for each in tags] == ["llama", "mistral"]
    assert states(server) == {"llama": "unloaded", "mistral": "unloaded"}, "a probe loads nothing"


def test_keep_alive_says_how_long_a_model_stays(server: ServerProcess) -> None:
    def ask(keep_alive: Any, prompt: str = "Hi") -> dict[str, Any]:
        content = {"model": "mistral", "prompt": prompt, "options": {"num_predict": 2}}
        answer = post(
            server, "/api/generate", {**content, "stream": False, "keep_alive": keep_alive}
        )
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def running() -> list[dict[str, Any]]:
        models = httpx.get(f"{server.url}/api/ps", timeout=PATIENCE_S).json()["models"]
        return list(models)

    assert ask(-1)["done"]
    (entry,) = running()
    assert (entry["name"], entry["expires_at"][:4]) == ("mistral", "9999")
    assert entry["size"] > 0
    assert ask("1h")["done"]
    assert running()[0]["expires_at"][:4] != "9999"
    assert ask("0.2s")["done"]
    wait_until(lambda: not running())
    assert ask(0)["done"]
    wait_until(lambda: not running())
    assert ask("1h")["done"]
    assert [each["name"] for each in running()] == ["mistral"], "the earlier keep_alive held"
    assert ask(0)["done"]
    wait_until(lambda: not running())
    assert ask(-1, prompt="")["done_reason"] == "load"
    assert [each["name"] for each in running()] == ["mistral"]
    assert ask(0, prompt="")["done_reason"] == "unload"
    wait_until(lambda: not running())
    answer = post(
        server, "/api/generate", {"model": "mistral", "prompt": "Hi", "keep_alive": "soon"}
    )
    assert answer.status_code == 400
    assert "keep_alive" in answer.text


def test_a_client_that_leaves_while_it_waits_is_forgotten(server: ServerProcess) -> None:
    """The other model's request is paused, so that it cannot end before."""
    long = body("llama", "Hello", num_tokens=4000)
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json={**long, "stream": True}, timeout=PATIENCE_S
    ) as stream:
        lines = stream.iter_lines()  # kept, because its end would close the stream
        assert next(lines)
        pause = post(server, "/pause_generation?model=llama", {"mode": "in_place"})
        assert pause.json()["num_paused_reqs"] == 1
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json=body("mistral", "Hi"), timeout=0.5)
        assert states(server) == {"llama": "loaded", "mistral": "unloaded"}
        wait_until(lambda: num_waiting(server, "mistral") == 0)
        with ThreadPoolExecutor(1) as thread:
            loading = thread.submit(post, server, "/models/load", {"model": "mistral"})
            # Again and again, because the other request may come later.
            wait_until(lambda: unload(server, "mistral") and loading.done(), every_s=0.1)
            assert loading.result().status_code == 409, "it would wait for ever"
        post(server, "/continue_generation?model=llama", {})
    complete(server, "mistral", "Hi")


def unload(server: ServerProcess, model: str) -> bool:
    return post(server, "/models/unload", {"model": model}).status_code == 200


def num_waiting(server: ServerProcess, model: str) -> int:
    url = f"{server.url}/fault_tolerance/status?model={model}"
    return int(httpx.get(url, timeout=PATIENCE_S).json()["num_waiting"])


def test_a_killed_engine_loses_no_stream_and_does_not_touch_the_other(
    server: ServerProcess, expected: dict[tuple[str, str], str]
) -> None:
    before = {each.pid for each in engines_of(server.process.pid)}

    async def kill() -> None:
        await asyncio.sleep(0.3)
        os.kill(min(before), signal.SIGKILL)

    load(server, expected, while_running=kill)
    complete(server, "llama", "Hello")
    complete(server, "mistral", "Hello")
    after = {each.pid for each in engines_of(server.process.pid)}
    assert len(after - before) == 1
    assert sorted(states(server).values()) == ["loaded", "unloaded"]


def test_an_engine_that_dies_while_its_model_is_away_starts_when_it_is_wanted(
    server: ServerProcess, expected: dict[tuple[str, str], str]
) -> None:
    complete(server, "mistral", "Hello")
    wait_until(lambda: states(server)["llama"] == "unloaded")
    url = f"{server.url}/fault_tolerance/status?model=llama"
    (engine,) = httpx.get(url, timeout=PATIENCE_S).json()["engines"]
    os.kill(engine["pid"], signal.SIGKILL)
    wait_until(lambda: len(engines_of(server.process.pid)) == 1)
    wait_until(lambda: any("Engine 0 of model llama died: " in each for each in server.messages))
    assert complete(server, "mistral", "Hello").json()["choices"]
    assert len(engines_of(server.process.pid)) == 1, "nothing is loaded for a model that is away"
    text = complete(server, "llama", "Hello").json()["choices"][0]["text"]
    assert text == expected["llama", "Hello"]
    assert any("Engine 0 of model llama is ready again" in each for each in server.messages)


@pytest.mark.full
def test_a_stopped_engine_of_an_unloaded_model_does_not_block_the_others(
    server: ServerProcess,
) -> None:
    """Red before: its load never ended, and nobody else got the room."""
    complete(server, "mistral", "Hello")
    wait_until(lambda: states(server)["llama"] == "unloaded")
    url = f"{server.url}/fault_tolerance/status?model=llama"
    (engine,) = httpx.get(url, timeout=PATIENCE_S).json()["engines"]
    os.kill(engine["pid"], signal.SIGSTOP)
    try:
        health = f"{server.url}/health_generate"
        wait_until(lambda: "llama: engine 0: stopped" in httpx.get(health, timeout=30).text)
        assert any("engine 0 of model llama has been stopped" in each for each in server.messages)
        answer = post(server, "/v1/completions", body("llama", "Hello"))
        assert answer.status_code == 503, answer.text
        assert "SIGSTOP" in answer.text
        complete(server, "mistral", "Hello")
    finally:
        os.kill(engine["pid"], signal.SIGCONT)
    complete(server, "llama", "Hello")
    complete(server, "mistral", "Hello")
    assert sorted(states(server).values()) == ["loaded", "unloaded"]


@pytest.mark.full
def test_a_stopped_engine_of_a_loaded_model_does_not_keep_its_room(
    server: ServerProcess, expected: dict[tuple[str, str], str]
) -> None:
    """Red before: the other model waited an hour for it to give its memory back."""
    complete(server, "llama", "Hello")
    url = f"{server.url}/fault_tolerance/status?model=llama"
    (engine,) = httpx.get(url, timeout=PATIENCE_S).json()["engines"]
    os.kill(engine["pid"], signal.SIGSTOP)
    health = f"{server.url}/health"
    wait_until(lambda: "llama: engine 0: stopped" in httpx.get(health, timeout=PATIENCE_S).text)
    text = complete(server, "mistral", "Hello").json()["choices"][0]["text"]
    assert text == expected["mistral", "Hello"]
    assert not psutil.pid_exists(engine["pid"])
    assert any("Engine 0 of model llama ends: " in each for each in server.messages)
    text = complete(server, "llama", "Hello").json()["choices"][0]["text"]
    assert text == expected["llama", "Hello"]
    assert sorted(states(server).values()) == ["loaded", "unloaded"]


@pytest.mark.full
def test_a_model_whose_files_have_gone_refuses_with_the_reason_and_the_other_goes_on(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    copies = {name: tmp_path / name for name in folders}
    for name, folder in folders.items():
        copies[name].mkdir()
        for file in folder.iterdir():
            (copies[name] / file.name).write_bytes(file.read_bytes())
    with running_server(tmp_path / "server", *arguments(copies)) as server:
        complete(server, "mistral", "Hello")
        (copies["llama"] / "model.safetensors").unlink()
        complete(server, "llama", "Hello")  # its weights are in a file of the server's own
        complete(server, "mistral", "Hello")
        url = f"{server.url}/fault_tolerance/status?model=llama"
        (engine,) = httpx.get(url, timeout=PATIENCE_S).json()["engines"]
        os.kill(engine["pid"], signal.SIGKILL)
        wait_until(lambda: len(engines_of(server.process.pid)) == 1)
        answer = post(server, "/v1/completions", body("llama", "Hello"))
        assert answer.status_code == 503
        assert "model.safetensors" in answer.text
        complete(server, "mistral", "Hello")
        assert states(server)["llama"] == "ended"
        (line,) = [each for each in server.messages if "Model llama is not served any more" in each]
        assert "model.safetensors" in line
        assert httpx.get(f"{server.url}/health", timeout=PATIENCE_S).status_code == 200


@pytest.mark.full
def test_a_server_that_ends_answers_what_waits_for_its_model(
    folders: dict[str, Path], expected: dict[tuple[str, str], str], tmp_path: Path
) -> None:
    with running_server(tmp_path, *arguments(folders)) as server:

        async def end() -> list[str]:
            async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
                asked = [
                    asyncio.create_task(streamed(http, server.url, model, "Hello"))
                    for model in ("llama", "mistral")
                ]
                await asyncio.sleep(0.2)
                server.process.send_signal(signal.SIGTERM)
                return list(await asyncio.gather(*asked))

        assert asyncio.run(end()) == [expected["llama", "Hello"], expected["mistral", "Hello"]]
        assert server.wait_end() == 0


@pytest.mark.full
def test_a_model_that_was_made_for_embeddings_serves_them_beside_one_that_chats(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    embedder = tmp_path / "embedder"
    embedder.mkdir()
    for file in folders["mistral"].iterdir():
        (embedder / file.name).write_bytes(file.read_bytes())
    steps = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    (embedder / "modules.json").write_text(
        json.dumps(
            [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in steps]
        )
    )
    (embedder / "1_Pooling").mkdir()
    (embedder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    named = {"llama": folders["llama"], "embedder": embedder}
    with running_server(tmp_path / "server", *arguments(named)) as server:
        for _ in range(2):
            complete(server, "llama", "Hello")
            answer = post(server, "/v1/embeddings", {"model": "embedder", "input": "Hello"})
            assert len(answer.json()["data"][0]["embedding"]) == 48, answer.text
        assert post(server, "/v1/completions", body("embedder", "Hello")).status_code == 400
        assert (
            post(server, "/v1/embeddings", {"model": "llama", "input": "Hello"}).status_code == 400
        )


@pytest.mark.full
def test_a_chat_with_a_model_without_a_template_gets_advice_that_works(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(folders["mistral"], bare)
    config = json.loads((bare / "tokenizer_config.json").read_text())
    template = config.pop("chat_template")
    (bare / "tokenizer_config.json").write_text(json.dumps(config))
    chat = {"model": "bare", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    named = arguments({"llama": folders["llama"], "bare": bare})
    with running_server(tmp_path / "first", *named) as server:
        answer = post(server, "/v1/chat/completions", chat)
        assert answer.status_code == 400
        assert "put one into its folder as chat_template.jinja" in answer.text
    (bare / "chat_template.jinja").write_text(template)
    with running_server(tmp_path / "second", *named) as server:
        assert post(server, "/v1/chat/completions", chat).status_code == 200


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--dp-size", "2"], "--dp-size cannot be combined with several models"),
        (["--record", "x"], "--record cannot be combined with several models"),
        (["--max-loaded-models", "3"], "--max-loaded-models 3 is more than the 2 models"),
        (["--model-path", "nameless"], "each needs a name"),
    ],
)
def test_what_has_no_meaning_is_refused_by_name(
    folders: dict[str, Path], tmp_path: Path, more: list[str], message: str
) -> None:
    with running_server(tmp_path, *arguments(folders), *more, ready=False) as server:
        assert server.wait_end() == 2
        assert message in server.errors


def test_an_engine_that_dies_before_its_turn_ends_the_start_in_one_line(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    with running_server(tmp_path, *arguments(folders), ready=False) as server:
        wait_until(lambda: len(engines_of(server.process.pid)) == len(folders))
        os.kill(min(each.pid for each in engines_of(server.process.pid)), signal.SIGKILL)
        assert server.wait_end(timeout_s=2 * PATIENCE_S) == 1
        assert "Traceback" not in server.errors
        assert server.messages[-1].startswith("setpoint: error: Model llama: It could not start:")
