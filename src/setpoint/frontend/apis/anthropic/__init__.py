"""Anthropic's API: ``/v1/messages`` whole and as a stream of events, and
``/v1/messages/count_tokens``."""
