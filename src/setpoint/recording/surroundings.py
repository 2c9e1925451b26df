"""The surroundings of a replayed loop, which give what was recorded: clock, link, executor and
preparer of requests."""

from __future__ import annotations

import sys
from collections import deque

import numpy as np

from setpoint.core.errors import RequestError
from setpoint.core.grammar import EndOfOutput, Grammar, NotReady
from setpoint.core.messages import Finish, ToFrontend, Tokens, ToLoop
from setpoint.core.operations import MemoryPart, Operation
from setpoint.core.plan import OWN_LENGTH, Rows, StepPlan, TokenMasks
from setpoint.core.request import Ids, Request
from setpoint.core.result import HiddenStates, StepResult
from setpoint.recording.format import KeptResult
from setpoint.recording.script import Script
from setpoint.recording.surrogates import offsets_of


class EndOfResults(Exception):
    """The replay waits for a step whose result was not recorded."""


class RecordedClock:
    """Shows the time that the recorded clock showed at the last input."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at


class RecordedLink:
    """Gives the messages of a turn, and fails to send the events that failed in the recording."""

    def __init__(self) -> None:
        self.messages: list[ToLoop] = []
        self.lost: dict[int, str] = {}
        """seq_id -> type of the exception that sending its event raises in this turn."""

    def receive(self, timeout_s: float) -> list[ToLoop]:
        messages, self.messages = self.messages, []
        return messages

    def send(self, message: ToFrontend) -> None:
        """Send the events. If they fail together, the loop sends them once more, one by one."""
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
        """seq_id -> how its grammar ended it, and whether it discarded the step's token; up to this
        turn."""
        self.complete: set[int] = set()
        """The sequences of which that is so before a step of this turn has a result: by the outputs
        that they have when they are prepared."""
        self.forced: dict[int, int] = {}
        """seq_id -> how many tokens its grammar forces next; up to this turn."""

        self.late: dict[int, bool] = {}
        """seq_id -> whether its grammar, which is late in this turn, is so before the step's token
        is known."""

    def needs(self, seq_id: int, request: Request) -> bool:
        return seq_id in self.needed

    def start(self, seq_id: int, request: Request, outputs: Ids) -> None:
        """Nothing to start: the recording holds when it was done."""

    def make_ready(self, seq_id: int, grammar: Grammar) -> None:
        """Nothing to start, as above."""

    def take(self, seq_id: int) -> RecordedGrammar:
        return RecordedGrammar(seq_id, self)

    def cancel(self, seq_id: int) -> None:
        """Nothing to free."""


class RecordedGrammar:
    """A grammar that knows only how many tokens it forces, when it is late, and when and how it
    ends."""

    def __init__(self, seq_id: int, recorded: RecordedPreparer) -> None:
        self._seq_id = seq_id
        self._recorded = recorded
        self._num_ahead = 0
        """Forced tokens that are not committed yet."""
        self._was_forced = False
        """Whether the last committed token was forced, which is never the end."""
        self._has_accepted = False

    def accept(self, token: int) -> None:
        """Raises EndOfOutput for a token that the recorded engine discarded."""
        self._has_accepted = True
        self._was_forced = self._num_ahead > 0
        if self._was_forced:
            self._num_ahead -= 1
            return
        finish, discards = self._recorded.ended.get(self._seq_id, (None, False))
        if finish is not None and discards:
            raise EndOfOutput(finish)

    def forced(self, most: int) -> list[int]:
        if self._is_late(discards=False):
            raise NotReady
        self._num_ahead = self._recorded.forced.pop(self._seq_id, 0)
        return [-1] * self._num_ahead  # ids do not matter

    def fill_mask(self, words: Ids, num_forced: int) -> None:
        if self._is_late(discards=True):
            raise NotReady
        words[:1] = -1  # nothing is sampled, and the mask of the surrogates is large

    @property
    def terminated(self) -> bool:
        if self._has_accepted and not self._was_forced and self._is_late(discards=False):
            raise NotReady
        ended = self._recorded.ended if self._has_accepted else self._recorded.complete
        return not self._was_forced and self._seq_id in ended

    def make_ready(self) -> None:
        """The recording says when it is ready."""

    def _is_late(self, *, discards: bool) -> bool:
        found = self._recorded.late.get(self._seq_id) is discards
        if found:
            del self._recorded.late[self._seq_id]
        return found


class RecordedOperator:
    """Succeeds and fails as the recorded engine did."""

    def __init__(self) -> None:
        self.outcomes: dict[int, tuple[frozenset[MemoryPart], str]] = {}
        """Id of the message -> the parts of memory that were released after it, and why it failed;
        empty if it did not."""
        self.released: frozenset[MemoryPart] = frozenset()

    def operate(self, call_id: int, operation: Operation) -> str:
        self.released, error = self.outcomes[call_id]
        if error:
            raise RequestError(error)
        return ""


class RecordedExecutor:
    """Answers plans with the recorded results, in order."""

    def __init__(self, script: Script, clock: RecordedClock) -> None:
        self._script = script
        self._clock = clock
        self.results: deque[KeptResult] = deque()
        self._with_hidden_states: set[int] = set()
        """seq_ids of all sequences ever admitted whose hidden states are wanted."""

    def submit(self, plan: StepPlan) -> RecordedStep:
        self._with_hidden_states.update(
            admit.seq_id for admit in plan.admits if admit.options.wants_hidden_states
        )
        return RecordedStep(plan, self)

    def idle(self) -> bool:
        return False

    def shutdown(self) -> None:
        """Nothing to free."""

    def result(self, plan: StepPlan) -> StepResult:
        """Raises EndOfResults."""
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
        """Empty vectors, as many as the engine brought: how much of a retracted sequence may come
        out of the cache depends on their number."""
        row = zip(rows.seq_ids.tolist(), rows.starts.tolist(), rows.counts.tolist(), strict=True)
        return {
            seq_id: HiddenStates(
                # Where a decode row begins is known to engines only; its positions are all new.
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
        """Nothing to wait for: the samples are recorded."""

    def result(self) -> StepResult:
        return self._executor.result(self._plan)
