"""The composition root: resolves the configuration, builds both planes, starts, supervises and ends
the processes."""
