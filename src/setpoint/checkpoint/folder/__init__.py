"""A folder as transformers saves it: its config, families of architectures, headers of weights."""
