"""What a rule of legality is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from autoplan.config.parallel import ParallelConfig
from autoplan.program.facts import Facts


class Scope(IntEnum):
    """Who keeps a rule: whoever asks with its scope or a wider one.

    PRICED: every command, since what breaks it has no price. SEARCHED: plan and what-ifs, too; `estimate` prices it.
    EXECUTED: only what the runtime is to run.
    """

    PRICED = 0
    SEARCHED = 1
    EXECUTED = 2


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        name: what candidates that break it are counted under.
        names: the choices that it reads, the one to change first in front; `global_batch_size`, `seq_len` and
            `target_len` are of the run.
        broken: why a configuration breaks it, or None; begins with `name=value` where one choice is at fault.
        scope: see Scope.
        priced: of a rule that only limits what is executed: what is priced all the same, for reports; "": the reason.
    """

    name: str
    names: tuple[str, ...]
    broken: Callable[[ParallelConfig, Facts], str | None]
    scope: Scope = Scope.PRICED
    priced: str = ""


@dataclass(frozen=True)
class Broken:
    """A rule, and why a configuration breaks it."""

    rule: Rule
    reason: str
