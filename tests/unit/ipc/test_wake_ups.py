"""Readers of mailboxes go on little by little, so that what else the event loop has to do is done
between them."""

from __future__ import annotations

import asyncio

from setpoint.core.messages import TokenEvent
from setpoint.ipc.mailbox import AT_ONCE, Mailbox, WakeUps


def test_no_turn_of_the_loop_wakes_more_than_a_few_readers() -> None:
    """Red before: a step that ended 256 requests had all of them answered in one turn."""

    async def scenario() -> None:
        woken: list[int] = []

        async def read(number: int, mailbox: Mailbox) -> None:
            await mailbox.take()
            woken.append(number)

        mailboxes = [Mailbox() for _ in range(5 * AT_ONCE)]
        readers = [asyncio.create_task(read(n, each)) for n, each in enumerate(mailboxes)]
        await asyncio.sleep(0)
        for mailbox in mailboxes:
            mailbox.put(0, TokenEvent(0, [1]))
        wake_ups = WakeUps()
        wake_ups.add(mailboxes[: 3 * AT_ONCE])
        wake_ups.add(mailboxes[2 * AT_ONCE :])
        while not all(reader.done() for reader in readers):
            before = len(woken)
            await asyncio.sleep(0)
            assert len(woken) - before <= AT_ONCE
        assert woken == list(range(len(mailboxes)))

    asyncio.run(scenario())
