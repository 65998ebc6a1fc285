"""Settings of a search are declared once: commands, files and Python read their records."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest

import autoplan
from autoplan.config.planning import SEARCH_SETTINGS, TOLERANCES, SearchSettings, SearchWords, tolerances_of
from autoplan.errors import PinError


def test_keyword_arguments_are_the_fields() -> None:
    fields = {name: kind for name, kind in get_type_hints(SearchSettings).items() if not name.startswith("_")}
    assert get_type_hints(SearchWords) == fields == {r.name: fields[r.name] for r in SEARCH_SETTINGS}


@pytest.mark.parametrize("door", [autoplan.plan, autoplan.whatif, autoplan.capacity])
def test_python_takes_them_all(door: Callable[..., Any]) -> None:
    rest = [p for p in inspect.signature(door).parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
    assert len(rest) == 1 and "SearchWords" in str(rest[0].annotation)


def test_a_wrong_keyword_is_named() -> None:
    """Also one of a PlanRequest, which `plan` decides by itself."""
    with pytest.raises(PinError, match=r"whatif\(\): unknown argument 'time_limit'; did you mean 'time_limit_s'\?"):
        autoplan.whatif("gpt2", "1x4xh100", 1024, 16, vary={"nodes": [1]}, time_limit=3)  # type: ignore[call-arg]
    with pytest.raises(PinError, match=r"plan\(\): unknown argument 'like'; known: time_limit_s, memory_risk"):
        autoplan.plan("gpt2", "1x4xh100", seq_len=1024, global_batch_size=16, like="torchtitan")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *(("time_limit_s", value) for value in (-1, float("nan"), float("inf"), True, "60")),
        *(("memory_risk", value) for value in (0, 0.6, None)),
        *(("equal_within", value) for value in (-0.1, 1, None)),
        *(("gap", value) for value in (-0.1, 1, "0.1")),
    ],
)
def test_a_wrong_value_is_named(name: str, wrong: Any) -> None:
    settings = SearchSettings(**{name: wrong})
    with pytest.raises(PinError, match=f"^{name}="):
        settings.check()


def test_defaults_are_legal_and_a_plan_file_keeps_what_decides_the_plan() -> None:
    SearchSettings().check()
    assert (
        [r.name for r in TOLERANCES]
        == list(tolerances_of(SearchSettings()))
        == [
            "memory_risk",
            "equal_within",
            "gap",
        ]
    )
