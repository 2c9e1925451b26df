"""``--skip-tokenizer-init``: a real server, and an offline Engine, of a model without any tokenizer
file take token ids and answer token ids."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from setpoint import Engine
from setpoint.core.errors import RequestError
from setpoint_testing.server_process import (
    PATIENCE_S,
    ServerProcess,
    running_server,
    wait_until,
)
from setpoint_testing.tiny_models import write_tiny_llama

FLAG = "--skip-tokenizer-init"
IDS = [5, 17, 99, 3]
GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
CONFIG_EOS, GENERATION_EOS = 2, 7
NEEDING_TEXT = {
    "/generate": {"text": "Hello"},
    "/v1/completions": {"model": "m", "prompt": "Hello"},
    "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "Hello"}]},
    "/v1/responses": {"model": "m", "input": "Hello"},
    "/v1/messages": {
        "model": "m",
        "max_tokens": 4,
        "messages": [{"role": "user", "content": "Hello"}],
    },
    "/api/generate": {"model": "m", "prompt": "Hello"},
    "/api/chat": {"model": "m", "messages": [{"role": "user", "content": "Hello"}]},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": IDS},
    "/v1/score": {"query": "a", "items": ["b"], "label_token_ids": [1, 2]},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_llama(tmp_path_factory.mktemp("ids") / "model", eos_token_id=CONFIG_EOS)
    generation = {"eos_token_id": [CONFIG_EOS, GENERATION_EOS]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    assert not list(folder.glob("*token*"))
    return folder


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """It has run its warm-up request before it is ready."""
    arguments = "--model-path", str(model), "--dtype", "float32", FLAG, "--enable-metrics"
    with running_server(tmp_path_factory.mktemp("server"), *arguments) as ready:
        yield ready


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=60)


def streamed(server: ServerProcess, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = post(server, "/generate", {**body, "stream": True})
    assert response.status_code == 200, response.text
    lines = [each.removeprefix("data: ") for each in response.text.splitlines() if each]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_ids_in_ids_out(server: ServerProcess) -> None:
    answer = server.generate(input_ids=IDS, sampling_params=GREEDY)
    assert answer.keys() == {"output_ids", "meta_info"}
    assert len(answer["output_ids"]) == 6
    meta = answer["meta_info"]
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (4, 6)
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    several = server.generate(input_ids=[IDS, IDS[:2]], sampling_params=GREEDY)
    assert several[0]["output_ids"] == answer["output_ids"]
    samples = server.generate(input_ids=IDS, sampling_params=GREEDY | {"n": 3})
    assert [each["output_ids"] for each in samples] == [answer["output_ids"]] * 3


def test_a_stream_has_the_ids_so_far(server: ServerProcess) -> None:
    whole = server.generate(input_ids=IDS, sampling_params=GREEDY)["output_ids"]
    pieces = streamed(server, {"input_ids": IDS, "sampling_params": GREEDY})
    assert all("text" not in piece for piece in pieces)
    assert [piece["output_ids"] for piece in pieces][-1] == whole
    assert all(piece["output_ids"] == whole[: len(piece["output_ids"])] for piece in pieces)


def test_logprobs_have_no_texts(server: ServerProcess) -> None:
    body = {
        "input_ids": IDS,
        "sampling_params": GREEDY,
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
    }
    meta = server.generate(**body)["meta_info"]
    assert [len(meta[f"{part}_token_logprobs"]) for part in ("input", "output")] == [4, 6]
    assert {entry[2] for entry in meta["output_token_logprobs"]} == {None}
    assert "warnings" not in meta
    told = server.generate(**body, return_text_in_logprobs=True)["meta_info"]
    assert {entry[2] for entry in told["output_token_logprobs"]} == {None}
    assert "return_text_in_logprobs" in told["warnings"][0]


@pytest.mark.parametrize("token_id", [CONFIG_EOS, GENERATION_EOS])
def test_the_models_end_tokens_end_an_answer(server: ServerProcess, token_id: int) -> None:
    wishes = {"temperature": 0, "max_new_tokens": 5, "logit_bias": {str(token_id): 1000.0}}
    answer = server.generate(input_ids=IDS, sampling_params=wishes)
    assert answer["output_ids"] == [token_id]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": token_id}
    later = server.generate(input_ids=IDS, sampling_params=wishes | {"min_new_tokens": 3})
    assert len(later["output_ids"]) >= 3


def test_stop_token_ids_end_an_answer(server: ServerProcess) -> None:
    wishes = GREEDY | {"ignore_eos": False, "logit_bias": {"50": 1000.0}, "stop_token_ids": [50]}
    answer = server.generate(input_ids=IDS, sampling_params=wishes)
    assert answer["output_ids"] == [50]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": 50}


@pytest.mark.parametrize("path", NEEDING_TEXT)
def test_text_is_refused_by_the_name_of_the_flag(server: ServerProcess, path: str) -> None:
    response = post(server, path, NEEDING_TEXT[path])
    assert response.status_code == 400, response.text
    assert FLAG in response.text


@pytest.mark.parametrize(
    ("path", "body"),
    [("/api/generate", {"prompt": "x"}), ("/api/chat", {"messages": [{"role": "user"}]})],
)
def test_the_flag_is_named_before_a_missing_key(
    server: ServerProcess, path: str, body: dict[str, Any]
) -> None:
    """Red before: model is missing."""
    response = post(server, path, body)
    assert response.status_code == 400
    assert FLAG in response.text


def test_what_a_start_prints_runs_when_pasted(server: ServerProcess) -> None:
    """Red before: the examples were chats, which such a server refuses."""
    wait_until(lambda: server.output.endswith(")\n"))
    _, _, _, _, shell, _, *python = server.output.splitlines()
    for command in (["bash", "-c", shell], [sys.executable, "-c", "\n".join(python)]):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout), "output ids"


@pytest.mark.parametrize(
    "sampling",
    [
        {"stop": ["x"]},
        {"stop_regex": "x+"},
        {"regex": "a+"},
        {"json_schema": "{}"},
        {"ebnf": 'root ::= "a"'},
    ],
)
def test_parameters_about_text_are_refused(server: ServerProcess, sampling: dict[str, Any]) -> None:
    response = post(server, "/generate", {"input_ids": IDS, "sampling_params": sampling})
    assert response.status_code == 400
    (name,) = sampling
    assert FLAG in response.text
    assert name in response.text


def test_completions_of_ids_are_refused_because_they_answer_text(server: ServerProcess) -> None:
    response = post(server, "/v1/completions", {"model": "m", "prompt": IDS})
    assert response.status_code == 400
    assert FLAG in response.text


def test_sessions_continue_ids(server: ServerProcess) -> None:
    session = post(server, "/open_session", {"capacity_of_str_len": 1000}).json()
    params = {"id": session, "rid": None}
    first = server.generate(input_ids=IDS, sampling_params=GREEDY, session_params=params)
    again = {"id": session, "rid": first["meta_info"]["id"]}
    second = server.generate(input_ids=[8], sampling_params=GREEDY, session_params=again)
    assert second["meta_info"]["prompt_tokens"] == 4 + 6 + 1


def test_the_rest_of_the_server_works(server: ServerProcess) -> None:
    for path in ("/health_generate", "/model_info", "/get_model_info", "/v1/models", "/console"):
        assert httpx.get(server.url + path, timeout=60).status_code == 200, path
    info = httpx.get(f"{server.url}/server_info", timeout=60).json()
    assert info["skip_tokenizer_init"] is True
    assert httpx.get(f"{server.url}/tokenizer_info", timeout=60).status_code == 400
    before = generated(server)
    server.generate(input_ids=IDS, sampling_params=GREEDY)
    assert generated(server) == before + 6


def generated(server: ServerProcess) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    lines = [
        each for each in text.splitlines() if each.startswith("sglang:generation_tokens_total{")
    ]
    return sum(float(line.split()[-1]) for line in lines)


def test_the_offline_engine_answers_ids(model: Path, server: ServerProcess) -> None:
    with Engine(str(model), dtype="float32", skip_tokenizer_init=True) as engine:
        answer = engine.generate(input_ids=IDS, sampling_params=GREEDY)
        assert answer.keys() == {"output_ids", "meta_info"}
        assert (
            answer["output_ids"]
            == server.generate(input_ids=IDS, sampling_params=GREEDY)["output_ids"]
        )
        pieces = list(engine.stream(input_ids=IDS, sampling_params=GREEDY))
        assert [each for piece in pieces for each in piece["output_ids"]] == answer["output_ids"]
        with pytest.raises(RequestError, match="skip_tokenizer_init"):
            engine.generate("Hello", GREEDY)
        with pytest.raises(RequestError, match="skip_tokenizer_init"):
            engine.chat([{"role": "user", "content": "Hello"}], GREEDY)


@pytest.mark.full
def test_an_embedding_model_takes_ids(model: Path, tmp_path: Path) -> None:
    arguments = "--model-path", str(model), "--dtype", "float32", FLAG, "--is-embedding"
    with running_server(tmp_path, *arguments) as embedding:
        native = post(embedding, "/encode", {"input_ids": IDS})
        assert len(native.json()["embedding"]) == 48
        openai = post(embedding, "/v1/embeddings", {"model": "m", "input": IDS})
        assert openai.json()["data"][0]["embedding"] == native.json()["embedding"]
        refused = post(embedding, "/encode", {"text": "Hello"})
        assert refused.status_code == 400
        assert FLAG in refused.text


@pytest.mark.full
def test_commands_that_read_text_refuse_the_flag(tmp_path: Path) -> None:
    requests = tmp_path / "in.jsonl"
    requests.write_text("")
    batch = ["batch", str(requests), "-o", str(tmp_path / "out.jsonl")]
    for arguments in (batch, ["chat"], ["bench", "offline"]):
        command = [sys.executable, "-m", "setpoint.cli", *arguments, FLAG]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode != 0
        assert f"with {FLAG} there is no tokenizer" in done.stderr
