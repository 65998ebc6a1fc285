"""The published fine-tuning runs are priced from the words of their sources."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.published.fine_tuning import ALLOCATED, RESERVED, SOURCES, USED, Run, priced, runs


def test_every_run_has_a_source_and_says_what_was_measured() -> None:
    found = runs()
    assert {run.source for run in found} == set(SOURCES) and len({(r.source, r.name) for r in found}) == len(found)
    assert all(run.step_s is not None or run.gb is not None for run in found)
    assert all((run.step_s or 1) > 0 and (run.gb or 1) > 0 and run.held in (ALLOCATED, RESERVED, USED) for run in found)


@pytest.mark.parametrize(("name", "time", "memory"), [
    ("3B chunked loss", 0.10, 0.10),  # CEWithChunkedOutputLoss, compiled
    ("3B packed", 0.10, 0.06),  # F.cross_entropy, op by op
    ("llama-2-7b lora 2", None, 0.10),  # of rank 32, bfloat16
])  # fmt: skip
def test_full_and_lora_runs_are_near(name: str, time: float | None, memory: float, tmp_path: Path) -> None:
    run: Run = next(run for run in runs() if run.name == name and run.source != "litgpt")
    found = priced(run, tmp_path)
    assert found.memory_error is not None and abs(found.memory_error) < memory
    assert time is None or (found.time_error is not None and abs(found.time_error) < time)
