"""Every option declared once, parsed once, resolved once with reasons. Knows no device and no model
but through plain data."""
