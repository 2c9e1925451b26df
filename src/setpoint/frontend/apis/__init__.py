"""The HTTP APIs that a server speaks, one folder for each dialect: its routes, bodies, replies and
errors."""
