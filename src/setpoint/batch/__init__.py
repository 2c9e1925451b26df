"""``setpoint batch``: reads a file of requests and writes a file of answers, with exactly one
answer per request."""
