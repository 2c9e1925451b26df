"""The Engine of scripts and notebooks: a service on an event loop in a thread of its own."""
