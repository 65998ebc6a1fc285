"""The nearest legal choices: candidates ordered by distance, each checked before a refusal names it.

First one choice is changed, those of the broken rule before the others; then two at once; then a choice is left open.
If none of these is legal, the refusal says so. The caller defines how to check a change (`Attempt`); estimate, plan and
what-if all check against the same rules (`autoplan.program.legality`).
"""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from autoplan.config.choice import is_count
from autoplan.config.context_methods import methods
from autoplan.config.numbers import is_finite
from autoplan.config.offload import NOTHING, OPTIMIZER, PARAMETERS, state_offload
from autoplan.config.parallel import ZERO_STAGES, ParallelConfig
from autoplan.config.recompute import FULL, RECOMPUTE, modules_choice, modules_of
from autoplan.errors import PinError
from autoplan.program.facts import Facts, divisors
from autoplan.program.legality import Scope, broken
from autoplan.schedules.schedule import SCHEDULES

Changes = Mapping[str, Any]
# Tries changes of choices, perhaps with another batch or length in the facts. Returns the changes with the choices that
# follow from them; None if they are illegal.
Attempt = Callable[[Changes, Facts], Changes | None]

_RUN = ("global_batch_size", "seq_len", "target_len")
_MAX_NAMES = 2  # choices whose values are named
_MAX_WORDS = 5  # values of a choice without an order
_NEAR = 4  # values on either side in a change of two choices
_MAX_TRIED = 400


def explained(error: PinError, given: Changes, attempt: Attempt, facts: Facts, prefix: str = "") -> PinError:
    """Return the error with the nearest legal choices added.

    Args:
        error: its `names` are the choices to change first; without names nothing is suggested.
        given: the choices as they are.
        prefix: put before a message that starts with a given choice, for example `pin `.
    """
    text = str(error)
    found = re.match(r"(\w+)=", text)
    text = f"{prefix}{text}" if found is not None and found[1] in given else text
    if not error.names:
        return PinError(text)
    groups = nearest_legal(error.names, given, attempt, facts)
    if not groups:
        return PinError(f"{text}; nothing near is legal", error.names)
    near = ", or ".join(map(_said, groups))
    return PinError(f"{text}; nearest legal: {near}", error.names, [c for group in groups for c in group])


def nearest_legal(names: Sequence[str], given: Changes, attempt: Attempt, facts: Facts) -> list[list[Changes]]:
    """Return legal changes: of up to two choices of a rule, else of another choice, else of two at once.

    Returns:
        The nearest legal values per choice (or pair).
    """
    known = [n for n in names if n in given or n == names[0] or _of_the_run(n, facts) is not None]
    budget = iter(range(_MAX_TRIED))

    def attempted(changes: Changes) -> Changes | None:
        return _attempted(changes, attempt, facts)

    def tried(changes: Changes) -> Changes | None:
        return None if next(budget, None) is None else attempted(changes)

    groups = [g for g in (_around(n, given, facts, tried) for n in known) if g][:_MAX_NAMES]
    others = [n for n in given if n not in known]
    for name in others:
        if groups:
            return groups
        groups = [g for g in [_around(name, given, facts, tried)] if g]
    budget = iter(range(_MAX_TRIED))
    return groups or _together(known, others, given, facts, tried) or _left_open(known, others, attempted)


def _attempted(changes: Changes, attempt: Attempt, facts: Facts) -> Changes | None:
    run = {"target_len": facts.target_len, "seq_len": facts.seq_len, "global_batch_size": facts.batch, **changes}
    rest = {name: value for name, value in changes.items() if name not in _RUN}
    known = replace(facts, batch=run["global_batch_size"], seq_len=run["seq_len"], target_len=run["target_len"])
    found = attempt(rest, known)
    return None if found is None else {**changes, **found}


def _around(name: str, given: Changes, facts: Facts, tried: Callable[[Changes], Changes | None]) -> list[Changes]:
    """Return the nearest legal values of one choice: one on either side, or the first of a choice without order."""
    below, above, words = _values(name, given, facts)
    sides = (next(filter(None, (tried({name: v}) for v in side)), None) for side in (below, above))
    found = [changes for changes in sides if changes is not None]
    most = _NEAR // 2 if name == "stages" else _MAX_WORDS
    return [*found, *itertools.islice(filter(None, (tried({name: v}) for v in words)), most)]


