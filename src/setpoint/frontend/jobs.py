"""A client's request while it runs: token events in, text and token counts out. A Job is one HTTP
request, a SequenceOutput one of its sequences. They add the text work to the engine's events: stop
strings, trimming, counts, timings. They know nothing of JSON or routes.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from setpoint.core.constraint import INVALID_TOOL, compile_refusal
from setpoint.core.errors import RequestError, SetpointError
from setpoint.core.failures import log_failure
from setpoint.core.logprobs import KeptLogprobs, LogprobBlock
from setpoint.core.messages import Finish, TokenEvent
from setpoint.core.request import Request
from setpoint.core.sampling import SamplingParams
from setpoint.frontend.arrival import Arrival, arrival
from setpoint.frontend.telemetry.latencies import Latencies
from setpoint.frontend.telemetry.measured_sequence import MeasuredSequence
from setpoint.frontend.telemetry.metrics.requests import RequestMetrics, SequenceMeter
from setpoint.frontend.text.detokenizer import make_detokenizer
from setpoint.frontend.text.stops import StopFinder
from setpoint.frontend.text.tokenizer import Tokenizer
from setpoint.ipc.client import EngineClient
from setpoint.ipc.mailbox import Events, Mailbox

MOST_EVENTS = 8
"""Most events of a sequence that wait for the reader one by one. With logprobs each is a dozen
objects, and a full garbage collection looks at all that wait, of all streams."""


class ClientGoneError(SetpointError):
    """The client has closed its connection, so the answer would not be read."""


class SequenceOutput(MeasuredSequence):
    """The output of one sequence so far, as its client may see it; fed by the Job."""

    def __init__(
        self,
        request: Request,
        index: int,
        tokenizer: Tokenizer | None,
        *,
        came: Arrival | None = None,
    ) -> None:
        """tokenizer: None: the sequence has no text, and no stop strings. came: the arrival of the
        client's request; None: now."""
        came = came or Arrival()
        super().__init__(request, arrived_at=came.at, headers=came.headers, path=came.path)
        sampling = request.sampling
        self.index = index
        self.logprobs = KeptLogprobs()
        """The logprobs of ``output_ids``, if asked for."""
        self.prompt_logprobs: LogprobBlock | None = None
        self.dp_rank: int | None = None
        """The rank of the engine that computes it; None before one does. Written by the Job."""
        self.hidden_states: list[bytes] = []
        """Hidden states in the form of TokenEvent, if asked for; with ``output_hidden_states`` only
        that of the last output token."""
        self.token_facts: dict[str, list[bytes]] = {}
        """Name -> the numbers about each of ``output_ids``, in the form of TokenEvent."""
        self.marks: set[int] = set()
        """The indices in ``text`` where the text of an added token begins."""
        self.embedding = b""
        """The vector of a pooled request, in the form of TokenEvent."""
        self.meter: SequenceMeter | None = None
        """Counts the sequence, if anything does; written by the Job, like the next one."""
        self.latencies: Latencies | None = None
        """Takes the times of its tokens."""
        self._last_token_at = 0.0
        self._detokenizer = make_detokenizer(
            tokenizer, skip_special_tokens=sampling.skip_special_tokens
        )
        self._tokenizer = tokenizer
        self._finder = _stop_finder(sampling, tokenizer)
        if request.prior_output_ids:
            prior = request.prior_outputs().tolist()
            self.feed(TokenEvent(0, prior, num_outputs=len(prior)))
            self.first_token_at = None  # nobody has got any of them from here

    @property
    def num_numbers(self) -> int:
        """How many logprobs and numbers of hidden states were received."""
        return (
            self.logprobs.num_numbers
            + self.num_prompt_numbers
            + sum(map(len, self.hidden_states)) // 4
        )

    @property
    def num_prompt_numbers(self) -> int:
        """How many logprobs of the prompt were received."""
        return 0 if self.prompt_logprobs is None else _size(self.prompt_logprobs)

    def feed(self, event: TokenEvent) -> Piece:
        """Add an event. A stop string in its text ends the sequence at the token that completed
        it."""
        num_kept, text = self._decode(event)
        if num_kept:
            self._time(num_kept, time.perf_counter())
        if event.finish is not None and not self._stopped:
            text += self._flush()
        dropped = len(event.ids) - num_kept
        self.num_prompt = event.num_prompt or self.num_prompt
        self.num_outputs = event.num_outputs - dropped
        self.num_cached = event.num_cached
        self.num_loaded, self.num_from_host = event.num_loaded, event.num_from_host
        self.num_retractions = event.num_retractions
        self.timing = event.timing or self.timing
        self.prompt_logprobs = event.prompt_logprobs or self.prompt_logprobs
        self.embedding = event.embedding
        if event.hidden_states and self.request.options.hidden_states:
            self.hidden_states.append(event.hidden_states)
        elif event.hidden_states and num_kept:
            # One for each id; only the last is ever shown.
            size = len(event.hidden_states) // len(event.ids)
            self.hidden_states = [event.hidden_states[(num_kept - 1) * size : num_kept * size]]
        self.output_ids += event.ids[:num_kept]
        for name, facts in event.token_facts.items():
            self.token_facts.setdefault(name, []).extend(facts[:num_kept])
        if event.output_logprobs is not None:
            self.logprobs.add(event.output_logprobs, num_kept)
        if text:
            self._texts.append(text)
        self.finish = (
            Finish("stop", matched=self._finder.matched)
            if self._finder is not None and self._stopped
            else event.finish
        )
        if self.finish is not None:
            self.finished_at = time.perf_counter()
        return Piece(self, text, num_kept)

    def _time(self, num_tokens: int, now: float) -> None:
        latencies = self.latencies
        if self.first_token_at is None:
            self.first_token_at = now
            if latencies is not None:
                latencies.first(now - self.arrived_at, now)
        elif latencies is not None:
            latencies.between((now - self._last_token_at) / num_tokens, num_tokens, now)
        self._last_token_at = now
        if self.meter is not None:
            self.meter.tokens(num_tokens, now)

    @property
    def _stopped(self) -> bool:
        return self._finder is not None and self._finder.matched is not None

    def _decode(self, event: TokenEvent) -> tuple[int, str]:
        """How many ids of the event belong to the sequence, and the part of their text to show."""
        finish, num_shown = event.finish, len(event.ids)
        if (
            finish is not None
            and isinstance(finish.matched, int)
            and event.ids
            and not self.request.sampling.no_stop_trim
        ):
            num_shown -= 1  # the stop token itself is counted but not shown
        if self._finder is None:
            return len(event.ids), self._shown(event.ids[:num_shown])
        text = ""
        for position, token_id in enumerate(event.ids):
            is_shown = position < num_shown
            text += self._search(self._finder, token_id, shown=is_shown, num_before=len(text))
            if self._stopped:
                return position + 1, text
        return len(event.ids), text

    def _shown(self, ids: Sequence[int]) -> str:
        """The text of more tokens that becomes final, without a search for stop strings."""
        tokenizer = self._tokenizer
        if tokenizer is None or tokenizer.added_tokens.keys().isdisjoint(ids):
            return self._detokenizer.feed(ids)
        text = ""
        for token_id in ids:
            text += self._detokenizer.feed((token_id,))
            if token_id in tokenizer.added_tokens:
                self._mark(token_id, len(text))
        return text

    def _mark(self, token_id: int, num_new: int) -> None:
        """Remember where the text of the last token begins, which is an added one. num_new: how
        many characters come before its end, but are not yet in ``text``."""
        assert self._tokenizer is not None, "its tokens are known"
        if not (
            self.request.sampling.skip_special_tokens and token_id in self._tokenizer.special_ids
        ):
            length = len(self._tokenizer.added_tokens[token_id])
            self.marks.add(len(self.text) + num_new - length)

    def _search(self, finder: StopFinder, token_id: int, *, shown: bool, num_before: int) -> str:
        """Look for stop strings in the text with one more token, special or not; returns the shown
        text that becomes final. num_before: the length of the text from earlier tokens of the same
        event."""
        tokenizer = self._tokenizer
        assert tokenizer is not None, "stop strings are refused without one"
        if self.request.sampling.skip_special_tokens and token_id in tokenizer.special_ids:
            return finder.feed(tokenizer.token_text(token_id), hidden=True)
        if shown:
            released = finder.feed(self._detokenizer.feed((token_id,)))
            if token_id in tokenizer.added_tokens:
                self._mark(token_id, num_before + len(released) + finder.num_held)
            return released
        before = finder.feed(
            self._detokenizer.flush()
        )  # half a character belongs to the shown text, not to the stop token
        if finder.matched is not None:
            return before
        return before + finder.feed(
            self._detokenizer.feed((token_id,)) + self._detokenizer.flush(), hidden=True
        )

    def _flush(self) -> str:
        tail = self._detokenizer.flush()
        if self._finder is None:
            return tail
        text = self._finder.feed(tail)
        return text if self._stopped else text + self._finder.flush()


