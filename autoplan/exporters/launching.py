"""Lines that start a run: torchrun on every node, by hand or by Slurm."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from autoplan.exporters.record import Document
from autoplan.exporters.setup import Setup


def torchrun(about: Setup, program: Sequence[str]) -> list[str]:
    """Return the command that starts a program on every device; with several nodes it is run on each of them.

    `program`: the script and its arguments; an argument that begins with $ is left as it is.
    """
    nodes, devices = max(1, about.task.num_nodes), max(1, about.task.devices_per_node)
    words = ["torchrun", "--nnodes", str(nodes), "--nproc-per-node", str(devices)]
    if nodes > 1:
        words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", '"$HEAD_NODE:29500"']
    return [" ".join([*words, *(w if w.startswith(('"$', "$")) else shlex.quote(w) for w in program)])]


def srun(about: Setup, program: Sequence[str]) -> list[str]:
    """Return the lines of Slurm that start torchrun on every node."""
    nodes, devices = max(1, about.task.num_nodes), max(1, about.task.devices_per_node)
    (line,) = torchrun(about, program)
    if nodes == 1:
        return [line]
    return [_HEAD, f"srun --nodes {nodes} --ntasks-per-node 1 --gpus-per-node {devices} {line}"]


def per_node(about: Setup, command: str) -> list[str]:
    """Return the lines of Slurm that run a command once on every node; `$SLURM_NODEID` in it is the node's number."""
    nodes, devices = max(1, about.task.num_nodes), max(1, about.task.devices_per_node)
    if nodes == 1:
        return [command]
    start = f"srun --nodes {nodes} --ntasks-per-node 1 --gpus-per-node {devices}"
    return [_HEAD, f"{start} bash -c {shlex.quote(command)}"]


def processes(document: Document, found: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the processes that a launcher starts; None if they are the cluster's devices."""
    nodes, devices = (document.count(f"launch.{name}", 0) for name in ("nnodes", "nproc_per_node"))
    total = document.task.num_devices
    if not nodes or not devices or not total or nodes * devices == total:
        return None
    near = f"--nnodes {document.task.num_nodes} --nproc-per-node {document.task.devices_per_node}"
    return f"torchrun starts {nodes * devices} processes, but the cluster has {total} devices; nearest: {near}"


_HEAD = 'HEAD_NODE=${HEAD_NODE:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)} && export HEAD_NODE'
