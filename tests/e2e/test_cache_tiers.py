"""Servers whose prefixes outlive them: what a server that was killed has left is found by the next
one, the tokens are those of a server without tiers, and engines that compute other bits share nothing.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_recording import replay

from setpoint_testing.byte_tokenizer import write_byte_tokenizer
from setpoint_testing.server_process import ServerProcess, engine_of, running_server, wait_until
from setpoint_testing.tiny_models import write_tiny_llama

RNG = random.Random(5)
PROMPTS = [[RNG.randrange(3, 200) for _ in range(150 + 16 * number)] for number in range(3)]


@contextmanager
def server(
    model: Path, folder: Path, name: str, *arguments: str, tiers: bool = True
) -> Iterator[ServerProcess]:
    extra = {"path": str(folder / "cache"), "block_tokens": 16, "prefetch_threshold": 32}
    options = (
        *("--enable-hierarchical-cache", "--hicache-storage-backend", "file"),
        *("--hicache-storage-backend-extra-config", json.dumps(extra)),
        # A tiny model computes faster than anything loads.
        *("--hicache-storage-prefetch-policy", "wait_complete"),
    )
    with running_server(
        folder / name,
        *("--model-path", str(model), "--skip-server-warmup", "--max-total-tokens", "4096"),
        *("--enable-metrics", "--strict-accounting"),
        *(options if tiers else ()),
        *arguments,
    ) as found:
        yield found


def answer(each: ServerProcess, prompt: list[int], **options: Any) -> tuple[list[int], int, int]:
    """(tokens, cached tokens, those of them from storage)."""
    found = each.generate(
        input_ids=prompt, sampling_params={"max_new_tokens": 6, "temperature": 0}, **options
    )
    meta = found["meta_info"]
    return (
        found["output_ids"],
        meta["cached_tokens"],
        meta["cached_tokens_details"].get("storage", 0),
    )


def settled(each: ServerProcess) -> None:
    """Wait until everything is saved."""
    wait_until(each.is_idle)


def known(each: ServerProcess) -> None:
    """Wait until the server knows which engine it is: from then on it saves."""
    number = 0

    def saves() -> bool:
        nonlocal number
        number += 1
        answer(each, [number + 3] * 40)
        settled(each)
        return metric(each, "sglang:backuped_tokens_total") > 0

    wait_until(saves)


def metric(each: ServerProcess, name: str) -> float:
    text = httpx.get(f"{each.url}/metrics").text
    lines = [line for line in text.splitlines() if line.startswith(name + "{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def num_damaged(each: ServerProcess) -> float:
    """Blocks that could not be used. Raises StopIteration if the server does not count them."""
    lines = httpx.get(f"{each.url}/metrics").text.splitlines()
    name = "setpoint:cache_tier_lost_blocks_total{"
    line = next(line for line in lines if line.startswith(name) and 'why="damaged"' in line)
    return float(line.rpartition(" ")[2])


def expected(model: Path, folder: Path, *arguments: str) -> list[list[int]]:
    with server(model, folder, "without", *arguments, tiers=False) as each:
        return [answer(each, prompt)[0] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def tokens(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The answers of the tiny model without tiers."""
    return expected(tiny_model, tmp_path_factory.mktemp("plain"))


@pytest.mark.full
def test_the_next_server_finds_what_a_killed_one_has_left(
    tiny_model: Path, tmp_path: Path, tokens: list[list[int]]
) -> None:
    with server(tiny_model, tmp_path, "first") as first:
        known(first)
        assert [answer(first, prompt) for prompt in PROMPTS] == [(found, 0, 0) for found in tokens]
        settled(first)
        first.process.send_signal(signal.SIGKILL)
        first.wait_end()
    recording = tmp_path / "recording"
    with server(tiny_model, tmp_path, "second", "--record", str(recording)) as second:
        known(second)
        for prompt, found in zip(PROMPTS, tokens, strict=True):
            stored = (len(prompt) - 1) // 16 * 16
            assert answer(second, prompt) == (found, stored, stored)
            assert answer(second, prompt) == (found, len(prompt) - 1, 0), "it is in the pool now"
            salted = answer(second, prompt, extra_key="somebody else's")
            assert salted == (found, 0, 0)
        settled(second)
        assert metric(second, "sglang:prefetched_tokens_total") >= sum(
            (len(prompt) - 1) // 16 * 16 for prompt in PROMPTS
        )
        found = httpx.get(f"{second.url}/metrics").text
        assert 'sglang:cached_tokens_total{cache_source="storage"' in found
    done = replay(recording)
    assert " 0 differing plans" in done.stdout, done.stdout + done.stderr


