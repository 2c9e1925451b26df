"""Several models behind one port, of which only some are loaded at a time."""
