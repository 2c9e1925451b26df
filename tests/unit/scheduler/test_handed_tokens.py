"""The first token that a prefill server has sampled, under the grammar of the decode server."""

from __future__ import annotations

from pathlib import Path

import pytest

from setpoint.core.bootstrap import Bootstrap
from setpoint.core.handover import HandoverState, PromptReceived
from setpoint.core.records import HandedOver, RequestDone
from setpoint.core.request import Ids
from setpoint.recording.format import ON
from setpoint.scheduler.handed_checks import FORBIDDEN
from setpoint_testing.harness import Harness
from setpoint_testing.preparers import ScriptedPreparer
from setpoint_testing.recordings import record, replayed

PROMPT = [3, 4, 5, 6]
WORD = (40, 41, 42)


class Word:
    """Allows one sequence of tokens. Once it has refused one, it is of no use, as a library's."""

    def __init__(self) -> None:
        self.num_accepted = 0

    def accept(self, token: int) -> None:
        assert token == WORD[self.num_accepted], "refused"
        self.num_accepted += 1

    def fill_mask(self, words: Ids) -> None:
        token = WORD[self.num_accepted]
        words[token // 32] |= 1 << token % 32

    @property
    def terminated(self) -> bool:
        return self.num_accepted == len(WORD)


class Liar:
    """Implements Taker: what it fetches arrives at once, with a token of the test's choice."""

    harness: Harness

    def __init__(self, token: int) -> None:
        self._token = token

    def fetch(
        self, seq_id: int, bootstrap: Bootstrap, digest: bytes, skipped_rows: int, rows: Ids
    ) -> None:
        handed = HandoverState(len(PROMPT), seed=0, ids=[self._token])
        self.harness.wire.post(PromptReceived(seq_id, handed, 0))

    def cancel(self, seq_id: int) -> None:
        """Nothing is under way."""


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("token", [WORD[0], 50])
def test_a_token_that_the_grammar_forbids_is_computed_here(
    token: int, is_late: bool, tmp_path: Path
) -> None:
    """Red before: the client got a 400, as if its grammar were wrong."""
    taker = Liar(token)
    preparer = ScriptedPreparer(lambda request: Word(), hold=is_late)
    harness = Harness(
        role="decode", handover={"taker": taker}, preparer=preparer, strict_accounting=True
    )
    taker.harness = harness
    harness.submit("r", PROMPT, max_new_tokens=12, bootstrap=Bootstrap(7, "prefill", 1))
    if is_late:
        for _ in range(5):
            harness.turn()
        preparer.finish(0)
    harness.drain()
    outcome = harness.outcomes["r"]
    assert outcome.ids == list(WORD)
    assert outcome.finish is not None
    assert outcome.finish.type == "stop"
    reasons = [each.why for each in harness.recorder.of(HandedOver)]
    assert reasons == ["", *([FORBIDDEN] if token != WORD[0] else [])]
    assert replayed(record(harness, tmp_path / "run", content=ON)).agrees


class Late:
    """Implements Taker: what it fetches arrives when the test says so."""

    def fetch(
        self, seq_id: int, bootstrap: Bootstrap, digest: bytes, skipped_rows: int, rows: Ids
    ) -> None:
        self.seq_id = seq_id

    def cancel(self, seq_id: int) -> None:
        """Nothing is under way."""


@pytest.mark.parametrize("fails", [False, True])
def test_the_time_of_a_prompt_that_another_server_computes_is_measured(fails: bool) -> None:
    """Red before: the prompt took 0 s, and all the waiting was time in the queue."""
    taker = Late()
    harness = Harness(role="decode", handover={"taker": taker})
    clock = harness.clock
    harness.submit("r", PROMPT, max_new_tokens=3, bootstrap=Bootstrap(7, "prefill", 1))
    harness.turn()
    clock.advance(2.0)
    handed = None if fails else HandoverState(len(PROMPT), seed=0, ids=[WORD[0]])
    harness.wire.post(PromptReceived(taker.seq_id, handed, 0, failure="gone" if fails else ""))
    harness.drain()
    (done,) = harness.recorder.of(RequestDone)
    assert done.accepted_at is not None
    assert done.admitted_at is not None
    assert done.first_token_at is not None
    queue_s, prompt_s = done.admitted_at - done.accepted_at, done.first_token_at - done.admitted_at
    if fails:
        assert queue_s >= 2.0 > prompt_s, "it was admitted when it computed its prompt here"
    else:
        assert prompt_s >= 2.0 > queue_s
