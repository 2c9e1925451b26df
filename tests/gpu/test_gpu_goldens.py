"""Every model of the golden table against transformers, on a GPU."""

from __future__ import annotations

from test_goldens import *  # noqa: F403
