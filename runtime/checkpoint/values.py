"""Nested Python values as JSON, with the tensors in them set apart: the states of schedulers, options of optimizers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

_PLAIN = (str, bool, int, float, type(None))
# An object with one of these keys stands for a value that JSON does not have.
_TENSOR, _TUPLE, _ITEMS, _COUNTER = "$tensor", "$tuple", "$items", "$counter"


class Encoder:
    """Encodes values; the tensors that it meets are in `tensors`, under keys that begin with `prefix`.

    Without a prefix, a tensor cannot be stored.
    """

    def __init__(self, prefix: str | None) -> None:
        self.prefix = prefix
        self.tensors: dict[str, torch.Tensor] = {}

    def encode(self, value: Any, where: str) -> Any:
        """Return a value for JSON. `where` names it in errors.

        Raises:
            TypeError: something that cannot be stored without pickling it; says where it is.
        """
        if isinstance(value, torch.Tensor):
            if self.prefix is None:
                raise TypeError(f"{where} is a tensor inside another value, which a checkpoint does not store there")
            key = f"{self.prefix}{len(self.tensors)}"
            self.tensors[key] = value.detach()
            return {_TENSOR: key}
        if isinstance(value, Counter):
            return {_COUNTER: [[self.encode(k, where), n] for k, n in value.items()]}
        if isinstance(value, Mapping):
            if all(isinstance(k, str) and not k.startswith("$") for k in value):
                return {k: self.encode(v, f"{where}[{k!r}]") for k, v in value.items()}
            return {_ITEMS: [[self.encode(k, where), self.encode(v, f"{where}[{k!r}]")] for k, v in value.items()]}
        if isinstance(value, tuple):
            return {_TUPLE: [self.encode(v, f"{where}[{i}]") for i, v in enumerate(value)]}
        if isinstance(value, list):
            return [self.encode(v, f"{where}[{i}]") for i, v in enumerate(value)]
        if type(value) in _PLAIN:
            return value
        if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a number of NumPy
            return value.item()
        raise TypeError(
            f"{where} is a {type(value).__name__}, which a checkpoint does not store: it holds numbers, text, tensors, "
            "and lists, tuples and mappings of them"
        )


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return what was encoded; `tensors`: the tensors by key."""
    if isinstance(value, list):
        return [decode(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _TUPLE in value:
        return tuple(decode(v, tensors) for v in value[_TUPLE])
    if _COUNTER in value:
        return Counter({decode(k, tensors): n for k, n in value[_COUNTER]})
    if _ITEMS in value:
        return {decode(k, tensors): decode(v, tensors) for k, v in value[_ITEMS]}
    return {k: decode(v, tensors) for k, v in value.items()}


def tensor_keys(value: Any) -> list[str]:
    """Return the keys of the tensors in an encoded value."""
    if isinstance(value, list):
        return [key for v in value for key in tensor_keys(v)]
    if not isinstance(value, dict):
        return []
    if _TENSOR in value:
        return [value[_TENSOR]]
    return [key for v in value.values() for key in tensor_keys(v)]
