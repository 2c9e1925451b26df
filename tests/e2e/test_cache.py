"""What a client sees of the prefix cache: cached tokens in every answer, namespaces that never
share, flushing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from setpoint_testing.server_process import PATIENCE_S, ServerProcess, running_server

PROMPT = "The tide comes in twice a day, and goes out as often."
TLRU = '{"threshold": 64, "next_prompt_estimate": 16}'


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    options = [
        "--enable-cache-report",
        "--radix-eviction-policy",
        "tlru",
        "--radix-eviction-policy-config",
        TLRU,
    ]
    options += ["--workload", "multi-turn"]
    with running_server(
        tmp_path_factory.mktemp("server"),
        "--model-path",
        str(tiny_model),
        "--dtype",
        "float32",
        *options,
    ) as server:
        yield server


def post(server: ServerProcess, path: str, **body: Any) -> dict[str, Any]:
    response = httpx.post(server.url + path, json=body, timeout=PATIENCE_S)
    assert response.status_code == 200, response.text
    return dict(response.json())


def cached(server: ServerProcess, route: str, **keys: str) -> int:
    """Prompt tokens that the answer reports as cached, of a prompt that is the same for all
    routes."""
    if route == "native":
        meta = server.generate(text=PROMPT, sampling_params={"max_new_tokens": 1}, **keys)[
            "meta_info"
        ]
        assert meta["cached_tokens_details"] == {"device": meta["cached_tokens"], "host": 0}
        return int(meta["cached_tokens"])
    body = {"model": "m", "max_tokens": 1, **keys}
    if route == "chat":
        answer = post(
            server, "/v1/chat/completions", messages=[{"role": "user", "content": PROMPT}], **body
        )
    else:
        answer = post(server, "/v1/completions", prompt=PROMPT, **body)
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def flush(server: ServerProcess) -> None:
    assert (
        httpx.post(
            f"{server.url}/flush_cache", params={"timeout": PATIENCE_S}, timeout=2 * PATIENCE_S
        ).status_code
        == 200
    )


@pytest.mark.parametrize("route", ["native", "completions", "chat"])
def test_namespaces_never_share(server: ServerProcess, route: str) -> None:
    flush(server)
    spaces: list[dict[str, str]] = [
        {},
        {"extra_key": "ab"},
        {"cache_salt": "ab"},
        {"extra_key": "ab", "cache_salt": "c"},
    ]
    spaces.append({"extra_key": "a", "cache_salt": "bc"})
    assert [cached(server, route, **space) for space in spaces] == [0] * len(spaces)
    assert all(cached(server, route, **space) >= len(PROMPT) - 2 for space in spaces)


def test_a_flush_forgets_every_namespace(server: ServerProcess) -> None:
    for space in ({}, {"extra_key": "z"}):
        cached(server, "native", **space)
        flush(server)
        assert cached(server, "native", **space) == 0


def test_server_info_and_log_tell_what_was_chosen(server: ServerProcess) -> None:
    info = httpx.get(f"{server.url}/server_info", timeout=PATIENCE_S).json()
    assert (info["workload"], info["page_size"]) == ("multi-turn", 1)
    assert any(
        line.startswith("Decision: page_size=1 (--workload multi-turn: ")
        for line in server.messages
    )
    assert (info["radix_eviction_policy"], info["radix_eviction_policy_config"]) == ("tlru", TLRU)
    assert "kernel_choices" in info
    assert not any(line.startswith("Fastest on this") for line in server.messages)
