"""ARCHITECTURE.md shows the rooms as the imports have them, and files that exist; the README the pins as declared."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

from autoplan.config.choice import choices_of
from autoplan.config.parallel import ParallelConfig

_FILE = Path(__file__).with_name("picture.py")


def _loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_is_what_the_imports_are() -> None:
    picture = _loaded(_FILE)
    assert picture.written() == picture.picture(), "python tests/house/picture.py --write"


def test_the_table_of_pins_is_what_their_records_say() -> None:
    pins = _loaded(_FILE.with_name("pins.py"))
    assert pins.written() == pins.table(), "python tests/house/pins.py --write"
    assert all(record.about or record.help for record in choices_of(ParallelConfig))


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
