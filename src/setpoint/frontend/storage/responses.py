"""Stores the answers of ``/v1/responses`` for later requests, in memory and with limits of number
and size. The least recently used are dropped first. The engine knows nothing of them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from setpoint.core.errors import RequestError
from setpoint.core.excerpt import quoted
from setpoint.frontend.storage.background import ID_PREFIX, BackgroundBook, BackgroundResponse

MAX_RESPONSES = 10_000
MAX_BYTES = 256 << 20
"""Maximum memory of all stored responses, estimated from their JSON. Each counts with the whole
conversation before it."""

BYTES_PER_VALUE = 64
"""Approximate bytes of a list, an object or a string in Python besides its content."""

Item = Mapping[str, Any]


@dataclass(slots=True, frozen=True, kw_only=True)
class KeptResponse:
    response: dict[str, Any]
    """The response as the API shows it."""
    inputs: Sequence[Item]
    """The input items of its request."""
    earlier: Sequence[Item] = ()
    """The conversation before these items: all inputs and outputs."""
    background: BackgroundResponse | None = None
    """The same response as a BackgroundResponse, if it was created in the background."""

    @property
    def is_running(self) -> bool:
        return self.response["status"] in ("queued", "in_progress")

    @property
    def conversation(self) -> list[Item]:
        return [*self.earlier, *self.inputs, *self.response["output"]]


class ResponseStore:
    """Safe for several threads."""

    def __init__(
        self,
        background: BackgroundBook | None = None,
        *,
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """background: the book of those in the background; it forgets each that is deleted, or
        dropped because newer ones need its space."""
        self.background = background or BackgroundBook()
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, tuple[KeptResponse, int]] = OrderedDict()
        """Id -> response and its bytes, the least recently used first."""
        self._items: dict[str, str] = {}
        """Id of each output item -> id of its response."""
        self._num_bytes = 0
        self._lock = threading.Lock()

    def put(self, kept: KeptResponse) -> None:
        """Store a response, or its new state. A response that is running in the background is never
        dropped."""
        own_id = kept.response["id"]
        num_bytes = _memory(msgspec.json.encode([kept.response, kept.inputs, kept.earlier]))
        dropped: list[str] = []
        with self._lock:
            self._drop(own_id)
            self._kept[own_id] = kept, num_bytes
            self._num_bytes += num_bytes
            self._items.update({item["id"]: own_id for item in kept.response["output"]})
            ended = (key for key, (each, _) in self._kept.items() if not each.is_running)
            while len(self._kept) > self._max_responses or self._num_bytes > self._max_bytes:
                oldest = next(ended, None)
                if oldest is None:
                    break
                self._drop(oldest)
                dropped.append(oldest)
                ended = (key for key, (each, _) in self._kept.items() if not each.is_running)
        for each in dropped:
            self.background.forget(each)

    def get(self, response_id: str, *, name: str = "response_id") -> KeptResponse:
        """The response with this id. name: the field of the request that contains the id. Raises
        RequestError: 400 for text that cannot be an id, 404 for a response that is not stored."""
        if not response_id.startswith(ID_PREFIX):
            raise RequestError(
                f"Invalid {name!r}: {quoted(response_id, 64)}. The id of a response begins with"
                f" {ID_PREFIX!r}.",
            )
        with self._lock:
            found = self._kept.get(response_id)
            if found is None:
                raise RequestError(
                    f"{name}: this server stores no response {quoted(response_id, 64)}. It was"
                    " never created here, was created with store false, was deleted, or was"
                    " dropped because"
                    " newer ones needed its space.",
                    status_code=404,
                )
            self._kept.move_to_end(response_id)
            return found[0]

    def item(self, item_id: str) -> Item | None:
        """The output item with this id of a stored response."""
        with self._lock:
            response_id = self._items.get(item_id)
            if response_id is None:
                return None
            self._kept.move_to_end(response_id)
            output: list[Item] = self._kept[response_id][0].response["output"]
        return next(item for item in output if item["id"] == item_id)

    def delete(self, response_id: str) -> KeptResponse:
        """Delete a response. Raises the same errors as ``get``."""
        kept = self.get(response_id)
        with self._lock:
            self._drop(response_id)
        self.background.forget(response_id)
        return kept

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._kept

    def _drop(self, response_id: str) -> None:
        dropped = self._kept.pop(response_id, None)
        if dropped is not None:
            kept, num_bytes = dropped
            self._num_bytes -= num_bytes
            for item in kept.response["output"]:
                del self._items[item["id"]]


def _memory(text: bytes) -> int:
    """An estimate of the memory of a JSON text's values: an empty list is 3 bytes of text."""
    return len(text) + BYTES_PER_VALUE * sum(map(text.count, (b",", b"[", b"{")))
