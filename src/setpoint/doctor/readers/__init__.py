"""The readers, which make observations from logs, ``/metrics``, running servers and recordings."""
