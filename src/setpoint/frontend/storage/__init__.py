"""What a server keeps for its clients: files and batches on disk, in a folder of the operator's
choice (docs/batches.md), and responses in memory (docs/responses.md). Knows no HTTP and no
engine."""
