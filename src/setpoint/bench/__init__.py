"""``setpoint bench``: what a server does for its clients, and what the engine does alone,
measured."""
