"""Which engine the cache tiers serve: blocks belong to the weights that wrote them, and the digest
of weights takes a while to find.

    before a change of weights ──────────────────────────▶ serve_as(b""): nothing is found or kept
    at start, and after it     ── find, in a thread ──▶ serve_as(identity)

Works on digests. It knows neither tensors nor stores.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from setpoint.core.errors import SetpointError
from setpoint.core.operations import STORAGE as STORAGE_OPERATIONS
from setpoint.core.operations import (
    AttachStorage,
    ClearStorage,
    DetachStorage,
    LoadWeights,
    MemoryPart,
    Operation,
    Operator,
    RestoreMemory,
)

logger = logging.getLogger(__name__)

Work = Callable[[], None]


def in_a_thread(work: Work) -> None:
    threading.Thread(target=work, name="cache-identity", daemon=True).start()


class TierIdentity:
    """Finds the identity of an engine again whenever its weights have changed.

    Contract: an identity that was being found when ``forget`` was called is never served as.
    """

    def __init__(
        self,
        serve_as: Callable[[bytes], None],
        find: Callable[[], bytes],
        start: Callable[[Work], None] = in_a_thread,
    ) -> None:
        """find: returns the identity of the engine with its present weights; raises SetpointError
        or OSError if it cannot. start: has the work done beside the steps."""
        self._serve_as, self._find, self._start = serve_as, find, start
        self._lock = threading.Lock()
        """Guards the number, and that ``serve_as`` gets what belongs to it."""
        self._number = 0

    def forget(self) -> None:
        """The engine is about to change, or has: it has no identity until ``begin``."""
        with self._lock:
            self._number += 1
            self._serve_as(b"")

    def begin(self) -> None:
        """Find out which engine this is."""
        self.forget()
        number = self._number

        def find() -> None:
            try:
                identity = self._find()
            except (SetpointError, OSError) as error:
                logger.error("The cache tiers are not used: the weights cannot be read: %s", error)
                return
            with self._lock:
                if number == self._number:
                    self._serve_as(identity)

        self._start(find)


class IdentifiedTiers(Protocol):
    """What is told about the operations of its engine."""

    identity: TierIdentity

    def change_storage(self, operation: AttachStorage | DetachStorage | ClearStorage) -> None:
        """Raises RequestError if that is impossible now."""

    def before(self, operation: LoadWeights | RestoreMemory) -> None:
        """The weights are about to change."""

    def after(self, operation: LoadWeights | RestoreMemory, error: Exception | None) -> None:
        """They have changed; or, after an error, may have."""


class TierOperator:
    """An operator after whose work the tiers know the engine again. Implements
    ``core.operations.Operator``."""

    def __init__(self, operator: Operator, tiers: IdentifiedTiers) -> None:
        self._operator, self._tiers = operator, tiers

    @property
    def released(self) -> frozenset[MemoryPart]:
        return self._operator.released

    def operate(self, call_id: int, operation: Operation) -> str:
        if isinstance(operation, STORAGE_OPERATIONS):
            self._tiers.change_storage(operation)
            return ""
        if not _changes_weights(operation):
            return self._operator.operate(call_id, operation)
        assert isinstance(operation, LoadWeights | RestoreMemory)
        self._tiers.before(operation)
        try:
            path = self._operator.operate(call_id, operation)
        except Exception as error:
            self._tiers.after(operation, error)
            raise
        self._tiers.after(operation, None)
        return path


def _changes_weights(operation: Operation) -> bool:
    return isinstance(operation, LoadWeights) or (
        isinstance(operation, RestoreMemory) and MemoryPart.WEIGHTS in operation.parts
    )
