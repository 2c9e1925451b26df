"""What one server wrote into a log: its lives, one after the other."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter

from setpoint.doctor.observations import Event, Evidence
from setpoint.doctor.readers.log import startup
from setpoint.doctor.readers.log.messages import Happened, Message, event_in
from setpoint.doctor.readers.log.server_args import begin_of_options, without_secrets
from setpoint.doctor.readers.log.server_run import ServerRun
from setpoint.doctor.readers.log.table import MAX_RANKS, BatchTable, concatenate, retractions
from setpoint.doctor.readers.log.trace import Options, Traceback

_line_of = itemgetter(0)

MAX_LIVES = 64
"""Most starts of one server that are kept."""
SHOWN = 400
"""Most characters of a line that evidence shows."""
_TOLD = {
    b"even after retracting": "decode",
    b"Prefill out of memory": "prefill",
    b"Decode out of memory": "decode",
    b"profiled value -": "init",
    b"negative dimension": "init",
}
"""Messages that name the step, wherever the source begins."""
_OF_THE_POOL = (b"even after retracting", b"Try to lower your batch size", b"runs out of memory")
"""Messages about the KV pool, for which no memory of the device was requested."""
_WORKSPACE = re.compile(rb"allocate memory for batch_(prefill|decode)_\w+ .*AlignedAllocator")
"""FlashInfer's workspace is full, a buffer of a fixed size, and not the device's memory."""
_ENGINE_DIED = re.compile(r"^(?:ERROR: )?Engine \d+(?: of model \S+)? died: ")
_SEVERAL = re.compile(r"([1-9]\d?) models are served, of which at most ")
_JUST_BEFORE = 3
"""Lines between a traceback and the message that belongs to it."""


def visible_text(line: bytes) -> str:
    text = without_secrets(line[: 8 * SHOWN].decode(errors="replace").strip())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


class ServerLog:
    """Takes a block after the other: first ``begin``, then each message in order, then ``end``."""

    def __init__(self, line: int) -> None:
        self.lives = [ServerRun(line)]
        self.num_left_out = 0
        """Number of lives that were dropped from ``lives``."""
        self.pools: list[float] = []
        """Sizes of the pool in tokens, as far as batch lines show them."""
        self.is_setpoint = False
        self.tests_retraction = False
        self._open: Traceback | Options | None = None
        self._last_trace: Traceback | None = None
        self._tables: dict[str, BatchTable] = {}
        self._text: Callable[[int], str] = str
        self._first = 1
        self._taken = 0
        self._events: list[tuple[str, Event]] = []
        self._retracted: dict[str, list[tuple[int, float, dict[str, float]]]] = {}
        self._order: tuple[list[int], list[bool]] | None = None

    @property
    def life(self) -> ServerRun:
        return self.lives[-1]

    @property
    def is_open(self) -> bool:
        """Whether the next lines may belong to a record that has begun."""
        return self._open is not None

    def begin(
        self, tables: Mapping[str, BatchTable], text: Callable[[int], str], first: int
    ) -> None:
        """Begin a block. tables: its batch lines by rank; text: gives the text of one of its lines;
        first: the number of its first line."""
        room = MAX_RANKS - len(self.life.ranks)
        known = {name: table for name, table in tables.items() if name in self.life.ranks}
        new = [(name, table) for name, table in tables.items() if name not in known]
        self._tables = known | dict(new[: max(room, 0)])
        self._text, self._first, self._taken = text, first, 0
        self._order = None

    def end(self, num_lines: int) -> None:
        self._take(num_lines)
        self._tables = {}

    def message(self, number: int, line: bytes, message: Message, has_word: bool) -> None:
        """Take a message. number: that of the line within the block; has_word: whether it contains
        one of the keywords."""
        text = message.text
        if self._open is not None and self._continues(number, line, message, has_word):
            return
        if not has_word:
            return
        words = text.decode(errors="replace")
        begin = begin_of_options(words)
        if begin is not None:
            self._start(number)
            self._open = record = Options(self._first + number, visible_text(line))
            record.add(words[begin:])
            if record.ended:
                self._options(record)
            return
        life = self.life
        self._learn(number, line, message, words)
        event = event_in(text)
        if event is None:
            if "Shutting down" in words or "SIGTERM" in words:
                life.ended = True
            return
        if event.kind == "traceback" and b"Traceback (most recent" in text:
            self._open = Traceback(self._first + number, event.values)
        self._event(number, line, message, event)

    def _continues(self, number: int, line: bytes, message: Message, has_word: bool) -> bool:
        record = self._open
        assert record is not None
        taken = record.takes(message)
        if isinstance(record, Traceback):
            event = event_in(message.text) if taken and has_word else None
            if event is not None and b"Traceback (most recent" not in message.text:
                self._event(number, line, message, event)
        if record.ended:
            self._open = None
            if isinstance(record, Traceback):
                self._last_trace = record
            if isinstance(record, Options):
                self._options(record)
        return taken

    def _options(self, record: Options) -> None:
        self._open = None
        said = Evidence(record.line, record.first)
        startup.learn_options(self.life.facts, record.text, said)
        self.life.has_options = True

    def _start(self, number: int) -> None:
        """Begin a life, because a server logs its options, unless nothing has happened since the
        last such line."""
        self._take(number)
        if self.life.has_begun or self.life.has_options:
            self._begin_life(number)
        else:
            self.life.first_line = self._first + number

    def _begin_life(self, number: int) -> ServerRun:
        if len(self.lives) == MAX_LIVES:  # a log that only starts servers: the first and the last
            del self.lives[1]
            self.num_left_out += 1
        self.lives.append(ServerRun(self._first + number))
        return self.life

    def _join_models(self, num_models: int) -> None:
        """Make one life of the latest ones, which seemed to begin when each of the server's models
        logged its options."""
        starts = self.lives[-num_models:]
        if len(starts) < num_models or any(life.num_batches for life in starts[:-1]):
            return
        names = (life.facts.options.get("served_model_name") for life in starts)
        self.life.models = tuple(str(name) for name in names)
        self.life.first_line = starts[0].first_line
        del self.lives[-num_models:-1]

    def _learn(self, number: int, line: bytes, message: Message, words: str) -> None:
        life = self.life
        if "Load weight begin" in words and life.has_begun and not life.has_options:
            self._take(number)
            life = self._begin_life(number)
        said = Evidence(self._first + number, visible_text(line))
        if _ENGINE_DIED.search(words):
            life.engine_deaths.append(self._first + number)
        if "Decision: " in words or words.startswith("Model: "):
            self.is_setpoint = True
        startup.learn(life.facts, words, said)
        if several := _SEVERAL.match(words):
            self._join_models(int(several[1]))
        if startup.is_ready_line(words):
            life.is_ready = True
            life.ready_line = min(life.ready_line, self._first + number)

    def _event(self, number: int, line: bytes, message: Message, event: Happened) -> None:
        life = self.life
        if event.kind == "ready":
            life.is_ready = True
        elif event.kind == "oom":
            self._locate(number, message.text, event)
        elif event.kind == "retraction":
            if event.values.get("testing"):
                self.tests_retraction = True
                return
            figures = {name: float(value) for name, value in event.values.items()}
            at = float("nan") if message.at is None else message.at
            self._retracted.setdefault(message.rank, []).append((number, at, figures))
        if event.kind in ("killed", "watchdog") or b"no room for one page" in message.text:
            life.ended = True
        found = Event(
            event.kind, message.at, self._first + number, visible_text(line), event.values
        )
        self._events.append((message.rank, found))

    def _locate(self, number: int, text: bytes, event: Happened) -> None:
        """Set where an allocation failed ("where": init, prefill, decode, or unknown), and what
        shows it ("by": the message, the traceback, or only the order of the lines)."""
        trace = self._trace_at(number)
        doing = [] if trace is None else list(trace.doing)
        if b"increase --mem-fraction-static" in text or b"no room for one page" in text:
            doing.append("pool")
        if b"profiled value -" in text or b"negative dimension" in text:
            doing.append("pool")
        if b"apture" in text and b"graph" in text:
            doing.append("graphs")
        serves = trace is not None and trace.serves
        started = self.life.is_ready or self._kind_before(number) != "" or serves
        told = next((where for words, where in _TOLD.items() if words in text), None)
        if workspace := _WORKSPACE.search(text):
            event.values["workspace"] = 1.0
            told = workspace[1].decode() if started else None
        step = "" if trace is None else trace.step
        if told is not None:
            where, by = told, "message"
        elif not started:
            where, by = "init", "message" if doing else "order"
        elif step:
            where, by = step, "traceback"
        else:
            # The first batch after a start is a prefill.
            where, by = self._kind_before(number) or "prefill", "order"
        event.values |= {"where": where, "by": by}
        if any(words in text for words in _OF_THE_POOL):
            event.values["pool"] = 1.0
        if doing:
            event.values["doing"] = "graphs" if "graphs" in doing and where == "init" else doing[-1]

    def _trace_at(self, number: int) -> Traceback | None:
        """The traceback that a line is part of, or that ended just before it."""
        if isinstance(self._open, Traceback):
            return self._open
        trace, self._last_trace = self._last_trace, None
        if trace is None or self._first + number - trace.line - trace.num_lines > _JUST_BEFORE:
            return None
        return trace

    def _kind_before(self, number: int) -> str:
        if self._order is None:
            self._order = _order(self._tables.values())
        lines, prefills = self._order
        index = bisect_left(lines, number)
        if index and lines[index - 1] >= self._taken:
            return "prefill" if prefills[index - 1] else "decode"
        return self.life.last_kind

    def _take(self, end: int) -> None:
        """Give the present life the lines before ``end`` that it does not have yet."""
        life = self.life
        kind = self._kind_before(end)
        times: list[tuple[int, float]] = []
        for name, table in self._with_retractions().items():
            part = table.part(self._taken, end)
            if len(part):
                rank = life.rank(name)
                at = rank.take(part, self._text, self._first, interval=life.interval)
                times += zip(part.line, at, strict=True)
                if life.has_options:
                    life.num_before_ready += bisect_left(part.line, life.ready_line - self._first)
                self._pool_sizes(part)
        life.last_kind = kind
        if self._events:
            self._date_events(times)
        self._taken = max(self._taken, end)
        self._retracted = {}

    def _with_retractions(self) -> dict[str, BatchTable]:
        tables = dict(self._tables)
        for name, rows in self._retracted.items():
            extra = retractions(rows)
            tables[name] = concatenate([tables[name], extra]) if name in tables else extra
        return tables

    def _pool_sizes(self, part: BatchTable) -> None:
        usage, tokens = part.columns.get("usage"), part.columns.get("tokens")
        if usage is None or tokens is None or len(self.pools) > 200_000:
            return
        sizes = [
            held / share
            for held, share in zip(tokens, usage, strict=True)
            if share >= 0.2 and held > 0
        ]
        self.pools += sizes[:: max(len(part) // 500, 1)]

    def _date_events(self, times: list[tuple[int, float]]) -> None:
        """Give events without a timestamp the time of the batch line before them."""
        times.sort(key=_line_of)
        for name, event in self._events:
            index = bisect_right(times, event.line - self._first, key=_line_of)
            before = times[index - 1][1] if index else self.life.last_at
            if event.at is None:
                event.at = before
            elif before is not None:
                event.at = max(event.at + self.life.shift, before)
            self.life.rank(name).happened(event)
        self._events = []


def _order(tables: Iterable[BatchTable]) -> tuple[list[int], list[bool]]:
    """The numbers of all batch lines in order, and whether each is about a prefill."""
    found = [
        (line, is_prefill == 1)
        for table in tables
        for line, is_prefill in zip(table.line, table.columns["is_prefill"], strict=True)
    ]
    found.sort(key=_line_of)
    return [line for line, _ in found], [is_prefill for _, is_prefill in found]
