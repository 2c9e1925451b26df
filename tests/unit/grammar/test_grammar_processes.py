"""Grammars in processes: one that computes for ever keeps nobody, and ends alone; and the processes
themselves end, whatever happens."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
from slow_grammar_worker import VOCAB_SIZE

from setpoint.core.constraint import Constraint
from setpoint.core.errors import RequestError
from setpoint.core.grammar import NotReady
from setpoint.core.records import GrammarLate, PreparationEnded
from setpoint.core.request import Request
from setpoint.core.sampling import SamplingParams
from setpoint.grammar import processes
from setpoint.grammar.cache import CompiledCache
from setpoint.grammar.factory import CachingFactory
from setpoint.grammar.grammar_threads import GrammarThreads
from setpoint.grammar.lookahead import Lookahead
from setpoint.grammar.patience import BURST_S, Patience
from setpoint.grammar.processes import GrammarProcess, Nursery
from setpoint.grammar.remote import RemoteAutomaton
from setpoint_testing.harness import Harness, Wire

WORKER = (sys.executable, str(Path(__file__).parents[1] / "slow_grammar_worker.py"))
DEADLINE_S = 120.0


@pytest.fixture
def nursery() -> Nursery:
    return Nursery(WORKER)


def children(nursery: Nursery) -> list[psutil.Process]:
    assert nursery._parent is not None
    return [each for each in psutil.Process(nursery._parent.pid).children() if lives(each)]


def lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):  # it may end at any moment
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def compiled(nursery: Nursery, text: str) -> GrammarProcess:
    return nursery.compiled(Constraint("regex", text))


def automaton(process: GrammarProcess, patience: Patience | None = None) -> RemoteAutomaton:
    return RemoteAutomaton(process, patience or Patience(), forbidden=())


def mask(automaton: RemoteAutomaton) -> int:
    """The first word of the next mask."""
    words = np.zeros(-(-VOCAB_SIZE // 32), np.int32)
    automaton.fill_mask(words)
    return int(words[0])


def ready_mask(automaton: RemoteAutomaton) -> int:
    automaton.make_ready()
    return mask(automaton)


def test_sequences_of_one_constraint(nursery: Nursery) -> None:
    process = compiled(nursery, "quick")
    first, second = automaton(process), automaton(process)
    assert ready_mask(first) == ready_mask(second) == -1
    first.accept(3)
    first.make_ready()
    assert not first.terminated
    second.accept(13)
    with pytest.raises(RequestError, match="does not allow token 13"):
        second.make_ready()
    with pytest.raises(RequestError, match="does not allow token 13"):
        second.accept(3)
    assert ready_mask(first) == -1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("wrong", "it is wrong"),
        ("nothing", "it allows no token"),
        ("wait 0", "it takes more than"),
        ("memory", "it takes more than"),
    ],
)
def test_what_is_refused(text: str, words: str, nursery: Nursery) -> None:
    with pytest.raises(
        RequestError,
        match=f"Failed to compile regex grammar: the expression .* cannot be used: {words}",
    ) as caught:
        compiled(nursery, text)
    assert caught.value.status_code == 400


def test_a_token_that_never_ends_ends_its_own_constraint(nursery: Nursery) -> None:
    hostile, other = automaton(compiled(nursery, "wait 2")), automaton(compiled(nursery, "quick"))
    for _ in range(2):
        ready_mask(hostile)
        hostile.accept(1)
    with pytest.raises(NotReady):  # the loop does not wait for it
        mask(hostile)
    for _ in range(100):  # while it computes
        other.accept(1)
        assert ready_mask(other) == -1
    with pytest.raises(RequestError, match="it takes too much work"):
        hostile.make_ready()
    until(lambda: len(children(nursery)) == 1)


def test_the_loop_waits_for_all_slow_answers_together_no_longer_than_once(nursery: Nursery) -> None:
    """Each of many sequences is late, and the loop's patience is used up by the first of them."""
    now = 0.0
    patience = Patience(lambda: now)
    assert patience.left_s == BURST_S
    patience.spend(0.004)
    assert patience.left_s == BURST_S
    patience.spend(BURST_S)
    assert patience.left_s == 0
    now = 1000.0
    assert patience.left_s == BURST_S


