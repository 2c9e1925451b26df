"""A prefill and a decode server with one folder for their prefixes: the decode server saves outputs,
and the prefill server finds the whole history of a conversation."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from test_cache_tiers import num_damaged
from test_disaggregation import Pair, base, metric, pair_of

from setpoint_testing.server_process import (
    ServerProcess,
    engine_of,
    running_server,
    wait_until,
)

BLOCK = 16
GREEDY = {"temperature": 0, "max_new_tokens": 70, "ignore_eos": True}
SAMPLED = {"temperature": 1.0, "sampling_seed": 9, "max_new_tokens": 70, "ignore_eos": True}
FAKE = "2.2.2.2"
NUMBERS = count(1)


def prompt_of(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 200) for _ in range(length)]


@contextmanager
def pair_with_tiers(tiny_model: Path, folder: Path, name: str, *options: str) -> Iterator[Pair]:
    extra = {"path": str(folder / "cache"), "block_tokens": BLOCK, "prefetch_threshold": 32}
    tiers = (
        *("--enable-hierarchical-cache", "--hicache-storage-backend", "file"),
        *("--hicache-storage-backend-extra-config", json.dumps(extra)),
        # A tiny model computes faster than anything loads.
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--max-total-tokens", "4096", "--strict-accounting", "--skip-server-warmup"),
    )
    decode = ("--disaggregation-decode-enable-offload-kvcache",)
    with pair_of(tiny_model, folder / name, *tiers, *options, decode=decode) as pair:
        for server in (pair.prefill, pair.decode):
            wait_until(lambda: saves(server))  # noqa: B023
        yield pair


def saves(server: ServerProcess) -> bool:
    """Whether the server knows which engine it is, and saves what it computes."""
    server.generate(
        input_ids=prompt_of(-next(NUMBERS), 40),
        sampling_params={"max_new_tokens": 1},
        bootstrap_host=FAKE,
        bootstrap_room=0,
    )
    wait_until(server.is_idle)
    return metric(server, "sglang:backuped_tokens_total") > 0


@pytest.fixture(scope="module")
def alone(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running_server(tmp_path_factory.mktemp("alone"), *base(tiny_model)) as server:
        yield server


def answer(pair: Pair, prompt: list[int], sampling: dict[str, Any]) -> tuple[list[int], int]:
    """(tokens, those of the prompt that came from the store), when all has been saved."""
    found = pair.generate(input_ids=prompt, sampling_params=sampling)
    wait_until(pair.is_idle)
    details = found["meta_info"]["cached_tokens_details"]
    assert details["storage_backend"] == "file"
    return found["output_ids"], details["storage"]


def tokens_of(server: ServerProcess, prompt: list[int], sampling: dict[str, Any]) -> list[int]:
    found: list[int] = server.generate(input_ids=prompt, sampling_params=sampling)["output_ids"]
    return found


@pytest.mark.parametrize(
    ("sampling", "options"),
    [
        pytest.param(SAMPLED, (), id="sampled"),
        pytest.param(GREEDY, (), id="greedy", marks=pytest.mark.full),
        pytest.param(GREEDY, ("--tp-size", "2"), id="two ranks", marks=pytest.mark.full),
    ],
)
def test_the_next_turn_is_loaded_by_the_prefill_server(
    tiny_model: Path,
    tmp_path: Path,
    alone: ServerProcess,
    sampling: dict[str, Any],
    options: tuple[str, ...],
) -> None:
    prompt = prompt_of(1, 150)
    with pair_with_tiers(tiny_model, tmp_path, "first", *options) as pair:
        tokens, stored = answer(pair, prompt, sampling)
        assert (tokens, stored) == (tokens_of(alone, prompt, sampling), 0)
        second = [*prompt, *tokens, *prompt_of(2, 20)]
        tokens, stored = answer(pair, second, sampling)
        assert tokens == tokens_of(alone, second, sampling)
        assert stored == 219 // BLOCK * BLOCK - 150, "what only the decode server has computed"
        assert metric(pair.decode, "sglang:prefetched_tokens_total") == 0
        assert pair.failures() == 0
    with pair_with_tiers(tiny_model, tmp_path, "second", *options) as pair:
        third = [*second, *tokens, *prompt_of(3, 20)]
        tokens, stored = answer(pair, third, sampling)
        assert tokens == tokens_of(alone, third, sampling)
        assert stored == (len(second) + 69) // BLOCK * BLOCK, "the whole history"


@pytest.mark.full
@pytest.mark.parametrize("who", ["prefill", "decode"])
@pytest.mark.parametrize("rounds", [1, 10])
def test_kills_while_blocks_are_written_cost_no_token(
    tiny_model: Path, tmp_path: Path, alone: ServerProcess, who: str, rounds: int
) -> None:
    rng, prompt = random.Random(rounds), prompt_of(4, 200)
    tokens = tokens_of(alone, prompt, GREEDY)
    for number in range(rounds):
        with pair_with_tiers(tiny_model, tmp_path, f"life{number}") as pair:
            assert pair.generate(input_ids=prompt, sampling_params=GREEDY)["output_ids"] == tokens
            pair.generate(input_ids=prompt_of(number, 900), sampling_params=GREEDY)
            time.sleep(rng.uniform(0, 0.03))
            server = pair.prefill if who == "prefill" else pair.decode
            os.kill(engine_of(server.process.pid).pid, signal.SIGKILL)
            server.process.kill()
            server.wait_end()
    with pair_with_tiers(tiny_model, tmp_path, "last") as pair:
        history = [*prompt, *tokens, *prompt_of(5, 20)]
        assert answer(pair, history, GREEDY)[0] == tokens_of(alone, history, GREEDY)
        for server in (pair.prefill, pair.decode):
            assert num_damaged(server) == 0


@pytest.mark.full
def test_a_damaged_file_is_computed(tiny_model: Path, tmp_path: Path, alone: ServerProcess) -> None:
    prompt = prompt_of(6, 150)
    with pair_with_tiers(tiny_model, tmp_path, "first") as pair:
        tokens, _ = answer(pair, prompt, GREEDY)
    history = [*prompt, *tokens, *prompt_of(7, 20)]
    for path in (tmp_path / "cache").rglob("*.kv"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    with pair_with_tiers(tiny_model, tmp_path, "second") as pair:
        found, stored = answer(pair, history, GREEDY)
        assert (found, stored) == (tokens_of(alone, history, GREEDY), 0)
        assert num_damaged(pair.prefill) > 0
        assert "is damaged and was removed" in pair.prefill.errors
        assert pair.failures() == 0
