"""Constrained decoding: the automata that say which tokens an output may continue with, behind
``core.grammar``. Works on texts of constraints, token ids and masks; imports no torch."""
