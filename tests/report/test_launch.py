"""Launch files: the plan's nodes and devices for each scheduler, and nothing that its fields do not know."""

from __future__ import annotations

import ast
import json
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from command_line import one_line_error, run

from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.errors import PinError
from autoplan.report.launch import IMAGE, TEMPLATES, _resource, _units, launch_text

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


@pytest.fixture(scope="module")
def cpu_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    words = ("--cluster", "local", "--seq-len", "1k", "--global-batch-size", "16", "--json")
    path.write_text(run("estimate", "gpt2", *words).stdout)
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
        assert text.index('"RAY_CHDIR_TO_TRIAL_DIR"] = "0"') < text.index("TorchTrainer(\n")  # read by its fit()
    else:
        YAML[to](yaml.safe_load(text))


def test_a_range_of_nodes(plan: Path, tmp_path: Path) -> None:
    """Slurm's script is run with a stand-in for srun, which says what it is given."""
    text = launch_text(plan, "slurm", script=SCRIPT, max_restarts=7, min_nodes=1)
    assert "#SBATCH --nodes=1-2\n" in text and "#SBATCH --no-kill\n" in text
    for name, body in (("srun", 'printf "%s|" "$@"'), ("scontrol", "printf 'n7\\nn9\\n'")):
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "n[7,9]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "5"}
    done = subprocess.run(
        ["bash"],
        input=text,
        text=True,
        capture_output=True,
        check=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", **slurm},
    )
    words = ["--no-kill", "--kill-on-bad-exit=0", "torchrun", "--nnodes", "1:2", "--nproc-per-node", "8"]
    words += ["--max-restarts", "7", "--rdzv-backend", "c10d", "--rdzv-id", "5", "--rdzv-endpoint", "n7:29500", *WORDS]
    assert done.stdout.split("|")[:-1] == words
    ray = launch_text(plan, "ray", script=SCRIPT, min_nodes=1)
    ast.parse(ray)
    assert "num_workers=(8, 16), use_gpu=True" in ray
    for to in TEMPLATES:  # a range of one number is that number
        assert launch_text(plan, to, min_nodes=2) == launch_text(plan, to)


def test_idle_nodes_are_beside_those_that_run(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    words = ("gpt2", "--cluster", "3x8xh100-sxm5-80gb@nodes=2,idle=1", "--seq-len", "1k", "--global-batch-size", "64")
    path.write_text(run("estimate", *words, "--json").stdout)
    assert "#SBATCH --nodes=2\n" in launch_text(path, "slurm", script=SCRIPT)


def schema(to: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(__file__).parents[1] / "schemas" / f"{to}.json").read_text())
    return found


@pytest.mark.parametrize("gpus", [True, False])
@pytest.mark.parametrize("to", ["trainjob", "jobset", "skypilot"])
def test_files_obey_the_schema_of_their_scheduler(to: str, gpus: bool, plan: Path, cpu_plan: Path) -> None:
    document = yaml.safe_load(launch_text(plan if gpus else cpu_plan, to, script=SCRIPT))
    jsonschema.validate(document, schema(to))


@pytest.mark.parametrize(
    ("to", "path", "value", "said"),
    [
        ("trainjob", ["spec", "trainer", "nodes"], 2, "'nodes' was unexpected"),
        ("trainjob", ["spec", "trainer", "numNodes"], "2", "'2' is not of type 'integer'"),
        ("trainjob", ["spec", "runtimeRef"], None, "None is not of type 'object'"),
        ("jobset", ["spec", "failurePolicy", "maxRestart"], 2, "'maxRestart' was unexpected"),
        ("jobset", ["spec", "replicatedJobs", 0, "template", "spec", "template", "spec", "containers", 0, "name"], 7,
         "7 is not of type 'string'"),
        ("skypilot", ["resources", "accelerator"], "H100:8", "'accelerator' was unexpected"),
        ("skypilot", ["envs"], {"A-B": "1"}, "does not match any of the regexes"),
    ],
)  # fmt: skip
def test_the_schemas_refuse_what_is_wrong(to: str, path: list[Any], value: Any, said: str, plan: Path) -> None:
    """Negative control: a field of another name, a value of another kind."""
    document = yaml.safe_load(launch_text(plan, to))
    at = document
    for word in path[:-1]:
        at = at[word]
    at[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError, match=said):
        jsonschema.validate(document, schema(to))


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
    (mount,), (volume,) = container["volumeMounts"], spec["template"]["spec"]["volumes"]
    assert mount == {"name": volume["name"], "mountPath": "/dev/shm"} and volume["emptyDir"] == {"medium": "Memory"}
    name, group = data["metadata"]["name"], job["name"]  # the host name that JobSet gives its first pod
    assert f"{name}-{group}-0-0.{name}:29500" in container["command"]


