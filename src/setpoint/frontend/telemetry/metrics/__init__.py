"""``/metrics``: what the frontend counts itself, and what it asks of engines."""
