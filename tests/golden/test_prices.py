"""Prices are the frozen ones, to the last bit; tests/golden/prices.py says how prices may change."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import prices
import pytest


def check(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, prices.__file__, "--check", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_some_of_the_estimates() -> None:
    done = check("--every", "23", "--no-plans")
    assert done.returncode == 0 and done.stdout == "nothing differs\n", done.stdout + done.stderr


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "every", [pytest.param(9, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.exhaustive)]
)
def test_estimates_and_plans(every: int) -> None:
    done = check("--every", str(every))
    assert done.returncode == 0 and done.stdout == "nothing differs\n", done.stdout + done.stderr


def test_every_request_is_frozen() -> None:
    assert set(prices.requests()) == prices.frozen().keys()


def test_a_price_that_differs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative: a frozen answer with another step time and digest is a line with both."""
    words, before = next((k, v) for k, v in prices.frozen().items() if "step_time_s" in v)
    changed = {**before, "step_time_s": 1.0, "digest": "0" * 16}
    monkeypatch.setattr(prices, "FROZEN", tmp_path / "prices.json.gz")
    prices.FROZEN.write_bytes(gzip.compress(json.dumps({words: changed}).encode()))
    (line,) = prices.differences()
    assert line.startswith(f"{words}: ") and f"digest {changed['digest']} -> {before['digest']}" in line
    assert f"step_time_s 1.0 -> {before['step_time_s']}" in line
