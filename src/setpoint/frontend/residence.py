"""Whether a model is loaded, and how long it stays. A server with one model keeps it loaded; of
several, some are loaded at a time (``frontend.multi_model``)."""

from __future__ import annotations

import math
from typing import Protocol

from setpoint.core.errors import RequestError


class Residence(Protocol):
    """The methods are called on the event loop."""

    @property
    def is_shared(self) -> bool:
        """Whether the model has to make room for others."""

    @property
    def state(self) -> str:
        """loaded, loading, unloaded or unloading."""

    @property
    def expires_in_s(self) -> float:
        """The seconds until the model is unloaded if no request comes for it; infinite if that
        happens only for another model, or never."""

    @property
    def num_loads(self) -> int:
        """How often it has been loaded again since the start."""

    @property
    def load_s(self) -> float:
        """The seconds that this took, together."""

    def keep(self, seconds: float) -> None:
        """Have the model stay loaded for so long after its last request; 0: not at all."""

    async def load(self) -> None:
        """Return when the model is loaded. Raises SetpointError if that is impossible."""

    def dismiss(self) -> None:
        """Unload the model as soon as it has no requests. Raises RequestError (400) if it is always
        loaded."""


class AlwaysLoaded:
    is_shared = False
    state = "loaded"
    expires_in_s = math.inf
    num_loads = 0
    load_s = 0.0

    def keep(self, seconds: float) -> None:
        pass

    async def load(self) -> None:
        pass

    def dismiss(self) -> None:
        raise RequestError(
            "The model cannot be unloaded, because this server has one model, which it always"
            " keeps (docs/several-models.md)."
        )
