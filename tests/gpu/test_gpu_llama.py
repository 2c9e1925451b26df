"""Prompt logprobs against transformers, and bf16 near fp32, on a GPU."""

from __future__ import annotations

from test_llama_golden import *  # noqa: F403
