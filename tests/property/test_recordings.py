"""A recorded run can be run again, and every plan comes out as it was, with content and without;
without content no id and no name is in the file."""

from __future__ import annotations

import itertools
import random
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from setpoint.core.control import FlushCache, GetMoments, GetState, ListRequests, PauseMode
from setpoint.core.errors import CheckpointError, RequestError
from setpoint.core.messages import ToFrontend, Tokens
from setpoint.core.operations import (
    LoadWeights,
    MemoryPart,
    Operation,
    ReleaseMemory,
    RestoreMemory,
)
from setpoint.core.pagerows import PageRow, WindowColumns
from setpoint.core.records import (
    GrammarEnded,
    Preemption,
    PreparationStarted,
    Retraction,
    SendFailed,
)
from setpoint.core.request import Ids, LogprobOptions, Request, pack_ids
from setpoint.core.settings import CadenceSettings, DelaySettings, PrioritySettings
from setpoint.recording.chain import Chain, Places
from setpoint.recording.format import OFF, ON
from setpoint.recording.frames import FrameReader
from setpoint.recording.surrogates import SurrogateIds
from setpoint.scheduler.policy import POLICIES
from setpoint_testing.harness import VOCAB, Harness, Wire
from setpoint_testing.operators import ScriptedOperator
from setpoint_testing.preparers import ScriptedPreparer
from setpoint_testing.recordings import record, replayed
from setpoint_testing.scripted import hashed_token

NUM_PAGES = 48
EVICTION = {
    "lru": {},
    "lfu": {},
    "slru": {"protected_threshold": 1},
    "priority": {},
    "tlru": {"threshold": 20, "next_prompt_estimate": 5},
}
BEGINNINGS = [[5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 8, 1, 2, 1, 2, 1, 2, 1, 2], [40]]
PRIORITY = PrioritySettings(default=0, threshold=2, retract_first=True)


class LossyWire(Wire):
    """Some events cannot be sent."""

    def send(self, message: ToFrontend) -> None:
        if isinstance(message, Tokens) and any(
            event.seq_id % 7 == 3 and len(event.ids) >= 2 for event in message.events
        ):
            raise OverflowError("too long")
        super().send(message)


def next_token(history: Ids) -> int:
    """Some steps fail for one sequence, some logits are not finite."""
    token = hashed_token(3 * VOCAB)(history)
    if token == 0:
        raise ArithmeticError("no token")
    return -3 if token == 1 else token % VOCAB


def operation_error(call_id: int, operation: Operation) -> Exception | None:
    """Every fourth operation fails; what is released is restored in the end."""
    if call_id % 4 or isinstance(operation, RestoreMemory):
        return None
    words = "SECRETFOLDER has no weights"
    return CheckpointError(words) if call_id % 8 else RecursionError(words)


class Grammar:
    """Allows all tokens, and ends after a number of them."""

    def __init__(self, request: Request) -> None:
        if request.seed % 18 == 6:
            raise RequestError("SECRETGRAMMAR is wrong")
        if request.seed % 18 == 12:
            raise RuntimeError("a bug")
        self._left = request.seed % 5 + 1

    def accept(self, token: int) -> None:
        self._left -= 1

    def fill_mask(self, words: Ids) -> None:
        allowed = np.zeros(len(words) * 32, np.uint8)
        allowed[:VOCAB] = 1
        words[:] = np.packbits(allowed, bitorder="little").view(np.int32)

    @property
    def terminated(self) -> bool:
        return self._left <= 0


