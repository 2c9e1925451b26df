"""What works beside the routes of a server."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

Worker = Callable[[], Coroutine[Any, Any, None]]
"""Runs while the server serves, and is cancelled when it begins to end."""
