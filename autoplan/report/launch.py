"""Launch files: a plan as the job of a cluster's scheduler. The templates are in `profiles/launch`.

    text = autoplan.report.launch.launch_text(Path("plan.json"), "slurm", script="train.py")

Every file starts the script with one process per device on the plan's nodes, and again after a failure; the script goes
on from its last checkpoint (docs/training.md).
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import typer

from autoplan.cost_models.hardware import catalog
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.errors import PinError
from autoplan.plans.record import Plan
from autoplan.report.files import check_writable, write_text
from autoplan.report.plan_file import read_plan_file

PORT = 29500
IMAGE = "pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime"
TEMPLATES: Mapping[str, str] = {
    "slurm": "slurm.sh",
    "trainjob": "trainjob.yaml",
    "jobset": "jobset.yaml",
    "ray": "ray.py",
    "skypilot": "skypilot.yaml",
}
# Schedulers whose jobs have one number of nodes.
_FIXED_NODES: Mapping[str, str] = {
    "trainjob": "numNodes of a TrainJob is one number",
    "jobset": "a JobSet has as many pods as its parallelism says, and ends when all of them have completed",
    "skypilot": "num_nodes of a SkyPilot task is one number",
}
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")


def launch_text(
    plan: Path,
    to: str,
    *,
    script: str = "train.py",
    name: str = "autoplan",
    image: str | None = None,
    max_restarts: int = 3,
    min_nodes: int | None = None,
) -> str:
    """Return the launch file of a plan.

    Args:
        plan: a plan file, or the folder of a compiled program.
        to: slurm, trainjob (Kubeflow Trainer), jobset, ray (Ray Train) or skypilot.
        script: the training script and its arguments, as on a command line.
        name: of the job, as Kubernetes takes names.
        image: of the containers of trainjob and jobset; None: PyTorch's (IMAGE).
        max_restarts: how often the job starts again after a failure.
        min_nodes: the least number of nodes that the job runs on, for slurm and ray; None: those of the plan. On fewer
            nodes than those the script has to plan for itself (`parallelize(model, "local")`).

    Raises:
        PinError: an unknown scheduler, a name that Kubernetes refuses, no script, a negative number of restarts, a
            range of nodes that is none or that the scheduler has no field for, an image for a job without
            containers, or a plan file that is none.
    """
    if to not in TEMPLATES:
        raise PinError(f"no launch file for {to!r}; there are {', '.join(TEMPLATES)}")
    if not _NAME.fullmatch(name):
        raise PinError(
            f"--name {name!r} must have at most 40 lower-case letters, digits and hyphens, and begin with a letter"
        )
    template = (resources.files("autoplan.profiles") / "launch" / f"{TEMPLATES[to]}.j2").read_text()
    if image is not None and "{{ image }}" not in template:
        raise PinError(f"--image {image}: {to} starts the job in an environment that is there; leave it out")
    words = shlex.split(script)
    if not words:
        raise PinError("--script is empty; give the training script, such as train.py")
    if max_restarts < 0:
        raise PinError(f"--max-restarts {max_restarts} must be at least 0")
    cluster = read_plan_file(_plan_file(plan)).request.cluster
    least = _least_nodes(to, min_nodes, cluster.num_nodes)
    given = {"name": name, "image": image or IMAGE, "max_restarts": max_restarts, "least": least}
    return _rendered(template, cluster, words, given)


def _least_nodes(to: str, min_nodes: int | None, nodes: int) -> int:
    """Return the least number of nodes that a job runs on.

    Raises:
        PinError: it is not between 1 and the plan's number of nodes, or the scheduler has no range of nodes.
    """
    if min_nodes is None or min_nodes == nodes:
        return nodes
    if not 1 <= min_nodes <= nodes:
        raise PinError(f"--min-nodes {min_nodes}: the plan has {nodes} nodes; give 1 to {nodes}")
    if to in _FIXED_NODES:
        ranged = " and ".join(each for each in TEMPLATES if each not in _FIXED_NODES)
        raise PinError(
            f"--min-nodes {min_nodes}: {_FIXED_NODES[to]}; {ranged} take a range of nodes. For another number of nodes "
            f"write a {to} file of a plan for it"
        )
    return min_nodes


def _plan_file(plan: Path) -> Path:
    """Return the file of a plan that is given as a file, or as the folder of a compiled program."""
    return plan / "plan.json" if plan.is_dir() else plan


def _rendered(template: str, cluster: Cluster, words: list[str], given: Mapping[str, Any]) -> str:
    import jinja2

    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["pylist"] = repr
    environment.policies["json.dumps_function"] = lambda value, **_: json.dumps(value)
    nodes, devices = cluster.num_nodes, cluster.devices_per_node  # those in use: idle ones are further nodes
    head = f"{given['name']}-node-0-0.{given['name']}"
    run = ["torchrun", "--nnodes", nodes, "--nproc-per-node", devices, "--max-restarts", 0]
    run += ["--rdzv-backend", "c10d", "--rdzv-id", given["name"], "--rdzv-endpoint", f"{head}:{PORT}", *words]
    values = {
        **given,
        "nodes": nodes,
        "devices": devices,
        "gpus": _resource(cluster),
        "units": _units(cluster),
        "accelerator": _accelerator(cluster.device.name),
        "port": PORT,
        "words": words,
        "script": shlex.join(words),
        "command": list(map(str, run)),
    }
    return environment.from_string(template).render(values)


# What the device plugin of a vendor calls a device: https://github.com/NVIDIA/k8s-device-plugin,
# https://github.com/ROCm/k8s-device-plugin, https://cloud.google.com/kubernetes-engine/docs/concepts/tpus and
# https://awsdocs-neuron.readthedocs-hosted.com (Neuron device plugin). A device that the catalog does not know is taken
# for NVIDIA's.
_RESOURCES = {
    "NVIDIA": "nvidia.com/gpu",
    "AMD": "amd.com/gpu",
    "Google": "google.com/tpu",
    "AWS": "aws.amazon.com/neuron",
}


def _resource(cluster: Cluster) -> str | None:
    """Return the name under which Kubernetes counts the devices; None for CPUs."""
    if cluster.device_type == "cpu":
        return None
    known = catalog.entries().get(cluster.device.name)
    return _RESOURCES[known.vendor] if known is not None else _RESOURCES["NVIDIA"]


_OF_CHIPS = ("Google", "AWS")  # vendors whose plugin counts chips, which may have several ranks; AMD's counts dies


def _units(cluster: Cluster) -> int:
    """Return how many devices of a node Kubernetes counts."""
    known = catalog.entries().get(cluster.device.name)
    ranks = known.ranks if known is not None and known.vendor in _OF_CHIPS else 1
    return max(1, cluster.devices_per_node // ranks)


def _accelerator(device: str) -> str:
    """Return SkyPilot's name of a device."""
    known = json.loads((resources.files("autoplan.profiles") / "launch" / "accelerators.json").read_text())
    return str(known.get(device, device.split("-")[0].upper()))


def launch_command(plan: Path, to: str, out: Path | None, **settings: Any) -> None:
    """Write the answer of `autoplan launch`. A plan that does not fit is said on standard error."""
    if out is not None:
        check_writable(out)
    text = launch_text(plan, to, **settings)
    estimate = Plan.read(_plan_file(plan)).estimate
    if estimate is not None and not estimate.fits:
        typer.echo(f"{plan}: this plan does not fit, as autoplan estimate {_plan_file(plan)} says", err=True)
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_text(out, text)
        typer.echo(f"wrote {out}: {to}")
