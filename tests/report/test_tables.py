"""Tables fit the terminal: names are whole, so that they can be copied, and the least needed columns go first."""

from __future__ import annotations

import io

import pytest
from command_line import PLAIN
from rich.console import Console
from typer.testing import CliRunner

from autoplan import catalog as models
from autoplan.cli import app
from autoplan.cost_models.hardware import catalog as hardware
from autoplan.report.tables import fitting_table
from autoplan.stacks.records import stacks


def printed(width: int, *less_needed: str) -> tuple[list[str], list[str]]:
    heads = ("name", "one figure", "another", "words")
    rows = [("a-long-name-with-hyphens", "1,234", "5.67", "some words that take more than one line here")]
    table, left_out = fitting_table(heads, rows, width, less_needed, left=1)
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    return out.getvalue().splitlines(), left_out


@pytest.mark.parametrize(
    ("width", "left_out"), [(100, []), (70, []), (66, ["another"]), (50, ["another", "one figure"])]
)
def test_the_least_needed_columns_go_first(width: int, left_out: list[str]) -> None:
    lines, found = printed(width, "another", "one figure", "words")
    assert found == left_out
    assert max(map(len, lines)) <= width
    assert any("a-long-name-with-hyphens " in line for line in lines)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("listing", ["models", "hw list", "stacks"])
def test_names_of_listings_are_whole(listing: str, width: int) -> None:
    said = CliRunner().invoke(app, listing.split(), env={**PLAIN, "COLUMNS": str(width)}).stdout
    lines = said.splitlines()
    assert max(map(len, lines)) <= width
    first = {line.split()[0] for line in lines if line.strip()}
    known = {"models": models.names, "hw list": lambda: list(hardware.entries()), "stacks": lambda: list(stacks())}
    assert first >= set(known[listing]())
    assert ("Left out at this width" in said) == (width == 80 or listing == "stacks")
