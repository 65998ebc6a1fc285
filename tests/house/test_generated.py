"""Pages show the rooms as imported, the pins as declared, and files and names that exist."""

import re

import generated
import pytest
from test_limits import PRODUCT, files_of

from autoplan.config.choice import choices_of
from autoplan.config.parallel import ParallelConfig

ROOT = generated.ROOT


@pytest.mark.parametrize("table", generated.TABLES, ids=lambda table: table.name)
def test_the_tables_are_what_the_code_says(table: generated.Table) -> None:
    assert table.written() == table.made(), "python tests/house/generated.py --write"


def test_every_pin_says_what_it_does() -> None:
    assert all(record.about or record.help for record in choices_of(ParallelConfig))


_PATH = re.compile(r"`((?:[\w.]+/)*[\w]*(?:\.(?:py|md|json)|/))`")


def test_every_file_of_the_table_exists() -> None:
    """A name without a folder is in the folder of the path before it."""
    rows = [row for row in (ROOT / "ARCHITECTURE.md").read_text().splitlines() if row.startswith("| ") and "`" in row]
    assert len(rows) > 60
    for row in rows:
        folder = ROOT
        for path in _PATH.findall(row.split(" | ", 1)[1]):
            if "/" in path:
                folder = (ROOT / path).parent if not path.endswith("/") else ROOT / path
            assert (ROOT / path).exists() or (folder / path).exists(), (path, row)


_SPAN, _NAME = (
    re.compile(r"`[^`\n]+`"),
    re.compile(r"(?<![\w.])(?:_[A-Za-z]\w+|[A-Z][A-Z_]{3,}[A-Z]|[a-z]+(?:_[a-z0-9]+)+)(?!\w|\.py)"),
)


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "docs/how_to_add.md"])
def test_every_name_of_a_page_exists(page: str) -> None:
    """Constants, private names and those of several words, outside of blocks of code."""
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    named = {name for span in _SPAN.findall(text) for name in _NAME.findall(span)}
    code = "\n".join(path.read_text() for path in files_of((*PRODUCT, "tests", "experiments")))
    unknown = named - set(re.findall(r"\w+", code))
    assert named and not unknown