def skypilot(data: Any) -> None:
    assert data["num_nodes"] == 2 and data["resources"] == {"accelerators": "H100:8"}
    checked = subprocess.run(["bash", "-n"], input=data["run"], text=True, capture_output=True, check=False)
    assert checked.returncode == 0 and SCRIPT in data["run"]


YAML = {"trainjob": trainjob, "jobset": jobset, "skypilot": skypilot}


@pytest.mark.parametrize(
    ("to", "settings", "said"),
    [
        ("pbs", {}, "no launch file for 'pbs'; there are slurm, trainjob"),
        ("slurm", {"name": "My Job"}, "--name 'My Job' must have at most 40 lower-case letters"),
        ("slurm", {"script": " "}, "--script is empty"),
        ("slurm", {"max_restarts": -1}, "--max-restarts -1 must be at least 0"),
        ("slurm", {"min_nodes": 3}, "--min-nodes 3: the plan has 2 nodes; give 1 to 2"),
        ("ray", {"min_nodes": 0}, "--min-nodes 0: the plan has 2 nodes"),
        ("trainjob", {"min_nodes": 1}, "numNodes of a TrainJob is one number; slurm and ray take a range of nodes"),
        ("jobset", {"min_nodes": 1}, "a JobSet has as many pods as its parallelism says"),
        (
            "slurm",
            {"image": "mine"},
            "--image mine: slurm starts the job in an environment that is there; leave",
        ),
        ("skypilot", {"min_nodes": 1}, "num_nodes of a SkyPilot task is one number"),
    ],
)
def test_what_cannot_be_is_named(to: str, settings: dict[str, Any], said: str, plan: Path) -> None:
    with pytest.raises(PinError, match=said):
        launch_text(plan, to, **settings)


def test_on_the_command_line(plan: Path, tmp_path: Path) -> None:
    done = run("launch", str(plan), "--for", "slurm", "--out", str(tmp_path / "job.sh"))
    assert done.exit_code == 0 and (tmp_path / "job.sh").read_text() == launch_text(plan, "slurm")
    ranged = run("launch", str(plan), "--for", "ray", "--min-nodes", "1")
    assert ranged.exit_code == 0 and ranged.stdout == launch_text(plan, "ray", min_nodes=1)
    assert "no launch file for 'pbs'" in one_line_error(run("launch", str(plan), "--for", "pbs"), 2)


def test_a_cluster_without_gpus_asks_for_none(cpu_plan: Path) -> None:
    texts = {to: launch_text(cpu_plan, to) for to in TEMPLATES}
    assert not any("gpu" in texts[to] for to in ("slurm", "trainjob", "jobset", "skypilot"))
    assert "use_gpu=False" in texts["ray"] and "resources" not in yaml.safe_load(texts["skypilot"])


@pytest.mark.parametrize(("cluster", "counted"), [
    ("2x4xtpu-v7x", ("google.com/tpu", 2)),  # 4 ranks are the TensorCores of 2 chips
    ("2x8xtrainium2-96gb", ("aws.amazon.com/neuron", 2)), ("2x8xmi250x-128gb", ("amd.com/gpu", 8)),
])  # fmt: skip
def test_kubernetes_counts_what_the_plugin_of_the_vendor_counts(cluster: str, counted: tuple[str, int]) -> None:
    where = Cluster.parse(cluster)
    assert (_resource(where), _units(where)) == counted


def test_the_documentation_has_the_image_of_the_files(plan: Path) -> None:
    documented = Path(__file__).parents[2] / "docs" / "training.md"
    assert f"FROM {IMAGE}\n" in documented.read_text()
    assert all(f"image: {IMAGE}\n" in launch_text(plan, to) for to in ("trainjob", "jobset"))


def test_a_plan_that_does_not_fit_is_said(plan: Path, tmp_path: Path) -> None:
    path = tmp_path / "big.json"
    words = ("--cluster", "1x8xh100-sxm5-80gb", "--seq-len", "8k", "--global-batch-size", "8", "--json")
    big = run("estimate", "llama-3.1-8b", *words, "--zero", "0", "--dp", "8")
    assert big.exit_code != 0 and not json.loads(big.stdout)["estimate"]["fits"]
    path.write_text(big.stdout)
    fitting, too_big = (run("launch", str(p), "--for", "slurm") for p in (plan, path))
    assert (fitting.exit_code, too_big.exit_code, fitting.stderr) == (0, 0, "")
    assert "this plan does not fit" in too_big.stderr and too_big.stdout.startswith("#!")
