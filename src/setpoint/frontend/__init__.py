"""The process that clients talk to: HTTP, text work, and the link to the engine. It knows text and
requests, but no pages or tensors."""
