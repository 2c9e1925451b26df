"""What a rewritten schema does not enforce, and where it allows less than the original."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from setpoint.core.excerpt import excerpt
from setpoint.schemas.atoms import Source

MAX_NAMED = 8
"""Most keywords that a message names."""
MAX_PATH = 120


@dataclass(slots=True)
class Report:
    lost: dict[Source, None] = field(default_factory=dict)
    """Demands that no grammar can enforce, in the order in which they were met."""
    too_large: dict[Source, None] = field(default_factory=dict)
    """Demands that are not enforced because rewriting the whole schema would exceed the limits."""
    narrowed: dict[Source, str] = field(default_factory=dict)
    """Demands that are enforced, but exclude more values than they should -> how."""

    def lose(self, sources: Iterable[Source]) -> None:
        self.lost.update(dict.fromkeys(sorted(sources)))

    def drop(self, sources: Iterable[Source]) -> None:
        self.too_large.update(dict.fromkeys(sorted(sources)))

    def add(self, other: Report) -> None:
        """Add what another schema's report says."""
        self.lost |= other.lost
        self.too_large |= other.too_large
        self.narrowed |= other.narrowed

    def narrow(self, source: Source, how: str) -> None:
        self.narrowed.setdefault(source, how)

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
        if self.narrowed:
            words = [f"{words_of(source)}: {how}" for source, how in self.narrowed.items()]
            found.append(
                "The grammar allows less than the JSON schema: "
                + "; ".join(dict.fromkeys(words[:MAX_NAMED]))
                + "."
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


def _listed(sources: Iterable[Source]) -> str:
    """Demands as a list for a sentence."""
    words = list(dict.fromkeys(map(words_of, sources)))
    more = len(words) - MAX_NAMED
    return ", ".join(words[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def words_of(source: Source) -> str:
    path = excerpt(source.path, MAX_PATH)
    if source.is_opposite:
        return f"the opposite of '{source.keyword}' at {path}"
    return f"'{source.keyword}' at {path}"
