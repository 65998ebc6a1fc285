"""Which cases of a test are in make test and in make test-all: by measured duration, not by feel.

    make test-all PYTEST_ADDOPTS='--durations=0 --durations-min=0.3' > log
    python tests/durations.py log [log ...] [--write]

In make test a test with many cases keeps the cheapest ones, up to `A_TEST_S` seconds in all and at least one, unless
that takes more than `LONGEST_S`; the others are `slow`. Of these, make test-all keeps `ALL_S` seconds, drawn by the
hash of their names and at least one; the others are `exhaustive`, unless the test is marked `all_cases`. The
durations are those of `make test-all` on two cores with nothing beside it. Tests that are not in the file take less
than `LEAST_S`.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

FILE = Path(__file__).with_suffix(".json")
A_TEST_S, LONGEST_S = 0.8, 2.0
ALL_S = 12.0
LEAST_S = 0.3
UNMEASURED_S = 0.02  # of a test that is not in the file
_LINE = re.compile(r"([0-9.]+)s (?:call|setup|teardown) +(\S.*)")


def function_of(test: str) -> str:
    """Return the test function of a case: `file.py::name[case]` -> `file.py::name`."""
    return test.split("[")[0]


def gone(tests: Iterable[str]) -> set[str]:
    """Return the tests whose function there is no more."""
    out = set[str]()
    for test in tests:
        file, _, name = function_of(test).partition("::")
        path = FILE.parents[1] / file
        if not path.exists() or f"def {name}(" not in _text(path):
            out.add(test)
    return out


@functools.cache
def _text(path: Path) -> str:
    return path.read_text()


def measured() -> Mapping[str, float]:
    """Return seconds by test."""
    found: dict[str, float] = json.loads(FILE.read_text())
    return found


def too_many(tests: Iterable[str], seconds: Mapping[str, float]) -> set[str]:
    """Return the cases that make test has no time for.

    Args:
        tests: cases that would all be in make test.
    """
    out = set[str]()
    for mine in _by_function(tests).values():
        spent = 0.0
        for k, test in enumerate(sorted(mine, key=lambda t: seconds.get(t, UNMEASURED_S))):
            spent += seconds.get(test, UNMEASURED_S)
            if spent > (A_TEST_S if k else LONGEST_S):
                out.add(test)
    return out


def too_many_slow(tests: Iterable[str], seconds: Mapping[str, float]) -> set[str]:
    """Return the cases that make test-all has no time for.

    Args:
        tests: cases that are `slow`.
    """
    out = set[str]()
    for mine in _by_function(tests).values():
        spent = 0.0
        for k, test in enumerate(sorted(mine, key=lambda t: zlib.crc32(t.encode()))):
            takes = seconds.get(test, UNMEASURED_S)
            if k and spent + takes > ALL_S:
                out.add(test)
            else:
                spent += takes
    return out


def _by_function(tests: Iterable[str]) -> dict[str, list[str]]:
    cases = defaultdict[str, list[str]](list)
    for test in tests:
        cases[function_of(test)].append(test)
    return cases


def read(logs: Iterable[Path]) -> dict[str, float]:
    """Return seconds by test from the output of `pytest --durations=0`: setup, call and teardown together."""
    total = Counter[str]()
    for log in logs:
        for line in log.read_text(errors="replace").splitlines():
            if match := _LINE.fullmatch(line.strip()):
                total[match[2]] += float(match[1])
    return {test: round(s, 1) for test, s in sorted(total.items()) if s >= LEAST_S}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", type=Path, nargs="*", help="what pytest printed; without: the durations known")
    parser.add_argument("--write", action="store_true", help="keep what was read; tests that no log has keep theirs")
    args = parser.parse_args()
    seconds = {**measured(), **read(args.logs)} if FILE.exists() else read(args.logs)
    old = gone(seconds)
    seconds = {test: s for test, s in seconds.items() if test not in old}
    functions = Counter[str]()
    for test, s in seconds.items():
        functions[function_of(test)] += s
    for name, s in functions.most_common(30):
        print(f"{s:7.1f} s  {name}")
    print(f"{sum(functions.values()):7.1f} s  {len(seconds)} cases of {len(functions)} tests")
    if args.write:
        FILE.write_text(json.dumps(seconds, indent=0, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
