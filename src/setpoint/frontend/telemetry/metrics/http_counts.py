"""Counts of HTTP requests and responses, by route."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any


class HttpMetrics:
    def __init__(self) -> None:
        self.num_active = 0
        """Requests that are being answered; written by the middleware, like the others."""
        self.requests: Counter[tuple[str, ...]] = Counter()
        """Requests by route and method."""
        self.responses: Counter[tuple[str, ...]] = Counter()
        """Responses by route, status and method."""

    def samples(self) -> dict[str, Mapping[tuple[str, ...], Any]]:
        """Name of a series -> its labels' values -> number."""
        return {
            "sglang:http_requests": dict(self.requests),
            "sglang:http_responses": dict(self.responses),
            "sglang:http_requests_active": {(): self.num_active},
        }
