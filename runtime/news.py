"""A rank's knowledge of the other ranks: failures, ends, and what they were last seen doing."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


class NewsKind(enum.Enum):
    """The failure of a rank, as far as the evidence goes."""

    RAISED = "raised"  # it raised an exception and reported it
    GONE = "gone"  # its process is gone without a report
    EXITED = "exited"  # it reported its end: the end of its script, or sys.exit
    SILENT = "silent"  # nothing answers, whether or not its machine accepts connections
    LATE = "late"  # it lives and does something else while the others wait
    UNKNOWN = "unknown"


# The strength of evidence, strongest first. A rank that exits is a failure only if another waited for it in vain.
_WEIGHT = {
    NewsKind.RAISED: 0,
    NewsKind.GONE: 0,
    NewsKind.SILENT: 1,
    NewsKind.LATE: 2,
    NewsKind.EXITED: 3,
    NewsKind.UNKNOWN: 4,
}


@dataclass(frozen=True)
class News:
    """The report that `ranks` failed. `reason`: the rest of a sentence, with "it" for a single rank, else "they"."""

    ranks: tuple[int, ...]
    kind: NewsKind
    reason: str

    def to_plain(self) -> dict[str, Any]:
        """Return the news as plain JSON data."""
        return {"ranks": list(self.ranks), "kind": self.kind.value, "reason": self.reason}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> News:
        """Return the news that `to_plain` wrote."""
        return cls(tuple(plain["ranks"]), NewsKind(plain["kind"]), plain["reason"])


class Knowledge:
    """Everything heard of other ranks so far; used from several threads.

    Attributes:
        left: ranks that left because another failed: their silence proves nothing.
        reached: hosts from which a rank has answered: from them a refused connection means that a process is gone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._news: list[News] = []
        self._seen: dict[int, tuple[float, str]] = {}
        self.left: set[int] = set()
        self.reached: set[str] = set()

    def add(self, news: News) -> None:
        """Record news, unless the same ranks are already known to have failed."""
        with self._lock:
            if all(news.ranks != known.ranks for known in self._news):
                self._news.append(news)

    def first(self, *, exits: bool) -> News | None:
        """Return the earliest of the news with the strongest evidence, which explain a broken collective. `exits`:
        count ends.
        """
        with self._lock:
            found = [n for n in self._news if exits or n.kind is not NewsKind.EXITED]
            return min(found, key=lambda n: _WEIGHT[n.kind], default=None)

    def explains(self, rank: int) -> bool:
        """Return True if it is known why `rank` does not answer."""
        with self._lock:
            return rank in self.left or any(rank in news.ranks for news in self._news)

    def see(self, rank: int, doing: str) -> None:
        """Record a rank's latest answer."""
        with self._lock:
            self._seen[rank] = time.monotonic(), doing

    def last_seen(self, rank: int) -> tuple[float, str] | None:
        """Return (seconds since `rank` last answered, what it did then); None if it never answered."""
        with self._lock:
            seen = self._seen.get(rank)
        return None if seen is None else (time.monotonic() - seen[0], seen[1])

    def to_plain(self) -> dict[str, Any]:
        """Return news and leaving ranks as plain data, for a question or an answer."""
        with self._lock:
            return {"news": [news.to_plain() for news in self._news], "left": sorted(self.left)}

    def learn(self, plain: Mapping[str, Any]) -> None:
        """Record what another rank knows."""
        for news in plain.get("news", ()):
            self.add(News.from_plain(news))
        self.leave(plain.get("left", ()))

    def leave(self, ranks: Iterable[int]) -> None:
        """Record ranks that end because of the failure of another."""
        with self._lock:
            self.left.update(ranks)
