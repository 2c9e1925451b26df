"""Routes, wire formats and error shapes over a Service; no scheduling, no tokenizing of its own."""
