"""Surrogates for withheld ids in the replay of a recording. Every stretch between two places of the
chain of hashes gets ids that occur nowhere else. So two sequences have equal surrogates exactly up
to the last place up to which they had equal ids. The surrogate of the token that ended a sequence
is that sequence's stop id. The recording must be read once before it is replayed, because the
hashes of an output come after its tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from setpoint.core.bounds import INT32_MAX
from setpoint.core.errors import RecordingError
from setpoint.core.request import Ids, Request, pack_ids, unpack_ids
from setpoint.core.sampling import SamplingParams
from setpoint.recording.chain import Places
from setpoint.recording.format import (
    HASH_BYTES,
    Kept,
    KeptArrival,
    KeptPlan,
    KeptRecord,
    KeptResult,
)

INVALID_ID = -1
MAX_TOKENS = 1 << 28
"""Most tokens of all requests together; each takes four bytes in a replay."""


@dataclass(slots=True)
class Outline:
    """One sequence from its arrival to the end of the recording."""

    num_ids: int
    """Number of tokens: prompt, prior outputs, and every token sampled for the sequence."""
    hashes: bytearray
    """The hashes of the sequence's places, in order."""
    end: int | None = None
    """Position of the first token that was a stop id."""
    ids: Ids = field(default_factory=lambda: np.zeros(0, np.int32))
    """The surrogates of its ids; set when the sequence arrives in the replay."""
    num_given: int = 0
    """Number of the surrogates that the replay has used so far."""
    discarded: set[int] = field(default_factory=set)
    """The steps in which the engine discarded the sequence's tokens because its grammar was
    late."""


class SurrogateIds:
    """Assigns surrogate ids: the same ids to the same prefix."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._firsts: dict[tuple[int, bytes], int] = {}
        """(First surrogate of the previous stretch, hash) -> first surrogate of the stretch."""
        self._next = 0

    def of(self, num_ids: int, hashes: bytes) -> Ids:
        """The surrogates of a sequence of this length. Those after its last place occur nowhere
        else."""
        steps = [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
        ends = self._places.ends(len(steps))
        known: list[int] = []
        before = -1
        for step in steps:
            first = self._firsts.get((before, step))
            if first is None:
                break
            known.append(first)
            before = first
        # From the first stretch that no other sequence had, nothing is shared: one fresh run.
        position = int(ends[len(known) - 1]) if known else 0
        fresh = self._fresh(num_ids - position)
        firsts = [fresh, *(ends[len(known) : -1] + (fresh - position)).tolist()]
        news = zip([before, *firsts[:-1]], steps[len(known) :], strict=False)
        self._firsts.update(zip(news, firsts, strict=False))
        shared = np.repeat(np.array(known, np.int32), np.diff(ends[: len(known)], prepend=0))
        begins = np.repeat(np.append(0, ends)[: len(known)], np.diff(ends[: len(known)], prepend=0))
        ids = np.empty(num_ids, np.int32)
        ids[:position] = shared + (np.arange(position) - begins)
        ids[position:] = np.arange(fresh, fresh + num_ids - position)
        return ids

    def _fresh(self, count: int) -> int:
        first, self._next = self._next, self._next + count
        if self._next >= INT32_MAX:
            raise RecordingError("The recording holds more tokens than there are token ids.")
        return first


def outlines(rows: Iterable[Kept], places: Places) -> dict[int, Outline]:
    """seq_id -> outline, for every sequence of the recording. Raises RecordingError for impossible
    numbers of tokens."""
    found: dict[int, Outline] = {}
    planned: deque[KeptPlan] = deque()
    late: set[int] = set()
    for row in rows:
        if isinstance(row, KeptArrival):
            if not (0 <= row.num_prompt <= MAX_TOKENS and 0 <= row.num_prior <= MAX_TOKENS):
                raise RecordingError(f"Request {row.seq_id} has an impossible number of tokens.")
            found[row.seq_id] = Outline(row.num_prompt + row.num_prior, bytearray(row.hashes))
        elif isinstance(row, KeptPlan):
            planned.append(row)
            late.difference_update(admit[1] for admit in row.admits)
        elif isinstance(row, KeptRecord) and row.kind == "StepLost":
            planned.pop()
        elif isinstance(row, KeptRecord) and row.kind == "GrammarLate":
            late.add(row.values[1])
        elif isinstance(row, KeptResult):
            _add(row, sampling_rows(planned.popleft()), found, places, late)
    if sum(outline.num_ids for outline in found.values()) > MAX_TOKENS:
        raise RecordingError(f"The recording holds more than {MAX_TOKENS} tokens.")
    return found


def _add(
    result: KeptResult,
    seq_ids: list[int],
    found: dict[int, Outline],
    places: Places,
    late: set[int],
) -> None:
    ends, begin = set(result.ends), 0
    offsets = offsets_of(result, len(seq_ids)).tolist()
    for seq_id, (first, last) in zip(seq_ids, pairwise(offsets), strict=True):
        outline = found[seq_id]
        if seq_id in late:
            outline.discarded.add(result.step_id)
            continue
        for index in range(first, last):
            if index in ends and outline.end is None:
                outline.end = outline.num_ids
            outline.num_ids += 1
            if places.after(outline.num_ids - 1) == outline.num_ids:
                outline.hashes += result.hashes[begin : begin + HASH_BYTES]
                begin += HASH_BYTES


def sampling_rows(plan: KeptPlan) -> list[int]:
    """The seq_ids of the plan's sampling rows, in row order."""
    seq_ids = np.frombuffer(plan.rows["seq_ids"], "<i8")
    sampled: list[int] = seq_ids[np.frombuffer(plan.rows["samples"], "<i4") > 0].tolist()
    return sampled


