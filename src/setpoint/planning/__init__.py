"""Pure arithmetic about memory and time, shared by start-up, advice and simulation. No I/O, no
clock, no torch."""
