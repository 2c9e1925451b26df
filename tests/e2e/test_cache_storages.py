"""Servers with other storages than files: a Redis server that two of them share, one that does not
answer, and storages that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from test_cache_tiers import PROMPTS, answer, expected, known, metric, settled

from setpoint_testing.server_process import ServerProcess, running_server, wait_until
from setpoint_testing.valkey_server import PASSWORD, missing, valkey_server

COMMON = ("--skip-server-warmup", "--max-total-tokens", "4096", "--enable-metrics")


def test_servers_share_a_redis_server_and_tell_nobody_its_password(
    tiny_model: Path, tmp_path: Path
) -> None:
    if missing():
        pytest.skip(missing())
    tokens = expected(tiny_model, tmp_path)
    with valkey_server(tmp_path) as url:
        extra = {"url": url, "block_tokens": 16, "prefetch_threshold": 32}
        options = (
            *("--enable-hierarchical-cache", "--hicache-storage-backend", "redis"),
            *("--hicache-storage-backend-extra-config", json.dumps(extra)),
            *("--hicache-storage-prefetch-policy", "wait_complete", "--strict-accounting"),
        )
        for life in range(2):
            model = ("--model-path", str(tiny_model))
            with running_server(tmp_path / f"life{life}", *model, *COMMON, *options) as each:
                known(each)
                answers = [answer(each, prompt) for prompt in PROMPTS]
                assert [found for found, _, _ in answers] == tokens
                assert [stored > 0 for _, _, stored in answers] == [bool(life)] * 3
                settled(each)
                shown = httpx.get(f"{each.url}/hicache/storage-backend").text
                assert "redis://127.0.0.1" in shown
                info = httpx.get(f"{each.url}/server_info").text
                assert metric(each, "setpoint:cache_tier_off") == 0
            for text in (shown, info, each.output, each.errors):
                assert PASSWORD not in text


def until_off(each: ServerProcess) -> None:
    """Ask new prompts until the server has given its storage up."""
    for first in range(3, 19):
        assert answer(each, [first] * 40)[0]

    def is_off() -> bool:
        state = httpx.get(f"{each.url}/hicache/storage-backend").json()
        return bool(state["engines"][0]["off"])

    wait_until(is_off)


def test_a_storage_that_does_not_answer_is_off_and_says_so(
    tiny_model: Path, tmp_path: Path
) -> None:
    pytest.importorskip("valkey")
    extra = {"url": "redis://127.0.0.1:1/0", "block_tokens": 16, "prefetch_threshold": 32}
    options = (
        *("--enable-hierarchical-cache", "--hicache-storage-backend", "redis"),
        *("--hicache-storage-backend-extra-config", json.dumps(extra)),
    )
    model = ("--model-path", str(tiny_model))
    with running_server(tmp_path, *model, *COMMON, *options) as each:
        until_off(each)
        assert metric(each, "setpoint:cache_tier_off") == 1
        assert "The cache in redis://127.0.0.1:1/0 cannot be reached now" in each.errors
        assert "Cache tier storage is off: " in each.errors
        state = httpx.get(f"{each.url}/hicache/storage-backend").json()
        assert "redis://127.0.0.1:1/0" in state["engines"][0]["off"]
        found = httpx.get(f"{each.url}/doctor").json()["findings"]
        assert next(one["summary"] for one in found if one["cause"] == "cache-tier").startswith(
            "The tier 'storage' is off: "
        )


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("backend", "extra", "words"),
    [
        ("redis", {"url": f"http://:{PASSWORD}@h"}, "must begin with one of valkey://"),
        ("hf3fs", {}, "For another storage write a class of eight methods"),
        ("dynamic", {"module_path": "os", "class_name": "Nothing"}, "os.Nothing cannot be made"),
    ],
)
def test_a_storage_that_cannot_be_is_refused_in_one_line(
    tiny_model: Path, tmp_path: Path, backend: str, extra: dict[str, str], words: str
) -> None:
    pytest.importorskip("valkey")
    arguments = (
        *("--model-path", str(tiny_model), "--enable-hierarchical-cache"),
        *("--hicache-storage-backend", backend),
        *("--hicache-storage-backend-extra-config", json.dumps(extra)),
    )
    with pytest.raises(AssertionError) as caught, running_server(tmp_path, *arguments):
        pass
    assert words in str(caught.value)
    assert PASSWORD not in str(caught.value)
    assert "Traceback" not in str(caught.value)
