"""Which cases are in make test."""

from __future__ import annotations

from pathlib import Path

import durations


def test_every_duration_is_of_a_test_that_there_is() -> None:
    assert durations.gone(durations.measured()) == set()
    assert durations.gone(["tests/house/test_durations.py::test_of_nothing", "tests/no.py::test"]) != set()


def test_the_cheapest_cases_are_kept_and_one_at_least() -> None:
    a, b = durations.A_TEST_S, durations.LONGEST_S
    seconds = {"a[1]": 0.6 * a, "a[2]": 0.3 * a, "a[3]": 1.2 * a, "b[1]": 0.8 * b, "b[2]": 0.9 * b, "c": 1.1 * b}
    assert durations.too_many([*seconds, "a[4]", "d"], seconds) == {"a[3]", "b[2]", "c"}


def test_durations_are_read_from_what_pytest_prints(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "....\n1.20s call     f.py::t[a b]\n0.30s setup    f.py::t[a b]\n0.01s call  f.py::u\n== 3 passed in 1s\n"
    )
    assert durations.read([log]) == {"f.py::t[a b]": 1.5}
