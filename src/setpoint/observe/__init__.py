"""What the engine says about itself, made from the records of ``core.stats`` alone: log lines
now."""
