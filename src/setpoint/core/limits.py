"""Limits of a step that the engine keeps to and the memory model counts with."""

from __future__ import annotations

CAPTURED_TOKENS = 512
"""Of a step that is replayed. In larger ones the work outweighs the calls by far, and they would
keep larger buffers."""

LOGITS_ROWS = 256
"""Sampling rows whose logits exist at the same time; a step with more computes them in blocks."""

REFERENCE_SCORES = 1 << 24
"""Scores (heads x queries x keys) that ``torch_ref`` attention holds at once; longer rows are
computed in blocks of queries."""
