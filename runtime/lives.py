"""The lives of a job under torchrun, which starts the script of every rank again when one has failed.

torchrun's agents keep one key-value store for all lives of a job, and workers use it without a prefix (torch 2.13;
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is torch's way out). Groups of a later life then find the addresses of dead ranks:
gloo fails with "connection refused". So every life gets a prefix of its own. The number of restarts would not do: an
agent that saw only another agent's failure counts none.

Rank 0 makes a name for its life, and tells it to every rank that says hello with a number it has just drawn. A rank
believes an answer to its own number alone, and rank 0 waits until all have thanked for its name: whatever an earlier
life left in the store, nobody takes it for the present one.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistStoreError

_KEY = "autoplan_lives"
_PAUSE_S = 0.02


def of_this_life(store: Store, rank: int, world: int, timeout: timedelta) -> Store:
    """Return the store under a prefix that all ranks of this life share, and no earlier life had.

    A collective. If a rank does not come within the timeout, the prefix is useless, and the next wait in it says
    which rank is missing.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or world == 1:
        return store
    mine = uuid.uuid4().hex
    name = _lead(store, world, mine, timeout) if rank == 0 else _follow(store, rank, mine, timeout)
    return PrefixStore(f"{_KEY}/{name}", store)


def _lead(store: Store, world: int, name: str, timeout: timedelta) -> str:
    heard: dict[int, str] = {}
    missing = set(range(1, world))
    end = time.monotonic() + timeout.total_seconds()
    while missing and time.monotonic() < end:
        for rank in sorted(missing):
            hello = f"{_KEY}/hello/{rank}"
            if store.check([hello]) and heard.get(rank) != (number := store.get(hello).decode()):
                heard[rank] = number
                store.set(f"{_KEY}/answer/{rank}/{number}", name)
        missing = {rank for rank in missing if not store.check([f"{_KEY}/thanks/{name}/{rank}"])}
        if missing:
            time.sleep(_PAUSE_S)
    return name


def _follow(store: Store, rank: int, number: str, timeout: timedelta) -> str:
    answer = f"{_KEY}/answer/{rank}/{number}"
    store.set(f"{_KEY}/hello/{rank}", number)
    try:
        store.wait([answer], timeout)
    except DistStoreError:  # rank 0 has not come
        return number
    name: str = store.get(answer).decode()
    store.set(f"{_KEY}/thanks/{name}/{rank}", "")
    return name
