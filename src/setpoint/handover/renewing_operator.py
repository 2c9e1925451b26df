"""Tells the other servers when the engine gets other weights."""

from __future__ import annotations

from collections.abc import Callable

from setpoint.core.operations import LoadWeights, MemoryPart, Operation, Operator


class RenewingOperator:
    """An operator that says when it has loaded weights. Implements ``core.operations.Operator``."""

    def __init__(self, operator: Operator, renew: Callable[[LoadWeights], object]) -> None:
        self._operator = operator
        self._renew = renew

    @property
    def released(self) -> frozenset[MemoryPart]:
        return self._operator.released

    def operate(self, call_id: int, operation: Operation) -> str:
        """Raises SetpointError."""
        path = self._operator.operate(call_id, operation)
        if isinstance(operation, LoadWeights):
            self._renew(operation)
        return path
