"""Recordings of the engine's stream of records: written while it serves, printed, and replayed
without a model (decision 0027)."""
