"""The contents of a checkpoint, and how they are put back under another plan.

Tensors have one key each, whatever ranks hold parts of them:

    model/NAME               parameters and persistent buffers, by the model's names; a tied parameter once
    buffers/NAME             buffers that forwards write to and that are not persistent
    optimizer/KEY/NAME       what the optimizer keeps for a parameter, e.g. optimizer/exp_avg/NAME
    random/DATA_RANK/KIND    states of random generators (torch, cuda, python, numpy) of a data-parallel rank
    states/NAME/I            tensors in the states of the caller's own objects
    data_states/DATA_RANK/NAME/I    tensors in the states of objects of a data-parallel rank

The rest, the *facts*, is JSON: steps, samples and the seed of dropout, options of the optimizer by parameter, the loss
scaler, the states of the caller's objects. Every rank has some of it, and rank 0 merges them (`merged_facts`).
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from autoplan.runtime.checkpoint.states import ALIKE, OF_DATA_RANK, Encoded, Given, Stateful, kept_for
from autoplan.runtime.checkpoint.values import Encoder, decode, tensor_keys
from autoplan.runtime.mesh import AxisMesh
from autoplan.runtime.model_state import ModelState
from autoplan.runtime.precision import LossScaler
from autoplan.runtime.shards import ParameterShard, TensorShard, retyped
from autoplan.runtime.state import like
from autoplan.runtime.tensor_files import DTYPES, stored_names

_Tensors = dict[str, torch.Tensor]
StateFacts = dict[str, Any]

# Options that say how an update is computed, not what: they depend on the device and the parameters of a rank.
_OF_KERNELS = frozenset({"foreach", "fused"})


@dataclass
class TrainingProgress:
    """The progress of a training.

    Attributes:
        seed: of dropout.
        num_steps: calls of `step`, which dropout counts too.
        num_samples: samples that they have seen, over all data-parallel ranks: where the data goes on.
    """

    seed: int
    num_steps: int = 0
    num_samples: int = 0


@dataclass(frozen=True)
class Updated:
    """A parameter that an optimizer updates: its name, the optimizer's tensor, and what is shown of it to users."""

    name: str
    parameter: torch.Tensor
    shown: torch.Tensor


@dataclass(frozen=True)
class Training:
    """The parts of a checkpoint. `updated`: every copy of every parameter of the optimizer on this rank."""

    state: ModelState
    progress: TrainingProgress
    optimizer: torch.optim.Optimizer | None
    updated: Sequence[Updated]
    scaler: LossScaler | None
    data_rank: int
    data_world: int


@dataclass
class Content:
    """This rank's part of a checkpoint.

    Attributes:
        alike, of_data_rank: the states of the caller's objects, which ranks are to compare.
    """

    tensors: _Tensors
    facts: StateFacts
    alike: Encoded
    of_data_rank: Encoded

    def staged(self) -> Content:
        """Return a copy on the host that later steps do not change."""
        return replace(self, tensors={key: _copy(t) for key, t in self.tensors.items()})


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, TensorShard):
        return TensorShard.of(tensor._local_tensor.detach().to("cpu", copy=True), tensor._spec, tensor.origin)
    return tensor.detach().to("cpu", copy=True)


# -- what there is ----------------------------------------------------------------------------------------------------


