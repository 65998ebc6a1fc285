"""Sends and receives of all pipeline ranks match as NCCL wants it: each rank's are run one after the other.

NCCL ignores tags, and takes what a rank sends and receives over a group in the order of the calls: a send lasts until
the other rank has come to its receive. A batch of both runs at once. Where the group is bound to no device, single ones
between two ranks have another communicator than those in a batch, so that one side of each must not be in a batch when
the other is not.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules

from autoplan.codegen.schedules import schedule_spec
from autoplan.runtime.pipeline import PipelineRunner, PipelineStagePart
from autoplan.runtime.stages import Carried
from autoplan.runtime.zero import GradientSync, ZeroStage
from autoplan.schedules.schedule import chunks_of_ranks


@dataclass
class Transfer:
    """A send or a receive of a rank; `num` tells the tensors of boundaries between stages apart."""

    sends: bool
    peer: int
    num: int
    done: bool = False


@dataclass
class Batch:
    """What a rank sends and receives at once."""

    transfers: list[Transfer] = field(default_factory=list)


class Scaled(torch.nn.Module):
    """A stage between boundaries `index - 1` and `index`, over which tensors of `index + 1` and one element go."""

    def __init__(self, index: int, is_last: bool) -> None:
        super().__init__()
        self.index, self.is_last = index, is_last
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, *carried: torch.Tensor, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        total = self.weight * sum((c.sum() for c in carried), x.sum())
        return total if self.is_last else tuple(total.expand(*c.shape) for c in carried_over(self.index))


def carried_over(boundary: int) -> tuple[Carried, ...]:
    """Two tensors, as an embedding that is used again at the end makes it; their sizes name the boundary."""
    return tuple(Carried((2 * boundary + 1 + k,), torch.float32) for k in range(2))


class AllDeclare:
    """The vote of a pipeline whose stages all declare their shapes."""

    def item(self) -> int:
        return 1


def batches_of(
    monkeypatch: pytest.MonkeyPatch, schedule: str, pp: int, virtual: int, num: int, rank: int
) -> list[Batch]:
    """Return what torch's schedule sends and receives on a rank in a step."""
    found: list[Batch] = []

    def record(ops: list[dist.P2POp], desc: str | None = None) -> list[dist.Work]:
        made = [Transfer(op.op is dist.isend, op.peer, op.tensor.numel()) for op in ops]
        mixed = len({t.sends for t in made}) > 1
        found.extend([Batch(made)] if mixed else [Batch([t]) for t in made])  # as schedules._batch_p2p
        return []

    monkeypatch.setattr(schedules, "_batch_p2p", record)
    dist.init_process_group("fake", rank=rank, world_size=pp)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (pp,), mesh_dim_names=("pp",))
        count = pp * virtual
        parts = [
            PipelineStagePart(
                i,
                Scaled(i, i == count - 1),
                GradientSync(ZeroStage.NOTHING),
                carried_over(i - 1) if i else (),
                carried_over(i) if i < count - 1 else (),
            )
            for i in chunks_of_ranks(schedule, pp, virtual)[rank]
        ]
        spec = schedule_spec(schedule)
        runner = PipelineRunner(parts, mesh, num_stages=count, schedule=spec, vote=AllDeclare())
        runner.run([{"x": torch.ones(1)} for _ in range(num)])
    finally:
        dist.destroy_process_group()
    return found


def left_over(queues: list[list[Batch]]) -> list[str]:
    """Run the batches of all ranks in order, each when its peers have come to theirs; what never runs."""
    at = [0] * len(queues)

    def here(rank: int) -> Batch:
        return queues[rank][at[rank]] if at[rank] < len(queues[rank]) else Batch()

    progress = True
    while progress:
        progress = False
        for rank in range(len(queues)):
            mine = here(rank)
            for send in (t for t in mine.transfers if t.sends and not t.done):
                theirs = here(send.peer)
                match = next((t for t in theirs.transfers if not t.sends and t.peer == rank and not t.done), None)
                if match is None:
                    continue
                assert match.num == send.num, f"ranks {rank} and {send.peer} have messages of other sizes"
                assert (len(mine.transfers) > 1) == (len(theirs.transfers) > 1), "in a batch on one side alone"
                send.done = match.done = progress = True
        for rank in range(len(queues)):
            if at[rank] < len(queues[rank]) and all(t.done for t in here(rank).transfers):
                at[rank], progress = at[rank] + 1, True
    return [f"rank {r}: {here(r)}" for r in range(len(queues)) if at[r] < len(queues[r])]


@pytest.mark.parametrize("num", [2, 4, 8])
@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize(
    ("schedule", "virtual"),
    [
        ("GPipe", 1), ("1F1B", 1), ("ZB-H1", 1), ("Interleaved1F1B", 2), ("InterleavedZeroBubble", 2), ("ZBV", 2),
        ("DualPipeV", 2),
    ],
)  # fmt: skip
def test_every_send_meets_its_receive(
    monkeypatch: pytest.MonkeyPatch, schedule: str, virtual: int, pp: int, num: int
) -> None:
    rounds = num if schedule in ("GPipe", "1F1B") else num * pp
    queues = [batches_of(monkeypatch, schedule, pp, virtual, rounds, rank) for rank in range(pp)]
    assert all(queues) and not left_over(queues)


def test_two_sends_that_wait_for_each_other_are_found() -> None:
    crossed = [[Batch([Transfer(sends, 1 - rank, 1)]) for sends in (True, False)] for rank in range(2)]
    assert len(left_over(crossed)) == 2
