"""Greedy ids through scheduler and loop, at every depth, on tiny models and on the default one, on
a GPU."""

from __future__ import annotations

from test_real_model_differential import *  # noqa: F403
