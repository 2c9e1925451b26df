"""The HTTP APIs of a server, with one folder for each dialect: its routes, bodies, replies and
errors."""
