"""Benchmarks that start an engine of their own instead of asking a server."""
