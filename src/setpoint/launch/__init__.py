"""The composition root: ``parent`` settles what is served, builds the control plane, and starts,
watches and ends engines; ``child`` is an engine's process and those of its other ranks, and builds
the data plane. What stands beside them is what both know."""
