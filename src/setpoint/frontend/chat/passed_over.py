"""Parts of a conversation's history that no model here can read, such as another provider's tools
and pictures that a tool returned. A client sends its history again with every turn, so a refusal
would end the session for ever: such parts are passed over, and the client is told."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from setpoint.core.excerpt import excerpt, quoted

logger = logging.getLogger(__name__)

MAX_TOLD = 8
"""How many types are named to a client; the others are counted."""
_MAX_LOGGED = 64
_logged: set[str] = set()


def placeholder(kind: str) -> str:
    """The text that stands for a part of a tool's result, so that the model knows of it. kind: the
    part's type."""
    return f"[A part of the type {quoted(kind, 64)} is left out: this model reads only text.]"


def told(kinds: Sequence[str]) -> list[str]:
    """The warning about parts that were passed over, if there are any; each type is logged once.
    kinds: their types."""
    if not kinds:
        return []
    counts = Counter(excerpt(kind, 64) for kind in kinds)
    for kind in counts:
        if kind not in _logged and len(_logged) < _MAX_LOGGED:
            _logged.add(kind)
            logger.warning("Passed over a part %r of a conversation (logged once per type).", kind)
    named = [f"{kind} ({count})" for kind, count in counts.most_common(MAX_TOLD)]
    if len(counts) > MAX_TOLD:
        named.append(f"{len(counts) - MAX_TOLD} more types")
    return [
        f"Parts of the conversation that the model cannot read were left out: {', '.join(named)}."
    ]
