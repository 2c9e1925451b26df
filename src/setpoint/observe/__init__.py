"""What the engine reports about itself: log lines and figures, made from the records of
``core.records`` alone."""
