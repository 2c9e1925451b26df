"""``setpoint console FILE``: shows a recording on the console's page."""
