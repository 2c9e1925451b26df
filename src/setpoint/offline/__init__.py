"""The Engine for scripts and notebooks: a service on an event loop in a separate thread."""
