"""Extreme but well-formed values of every field of every route, over real HTTP into live engines:
none ends one, none is answered 5xx, every refusal has its dialect's shape.

Fields and their types come from the server's own ``/openapi.json``, so that a new one is covered as
it is; a new route fails the first test.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from extreme_values import HI, Document, encoded, floats, integers, texts
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from setpoint.config.options import OPTION_FIELDS
from setpoint_testing.byte_tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE, write_byte_tokenizer
from setpoint_testing.server_process import PATIENCE_S, ServerProcess, running_server
from setpoint_testing.tiny_models import write_tiny_llama

CONTEXT = 64
"""So short that whatever is asked for ends soon."""
RETRY = {"instruction": "retry"}
PROMPT = {"prompt": "a", "max_tokens": 2}
RUNS: dict[str, dict[str, Any]] = {
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 2}},
    "/v1/completions": PROMPT,
    "/v1/chat/completions": {"messages": HI, "max_tokens": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/v1/messages": {"model": "m", "messages": HI, "max_tokens": 2},
    "/api/chat": {"model": "m", "messages": HI, "options": {"num_predict": 2}},
    "/api/generate": {"model": "m", "prompt": "a", "options": {"num_predict": 2}},
    "/encode": {"text": "a"},
    "/tokenize": {"prompt": "a"},
    "/v1/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
    "/v1/detokenize": {"tokens": [1]},
    "/v1/embeddings": {"input": "a"},
    "/v1/score": {"query": "a", "items": ["b"], "label_token_ids": [1]},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/messages/count_tokens": {"model": "m", "messages": HI},
    "/v1/batches": {"input_file_id": "f", "endpoint": "/v1/completions"},
    "/api/embed": {"model": "m", "input": "a"},
    "/api/embeddings": {"model": "m", "prompt": "a"},
    "/api/pull": {"model": "m"},
    "/api/show": {"model": "m"},
    "/parse_function_call": {"text": "a", "tools": [], "tool_call_parser": "hermes"},
    "/separate_reasoning": {"text": "a", "reasoning_parser": "qwen3"},
    "/open_session": {},
    "/close_session": {"session_id": "s"},
    "/abort_request": {},
    "/configure_logging": {},
    "/pause_generation": {},
    "/continue_generation": {},
    "/release_memory_occupation": {},
    "/resume_memory_occupation": {},
    "/models/load": {"model": "m"},
    "/models/unload": {"model": "m"},
    "/update_weights_from_disk": {"model_path": "m"},
    "/update_weight_version": {"new_version": "v"},
    "/start_profile": {},
    "/fault_tolerance/apply": RETRY,
    "/v1/fault_tolerance/apply": RETRY,
}
"""Route -> what makes a request that runs, or nearly."""
GENERATE = list(RUNS)[:7]
SETTINGS = "/set_internal_state"
LIVE = [field.name for field in OPTION_FIELDS if field.about.live]
READS = [
    "/v1/models/{}",
    "/v1/responses/{}",
    "/v1/responses/{}/input_items",
    "/v1/files/{}",
    "/v1/files/{}/content",
    "/v1/batches/{}",
]
EMPTY = {
    *("/flush_cache", "/freeze_gc", "/stop_profile", "/classify", "/v1/classify"),
    *(f"/{word}_expert_distribution_record" for word in ("start", "stop", "dump")),
}
"""Posted without a body, or refused whatever it says."""
UNDONE = {
    "/pause_generation": ("/continue_generation", {}),
    "/release_memory_occupation": ("/resume_memory_occupation", {}),
    "/start_profile": ("/stop_profile", {}),
    "/fault_tolerance/apply": ("/fault_tolerance/apply", RETRY),
    "/v1/fault_tolerance/apply": ("/fault_tolerance/apply", RETRY),
}
"""Route -> the one that ends its effect, and its body, so that the next case meets a server like the one before:
a profile slows every step down and keeps what it sees."""
EMBEDS = ("/encode", "/v1/embeddings", "/v1/rerank", "/api/embed", "/api/embeddings")
STREAMS = ("text/event-stream", "application/x-ndjson")
REFUSALS = (400, 401, 403, 404, 409, 413, 501)


@st.composite
def cases(draw: st.DrawFn, document: Document) -> tuple[str, str, dict[str, Any]]:
    """Method, path with query, and body."""
    route = draw(
        st.sampled_from(
            [*RUNS, SETTINGS] * 3 + GENERATE * 10 + [*READS, "/flush_cache", "/v1/files"]
        )
    )
    if route == "/flush_cache":
        timeout = draw(
            floats.map(str)
            | integers.map(str)
            | st.sampled_from(["nan", "inf", "-inf", "1e400", ""])
        )
        return "POST", f"/flush_cache?timeout={quote(timeout)}", {}
    if route == SETTINGS:
        anything = integers | floats | texts | st.booleans() | st.none()
        given_settings = st.dictionaries(st.sampled_from(LIVE), anything, max_size=3)
        return "POST", SETTINGS, {"server_args": draw(given_settings)}
    if route == "/v1/files":
        return "GET", f"/v1/files?limit={quote(draw(integers.map(str) | texts)[:2000])}", {}
    if route in READS:
        return "GET", route.format(quote(draw(texts.filter(bool))[:2000], safe="")), {}
    return "POST", route, RUNS[route] | draw(document.fields(document.bodies[route]))


def check_refusal(path: str, answer: httpx.Response) -> None:
    """Its dialect's shape, and a reason."""
    content = answer.json()
    if path.startswith("/v1/messages"):
        assert content["type"] == "error"
        message = content["error"]["message"]
    elif path.startswith("/api/"):
        message = content["error"]
    elif content.get("success") is False:  # SGLang's shape for memory and weights
        message = content["message"]
    else:
        assert content["code"] == answer.status_code
        message = content["error"]["message"]
    assert isinstance(message, str)
    assert len(message) > 10


