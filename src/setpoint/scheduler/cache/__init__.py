"""Keeps track of what the KV pages hold: free list, radix tree of cached prefixes, eviction. Works
on page numbers, never touches KV data."""
