"""The rules of legal configurations: one tuple of rules with reasons, which estimate, plan and what-ifs share.

    broken(config, facts, Scope.PRICED)           the first rule that a configuration breaks, and why; None: legal
    not_executed(config, facts)                   features of a legal configuration that are priced, but not executed

All commands accept or refuse a configuration alike, except where it is priced and not executed: such rules have a wider
scope than `Scope.PRICED`. `autoplan.search.degrees` enumerates by the same rules, each as soon as all its choices are
decided, and `autoplan.search.nearest` checks its suggestions against them. The record of a choice refuses values that
no model makes legal.

`data`: rules of the batch and its sequences.
`devices`: rules of the devices and of pipeline stages.
`experts`: rules of experts, and of copies of the state that ZeRO shards.
`rule`: the types of a rule, its scope, and a broken rule.
`stack`: rules of what the framework that runs the plan cannot do.
`steps`: rules of offload, schedules, recompute, and the run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from autoplan.config.choice import Choice
from autoplan.config.choices import CHOICES
from autoplan.config.parallel import ParallelConfig
from autoplan.config.pins import Pins
from autoplan.errors import PinError
from autoplan.program.facts import Facts
from autoplan.program.legality import data, devices, experts, stack, steps
from autoplan.program.legality.experts import zero_replica_counts
from autoplan.program.legality.rule import Broken, Rule, Scope

__all__ = [
    "RULES",
    "VALUES",
    "Broken",
    "Rule",
    "Scope",
    "broken",
    "check_legal",
    "check_pins",
    "not_executed",
    "zero_replica_counts",
]


def _value(record: Choice) -> Callable[[ParallelConfig, Facts], str | None]:
    def found(c: ParallelConfig, f: Facts) -> str | None:
        value = getattr(c, record.name)
        return None if value is None or (isinstance(value, tuple) and not value) else record.reason(value)

    return found


# A search need not try these: pins are checked where they enter, and it enumerates only legal values.
VALUES: tuple[Rule, ...] = tuple(Rule(f"no {c.name} of any plan", (c.name,), _value(c)) for c in CHOICES)
RULES: tuple[Rule, ...] = (*devices.RULES, *data.RULES, *experts.RULES, *steps.RULES, *stack.RULES)


def broken(config: ParallelConfig, facts: Facts, scope: Scope, changed: str | None = None) -> Broken | None:
    """Return the first rule in `scope` that a configuration breaks; None if it is legal.

    Args:
        changed: the one choice in which it differs from a legal configuration; other rules are not looked at.
    """
    for rule in _rules(scope, changed):
        reason = rule.broken(config, facts)
        if reason is not None:
            return Broken(rule, reason)
    return None


@cache
def _rules(scope: Scope, changed: str | None) -> tuple[Rule, ...]:
    some = (rule for rule in (*VALUES, *RULES) if rule.scope <= scope and not rule.of_pins)
    return tuple(rule for rule in some if changed is None or changed in rule.names)


def check_legal(config: ParallelConfig, facts: Facts, scope: Scope) -> None:
    """Raise PinError if a configuration breaks a rule, without a suggestion (see `autoplan.search.nearest`)."""
    found = broken(config, facts, scope)
    if found is not None:
        raise PinError(found.reason, found.rule.names)


def check_pins(pins: Pins, facts: Facts) -> None:
    """Raise PinError if pins break a rule that looks at nothing but them and the facts of the run."""
    for rule in RULES:
        reason = rule.broken(pins.config, facts) if rule.of_pins else None
        if reason is not None:
            raise PinError(reason, rule.names)


def not_executed(config: ParallelConfig, facts: Facts) -> tuple[str, ...]:
    """Return why autoplan's own runtime does not execute a configuration that has a price; empty if it does."""
    out = []
    for rule in RULES:
        reason = rule.broken(config, facts) if rule.scope > Scope.PRICED else None
        if reason is not None:
            out.append(rule.priced or reason)
    return tuple(dict.fromkeys(out))
