"""The kinds of choices of layouts, by name: `store layer/up.weight`, `boundary layer/hidden`, `layer/up` (an op)."""

from __future__ import annotations

from enum import StrEnum


class ChoiceKind(StrEnum):
    """What a choice decides besides the strategy of an op, whose name is BLOCK/NODE without a word before it."""

    STORE = "store"  # how a parameter is stored
    BUFFER = "buffer"  # a buffer, which has one layout
    BOUNDARY = "boundary"  # a value that one block hands to another

    def name_of(self, subject: str) -> str:
        """Return the name of the choice of this kind for a subject."""
        return f"{self} {subject}"

    def subject_of(self, name: str) -> str | None:
        """Return the subject of the choice with this name; None if the choice is of another kind."""
        kind, _, subject = name.partition(" ")
        return subject if kind == self else None


def is_strategy(name: str) -> bool:
    """Return True if the choice with this name is the strategy of an op."""
    return all(kind.subject_of(name) is None for kind in ChoiceKind)
