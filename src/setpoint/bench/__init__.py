"""``setpoint bench``: measures what a server does for its clients, and what the engine does
alone."""
