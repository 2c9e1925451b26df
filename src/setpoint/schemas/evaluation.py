"""Which properties and items count as evaluated, for unevaluatedProperties and unevaluatedItems."""

from __future__ import annotations

from dataclasses import replace

from setpoint.schemas.atoms import Arrays, Atom, Objects, Shape, Source, Values
from setpoint.schemas.states import State, both, either


def unseen(shape: Shape) -> Shape:
    """The shape of a schema that evaluates nothing."""
    return {kind: tuple(map(_unseen, atoms)) for kind, atoms in shape.items()}


def _unseen(atom: Atom) -> Atom:
    if isinstance(atom, Objects):
        nothing = frozenset[str]()
        return replace(atom, seen_names=nothing, seen_patterns=nothing, seen_all=False)
    if isinstance(atom, Arrays):
        return replace(atom, seen_prefix=0, seen_all=False, seen_states=frozenset())
    return atom


def only_evaluated(shape: Shape, keyword: str, state: State, source: Source) -> Shape:
    """The values of a shape whose properties (or items) are evaluated, or of the state."""
    kind, apply = (
        ("object", _properties) if keyword == "unevaluatedProperties" else ("array", _items)
    )
    return {
        own: tuple(apply(atom, state, source) for atom in atoms) if own == kind else atoms
        for own, atoms in shape.items()
    }


def _is_unknown(atom: Atom) -> bool:
    """Whether a schema that is not known may have evaluated more."""
    return any(source.keyword in ("$ref", "$dynamicRef") for source in atom.lost)


def _properties(atom: Atom, state: State, source: Source) -> Atom:
    if isinstance(atom, Values) or _is_unknown(atom):
        return replace(atom, lost=atom.lost | {source})
    if not isinstance(atom, Objects) or atom.seen_all:
        return atom
    return replace(
        atom,
        names=tuple(
            (name, own if name in atom.seen_names else both(own, state)) for name, own in atom.names
        ),
        patterns=tuple(
            (each, own if each.pattern in atom.seen_patterns else both(own, state))
            for each, own in atom.patterns
        ),
        rest=both(atom.rest, state),
        seen_all=True,
        is_open=True,
    )


def _items(atom: Atom, state: State, source: Source) -> Atom:
    if isinstance(atom, Values) or _is_unknown(atom):
        return replace(atom, lost=atom.lost | {source})
    if not isinstance(atom, Arrays) or atom.seen_all:
        return atom
    allowed = either((state, *atom.seen_states))
    return replace(
        atom,
        prefix=tuple(
            own if index < atom.seen_prefix else both(own, allowed)
            for index, own in enumerate(atom.prefix)
        ),
        rest=both(atom.rest, allowed),
        seen_all=True,
    )
