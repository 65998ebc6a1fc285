"""Operators that stand in a captured graph for what capture keeps whole: `autoplan.ops` says what each becomes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("autoplan", "FRAGMENT")  # type: ignore[no-untyped-call]


def marker(schema: str, like: Callable[..., object]) -> None:
    """Define an operator `torch.ops.autoplan...` of this schema. It is traced, and cannot be run.

    Args:
        like: returns tensors with the shapes and dtypes of the results.
    """

    def run(*given: Any, **named: Any) -> None:
        raise RuntimeError(f"autoplan::{name} is a capture marker and cannot be run")

    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"autoplan::{name}", like, lib=_LIBRARY)


def empty_like_each(xs: list[torch.Tensor], *_: object) -> list[torch.Tensor]:
    """Return tensors with the shapes and dtypes of these."""
    return [torch.empty_like(x) for x in xs]
