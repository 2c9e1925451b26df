"""Replays a recording: the same scheduler, cache and loop run on recorded inputs, and all their
outputs are compared with the recorded ones.

A replay ends at its first difference, because the inputs recorded after it belong to other plans.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from setpoint.core.conversion import convert
from setpoint.core.errors import RecordingError, StepOutOfMemoryError
from setpoint.core.lack import Lack
from setpoint.core.messages import Finish, Submit, ToLoop, decode_to_loop
from setpoint.core.operations import MemoryPart
from setpoint.core.preparation import Need
from setpoint.core.records import Received, Record, ResultTaken, Turn
from setpoint.recording.codec import INPUTS, MEASURED, encode_record
from setpoint.recording.differences import Output, difference
from setpoint.recording.format import (
    Header,
    Kept,
    KeptArrival,
    KeptMessage,
    KeptRecord,
    KeptResult,
    KeptTurn,
    consistent,
)
from setpoint.recording.kept_content import Content
from setpoint.recording.recording_reader import Recording
from setpoint.recording.script import load_script
from setpoint.recording.surroundings import (
    EndOfResults,
    RecordedClock,
    RecordedExecutor,
    RecordedGiver,
    RecordedLink,
    RecordedMover,
    RecordedOperator,
    RecordedPreparer,
    RecordedTaker,
)
from setpoint.scheduler.handed_checks import FORBIDDEN
from setpoint.scheduler.loop import Loop
from setpoint.scheduler.scheduler import Scheduler


@dataclass(slots=True)
class Outcome:
    """The result of a replay."""

    num_steps: int = 0
    """Number of plans that were equal to the recorded ones."""
    num_requests: int = 0
    difference: str = ""
    """The first difference and where it is; "" if there is none."""
    ended_by: str = ""
    """The exception that the replay raised in the recorded engine's last turn; "" if none."""
    damage: str = ""
    """Why the rest of the recording could not be read; "" if all of it was."""
    seconds: float = 0.0

    @property
    def agrees(self) -> bool:
        return not self.difference and not self.damage


class _Comparison:
    """The observer of the replay. It remembers the first output that differs from the next recorded
    one, and ignores all outputs after that."""

    def __init__(self, header: Header, content: Content) -> None:
        self._fields = header.fields
        self._content = content
        self.expected: deque[Output] = deque()
        """Recorded outputs of this turn that the replay has not produced yet."""
        self.may_end = False
        """Whether this is the last turn, part of which may be missing from the recording."""
        self.found = ""
        self.num_steps = 0

    def on(self, record: Record) -> None:
        if isinstance(record, Turn | Received | ResultTaken) or self.found:
            return
        row = encode_record(record, self._content)
        if isinstance(row, KeptRecord) and row.kind in MEASURED | INPUTS:
            return
        assert not isinstance(row, KeptTurn | KeptMessage | KeptArrival | KeptResult)
        if not self.expected and self.may_end:
            return
        self.found = difference(
            self.expected.popleft() if self.expected else None, row, self._fields
        )
        self.num_steps += not self.found and not isinstance(row, KeptRecord)

    def end_turn(self) -> None:
        if self.expected and not self.found:
            self.found = difference(self.expected.popleft(), None, self._fields)