configs = st.fixed_dictionaries(
    {
        "page_size": st.sampled_from([1, 2, 4, 16]),
        "row": st.sampled_from(
            [PageRow(), PageRow(), PageRow(1, (WindowColumns(5, 1, 3),), read_step=2)]
        ),
        "cache_enabled": st.sampled_from([True, True, True, False]),
        "eviction_policy": st.sampled_from(list(EVICTION)),
        "depth": st.sampled_from([0, 1, 2]),
        "replan_inflight": st.booleans(),
        "max_tokens_per_row": st.sampled_from([1, 3]),
        "eos_token_ids": st.sampled_from([frozenset(), frozenset({0, 1, 2})]),
        "max_running_requests": st.sampled_from([1, 3, 8]),
        "chunked_prefill_size": st.sampled_from([None, 16, 32]),
        "mixed_chunk": st.booleans(),
        "stream_interval": st.sampled_from([1, 3]),
        "policy": st.sampled_from(list(POLICIES)),
        "priority": st.sampled_from([None, PRIORITY]),
        "max_queued_requests": st.sampled_from([None, None, 4]),
        "cadence": st.sampled_from([CadenceSettings(), CadenceSettings(2, 1, 1, 2)]),
        "delay": st.sampled_from([DelaySettings(), DelaySettings(enabled=True, max_delay_s=0.01)]),
        "waiting_timeout_s": st.sampled_from([None, None, 0.05]),
        "in_batch_check": st.sampled_from([4, -1]),
        "in_batch_deprioritize": st.sampled_from([0, 3, 32]),
        "test_retract_interval": st.sampled_from([0, 0, 3]),
        "conservativeness": st.sampled_from([1.0, 0.05]),
    }
)
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=12)
requests = st.fixed_dictionaries(
    {
        "prompt": st.builds(list.__add__, st.sampled_from(BEGINNINGS), tokens),
        "prior": st.one_of(st.just([]), tokens),
        "max_new_tokens": st.sampled_from([0, 1, 6, 30]),
        "stop_token_ids": st.sampled_from([(), (11,), (12, 13, 14)]),
        "ignore_eos": st.booleans(),
        "stop": st.sampled_from([(), ("secret",)]),
        "stream": st.booleans(),
        "logprobs": st.sampled_from([None, *map(LogprobOptions, (-1, 0, 3))]),
        "hidden_states": st.sampled_from([False, False, True]),
        "namespace": st.sampled_from(["", "a"]),
        "priority": st.sampled_from([None, 0, 9]),
        "routing_key": st.sampled_from(["", "k", "l"]),
        "pooling": st.sampled_from([None, None, None, "last", "mean"]),
    }
)
changes = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(list(POLICIES)),
        "priority": st.sampled_from([None, PRIORITY, PrioritySettings(default=5, low_first=True)]),
    },
    optional={
        "max_running_requests": st.just(1),
        "chunked_prefill_size": st.just(16),
        "mixed_chunk": st.booleans(),
        "conservativeness": st.sampled_from([1.0, 0.05]),
        "cadence": st.sampled_from([CadenceSettings(), CadenceSettings(2, 1, 1, 2)]),
    },
)
actions = st.one_of(
    st.tuples(st.just("submit"), requests),
    st.tuples(st.just("submit"), requests),
    st.tuples(st.just("turn"), st.sampled_from([1, 1, 3, 20])),
    st.tuples(st.just("abort"), st.integers(0, 9)),
    st.tuples(st.just("stop"), st.integers(0, 9)),
    st.tuples(st.just("continue"), st.integers(0, 9)),
    st.tuples(st.just("change"), changes),
    st.tuples(
        st.just("call"),
        st.sampled_from([FlushCache(0), GetState(0), ListRequests(0), GetMoments(0)]),
    ),
    st.tuples(st.just("pause"), st.sampled_from(PauseMode)),
    st.tuples(st.just("resume"), st.none()),
    st.tuples(
        st.just("operate"),
        st.sampled_from(
            [
                ReleaseMemory([MemoryPart.KV_CACHE]),
                ReleaseMemory([MemoryPart.WEIGHTS, MemoryPart.CUDA_GRAPH]),
                RestoreMemory([MemoryPart.KV_CACHE]),
                LoadWeights("SECRETFOLDER", "auto", flush_cache=True),
            ]
        ),
    ),
)


