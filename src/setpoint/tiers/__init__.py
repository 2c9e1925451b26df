"""Stores of keys and values outside the KV pool, and the threads that move pages between them and a
pool (docs/hierarchical-cache.md). Works on bytes, tokens and digests; knows neither tensors nor
sequences."""
