"""Errors that all ranks raise alike, so that a job survives them.

A rank that raises on its own leaves the others waiting in their next collective. Input is therefore checked on every
rank before the first collective that depends on it, and the ranks agree on the outcome (`agree`): either all of them
raise the same error or none does, and the job goes on in both cases.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist

E = TypeVar("E", bound=BaseException)
T = TypeVar("T")

_MOST_TEXTS = 4  # different problems that one message lists


class AgreedError(Exception):
    """Base of errors that every rank raises alike, after the ranks agreed on them.

    Collectives still work: `guard` of autoplan.runtime.failure lets these errors pass.
    """


class AgreedValueError(AgreedError, ValueError):
    """A value passed to a public call does not fit, on this rank or on another."""


class AgreedRuntimeError(AgreedError, RuntimeError):
    """Like AgreedValueError, where PyTorch raises RuntimeError (`load_state_dict`)."""


def agree(problem: str | None, device: torch.device | str, error: type[AgreedError] = AgreedValueError) -> None:
    """Raise the same `error` on all ranks if any rank has a problem.

    A collective over all ranks: one number, plus the texts if there is a problem.

    Args:
        problem: what is wrong on this rank, or None.
        device: device of the collective.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        if problem is not None:
            raise error(problem)
        return
    flag = torch.tensor([problem is not None], dtype=torch.int64, device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    if int(flag):
        raise_agreed(problem, error)


def raise_agreed(problem: str | None, error: type[AgreedError] = AgreedValueError) -> None:
    """Raise what `agree` raises; for ranks that already know that one of them has a problem."""
    problems: list[str | None] = [problem]
    if dist.is_initialized() and dist.get_world_size() > 1:
        problems = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
    raise error(listed(problems))


def listed(problems: Sequence[str | None]) -> str:
    """Return one text of all problems, each with the ranks that have it; without ranks if all have the same problem."""
    by_text: dict[str, list[int]] = {}
    for rank, text in enumerate(problems):
        if text is not None:
            by_text.setdefault(text, []).append(rank)
    if not by_text:
        raise RuntimeError("ranks agree on an error, but none of them has one")
    if list(map(len, by_text.values())) == [len(problems)]:
        return next(iter(by_text))
    parts = [f"{ranks_text(ranks)}: {text}" for text, ranks in list(by_text.items())[:_MOST_TEXTS]]
    more = len(by_text) - len(parts)
    return "; ".join(parts) + (f"; and {more} other problems" if more else "")


def ranks_text(ranks: Sequence[int]) -> str:
    """Return 'rank 3', 'ranks 0, 1, 5' or 'ranks 4-7': runs of three or more are joined."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{r[0]}-{r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(parts)}"


def agreed(error: E) -> E:
    """Mark an exception of any class as one that every rank raises alike, so that `guard` lets it pass; return it."""
    error.__dict__[_MARK] = True
    return error


def own_error_everywhere(make: Callable[[], T], what: str, device: torch.device | str) -> T:
    """Return `make()`, a function that the caller of a public call gave; a collective over all ranks.

    An error of it ends the call on all ranks, after which the job can go on: ranks where it was raised raise it as it
    is, the others an AgreedValueError that quotes it.

    Args:
        what: the argument that holds the function.
    """
    made, own = None, None
    try:
        made = make()
    except Exception as exc:  # whatever a function of the caller's raises is the caller's to see
        own = exc
    try:
        agree(None if own is None else f"{what}: {type(own).__name__}: {own}", device)
    except AgreedValueError:
        if own is None:
            raise
    if own is not None:
        raise agreed(own)
    return cast(T, made)


def is_agreed(error: BaseException) -> bool:
    """Return True if every rank raises this exception alike."""
    return isinstance(error, AgreedError) or _MARK in error.__dict__


_MARK = "autoplan_agreed"


def digest_of_entries(entries: Mapping[str, str | int]) -> int:
    """Return a number below 2**62 that differs (except by chance) if the entries do."""
    digest = hashlib.blake2b(json.dumps(sorted(entries.items())).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & _MASK


class _Difference(NamedTuple):
    """The first entry in which a rank differs from rank 0; None stands for a missing entry."""

    rank: int
    name: str
    of_first: str | int | None
    of_rank: str | int | None


def first_difference(entries: Mapping[str, str | int], device: torch.device | str) -> _Difference | None:
    """Compare entries over all ranks: one number is all-reduced, and the entries are sent only if it differs.

    Args:
        entries: by name. device: device of the collective.

    Returns: the first difference, the same on all ranks; None if all have the same entries.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    mine = digest_of_entries(entries)
    seen = torch.tensor([mine, -mine], device=device)
    dist.all_reduce(seen, op=dist.ReduceOp.MAX)
    if int(seen[0]) == -int(seen[1]):
        return None
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, dict(entries))
    first = everybody[0]
    for rank, theirs in enumerate(everybody):
        for name in dict.fromkeys([*first, *theirs]):
            if first.get(name) != theirs.get(name):
                return _Difference(rank, name, first.get(name), theirs.get(name))
    raise RuntimeError("digests of the ranks' entries differ, but no entry does")


