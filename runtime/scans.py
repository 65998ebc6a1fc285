"""Functions of other libraries that a program calls by their names (state-space layers, linear attention)."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import spmd_types
import torch
from spmd_types import P, R, V
from torch.utils import _pytree as pytree


def scan(path: str, *args: Any, **kwargs: Any) -> Any:
    """Call the function `path`, as in `package.module.function` or `package.module.Class.method`.

    It may be given the part of the batch or of the heads of this rank (V); it is linear in nothing, so P is refused.

    Returns:
        The tensor that it returns, or all tensors of its result as a tuple.

    Raises:
        ImportError: if there is no such function.
        spmd_types.SpmdTypeError: for a pending sum.
    """
    function = _imported(path)
    if not spmd_types.is_type_checking():
        return _tensors(function(*args, **kwargs))
    types = _common_types(path, [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)])
    with spmd_types.no_typecheck():
        out = _tensors(function(*args, **kwargs))
    for x in out if isinstance(out, tuple) else (out,):
        spmd_types.assert_type(x, types)
    return out


@functools.cache
def _imported(path: str) -> Callable[..., Any]:
    names = path.split(".")
    for count in range(len(names) - 1, 0, -1):
        try:
            module: Any = importlib.import_module(".".join(names[:count]))
        except ModuleNotFoundError as error:
            if not ".".join(names[:count]).startswith(str(error.name)):
                raise  # something that the module itself imports
            continue
        for name in names[count:]:
            module = getattr(module, name)
        function: Callable[..., Any] = module
        return function
    raise ImportError(f"the program calls {path}, which cannot be imported here")


def _tensors(result: Any) -> Any:
    found = tuple(x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor))
    return found[0] if len(found) == 1 else found


def _common_types(path: str, tensors: list[torch.Tensor]) -> dict[Any, Any]:
    """Return the types of the result: V where an argument is, else those of the arguments.

    Whole numbers have no gradient, so that R and I are the same for them.
    """
    out: dict[Any, Any] = {}
    for x in sorted(tensors, key=_has_no_gradient):
        for axis, kind in spmd_types.get_local_type(x).items():
            if kind is P:
                raise spmd_types.SpmdTypeError(f"{path}: an argument is a pending sum on {axis}")
            before = out.setdefault(axis, kind)
            if before is not kind and (kind is V or not _has_no_gradient(x)):
                out[axis] = V if V in (before, kind) else R
    return out


def _has_no_gradient(x: torch.Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex())