def _together(
    known: Sequence[str],
    others: Sequence[str],
    given: Changes,
    facts: Facts,
    tried: Callable[[Changes], Changes | None],
) -> list[list[Changes]]:
    """Return the nearest legal change of two choices."""

    def near(name: str) -> Iterator[tuple[int, Any]]:
        below, above, words = _values(name, given, facts)
        for side in (below, above, words):
            yield from enumerate(side[:_NEAR])

    pairs = [
        (da + db, {a: va, b: vb})
        for k, a in enumerate(known)
        for b in (*known[k + 1 :], *others)
        for (da, va), (db, vb) in itertools.product(near(a), near(b))
    ]
    for _, changes in sorted(pairs, key=lambda pair: pair[0]):
        found = tried(changes)
        if found is not None:
            return [[found]]
    return []


def _left_open(
    known: Sequence[str], others: Sequence[str], tried: Callable[[Changes], Changes | None]
) -> list[list[Changes]]:
    """Return the choices to leave open so that the rest is legal, those of the rule before the others."""
    names = [name for name in (*others, *known) if name not in _RUN]
    left: Changes = dict.fromkeys(names)
    if tried(left) is None:
        return []
    for name in names:
        fewer = {n: None for n in left if n != name}
        if fewer and tried(fewer) is not None:
            left = fewer
    return [[left]]


def _of_the_run(name: str, facts: Facts) -> int | None:
    known = {"global_batch_size": facts.batch, "seq_len": facts.seq_len, "target_len": facts.length("t")}
    return known.get(name)


def _values(name: str, given: Changes, facts: Facts) -> tuple[list[Any], list[Any], list[Any]]:
    """Return values to try: below and above the given one, nearest first, and those of a choice without an order."""
    value = given.get(name, _of_the_run(name, facts))
    if name in ("recompute", "schedule", "offload", "context_method", "stages"):
        return [], [], [v for v in _words(name, value, given, facts) if v != value]
    numbers = _numbers(name, value, given, facts)
    at = value if isinstance(value, (int, float)) and is_finite(value) else 0
    if not is_count(value, 0):  # a value that is no count may be near to itself
        at = at - 0.5
    return [n for n in reversed(numbers) if n < at], [n for n in numbers if n > at], []


