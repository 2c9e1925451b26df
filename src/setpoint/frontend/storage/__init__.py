"""What a server keeps on disk for its clients: files and batches, in a folder of the operator's
choice (docs/batches.md). Knows no HTTP and no engine."""
