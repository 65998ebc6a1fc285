"""Which configurations are legal: one tuple of rules with reasons, which estimate, plan and what-ifs keep alike.

    broken(config, facts, Scope.PRICED)           the first rule that a configuration breaks, and why; None: legal
    not_executed(config, facts)                   what of a legal configuration is priced, but not executed

A configuration is accepted or refused by all commands alike, but for what is priced and not executed: rules of a wider
scope than `Scope.PRICED`. `autoplan.search.degrees` enumerates by the same rules, each as soon as all it names is
decided, and `autoplan.search.nearest` tries what it suggests against them.

The rules by theme: devices (and stages), data (batch and sequences), experts (and copies of the sharded state), steps
(offload, schedules, recompute, the run). Values that no model makes legal are refused by the record of the choice.
"""

from __future__ import annotations

from collections.abc import Callable

from autoplan.config.choice import Choice
from autoplan.config.choices import CHOICES
from autoplan.config.parallel import ParallelConfig
from autoplan.errors import PinError
from autoplan.program.facts import Facts
from autoplan.program.legality import data, devices, experts, steps
from autoplan.program.legality.experts import zero_replica_counts
from autoplan.program.legality.rule import Broken, Rule, Scope

__all__ = ["RULES", "VALUES", "Broken", "Rule", "Scope", "broken", "check", "not_executed", "zero_replica_counts"]


def _value(record: Choice) -> Callable[[ParallelConfig, Facts], str | None]:
    def found(c: ParallelConfig, f: Facts) -> str | None:
        value = getattr(c, record.name)
        return None if value is None or value == () else record.reason(value)

    return found


# What a search need not try: pins are refused where they enter, and it enumerates nothing else.
VALUES: tuple[Rule, ...] = tuple(Rule(f"no {c.name} of any plan", (c.name,), _value(c)) for c in CHOICES)
RULES: tuple[Rule, ...] = (*devices.RULES, *data.RULES, *experts.RULES, *steps.RULES)


def broken(config: ParallelConfig, facts: Facts, scope: Scope) -> Broken | None:
    """The first rule of those that are kept in `scope` that a configuration breaks; None: it is legal."""
    for rule in (*VALUES, *RULES):
        if rule.scope <= scope:
            reason = rule.broken(config, facts)
            if reason is not None:
                return Broken(rule, reason)
    return None


def check_legal(config: ParallelConfig, facts: Facts, scope: Scope) -> None:
    """Raise PinError, without a suggestion (see `autoplan.search.nearest`), for a configuration that breaks a rule."""
    found = broken(config, facts, scope)
    if found is not None:
        raise PinError(found.reason, found.rule.names)


def not_executed(config: ParallelConfig, facts: Facts) -> tuple[str, ...]:
    """Why autoplan's own runtime does not execute a configuration that has a price; nothing if it does."""
    out = []
    for rule in RULES:
        reason = rule.broken(config, facts) if rule.scope > Scope.PRICED else None
        if reason is not None:
            out.append(rule.priced or reason)
    return tuple(dict.fromkeys(out))
