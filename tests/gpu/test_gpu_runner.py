"""Greedy ids however a step is cut, on a GPU."""

from __future__ import annotations

from test_runner_differential import *  # noqa: F403