OTHER_ENGINES = {
    "two ranks": ("--tp-size", "2"),
    "large pages": ("--page-size", "16"),
    "fp8": ("--kv-cache-dtype", "fp8_e4m3"),
}


@pytest.mark.parametrize(
    "names",
    [pytest.param(each, marks=pytest.mark.full) for each in (["two ranks"], [*OTHER_ENGINES])],
    ids=len,
)
def test_two_ranks_and_another_page_size_share_nothing_with_one(
    tiny_model: Path, tmp_path: Path, tokens: list[list[int]], names: list[str]
) -> None:
    with server(tiny_model, tmp_path, "one") as one:
        known(one)
        assert [answer(one, prompt) for prompt in PROMPTS] == [(found, 0, 0) for found in tokens]
        settled(one)
    for name in names:
        arguments = OTHER_ENGINES[name]
        own = expected(tiny_model, tmp_path, *arguments) if name == "fp8" else tokens
        for life in range(2):
            with server(tiny_model, tmp_path, f"{name}{life}", *arguments) as each:
                known(each)
                answers = [answer(each, prompt) for prompt in PROMPTS]
                assert [found for found, _, _ in answers] == own, name
                assert [bool(stored) for _, _, stored in answers] == [bool(life)] * 3, name
                settled(each)


def _kill_while_saving(model: Path, folder: Path, number: int, rng: random.Random) -> bool:
    """Kill a server at the moment when it begins to write a file. Returns whether it was still
    writing one when it ended."""
    new = folder / "cache" / "new"
    with server(model, folder, f"life{number}") as each:
        known(each)
        settled(each)
        before = set(new.iterdir())
        prompt = [rng.randrange(3, 200) for _ in range(900)]
        asking = threading.Thread(target=_ask_one_that_ends, args=(each, prompt))
        asking.start()
        deadline = time.monotonic() + 30
        while set(new.iterdir()) == before and time.monotonic() < deadline:
            pass
        each.process.send_signal(signal.SIGKILL)
        each.wait_end()
        asking.join()
    return set(new.iterdir()) != before


def _ask_one_that_ends(each: ServerProcess, prompt: list[int]) -> None:
    with suppress(httpx.HTTPError, AssertionError):
        answer(each, prompt)


@pytest.mark.parametrize(
    "count", [1, pytest.param(6, marks=[pytest.mark.full, pytest.mark.timeout(600)])]
)
def test_servers_that_are_killed_while_they_write_cost_no_token(
    tiny_model: Path, tmp_path: Path, tokens: list[list[int]], count: int
) -> None:
    rng = random.Random(count)
    wrote = [_kill_while_saving(tiny_model, tmp_path, number, rng) for number in range(count)]
    print(f"{count} kills of a server, {sum(wrote)} left a file half-written")
    rng = random.Random(count)
    long = [[rng.randrange(3, 200) for _ in range(900)] for _ in range(count)]
    with server(tiny_model, tmp_path, "plain", tiers=False) as each:
        cold = [answer(each, prompt)[0] for prompt in long]
    with server(tiny_model, tmp_path, "last") as each:
        known(each)
        assert [answer(each, prompt)[0] for prompt in PROMPTS] == tokens
        warm = [answer(each, prompt) for prompt in long]
        assert [found for found, _, _ in warm] == cold
        assert num_damaged(each) == 0


@pytest.mark.full
def test_other_weights_are_recognized_after_a_release_too(
    tiny_model: Path, tmp_path: Path, tokens: list[list[int]]
) -> None:
    """Red before: what they computed was saved under the name of the first weights."""
    config = json.loads((tiny_model / "config.json").read_text())
    other = write_tiny_llama(tmp_path / "other", seed=7, **config)
    write_byte_tokenizer(other)
    folder = ("--update-weights-folder", str(tmp_path))
    with server(tiny_model, tmp_path, "first", *folder) as first:
        for route, body in (
            ("/update_weights_from_disk", {"model_path": str(other)}),
            ("/release_memory_occupation", {"tags": ["weights"]}),
            ("/resume_memory_occupation", {"tags": ["weights"]}),
        ):
            assert httpx.post(first.url + route, json=body, timeout=60).status_code == 200, route
        known(first)
        assert [answer(first, prompt)[0] for prompt in PROMPTS] != tokens
        settled(first)
    with server(tiny_model, tmp_path, "second") as second:
        known(second)
        assert [answer(second, prompt) for prompt in PROMPTS] == [(found, 0, 0) for found in tokens]