def check_stream(path: str, text: str) -> None:
    """Its dialect's end."""
    if path.startswith("/api/"):
        last = json.loads(text.splitlines()[-1])
        assert last.get("done") or last.get("status") == "success" or last["error"]
    elif path == "/v1/messages":
        assert "event: message_stop" in text or "event: error" in text
    elif path == "/v1/responses":
        ends = ("completed", "incomplete", "failed", "cancelled")
        assert any(f"event: response.{end}" in text for end in ends) or "event: error" in text
    else:
        assert text.endswith("data: [DONE]\n\n")
    assert '"code":5' not in text


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, ServerProcess]]:
    """One that generates, one that embeds."""
    folder = write_tiny_llama(
        tmp_path_factory.mktemp("tiny"),
        vocab_size=VOCAB_SIZE,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        max_position_embeddings=CONTEXT,
    )
    write_byte_tokenizer(folder)
    home = tmp_path_factory.mktemp("servers")
    sizes = ("--dtype", "float32", "--num-threads", "1", "--max-total-tokens", "4096")
    files = ("--file-storage-path", str(home / "files"))
    arguments = ("--model-path", str(folder), *sizes)
    env = {"SGLANG_TORCH_PROFILER_DIR": str(home / "profiles")}
    with (
        running_server(
            home / "generates", *arguments, *files, "--strict-accounting", env=env
        ) as generates,
        running_server(home / "embeds", *arguments, "--is-embedding", env=env) as embeds,
    ):
        yield {"generates": generates, "embeds": embeds}


@pytest.fixture(scope="module")
def document(servers: Mapping[str, ServerProcess]) -> Document:
    return Document(
        httpx.get(f"{servers['generates'].url}/openapi.json", timeout=PATIENCE_S).json()
    )


def test_every_route_that_takes_values_is_here(document: Document) -> None:
    assert {*document.bodies} == {*RUNS, SETTINGS}
    assert {path for path in document.posts if path not in document.bodies} <= {
        *EMPTY,
        "/hicache/storage-backend/clear",
        "/v1/files",
        *(
            f"/v1/{kind}/{{{kind[: -2 if kind == 'batches' else -1]}_id}}/cancel"
            for kind in ("batches", "responses")
        ),
        *(f"/api/{name}" for name in ("push", "create", "copy", "blobs/{digest}")),
    }


def restore(http: httpx.Client, url: str, changes: list[dict[str, Any]]) -> None:
    """The settings as they were, so that the next case meets a server like the one before."""
    before = {
        change["option"]: change["old"] for change in changes if change["option"] in LIVE
    }  # what follows from an option is told, but cannot be set
    answer = http.post(url, content=json.dumps({"server_args": before}))
    assert answer.status_code == 200, (changes, answer.text)


def is_well_answered(path: str, answer: httpx.Response) -> bool:
    if answer.status_code not in (200, 202) and answer.status_code not in REFUSALS:
        return False
    try:
        if answer.status_code not in (200, 202):
            check_refusal(path, answer)
        elif answer.headers.get("content-type", "").startswith(STREAMS):
            check_stream(path, answer.text)
    except (AssertionError, KeyError, TypeError, ValueError):
        return False
    return True


@pytest.mark.parametrize(
    "count", [150, pytest.param(5000, marks=[pytest.mark.full, pytest.mark.timeout(1800)])]
)
def test_no_value_ends_an_engine_or_is_answered_5xx(
    servers: Mapping[str, ServerProcess], document: Document, count: int
) -> None:
    answers: Counter[tuple[str, int]] = Counter()
    wrong: list[tuple[str, bytes, int, str]] = []
    with httpx.Client(timeout=120, headers={"content-type": "application/json"}) as http:

        @settings(
            max_examples=count,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        )
        @given(cases(document))
        def send(case: tuple[str, str, dict[str, Any]]) -> None:
            method, path, body = case
            server = servers["embeds" if path in EMBEDS else "generates"]
            answer = http.request(
                method, server.url + path, content=encoded(body) if method == "POST" else None
            )
            answers[
                f"{method} {path.partition('?')[0] if method == 'POST' else '…'}",
                answer.status_code,
            ] += 1
            if path in UNDONE:
                undone, with_body = UNDONE[path]
                http.post(server.url + undone, content=json.dumps(with_body))
            if path == SETTINGS and answer.status_code == 200:
                restore(http, server.url + SETTINGS, answer.json()[0]["changes"])
            if not is_well_answered(path, answer):
                wrong.append((path, encoded(body)[:2000], answer.status_code, answer.text[-500:]))

        send()
    print(*wrong, sep="\n")
    assert wrong == []
    for (route, status), number in sorted(answers.items()):
        print(f"{route} {status}: {number}")
    for server in servers.values():
        assert server.process.poll() is None
        assert not server.engine_is_gone()
        assert server.is_idle()
        assert "Traceback" not in server.errors