def content_of(training: Training, given: Given, rank: int) -> Content:
    """Return this rank's part of a checkpoint, with the states of the caller's objects.

    Raises:
        TypeError: something that is not stored; says what and where.
    """
    state = training.state
    tensors: _Tensors = {}
    facts: StateFacts = {"model": state.spec.model, "data_world": training.data_world}
    facts["progress"] = vars(training.progress).copy()
    mine = _written_here(state)
    for p, parameter in state.first_copies():
        if p.name in mine:
            tensors[f"model/{p.name}"] = state.shown(p, parameter)
    updated = {b.name for stage in state.spec.stages for b in stage.buffers if b.updated}
    encoder = Encoder(None)
    facts["extra"] = {}
    for name, value in state.extra.items():
        if not isinstance(value, torch.Tensor):
            facts["extra"][name] = encoder.encode(value, f"the model's extra state {name!r}")
        elif name not in updated:
            tensors[f"model/{name}"] = value
    for b, held in state.buffers():
        if b.updated:
            tensors[f"{'model' if b.name in state.extra else 'buffers'}/{b.name}"] = held
    if training.optimizer is not None:
        facts["optimizer"] = _of_optimizer(training.optimizer, training.updated, mine, tensors)
    if training.scaler is not None:
        scaler = training.scaler
        facts["scaler"] = {**scaler.state_dict(), "num_skipped": scaler.num_skipped}
    # by one rank alone: the ranks of one data rank may have drawn different numbers
    first = _is_first_of_data_rank(state.mesh)
    facts["random"] = {str(training.data_rank): _random_state(training, tensors)} if first else {}
    alike = Encoded.of(ALIKE, given.alike, ALIKE)
    of_data_rank = Encoded.of(OF_DATA_RANK, given.of_data_rank, f"{OF_DATA_RANK}/{training.data_rank}")
    facts[ALIKE] = alike.facts
    facts[OF_DATA_RANK] = {str(training.data_rank): of_data_rank.facts} if first else {}
    for encoded, written in ((alike, rank == 0), (of_data_rank, first)):
        tensors |= encoded.tensors if written else {}
    return Content(tensors, facts, alike, of_data_rank)


def _is_first_of_data_rank(mesh: AxisMesh) -> bool:
    """Return True on one of the ranks that have the same part of the batch."""
    data = mesh.atoms("dp")
    return all(mesh.coordinate(axis) == 0 for axis in mesh.axes if axis not in data)


def _written_here(state: ModelState) -> set[str]:
    """Return the parameters whose first stage this rank holds; copies on later stages are not written."""
    home: dict[str, int] = {}
    for stage in state.spec.stages:
        for p in stage.params:
            home.setdefault(p.name, stage.index)
    return {name for name, index in home.items() if index in state.stages}


def _of_optimizer(
    optimizer: torch.optim.Optimizer, updated: Sequence[Updated], mine: set[str], tensors: _Tensors
) -> StateFacts:
    """Add what the optimizer keeps for this rank's parameters to `tensors`; return the rest of its state."""
    names = {id(u.parameter): u.name for u in updated}
    encoder = Encoder(None)
    scalars: dict[str, StateFacts] = {}
    for u in _first_of_each(updated):
        if u.name not in mine:
            continue
        for key, value in optimizer.state.get(u.parameter, {}).items():
            if not isinstance(value, torch.Tensor):
                scalars.setdefault(u.name, {})[key] = encoder.encode(value, f"the optimizer's {key!r} of {u.name}")
                continue
            tensors[f"optimizer/{key}/{u.name}"] = _part_of_whole(value, u, key)
    groups = [
        [_options(group, encoder), sorted({names[id(p)] for p in group["params"] if id(p) in names})]
        for group in optimizer.param_groups
    ]
    return {"class": type(optimizer).__name__, "scalars": scalars, "groups": groups}


def _first_of_each(updated: Sequence[Updated]) -> list[Updated]:
    return list({u.name: u for u in reversed(updated)}.values())[::-1]


def _options(group: Mapping[str, Any], encoder: Encoder) -> StateFacts:
    """Return the options of a parameter group that say what an update is; a tensor of one number as the number."""
    return {
        key: encoder.encode(_as_numbers(value), f"the option {key!r}")
        for key, value in group.items()
        if key not in ("params", "param_names") and key not in _OF_KERNELS
    }


