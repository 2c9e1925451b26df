"""An executor without a model: it runs plans on a fake KV store, and its tokens are a function of
what the store contains.

Because the answer is computed from the *store*, read through the page table, a scheduling or
caching fault (a page reused too early, a prefix matched wrongly, a row skipped) changes the tokens,
and a comparison with :func:`reference` finds it. For groups with a window the store keeps a checksum
of the whole prefix, on which keys and values depend; what a row reads there is compared with what it
should read.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from itertools import chain, islice

import numpy as np

from setpoint.core.failures import log_failure
from setpoint.core.pagerows import PageRow
from setpoint.core.plan import OWN_LENGTH, Admit, StepPlan, TokenMasks
from setpoint.core.request import Ids
from setpoint.core.result import Floats, HiddenStates, PositionLogprobs, StepResult

NextToken = Callable[[Ids], int]
"""History (prompt and outputs so far) -> next token."""

NumTokens = Callable[[int], int]
"""The most tokens that a row may yield -> how many this one yields."""

EMPTY = -1
WRONG = -2
"""The mark of a guessed token in the store until it is confirmed: no row may read it."""


def hashed_token(vocab_size: int) -> NextToken:
    """A function whose next token depends on every token of the history."""
    return lambda history: zlib.crc32(history.astype("<i4").tobytes()) % vocab_size


def reference(
    prompt: Ids, num_new: int, next_token: NextToken, stop_ids: frozenset[int] = frozenset()
) -> list[int]:
    """The tokens that a sequence must produce, whatever the scheduler does."""
    history = list(prompt)
    outputs: list[int] = []
    while len(outputs) < num_new:
        outputs.append(next_token(np.array(history + outputs, np.int32)))
        if outputs[-1] in stop_ids:
            break
    return outputs


class ScriptedStep:
    """A submitted plan: the forward pass is done, sampling waits for ``finish``, the ids for
    ``result``."""

    def __init__(
        self,
        executor: ScriptedExecutor,
        plan: StepPlan,
        histories: list[tuple[int, Ids, int, list[int]]],
        embeddings: dict[int, Floats],
        hidden_states: dict[int, HiddenStates],
        failures: dict[int, str],
    ) -> None:
        self._embeddings = embeddings
        self._hidden_states = hidden_states
        self._failures = failures
        self._executor = executor
        self._plan = plan
        self._histories = histories
        """For each sampling row: its slot, the tokens so far, how many it may sample, and its forced
        tokens."""
        self._tokens: list[list[int]] | None = None
        self.masks: TokenMasks | None = None

    def finish(self, masks: TokenMasks | None) -> None:
        assert self._tokens is None, "finish() twice"
        self.masks = masks
        allowed = {} if masks is None else dict(zip(masks.slots.tolist(), masks.words, strict=True))
        self._tokens = []
        for slot, history, most, forced in self._histories:
            assert slot not in allowed or most == 1, "one mask for several positions"
            tokens: list[int] = []
            for _ in range(most if slot in allowed else self._executor.num_tokens(most)):
                token = self._next_token(slot, np.append(history, tokens).astype(np.int32))
                if slot in allowed:
                    bits = np.unpackbits(allowed[slot].view(np.uint8), bitorder="little")
                    token = int(np.flatnonzero(bits)[token % int(bits.sum())])
                tokens.append(token)
            self._executor.append(slot, tokens)
            self._tokens.append(forced + tokens)

    def _next_token(self, slot: int, history: Ids) -> int:
        try:
            return self._executor.sample(slot, history)
        except Exception as error:
            rows = self._plan.rows
            (seq_id,) = rows.seq_ids[rows.slots == slot].tolist()
            self._failures[seq_id] = log_failure("sampling", error)
            return 0

    def result(self) -> StepResult:
        assert self._tokens is not None, "result() before finish()"
        rows = self._plan.rows
        seq_ids = rows.seq_ids[rows.sampling]
        return StepResult(
            self._plan.step_id,
            seq_ids,
            np.array(list(chain(*self._tokens)), np.int32),
            np.cumsum([0, *map(len, self._tokens)], dtype=np.int32),
            output_logprobs={
                seq_id: _logprobs(tokens)
                for seq_id, (slot, *_), tokens in zip(
                    seq_ids.tolist(), self._histories, self._tokens, strict=True
                )
                if slot in self._executor.with_logprobs
            },
            embeddings=self._embeddings,
            hidden_states=self._hidden_states,
            failures=self._failures,
        )


def _logprobs(tokens: list[int]) -> PositionLogprobs:
    """Made-up logprobs: that of a token is its negative id."""
    none = np.zeros((len(tokens), 0), np.float32)
    ids = np.array(tokens, np.int32)
    return PositionLogprobs(-ids.astype(np.float32), ids, none, none.astype(np.int32), none)


class ScriptedExecutor:
    """Implements core.executor.Executor, and keeps every plan in ``plans``. The slots and the page
    table grow with the plans."""

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        next_token: NextToken,
        num_tokens: NumTokens = lambda most: most,
        row: PageRow | None = None,
    ) -> None:
        self._row = row or PageRow()
        self.next_token = next_token
        self.num_tokens = num_tokens
        self.with_logprobs: set[int] = set()
        """Slots admitted with return_logprob."""
        self.look_at: Callable[[Admit], None] = lambda admit: None
        """Called with every admission. If it raises, that sequence fails, as it does if
        ``next_token`` raises."""
        self.plans: list[StepPlan] = []
        self._page_size = page_size
        self.store = np.full((num_pages + 1) * page_size, EMPTY, np.int64)
        self._ids: dict[int, list[int]] = {}
        self._table: dict[int, dict[int, list[int]]] = {}
        """Slot -> index -> page row."""
        self._sums: dict[int, list[int]] = {}
        self.with_hidden_states: set[int] = set()
        """Slots whose hidden states are wanted. The hidden state of a token is (its position, the
        token)."""
        self._pooled: dict[int, tuple[Admit, list[int]]] = {}
        """Slot -> its admission with pooling, and the tokens that its rows have computed."""

    def submit(self, plan: StepPlan) -> ScriptedStep:
        self.plans.append(plan)
        for slot in plan.releases:
            self._ids.pop(slot, None)
            self._table.pop(slot, None)
        failures: dict[int, str] = {}
        for admit in plan.admits:
            self._admit(admit)
            try:
                self.look_at(admit)
            except Exception as error:
                failures[admit.seq_id] = log_failure("admission", error)
        deltas = plan.pages
        for slot, index, pages in zip(
            deltas.slots.tolist(), deltas.indices.tolist(), deltas.pages.tolist(), strict=True
        ):
            assert all(pages[: self._row.num_full]), "the dummy page was handed out"
            self._table[slot][index] = pages
        rows = plan.rows
        forced = self._append_forced(plan)
        spans = [
            self._span(*row)
            for row in zip(
                rows.slots.tolist(), rows.starts.tolist(), rows.counts.tolist(), strict=True
            )
        ]
        assert len({slot for slot, _, _ in spans}) == len(spans), "a slot has two rows in one step"
        num_samples = (rows.samples - rows.num_forced).tolist()
        for (slot, start, end), most in zip(spans, num_samples, strict=True):
            self._write(slot, start, end, most - 1)  # every row writes before any row reads
        histories = []
        embeddings = {}
        hidden_states = {
            seq_id: HiddenStates(start, self._hidden_states(slot, start, end))
            for (slot, start, end), seq_id in zip(spans, rows.seq_ids.tolist(), strict=True)
            if slot in self.with_hidden_states
        }
        for (slot, start, end), most, given in zip(spans, num_samples, forced, strict=True):
            history = self._read(slot, start, end)
            if slot in self._pooled:
                try:
                    embeddings.update(self._pool(slot, start, end, history))
                except Exception as error:
                    failures[self._pooled[slot][0].seq_id] = log_failure("pooling", error)
            if most:
                assert end == len(self._ids[slot]), "a row samples before its last known token"
                histories.append((slot, history, most, given))
        return ScriptedStep(self, plan, histories, embeddings, hidden_states, failures)

    def idle(self) -> bool:
        return False

    def shutdown(self) -> None:
        """Do nothing: there is nothing to free."""

    def _append_forced(self, plan: StepPlan) -> list[list[int]]:
        """Append the forced tokens of each row to its slot; returns them by row."""
        ids, found = iter(plan.forced_ids.tolist()), []
        for slot, count in zip(
            plan.rows.slots.tolist(), plan.rows.num_forced.tolist(), strict=True
        ):
            found.append(list(islice(ids, count)))
            self._ids[slot] += found[-1]
        assert next(ids, None) is None, "forced tokens of no row"
        return found

    def sample(self, slot: int, history: Ids) -> int:
        """The next token of the slot's sequence."""
        return self.next_token(history)

    def append(self, slot: int, tokens: list[int]) -> None:
        """Append the tokens that the slot's row yields: all but the last were computed as
        guesses."""
        length = len(self._ids[slot])
        self._ids[slot] += tokens
        if len(tokens) > 1:
            self._write(slot, length, length + len(tokens) - 1, 0)

    def _admit(self, admit: Admit) -> None:
        self._ids[admit.slot] = admit.ids.tolist()
        self._table[admit.slot] = {}
        self.with_logprobs.discard(admit.slot)
        if admit.options.logprobs is not None:
            self.with_logprobs.add(admit.slot)
        self.with_hidden_states.discard(admit.slot)
        if admit.options.wants_hidden_states:
            self.with_hidden_states.add(admit.slot)
        self._sums[admit.slot] = []
        self._pooled.pop(admit.slot, None)
        if admit.options.pooling is not None:
            self._pooled[admit.slot] = admit, []

    def _hidden_states(self, slot: int, start: int, end: int) -> Floats:
        pairs = enumerate(self._ids[slot][start:end], start)
        return np.array(list(pairs), np.float32).reshape(end - start, 2)

    def _pool(self, slot: int, start: int, end: int, history: Ids) -> dict[int, Floats]:
        """The made-up embedding: (length, next token) of the history, or, for a mean, of the
        computed tokens."""
        admit, computed = self._pooled[slot]
        computed += history[start:].tolist()
        if end < len(admit.ids):
            return {}
        seen = history if admit.options.pooling == "last" else np.array(computed, np.int32)
        return {admit.seq_id: np.array([len(seen), self.next_token(seen)], np.float32)}

    def _span(self, slot: int, start: int, count: int) -> tuple[int, int, int]:
        if start == OWN_LENGTH:
            start = len(self._ids[slot]) - count
        assert count >= 1, "an empty row"
        assert start + count <= len(self._ids[slot])
        return slot, start, start + count

    def _write(self, slot: int, start: int, end: int, num_guesses: int) -> None:
        """Write the tokens of a span to the store. Its last ``num_guesses`` are marked WRONG until
        they are confirmed."""
        for column in range(self._row.width):
            where = self._where(slot, column, start, end)
            assert len(where) == len(set(where))
            if column < self._row.num_full:
                self.store[where] = self._ids[slot][start:end]
            else:
                self.store[where] = self._checksums(slot, end)[start:]
            self.store[self._where(slot, column, end, end + num_guesses)] = WRONG

    def _read(self, slot: int, start: int, end: int) -> Ids:
        """The tokens that the span from ``start`` to ``end`` sees: the sequence up to ``end``."""
        history = np.array(self._ids[slot][:end], np.int32)
        for column in range(self._row.num_full):
            history = self.store[self._where(slot, column, 0, end)].astype(np.int32)
            assert EMPTY not in history, f"slot {slot} reads a position that nothing wrote"
            assert WRONG not in history, f"slot {slot} reads a guess that nothing confirmed"
        for columns in self._row.windows:
            first = self._row.first_needed(columns, start)
            expected = self._checksums(slot, end)[first:]
            for column in range(columns.begin, columns.end):
                found = self.store[self._where(slot, column, first, end)].tolist()
                assert found == expected, f"slot {slot} reads a window of another sequence"
        return history

    def _checksums(self, slot: int, end: int) -> list[int]:
        """For each position, a number that depends on every token up to it."""
        sums = self._sums[slot]
        for token in self._ids[slot][len(sums) : end]:
            last = sums[-1] if sums else 0
            sums.append(zlib.crc32(token.to_bytes(4, "little", signed=True), last))
        return sums[:end]

    def _where(self, slot: int, column: int, start: int, end: int) -> list[int]:
        size, table = self._page_size, self._table[slot]
        pages = [table[index][column] for index in range(start // size, -(-end // size))]
        assert all(pages), f"slot {slot} has no page for a position that it reads or writes"
        first = start // size
        return [
            pages[position // size - first] * size + position % size
            for position in range(start, end)
        ]
