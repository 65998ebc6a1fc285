"""Unknown names: one check and one form of message, wherever people write names."""

from __future__ import annotations

import pytest

from autoplan.config.choices import check_values, options_of
from autoplan.config.keys import as_mapping, check_keys, check_names
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.whole_run import Assumptions
from autoplan.errors import PinError
from autoplan.names import did_you_mean
from autoplan.sweeps.whatif import check_varied


def said(check, *args, **named) -> str:
    with pytest.raises(PinError) as error:
        check(*args, **named)
    return str(error.value)


def test_a_message_names_the_nearest_and_the_known() -> None:
    assert did_you_mean("stge", ("stage", "size")) == "did you mean 'stage'? known: stage, size"
    assert did_you_mean("zero", ("one", "zero_stage")) == "did you mean 'zero_stage'? known: one, zero_stage"
    assert did_you_mean("", ("a", "b")) == did_you_mean("x", ("a", "b")) == "known: a, b"
    assert did_you_mean(7, ("a", "b", "c"), most=2) == "known: a, b, ..."
    assert did_you_mean("a", ("b", "ab"), most=2) == "did you mean 'ab'? known: b, ab"


def test_names_and_keys() -> None:
    check_names((), ())
    check_keys({"a": 1, "b": None}, ("a",), ("b",))
    assert said(check_names, ["a", 3], ("a",), "f.yaml", "pin") == "f.yaml: unknown pin 3; known: a"
    assert said(check_keys, {"b": 1}, ("a",), ("b",), "f.yaml") == "f.yaml: a is missing; needed are a"
    assert said(check_keys, {"a": None}, ("a",), ()) == "a is missing; needed are a"
    assert said(as_mapping, {"aa": 1}, "f.yaml", ("aaa",)) == "f.yaml: unknown key 'aa'; did you mean 'aaa'? known: aaa"


@pytest.mark.parametrize(
    ("check", "given", "beginning"),
    [
        (check_values, {"tpp": 2}, "unknown pin 'tpp'; did you mean 'tp'? known: dp, tp"),
        (options_of, {"lunch": "async"}, "unknown option 'lunch'; did you mean 'launch'? known: "),
        (check_varied, {"nodez": [1]}, "vary: unknown name 'nodez'; did you mean 'nodes'? known: nodes"),
        (Assumptions.of, {"puee": 1}, "assume: unknown name 'puee'; did you mean 'pue'? known: "),
        (Cluster.parse, "2xh100@nik=2", "cluster '2xh100@nik=2': unknown override 'nik'; did you mean 'nic'? known: "),
    ],
)
def test_all_doors_say_it_alike(check, given, beginning) -> None:
    assert said(check, given).startswith(beginning)
