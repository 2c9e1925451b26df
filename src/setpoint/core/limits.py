"""Limits on a step that the engine enforces and the memory model uses."""

from __future__ import annotations

CAPTURED_TOKENS = 512
"""Most tokens of a step that is captured and replayed on a CPU. A larger step gains little, because
its computation far outweighs its calls, and it would keep larger buffers. On a GPU, see
``core.graph_sizes``."""

LOGITS_ROWS, GPU_LOGITS_ROWS = 256, 1024
"""Most sampling rows whose logits exist at the same time, on a CPU and on a GPU; a step with more
rows computes them in blocks. On a GPU that would take its logits out of the graph."""

REPORT_BYTES = 64 << 20
"""Most bytes of fp32 logits whose logprobs or other facts are computed at the same time; more rows
take several turns."""


def logits_rows(device: str) -> int:
    """The number of such rows on this kind of device."""
    return LOGITS_ROWS if device == "cpu" else GPU_LOGITS_ROWS


REFERENCE_SCORES = 1 << 24
"""Most scores (heads x queries x keys) that ``torch_ref`` attention holds at once; a row that needs
more is computed in blocks of queries."""
