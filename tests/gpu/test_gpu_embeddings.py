"""Embeddings against transformers, on a GPU."""

from __future__ import annotations

from test_embedding_golden import *  # noqa: F403
