"""Launch files: the plan's nodes and devices for each scheduler, and nothing that its fields do not know."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import one_line_error, run

from autoplan.errors import PinError
from autoplan.report.launch import TEMPLATES, check_fields, launch_text

SCRIPT = "train.py --lr 3e-4 --name 'a b'"
WORDS = ["train.py", "--lr", "3e-4", "--name", "a b"]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan for two nodes of eight devices."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    words = ("--cluster", "2x8xh100-sxm5-80gb", "--seq-len", "1k", "--global-batch-size", "64", "--tp", "4", "--json")
    result = run("estimate", "gpt2", *words)
    assert result.exit_code == 0, result.output
    path.write_text(result.stdout)
    return path


@pytest.mark.parametrize("to", TEMPLATES)
def test_every_file_has_the_mesh_of_the_plan(to: str, plan: Path, tmp_path: Path) -> None:
    text = launch_text(plan, to, script=SCRIPT, max_restarts=7)
    if to == "slurm":
        checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
        assert checked.returncode == 0, checked.stderr
        assert "--nodes=2\n" in text and "--gpus-per-node=8\n" in text and "--max-restarts 7" in text
        assert "--nnodes 2 --nproc-per-node 8" in text and text.rstrip().endswith(SCRIPT)
    elif to == "ray":
        ast.parse(text)
        assert "num_workers=16, use_gpu=True" in text and "max_failures=7" in text and repr(WORDS) in text
    else:
        YAML[to](yaml.safe_load(text))


def trainjob(data: Any) -> None:
    trainer = data["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8) and trainer["args"] == WORDS
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": 8}}
    assert trainer["command"] == ["torchrun", "--max-restarts", "7"]


def jobset(data: Any) -> None:
    (job,) = data["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert spec["parallelism"] == spec["completions"] == 2 and data["spec"]["failurePolicy"]["maxRestarts"] == 7
    (container,) = spec["template"]["spec"]["containers"]
    assert container["command"][-5:] == WORDS and container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    name, group = data["metadata"]["name"], job["name"]  # the host name that JobSet gives its first pod
    assert f"{name}-{group}-0-0.{name}:29500" in container["command"]


def skypilot(data: Any) -> None:
    assert data["num_nodes"] == 2 and data["resources"] == {"accelerators": "H100:8"}
    checked = subprocess.run(["bash", "-n"], input=data["run"], text=True, capture_output=True, check=False)
    assert checked.returncode == 0 and SCRIPT in data["run"]


YAML = {"trainjob": trainjob, "jobset": jobset, "skypilot": skypilot}


def test_a_field_that_is_not_there_is_refused() -> None:
    """Negative: an unknown field, and a number as text."""
    with pytest.raises(PinError, match=r"trainjob has no field spec\.trainer\.nodes; there are apiVersion"):
        check_fields("trainjob", {"spec": {"trainer": {"nodes": 2}}})
    with pytest.raises(PinError, match="numNodes is '2'; it must be of kind integer"):
        check_fields("trainjob", {"spec": {"trainer": {"numNodes": "2"}}})


@pytest.mark.parametrize(
    ("to", "settings", "said"),
    [
        ("pbs", {}, "no launch file for 'pbs'; there are slurm, trainjob"),
        ("slurm", {"name": "My Job"}, "name 'My Job': lower-case letters"),
        ("slurm", {"script": " "}, "--script is empty"),
        ("slurm", {"max_restarts": -1}, "--max-restarts -1: at least 0"),
    ],
)
def test_what_cannot_be_is_named(to: str, settings: dict[str, Any], said: str, plan: Path) -> None:
    with pytest.raises(PinError, match=said):
        launch_text(plan, to, **settings)


def test_on_the_command_line(plan: Path, tmp_path: Path) -> None:
    done = run("launch", str(plan), "--for", "slurm", "--out", str(tmp_path / "job.sh"))
    assert done.exit_code == 0 and (tmp_path / "job.sh").read_text() == launch_text(plan, "slurm")
    assert "no launch file for 'pbs'" in one_line_error(run("launch", str(plan), "--for", "pbs"), 2)


def test_a_cluster_without_gpus_asks_for_none(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    words = ("--cluster", "local", "--seq-len", "1k", "--global-batch-size", "16", "--json")
    path.write_text(run("estimate", "gpt2", *words).stdout)
    texts = {to: launch_text(path, to) for to in TEMPLATES}
    assert not any("gpu" in texts[to] for to in ("slurm", "trainjob", "jobset", "skypilot"))
    assert "use_gpu=False" in texts["ray"] and "resources" not in yaml.safe_load(texts["skypilot"])
