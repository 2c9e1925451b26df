"""The process that clients talk to: HTTP, text work, and the link to the engine. Knows text and
requests; no pages, no tensors."""
