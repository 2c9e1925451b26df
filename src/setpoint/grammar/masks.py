"""What the masks of every grammar library have in common: how much work they may take, and how the
end of an output is put off."""

from __future__ import annotations

from collections.abc import Iterable

from setpoint.core.errors import RequestError
from setpoint.core.plan import forbid
from setpoint.core.request import Ids

MASK_CREDIT_S = 0.25
MASK_SHARE_S = 0.003
"""Seconds of computing that a sequence's masks may take: the first, and the second for each token
in addition. The masks of a usual schema take a tenth of the second."""

TOO_MUCH_WORK = "it takes too much work to find the tokens that it allows"
NOTHING_ALLOWED = "it allows no token"


class MaskBudget:
    """The computing time that one sequence has left for its masks."""

    def __init__(self) -> None:
        self._credit_s = MASK_CREDIT_S

    def earn(self, num_tokens: int = 1) -> None:
        """Add the time for tokens that the output has got."""
        self._credit_s += num_tokens * MASK_SHARE_S

    def spend(self, seconds: float) -> None:
        """Count work. Raises RequestError if nothing is left."""
        self._credit_s -= seconds
        if self._credit_s < 0:
            raise stuck(TOO_MUCH_WORK)


def stuck(reason: str) -> RequestError:
    """The error of a sequence whose grammar worked until now."""
    return RequestError(f"The grammar cannot be applied any further: {reason}.")


def forbid_while_others(words: Ids, tokens: Iterable[int]) -> None:
    """Clear the bits of these tokens in a mask, unless it has no others."""
    given = words.copy()
    forbid(words, tokens)
    if not words.any():
        words[:] = given
