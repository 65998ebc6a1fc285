"""Tensors as memory sees them: a storage, and how it is read."""

from __future__ import annotations

from dataclasses import dataclass

from autoplan.ops.strides import Ints


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor. `storage`: the number of its storage, which views share."""

    storage: int
    shape: Ints
    strides: Ints

    def transposed(self) -> StoredTensor:
        """Return it with its last two dims exchanged."""
        return StoredTensor(
            self.storage, (*self.shape[:-2], *self.shape[:-3:-1]), (*self.strides[:-2], *self.strides[:-3:-1])
        )

    def folds(self) -> bool:
        """Return True if all dims but the last are one dim in memory."""
        return all(self.strides[i] == self.strides[i + 1] * self.shape[i + 1] for i in range(len(self.shape) - 2))
