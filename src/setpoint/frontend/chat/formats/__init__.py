"""How families of models write tool calls and reasoning: one file for each, found by name."""
