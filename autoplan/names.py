"""Names of models, devices and instances as people write them.

`matching` is the one rule: the name itself, else the same name in other letters ("Llama_3.1-8B"), else all names that
begin so ("llama-3.1-8"), else the same two without the signs between them ("llama3.1-8b", "llama3.1:8b", "H100SXM"). A
beginning ends no number early (H20 is not H200), and two numbers stay two (llama3-18b is not llama-3.1-8b). A name that
fits several is an error of its caller, who lists them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from importlib import resources

MTP = "mtp"  # what `@` adds to a model: layers that predict the tokens after the next


def mtp_model(model: str, num_layers: int) -> str:
    """Return the name of a model with layers for the tokens after the next: `deepseek-v3@mtp=1`."""
    return f"{model}@{MTP}={num_layers}"


def base_model(model: str) -> str:
    """Return the name of a model without what `@` adds to it."""
    return model.partition("@")[0]


def target_names() -> tuple[str, ...]:
    """Return the names of the frameworks that plans are exported to: the files of profiles/targets."""
    folder = resources.files("autoplan.profiles").joinpath("targets")
    return tuple(sorted(file.name.removesuffix(".json") for file in folder.iterdir()))


def plain_name(text: str) -> str:
    """Return a name in lower case, with `-` for `_` and spaces."""
    return "-".join(text.lower().replace("_", " ").split())


def matching(text: str, known: Iterable[str]) -> list[str]:
    """Return the names that `text` may mean, in the order of `known`; none if it means none of them."""
    names = list(known)
    if text in names:
        return [text]
    for form in (plain_name, _without_signs):
        written = form(text)
        found = [name for name in names if form(name) == written]
        found = found or [name for name in names if begins_with(form(name), written)]
        if found and written:
            return found
    return []


def same_letters(one: str, other: str) -> bool:
    """Return True if two names have the same letters and numbers, in any case."""
    return _without_signs(one) == _without_signs(other)


def begins_alike(text: str, part: str) -> bool:
    """Return True if a text begins with the letters and numbers of a part, in any case: `rtx-4090` with rtx4090."""
    return begins_with(_without_signs(text), _without_signs(part))


def begins_with(name: str, text: str) -> bool:
    """Return True if the name begins with the text and no number of it is cut: h100 begins h100-sxm, not h1000."""
    rest = name.removeprefix(text)
    return name.startswith(text) and not (text[-1:].isdigit() and rest[:1].isdigit())


def _without_signs(text: str) -> str:
    apart = re.sub("(?<=[0-9])[^a-z0-9]+(?=[0-9])", "-", text.lower())
    return re.sub("(?<![0-9])[^a-z0-9]|[^a-z0-9](?![0-9])", "", apart)


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
