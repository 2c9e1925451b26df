"""Pure arithmetic about memory, used for start-up, advice and simulation. No I/O, no clock, no
torch."""
