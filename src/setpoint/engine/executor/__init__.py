"""The data plane's border: executors, which the scheduler drives, and the building of runners."""
