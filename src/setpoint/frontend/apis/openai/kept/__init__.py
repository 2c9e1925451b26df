"""What OpenAI's API keeps between requests: files and batches (docs/batches.md)."""
