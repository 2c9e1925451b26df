"""Recordings of the engine's records: written while it serves, printed as a log, and replayed
without a model (decision 0027)."""
