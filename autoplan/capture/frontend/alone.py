"""Run a model as in one process, whatever job this process belongs to and whatever else is installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist


@contextmanager
def in_one_process() -> Iterator[None]:
    """Hide the default process group: a program computes what one process computes, and sends what it has to.

    Rank 0 captures alone, so that a forward that sends tensors to the others (a codebook that is summed over ranks,
    gathered features) would wait for them for ever. One that asks for the number of ranks would be that of this job.
    Most such code asks `dist.is_initialized()` first, and then computes what one process does.
    """
    world = dist.GroupMember.WORLD
    dist.GroupMember.WORLD = None
    try:
        yield
    finally:
        dist.GroupMember.WORLD = world


@contextmanager
def products_in_order() -> Iterator[None]:
    """Let `torch.einsum` of three tensors or more take the order in which they are given.

    Where opt_einsum is installed, torch asks it for a better order, and it makes a number of every size: the graph
    would be that of one batch size.
    """
    flags = torch.backends.opt_einsum.flags
    with flags(enabled=False) if torch.backends.opt_einsum.enabled else nullcontext():
        yield
