"""Limits on a step that the engine enforces and the memory model uses."""

from __future__ import annotations

CAPTURED_TOKENS = 512
"""Most tokens of a step that is captured and replayed. A larger step gains little, because its
computation far outweighs its calls, and it would keep larger buffers."""

LOGITS_ROWS = 256
"""Most sampling rows whose logits exist at the same time; a step with more rows computes them in
blocks."""

REFERENCE_SCORES = 1 << 24
"""Most scores (heads x queries x keys) that ``torch_ref`` attention holds at once; a row that needs
more is computed in blocks of queries."""
