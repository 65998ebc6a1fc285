"""A clock of searches that counts work instead of time: what a test finds in time does not depend on the machine."""

from __future__ import annotations

import itertools

import pytest


def ticking(monkeypatch: pytest.MonkeyPatch, each_s: float) -> None:
    """Let every reading of the clock of searches find that `each_s` seconds passed since the last one."""
    readings = itertools.count()
    monkeypatch.setattr("autoplan.search.clock.now_s", lambda: next(readings) * each_s)
