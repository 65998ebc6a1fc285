"""What a rank knows of the state of the others: failures, ends, and what they were last seen to do."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


class NewsKind(enum.Enum):
    """How a rank failed, or what speaks for it."""

    RAISED = "raised"  # an exception there, which it reported itself
    GONE = "gone"  # there is no such process any more, and it said nothing
    EXITED = "exited"  # it said that it ends: the end of its script, or sys.exit
    SILENT = "silent"  # its machine lets connections in or not, but nothing answers
    LATE = "late"  # it lives and does something else, while the others wait
    UNKNOWN = "unknown"


# The order in which evidence counts. A rank that exits is a failure only where another waited for it in vain.
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
    """That `ranks` failed, and how. `reason`: with "it" for a single rank as subject, else "they"."""

    ranks: tuple[int, ...]
    kind: NewsKind
    reason: str

    def to_plain(self) -> dict[str, Any]:
        """The news as JSON can say them."""
        return {"ranks": list(self.ranks), "kind": self.kind.value, "reason": self.reason}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> News:
        """The news that `to_plain` wrote."""
        return cls(tuple(plain["ranks"]), NewsKind(plain["kind"]), plain["reason"])


class Knowledge:
    """Everything heard of other ranks so far; used from several threads.

    Attributes:
        left: ranks that took leave because another failed: their silence says nothing.
        reached: hosts from which a rank has answered, so that a refused connection means that a process is gone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._news: list[News] = []
        self._seen: dict[int, tuple[float, str]] = {}
        self.left: set[int] = set()
        self.reached: set[str] = set()

    def add(self, news: News) -> None:
        """Take note of news, unless the same ranks are known to have failed."""
        with self._lock:
            if all(news.ranks != known.ranks for known in self._news):
                self._news.append(news)

    def first(self, *, exits: bool) -> News | None:
        """The news that explain a broken collective: of the strongest evidence the earliest. `exits`: ends count."""
        with self._lock:
            found = [n for n in self._news if exits or n.kind is not NewsKind.EXITED]
            return min(found, key=lambda n: _WEIGHT[n.kind], default=None)

    def explains(self, rank: int) -> bool:
        """Whether it is known why `rank` does not answer."""
        with self._lock:
            return rank in self.left or any(rank in news.ranks for news in self._news)

    def see(self, rank: int, doing: str) -> None:
        """Take note of what a rank just answered."""
        with self._lock:
            self._seen[rank] = time.monotonic(), doing

    def last_seen(self, rank: int) -> tuple[float, str] | None:
        """Seconds since `rank` last answered, and what it did then; None if it never did."""
        with self._lock:
            seen = self._seen.get(rank)
        return None if seen is None else (time.monotonic() - seen[0], seen[1])

    def to_plain(self) -> dict[str, Any]:
        """News and leaves, as parts of a question or an answer."""
        with self._lock:
            return {"news": [news.to_plain() for news in self._news], "left": sorted(self.left)}

    def learn(self, plain: Mapping[str, Any]) -> None:
        """Take note of what another rank knows."""
        for news in plain.get("news", ()):
            self.add(News.from_plain(news))
        self.leave(plain.get("left", ()))

    def leave(self, ranks: Iterable[int]) -> None:
        """Take note of ranks that end because of the failure of another."""
        with self._lock:
            self.left.update(ranks)