def loaded(each: ServerProcess, model: Path) -> None:
    """Have a server load the weights of a folder, and wait until it knows them."""
    body = {"model_path": str(model)}
    done = httpx.post(f"{each.url}/update_weights_from_disk", json=body, timeout=60)
    assert done.status_code == 200, done.text
    known(each)


@pytest.mark.full
def test_two_weight_sets_under_one_name_share_nothing(
    tiny_model: Path, tmp_path: Path, tokens: list[list[int]]
) -> None:
    config = json.loads((tiny_model / "config.json").read_text())
    other = write_tiny_llama(tmp_path / "other", seed=7, **config)
    write_byte_tokenizer(other)
    name = ("--served-model-name", "one")
    cold = {}
    for each, model in {"first": tiny_model, "second": other}.items():
        with server(model, tmp_path, each, *name) as found:
            known(found)
            answers = [answer(found, prompt) for prompt in PROMPTS]
            assert [stored for _, _, stored in answers] == [0] * 3, each
            cold[each] = [ids for ids, _, _ in answers]
            settled(found)
    assert cold["first"] == tokens != cold["second"]
    shutil.copytree(other, tmp_path / "copies" / "other")
    shutil.copytree(tiny_model, tmp_path / "copies" / "tiny")
    name = ("--served-model-name", "one", "--update-weights-folder", str(tmp_path / "copies"))
    with server(tiny_model, tmp_path, "changing", *name) as found:
        known(found)
        for folder, which in (("other", "second"), ("tiny", "first"), ("other", "second")):
            loaded(found, tmp_path / "copies" / folder)
            answers = [answer(found, prompt) for prompt in PROMPTS]
            assert [ids for ids, _, _ in answers] == cold[which], folder
            assert all(stored for _, _, stored in answers), "what the same weights have computed"
            settled(found)


@pytest.mark.full
def test_salts_and_keys_share_nothing(
    tiny_model: Path, tmp_path: Path, tokens: list[list[int]]
) -> None:
    whose: list[dict[str, str]] = [{"cache_salt": "a"}, {"extra_key": "a"}, {"extra_key": "b"}]
    with server(tiny_model, tmp_path, "first") as first:
        known(first)
        for prompt, own in zip(PROMPTS, whose, strict=True):
            assert answer(first, prompt, **own)[2] == 0
        settled(first)
    with server(tiny_model, tmp_path, "second") as second:
        known(second)
        for prompt, own, right in zip(PROMPTS, whose, tokens, strict=True):
            for other in ({}, *whose, {"cache_salt": "a", "extra_key": "a"}):
                found, _, stored = answer(second, prompt, **other)
                assert found == right
                assert bool(stored) is (other is own), (own, other)
        settled(second)


@pytest.mark.full
@pytest.mark.parametrize("is_strange", [False, True])
def test_a_cache_that_is_emptied_under_a_server_does_not_end_it(
    tiny_model: Path, tmp_path: Path, tokens: list[list[int]], is_strange: bool
) -> None:
    """Red before: the server ended, because the next engine refused the folder. is_strange: the
    folder is one that no engine can open."""
    with server(tiny_model, tmp_path, "first") as each:
        known(each)
        for path in (tmp_path / "cache").iterdir():
            shutil.rmtree(path)
        assert answer(each, PROMPTS[0]) == (tokens[0], 0, 0)
        settled(each)
        assert answer(each, PROMPTS[1]) == (tokens[1], 0, 0)
        settled(each)
        if is_strange:
            shutil.rmtree(tmp_path / "cache" / "blocks")
        os.kill(engine_of(each.process.pid).pid, signal.SIGKILL)
        wait_until(each.engine_is_gone)
        assert answer(each, PROMPTS[2])[0] == tokens[2]
        found = httpx.get(f"{each.url}/hicache/storage-backend").text
        assert ("something else than a cache" in found) == is_strange
        assert "Traceback" not in each.errors
