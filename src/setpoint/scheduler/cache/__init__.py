"""Which KV pages hold what: free list, radix tree of cached prefixes, eviction. Works on page
numbers, never touches KV data."""
