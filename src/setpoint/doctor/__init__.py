"""The doctor: from observations of a server to the limit that binds, with evidence and one action
(decision 0046)."""
