"""The process that users start: it owns the port and the HTTP side, and starts, watches and ends
engines."""
