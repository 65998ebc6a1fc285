"""One name, one thing: no two modules of the package define the same public name, with a few exceptions.

A name that only its own module reads starts with an underscore; this test does not count it.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from test_limits import PRODUCT, ROOT, files_of

# Tables of one kind, each joined with the others in one place; what logging asks for
_TABLES = {"RECORDS", "RULES", "logger"}
# A command line has a function for each command, named as the function that answers it; a kernel is named as the
# function that runs it; the module of a block in an emitted program
_SAME_THING = {
    "autoplan/cli.py",
    "runtime/cuda_source.py",
    "runtime/triton_kernels.py",
}
_OF_A_PROGRAM = {("runtime/program.py", "Block")}


def public_names(text: str) -> set[str]:
    """Return the public names that a module defines at its top level, without those that it imports."""
    found: set[str] = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        for target in node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]:
            if isinstance(target, ast.Name):
                found.add(target.id)
    return {name for name in found if not name.startswith("_")}


def defined_twice(modules: dict[str, str]) -> dict[str, list[str]]:
    """Return the public names that several modules define, with these. `modules`: path -> text."""
    places = defaultdict(list)
    for path, text in modules.items():
        for name in public_names(text) - _TABLES:
            if path not in _SAME_THING and (path, name) not in _OF_A_PROGRAM:
                places[name].append(path)
    return {name: paths for name, paths in places.items() if len(paths) > 1}


def test_a_public_name_is_defined_once() -> None:
    modules = {str(path.relative_to(ROOT)): path.read_text() for path in files_of(PRODUCT)}
    assert not defined_twice(modules), "give one of them another name, or an underscore if only its module reads it"


def test_exceptions_exist() -> None:
    assert all(Path(ROOT, path).is_file() for path in _SAME_THING)
    for path, name in _OF_A_PROGRAM:
        assert name in public_names(Path(ROOT, path).read_text())


def test_what_counts_as_twice() -> None:
    one = "def f(): ...\nclass A: ...\nX = 1\nY: int = 2\n_z = 3\nfrom m import g\n"
    assert public_names(one) == {"f", "A", "X", "Y"}
    assert defined_twice({"a.py": one, "b.py": "f = 1\nRECORDS = ()\n", "c.py": "RECORDS = ()\ng = 1\n_z = 1\n"}) == {
        "f": ["a.py", "b.py"]
    }
