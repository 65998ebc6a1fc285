"""All published ablations with the predicted and the published ratio of the two runs: right, or by how much not.

    python -m experiments.published.ablation_table [--only REGEX] [--missed] [--markdown] [--json FILE]

Right is a ratio with the published sign (an effect of 5 % or more has one) and the published size (within half of the
effect, but at least 5 % and at most 10 %). tests/experiments/test_ablations.py asserts every claim that is right; those
that the cost models get wrong are kept here, with what is said of them. Half a minute; no GPU, no torch.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from experiments.published import ablations_layouts, ablations_settings
from experiments.published.ablations import Claim, Ratio
from experiments.shared.measure import environment, make_console, run_command, write_json

CLAIMS: tuple[Claim, ...] = (*ablations_layouts.CLAIMS, *ablations_settings.CLAIMS)
HEAD = ("claim", "case", "predicted", "published", "sign", "size", "why it is missed")
MARKDOWN_HEAD = ("claim", "case: predicted (published)", "why it is missed")


@dataclass(frozen=True)
class Line:
    """A ratio or a condition of a case. `predicted`, `published`: of a ratio, else None."""

    claim: str
    case: str
    predicted: float | None
    published: float | None
    right_sign: bool
    right_size: bool
    missed: str

    @property
    def right(self) -> bool:
        """Sign and size."""
        return self.right_sign and self.right_size

    def cells(self) -> tuple[str, ...]:
        """As HEAD."""
        ratios = ("" if x is None else f"{x:.2f}" for x in (self.predicted, self.published))
        said = ("yes" if right else "no" for right in (self.right_sign, self.right_size))
        return self.claim, self.case, *ratios, *said, self.missed


def markdown_of(shown: Iterable[Line]) -> str:
    """Return a Markdown table with a row for all lines of one claim that are missed for one reason, or are right."""
    together: dict[tuple[str, str], list[str]] = defaultdict(list)
    for line in shown:
        ratio = "" if line.predicted is None else f"{line.predicted:.2f} ({line.published:.2f})"
        if not line.right and not line.right_sign:
            ratio = f"{ratio} wrong sign" if ratio else "does not hold"
        together[line.claim, line.missed].append(": ".join(part for part in (line.case, ratio) if part))
    rows = [(claim, "; ".join(cases), missed) for (claim, missed), cases in together.items()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (MARKDOWN_HEAD, ["---"] * len(MARKDOWN_HEAD), *rows))


def lines(only: str = "") -> Iterator[Line]:
    """What is predicted of every claim whose name `only` finds."""
    for claim in CLAIMS:
        if re.search(only, claim.name) is None:
            continue
        for case in claim.cases:
            for row in claim.rows(case):
                said = ", ".join(_text(x) for x in (*case.arguments, row.of) if x != "")
                name = claim.name.replace("_", " ")
                if isinstance(row, Ratio):
                    signs = row.right_sign, row.right_size
                    yield Line(name, said, row.predicted, row.published, *signs, case.missed)
                else:
                    yield Line(name, said, None, None, row.right, row.right, case.missed)


def _text(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main(
    only: Annotated[str, typer.Option(help="claims whose names this regular expression finds")] = "",
    missed: Annotated[bool, typer.Option("--missed", help="only what is wrong")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="as text for a document")] = False,
    json: Annotated[Path | None, typer.Option(help="write the rows to this file")] = None,
) -> None:
    """Price both sides of every ablation and compare."""
    console = make_console()
    found = list(lines(only.replace(" ", "_")))
    if not found:
        raise typer.BadParameter(f"--only {only} finds none of: {', '.join(c.name for c in CLAIMS)}")
    shown = [line for line in found if not (missed and line.right)]
    if markdown:
        print(markdown_of(shown))
    else:
        table = Table(*HEAD)
        for line in shown:
            table.add_row(*line.cells(), style=None if line.right else "yellow")
        console.print(table)
    ratios = [line for line in found if line.predicted is not None]
    errors = [abs(math.log(line.predicted / line.published)) for line in ratios if line.predicted and line.published]
    off = f", by {statistics.median(errors):.1%} in the median" if errors else ""
    right = sum(line.right for line in ratios)
    wrong_sign = sum(not line.right_sign for line in ratios)
    others = len(found) - len(ratios)
    hold = sum(line.right for line in found) - right
    print(
        f"{len(ratios)} ratios{off}: {right} right, {wrong_sign} of the wrong sign; "
        f"{hold} of {others} other conditions hold"
    )
    if json is not None:
        write_json(json, "ablation_table", environment(), [asdict(line) for line in found])


if __name__ == "__main__":
    run_command(main)
