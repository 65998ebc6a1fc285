"""Settings of a task: what follows from their records."""

from __future__ import annotations

import typing
from typing import Any

import pytest

from autoplan.catalog import load_model
from autoplan.config.parallel import Mode
from autoplan.config.settings import TASK_SETTINGS, VARIED_SETTINGS, check_setting, setting
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.errors import PinError
from autoplan.exporters.setup import SETUP_NAMES
from autoplan.report.flags import TaskWords
from autoplan.search.planner import PlanRequest
from autoplan.search.space import space
from autoplan.sweeps.capacity import CapacityTask, task_of
from autoplan.sweeps.whatif import RANGES, VARIED, check_varied


@pytest.mark.parametrize("name", [record.name for record in TASK_SETTINGS])
def test_the_command_line_has_the_flags_of_the_record(name: str) -> None:
    # of an option in Annotated, typer keeps the first flag as its default until it makes the command
    option = typing.get_args(typing.get_type_hints(TaskWords, include_extras=True)[name])[1]
    assert {option.default, *option.param_decls} == set(setting(name).flags or (setting(name).flag,))
    assert option.help == setting(name).help != ""


def test_sweeps_vary_what_the_records_say() -> None:
    assert VARIED_SETTINGS == ("seq_len", "global_batch_size", "precision", "mode")
    assert all(VARIED[name] == setting(name).varied for name in VARIED_SETTINGS)
    assert set(VARIED_SETTINGS) <= set(SETUP_NAMES) and set(VARIED_SETTINGS) <= set(CapacityTask.__annotations__)
    assert "target_len" not in VARIED and "profile" not in VARIED
    for name, most in (("seq_len", 10**9), ("global_batch_size", 10**7)):
        assert RANGES[name].most == most
        with pytest.raises(PinError, match=f"nearest that works: {most}"):
            check_varied({name: [most + 1]})


def test_defaults_are_those_of_the_records() -> None:
    given = {"models": load_model("gpt2"), "clusters": "1x1xh100-sxm5-80gb", "tokens": 1e9}
    task = task_of({**given, "seq_len": 128, "global_batch_size": 8}, "here")
    request = PlanRequest(load_model("gpt2"), Cluster.parse("1x1xh100-sxm5-80gb"), 128, 8)
    for name in ("precision", "mode"):
        assert getattr(task, name) == (setting(name).default,) and getattr(request, name) == setting(name).default


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("seq_len", 0, "seq_len=0: must be a whole number of at least 1"),
        ("target_len", 2.5, "target_len=2.5: must be a whole number"),
        ("global_batch_size", True, "global_batch_size=True: must be a whole number"),
        ("precision", "int4", "precision 'int4' is not known; use native, bf16"),
    ],
)
def test_illegal_values(name: str, value: Any, text: str) -> None:
    with pytest.raises(PinError, match=text):
        check_setting(name, value)
    check_setting("precision", "bf16-grad16")


def test_the_search_checks_by_the_records() -> None:
    graph, cluster = load_model("gpt2"), Cluster.parse("1x1xh100-sxm5-80gb")
    with pytest.raises(PinError, match="global_batch_size=0: must be a whole number of at least 1"):
        space(graph, cluster, 0, {})
    assert setting("mode").words is Mode