def _as_numbers(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return value.item()
    return tuple(map(_as_numbers, value)) if type(value) is tuple else value


def _part_of_whole(value: torch.Tensor, u: Updated, key: str) -> torch.Tensor:
    """Return a tensor of the optimizer as a shard of the whole tensor, if its parameter is a shard."""
    if isinstance(value, DTensor) or not isinstance(u.shown, ParameterShard) or not value.dim():
        return value
    if value.shape != u.parameter.shape:
        raise TypeError(
            f"the optimizer's {key!r} of {u.name} has the shape {tuple(value.shape)}, and this rank's part of the "
            f"parameter {tuple(u.parameter.shape)}: it cannot be stored as a part of a whole"
        )
    return TensorShard.of(value, retyped(u.shown._spec, value.dtype), u.shown.origin)


def _random_state(training: Training, tensors: _Tensors) -> StateFacts:
    key = f"random/{training.data_rank}"
    tensors[f"{key}/torch"] = torch.get_rng_state()
    device = training.state.device
    if device.type == "cuda":
        tensors[f"{key}/cuda"] = torch.cuda.get_rng_state(device)
    _, numbers, gauss = random.getstate()
    tensors[f"{key}/python"] = torch.tensor(numbers, dtype=torch.int64)
    _, words, position, has_gauss, cached = np.random.get_state(legacy=True)
    tensors[f"{key}/numpy"] = torch.tensor(np.asarray(words, dtype=np.int64))
    return {"gauss": gauss, "numpy": [int(position), int(has_gauss), float(cached)]}


def merged_facts(facts: Sequence[StateFacts]) -> StateFacts:
    """Return the facts of all ranks as one: of parameters and data-parallel ranks each once, the rest rank 0's."""
    out = dict(facts[0])
    for by_data_rank in ("random", OF_DATA_RANK):
        out[by_data_rank] = {rank: kept for each in reversed(facts) for rank, kept in each[by_data_rank].items()}
    if "optimizer" in out:
        optimizers = [each["optimizer"] for each in facts if "optimizer" in each]
        groups: dict[str, list[Any]] = {}
        for each in optimizers:
            for options, names in each["groups"]:
                groups.setdefault(json.dumps(options, sort_keys=True), [options, set()])[1].update(names)
        out["optimizer"] = {
            "class": out["optimizer"]["class"],
            "scalars": {name: kept for each in optimizers for name, kept in each["scalars"].items()},
            "groups": [[options, sorted(names)] for options, names in groups.values() if names],
            "in_order": _in_order([each["groups"] for each in optimizers]),
        }
    return out


def _in_order(groups: Sequence[Sequence[Any]]) -> list[StateFacts]:
    """Return the options of each group of an optimizer, given the groups of every rank.

    A rank without parameters of a group says least of it, so those of another count. Nothing is returned where ranks
    have different numbers of groups.
    """
    if len({len(of_rank) for of_rank in groups}) > 1:
        return []
    return [next((o for o, names in alike if names), alike[0][0]) for alike in zip(*groups, strict=True)]


# -- putting it back --------------------------------------------------------------------------------------------------


@dataclass
class Return:
    """The values that this rank reads from a checkpoint.

    Attributes:
        targets: the tensors to fill, by key. copies: keys of further copies of a tied parameter -> the key stored.
        problems: what does not fit.
        then: what to do once the tensors are filled.
    """

    targets: _Tensors = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    then: list[Callable[[], None]] = field(default_factory=list)

    def ask(self, key: str, target: torch.Tensor) -> None:
        """Ask for a tensor; once more if this is a further copy of it."""
        asked = key
        while asked in self.targets:
            asked += "#"
        self.targets[asked] = target
        if asked != key:
            self.copies[asked] = key


def returned(
    training: Training,
    given: Given,
    stored: Mapping[str, Any],
    facts: StateFacts,
    model_only: bool,
) -> Return:
    """Return the tensors and facts that this rank asks of a checkpoint. Nothing is changed yet.

    Args:
        stored: key -> dtype, shape and chunks of every tensor of the checkpoint.
        facts: as `merged_facts` returned them.
        model_only: True: parameters and buffers alone.
    """
    out = Return()
    _ask_model(training.state, stored, facts, out, model_only)
    if model_only:
        return out
    if training.optimizer is not None:
        _ask_optimizer(training.optimizer, training.updated, stored, facts, out)
    elif "optimizer" in facts:
        out.problems.append(
            f"it has the state of {facts['optimizer']['class']}, and there is no optimizer here: give yours as "
            f"optimizer=; {_INSTEAD}"
        )
    _ask_random(training, stored, facts, out)
    _ask_states(training, given, stored, facts, out)

    def counters() -> None:
        vars(training.progress).update({k: int(v) for k, v in facts["progress"].items()})
        if training.scaler is not None and "scaler" in facts:
            training.scaler.load_state_dict(facts["scaler"])
            training.scaler.num_skipped = int(facts["scaler"]["num_skipped"])

    out.then.append(counters)
    return out


def _ask_model(state: ModelState, stored: Mapping[str, Any], facts: StateFacts, out: Return, model_only: bool) -> None:
    _compare_names(state, stored, out)
    if not model_only:
        _compare_transient(state, stored, out)
    if out.problems:
        return
    for p, parameter in state.places():
        shown = state.shown(p, parameter)
        _check_kind(f"model/{p.name}", shown, stored, out)
        out.ask(f"model/{p.name}", shown.detach())
    loaded = {n: torch.empty_like(v, device="cpu") for n, v in state.extra.items() if isinstance(v, torch.Tensor)}
    for name, target in loaded.items():
        _check_kind(f"model/{name}", target, stored, out)
        out.ask(f"model/{name}", target)
    for name, value in state.transient.items():
        if f"buffers/{name}" in stored:
            loaded[name] = torch.empty_like(value, device="cpu")
            out.ask(f"buffers/{name}", loaded[name])

    def buffers() -> None:
        for name in loaded.keys() & state.extra.keys():
            state.extra[name] = like(loaded[name], state.extra[name])
        for name, value in facts["extra"].items():
            state.extra[name] = decode(value, {})
        with torch.no_grad():
            for b, held in state.buffers():
                if b.name in loaded:
                    held.copy_(like(loaded[b.name], held))

    out.then.append(buffers)


def _compare_names(state: ModelState, stored: Mapping[str, Any], out: Return) -> None:
    shapes: dict[str, tuple[int, ...]] = {p.name: p.shape for stage in state.spec.stages for p in stage.params}
    shapes |= {n: tuple(v.shape) for n, v in state.extra.items() if isinstance(v, torch.Tensor)}
    have = {key.removeprefix("model/") for key in stored if key.startswith("model/")}
    if missing := shapes.keys() - have:
        out.problems.append(f"it lacks {stored_names(missing)}")
    if more := have - shapes.keys():
        out.problems.append(f"the model lacks {stored_names(more)}")
    for name in sorted(shapes.keys() & have):
        there = tuple(stored[f"model/{name}"]["shape"])
        if there != tuple(shapes[name]):
            out.problems.append(f"{name} has shape {there} there and {tuple(shapes[name])} in the model")


def _compare_transient(state: ModelState, stored: Mapping[str, Any], out: Return) -> None:
    have = {key.removeprefix("buffers/"): about for key, about in stored.items() if key.startswith("buffers/")}
    if missing := state.transient.keys() - have:
        out.problems.append(f"it lacks the changing buffers {stored_names(missing)}; {_INSTEAD}")
    if more := have.keys() - state.transient.keys():
        out.problems.append(f"the model does not change the buffers {stored_names(more)}; {_INSTEAD}")
    for name in sorted(state.transient.keys() & have.keys()):
        there, here = tuple(have[name]["shape"]), tuple(state.transient[name].shape)
        if there != here:
            out.problems.append(f"{name} has shape {there} there and {here} in the model")


def _check_kind(key: str, target: torch.Tensor, stored: Mapping[str, Any], out: Return) -> None:
    there = DTYPES[stored[key]["dtype"]]
    if there.is_floating_point != target.dtype.is_floating_point:
        out.problems.append(f"{key.removeprefix('model/')} is {there} there and {target.dtype} in the model")


_INSTEAD = "model_only=True loads the parameters alone"


def _ask_optimizer(
    optimizer: torch.optim.Optimizer,
    updated: Sequence[Updated],
    stored: Mapping[str, Any],
    facts: StateFacts,
    out: Return,
) -> None:
    kept = facts.get("optimizer")
    if kept is None:
        out.problems.append(f"it has no state of an optimizer; {_INSTEAD}")
        return
    if kept["class"] != type(optimizer).__name__:
        out.problems.append(
            f"it has the state of {kept['class']}, and this optimizer is {type(optimizer).__name__}; {_INSTEAD}"
        )
        return
    options = {
        name: {key: value for key, value in given.items() if key not in _OF_KERNELS}
        for given, names in kept["groups"]
        for name in names
    }
    if unknown := {u.name for u in updated} - options.keys():
        out.problems.append(f"its optimizer did not train {stored_names(unknown)}; {_INSTEAD}")
        return
    fresh = _ask_moments(optimizer, updated, stored, kept["scalars"], out)
    names = {id(u.parameter): u.name for u in updated}
    given = []
    in_order = kept.get("in_order", ())
    fits = len(in_order) == len(optimizer.param_groups)
    for index, group in enumerate(optimizer.param_groups):
        mine = [options[names[id(p)]] for p in group["params"] if id(p) in names]
        if any(o != mine[0] for o in mine):
            out.problems.append("parameters that are in one group of this optimizer had different options there")
            return
        # a group without parameters is known by its place alone
        given.append(mine[0] if mine else in_order[index] if fits else {})

    def put() -> None:
        for parameter, entries in fresh.items():
            optimizer.state.pop(parameter, None)
            if entries:
                optimizer.state[parameter] = entries
        for group, entries in zip(optimizer.param_groups, given, strict=True):
            _set_options(group, entries)

    out.then.append(put)


def _ask_moments(
    optimizer: torch.optim.Optimizer,
    updated: Sequence[Updated],
    stored: Mapping[str, Any],
    scalars: Mapping[str, StateFacts],
    out: Return,
) -> dict[torch.Tensor, dict[str, Any]]:
    """Ask for what the optimizer keeps; return it by parameter, to be filled."""
    keys: dict[str, list[str]] = {}
    for key in stored:
        if key.startswith("optimizer/"):
            _, entry, name = key.split("/", 2)
            keys.setdefault(name, []).append(entry)
    fresh: dict[torch.Tensor, dict[str, Any]] = {}
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for u in updated:
        fresh[u.parameter] = {k: decode(v, {}) for k, v in scalars.get(u.name, {}).items()}
        for entry in keys.get(u.name, ()):
            about = stored[f"optimizer/{entry}/{u.name}"]
            shape, dtype = tuple(about["shape"]), DTYPES[about["dtype"]]
            of_parameter = stored.get(f"model/{u.name}", about)["dtype"]
            follows = shape == tuple(u.shown.shape) and dtype == DTYPES[of_parameter]  # its parameter
            if follows:
                dtype = u.parameter.dtype  # a wider copy stays one
            place = _place_of_number(entry, u.parameter, group_of[id(u.parameter)])
            value, target = _room_for(u, shape, dtype, place, follows and entry != "step")
            fresh[u.parameter][entry] = value
            out.ask(f"optimizer/{entry}/{u.name}", target)
    return fresh


def _set_options(group: dict[str, Any], entries: StateFacts) -> None:
    for key, value in entries.items():
        if isinstance(group.get(key), torch.Tensor):
            group[key].fill_(value)
        else:
            group[key] = decode(value, {})


def _place_of_number(entry: str, parameter: torch.Tensor, group: Mapping[str, Any]) -> torch.device:
    """Return where an optimizer keeps one number of a parameter: as torch's `Optimizer.load_state_dict` puts it.

    The step is on the host, unless a kernel on the device counts it.
    """
    on_host = entry == "step" and not group.get("fused") and not group.get("capturable")
    return torch.device("cpu") if on_host else parameter.device


def _room_for(
    u: Updated, shape: tuple[int, ...], dtype: torch.dtype, place: torch.device, follows: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a new tensor for what the optimizer keeps, and the tensor to fill: the same, or shown as part of it.

    Args:
        place: of a single number.
        follows: True if it is for a parameter what a moment is, also for one of a single number.
    """
    parameter = u.parameter
    if not shape and follows and isinstance(parameter, DTensor):  # whole on every rank, and used beside gradients
        number = cast(DTensor, torch.zeros_like(parameter.detach(), dtype=dtype))
        return number, number._local_tensor
    if shape != tuple(u.shown.shape) or not shape:
        value = torch.zeros(shape, dtype=dtype, device=parameter.device if shape else place)
        return value, value
    value = torch.zeros_like(parameter.detach(), dtype=dtype)
    if isinstance(value, DTensor) or not isinstance(u.shown, ParameterShard):
        return value, value
    return value, TensorShard.of(value, retyped(u.shown._spec, dtype), u.shown.origin)


def _ask_random(training: Training, stored: Mapping[str, Any], facts: StateFacts, out: Return) -> None:
    """Continue this data-parallel rank's generators; with another number of ranks, begin new streams from them."""
    same = facts["data_world"] == training.data_world
    rank = training.data_rank if same else 0
    device = training.state.device
    kinds = ("torch", "python", "numpy", *(("cuda",) if f"random/{rank}/cuda" in stored else ()))
    target = {kind: _empty(stored[f"random/{rank}/{kind}"]) for kind in kinds}
    for kind, tensor in target.items():
        out.ask(f"random/{rank}/{kind}", tensor)
    kept = facts["random"][str(rank)]

    def put() -> None:
        if not same:
            text = target["torch"].numpy().tobytes() + f"{training.data_rank} of {training.data_world}".encode()
            seed = int.from_bytes(hashlib.sha256(text).digest()[:4], "big")
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
            return
        torch.set_rng_state(target["torch"])
        if "cuda" in target and device.type == "cuda":
            torch.cuda.set_rng_state(target["cuda"], device)
        random.setstate((3, tuple(target["python"].tolist()), kept["gauss"]))
        words = target["numpy"].numpy().astype(np.uint32)
        np.random.set_state(("MT19937", words, *kept["numpy"]))

    out.then.append(put)


def _ask_states(training: Training, given: Given, stored: Mapping[str, Any], facts: StateFacts, out: Return) -> None:
    kept = kept_for(given, facts, training.data_rank, training.data_world)
    out.problems += kept.problems
    for stateful, value in kept.pairs:
        target = {key: _empty(stored[key]) for key in tensor_keys(value)}
        for key, tensor in target.items():
            out.ask(key, tensor)

        def put(stateful: Stateful = stateful, value: Any = value, target: _Tensors = target) -> None:
            stateful.load_state_dict(decode(value, target))

        out.then.append(put)
    begin_at = given.on_other_data_ranks
    if begin_at is not None and facts["data_world"] != training.data_world:
        out.then.append(lambda: begin_at(int(facts["progress"]["num_samples"])))


def _empty(about: Mapping[str, Any]) -> torch.Tensor:
    return torch.empty(tuple(about["shape"]), dtype=DTYPES[about["dtype"]])


def updated_of(
    optimizer: torch.optim.Optimizer, shown: Sequence[tuple[str, torch.Tensor, torch.Tensor]]
) -> list[Updated]:
    """Return the parameters of an optimizer by name.

    Args:
        shown: the name, the optimizer's tensor and the shown parameter of everything that it may hold.

    Raises:
        ValueError: it updates tensors that are none of these.
    """
    known = {id(parameter): Updated(name, parameter, whole) for name, parameter, whole in shown}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if any(id(p) not in known and p.numel() for p in params):
        raise ValueError("the optimizer updates tensors that are not parameters of this program (pm.parameters())")
    held = {id(p) for p in params}
    return [u for u in known.values() if id(u.parameter) in held]


def named(state: ModelState) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Return `shown` of `updated_of` for an optimizer that was made of `ParallelModel.parameters()`."""
    return [(p.name, shown, shown) for p, shown in ((p, state.shown(p, t)) for p, t in state.first_copies())]