class Replay:
    """One replay of a recording that begins with the engine's start."""

    def __init__(self, recording: Recording) -> None:
        """Raises RecordingError if the recording cannot be replayed."""
        header = recording.header
        if header.segment:
            raise RecordingError(
                "The recording cannot be replayed, because its oldest parts were deleted to keep"
                " it below --record-max-bytes: a plan depends on all that happened since the"
                " engine's start. --print shows the rest."
            )
        with consistent():
            self._build(recording)

    def _build(self, recording: Recording) -> None:
        header, script = recording.header, load_script(recording)
        self._recording = recording
        self._script = script
        self._clock, self._link = RecordedClock(), RecordedLink()
        self._executor = RecordedExecutor(script, self._clock)
        self._preparer = RecordedPreparer()
        self._operator = RecordedOperator()
        self._comparison = _Comparison(header, script.content)
        self._loop = Loop(
            Scheduler(
                script.config,
                header.settings,
                header.cache.empty_cache(),
                observer=self._comparison,
                preparer=self._preparer,
                mover=RecordedMover(),
                giver=RecordedGiver() if script.config.role == "prefill" else None,
                taker=RecordedTaker() if script.config.role == "decode" else None,
            ),
            self._executor,
            self._link,
            depth=script.config.depth,
            clock=self._clock,
            observer=self._comparison,
            operator=self._operator,
        )
        self._outcome = Outcome()

    def run(self) -> Outcome:
        """Replay the recording. Raises RecordingError if it contradicts itself."""
        began = time.perf_counter()
        outcome, comparison = self._outcome, self._comparison
        for turn, is_last in _with_last(self._turns()):
            with consistent():
                self._load(turn)
            comparison.may_end = is_last
            raised = self._step(is_last)
            if raised and not comparison.found:
                comparison.found = f"the replay raised {raised}"
            if not raised:
                comparison.end_turn()
            if comparison.found:
                outcome.difference = (
                    f"after {comparison.num_steps} equal steps, at {self._clock.at:.6f} s of the"
                    f" engine's clock: {comparison.found}"
                )
                break
        outcome.num_steps = comparison.num_steps
        outcome.seconds = time.perf_counter() - began
        return outcome

    def _step(self, is_last: bool) -> str:
        """Run one turn. Returns the exception that it raised, as text; "" if there was none, or if
        the recorded engine's last turn may have raised it too."""
        try:
            self._loop.step()
        except EndOfResults:
            return (
                ""
                if is_last
                else "EndOfResults: the replay waits for a result that was recorded later"
            )
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
            if not is_last:
                return raised
            self._outcome.ended_by = raised
        return ""

    def _turns(self) -> Iterator[list[Kept]]:
        """The rows of each turn, each list beginning with a KeptTurn, as far as the recording can
        be read."""
        turn: list[Kept] = []
        try:
            for row in self._recording:
                if isinstance(row, KeptTurn) and turn:
                    yield turn
                    turn = []
                turn.append(row)
        except RecordingError as error:
            self._outcome.damage = str(error)
        if turn:
            yield turn

    def _load(self, turn: list[Kept]) -> None:
        has_result = False
        for row in turn:
            has_result = has_result or isinstance(row, KeptResult)
            match row:
                case KeptTurn(at):
                    self._clock.at = at
                case KeptMessage(message):
                    self._receive(decode_to_loop(bytes(message)))
                case KeptArrival():
                    self._receive(self._script.arrival(row))
                case KeptResult():
                    self._executor.results.append(row)
                case KeptRecord("PreparationStarted", [_, seq_id, *need]):
                    if need in ([], [Need.GRAMMAR]):
                        self._preparer.needed.add(seq_id)
                    self._comparison.expected.append(row)
                case KeptRecord("GrammarEnded", [seq_id, finish, discards]):
                    self._preparer.ended[seq_id] = convert(finish, Finish), discards
                    if not has_result:
                        self._preparer.complete.add(seq_id)
                    self._comparison.expected.append(row)
                case KeptRecord("GrammarLate", [_, seq_id, discards]):
                    self._preparer.late[seq_id] = discards
                    self._comparison.expected.append(row)
                case KeptRecord("TokensForced", [seq_id, num_tokens]):
                    self._preparer.forced[seq_id] = num_tokens
                    self._comparison.expected.append(row)
                case KeptRecord("HandedOver", [_, seq_id, why, *_]) if why == FORBIDDEN:
                    self._preparer.forbids_handed.add(seq_id)
                    self._comparison.expected.append(row)
                case KeptRecord("Operated", [call_id, _, parts, error]):
                    self._operator.outcomes[call_id] = frozenset(map(MemoryPart, parts)), error
                    self._comparison.expected.append(row)
                case KeptRecord("StepLost", [step_id, sampling, _, lack, is_final]):
                    error = StepOutOfMemoryError(convert(lack, Lack), is_final=is_final)
                    self._executor.lost[step_id, sampling] = error
                case KeptRecord("SendFailed", values):
                    self._link.lost[values[0]] = values[1]
                case KeptRecord(kind) if kind in MEASURED:
                    pass
                case _:
                    self._comparison.expected.append(row)

    def _receive(self, message: ToLoop) -> None:
        self._link.messages.append(message)
        self._outcome.num_requests += isinstance(message, Submit)


def _with_last(turns: Iterable[list[Kept]]) -> Iterator[tuple[list[Kept], bool]]:
    """(turn, whether it is the last) for each turn."""
    before: list[Kept] | None = None
    for turn in turns:
        if before is not None:
            yield before, False
        before = turn
    if before is not None:
        yield before, True
