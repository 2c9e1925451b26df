"""What a rewritten schema does not enforce."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from setpoint.core.excerpt import excerpt

MAX_NAMED = 8
"""Most keywords that a message names."""
MAX_PATH = 120


class SchemaKeyword(NamedTuple):
    """A keyword in the document, for the client."""

    keyword: str
    path: str
    """JSON pointer of the keyword."""


@dataclass(slots=True)
class LossReport:
    lost: dict[SchemaKeyword, None] = field(default_factory=dict)
    """Demands that no grammar can enforce, in the order in which they were met."""
    too_large: dict[SchemaKeyword, None] = field(default_factory=dict)
    """Demands that are not enforced because rewriting the whole schema would exceed the limits."""

    def lose(self, sources: Iterable[SchemaKeyword]) -> None:
        self.lost.update(dict.fromkeys(sources))

    def add(self, other: LossReport) -> None:
        """Add what another schema's report says."""
        self.lost |= other.lost
        self.too_large |= other.too_large

    @property
    def warnings(self) -> list[str]:
        """What the client is told about its schema."""
        found = []
        if self.lost:
            found.append(
                f"No grammar can enforce {_listed(self.lost)} of the JSON schema, so the answer may"
                " violate that part of it."
            )
        if self.too_large:
            found.append(
                "The JSON schema is too large for this server to enforce"
                f" {_listed(self.too_large)}, so the answer may violate that part of it."
            )
        return found

    @property
    def unenforced(self) -> str:
        """Which demands are not enforced, and why, as a clause; "" if all are."""
        clauses = []
        if self.lost:
            clauses.append(f"no grammar can enforce {_listed(self.lost)}")
        if self.too_large:
            clauses.append(
                f"the schema is too large for this server to enforce {_listed(self.too_large)}"
            )
        return ", and ".join(clauses)


def _listed(sources: Iterable[SchemaKeyword]) -> str:
    """Demands as a list for a sentence."""
    words = [f"'{each.keyword}' at {excerpt(each.path, MAX_PATH)}" for each in sources]
    more = len(words) - MAX_NAMED
    return ", ".join(words[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
