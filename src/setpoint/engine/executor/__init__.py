"""The border of the data plane: executors that the scheduler drives, and how a runner is put
together."""
