"""Pure arithmetic about memory and time, used for start-up, advice and simulation. No I/O, no
clock, no torch."""
