"""``setpoint console FILE``: a recording on the console's page."""
