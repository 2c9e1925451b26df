"""The routes of OpenAI's API for stored objects: files and batches (docs/batches.md)."""
