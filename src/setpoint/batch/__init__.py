"""``setpoint batch``: a file of requests in, a file of answers out, every request answered exactly
once."""
