"""Decides which requests may have made an engine die, and tries these again in small groups
(decision 0056)."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from setpoint.ipc.engine_life import EngineState
from setpoint.ipc.line import EngineLine
from setpoint.ipc.submission import Submission

MOST_CRASHES = 2
"""A request is guilty when this many engines in turn have died while they computed it, it has got
no new token in between, and the last of them computed nothing else."""
MOST_KILLS = 3
"""The same number if the last engine was killed from outside: perhaps the request took all the
memory, but probably it did not."""


class Verdict(Enum):
    """What happens to a request whose engine has died."""

    INNOCENT = "goes on at once"
    SUSPECT = "is tried"
    GUILTY = "ends"


class Suspects:
    """Contract: a request is guilty only if an engine has died that computed nothing else. Only the
    EngineClient changes this object."""

    def __init__(self) -> None:
        self.waiting: list[Submission] = []
        """Suspects that wait for an engine that tries them, in order."""
        self._groups: dict[EngineLine, set[Submission]] = {}
        """Line that tries suspects -> the members of its current group that have not yet got a
        token, so that they may still end the engine."""
        self._group_size = 1
        """Maximum number of suspects in the next group. It doubles after each group that ended no
        engine: most crashes have a cause other than a request, and all requests then continue
        soon."""

    def tries(self, line: EngineLine) -> bool:
        """Whether the line tries suspects, so that it should get no other requests."""
        return line in self._groups

    def is_tried(self, submission: Submission) -> bool:
        return submission.line is not None and submission in self._groups.get(submission.line, ())

    def free_lines(self, ready: Sequence[EngineLine]) -> list[EngineLine]:
        """The ready lines that are trying no suspect at the moment."""
        return [line for line in ready if not self._groups.get(line)]

    def next_group(self, line: EngineLine) -> list[Submission]:
        """Take and return the suspects that the line is to try next. A suspect whose group has
        ended an engine is tried alone, so that it can be found guilty."""
        size = 1 if self.waiting[0].was_tried else self._group_size
        group, self.waiting = self.waiting[:size], self.waiting[size:]
        self._groups[line] = set(group)
        return group

    def clear(self, submission: Submission) -> bool:
        """Note that a suspect has got a new output or has ended, so it did not end this engine.
        Returns whether it was the last of its group, so that its line can try the next group."""
        submission.strikes, submission.was_tried = 0, False
        if not self.is_tried(submission):
            return False
        assert submission.line is not None
        group = self._groups[submission.line]
        group.remove(submission)
        if not group:
            self._group_size *= 2
        return not group

    def release(self, line: EngineLine) -> None:
        """Make a line that has tried its last group an ordinary line again."""
        if not self._groups[line]:
            del self._groups[line]

    def judge(
        self, line: EngineLine, lost: Sequence[Submission]
    ) -> list[tuple[Submission, Verdict]]:
        """The verdict on each request that the line had when it ended. The caller adds the suspects
        to ``waiting``. If the line was asked to end, no request is a suspect."""
        tried, computed = self._groups.pop(line, set()), set(line.suspect_numbers)
        if line.life.state is EngineState.STOPPING:
            tried, computed = set(), set()
        self._group_size = 1
        verdicts = []
        for each in lost:
            each.was_tried = each in tried
            each.strikes += each.was_tried or each.wire in computed
            was_alone = tried == {each} and computed <= {each.wire}
            verdict = Verdict.INNOCENT
            if was_alone and each.strikes >= (MOST_KILLS if line.life.was_killed else MOST_CRASHES):
                verdict = Verdict.GUILTY
            elif each.strikes >= (2 if line.life.was_killed else 1):
                verdict = Verdict.SUSPECT
            verdicts.append((each, verdict))
        return verdicts

    def sort(self) -> None:
        """Order the waiting suspects: first those in the group that was tried last, then those with
        the most strikes, then those with the fewest outputs, because most faults show in the first
        step of a request."""
        self.waiting.sort(
            key=lambda each: (not each.was_tried, -each.strikes, len(each.request.prior_output_ids))
        )
