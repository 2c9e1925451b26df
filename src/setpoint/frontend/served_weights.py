"""Which weights the engines of a model have, and how they get others."""

from __future__ import annotations

from setpoint.core.control import OperationDone
from setpoint.core.operations import LoadWeights
from setpoint.frontend.checkpoint_names import Checkpoint
from setpoint.ipc.orders import Orders


class ServedWeights:
    """The one state of a served model that changes while it serves. The routes of weights
    (``apis.sglang.weights``) write it."""

    def __init__(self, orders: Orders, model_path: str, version: str) -> None:
        self._orders = orders
        self.model_path = model_path
        self.version = version
        self.checkpoint: Checkpoint | None = None
        """The checkpoint whose weights the engines have; None: the one of the start."""

    async def load(
        self,
        checkpoint: Checkpoint,
        *,
        model_path: str | None = None,
        version: str | None = None,
        flush_cache: bool,
        aborts: bool,
        keep_pause: bool = False,
    ) -> list[OperationDone]:
        """Have all engines compute with other weights. model_path, version: see ``tell``. aborts:
        end all requests, and pause the engines meanwhile. keep_pause: see ``Orders.held``. Raises
        RequestError, with nothing changed, and EngineDeadError."""
        operation = LoadWeights(checkpoint.folder, checkpoint.load_format, flush_cache=flush_cache)
        orders = self._orders
        async with (
            orders.held(keep_pause=keep_pause)
            if aborts
            else orders.at_rest(flushes=flush_cache, keep_pause=keep_pause)
        ):
            done = await orders.load(operation)
            # Before anything else may happen: an engine that starts now has these weights.
            self.checkpoint = checkpoint
            self.tell(model_path, version)
        return done

    def tell(self, model_path: str | None, version: str | None) -> None:
        """Tell from now on that the weights have this path and version; None: as before."""
        self.model_path = self.model_path if model_path is None else model_path
        self.version = self.version if version is None else version
