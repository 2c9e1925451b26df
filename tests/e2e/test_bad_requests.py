"""Bad requests over real HTTP: refused in the right shape, and afterwards the server answers and no
page is gone."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from setpoint_testing.server_process import PATIENCE_S, ServerProcess, wait_until

JSON = {"content-type": "application/json"}


@pytest.fixture(autouse=True)
def unharmed(tiny: ServerProcess) -> Iterator[None]:
    yield
    assert (
        tiny.generate(
            text="still there", sampling_params={"max_new_tokens": 4, "ignore_eos": True}
        )["meta_info"]["completion_tokens"]
        == 4
    )
    wait_until(tiny.is_idle)
    assert "Traceback" not in tiny.errors


def generate(text: str = "a", **sampling: Any) -> dict[str, Any]:
    return {"text": text, "sampling_params": {"max_new_tokens": 4, **sampling}}


def chat(**fields: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 4,
        **fields,
    }


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "hi", "max_tokens": 4, **fields}


REFUSED = {
    "prompt longer than the context": ("/generate", generate("x" * 5000)),
    "ids longer than the context": ("/generate", {"input_ids": [1] * 5000}),
    "completion longer than the context": ("/v1/completions", completion(max_tokens=5000)),
    "negative max_new_tokens": ("/generate", generate(max_new_tokens=-1)),
    "negative max_tokens": ("/v1/chat/completions", chat(max_tokens=-1)),
    "unknown sampling key": ("/generate", generate(temperatura=1)),
    "empty prompt": ("/generate", generate("")),
    "empty list of ids": ("/generate", {"input_ids": []}),
    "no messages": ("/v1/chat/completions", chat(messages=[])),
    "token id too large": ("/generate", {"input_ids": [260]}),
    "negative token id": ("/generate", {"input_ids": [-1]}),
    "huge token id": ("/generate", {"input_ids": [1 << 70]}),
    "300 stop strings": ("/generate", generate(stop=[str(number) for number in range(300)])),
    "300 stop strings, chat": (
        "/v1/chat/completions",
        chat(stop=[str(number) for number in range(300)]),
    ),
    "text for a number": ("/v1/completions", completion(temperature="hot")),
    "one bad prompt in a batch": (
        "/generate",
        {"input_ids": [[1], [2], [999]], "sampling_params": {"max_new_tokens": 4}},
    ),
}


@pytest.mark.cases(6)
@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_body_gets_400(tiny: ServerProcess, case: str) -> None:
    route, body = REFUSED[case]
    response = httpx.post(f"{tiny.url}{route}", json=body, timeout=PATIENCE_S)
    assert response.status_code == 400, response.text
    answer = response.json()
    assert (answer["object"], answer["code"], answer["message"]) == (
        "error",
        400,
        answer["error"]["message"],
    )
    assert case != "unknown sampling key" or "temperatura" in answer["message"]


RAW = {
    "invalid UTF-8": b'{"text": "\xff\xfe", "sampling_params": {}}',
    "cut JSON": b'{"text": "a", ',
    "NaN temperature": b'{"text": "a", "sampling_params": {"temperature": NaN}}',
    "infinite temperature": b'{"text": "a", "sampling_params": {"temperature": 1e999}}',
    "lone surrogate": b'{"text": "\\ud800"}',
    "deep nesting": b"[" * 100_000,
    "a list": b"[1, 2]",
    "nothing": b"",
    "zero bytes": b"\x00" * 100,
}


@pytest.mark.parametrize("route", ["/generate", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("case", RAW)
def test_bytes_that_are_no_request(tiny: ServerProcess, route: str, case: str) -> None:
    response = httpx.post(f"{tiny.url}{route}", content=RAW[case], headers=JSON, timeout=PATIENCE_S)
    assert response.status_code == 400, response.text
    assert response.json()["message"] == response.json()["error"]["message"]


@pytest.mark.parametrize("route", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_a_body_of_4_megabytes(tiny: ServerProcess, route: str) -> None:
    text = "x" * 4_000_000
    body = {"/generate": generate(text), "/v1/completions": completion(prompt=text)}.get(
        route, chat(messages=[{"role": "user", "content": text}])
    )
    response = httpx.post(f"{tiny.url}{route}", json=body, timeout=PATIENCE_S)
    assert response.status_code == 400
    assert "longer" in response.text
    assert len(response.content) < 1000


def test_a_body_that_is_too_large_for_anything(tiny: ServerProcess) -> None:
    response = httpx.post(
        f"{tiny.url}/generate", content=b" " * (65 << 20), headers=JSON, timeout=PATIENCE_S
    )
    assert response.status_code == 413


def test_unknown_routes_and_methods(tiny: ServerProcess) -> None:
    unknown, wrong = (
        httpx.get(f"{tiny.url}/v2/nothing", timeout=PATIENCE_S),
        httpx.get(f"{tiny.url}/generate", timeout=PATIENCE_S),
    )
    assert (unknown.status_code, wrong.status_code) == (404, 405)
    for response in (unknown, wrong):
        answer = response.json()
        assert answer["object"] == "error"
        assert answer["code"] == response.status_code


@pytest.mark.parametrize(
    "sent",
    [
        b"GARBAGE\r\n\r\n",
        (
            b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Type:"
            b" application/json\r\nContent-Length: 100\r\n\r\n{"
        ),
        b"POST /generate HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 200_000 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
    ids=["garbage", "body that never comes", "broken chunk", "huge header", "TLS"],
)
def test_bytes_that_are_no_http(tiny: ServerProcess, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", tiny.port), timeout=5) as sock:
        try:
            sock.sendall(sent)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):
                pass
        except (ConnectionResetError, BrokenPipeError):
            pass


def test_a_bad_member_of_a_stream_does_not_disturb_the_others(tiny: ServerProcess) -> None:
    with httpx.stream(
        "POST",
        f"{tiny.url}/generate",
        json=generate("good", max_new_tokens=400, ignore_eos=True) | {"stream": True},
        timeout=PATIENCE_S,
    ) as good:
        lines = good.iter_lines()
        next(lines)
        assert (
            httpx.post(
                f"{tiny.url}/generate",
                content=RAW["invalid UTF-8"],
                headers=JSON,
                timeout=PATIENCE_S,
            ).status_code
            == 400
        )
        last = [line for line in lines if line.startswith("data: {")][-1]
    assert json.loads(last.removeprefix("data: "))["meta_info"]["completion_tokens"] == 400
