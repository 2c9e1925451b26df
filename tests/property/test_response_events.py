"""The events of a response in the background follow from its tokens alone; and what is left of a
damaged file of tokens is always their beginning."""

from __future__ import annotations

import struct
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from setpoint.core.messages import Finish, TokenEvent
from setpoint.core.request import Request, pack_ids
from setpoint.core.sampling import SamplingParams
from setpoint.frontend.apis.openai.responses.reply import ResponseHead
from setpoint.frontend.apis.openai.responses.response_tools import Toolbox
from setpoint.frontend.apis.openai.responses.script import Making, Script
from setpoint.frontend.chat.formats.hermes import HERMES
from setpoint.frontend.jobs import SequenceOutput
from setpoint.frontend.storage.output_file import append_group, read_groups
from setpoint.frontend.text.tokenizer import Tokenizer
from setpoint_testing.byte_tokenizer import EOS_ID, make_byte_tokenizer

TOKENIZER = Tokenizer(make_byte_tokenizer())
PIECES = [
    *("a", " ", "\n", "é", "\U0001f600", "stop", "<tool_call>", "</tool_call>"),
    '{"name": "look", "arguments": {"at": 1}}',
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=12).map(lambda parts: "".join(parts).encode())
IDS = st.one_of(TEXTS, st.binary(max_size=40)).map(list)
ENDS = st.sampled_from(
    [None, Finish("length", length=5), Finish("stop", matched=EOS_ID), Finish("abort")]
)


def script(sampling: SamplingParams) -> Script:
    tools = Toolbox.of([{"type": "function", "name": "look", "parameters": {"type": "object"}}])
    made = [each.tool for each in tools.tools]
    head = ResponseHead({"id": "resp_1"}, reasoning_tokens=lambda output: 0)
    making = Making(head, lambda: HERMES.parser(made), (), tools, constrains_calls=False)
    request = Request(rid="r", prompt_ids=pack_ids([1]), sampling=sampling, seed=1)
    return Script(making, request, TOKENIZER)


def up_to_a_stop(
    ids: list[int], end: Finish | None, sampling: SamplingParams
) -> tuple[list[int], Finish | None]:
    """The ids that a job keeps, and how it ends: at the first stop string, if there is one."""
    request = Request(rid="r", prompt_ids=pack_ids([1]), sampling=sampling, seed=1)
    sequence = SequenceOutput(request, 0, TOKENIZER)
    for position, each in enumerate(ids, 1):
        sequence.feed(TokenEvent(0, [each]))
        if sequence.finish is not None:
            return ids[:position], sequence.finish
    return ids, end


def events(made: Script, ids: list[int], cuts: list[int], end: Finish | None) -> list[Any]:
    """The events of these tokens, in groups that end at the cuts."""
    last = len(ids) - (end is not None and isinstance(end.matched, int))
    found, at = made.begin(), 0
    for cut in sorted(min(each, last) for each in cuts):
        found += made.feed(ids[at:cut])
        at = cut
    found += made.end(ids[at:], end)
    return [*found, *made.last({"status": "completed", "output": made.items})]


@settings(deadline=None)
@given(
    ids=IDS,
    end=ENDS,
    stops=st.sampled_from([(), ("stop",), ("\n", "a a")]),
    cuts=st.lists(st.integers(0, 60), max_size=8),
    other_cuts=st.lists(st.integers(0, 60), max_size=8),
)
def test_events_do_not_depend_on_groups(
    ids: list[int],
    end: Finish | None,
    stops: tuple[str, ...],
    cuts: list[int],
    other_cuts: list[int],
) -> None:
    if end is not None and end.matched is not None:
        ids = [*ids, EOS_ID]
    sampling = SamplingParams(stop=stops)
    ids, end = up_to_a_stop(ids, end, sampling)
    made = events(script(sampling), ids, cuts, end)
    assert made == events(script(sampling), ids, other_cuts, end)
    assert [event["sequence_number"] for event in made] == list(range(len(made)))
    done = [event["item"] for event in made if event["type"] == "response.output_item.done"]
    assert done == made[-1]["response"]["output"]


@settings(deadline=None)
@given(
    groups=st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5), max_size=8),
    data=st.data(),
)
def test_what_is_left_of_a_damaged_file_is_the_beginning(
    groups: list[list[int]], data: st.DataObject
) -> None:
    with TemporaryDirectory() as folder:
        path, at, ends = Path(folder) / "ids", 0, [0]
        for group in groups:
            at = append_group(path, pack_ids(group), at=at)
            ends.append(at)
        whole = b"".join(pack_ids(group) for group in groups)
        assert read_groups(path) == (whole, at, 0)
        if not groups:
            return
        content = bytearray(path.read_bytes())
        where = data.draw(st.integers(0, len(content) - 1))
        if data.draw(st.booleans()):
            del content[where:]
        else:
            content[where] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
        ids, end, num_damaged = read_groups(path)
        assert end == max(each for each in ends if each <= where)
        assert (end + num_damaged, whole[: len(ids)]) == (len(content), ids)
        # The next group takes the place of what is damaged.
        append_group(path, struct.pack("<i", 7), at=end)
        assert read_groups(path)[0][: len(ids) + 4] == ids + struct.pack("<i", 7)
