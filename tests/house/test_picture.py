"""ARCHITECTURE.md shows the rooms as the imports have them."""

import importlib.util
import re
from pathlib import Path

_FILE = Path(__file__).with_name("picture.py")


def test_the_picture_is_what_the_imports_are() -> None:
    spec = importlib.util.spec_from_file_location("picture", _FILE)
    assert spec is not None and spec.loader is not None
    picture = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(picture)
    assert picture.written() == picture.picture(), "python tests/house/picture.py --write"


_PATH = re.compile(r"`((?:[\w.]+/)*[\w]*(?:\.(?:py|md|json)|/))`")


def test_every_file_of_the_table_exists() -> None:
    """A name without a folder is in the folder of the path before it."""
    root = _FILE.parents[2]
    rows = [row for row in (root / "ARCHITECTURE.md").read_text().splitlines() if row.startswith("| ") and "`" in row]
    assert len(rows) > 60
    for row in rows:
        folder = root
        for path in _PATH.findall(row.split(" | ", 1)[1]):
            if "/" in path:
                folder = (root / path).parent if not path.endswith("/") else root / path
            assert (root / path).exists() or (folder / path).exists(), (path, row)
