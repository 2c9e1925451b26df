"""How much work a schema may take, and what is raised where it is more."""

from __future__ import annotations

MAX_STEPS = 100_000
"""Most steps of work for one schema, each some ten microseconds."""
MAX_ATOMS = 256
"""Most alternatives of one type at one place."""
PRUNED_FROM = 4
"""The number of alternatives from which on those that nothing satisfies are looked for."""
MAX_VALUES = 64
"""Most values of a state that is listed value by value."""


class TooLargeError(Exception):
    """The schema takes too much work."""


class TooManyError(Exception):
    """One place has too many alternatives."""


class LoopError(Exception):
    """A schema is asked for while it is being expanded."""
