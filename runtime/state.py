"""Loading a state: the semantics of `nn.Module.load_state_dict`, the same on all ranks.

Every rank compares the state with the whole model, of which it holds a part. The ranks agree on what is wrong before
anything is changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autoplan.runtime.agree import AgreedRuntimeError, AgreedValueError, agree, fingerprint, first_difference
from autoplan.runtime.mesh import AxisMesh
from autoplan.runtime.params import buffer_owner
from autoplan.runtime.spec import ProgramSpec
from autoplan.runtime.whole import broadcast_whole

_SAMPLED = 4096  # elements of a tensor that ranks compare
_MOST = 8  # names that one line of a message lists


class IncompatibleKeys(NamedTuple):
    """The result of `load_state_dict`, as nn.Module's: keys that the state lacks, and keys that the model lacks."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def check_state(
    model: str,
    state: Any,
    shapes: Mapping[str, Sequence[int] | None],
    strict: bool,
    device: torch.device,
) -> IncompatibleKeys:
    """Compare a state with the model, on all ranks alike. A collective.

    Args:
        model: the model's name.
        state: name -> tensor, the same on all ranks.
        shapes: shape of every entry of the model's state; None for an entry that is not a tensor.
        strict: True if missing and unexpected keys are errors.

    Raises:
        AgreedRuntimeError: missing and unexpected keys, or other shapes; with nn.Module's text.
        AgreedValueError: the ranks were given different states.
    """
    if not isinstance(state, Mapping):
        agree(f"the state is a {type(state).__name__}; give a mapping of names to tensors", device, AgreedRuntimeError)
        state = {}
    keys = IncompatibleKeys([n for n in shapes if n not in state], [n for n in state if n not in shapes])
    lines = []
    if strict and keys.missing_keys:
        lines.append(f"Missing key(s) in state_dict: {_some(keys.missing_keys)}.")
    if strict and keys.unexpected_keys:
        lines.append(f"Unexpected key(s) in state_dict: {_some(keys.unexpected_keys)}.")
    for name, shape in shapes.items():
        if name in state and shape is not None:
            line = _misfit(name, state[name], tuple(shape))
            lines += [line] if line else []
    problem = f"Error(s) in loading state_dict for {model}:\n\t" + "\n\t".join(lines) if lines else None
    agree(problem, device, AgreedRuntimeError)
    _check_alike({n: v for n, v in state.items() if n in shapes}, device)
    return keys


def _misfit(name: str, value: Any, shape: tuple[int, ...]) -> str | None:
    if isinstance(value, DTensor):
        return (
            f'"{name}" is a DTensor; give full tensors (value.full_tensor()), or load a checkpoint of shards with '
            "torch.distributed.checkpoint.load into dict(pm.named_parameters())."
        )
    if not isinstance(value, torch.Tensor):
        return f'"{name}" is a {type(value).__name__}, not a tensor.'
    if tuple(value.shape) != shape and not (shape == () and tuple(value.shape) == (1,)):
        return f"size mismatch for {name}: the state has {tuple(value.shape)}, the model {shape}."
    return None


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(f'"{n}"' for n in names[:_MOST])
    return shown if len(names) <= _MOST else f"{shown} and {len(names) - _MOST} more"


def _check_alike(state: Mapping[str, Any], device: torch.device) -> None:
    """Raise AgreedValueError if ranks have different states, which would make copies of one parameter differ."""
    prints = {name: fingerprint({name: value}, _SAMPLED) for name, value in state.items()}
    found = first_difference(prints, device)
    if found is not None:
        raise AgreedValueError(f"rank {found.rank} was given another state than rank 0: {found.name} differs")


def like(value: Any, old: Any) -> Any:
    """Return a loaded value in the shape, dtype and device of the model's value `old`."""
    if not isinstance(old, torch.Tensor):
        return value
    return value.detach().reshape(old.shape).to(device=old.device, dtype=old.dtype, copy=True)


def gather_updated_buffers(
    spec: ProgramSpec,
    stages: Mapping[int, nn.Module],
    extra: Mapping[str, Any],
    mesh: AxisMesh,
    dtype: torch.dtype | None,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Return those of some buffers that forwards write to, on the host of every rank. A collective.

    Args:
        stages: this rank's stages by index.
        extra: the buffers as they were given, by name.
        dtype: of floating buffers; None: as given.
    """
    out: dict[str, torch.Tensor] = {}
    for stage in spec.stages:
        for b in stage.buffers:
            if not b.updated or b.name not in extra:
                continue
            given = extra[b.name]
            if stage.index in stages:
                held = getattr(buffer_owner(stages[stage.index], b), b.attr)
                found = held.detach().to("cpu", copy=True).contiguous()
            else:
                kind = dtype if dtype is not None and given.is_floating_point() else given.dtype
                found = torch.empty(given.shape, dtype=kind)
            if mesh.size("pp") > 1:
                group = mesh.group("pp")
                broadcast_whole(found, dist.get_global_rank(group, spec.rank_of(stage.index)), device, group)
            out[b.name] = found
    return out