def _numbers(name: str, value: Any, given: Changes, facts: Facts) -> list[Any]:
    model = facts.model
    if name == "zero_stage":
        return list(ZERO_STAGES)
    if name == "state_slack":
        return [1.0, 1.02]
    if name in ("micro_batch_size", "num_micro_batches"):
        if facts.batch is not None:
            return divisors(facts.batch)
        return list(range(1, 4 * value + 16)) if is_count(value) else [1]
    if name == "virtual_stages":
        return list(range(1, 2 + (16 if model is None else model.num_layers + model.num_ends)))
    if name == "ep" and model is not None:
        return divisors(model.num_experts) if model.num_experts else [1]
    if name == "global_batch_size":
        parts = [given[n] for n in ("dp", "micro_batch_size", "num_micro_batches") if is_count(given.get(n))]
        unit = math.prod(parts) if math.prod(parts) > 1 else facts.devices
        return [n for n in (value // unit * unit, value // unit * unit + unit) if n > 0]
    if name in _RUN:
        return _lengths(name, value, given, facts)
    return divisors(facts.devices)


def _lengths(name: str, value: int, given: Changes, facts: Facts) -> list[int]:
    """Return lengths of sequences that cp cuts into equal chunks, and those at the limits of the model."""
    cp = given.get("cp", 1)
    chunks = 2 if facts.model is None else facts.model.graph.sequence_chunks
    unit = chunks * cp if is_count(cp, 2) else 1
    ends = [value, value + unit]
    if facts.model is not None:
        symbol = "s" if name == "seq_len" else "t"
        low, high = facts.model.graph.bounds.get(symbol, (None, None))
        ends += [end for end in (facts.model.positions.get(symbol), low, high) if end is not None]
        ends += [facts.seq_len] if name == "target_len" and facts.seq_len is not None else []
    return sorted({end // unit * unit for end in ends} - {0})


def _words(name: str, value: Any, given: Changes, facts: Facts) -> list[Any]:
    if name == "recompute":
        stages, kinds = given.get("stages"), sorted(RECOMPUTE, key=lambda how: how != FULL)
        if isinstance(value, tuple) and stages:
            return [tuple(map(min, value, stages)), *kinds]
        there = [m for m in modules_of(value) if facts.model is not None and m in facts.model.modules]
        return [*([modules_choice(there)] if there else []), *kinds]
    if name == "offload":
        return [OPTIMIZER, NOTHING, PARAMETERS]
    if name == "schedule":
        return sorted(SCHEDULES, key=lambda s: -difflib.SequenceMatcher(None, str(value).lower(), s.lower()).ratio())
    if name == "context_method":
        cp = given.get("cp", 1)
        return [m.name for m in methods(cp)] if is_count(cp) else []
    if facts.model is None or not isinstance(value, (list, tuple)):
        return []
    layers = facts.model.num_layers
    wanted = [given.get("pp", 1) * given.get("virtual_stages", 1)] if "pp" in given else []
    counts = sorted({*wanted, *divisors(facts.devices)}, key=lambda n: (n not in wanted, abs(n - len(value)), n))
    return [tuple(layers // n + (k < layers % n) for k in range(n)) for n in counts if n <= layers]


def _said(group: Sequence[Changes]) -> str:
    """Return the text of changes: `tp=2 or 4`, `tp=2 with dp=4 or tp=4 with dp=2`, `... without tp and dp`."""
    if all(value is None for changes in group for value in changes.values()):
        return f"the same choices without {' and '.join(name for changes in group for name in changes)}"
    if len(group) > 1 and all(len(changes) == 1 for changes in group):
        (name,) = group[0]
        return f"{name}={' or '.join(_text(changes[name]) for changes in group)}"
    return " or ".join(" with ".join(f"{name}={_text(value)}" for name, value in changes.items()) for changes in group)


def _text(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else repr(value) if isinstance(value, str) else str(value)


# -- a whole configuration ---------------------------------------------------------------------------------------------


def check_with_nearest(config: ParallelConfig, facts: Facts, scope: Scope, prefix: str = "") -> None:
    """Raise PinError with the nearest legal choices if a configuration is illegal.

    If a change requires it, dp becomes all remaining devices and the micro-batches make the batch: the message says so.
    """
    given = {f.name: getattr(config, f.name) for f in fields(config)}

    def attempt(changes: Changes, known: Facts) -> Changes | None:
        made = _completed(config, changes, known)
        legal = made is not None and _fault(made, known, scope) is None
        return {n: v for n, v in _changed(config, made).items() if n != "offload"} if made and legal else None

    error = _fault(config, facts, scope)
    if error is not None:
        raise explained(error, given, attempt, facts, prefix)


def _fault(config: ParallelConfig, facts: Facts, scope: Scope) -> PinError | None:
    found = broken(config, facts, scope)
    return None if found is None else PinError(found.reason, found.rule.names)


def _completed(config: ParallelConfig, changes: Changes, facts: Facts) -> ParallelConfig | None:
    given = dict(changes)
    if any(value is None for value in given.values()):
        return None
    if "offload" in given:
        given["offload"] = state_offload({"offload": given["offload"]})
    made = replace(config, **given)
    try:
        others = made.pp * made.cp * made.tp
        if made.num_devices != facts.devices and "dp" not in changes and facts.devices % others == 0:
            made = replace(made, dp=facts.devices // others)
        at_once = made.dp * made.micro_batch_size
        if facts.batch is not None and "num_micro_batches" not in changes and facts.batch % at_once == 0:
            made = replace(made, num_micro_batches=facts.batch // at_once)
    except (TypeError, ZeroDivisionError):  # another choice is not a number
        return None
    return made


def _changed(before: ParallelConfig, after: ParallelConfig) -> dict[str, Any]:
    return {f.name: getattr(after, f.name) for f in fields(after) if getattr(after, f.name) != getattr(before, f.name)}
