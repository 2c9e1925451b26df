"""The surroundings of a replayed loop, which supply what was recorded: clock, link, executor,
operator, preparer of requests, and what moves pages."""

from __future__ import annotations

import sys
from collections import deque

import numpy as np

from setpoint.core.bootstrap import Bootstrap
from setpoint.core.errors import RequestError, StepOutOfMemoryError
from setpoint.core.grammar import EndOfOutput, Grammar, NotReady
from setpoint.core.handover import HandoverState
from setpoint.core.messages import Finish, ToFrontend, Tokens, ToLoop
from setpoint.core.operations import MemoryPart, Operation
from setpoint.core.plan import OWN_LENGTH, Rows, StepPlan, TokenMasks
from setpoint.core.request import Ids, Request
from setpoint.core.result import HiddenStates, StepResult
from setpoint.core.transfers import Transfer
from setpoint.recording.format import KeptResult
from setpoint.recording.script import ReplayScript
from setpoint.recording.surrogates import offsets_of


class EndOfResults(Exception):
    """The replay waits for a step whose result was not recorded."""


class RecordedClock:
    """Returns the time of the last recorded input."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at


class RecordedLink:
    """Delivers the messages of a turn, and fails to send the events that could not be sent in the
    recorded run."""

    def __init__(self) -> None:
        self.messages: list[ToLoop] = []
        self.lost: dict[int, str] = {}
        """seq_id -> name of the type of the exception that sending its event raises in this
        turn."""

    def receive(self, timeout_s: float) -> list[ToLoop]:
        messages, self.messages = self.messages, []
        return messages

    def send(self, message: ToFrontend) -> None:
        """Raise what was recorded for these events. If several fail together, the loop sends them
        again, one by one."""
        events = message.events if isinstance(message, Tokens) else []
        if not any(event.seq_id in self.lost for event in events):
            return
        kind = self.lost.pop(events[0].seq_id) if len(events) == 1 else "Exception"
        raise type(kind, (Exception,), {})()  # the loop sends the client the type's name


class RecordedPreparer:
    """Prepares the requests that were prepared in the recording; the link says when."""

    def __init__(self) -> None:
        self.needed: set[int] = set()
        self.ended: dict[int, tuple[Finish, bool]] = {}
        """seq_id -> (how its grammar ended it, whether the step's token was discarded); up to this
        turn."""
        self.complete: set[int] = set()
        """The sequences among them that end when they are prepared, because of the outputs that
        they already have."""
        self.forced: dict[int, int] = {}
        """seq_id -> number of tokens that its grammar forces next; up to this turn."""

        self.forbids_handed: set[int] = set()
        """The sequences whose grammar does not allow the token that a prefill server has handed
        over."""

        self.late: dict[int, bool] = {}
        """seq_id -> ``GrammarLate.discards``, for the grammars that are late in this turn."""

    def needs(self, seq_id: int, request: Request) -> bool:
        return seq_id in self.needed

    def start(self, seq_id: int, request: Request, outputs: Ids) -> None:
        """Does nothing: the recording says when the preparation is done."""

    def make_ready(self, seq_id: int, grammar: Grammar) -> None:
        """Does nothing, like ``start``."""

    def take(self, seq_id: int) -> RecordedGrammar:
        return RecordedGrammar(seq_id, self)

    def cancel(self, seq_id: int) -> None:
        """Does nothing."""


class RecordedGrammar:
    """A grammar that only knows whether it allows a handed token, how many tokens it forces, when
    it is late, and when and how it ends."""

    def __init__(self, seq_id: int, recorded: RecordedPreparer) -> None:
        self._seq_id = seq_id
        self._recorded = recorded
        self._num_ahead = 0
        """Number of forced tokens that are not committed yet."""
        self._was_forced = False
        """Whether the last committed token was forced; such a token never ends the sequence."""
        self._has_accepted = False

    def accept(self, token: int) -> None:
        """Raise EndOfOutput for a token that the recorded engine discarded."""
        self._has_accepted = True
        self._was_forced = self._num_ahead > 0
        if self._was_forced:
            self._num_ahead -= 1
            return
        finish, discards = self._recorded.ended.get(self._seq_id, (None, False))
        if finish is not None and discards:
            raise EndOfOutput(finish)

    def allows(self, token: int) -> bool:
        return self._seq_id not in self._recorded.forbids_handed

    def forced(self, most: int) -> list[int]:
        if self._is_late(discards=False):
            raise NotReady
        self._num_ahead = self._recorded.forced.pop(self._seq_id, 0)
        return [-1] * self._num_ahead  # ids do not matter

    def fill_mask(self, words: Ids, num_forced: int) -> None:
        if self._is_late(discards=True):
            raise NotReady
        words[:1] = -1  # one allowed token suffices: nothing is sampled, and the mask is large

    @property
    def terminated(self) -> bool:
        if self._has_accepted and not self._was_forced and self._is_late(discards=False):
            raise NotReady
        ended = self._recorded.ended if self._has_accepted else self._recorded.complete
        return not self._was_forced and self._seq_id in ended

    def make_ready(self) -> None:
        """Does nothing: the recording says when the grammar is ready."""

    def _is_late(self, *, discards: bool) -> bool:
        found = self._recorded.late.get(self._seq_id) is discards
        if found:
            del self._recorded.late[self._seq_id]
        return found


class RecordedMover:
    """Implements ``core.transfers.Mover``: moves nothing, since the recorded inputs say what was
    found and moved."""

    def look_up(self, seq_id: int, digests: bytes) -> None: ...

    def load(self, transfer: Transfer) -> None: ...

    def save(self, transfer: Transfer) -> None: ...

    def cancel(self, transfer_id: int) -> None: ...


class RecordedGiver:
    """Implements ``core.handover.Giver`` in the same way."""

    def offer(self, seq_id: int, room: int, digest: bytes) -> None: ...

    def supply(self, seq_id: int, rows: Ids, handed: HandoverState) -> None: ...

    def withdraw(self, seq_id: int, reason: str) -> None: ...


class RecordedTaker:
    """Implements ``core.handover.Taker`` in the same way."""

    def fetch(
        self, seq_id: int, bootstrap: Bootstrap, digest: bytes, skipped_rows: int, rows: Ids
    ) -> None: ...

    def cancel(self, seq_id: int) -> None: ...


class RecordedOperator:
    """Succeeds or fails as the recorded engine did."""

    def __init__(self) -> None:
        self.outcomes: dict[int, tuple[frozenset[MemoryPart], str]] = {}
        """Id of the call -> (parts of memory that were released afterwards, why it failed, or
        "")."""
        self.released: frozenset[MemoryPart] = frozenset()

    def operate(self, call_id: int, operation: Operation) -> str:
        self.released, error = self.outcomes[call_id]
        if error:
            raise RequestError(error)
        return ""


class RecordedExecutor:
    """Answers plans with the recorded results, in order, and loses the steps that were lost."""

    def __init__(self, script: ReplayScript, clock: RecordedClock) -> None:
        self._script = script
        self._clock = clock
        self.results: deque[KeptResult] = deque()
        self.lost: dict[tuple[int, bool], StepOutOfMemoryError] = {}
        """(step_id, whether it was being sampled) -> what the step is lost by."""
        self._with_hidden_states: set[int] = set()
        """seq_ids of all sequences ever admitted whose hidden states are wanted."""

    def submit(self, plan: StepPlan) -> RecordedStep:
        self.fail(plan, sampling=False)
        self._with_hidden_states.update(
            admit.seq_id for admit in plan.admits if admit.options.wants_hidden_states
        )
        return RecordedStep(plan, self)

    def fail(self, plan: StepPlan, *, sampling: bool) -> None:
        """Raise StepOutOfMemoryError if the step was lost at this moment."""
        error = self.lost.get((plan.step_id, sampling))
        if error is not None:
            raise error

    def idle(self) -> bool:
        return False

    def shutdown(self) -> None:
        """Does nothing."""

    def result(self, plan: StepPlan) -> StepResult:
        """The recorded result of the plan. Raises EndOfResults if there is none."""
        if not self.results:
            raise EndOfResults
        row = self.results.popleft()
        self._clock.at = row.at
        seq_ids = plan.rows.seq_ids[plan.rows.sampling]
        return StepResult(
            row.step_id,
            seq_ids,
            self._script.token_ids(row, seq_ids.tolist()),
            offsets_of(row, len(seq_ids)),
            embeddings={
                seq_id: np.array([0.0 if is_finite else np.nan], np.float32)
                for seq_id, is_finite in row.embedded.items()
            },
            hidden_states=self._hidden_states(plan.rows) if self._with_hidden_states else {},
            failures=row.failures,
            forward_s=row.forward_s,
            sample_s=row.sample_s,
            way=row.way,
        )

    def _hidden_states(self, rows: Rows) -> dict[int, HiddenStates]:
        """Vectors without elements, as many as the engine brought back: their number decides how
        much of a retracted sequence may be matched in the cache."""
        row = zip(rows.seq_ids.tolist(), rows.starts.tolist(), rows.counts.tolist(), strict=True)
        return {
            seq_id: HiddenStates(
                # Only an engine knows where a decode row begins; all its positions are new.
                sys.maxsize if start == OWN_LENGTH else start,
                np.empty((count, 0), np.float32),
            )
            for seq_id, start, count in row
            if seq_id in self._with_hidden_states
        }


class RecordedStep:
    def __init__(self, plan: StepPlan, executor: RecordedExecutor) -> None:
        self._plan = plan
        self._executor = executor

    def finish(self, masks: TokenMasks | None) -> None:
        """Raise StepOutOfMemoryError if the step was lost; its samples are recorded."""
        self._executor.fail(self._plan, sampling=True)

    def result(self) -> StepResult:
        return self._executor.result(self._plan)
