"""experiments/published/scaling.py: series of runs by devices, and the spread of devices that they say."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from made_up import row, write_csv
from typer.testing import CliRunner

from experiments.published import scaling


def runs(campaign: str, spread: float, devices: tuple[int, ...] = (8, 64, 512, 4096)) -> list[dict[str, str]]:
    return [
        {"id": f"{campaign}_{n}", "campaign": campaign, "n_gpus": str(n), "dp": str(n), "global_batch": str(4 * n),
         "tp": "1", "pp": "1", "notes": "", "step_time_s": str(2.0 * math.exp(spread * scaling.slowest_of(n)))}
        for n in devices
    ]  # fmt: skip


def priced(given: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Predictions that do not grow."""
    return [
        {
            "id": r["id"],
            "num_devices": r["n_gpus"],
            "predicted_step_time_s": 2.2,
            "measured_step_time_s": float(r["step_time_s"]),
        }
        for r in given
    ]


def test_the_slowest_of_many_is_the_expected_largest_of_normal_values() -> None:
    # Harter, Expected Values of Normal Order Statistics, 1961: 1.4236 of 8 and 2.5076 of 100
    assert scaling.slowest_of(8) == pytest.approx(1.4236, rel=0.01)
    assert scaling.slowest_of(100) == pytest.approx(2.5076, rel=0.01)
    assert scaling.slowest_of(1) == 0.0


def test_the_spread_of_a_series_is_found_whatever_the_level_of_predictions() -> None:
    given = runs("one", 0.03)
    pairs = scaling.pairs_of([row(**r) for r in given], priced(given))
    assert [(p.fewer, p.more) for p in pairs] == [(8, 64), (64, 512), (512, 4096)]
    assert scaling.spread_of(pairs) == pytest.approx(0.03)
    assert scaling.left_over(pairs, 0.03) == pytest.approx(0.0, abs=1e-12)


def test_other_degrees_releases_and_batches_are_other_series() -> None:
    given = runs("one", 0.03, (8, 64))
    for other in ({"tp": "2"}, {"notes": "container 25.11"}, {"global_batch": "64"}, {"precision": "fp8"}):
        rows = [row(**given[0]), row(**{**given[1], **other})]
        assert not scaling.pairs_of(rows, priced(given)), other
    far = [given[0], {**given[1], "step_time_s": "4.0"}]  # a bad node
    assert not scaling.pairs_of([row(**r) for r in far], priced(far))


def test_the_command_prints_every_campaign_and_refuses_too_few(tmp_path: Path) -> None:
    app = scaling.typer.Typer()
    app.command()(scaling.main)
    given = runs("one", 0.01) + runs("two", 0.03)
    for kept, code in ((given, 0), (given[:4], 2)):
        write_csv(tmp_path / "rows.csv", kept)
        (tmp_path / "priced.json").write_text(json.dumps({"rows": priced(kept)}))
        words = ["--data", str(tmp_path / "rows.csv"), "--priced", str(tmp_path / "priced.json")]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == code, result.output
        assert ("spread: 2.0%, the median of 2 campaigns" in result.output) is (code == 0)
    assert (
        CliRunner().invoke(app, ["--data", str(tmp_path / "rows.csv"), "--priced", str(tmp_path / "no")]).exit_code == 2
    )
