"""Prepares requests when a test says so, without threads."""

from __future__ import annotations

from collections.abc import Callable

from setpoint.core.grammar import Grammar
from setpoint.core.messages import Prepared
from setpoint.core.request import Ids, Request
from setpoint.grammar.grammar_threads import behind, finish_of
from setpoint.grammar.lookahead import Automaton, Lookahead
from setpoint.grammar.paced import Matcher


class AnyToken:
    """A grammar that allows every token, and keeps the accepted ones."""

    def __init__(self, ends_after: int = 1 << 30) -> None:
        self.accepted: list[int] = []
        self._ends_after = ends_after

    def accept(self, token: int) -> None:
        self.accepted.append(token)

    def fill_mask(self, words: Ids) -> None:
        words[:] = -1

    @property
    def terminated(self) -> bool:
        return len(self.accepted) >= self._ends_after


class Ready:
    """Implements Automaton with a matcher that is never slow."""

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher
        self.accept = matcher.accept
        self.fill_mask = matcher.fill_mask

    @property
    def terminated(self) -> bool:
        return self._matcher.terminated

    def make_ready(self) -> None:
        """Do nothing: it is always ready."""


class TokenByToken(Lookahead):
    """Forces nothing, so that every token is sampled."""

    def forced(self, most: int) -> list[int]:
        return []


class ScriptedPreparer:
    """Implements core.preparation.Preparer. ``make`` runs in ``start``, or, with ``hold``, in
    ``finish``."""

    def __init__(
        self,
        make: Callable[[Request], Matcher | Automaton],
        *,
        needs: Callable[[Request], bool] = lambda request: True,
        hold: bool = False,
        jumps: bool = True,
    ) -> None:
        """``jumps``: whether forced tokens are known before they are sampled."""
        self._make = make
        self._wrap = Lookahead if jumps else TokenByToken
        self.vocab_size: int
        """Set by the harness."""
        self._needs = needs
        self.hold = hold
        self.post: Callable[[Prepared], None]
        """Puts a message into the loop's inbox; set by the harness."""
        self.open: dict[int, tuple[Request, Ids] | Grammar] = {}
        """Sequence number -> what was started and neither cancelled nor taken: a grammar to make
        for a request with its outputs so far, or a grammar to make ready."""
        self.cancelled: list[int] = []
        self._made: dict[int, Grammar] = {}

    def needs(self, seq_id: int, request: Request) -> bool:
        return self._needs(request)

    def start(self, seq_id: int, request: Request, outputs: Ids) -> None:
        assert seq_id not in self.open
        self.open[seq_id] = request, outputs
        if not self.hold:
            self.finish(seq_id)

    def make_ready(self, seq_id: int, grammar: Grammar) -> None:
        assert seq_id not in self.open
        self.open[seq_id] = grammar
        if not self.hold:
            self.finish(seq_id)

    def finish(self, seq_id: int) -> None:
        """Finish what the sequence waits for, or let it fail."""
        try:
            wanted = self.open[seq_id]
            if isinstance(wanted, tuple):
                request, outputs = wanted
                self._made[seq_id] = behind(self._grammar(request), outputs)
            else:
                wanted.make_ready()
                self._made[seq_id] = wanted
        except Exception as error:
            self.post(Prepared(seq_id, finish_of(error)))
        else:
            self.post(Prepared(seq_id))

    def _grammar(self, request: Request) -> Grammar:
        made = self._make(request)
        automaton = made if hasattr(made, "make_ready") else Ready(made)
        return self._wrap(automaton, self.vocab_size)

    def take(self, seq_id: int) -> Grammar | None:
        del self.open[seq_id]
        return self._made.pop(seq_id)

    def cancel(self, seq_id: int) -> None:
        del self.open[seq_id]
        self._made.pop(seq_id, None)
        self.cancelled.append(seq_id)


def nothing_to_prepare() -> ScriptedPreparer:
    """A preparer for tests in which every request joins the queue at once."""

    def make(request: Request) -> Grammar:
        raise AssertionError("nobody needs a grammar")

    return ScriptedPreparer(make, needs=lambda request: False)
