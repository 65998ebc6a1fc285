"""The schema of plan files takes what commands write, and refuses what the reader refuses for its kind."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import fields
from functools import lru_cache
from typing import Any

import jsonschema
import models
import pytest
from command_line import TASK, run

import autoplan
from autoplan.errors import PinError
from autoplan.plans.record import Plan
from autoplan.plans.sections import DOCUMENT, plan_schema
from autoplan.search.certificate import Certificate

SCHEMA = jsonschema.Draft202012Validator(plan_schema())
EXPERTS = ("mixtral-8x7b", "--cluster", "2x8xh100-sxm5-80gb", "--seq-len", "4k", "--global-batch-size", "64")
COMMANDS: dict[str, tuple[str, ...]] = {
    "plan": ("plan", *TASK, "--tokens", "10B", "--top", "3"),
    "assumed": ("plan", *TASK, "--tokens", "10B", "--assume", "usd_per_kwh=0.1", "--pin", "pp=2"),
    "like": ("estimate", *TASK, "--like", "megatron-lm", "--dp", "2", "--tp", "2", "--document-len", "512"),
    "layers": ("estimate", *TASK, "--pp", "2", "--recompute", "3,0"),
    "calls": ("estimate", *TASK, "--pp", "1", "--recompute", "0-3=full,4-11=mlp", "--adapters", "lora:8"),
    "experts": ("estimate", *EXPERTS, "--dp", "16", "--ep", "8", "--zero", "1", "--overlap", "ep"),
    "ring": ("estimate", *TASK, "--cp", "2", "--context-method", "ring", "--offload", "optimizer"),
}


@lru_cache
def plan_file(kind: str = "module") -> str:
    if kind == "module":
        batch = models.token_batch(4, 16)
        plan = autoplan.plan(models.make_llama(), "local:2", example_inputs=batch, pins={"tp": 2}, verify=False)
        return plan.to_json()
    result = run(*COMMANDS[kind], "--json")
    assert result.exit_code in (0, 3), result.output
    return result.stdout


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(plan_schema())


@pytest.mark.parametrize("kind", ["module", *COMMANDS])
def test_what_is_written_is_taken(kind: str) -> None:
    data = json.loads(plan_file(kind))
    SCHEMA.validate(data)
    assert Plan.from_json(json.dumps(data)).config.num_devices > 1


def test_a_certificate_has_the_fields_of_its_record() -> None:
    assert set(DOCUMENT.known["certificate"].known) == {*(f.name for f in fields(Certificate)), "prices"}


Change = Callable[[Any], object]
DAMAGED: tuple[tuple[Change, str], ...] = (
    (lambda d: d["estimate"].update(step=1), "estimate: unknown key 'step'; did you mean"),
    (lambda d: d["estimate"].update(fits="no"), 'estimate: fits must be true or false, not "no"; use what'),
    (lambda d: d["estimate"].pop("mfu"), "estimate lacks mfu; use what"),
    (lambda d: d["estimate"]["step_time_s"].update(evidence="guessed"), "evidence must be one of exact, measured,"),
    (lambda d: d["estimate"]["stages"][0].update(colour=1), "stages: 0: unknown key 'colour'"),
    (lambda d: d["certificate"].update(proved=True), "certificate: unknown key 'proved'"),
    (lambda d: d["certificate"].update(gap="small"), "certificate: gap must be a number"),
    (lambda d: d["model"].update(num_params="x"), 'model: num_params must be a whole number of at least 0, not "x"'),
    (lambda d: d["model"].update(layers=1), "model: unknown key 'layers'"),
    (lambda d: d["cluster"].update(num_nodes=0), "cluster: num_nodes must be a whole number of at least 1, not 0"),
    (lambda d: d["cluster"]["levels"][0].update(size=1.5), "levels: 0: size must be a whole number of at least 1"),
    (lambda d: d.update(alternatives=3), "alternatives must be a list, not 3"),
    (lambda d: d.update(alternatives=[{"plan": {"tp": 2}}]), "alternatives: 0 lacks estimate"),
    (lambda d: d.update(equals=[{"plan": {"tq": 2}, "step_time_s": 1}]), "equals: 0: plan: unknown choice 'tq'"),
    (lambda d: d.update(graph="a garbage"), 'graph must be a graph in base64, not "a garbage"'),
    (lambda d: d["request"].update(overlap=["up"]), "request: overlap: 0 must be one of tp, ep, pp, cp"),
    (lambda d: d["request"].update(mode="fast"), "request: mode must be one of eager, fused, compiled"),
    (lambda d: d["asked"].update(tokns="1B"), "asked: unknown key 'tokns'; did you mean 'tokens'?"),
    (lambda d: d["asked"].update(pin=3), "asked: pin must be a list or an object or null, not 3"),
    (lambda d: d["made_for"].update(parameters="many"), "made_for: parameters must be a whole number"),
    (lambda d: d["program"].update(axes=[["pp", -1]]), "axes: 0: 1 must be a whole number of at least 1, not -1"),
    (lambda d: d["program"].update(axes=[["pp"]]), "axes: 0 must be a list of 2: a text, a whole number"),
    (lambda d: d["program"]["layout"].update(x="R"), "layout: unknown name 'x', it must be BLOCK/NAME, with 'store'"),
    (lambda d: d["program"]["layout"].update({"keep a/b": "R", "keep": "R"}), "layout: unknown name 'keep', it"),
    (lambda d: d["plan"].update(tp=0), "tp=0: must be a whole number"),
    (lambda d: d["plan"].update(stages=[1, "2"]), "stages=(1, '2'): must be positive numbers"),
    (lambda d: d["plan"].update(schedule="1F2B"), "schedule='1F2B' is not known"),
    (lambda d: d["plan"].update(offload=3), "offload"),
    (lambda d: d["plan"].update(zero_stage=7), "zero_stage=7 does not exist"),
    (lambda d: d.update(plan=3), "holds no plan"),
    (lambda d: d.update(schema=2), "schema 2 cannot be read"),
)


@pytest.mark.parametrize(("change", "said"), DAMAGED, ids=[said for _, said in DAMAGED])
def test_what_is_damaged_is_refused_by_the_reader_and_by_the_schema(change: Change, said: str) -> None:
    data = json.loads(plan_file())
    change(data)
    with pytest.raises(PinError) as error:
        Plan.from_json(json.dumps(data), "plan.json")
    assert said in str(error.value)
    assert not SCHEMA.is_valid(data)


def test_a_graph_that_is_cut_is_refused_when_it_is_read() -> None:
    data = json.loads(plan_file())
    data["graph"] = data["graph"][:400]
    with pytest.raises(PinError, match="its graph cannot be read"):
        Plan.from_json(json.dumps(data))


def values_in(data: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The places of all values in JSON data."""
    inner = data.items() if isinstance(data, dict) else enumerate(data[:1]) if isinstance(data, list) else ()
    return [place, *(found for name, value in inner for found in values_in(value, (*place, name)))]


def test_the_reader_refuses_all_that_the_schema_refuses() -> None:
    """Every value of a plan file replaced by one of each kind, and with another name beside it."""
    whole = json.loads(plan_file())
    whole["program"]["layout"] = dict(list(whole["program"]["layout"].items())[:2])
    whole["program"]["recompute"] = dict(list(whole["program"]["recompute"].items())[:1])
    refused = 0
    for place in values_in(whole)[1:]:
        for other in (None, True, -1, 1.5, "?", [], {}, [[None]], {"?": 3}):
            data = copy.deepcopy(whole)
            at = data
            for name in place[:-1]:
                at = at[name]
            at[place[-1]] = other
            if SCHEMA.is_valid(data):
                continue
            refused += 1
            with pytest.raises(PinError):
                Plan.from_json(json.dumps(data))
    assert refused > 500
