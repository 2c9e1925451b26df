"""How linear layers hold and multiply their weights: one protocol, and one file per method."""
