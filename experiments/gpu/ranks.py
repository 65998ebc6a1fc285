"""Of experiments/gpu: four ranks that share one GPU over gloo, CUDA tensors and all: parity of every axis in float64.

NCCL refuses two ranks of one GPU; gloo does not. Its sends and receives take host memory only, so here they go through
the host (`through_host`); collectives it copies by itself. What gloo cannot do with CUDA tensors is told as what it
raised: a finding about gloo, not about the program, which the same plan on the CPU shows.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

import autoplan
from autoplan.profiler.processes import RankError, run_ranks
from experiments.gpu.rows import Row, Run, append_row, read_rows, worst_difference
from experiments.shared.models import Size, make_llama, make_mixtral, token_batch
from experiments.shared.training import OPTIMIZER, part_of, train_alone

WORLD = 4
SIZE = Size(64, 4, 32, 8, 128)
# In float64, in another order of additions; parameters after three steps of an optimizer that divides by small numbers.
LIMITS = {"loss": 1e-12, "gradients": 1e-12, "parameters": 1e-8}


@dataclass(frozen=True)
class Layout:
    """One plan of four ranks."""

    name: str
    pins: dict[str, Any] = field(default_factory=dict)
    family: str = "llama"


LAYOUTS = (
    Layout("tp", {"tp": 4}),
    Layout("dp, ZeRO 0", {"dp": 4}),
    Layout("dp, ZeRO 1", {"dp": 4, "zero_stage": 1}),
    Layout("dp, ZeRO 2", {"dp": 4, "zero_stage": 2, "num_micro_batches": 2}),
    Layout("dp, ZeRO 3", {"dp": 4, "zero_stage": 3}),
    Layout("hybrid ZeRO 3", {"dp": 4, "zero_stage": 3, "zero_replicas": 2}),
    Layout("Ulysses", {"cp": 2, "dp": 2, "context_method": "ulysses"}),
    Layout("gathered context", {"cp": 4, "context_method": "gather"}),
    Layout("dp x tp x ZeRO 3, recompute", {"dp": 2, "tp": 2, "zero_stage": 3, "recompute": "full"}),
    Layout("parameters on the host", {"dp": 4, "zero_stage": 3, "offload": "parameters"}),
    Layout("ep", {"dp": 4, "ep": 4}, "mixtral"),
    Layout("ep inside tp", {"dp": 2, "tp": 2, "ep": 2, "etp": 2}, "mixtral"),
    Layout("ring", {"cp": 4, "context_method": "ring"}),
    Layout("pp, 1F1B", {"pp": 4, "num_micro_batches": 4}),
    Layout("pp, zero bubble, tp", {"pp": 2, "tp": 2, "num_micro_batches": 4, "schedule": "ZB-H1"}),
)
QUICK = ("tp", "dp, ZeRO 3", "ring", "ep")


@dataclass(frozen=True)
class _Staged:
    """A send or receive through a copy on the host. `to`: where what comes belongs, on the device."""

    work: dist.Work
    copy: torch.Tensor
    to: torch.Tensor | None

    def wait(self, *args: Any) -> bool:
        """Wait as `dist.Work`."""
        self.work.wait(*args)
        if self.to is not None:
            self.to.copy_(self.copy)
        return True


@contextmanager
def through_host() -> Iterator[None]:
    """Let point-to-point messages of any device go through the host's memory."""
    isend, irecv = dist.isend, dist.irecv

    def send(tensor: torch.Tensor, **how: Any) -> _Staged:
        copy = tensor.detach().cpu().clone()
        return _Staged(isend(copy, **how), copy, None)  # type: ignore[arg-type]

    def receive(tensor: torch.Tensor, **how: Any) -> _Staged:
        copy = torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format)
        return _Staged(irecv(copy, **how), copy, tensor.detach())  # type: ignore[arg-type]

    def several(ops: list[dist.P2POp]) -> list[_Staged]:
        out = []
        for op in ops:
            sends = op.op in (isend, send)
            how = {"group": op.group, "tag": op.tag, "group_dst" if sends else "group_src": op.group_peer}
            out.append((send if sends else receive)(op.tensor, **how))
        return out

    def sent(tensor: torch.Tensor, dst: int | None = None, **how: Any) -> None:
        send(tensor, dst=dst, **how).wait()

    def received(tensor: torch.Tensor, src: int | None = None, **how: Any) -> None:
        receive(tensor, src=src, **how).wait()

    calls = {"isend": send, "irecv": receive, "send": sent, "recv": received, "batch_isend_irecv": several}
    with patch.object(dist.distributed_c10d, "_check_op", lambda op: None), patch.multiple(dist, **calls):
        yield