def allowed(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration as the checks of options allow it."""
    ordered = config.get("policy", "fcfs") in ("fcfs", "lof")
    return config if ordered else config | {"priority": None}


def harness_of(config: dict[str, Any], *, wire: Wire | None = None) -> Harness:
    page_size = config["page_size"]
    how_many = random.Random(0)
    return Harness(
        **allowed(config),
        num_pages=max(NUM_PAGES // page_size, 6) * config.get("row", PageRow()).width,
        eviction_parameters=EVICTION[config["eviction_policy"]],
        next_token=next_token,
        num_tokens=lambda most: how_many.randint(0, most) if most > 1 else most,
        preparer=ScriptedPreparer(Grammar, needs=lambda request: request.seed % 6 == 0),
        wire=wire,
        operator=ScriptedOperator(operation_error),
    )


def submit(harness: Harness, number: int, request: dict[str, Any]) -> None:
    if request["pooling"] is not None:
        request = request | {"max_new_tokens": 0, "prior": []}
    rid = f"client-{number:03}"
    harness.submit(rid, **request)


def run(config: dict[str, Any], todo: list[tuple[str, Any]]) -> Harness:
    harness = harness_of(config, wire=LossyWire())
    prompts: list[list[int]] = []
    for action, what in todo:
        if action == "submit":
            submit(harness, len(prompts), what)
            prompts.append(what["prompt"])
        elif action == "turn":
            harness.turn(what)
        elif action == "change":
            harness.change(**allowed(what))
        elif action == "pause":
            harness.pause(what)
        elif action == "resume":
            harness.resume()
        elif action == "operate":
            harness.operate(what)
        elif action == "call":
            harness.wire.inbox.append(what)
        elif what < len(prompts) and action == "continue":
            # the next turn of a conversation: the prompt is a prompt and its answer, and more
            before = f"client-{what:03}"
            prompt = prompts[what] + harness.outcomes[before].ids + [50]
            harness.submit(f"client-{len(prompts):03}", prompt)
            prompts.append(prompt)
        elif what < len(prompts):
            getattr(harness, action)(f"client-{what:03}")
    harness.resume()
    for part in MemoryPart:
        harness.operate(RestoreMemory([part]))
    harness.drain()
    return harness


@given(configs, st.lists(actions, min_size=5, max_size=40))
@settings(max_examples=50)
def test_a_run_replays_plan_by_plan(config: dict[str, Any], todo: list[tuple[str, Any]]) -> None:
    check_replay(config, todo)


@pytest.mark.full
@given(configs, st.lists(actions, min_size=5, max_size=40))
@settings(max_examples=500)
def test_many_runs_replay_plan_by_plan(config: dict[str, Any], todo: list[tuple[str, Any]]) -> None:
    check_replay(config, todo)


def check_replay(config: dict[str, Any], todo: list[tuple[str, Any]]) -> None:
    harness = run(config, todo)
    with tempfile.TemporaryDirectory() as folder:
        for content in (OFF, ON):
            outcome = replayed(record(harness, Path(folder) / content, content=content))
            assert outcome.difference == ""
            assert outcome.damage == outcome.ended_by == ""
            assert outcome.num_steps == len(harness.plans)
            assert outcome.num_requests == len(harness.outcomes)


def busy_run(seed: int, **config: Any) -> Harness:
    """Some hundred requests of a few conversations in too little memory."""
    rng = random.Random(seed)
    settings: dict[str, Any] = {
        "page_size": 4,
        "cache_enabled": True,
        "eviction_policy": "lru",
        "depth": 1,
        "chunked_prefill_size": 16,
        "priority": PRIORITY,
        "eos_token_ids": frozenset({0}),
        "max_tokens_per_row": 1,
        "conservativeness": 0.05,
    }
    harness = harness_of(settings | config, wire=LossyWire())
    histories = [list(beginning) for beginning in BEGINNINGS]
    for number in range(150):
        history = rng.choice(histories)
        history.append(rng.randrange(VOCAB))
        del history[30:]
        harness.submit(
            f"client-{number:03}",
            history,
            max_new_tokens=rng.choice([1, 8, 40]),
            stop_token_ids=(number % VOCAB,),
            priority=rng.choice([None, 0, 0, 9]),
            stream=rng.random() < 0.5,
        )
        harness.turn(rng.choice([0, 0, 1, 8]))
        if rng.random() < 0.2:
            victim = f"client-{rng.randrange(number + 1):03}"
            rng.choice([harness.abort, harness.stop])(victim)
    harness.drain()
    return harness


@pytest.mark.cases(2)
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("content", [OFF, ON])
def test_a_busy_run_replays(depth: int, content: str, tmp_path: Path) -> None:
    harness = busy_run(2, depth=depth)
    for kind in (Retraction, Preemption, SendFailed, PreparationStarted, GrammarEnded):
        assert harness.recorder.of(kind), f"the run has no {kind.__name__}"
    path = record(harness, tmp_path / "run", content=content)
    outcome = replayed(path)
    assert (outcome.difference, outcome.num_steps) == ("", len(harness.plans))
    for words in (b"SECRETGRAMMAR", b"client-"):
        assert (words in contents(path)) == (content == ON)


def test_surrogates_share_what_ids_share() -> None:
    """At every place where a prefix may end, and nowhere is an id used again."""
    rng = random.Random(1)
    places, key = Places(page_size=4, also=6), bytes(32)
    sequences = [[rng.randrange(2) for _ in range(rng.randrange(1, 20))] for _ in range(60)]
    ids = SurrogateIds(places)
    found = [
        ids.of(len(each), Chain(places, key).extend(pack_ids(each))).tolist() for each in sequences
    ]
    for one, other in itertools.combinations(range(len(sequences)), 2):
        for length in (4, 6, 8, 12, 16):
            if min(len(sequences[one]), len(sequences[other])) >= length:
                assert (found[one][:length] == found[other][:length]) == (
                    sequences[one][:length] == sequences[other][:length]
                )
    assert all(len(set(each)) == len(each) for each in found)


def test_without_content_no_id_and_no_name_is_in_the_file(tmp_path: Path) -> None:
    """Searched in the frames' contents for int32 in both byte orders (as msgpack has them, too) and
    for decimal digits."""

    def make(request: Request) -> Grammar:
        raise RequestError("wrong: secret schema")

    harness = Harness(
        num_pages=64,
        vocab_size=1 << 30,
        next_token=lambda history: 987_654_321,
        preparer=ScriptedPreparer(make, needs=lambda request: request.rid == "client-rid-2"),
    )
    secret = [123_456_789, 234_567_890, 345_678_901]
    harness.submit(
        "client-rid",
        secret,
        stop_token_ids=(456_789_012,),
        stop=("stop word",),
        logit_bias={567_890_123: 1.0},
        logprobs=LogprobOptions(ids=(678_901_234,)),
        constrain_after=(789_012_345,),
        namespace="salt",
        routing_key="route",
        priority=5,
        max_new_tokens=9999,
    )
    harness.submit("client-rid-2", secret)
    harness.turn(3)
    harness.abort("client-rid")
    harness.drain()
    ids = (*secret, 456_789_012, 567_890_123, 678_901_234, 789_012_345, 987_654_321)
    needles = [name.encode() for name in ("client-rid", "stop word", "salt", "route", "schema")]
    for each in ids:
        needles += [struct.pack("<i", each), struct.pack(">i", each), str(each).encode()]
    shown = contents(record(harness, tmp_path / "off"))
    assert not [needle for needle in needles if needle in shown]
    kept = contents(record(harness, tmp_path / "on", content=ON))
    for needle in (
        b"client-rid",
        b"stop word",
        b"schema",
        pack_ids(secret),
        pack_ids([987_654_321]),
    ):
        assert needle in kept, "the search would find it"


def contents(path: Path) -> bytes:
    return b"".join(FrameReader(path.read_bytes()))
