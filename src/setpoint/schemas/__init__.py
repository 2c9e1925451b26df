"""Rewrites a client's JSON schema into one whose keywords grammar libraries enforce."""
