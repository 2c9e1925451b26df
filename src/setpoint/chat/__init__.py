"""``setpoint chat``: a conversation in a terminal, with a model in an engine of its own or behind a
URL."""
