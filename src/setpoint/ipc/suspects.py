"""The requests that were computed when an engine died: each may be the cause, so they are tried
(decision 0056)."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from setpoint.ipc.line import EngineLine, EngineState
from setpoint.ipc.submission import Submission

MOST_CRASHES = 2
"""A request ends when so many engines have died in turn with it in their steps, without a new token
of it, and the last of them was computing nothing else."""
MOST_KILLS = 3
"""The same, if the last of them was killed from outside: perhaps because the request took all the
memory, but more likely not."""


class Verdict(Enum):
    """What becomes of a request when its engine has died."""

    INNOCENT = "goes on at once"
    SUSPECT = "is tried"
    GUILTY = "ends"


class Suspects:
    """Contract: a request is guilty only if an engine has died that computed nothing else. Written
    by the EngineClient alone."""

    def __init__(self) -> None:
        self.waiting: list[Submission] = []
        """For an engine that tries them, in this order."""
        self._groups: dict[EngineLine, set[Submission]] = {}
        """Lines that try suspects, group after group -> those of the present group that have yet to
        show that they do not end an engine."""
        self._group_size = 1
        """How many suspects the next group has at most. It doubles with each group that ended no
        engine: most crashes have another cause than a request, and then all go on soon."""

    def tries(self, line: EngineLine) -> bool:
        """Whether the line tries suspects, so that others better keep away from it."""
        return line in self._groups

    def is_tried(self, submission: Submission) -> bool:
        return submission.line is not None and submission in self._groups.get(submission.line, ())

    def free_lines(self, ready: Sequence[EngineLine]) -> list[EngineLine]:
        """Of the ready lines those that try nobody now."""
        return [line for line in ready if not self._groups.get(line)]

    def next_group(self, line: EngineLine) -> list[Submission]:
        """Take the suspects that the line is to try next. One that was in a group that ended an
        engine is alone, so that it can be found guilty."""
        size = 1 if self.waiting[0].was_tried else self._group_size
        group, self.waiting = self.waiting[:size], self.waiting[size:]
        self._groups[line] = set(group)
        return group

    def clear(self, submission: Submission) -> bool:
        """It has got an output that it had not, or is over: it did not end this engine. Returns
        whether it was the last of its group, so that its line can try the next one."""
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
        """If the line has tried its last group and there is no other, it is a line as any other."""
        if not self._groups[line]:
            del self._groups[line]

    def judge(
        self, line: EngineLine, lost: Sequence[Submission]
    ) -> list[tuple[Submission, Verdict]]:
        """The verdict on each of the requests that the line had when it ended. Who is suspected is
        yet to be added to ``waiting``. A line that was asked to end has ended because of none."""
        tried, computed = self._groups.pop(line, set()), set(line.suspect_numbers)
        if line.state is EngineState.STOPPING:
            tried, computed = set(), set()
        self._group_size = 1
        verdicts = []
        for each in lost:
            each.was_tried = each in tried
            each.strikes += each.was_tried or each.wire in computed
            was_alone = tried == {each} and computed <= {each.wire}
            verdict = Verdict.INNOCENT
            if was_alone and each.strikes >= (MOST_KILLS if line.was_killed else MOST_CRASHES):
                verdict = Verdict.GUILTY
            elif each.strikes >= (2 if line.was_killed else 1):
                verdict = Verdict.SUSPECT
            verdicts.append((each, verdict))
        return verdicts

    def sort(self) -> None:
        """First who was tried last, then who has the most strikes, then who is new: most faults
        show in the first step of a request."""
        self.waiting.sort(
            key=lambda each: (not each.was_tried, -each.strikes, len(each.request.prior_output_ids))
        )
