"""Parameter groups of an optimizer, by the names of the model's parameters.

    {"*.bias": {"weight_decay": 0.0}, "*norm*": {"weight_decay": 0.0}}           # patterns; the first that fits counts
    lambda name, shape: {} if len(shape) > 1 else {"weight_decay": 0.0}          # or a function

The groups and their order follow from the whole model, so they are the same on every rank: a rank without a parameter
of a group has an empty group there, and a scheduler's list of learning rates fits everywhere.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from autoplan.runtime.agree import AgreedValueError

GroupSettings = Mapping[str, Any]
ParamGroups = Mapping[str, GroupSettings] | Callable[[str, torch.Size], GroupSettings]


def settings_of(groups: ParamGroups, params: Mapping[str, Sequence[int]]) -> dict[str, GroupSettings]:
    """Return the settings of each parameter, by name.

    Args:
        groups: patterns (as of fnmatch) of names and the settings of parameters that fit; or a function of name and
            full shape. Parameters that fit no pattern have the optimizer's defaults.
        params: full shapes of all trained parameters of the model.

    Raises:
        AgreedValueError: (on every rank alike) a pattern fits no parameter, or settings are not a mapping from names,
            or contain `params`.
    """
    if callable(groups):
        found = {name: groups(name, torch.Size(shape)) for name, shape in params.items()}
    else:
        for pattern in groups:
            if not any(fnmatchcase(name, pattern) for name in params):
                near = difflib.get_close_matches(pattern, params, n=1, cutoff=0.0)
                raise AgreedValueError(
                    f"param_groups: {pattern!r} fits no trained parameter; the nearest name is {', '.join(near)!r}"
                )
        found = {name: next((s for pattern, s in groups.items() if fnmatchcase(name, pattern)), {}) for name in params}
    for name, settings in found.items():
        if not isinstance(settings, Mapping) or not all(isinstance(key, str) for key in settings):
            raise AgreedValueError(
                f"param_groups: the settings of {name!r} are {settings!r}; give a mapping such as {{'lr': 1e-4}}"
            )
        if "params" in settings:
            raise AgreedValueError(
                f"param_groups: the settings of {name!r} contain 'params'; give only an optimizer's settings"
            )
    return found


def grouped_parameters(
    names: Sequence[str], parameters: Sequence[Any], settings: Mapping[str, GroupSettings]
) -> list[dict[str, Any]]:
    """Return the groups of this rank's parameters, as an optimizer takes them.

    Args:
        names: the parameters' names, in the order of `parameters`.
        settings: of all parameters of the model; equal ones are one group, in the order of their first parameter.
    """
    kinds: list[GroupSettings] = []
    for each in settings.values():
        if each not in kinds:
            kinds.append(each)
    return [
        {"params": [p for n, p in zip(names, parameters, strict=True) if settings[n] == kind], **kind} for kind in kinds
    ]
