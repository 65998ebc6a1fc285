"""The states of the caller's own objects in a checkpoint: of objects that all ranks have alike, and of a data rank's.

A state is nested plain values and tensors (`autoplan.runtime.checkpoint.values`). Of objects that are alike (a
scheduler) rank 0's is stored, once the ranks have compared theirs. Of a data-parallel rank's objects (its data loader)
that of every data-parallel rank is stored, once the ranks that have the same part of the batch have compared theirs.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from autoplan.runtime.agree import different, fingerprint, first_difference
from autoplan.runtime.checkpoint.values import Encoder, tensor_keys

ALIKE, OF_DATA_RANK = "states", "data_states"  # arguments, facts, and the first part of the keys of tensors


class Stateful(Protocol):
    """An object with a state: a scheduler of the learning rate, a data loader, metrics."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Take a state that `state_dict` returned."""


@dataclass(frozen=True)
class Given:
    """The caller's objects, by name.

    Attributes:
        alike: their states are the same on all ranks.
        of_data_rank: their states are the same on the ranks of one data-parallel rank.
        on_other_data_ranks: called with the index of the next sample, in place of loading those of a data-parallel
            rank, if the checkpoint is of another number of data-parallel ranks.
    """

    alike: Mapping[str, Stateful] = field(default_factory=dict)
    of_data_rank: Mapping[str, Stateful] = field(default_factory=dict)
    on_other_data_ranks: Callable[[int], Any] | None = None

    def problem(self) -> str | None:
        """Return why these are no objects with states; None if they are."""
        found = _problem(ALIKE, self.alike) or _problem(OF_DATA_RANK, self.of_data_rank)
        if found is not None:
            return found
        if both := self.alike.keys() & self.of_data_rank.keys():
            return f"{sorted(both)[0]!r} is in {ALIKE} and in {OF_DATA_RANK}; give it once"
        return _no_function(self.on_other_data_ranks)


def _no_function(given: Any) -> str | None:
    if given is None or callable(given):
        return None
    return f"on_other_data_ranks is a {type(given).__name__}; give a function of the index of the next sample"


def _problem(argument: str, states: Any) -> str | None:
    if not isinstance(states, Mapping):
        return f"{argument} is a {type(states).__name__}; give objects by name: {argument}={{'{_EXAMPLE[argument]}}}"
    for name, each in states.items():
        if not isinstance(name, str):
            return f"{argument} has the name {name!r}, a {type(name).__name__}; names are text"
        lacking = [m for m in ("state_dict", "load_state_dict") if not callable(getattr(each, m, None))]
        if lacking:
            return f"{argument}[{name!r}] is a {type(each).__name__}, which has no {' and no '.join(lacking)}"
        if hasattr(each, "save_checkpoint"):  # of an object one state is stored, and a parallel model has many parts
            what = f"{argument}[{name!r}] is a {type(each).__name__}"
            return f"{what}; a checkpoint holds the parallel model anyway: leave it out"
    return None


_EXAMPLE = {ALIKE: "scheduler': scheduler", OF_DATA_RANK: "loader': loader"}


@dataclass(frozen=True)
class Encoded:
    """The states of objects, for JSON: by name, and their tensors by key."""

    facts: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    @staticmethod
    def of(argument: str, states: Mapping[str, Stateful], prefix: str) -> Encoded:
        """Encode the states of objects; the keys of their tensors begin with `prefix`.

        Raises:
            TypeError: something that cannot be stored; says what and where.
        """
        facts: dict[str, Any] = {}
        tensors: dict[str, torch.Tensor] = {}
        for name, stateful in states.items():
            encoder = Encoder(f"{prefix}/{name}/")
            facts[name] = encoder.encode(stateful.state_dict(), f"{argument}[{name!r}]")
            if any(isinstance(tensor, DTensor) for tensor in encoder.tensors.values()):
                raise TypeError(
                    f"{argument}[{name!r}] holds this rank's parts of tensors, which are not stored as parts of a "
                    "whole; give an optimizer as optimizer="
                )
            tensors |= encoder.tensors
        return Encoded(facts, tensors)

    def prints(self) -> dict[str, int]:
        """Return a number for each state, below 2**62, which differs (except by chance) if the states do."""
        out = {}
        for name, value in self.facts.items():
            mine = {key: self.tensors[key] for key in tensor_keys(value)}
            out[name] = fingerprint(mine) ^ zlib.crc32(json.dumps(value, sort_keys=True).encode())
        return out


