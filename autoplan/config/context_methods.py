"""Methods of context parallelism: how attention reads the keys of a sequence that is sharded over ranks.

gather            every rank gathers the keys and values of the whole sequence
ring              keys and values travel from rank to rank while attention works on the keys that have arrived
ulysses           ranks exchange sequence shards for head shards before attention, and back after it
ulysses2xring4    ulysses over 2 neighbours, ring (or gather) over the 4 groups of neighbours, with cp=8
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autoplan.errors import PinError

GATHER, RING, ULYSSES = "gather", "ring", "ulysses"
INNER = (GATHER, RING)  # in the order in which they are tried


@dataclass(frozen=True, slots=True)
class ContextMethod:
    """One method of context parallelism.

    Attributes:
        ulysses: The number of neighbouring ranks that exchange heads.
        inner: How keys reach the `ranks` groups of such neighbours: "ring", "gather", or "" for ulysses alone.
        ranks: The number of groups.
    """

    ulysses: int = 1
    inner: str = ""
    ranks: int = 1

    @property
    def name(self) -> str:
        """The name under which the method is pinned."""
        if self.ulysses == 1:
            return self.inner
        return f"ulysses{self.ulysses}x{self.inner}{self.ranks}" if self.inner else "ulysses"

    @property
    def is_ring(self) -> bool:
        """True if keys travel while attention works on those that have arrived, in as many steps as there are ranks."""
        return self.inner == RING

    @property
    def is_product(self) -> bool:
        """True if the context-parallel axis is a product of two: groups, and neighbours inside a group."""
        return self.ulysses > 1 and self.ranks > 1

    def heads_obstacle(self, heads: int, kv: int) -> str | None:
        """Return the reason why a rank's heads cannot be spread over the ranks of ulysses, or None if they can.

        Key-value heads fewer than the ulysses ranks are repeated if every rank then gets the one that its query heads
        need.

        Args:
            heads: Query heads on the rank.
            kv: Key-value heads on the rank.
        """
        u = self.ulysses
        if heads % u:
            return f"{u} ranks of ulysses do not divide the {heads} attention heads of a rank"
        if kv % u and u % kv:
            return f"{u} ranks of ulysses neither divide the {kv} key-value heads of a rank nor are a multiple of them"
        return None

    def repeats(self, kv: int) -> int:
        """Return how many times each key-value head is sent."""
        return self.ulysses // kv if kv % self.ulysses else 1


def methods(cp: int) -> tuple[ContextMethod, ...]:
    """Return all methods over `cp` ranks."""
    if cp == 1:
        return ()
    alone = (ContextMethod(1, inner, cp) for inner in INNER)
    products = (ContextMethod(u, inner, cp // u) for u in range(2, cp // 2 + 1) if cp % u == 0 for inner in INNER)
    return (*alone, ContextMethod(cp), *products)


def read_method(name: object, cp: int) -> ContextMethod:
    """Return the method with this name over `cp` ranks. Raises PinError that lists the known names."""
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
    raise PinError(f"context_method={name!r} is not a method over cp={cp} ranks", ("context_method", "cp"))


def read_methods(text: str) -> str | dict[str, str]:
    """Parse context-parallel methods: one name (`ring`), or one per block (`layer=ring,layer1=ulysses`)."""
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
    """Return the methods as text: one name if all blocks share it, else `layer=ring,layer1=ulysses`."""
    if isinstance(given, str):
        return given
    names = set(given.values())
    return names.pop() if len(names) == 1 else ",".join(f"{block}={name}" for block, name in sorted(given.items()))


def neighbours_of(names: Iterable[str], cp: int) -> int:
    """Return the ranks of Ulysses in the products among these methods; 1 if there is none."""
    return next((m.ulysses for m in (read_method(n, cp) for n in names) if m.is_product), 1)
