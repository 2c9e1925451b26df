"""A job's pieces when several events of a sequence arrive before anybody reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from setpoint.core.messages import Finish, Ready, TokenEvent, Tokens, encode
from setpoint.core.request import Request, pack_ids
from setpoint.core.sampling import SamplingParams
from setpoint.frontend.jobs import MOST_EVENTS, Job
from setpoint.frontend.text.tokenizer import Tokenizer
from setpoint.ipc.client import EngineClient
from setpoint.ipc.line import EngineLine
from setpoint_testing.byte_tokenizer import write_byte_tokenizer
from setpoint_testing.fake_engine import SOME_FACTS


class Link:
    """An engine whose messages the test sends."""

    def start(self, receiver: Callable[[bytes], None], on_cut: Callable[[], None]) -> None:
        self.receive = receiver

    def send(self, data: bytes) -> None: ...

    def close(self) -> None: ...


def test_each_piece_shows_its_own_ids_and_only_the_last_one_the_end(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)

    async def scenario() -> list[tuple[int, str, list[int], int, bool]]:
        link = Link()
        client = EngineClient()
        client.attach(EngineLine(link))
        link.receive(encode(Ready(SOME_FACTS)))
        requests = [
            Request(rid=rid, prompt_ids=pack_ids([1]), sampling=SamplingParams(), seed=0)
            for rid in "ab"
        ]
        with Job(client, tokenizer, requests, on_finish=lambda output: None) as job:
            # One message per step, all here before the reader wakes up.
            link.receive(
                encode(
                    Tokens([TokenEvent(0, [65], num_outputs=1), TokenEvent(1, [75], num_outputs=1)])
                )
            )
            link.receive(encode(Tokens([TokenEvent(0, [66], num_outputs=2)])))
            last = TokenEvent(0, [67], Finish("length"), num_outputs=3)
            link.receive(
                encode(Tokens([last, TokenEvent(1, [76], Finish("length"), num_outputs=2)]))
            )
            return [
                (
                    piece.output.index,
                    piece.text,
                    piece.ids,
                    piece.output.num_outputs,
                    piece.output.finish is not None,
                )
                async for pieces in job.pieces()
                for piece in pieces
            ]

    pieces = asyncio.run(scenario())
    assert [piece[1:] for piece in pieces if piece[0] == 0] == [
        ("A", [65], 1, False),
        ("B", [66], 2, False),
        ("C", [67], 3, True),
    ]
    assert [piece[1:] for piece in pieces if piece[0] == 1] == [
        ("K", [75], 1, False),
        ("L", [76], 2, True),
    ]


def test_events_of_a_reader_that_is_far_behind_become_one_piece(tmp_path: Path) -> None:
    """While its client takes nothing, tokens are kept as text and ids and not as events."""
    write_byte_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    num_tokens = 1000

    async def scenario() -> list[tuple[int, str, list[int], bool]]:
        link = Link()
        client = EngineClient()
        client.attach(EngineLine(link))
        link.receive(encode(Ready(SOME_FACTS)))
        request = Request(rid="a", prompt_ids=pack_ids([1]), sampling=SamplingParams(), seed=0)
        found = []
        with Job(client, tokenizer, [request], on_finish=lambda output: None) as job:

            async def blocked() -> None:
                if job.outputs[0].num_outputs:
                    return
                for count in range(1, num_tokens + 1):
                    finish = Finish("length") if count == num_tokens else None
                    event = TokenEvent(0, [65 + count % 26], finish, num_outputs=count)
                    before = job.outputs[0].num_outputs
                    link.receive(encode(Tokens([event])))
                    # a few at a time: the message may have an event for each of many streams
                    assert job.outputs[0].num_outputs <= before + 2
                assert job.outputs[0].num_outputs >= num_tokens - MOST_EVENTS

            job.before_wait = blocked
            async for pieces in job.pieces():
                for piece in pieces:
                    ended = piece.output.finish is not None
                    found.append((piece.output.num_outputs, piece.text, piece.ids, ended))
        return found

    pieces = asyncio.run(scenario())
    assert len(pieces) <= MOST_EVENTS + 1
    expected = [65 + count % 26 for count in range(1, num_tokens + 1)]
    assert [each for _, _, ids, _ in pieces for each in ids] == expected
    assert "".join(text for _, text, _, _ in pieces) == bytes(expected).decode()
    assert [ended for *_, ended in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1][0] == num_tokens
