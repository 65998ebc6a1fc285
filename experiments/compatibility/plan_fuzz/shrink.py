"""Make a finding small: leave out one option after the other while it stays the same kind of finding."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from experiments.compatibility.plan_fuzz.cases import Case, Optimizer, Plan, Step


def smaller(case: Case) -> Iterator[Case]:
    """Yield cases that have less than a case, the boldest first."""
    if len(case.steps) > 1:
        yield from (replace(case, steps=case.steps[:n]) for n in range(1, len(case.steps)))
        yield from (replace(case, steps=case.steps[:n] + case.steps[n + 1 :]) for n in range(len(case.steps)))
    for name in (
        "frozen",
        "example_form",
        "precision",
        "dtype",
        "twin",
        "compression",
        "verify",
        "optimizer",
        "other",
        "next_plan",
        "next_world",
        "extra",
        "growth_interval",
    ):
        yield from _default(case, name)
    for name in [f.name for f in fields(Optimizer)]:
        yield from (replace(case, optimizer=x) for x in _default(case.optimizer, name))
    for which in ("plan", "other", "next_plan"):
        plan: Plan = getattr(case, which)
        for name in ("door", "compile", "batch", "latency_s", "bytes_per_s"):
            yield from (replace(case, **{which: x}) for x in _default(plan, name))
        for pin in plan.pins:
            yield replace(case, **{which: replace(plan, pins={n: x for n, x in plan.pins.items() if n != pin})})
        for pin, least in (("num_micro_batches", 1), ("micro_batch_size", 1), ("recompute", "none")):
            if plan.pins.get(pin, least) != least:
                yield replace(case, **{which: replace(plan, pins={**plan.pins, pin: least})})
        yield from _halved(case, which, plan)
    for option in case.options:
        if option != "kind":
            yield replace(case, options={n: x for n, x in case.options.items() if n != option})
    for index, step in enumerate(case.steps):
        for name in [f.name for f in fields(Step)]:
            for x in _default(step, name):
                yield replace(case, steps=(*case.steps[:index], x, *case.steps[index + 1 :]))
    if case.model == "causal" and case.options.get("kind") != "Llama":
        yield replace(case, options={**case.options, "kind": "Llama"})
    if case.model != "gpt":
        yield replace(case, model="gpt", options={})


def _halved(case: Case, which: str, plan: Plan) -> Iterator[Case]:
    if case.world == 4:
        for degree in ("dp", "tp", "pp", "cp"):
            if plan.pins.get(degree, 1) % 2 == 0:
                pins = {**plan.pins, degree: plan.pins[degree] // 2}
                yield replace(case, world=2, **{which: replace(plan, pins=pins)})


def _default(one: Any, name: str) -> Iterator[Any]:
    default = getattr(type(one)(), name)
    if getattr(one, name) != default:
        yield replace(one, **{name: default})


def shrink(case: Case, still: Callable[[Case], bool], budget_s: float) -> Case:
    """Return a case with less for which `still` holds, after at most `budget_s` seconds."""
    end = time.monotonic() + budget_s
    moved = True
    while moved:
        moved = False
        for other in smaller(case):
            if time.monotonic() > end:
                return case
            if still(other):
                case, moved = other, True
                break
    return case