@dataclass(slots=True)
class Piece:
    """The last part of a sequence's output: what one event added, or several in a row."""

    output: SequenceOutput
    text: str
    num_ids: int

    @property
    def ids(self) -> list[int]:
        return self.output.output_ids[len(self.output.output_ids) - self.num_ids :]

    @property
    def num_numbers(self) -> int:
        """How many logprobs it has."""
        kept = self.output.logprobs
        return kept.num_numbers // len(kept) * self.num_ids if kept else 0

    @property
    def logprobs(self) -> LogprobBlock | None:
        """The logprobs of its ids; None if there are no ids, or they were not asked for."""
        kept = self.output.logprobs
        return kept.block(len(kept) - self.num_ids) if kept and self.num_ids else None

    def add(self, later: Piece) -> None:
        """Make this piece cover the next one, too."""
        self.text += later.text
        self.num_ids += later.num_ids


class Job:
    """The sequences of one client request, submitted together. A context manager whose exit ends
    those that still run."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer | None,
        requests: Sequence[Request],
        *,
        on_finish: Callable[[SequenceOutput], None],
        on_start: Callable[[Job], None] = lambda job: None,
        metrics: RequestMetrics | None = None,
        latencies: Latencies | None = None,
        tool_schema: str = "",
    ) -> None:
        """on_start: called once all sequences are submitted. metrics: counts the sequences, if
        given. latencies: takes the times of their tokens. tool_schema: what the client calls the
        schema of a tool, if the constraint is made of such schemas."""
        self._client = client
        self._mailbox = Mailbox(most_events=MOST_EVENTS * len(requests))
        self._mailbox.on_admitted = self._admitted
        self._on_finish = on_finish
        self._on_start = on_start
        self._metrics = metrics
        self._latencies = latencies
        self._tool_schema = tool_schema
        self._came = came = arrival()
        self._open: dict[int, int] = {}
        """Index -> number of the submission, for sequences that have not ended."""
        self._is_cancelled = False
        self.before_wait: Callable[[], Awaitable[None]] = _nothing
        """The reader of ``pieces`` awaits this before each wait for the engine. Code that gathers
        chunks sends them then, so that none stays behind while nothing comes."""
        self.not_before: float | None = None
        """Makes ``pieces`` wait until this time of the event loop, and no longer, unless a sequence
        ends: there may be no piece then. None: until there is an event. Written by the reader of
        the pieces."""
        self._absorbed: dict[int, Piece] = {}
        """Index of a sequence -> the piece of events that could not wait for the reader."""
        self.outputs = [
            SequenceOutput(request, index, tokenizer, came=came)
            for index, request in enumerate(requests)
        ]
        came.outputs += self.outputs

    def __enter__(self) -> Job:
        """Submit the sequences. Raises RequestError or EngineDeadError; none of them runs then."""
        metrics = self._metrics
        labels = {} if metrics is None else metrics.labels_in(self._came.headers)
        try:
            for output in self.outputs:
                seq_id = self._client.submit(output.request, self._mailbox, output.index)
                self._open[output.index] = output.seq_id = seq_id
                output.submitted_at = time.perf_counter()
                output.latencies = self._latencies
                if metrics is not None:
                    output.meter = metrics.meter(output.request, self._came.at, labels)
        except SetpointError:
            self._stop()
            raise
        self._on_start(self)
        return self

    def _admitted(self) -> None:
        now = time.perf_counter()
        for output in self.outputs:
            output.held_s = now - (output.submitted_at or now)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def cancel(self) -> None:
        """End every sequence because the client went away; a reader that waits for more gets
        ClientGoneError."""
        self._stop()
        self._absorbed.clear()
        self._is_cancelled = True
        self._mailbox.fail(ClientGoneError())

    def abort(self) -> None:
        """Ask the engine to end every sequence: their reader gets what they have, and that they
        were aborted."""
        self._client.abort_submissions(self._open.values())

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """The pieces that each wake-up brought, until all sequences are finished; at most one piece
        of each sequence at a time.

        An output shows only its present state (counts, end, latest ids). So if several events of a
        sequence arrive together, the reader must finish with the first before the next is fed. The
        events of a reader that is far behind become one piece.

        Raises RequestError when a sequence was aborted with an HTTP status, EngineDeadError,
        ClientGoneError.
        """
        while self._open or self._absorbed:
            pieces: dict[int, Piece] = {}
            events = await self._events()
            if self._absorbed:
                absorbed, self._absorbed = self._absorbed, {}
                yield list(absorbed.values())
            while events:
                index, event = events.popleft()
                output = self.outputs[index]
                if index in pieces:
                    yield list(pieces.values())
                    pieces = {}
                if index not in self._open:
                    continue  # ended by a stop string or cancelled; a late event
                output.dp_rank = self._mailbox.ranks.get(index)
                pieces[index] = _fed(output, event)
                if output.finish is not None:
                    self._end(output)
                    self._raise_abort(output.finish)
            if pieces or self.not_before is not None:
                yield list(pieces.values())
        if self._is_cancelled:
            raise ClientGoneError

    async def _events(self) -> Events:
        """Wait for the next events. Meanwhile nothing reads the outputs, so those that come may be
        absorbed."""
        mailbox = self._mailbox
        mailbox.on_full = self._absorb
        try:
            await self.before_wait()
            if self.not_before is not None:
                return await mailbox.take(self.not_before)
        finally:
            mailbox.on_full = None
        return mailbox.arrived() if self._absorbed else await mailbox.take()

    def _absorb(self, index: int, event: TokenEvent) -> bool:
        """Take an event in while the reader of the pieces waits for its client: each sequence gets
        one piece of them. Returns whether it did: it leaves an event that ends the request with an
        error."""
        if _is_refusal(event.finish):
            return False
        if index not in self._open:
            return True
        output = self.outputs[index]
        output.dp_rank = self._mailbox.ranks.get(index)
        try:
            piece = _fed(output, event)
        except RequestError as error:
            self._mailbox.arrived()
            self._mailbox.fail(error)
            return True
        if index in self._absorbed:
            self._absorbed[index].add(piece)
        else:
            self._absorbed[index] = piece
        if output.finish is not None:
            self._end(output)
        return True

    async def wait(self) -> list[SequenceOutput]:
        """Run to the end. Raises like ``pieces``."""
        async for _ in self.pieces():
            pass
        return self.outputs

    def _raise_abort(self, finish: Finish) -> None:
        if finish.type != "abort" or finish.status_code is None:
            return
        message, refusal = (
            finish.message or "The request was aborted.",
            compile_refusal("structural_tag"),
        )
        if self._tool_schema and message.startswith(refusal):
            why = message.removeprefix(refusal)
            message = f"{INVALID_TOOL}'{self._tool_schema}' schema: {why}"
        raise RequestError(
            message,
            status_code=finish.status_code,
        )

    def _stop(self) -> None:
        for index in sorted(self._open):
            self._end(self.outputs[index])

    def _end(self, output: SequenceOutput) -> None:
        self._client.stop(self._open.pop(output.index))
        if output.meter is not None:
            output.meter.ended(output)
        self._on_finish(output)


async def _nothing() -> None: ...


def _is_refusal(finish: Finish | None) -> bool:
    return finish is not None and finish.type == "abort" and finish.status_code is not None


def _stop_finder(sampling: SamplingParams, tokenizer: Tokenizer | None) -> StopFinder | None:
    """What finds the stop strings of a sequence; None if it has none."""
    if tokenizer is None or not sampling.has_text_stops:
        return None
    return StopFinder(sampling.stop, regexes=sampling.stop_regex, keep=sampling.no_stop_trim)


def _fed(output: SequenceOutput, event: TokenEvent) -> Piece:
    """Feed an event. Raises RequestError (500) if the text work raises, which ends only this
    client's request."""
    try:
        return output.feed(event)
    except Exception as error:
        raise RequestError(log_failure("making its text", error), status_code=500) from error


def _size(block: LogprobBlock) -> int:
    return len(block.values) * (
        1 + sum(len(rows[0]) for rows in (block.top_values, block.picked) if rows)
    )
