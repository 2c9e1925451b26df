"""Says what limits a server and what to change. Reads what servers tell about themselves; never
reaches into one."""
