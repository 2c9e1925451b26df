"""Moves the keys and values of a prompt from the server that computed it to the one that goes on
(docs/decisions/0072-prefill-and-decode-apart.md)."""
