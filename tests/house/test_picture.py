"""ARCHITECTURE.md shows the rooms as the imports have them."""

import importlib.util
from pathlib import Path

_FILE = Path(__file__).with_name("picture.py")


def test_the_picture_is_what_the_imports_are() -> None:
    spec = importlib.util.spec_from_file_location("picture", _FILE)
    assert spec is not None and spec.loader is not None
    picture = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(picture)
    assert picture.written() == picture.picture(), "python tests/house/picture.py --write"
