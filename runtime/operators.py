"""Operators of our own in the graph of a compiled block: what a compiler must not see inside."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch


class Operator(NamedTuple):
    """An operator. `like`: returns empty results of the right shapes, in a trace."""

    schema: str
    run: Callable[..., Any]
    like: Callable[..., Any]


def define_operators(namespace: str, operators: Iterable[Operator]) -> torch.library.Library:
    """Define operators `torch.ops.<namespace>.<name>`. They live as long as the library that is returned.

    A result has the strides that `like` gives it, and shares no memory with an argument.
    """
    library = torch.library.Library(namespace, "DEF")  # type: ignore[no-untyped-call]
    for schema, run, like in operators:
        name = schema.partition("(")[0]
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
        library.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"{namespace}::{name}", like, lib=library)
    return library
