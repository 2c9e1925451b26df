"""Lets the engines that compute in step (DP attention) end and start together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class InStep:
    def __init__(self, size: int) -> None:
        self.why_never = ""
        """Why these engines get no successors; "" if they do. Valid after ``all_have_ended``."""
        self._size = size
        self._num_ended = 0
        self._all_ended = asyncio.Event()

    async def all_have_ended(self, decide: Callable[[], str]) -> None:
        """Called for every engine that has ended; waits for the others. decide: called once, for
        all, returns ``why_never``."""
        all_ended = self._all_ended
        self._num_ended += 1
        if self._num_ended == self._size:
            self.why_never = decide()
            self._num_ended, self._all_ended = 0, asyncio.Event()
            all_ended.set()
        await all_ended.wait()
