"""Methods of context parallelism: how attention sees keys of a sequence that is cut over ranks.

gather            every rank gathers keys and values of the whole sequence
ring              keys and values travel from rank to rank while attention works on those that are there
ulysses           ranks exchange parts of the sequence for parts of the heads, and back behind attention
ulysses2xring4    ulysses over 2 neighbours, a ring (or gather) over the 4 groups of them, with cp=8
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from autoplan.errors import PinError

INNER = ("gather", "ring")  # in the order in which they are tried


@dataclass(frozen=True, slots=True)
class ContextMethod:
    """One method: `ulysses` ranks exchange heads; over `ranks` groups of them keys go by `inner` (ring or gather)."""

    ulysses: int = 1
    inner: str = ""
    ranks: int = 1

    @property
    def name(self) -> str:
        """As it is pinned."""
        if self.ulysses == 1:
            return self.inner
        return f"ulysses{self.ulysses}x{self.inner}{self.ranks}" if self.inner else "ulysses"

    @property
    def is_product(self) -> bool:
        """True if the axis of context parallelism is two: groups, and neighbours."""
        return self.ulysses > 1 and self.ranks > 1

    def heads_obstacle(self, heads: int, kv: int) -> str | None:
        """Why local heads of queries and of keys cannot be spread over the ranks of ulysses, or None if they can.

        Fewer key-value heads are repeated, where that gives every rank the one that its query heads need.
        """
        u = self.ulysses
        if heads % u:
            return f"{u} ranks of ulysses do not divide the {heads} attention heads of a rank"
        if kv % u and u % kv:
            return f"{u} ranks of ulysses neither divide the {kv} key-value heads of a rank nor are a multiple of them"
        return None

    def repeats(self, kv: int) -> int:
        """How often every key-value head is sent."""
        return self.ulysses // kv if kv % self.ulysses else 1


def methods(cp: int) -> tuple[ContextMethod, ...]:
    """All methods over `cp` ranks."""
    if cp == 1:
        return ()
    alone = (ContextMethod(1, inner, cp) for inner in INNER)
    products = (ContextMethod(u, inner, cp // u) for u in range(2, cp // 2 + 1) if cp % u == 0 for inner in INNER)
    return (*alone, ContextMethod(cp), *products)


def read_method(name: object, cp: int) -> ContextMethod:
    """The method of a name over `cp` ranks. PinError names those that there are."""
    inner = "|".join(INNER)
    if not isinstance(name, str) or not re.fullmatch(rf"{inner}|ulysses|ulysses\d+x({inner})\d+", name):
        raise PinError(
            f"context_method={name!r} is not known; use {', '.join(INNER)}, ulysses, or a product such as "
            "ulysses2xring2",
            ("context_method",),
        )
    for method in methods(cp):
        if method.name == name:
            return method
    raise PinError(f"context_method={name!r} does not make cp={cp}", ("context_method", "cp"))


def read_methods(text: str) -> str | dict[str, str]:
    """Of context parallelism: `ring`, or by block `layer=ring,layer1=ulysses`."""
    if "=" not in text:
        return text
    out: dict[str, str] = {}
    for part in text.split(","):
        block, equals, name = (piece.strip() for piece in part.partition("="))
        if not equals or not block or not name or block in out:
            raise PinError(f"--context-method {text}: {part!r} is not BLOCK=METHOD, each block once")
        out[block] = name
    return out


def methods_text(given: str | Mapping[str, str]) -> str:
    """`ring`, or by block `layer=ring,layer1=ulysses` where they differ."""
    if isinstance(given, str):
        return given
    names = set(given.values())
    return names.pop() if len(names) == 1 else ",".join(f"{block}={name}" for block, name in sorted(given.items()))
