"""Which cases are in make test."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import durations
import pytest


def test_every_duration_is_of_a_test_that_there_is() -> None:
    assert durations.gone(durations.measured()) == set()
    assert durations.gone(["tests/house/test_durations.py::test_of_nothing", "tests/no.py::test"]) != set()


def test_the_cheapest_cases_are_kept_and_one_at_least() -> None:
    a, b = durations.A_TEST_S, durations.LONGEST_S
    seconds = {"a[1]": 0.6 * a, "a[2]": 0.3 * a, "a[3]": 1.2 * a, "b[1]": 0.8 * b, "b[2]": 0.9 * b, "c": 1.1 * b}
    assert durations.too_many([*seconds, "a[4]", "d"], seconds) == {"a[3]", "b[2]", "c"}


def test_of_the_slow_cases_some_are_drawn_and_one_at_least() -> None:
    limit = durations.ALL_S
    seconds = {f"a[{k}]": 0.3 * limit for k in range(9)} | {"b[1]": 2 * limit, "c": 3 * limit}
    left = durations.too_many_slow([*seconds, "d[1]", "d[2]"], seconds)
    assert len(left) == 6 and all(test.startswith("a[") for test in left)
    assert left == durations.too_many_slow(reversed(seconds), seconds)


def test_the_page_says_the_limits() -> None:
    """And how many prices are frozen."""
    root = durations.FILE.parents[1]
    page = " ".join((root / "docs/tests.md").read_text().split())
    frozen = json.loads(gzip.decompress((root / "tests/golden/prices.json.gz").read_bytes()))
    assert f"above {durations.LEAST_S} s" in page and f"up to {durations.A_TEST_S} seconds in all" in page
    assert f"at most {durations.LONGEST_S:g} (" in page and f"keeps {durations.ALL_S:g} seconds" in page
    assert f"the answers of {len(frozen):,} `estimate`" in page


def test_durations_are_read_from_what_pytest_prints(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "....\n1.20s call     f.py::t[a b]\n0.30s setup    f.py::t[a b]\n0.01s call  f.py::u\n== 3 passed in 1s\n"
    )
    assert durations.read([log]) == {"f.py::t[a b]": 1.5}


@pytest.mark.parametrize("end, outcome", [("0", "1 skipped"), ("9e9", "1 passed")])
def test_what_starts_past_the_end_of_the_time_is_skipped_and_counted(end: str, outcome: str) -> None:
    command = [sys.executable, "-m", "pytest", f"{__file__}::test_the_cheapest_cases_are_kept_and_one_at_least"]
    environment = {**os.environ, "AUTOPLAN_TESTS_END": end}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=durations.FILE.parents[1])
    assert outcome in done.stdout and done.returncode == 0, done.stdout + done.stderr
    assert ("AUTOPLAN_TESTS_END" in done.stdout) == ("skipped" in outcome)
