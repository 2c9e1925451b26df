"""The readers: logs, ``/metrics``, running servers and recordings become observations."""
