"""Limits of code: no file above 600 lines; in the product no function above a cyclomatic complexity of 20.

Complexity is counted as radon does: 1 and one more for each if, for, while, except, with, conditional expression,
`case`, for and if of a comprehension, and operand of `and` and `or` beyond the first. (ruff's C901 leaves out boolean
operators, conditional expressions and comprehensions.)
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT, OTHERS = ("autoplan", "cost_models", "runtime"), ("tests", "experiments")
MOST_LINES, MOST_COMPLEXITY = 600, 20

_ONE = (ast.If, ast.For, ast.While, ast.IfExp, ast.ExceptHandler, ast.With, ast.comprehension, ast.match_case)


def complexity(function: ast.AST) -> int:
    """Cyclomatic complexity of a function, with what is nested in it."""
    count = 1
    for node in ast.walk(function):
        count += isinstance(node, _ONE)
        if isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            count += len(node.ifs)
    return count


def files_of(folders: Iterable[str]) -> Iterator[Path]:
    """Every module of the folders once: the links of autoplan/ to folders at the top are not followed."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not any(part.is_symlink() for part in path.parents):
                yield path


def too_long(text: str, path: str) -> Iterator[tuple[str, int]]:
    """The module and its number of lines if it has too many."""
    num_lines = text.count("\n")
    if num_lines > MOST_LINES:
        yield path, num_lines


def too_complex(text: str, path: str) -> Iterator[tuple[str, int]]:
    """The functions of a module that are too complex, and their complexity."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and complexity(node) > MOST_COMPLEXITY:
            yield f"{path}:{node.name}", complexity(node)


def found() -> dict[str, int]:
    checks = [(path, too_long) for path in files_of((*PRODUCT, *OTHERS))]
    checks += [(path, too_complex) for path in files_of(PRODUCT)]
    return {name: n for path, check in checks for name, n in check(path.read_text(), str(path.relative_to(ROOT)))}


def test_nothing_exceeds_a_limit() -> None:
    assert not found(), f"above {MOST_LINES} lines or a complexity of {MOST_COMPLEXITY}"


def test_the_count_is_that_of_radon() -> None:
    """Each construct once, and what is nested counts."""
    text = (
        "def f(x):\n    if x and x > 1 or x < -1:\n        return [y for y in x if y if not y]\n"
        "    for _ in x:\n        pass\n    while x:\n        x = 1 if x else 2\n"
        "    try:\n        pass\n    except ValueError:\n        pass\n"
    )
    assert complexity(ast.parse(text).body[0]) == 1 + 3 + 3 + 1 + 2 + 1
    long = "x = 1\n" * (MOST_LINES + 1)
    deep = "def g(x):\n" + "    if x:\n        pass\n" * MOST_COMPLEXITY
    assert dict(too_long(long, "m.py")) == {"m.py": MOST_LINES + 1} and not dict(too_long(deep, "m.py"))
    assert dict(too_complex(deep, "m.py")) == {"m.py:g": MOST_COMPLEXITY + 1}
    assert sum(1 for _ in files_of(PRODUCT)) > 150 and sum(1 for _ in files_of(OTHERS)) > 150
