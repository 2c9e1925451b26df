"""An operator without an engine: it does nothing, keeps what it was asked to do, and fails where a
test says so."""

from __future__ import annotations

from collections.abc import Callable

from setpoint.core.operations import (
    LoadWeights,
    MemoryPart,
    Operation,
    ReleaseMemory,
    RestoreMemory,
)


class ScriptedOperator:
    """Implements ``core.operations.Operator``."""

    def __init__(
        self,
        error_of: Callable[[int, Operation], Exception | None] = lambda call_id, operation: None,
    ) -> None:
        """error_of: the exception that an operation raises, or None."""
        self.error_of = error_of
        self.done: list[Operation] = []
        self.released: frozenset[MemoryPart] = frozenset()

    def operate(self, call_id: int, operation: Operation) -> str:
        if (error := self.error_of(call_id, operation)) is not None:
            raise error
        self.done.append(operation)
        self.released = self._released_after(operation)
        return ""

    def _released_after(self, operation: Operation) -> frozenset[MemoryPart]:
        match operation:
            case ReleaseMemory(parts):
                return self.released | set(parts)
            case RestoreMemory(parts):
                return self.released - set(parts)
            case LoadWeights():
                return self.released - {MemoryPart.WEIGHTS}
        return self.released