def differing_state(
    alike: Encoded, of_data_rank: Encoded, data_rank: int, data_world: int, device: torch.device
) -> str | None:
    """Return, on all ranks alike, which state differs between ranks that must have the same. A collective.

    Args:
        alike, of_data_rank: this rank's states. data_rank, data_world: its part of the batch, and their number.
        device: of the collective.
    """
    entries: dict[str, str | int] = {f"{ALIKE}[{name!r}]": number for name, number in alike.prints().items()}
    names = {f"{OF_DATA_RANK}[{name!r}]": "given" for name in of_data_rank.facts}
    found = first_difference({**entries, **names}, device)
    if found is not None and None in (found.of_first, found.of_rank):
        having, without = (found.rank, 0) if found.of_first is None else (0, found.rank)
        return f"{found.name} is given on rank {having} and not on rank {without}: give the same names on all ranks"
    if found is not None:
        return (
            f"the state of {found.name} on rank {found.rank} is not that on rank 0, which all ranks would get: if it "
            f"is a data-parallel rank's own (a data loader, a sampler), give the object in {OF_DATA_RANK}=; otherwise "
            "keep it the same on all ranks"
        )
    prints = of_data_rank.prints()
    mine = [n if rank == data_rank else None for rank in range(data_world) for n in prints.values()]
    for at, differs in enumerate(different(mine, device)):
        if differs:
            rank, place = divmod(at, len(prints))
            return (
                f"the states of {OF_DATA_RANK}[{list(prints)[place]!r}] differ between ranks with pm.data_rank {rank}, "
                "which have the same part of the batch: let them read it alike"
            )
    return None


@dataclass(frozen=True)
class KeptStates:
    """The states in a checkpoint that this rank takes: an object and its encoded state each."""

    pairs: list[tuple[Stateful, Any]]
    problems: list[str]


def kept_for(given: Given, facts: Mapping[str, Any], data_rank: int, data_world: int) -> KeptStates:
    """Return the states that a rank takes from the facts of a checkpoint, and what does not fit."""
    there = facts["states"]
    of_ranks: Mapping[str, Mapping[str, Any]] = facts.get(OF_DATA_RANK, {})
    problems = _names(ALIKE, given.alike, there) + _names(OF_DATA_RANK, given.of_data_rank, of_ranks.get("0", {}))
    if problems:
        return KeptStates([], problems)
    pairs = [(each, there[name]) for name, each in given.alike.items()]
    if given.of_data_rank and facts["data_world"] == data_world:
        pairs += [(each, of_ranks[str(data_rank)][name]) for name, each in given.of_data_rank.items()]
    elif given.of_data_rank and given.on_other_data_ranks is None:
        problems = [
            f"{OF_DATA_RANK}[{next(iter(given.of_data_rank))!r}] is of {facts['data_world']} data-parallel ranks, and "
            f"there are {data_world} here: give on_other_data_ranks=, a function that lets the data begin at the "
            "sample of the index that it gets (pm.progress.num_samples)"
        ]
    return KeptStates(pairs, problems)


def _names(argument: str, given: Mapping[str, Stateful], there: Mapping[str, Any]) -> list[str]:
    out = []
    if missing := given.keys() - there.keys():
        out.append(f"it has no {argument}[{sorted(missing)[0]!r}]")
    if more := there.keys() - given.keys():
        out.append(f"it has {argument}[{sorted(more)[0]!r}], which was not given")
    return out