def _loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
    """The loss of the next token in the dtype of the logits; that of transformers is in float32."""
    following = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
    return nn.functional.cross_entropy(logits.reshape(-1, vocab_size), following.reshape(-1))


def _model(family: str, device: torch.device) -> nn.Module:
    model: Any = make_mixtral(SIZE, 8, 2) if family == "mixtral" else make_llama(SIZE)
    model.loss_function = _loss
    model.config._experts_implementation = "eager"  # the grouped products of the eager model do not take float64
    out: nn.Module = model.double().to(device)
    return out


def _one(layout: Layout, device: torch.device) -> Row:
    whole = {n: x.to(device) for n, x in token_batch(SIZE).items()}
    truth = train_alone(_model(layout.family, device), whole)
    pins = {"dp": 1, "tp": 1, "pp": 1, "num_micro_batches": 1, "recompute": "none"} | layout.pins
    pm = autoplan.parallelize(
        _model(layout.family, device), autoplan.Cluster.local(WORLD, device.type), optimizer=OPTIMIZER,
        example_inputs=part_of(whole, 0, pins["dp"]), pins=pins, global_batch_size=SIZE.batch, verify=False,
        device=device, compile=False,
    )  # fmt: skip
    mine = part_of(whole, pm.data_rank, pm.data_world)
    errors = {"loss": 0.0, "gradients": 0.0}
    for step, expected in enumerate(truth.losses):
        errors["loss"] = max(errors["loss"], abs(float(pm.step(mine)) - expected) / abs(expected))
        if step == 0:
            errors["gradients"] = worst_difference(pm.gradients(), truth.gradients)
        pm.optimizer.step()
    state = pm.state_dict()
    errors["parameters"] = worst_difference({n: state[n] for n in truth.parameters}, truth.parameters)
    found = torch.tensor(list(errors.values()), dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)  # on the host
    figures = dict(zip(errors, found.tolist(), strict=True))
    return Row("ranks", layout.name, figures, all(figures[name] <= limit for name, limit in LIMITS.items()))


def work(rank: int, world: int, names: list[str], device_type: str, rows: str) -> None:
    """Each process: the layouts one after the other; rank 0 writes a row when it has it."""
    warnings.filterwarnings("ignore")
    device = torch.device("cuda", 0) if device_type == "cuda" else torch.device("cpu")
    for layout in (x for x in LAYOUTS if x.name in names):
        try:
            with through_host():
                row = _one(layout, device)
        except Exception as exc:
            if rank == 0:
                text = f"{type(exc).__name__}: {' '.join(str(exc).split())[:300]}"
                append_row(Path(rows), Row("ranks", layout.name, {}, False, text))
                traceback.print_exc()
            raise
        if rank == 0:
            append_row(Path(rows), row)


def ranks(run: Run) -> None:
    """All layouts; after one that breaks its processes the others go on in new ones."""
    names = [x.name for x in LAYOUTS if not run.quick or x.name in QUICK]
    while names:
        if run.left_s <= 5.0:
            raise TimeoutError(f"no time left for {', '.join(names)}")
        try:
            run_ranks(work, WORLD, names, run.device_type, str(run.rows), timeout_s=run.left_s)
            return
        except RankError as exc:
            found = read_rows(run.rows)
            told = bool(found) and found[-1].passed is False and not found[-1].figures
            left = [n for n in names if n not in {row.name for row in found}]
            if not told and left:  # rank 0 could not say
                append_row(run.rows, Row(run.part, left.pop(0), {}, False, " ".join(str(exc).split())[-300:]))
            names = left
