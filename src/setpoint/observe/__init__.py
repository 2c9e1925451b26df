"""What the engine says about itself, made from the records of ``core.records`` alone: log lines
now."""
