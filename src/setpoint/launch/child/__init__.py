"""The process of an engine, and those of its other ranks."""
