"""The composition root: resolves the configuration, builds both planes, and starts, supervises and
ends the processes."""
