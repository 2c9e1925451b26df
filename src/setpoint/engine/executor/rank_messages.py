"""What rank 0 and the other ranks of an engine tell each other about handovers
(``rank_handovers``)."""

from __future__ import annotations

import msgspec

from setpoint.core.bootstrap import Bootstrap
from setpoint.core.handover import HandoverState, PromptReceived, PromptSent, PromptWanted


class OfferPrompt(msgspec.Struct, frozen=True, tag=True, array_like=True):
    seq_id: int
    room: int
    digest: bytes


class SupplyPrompt(msgspec.Struct, frozen=True, tag=True, array_like=True):
    seq_id: int
    rows: bytes
    handed: HandoverState


class WithdrawPrompt(msgspec.Struct, frozen=True, tag=True, array_like=True):
    seq_id: int
    reason: str


class FetchPrompt(msgspec.Struct, frozen=True, tag=True, array_like=True):
    seq_id: int
    bootstrap: Bootstrap
    digest: bytes
    skipped_rows: int
    rows: bytes


class CancelFetch(msgspec.Struct, frozen=True, tag=True, array_like=True):
    seq_id: int


ToSide = OfferPrompt | SupplyPrompt | WithdrawPrompt | FetchPrompt | CancelFetch


class GiverNews(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A rank of a prefill server sends this; it may come between other answers."""

    message: PromptWanted | PromptSent


class TakerNews(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A rank of a decode server sends this; it may come between other answers."""

    message: PromptReceived
