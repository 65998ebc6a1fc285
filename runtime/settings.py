"""Numbers that all ranks must be given alike: settings of the optimizer, arguments of a clipping, a seed.

Ranks with other ones train on without an error, each with updates or dropout of its own. The next step compares them,
in the exchange in which it settles its batches (`Batches.settle`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from autoplan.runtime.agree import first_difference

_DIGITS = 9  # of a number: those of hosts may differ in the last bits (a cosine of a schedule)


def same_groups_everywhere(factory: Callable[..., Any], param_groups: object, pipeline_ranks: int) -> bool:
    """Return True if the groups of an optimizer are the same on all ranks.

    A function of the user's may make them of the parameters that it is given, which are others in another stage.
    """
    while isinstance(factory, partial):
        factory = factory.func
    return param_groups is not None or isinstance(factory, type) or pipeline_ranks == 1


def optimizer_settings(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return the numbers in the groups of an optimizer, by what they are; not tensors, which wait for the device."""
    found = {}
    for i, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            numbers = value if isinstance(value, (tuple, list)) and name != "params" else (value,)
            if all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in numbers):
                found[f"{name} of group {i} of the optimizer"] = _text(*numbers)
    return found


def clipping(max_norm: Any, norm_type: Any, error_if_nonfinite: bool) -> str:
    """Return the arguments of a clipping."""
    return f"max_norm={_text(max_norm)}, norm_type={_text(norm_type)}, error_if_nonfinite={error_if_nonfinite}"


def _text(*values: Any) -> str:
    texts = []
    for value in values:
        try:
            texts.append(f"{float(value):.{_DIGITS}g}")
        except (TypeError, ValueError):
            texts.append(repr(value))
    return ", ".join(texts)


def different_settings(settings: Mapping[str, str], device: torch.device) -> str:
    """Return the error of ranks that were given other settings. A collective of all ranks, which have some."""
    found = first_difference(settings, device)
    if found is None:
        raise RuntimeError("fingerprints of the ranks' settings differ, but no setting does")
    mine, first = ("nothing" if x is None else x for x in (found.of_rank, found.of_first))
    return (
        f"rank {found.rank} was given another {found.name} than rank 0: {mine} and {first}. It must be the same on all "
        "ranks. If an update was made with it, ranks may have other parameters than their peers: load a checkpoint"
    )
