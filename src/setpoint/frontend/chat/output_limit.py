"""The limit on new tokens for APIs whose clients set one without knowing the model's context."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from setpoint.core.request import Request


def with_token_limit(
    requests: Iterable[Request], max_new_tokens: int | None, context_len: int
) -> list[Request]:
    """The requests, which have no limit on new tokens yet, with the limit ``max_new_tokens``. A
    limit that is surely beyond the end of the context is left out, as the context ends the
    answer."""
    return [
        msgspec.structs.replace(
            request,
            sampling=msgspec.structs.replace(
                request.sampling, max_new_tokens=_fitting(request, max_new_tokens, context_len)
            ),
        )
        for request in requests
    ]


def _fitting(request: Request, max_new_tokens: int | None, context_len: int) -> int | None:
    if max_new_tokens is None:
        return None
    room = context_len - len(request.prompt_ids) // 4
    return max_new_tokens if max_new_tokens <= room else None
