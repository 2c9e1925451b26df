"""Chat for every API: turns messages into a prompt, and the text of an answer into typed deltas."""
