"""The experiments that run programs beside what one writes by hand: each contender trains as one process does, and one
that does not is found out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import PATIENCE

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 280.0 * PATIENCE
pytestmark = pytest.mark.timeout(1200)


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=TIMEOUT_S, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def rows_of(experiment: str, processes: int, folder: Path) -> list[dict[str, Any]]:
    out = folder / "out.json"
    command = ["-m", f"experiments.by_hand.{experiment}", "--processes", str(processes), "--quick"]
    run(*command, "--timeout-s", "1000", "--json", str(out))
    return [row for case in json.loads(out.read_text())["cases"] for row in case["rows"]]


def assert_measured(rows: list[dict[str, Any]], pairs: list[tuple[str, str]]) -> None:
    assert [(r["program"], r["by_hand"]) for r in rows] == pairs
    for r in rows:
        assert r["repeats"] >= 5 and r["program_s"] > 0 and r["by_hand_s"] > 0 and r["ratio"]["median"] > 0
        assert max(r["differences"].values()) <= 1e-4


@pytest.mark.slow
@pytest.mark.processes
def test_zero_0_to_3_beside_ddp_and_fully_shard(tmp_path: Path) -> None:
    one = [
        ("ZeRO 0", "DDP"),
        ("ZeRO 1", "fully_shard kept"),
        ("ZeRO 1", "DDP, ZeroRedundancyOptimizer"),
        ("ZeRO 2", "fully_shard kept"),
        ("ZeRO 3", "fully_shard"),
    ]
    four = [
        ("ZeRO 0", "DDP"),
        ("ZeRO 1", "fully_shard kept, reduced once"),
        ("ZeRO 1", "DDP, ZeroRedundancyOptimizer"),
        ("ZeRO 2", "fully_shard kept"),
        ("ZeRO 2", "fully_shard, reduced once"),
        ("ZeRO 3", "fully_shard"),
        ("ZeRO 3", "fully_shard, reduced once"),
    ]
    assert_measured(rows_of("fully_sharded", 2, tmp_path), one + four)


FSDP_TP = [("dp2 x tp2 ZeRO 3", "FSDP2, TP+SP"), ("dp2 x tp2 ZeRO 3", "FSDP2, TP shared")]
FSDP_PP = [("dp2 x pp2 ZeRO 1", "FSDP2, 1F1B")]
TP_PP = [("tp2 x pp2 ZeRO 0", "TP+SP, 1F1B"), ("tp2 x pp2 ZeRO 0", "TP shared, 1F1B")]
ALL = [("dp2 x tp2 x pp2 ZeRO 1", "FSDP2, TP+SP, 1F1B"), ("dp2 x tp2 x pp2 ZeRO 1", "FSDP2, TP shared, 1F1B")]


@pytest.mark.slow
@pytest.mark.processes
def test_two_axes_beside_the_same_by_hand(tmp_path: Path) -> None:
    assert_measured(rows_of("composed", 4, tmp_path), FSDP_TP + FSDP_PP + TP_PP)


@pytest.mark.processes
@pytest.mark.exhaustive
def test_three_axes_beside_the_same_by_hand(tmp_path: Path) -> None:
    assert_measured(rows_of("composed", 8, tmp_path), ALL)


@pytest.mark.processes
def test_the_check_notices_what_trains_otherwise() -> None:
    said = run("-m", "tests.side_by_side_fault").splitlines()
    expected = [
        "none: equal",
        "data: loss differ by",
        "weights: loss differ by",
        "no step: parameters differ by",
        "name: no rank has 'model.embed_tokens.weight'",
    ]
    assert len(said) == 2 * len(expected)
    assert all(line.startswith(start) for line, start in zip(said, 2 * expected, strict=True)), said


@pytest.mark.exhaustive
@pytest.mark.processes
def test_state_on_the_host_and_compiled_blocks_beside_the_same_by_hand(tmp_path: Path) -> None:
    pairs = [
        ("parameters on the host", "fully_shard, on the host"),
        ("activations on the host", "DDP, save_on_cpu"),
        ("compiled", "DDP, compiled layers"),
    ]
    assert_measured(rows_of("host_and_compiled", 2, tmp_path), pairs)