def test_a_constraint_that_nobody_waits_for_is_given_up(nursery: Nursery) -> None:
    process = nursery.new()
    until(lambda: len(children(nursery)) == 1)
    with pytest.raises(RequestError):
        process.compile(Constraint("regex", "hang"), lambda: False)
    until(lambda: not children(nursery))


def test_a_process_ends_with_the_last_reference_to_it(nursery: Nursery) -> None:
    process = compiled(nursery, "quick")
    sequence = automaton(process)
    del process
    assert ready_mask(sequence) == -1
    assert len(children(nursery)) == 1
    del sequence
    gc.collect()
    until(lambda: not children(nursery))


def test_the_nursery_ends_with_the_last_reference_to_it() -> None:
    nursery = Nursery(WORKER)
    nursery.new()
    parent = nursery._parent
    assert parent is not None
    del nursery
    gc.collect()
    assert parent.returncode is not None


def test_killed_processes_are_replaced(nursery: Nursery) -> None:
    """Red before: a client whose process the system had killed was told that its grammar takes too
    much work (400)."""
    process = compiled(nursery, "quick")
    sequence = automaton(process)
    ready_mask(sequence)
    (child,) = children(nursery)
    child.kill()
    until(lambda: not children(nursery))
    sequence.accept(1)
    with pytest.raises(RequestError, match="of the grammar was ended by SIGKILL") as caught:
        sequence.make_ready()
    assert caught.value.status_code == 503
    assert process.is_lost
    assert ready_mask(automaton(compiled(nursery, "quick"))) == -1
    assert nursery._parent is not None
    nursery._parent.kill()
    nursery._parent.wait()
    assert ready_mask(automaton(compiled(nursery, "quick"))) == -1


def test_a_constraint_whose_process_is_killed_is_compiled_by_another(
    nursery: Nursery, tmp_path: Path
) -> None:
    go, killed = tmp_path / "go", []

    def is_wanted() -> bool:
        if not killed and (found := children(nursery)):
            killed.extend(found)
            found[0].kill()
            go.touch()
        return True

    nursery.compiled(Constraint("regex", f"late {go}"), is_wanted)
    assert len(killed) == 1


@pytest.mark.parametrize("whose", ["its process", "the nursery"])
def test_a_constraint_whose_process_is_stopped_is_compiled_by_another(
    whose: str, nursery: Nursery, tmp_path: Path
) -> None:
    """Red before: its request waited for ever."""
    go, stopped = tmp_path / "go", list[psutil.Process]()
    compiled(nursery, "quick")  # so that there is a nursery
    if whose == "the nursery":
        assert nursery._parent is not None
        psutil.Process(nursery._parent.pid).suspend()
        go.touch()

    def is_wanted() -> bool:
        if not go.exists() and (found := children(nursery)):
            stopped.extend(found)
            found[-1].suspend()
            go.touch()
        return True

    nursery.compiled(Constraint("regex", f"late {go}"), is_wanted)
    assert bool(stopped) == (whose == "its process")


def test_a_sequence_whose_process_is_stopped_is_to_be_repeated(nursery: Nursery) -> None:
    """Red before: it waited for ever."""
    process = compiled(nursery, "quick")
    sequence = automaton(process)
    ready_mask(sequence)
    (child,) = children(nursery)
    child.suspend()
    sequence.accept(1)
    with pytest.raises(RequestError, match="of the grammar was stopped by a signal") as caught:
        sequence.make_ready()
    assert caught.value.status_code == 503
    assert ready_mask(automaton(compiled(nursery, "quick"))) == -1


def test_a_constraint_whose_processes_are_killed_again_and_again_is_to_be_repeated(
    nursery: Nursery,
) -> None:
    def is_wanted() -> bool:
        for child in children(nursery):
            child.kill()
        return True

    with pytest.raises(RequestError, match="of the grammar was ended by SIGKILL") as caught:
        nursery.compiled(Constraint("regex", "hang"), is_wanted)
    assert caught.value.status_code == 503


