"""This rank's view of the others: it asks them, answers them, and finds the cause of a broken collective."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autoplan.runtime import activity
from autoplan.runtime.news import Knowledge, News, NewsKind
from autoplan.runtime.peers import Address, Listener, Silence, ask, hops_of_news, told_by

# Seconds that telling others may delay a rank that ends.
TELL_S = 1.0
# Nearest ranks on either side that are told of a failure, besides some far ones (`told_by`). All of them pass it on.
_REACH = 8


@dataclass
class Ranks:
    """This rank's knowledge of all ranks of the default process group (made with `store`), and its own activity.

    Attributes:
        turn: number of groups that this process watched before.
        thread: the thread that calls autoplan.
        call: the call it is in, "" outside.
        since: when that call began.
        after: the previous call.
        ended: rank, reason and ranks of the failure that ended the collectives of this process.
        waits: True while it waits for another rank, in a collective that broke or outside of any.
        aborted: True once the communicators of this process were aborted because a rank failed: later results of
            collectives are worthless.
        made_here: True if autoplan made the process group, and so destroys it at the end.
        works_done: pieces of work that rank 0 did for the others.
        works_awaited: pieces of work that this rank waited for.
    """

    store: Any
    rank: int
    world: int
    timeout_s: float
    turn: int
    known: Knowledge = field(default_factory=Knowledge)
    addresses: dict[int, Address] = field(default_factory=dict)
    listener: Listener | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    thread: int = field(default_factory=threading.get_ident)
    call: str = ""
    since: float = 0.0
    after: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    waits: bool = False
    ended: tuple[int | None, str, tuple[int, ...]] | None = None
    aborted: bool = False
    made_here: bool = False
    works_done: int = 0
    works_awaited: int = 0

    def begin(self, call: str) -> None:
        """Record that this thread is in a call."""
        self.counts[call] = self.counts.get(call, 0) + 1
        self.thread, self.since = threading.get_ident(), time.monotonic()
        self.call = f"{call} {self.counts[call]}"

    def end(self) -> None:
        """Record that the call is over."""
        self.after, self.call = self.call, ""

    @property
    def others(self) -> dict[int, Address]:
        """The addresses of the other ranks."""
        return {r: a for r, a in self.addresses.items() if r != self.rank}

    def doing(self) -> str:
        """Return the present activity of this rank, as text."""
        return self.where(activity.of_thread(self.thread))

    def where(self, place: activity.StackPlace) -> str:
        """Return this rank's call and the place in it, or its place outside of calls, as text."""
        if self.call:
            return f"in {self.call} ({place})" if str(place) else f"in {self.call}"
        at = f" at {place.line}" if place.line else ""
        return f"outside autoplan's calls{at}, after {self.after or 'the start'}"

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to another rank's question."""
        self.known.learn(question)
        found = {"works_done": self.works_done, **self.known.to_plain()}
        if not question.get("brief"):
            found["doing"] = self.doing()
            found["waits"] = self.waits or bool(activity.of_thread(self.thread).collective)
        return found

    def ask(
        self, ranks: Mapping[int, Address], timeout_s: float, brief: bool = False
    ) -> dict[int, dict[str, Any] | Silence]:
        """Ask ranks; a refused connection counts only if a rank of that host has ever answered.

        `brief`: do not ask for their activity, which reads the stack of a running thread; for frequent questions by
        many ranks.
        """
        found = ask(ranks, {**self.known.to_plain(), "brief": brief}, timeout_s)
        for rank, answer in found.items():
            if not isinstance(answer, Silence):
                self.known.reached.add(ranks[rank].host)
                self.known.learn(answer)
                if not brief:
                    self.known.see(rank, answer["doing"])
            elif ranks[rank].host not in self.known.reached:
                found[rank] = Silence.NO_ANSWER
        return found

    def tell(self) -> None:
        """Tell others what this rank knows."""
        others = told_by(self.rank, self.world, _REACH)
        ask({r: self.addresses[r] for r in others if r not in self.known.left}, self.known.to_plain(), TELL_S)

    @property
    def hops(self) -> int:
        """The number of times that a failure is told until all ranks know of it, if each passes it on."""
        return hops_of_news(self.world, _REACH)

    def find_out(self, grace_s: float) -> News:
        """Return the cause of a broken collective: a report, else a conclusion from the answers of the others.

        Certain evidence (a report, a process that is gone) decides at once, silence after `grace_s` seconds.
        """
        self.waits = True
        begin = time.monotonic()
        late: list[int] | None = None
        heard: dict[int, dict[str, Any]] = {}
        while True:
            news = self.known.first(exits=False)
            if news is not None:
                return news
            # itself too: its own answer means that it has read everything the others told it before they ended
            left_s = begin + grace_s - time.monotonic()
            answers = self.ask(self.addresses, max(0.3, min(left_s, 2.0)))
            news = self.known.first(exits=False)
            if news is not None:
                return news
            del answers[self.rank]
            gone = [r for r, a in answers.items() if a is Silence.GONE and not self.known.explains(r)]
            if gone:
                return self.note_gone(gone)
            news = self.known.first(exits=True)
            if news is not None:
                return news
            heard.update((r, a) for r, a in answers.items() if not isinstance(a, Silence))
            # one answer per rank is enough: on a busy machine the next may take long
            silent = self._not_left(r for r in answers if r not in heard)
            if silent and left_s < 0:
                return self._note_silent(silent, grace_s)
            if silent:
                time.sleep(0.02)
                continue
            lives = {r: heard[r] for r in self._not_left(heard)}
            elsewhere = [r for r, a in lives.items() if not a["waits"]]
            if elsewhere == late:  # twice, so they are not just between two collectives
                return self._note_late(elsewhere, lives)
            late = elsewhere
            time.sleep(0.5)

    def _not_left(self, ranks: Iterable[int]) -> list[int]:
        """Return the ranks that have not left because of another's failure."""
        return [r for r in ranks if r not in self.known.left]

    def note_gone(self, ranks: list[int]) -> News:
        """Record that the processes of these ranks are gone."""
        whose = "its process is" if len(ranks) == 1 else "their processes are"
        reason = f"{whose} gone without a word: killed, out of memory, crashed or os._exit{self.last(*ranks)}"
        return self._note(ranks, NewsKind.GONE, reason)

    def _note_silent(self, ranks: list[int], silent_s: float) -> News:
        one = len(ranks) == 1
        cause = "its process is stopped, or its machine" if one else "stopped, or the machine"
        verb = "does" if one else "do"
        reason = f"{verb} not answer for {silent_s:.0f} s: {cause} hangs{self.last(*ranks)}"
        return self._note(ranks, NewsKind.SILENT, reason)

    def _note_late(self, ranks: list[int], lives: Mapping[int, Mapping[str, Any]]) -> News:
        if not ranks:
            each = "; ".join(f"rank {r} {a['doing']}" for r, a in lives.items())
            return News((), NewsKind.UNKNOWN, f"a collective broke though every rank is alive and waits: {each}")
        each = "; ".join(str(lives[r]["doing"]) for r in ranks)
        reason = f"alive, but did not come to the collective in which others wait: {each}"
        return self._note(ranks, NewsKind.LATE, reason)

    def _note(self, ranks: list[int], kind: NewsKind, reason: str) -> News:
        news = News(tuple(ranks), kind, reason)
        self.known.add(news)
        return news

    def last(self, *ranks: int) -> str:
        """Return when these ranks were last heard and what they did then, as the end of a sentence."""
        seen = {r: found for r in ranks if (found := self.known.last_seen(r)) is not None and found[1]}
        return "".join(f"; last heard {seconds:.1f} s before, {doing}" for seconds, doing in seen.values())
