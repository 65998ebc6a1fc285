"""Names of models, devices and instances as people write them.

`matching` is the one rule: the name itself, else the same name in other letters ("Llama_3.1-8B"), else all names that
begin so ("llama-3.1-8"). A name that fits several is an error of its caller, who lists them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def plain_name(text: str) -> str:
    """Return a name in lower case, with `-` for `_` and spaces."""
    return "-".join(text.lower().replace("_", " ").split())


def matching(text: str, known: Iterable[str]) -> list[str]:
    """Return the names that `text` may mean, in the order of `known`; none if it means none of them."""
    names, written = list(known), plain_name(text)
    if text in names:
        return [text]
    same = [name for name in names if plain_name(name) == written]
    return same or [name for name in names if written and plain_name(name).startswith(written)]


def one_of(candidates: Iterable[str]) -> str:
    """Return the end of an error about a name that fits several: `may be a, b or c; write one of them`."""
    *most, last = candidates
    return f"may be {', '.join(most)} or {last}; write one of them"


def did_you_mean(name: object, known: Iterable[str], most: int | None = None) -> str:
    """Return the end of an error about an unknown name: `did you mean 'a'? known: a, b`.

    Args:
        most: The number of known names to list at most. None: all.
    """
    names, text = list(known), str(name)
    near = [k for k in names if text and k.startswith(text)] or difflib.get_close_matches(text, names, 1)
    listed = names if most is None or len(names) <= most else [*names[:most], "..."]
    return f"{f'did you mean {near[0]!r}? ' if near else ''}known: {', '.join(listed)}"