def different(prints: Sequence[int | None], device: torch.device | str) -> list[bool]:
    """Return, for each of these numbers below 2**62, True if ranks differ in it. A collective: one all-reduce.

    A rank with None takes no part in a number; some rank does.
    """
    if not prints or not dist.is_initialized() or dist.get_world_size() == 1:
        return [False] * len(prints)
    pairs = [[LEAST, LEAST] if p is None else [p, -p] for p in prints]
    seen = torch.tensor(pairs, dtype=torch.int64, device=device)
    dist.all_reduce(seen, op=dist.ReduceOp.MAX)
    return [most != -least for most, least in seen.tolist()]


# -- fingerprints -----------------------------------------------------------------------------------------------------

_MASK = (1 << 62) - 1  # its negative is an int64 too
LEAST = -(1 << 63)  # least int64, below all of them: the entry of a rank that takes no part


def fingerprint(tensors: Mapping[str, Any], num_elements: int | None = None) -> int:
    """Return a number below 2**62 that differs (except by chance) if names, shapes, dtypes or values differ.

    Every element counts with its own weight, in integer arithmetic on its bits: equal on all devices.

    Args:
        tensors: name -> tensor; for other values only their type counts.
        num_elements: how many elements of a tensor count, spread evenly; None: all.
    """
    total = 0
    for name in sorted(tensors):
        value = tensors[name]
        text = f"{name} {type(value).__name__}"
        if isinstance(value, torch.Tensor):
            text = f"{name} {tuple(value.shape)} {value.dtype}"
            total = total * 1_000_003 + _bits(value.detach(), num_elements)
        total = (total * 1_000_003 + zlib.crc32(text.encode())) & _MASK
    return total


_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


_CHUNK = 1 << 20  # elements at a time: temporaries are a few times as large as they are


def _bits(x: torch.Tensor, num_elements: int | None) -> int:
    if num_elements == 0:
        return 0  # no computation, so no wait for the device
    flat = (x if x.layout is torch.strided else x.to_dense()).reshape(-1)
    if num_elements is not None and flat.numel() > num_elements:
        flat = flat[:: flat.numel() // num_elements]
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for begin in range(0, flat.numel(), _CHUNK):
        part = flat[begin : begin + _CHUNK].contiguous()
        part = part.view(_OF_SIZE[part.element_size()]).to(torch.int64)
        weights = torch.arange(begin + 1, begin + 1 + part.numel(), device=part.device).mul_(0x9E3779B1).add_(_OFFSET)
        total += weights.mul_(part).sum()
    return int(total)  # wraps at 2**64


_OFFSET = 0x7F4A7C15
