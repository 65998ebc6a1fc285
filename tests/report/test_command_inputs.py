"""Numbers of the command line: what suffixes mean, and what no sweep may ask for."""

import errno
import json
from pathlib import Path

import pytest
from command_line import PLAIN, TASK, one_line_error, run
from typer.testing import CliRunner

from autoplan.cli import app
from autoplan.errors import PinError
from autoplan.report.arguments import read_vary
from autoplan.sweeps.whatif import check_varied


def test_lengths_are_binary_and_tokens_of_a_run_decimal() -> None:
    """1M tokens of a sequence are 1,048,576 (8k is 8,192); 1M tokens of a run are 1,000,000. The help says so."""
    task = ("gpt2", "--cluster", "1x4xh100-sxm5-80gb", "--global-batch-size", "16")
    message = one_line_error(run("plan", *task, "--seq-len", "1M"), 2)
    assert "seq_len=1048576" in message and "1000000" not in message
    assert read_vary(["seq_len=512k..1M"]) == {"seq_len": [2**19, 2**20]}
    data = json.loads(run("estimate", *TASK, "--tokens", "1M", "--json").stdout)
    assert data["estimate"]["run"]["tokens"] == 1_000_000
    words = " ".join(run("plan", "--help").stdout.split())
    assert "1M is 1,048,576" in words and "300B is 300,000,000,000" in words


@pytest.mark.parametrize(
    ("vary", "wrong", "works"),
    [
        ("nodes=1..1000000000000", "1000000000000 must be a whole number from 1 to 1,000,000", "1..1000000"),
        ("nodes=2,4000000", "4000000 must be a whole number from 1 to 1,000,000", "2,1000000"),
        ("seq_len=1k..10B", "10B must be a whole number from 1 to 1,000,000,000", "1k..1000000000"),
        ("nic=100..1e20", "1e20 must be a number from 1e-09 to 1e+06 Gbit/s", "100..1e+06"),
        ("tp=8..1T", "1T must be a whole number", "8..1000000000"),
        ("zero_stage=1,7", "7 must be a whole number from 0 to 3", "1,3"),
    ],
)
def test_what_is_beyond_any_sweep_is_refused_before_it_begins(vary: str, wrong: str, works: str) -> None:
    line = one_line_error(run("whatif", *TASK, "--vary", vary), 2)
    name, _, _ = vary.partition("=")
    assert f"vary {vary}: " in line and wrong in line and line.endswith(f"nearest that works: {works}")
    check_varied(read_vary([f"{name}={works}"]))  # negative: what is named is not refused


def test_too_many_points_are_refused_before_they_are_enumerated() -> None:
    many = [f"{name}={','.join(map(str, range(1, 51)))}" for name in ("tp", "dp", "pp")]
    line = one_line_error(run("whatif", *TASK, *(word for text in many for word in ("--vary", text))), 2)
    assert "tp 50 x dp 50 x pp 50 = 125,000 points" in line and line.endswith("nearest that works: 4 values of tp")
    check_varied({"tp": range(4), "dp": range(50), "pp": range(50)})  # 10,000: what is named is not refused
    with pytest.raises(PinError, match="at most 10,000"):
        check_varied({"nodes": range(1, 10**6), "global_batch_size": range(1, 10**6)})
    with pytest.raises(PinError, match="1000000000000 must be a whole number"):
        check_varied({"nodes": [1, 10**12]})


def test_a_capacity_table_has_the_same_limits(tmp_path: Path) -> None:
    def refused(lists: str) -> str:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.yaml"  # `run` remembers what it ran
        path.write_text("models: no/such/config.json\nclusters: 1x4xh100-sxm5-80gb\ntokens: 1T\n" + lists)
        return one_line_error(run("capacity", str(path)), 2)

    many = f"seq_len: {list(range(1, 201))}\nglobal_batch_size: {list(range(1, 101))}\n"
    assert "seq_len 200 x global_batch_size 100 = 20,000 points, and one sweep has at most 10,000" in refused(many)
    line = refused("seq_len: [1k, 1000000000000]\nglobal_batch_size: 8\n")
    assert "seq_len[1]: seq_len=1000000000000 must be a whole number from 1 to 1,000,000,000" in line
    fine = refused("seq_len: [1k, 1M]\nglobal_batch_size: 8\n")  # negative: these get as far as the model
    assert "there is no file" in fine


def test_what_the_system_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full where nobody thought of it is no traceback."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/cache/graph.json")

    monkeypatch.setattr("autoplan.report.request.load_model", full)
    result = CliRunner().invoke(app, ["plan", *TASK], env=PLAIN)
    assert one_line_error(result, 2) == "error: /cache/graph.json: No space left on device"