def offsets_of(result: KeptResult, num_rows: int) -> Ids:
    if result.offsets:
        return unpack_ids(result.offsets)
    return np.arange(num_rows + 1, dtype=np.int32)


def request_of(arrival: KeptArrival, outline: Outline, ids: SurrogateIds) -> Request:
    """The request that replaces an arrival's: with surrogates for its ids, and otherwise only what
    plans depend on."""
    outline.ids = ids.of(outline.num_ids, bytes(outline.hashes))
    outline.num_given = arrival.num_prompt + arrival.num_prior
    prompt = outline.ids[: arrival.num_prompt].copy()
    if not arrival.is_valid:
        prompt[0] = INVALID_ID
    ended_by = () if outline.end is None else (int(outline.ids[outline.end]),)
    return Request(
        rid=arrival.rid,
        prompt_ids=pack_ids(prompt),
        prior_output_ids=pack_ids(outline.ids[arrival.num_prompt : outline.num_given]),
        sampling=SamplingParams(
            max_new_tokens=arrival.max_new_tokens,
            ignore_eos=arrival.ignore_eos,
            stop=("?",) if arrival.has_stop else (),
            stop_token_ids=ended_by,
            stream_interval=arrival.stream_interval,
        ),
        seed=arrival.seed,
        options=arrival.options,
        was_accepted=arrival.was_accepted,
    )


def tokens_of(result: KeptResult, seq_ids: list[int], found: dict[int, Outline]) -> Ids:
    """The surrogates of a result's tokens."""
    offsets = offsets_of(result, len(seq_ids)).tolist()
    if result.num_tokens != offsets[-1]:
        raise RecordingError(f"The result of step {result.step_id} has a wrong number of tokens.")
    tokens = np.empty(result.num_tokens, np.int32)
    for seq_id, (first, last) in zip(seq_ids, pairwise(offsets), strict=True):
        outline = found[seq_id]
        if result.step_id in outline.discarded:
            tokens[first:last] = 0
            continue
        tokens[first:last] = outline.ids[outline.num_given :][: last - first]
        outline.num_given += last - first
    tokens[result.invalid] = INVALID_ID
    return tokens
