"""The types of a legality rule, its scope, and a broken rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from autoplan.config.parallel import ParallelConfig
from autoplan.program.facts import Facts


class Scope(IntEnum):
    """The commands that apply a rule: those with its scope or a wider one.

    PRICED: every command, since a configuration that breaks the rule has no price.
    SEARCHED: plan and what-ifs; `estimate` prices such a configuration.
    EXECUTED: only programs that the runtime is to run.
    """

    PRICED = 0
    SEARCHED = 1
    EXECUTED = 2


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        name: heading under which candidates that break it are counted.
        names: the choices that it reads, the one to change first in front; `global_batch_size`, `seq_len` and
            `target_len` belong to the run.
        broken: gives the reason why a configuration breaks it, or None; starts with `name=value` if one choice is at
            fault.
        scope: see Scope.
        of_pins: it looks at the pins as they are given, before open choices get values.
        priced: for a rule that only limits execution: the feature that is priced all the same, for reports; "" means
            the reason.
    """

    name: str
    names: tuple[str, ...]
    broken: Callable[[ParallelConfig, Facts], str | None]
    scope: Scope = Scope.PRICED
    of_pins: bool = False
    priced: str = ""


@dataclass(frozen=True)
class Broken:
    """A rule, and why a configuration breaks it."""

    rule: Rule
    reason: str
