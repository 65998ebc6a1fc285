"""The parts of a section of a page: figures, tables, facts, words and code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True)
class FigureBlock:
    """A figure: the data of plotly, with its title, which is also its text for who cannot see it."""

    kind: ClassVar[str] = "figure"
    title: str
    spec: Mapping[str, Any]
    height: int = 360  # pixels


@dataclass(frozen=True)
class TableBlock:
    """A table of texts. The first `left` columns are words, and the last one if `ends_in_words`; others are numbers.

    Attributes:
        names: the words of the left columns are names, which are not broken.
        cards: whether a phone shows every row as a card; None: where words take the width of the table.
    """

    kind: ClassVar[str] = "table"
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1
    ends_in_words: bool = False
    note: str = ""
    names: bool = False
    cards: bool | None = None

    @property
    def as_cards(self) -> bool:
        """Return True if a phone shows every row as a card."""
        return self.cards if self.cards is not None else self.ends_in_words or self.left == len(self.heads)

    @property
    def has_names(self) -> bool:
        """Return True if the first column of a card needs its head: several columns together name a row."""
        return self.ends_in_words and (self.left > 1 or self.names)

    @property
    def styles(self) -> tuple[str, ...]:
        """The style of every column: `w` for words, `n` for names, `w l` for a text that ends a row."""
        last, own = len(self.heads) - 1, "n" if self.names else "w"
        ends = "w l" if self.ends_in_words else own if last < self.left else ""
        return (*(own if k < self.left else "" for k in range(last)), ends)


@dataclass(frozen=True)
class Fact:
    """One figure of the answer in large letters, with what stands under it."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class FactsBlock:
    """Figures of the answer side by side."""

    kind: ClassVar[str] = "facts"
    facts: Sequence[Fact]


@dataclass(frozen=True)
class WordsBlock:
    """A paragraph. `state`: `good`, `bad`, or nothing."""

    kind: ClassVar[str] = "words"
    text: str
    state: str = ""


@dataclass(frozen=True)
class CodeBlock:
    """A text to copy. `folded`: it is shown only when it is opened."""

    kind: ClassVar[str] = "code"
    title: str
    text: str
    notes: Sequence[str] = ()
    folded: bool = False


PageBlock = FigureBlock | TableBlock | FactsBlock | WordsBlock | CodeBlock


@dataclass(frozen=True)
class Section:
    """A titled part of a page."""

    title: str
    blocks: Sequence[PageBlock]
    about: str = ""
    anchor: str = field(default="")
