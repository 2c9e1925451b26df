"""``setpoint top``: the console in a terminal."""
