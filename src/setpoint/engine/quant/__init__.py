"""Methods by which linear layers hold and multiply their weights: one protocol, one file each."""
