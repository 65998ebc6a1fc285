"""Models of packages: inputs from their descriptions, what is said of a model, and the page; without the packages."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from experiments.compatibility import families, package_classes
from experiments.compatibility.one_by_one import EQUAL, NOT_RUN, OUTCOMES, REFUSED, Row, read_page

PAGE = Path(__file__).parents[2] / "docs" / "package_classes.md"


class Conditioned(nn.Module):
    """Returns a tuple, and takes tensors in a mapping, a number, and a table that has no samples."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, added: Mapping[str, Any], table: torch.Tensor, scale: float) -> Any:
        h = self.linear(x) * scale + table
        return h + added["shift"][:, None], [h.flatten(1).sum(-1)]


INPUTS = {"x": "b 4 6", "added": {"shift": "b 6", "none": None}, "table": {"grid": [2, 2, 1, 1, 1, 1]}, "scale": 2.0}


def made(module: nn.Module) -> families.Made:
    """The module with its batch, as a class of diffusers is made."""
    return package_classes.with_inputs(module, INPUTS)


def test_a_model_is_compared_on_all_degrees() -> None:
    model, batch = made(Conditioned())
    assert {name: tuple(x.shape) for name, x in batch.items()} == {
        "given_x": (4, 4, 6),
        "given_added_shift": (4, 6),
        "target": (4, 4, 6),
    }
    assert dict(model.named_buffers())["given_table"].tolist()[1] == [0, 1, 0, 0, 0, 0]
    of = package_classes.Class("others", "Conditioned", lambda: made(Conditioned()))
    row = package_classes.examine(of, ("1 device", "tp 2", "dp 2 ZeRO 3"))
    assert row.outcome == EQUAL and row.error is not None and row.error < 1e-12
    assert [what for _, what in row.parity] == [EQUAL] * 3 and "0 attention" in row.why


def test_what_does_not_run_or_is_refused_is_said() -> None:
    class Reads(Conditioned):
        def forward(self, x: torch.Tensor, added: Any, table: torch.Tensor, scale: float) -> Any:
            return super().forward(x * float(x.sum() > 0), added, table, scale)

    absent = package_classes.Class("timm", "absent", lambda: package_classes.diffusers_class("NoSuchClass"))
    refused = package_classes.Class("others", "Reads", lambda: made(Reads()))
    outcomes = [package_classes.examine(of, ("1 device",)).outcome for of in (absent, refused)]
    assert outcomes == [NOT_RUN, REFUSED]


@pytest.mark.parametrize(
    ("text", "shape", "values"),
    [("b 2: 3..3", (4, 2), {3}), ("2 1: true", (2, 1), {True}), ("b: 0.5", (4,), {0.5}), ("b 3", (4, 3), None)],
)
def test_descriptions_of_tensors(text: str, shape: tuple[int, ...], values: set[Any] | None) -> None:
    found = package_classes.tensor_of(text, 4, torch.Generator().manual_seed(1))
    assert tuple(found.shape) == shape
    assert values is None or set(found.flatten().tolist()) == values


def test_every_model_has_a_name_and_a_kind() -> None:
    classes = package_classes.classes()
    assert max(Counter(c.name for c in classes).values()) == 1
    assert {c.kind for c in classes} <= set(package_classes.KINDS)


def test_the_page_counts_its_rows(tmp_path: Path) -> None:
    found = read_page(PAGE)
    (counts,) = re.findall(r"^\| all \|(.*)\|$", PAGE.read_text(), re.M)
    outcomes = Counter(row.outcome for row in found.values())
    assert [outcomes[o] for o in OUTCOMES] == [int(number) for number in counts.split("|")]
    assert found.keys() <= {c.name for c in package_classes.classes()}
    row = Row("timm", "A", EQUAL, "1 call of 1 block", 1.0, 1e-15, parity=(("1 device", EQUAL),))
    page = tmp_path / "page.md"
    page.write_text(package_classes.page([row], ["A", "B"], "torch"))
    assert read_page(page)["A"].parity == row.parity and "1 further model was not tried." in page.read_text()
