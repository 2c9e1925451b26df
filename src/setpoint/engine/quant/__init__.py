"""How linear layers keep and multiply their weights: one protocol, one file per way."""