class OneFactory(CachingFactory[GrammarProcess]):
    def __init__(self, nursery: Nursery) -> None:
        cache: CompiledCache[GrammarProcess] = CompiledCache(lambda *_: 1, max_size=9)
        super().__init__(cache, vocab_size=VOCAB_SIZE, eos_token_ids=())
        self._nursery = nursery

    def _compile(self, constraint: Constraint, is_wanted: Callable[[], bool]) -> GrammarProcess:
        return self._nursery.compiled(constraint, is_wanted)

    def _is_lost(self, compiled: GrammarProcess) -> bool:
        return compiled.is_lost

    def _start(self, compiled: GrammarProcess, *, ignore_eos: bool) -> RemoteAutomaton:
        return automaton(compiled)


def test_a_cached_constraint_whose_process_is_gone_is_compiled_again(nursery: Nursery) -> None:
    """Red before: every later request with the same constraint was refused."""
    factory = OneFactory(nursery)
    request = Request(
        rid="r",
        prompt_ids=np.array([1], np.int32).tobytes(),
        sampling=SamplingParams(regex="a"),
        seed=0,
    )
    factory(request)
    (child,) = children(nursery)
    child.kill()
    until(lambda: not children(nursery))
    factory(request)
    assert len(children(nursery)) == 1


def test_too_many_constraints_are_refused(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "MAX_PROCESSES", 2)
    first, second = compiled(nursery, "quick"), compiled(nursery, "quick")
    with pytest.raises(RequestError, match="different constraints are in use") as caught:
        compiled(nursery, "quick")
    assert caught.value.status_code == 503
    del first
    assert compiled(nursery, "quick") is not second


class Factory:
    """Makes grammars of the constraint that a request names."""

    def __init__(self, nursery: Nursery) -> None:
        self._nursery = nursery
        self._patience = Patience()

    def prepare(self) -> None:
        """Nothing to prepare."""

    def constrains(self, request: Request) -> bool:
        return request.sampling.constraint is not None

    def is_cached(self, request: Request) -> bool:
        return False

    def __call__(self, request: Request, is_wanted: Callable[[], bool] = lambda: True) -> Lookahead:
        assert request.sampling.constraint is not None
        process = self._nursery.compiled(request.sampling.constraint, is_wanted)
        return Lookahead(automaton(process, self._patience), VOCAB_SIZE)


@pytest.mark.parametrize("depth", [0, 1])
def test_hostile_grammars_hold_up_nobody(depth: int, nursery: Nursery, tmp_path: Path) -> None:
    """Four grammars hang at the same token. Meanwhile the loop goes on: the other requests, one of
    them with a grammar, get all their tokens before the four end. Red before: the loop stood
    still."""
    go = tmp_path / "go"
    wire = Wire()
    harness = Harness(
        depth=depth,
        num_pages=4096,
        preparation_timeout_s=None,
        wire=wire,
        preparer=GrammarThreads(Factory(nursery), wire.post),  # type: ignore[arg-type]
    )
    hostile = [f"g{number}" for number in range(4)]
    for rid in hostile:
        harness.submit(rid, [1, 2, 3], max_new_tokens=50, regex=f"wait 3 {go}", ignore_eos=True)
    harness.submit("kind", [1, 2, 4], max_new_tokens=20, regex="quick", ignore_eos=True)
    late = harness.recorder.of
    until(lambda: harness.turn() or len(late(GrammarLate)) >= 4)
    harness.submit("free", [5], max_new_tokens=200, ignore_eos=True)
    kind = [harness.outcomes[rid] for rid in ("free", "kind")]
    until(lambda: harness.turn() or all(each.finish for each in kind))
    assert [harness.outcomes[rid].finish for rid in hostile] == [None] * 4
    go.touch()
    until(lambda: harness.turn() or all(each.finish for each in harness.outcomes.values()))
    for rid in hostile:
        outcome = harness.outcomes[rid]
        assert outcome.finish is not None
        assert outcome.finish.status_code == 400
        assert len(outcome.ids) == 3
    for rid, length in (("kind", 20), ("free", 200)):
        assert len(harness.outcomes[rid].ids) == length
        assert harness.outcomes[rid].finish.type == "length"
    outcomes = {each.outcome for each in harness.recorder.of(PreparationEnded)}
    assert outcomes >= {"compiled", "refused"}
