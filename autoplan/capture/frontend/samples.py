"""Samples that a forward takes out of the batch one by one, and joins again: `torch.cat(list(features))`.

The number of samples is not fixed in a trace, so all of them are one object, which can be joined along the batch. So
the features of images come to the tokens of a language model (Llava).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode

from autoplan.errors import CaptureError

_UNBIND = (torch.unbind, torch.Tensor.unbind)
_SCATTER = (torch.masked_scatter, torch.Tensor.masked_scatter)
_CAT = (torch.cat, torch.concat, torch.concatenate)


class _Samples:
    """Stands for all samples of a tensor, where a list of them has one entry."""

    def __init__(self, whole: torch.Tensor) -> None:
        self.whole = whole

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Refuse a function that `CaptureSamples` does not know."""
        name = getattr(function, "__name__", str(function))
        raise CaptureError(
            f"{name} is given the samples of a batch one by one, and their number is not fixed; give it the whole "
            "batch, or join them first with torch.cat or torch.stack"
        )

    def __getattr__(self, name: str) -> NoReturn:
        raise CaptureError(
            f".{name} of one sample of a batch, and the number of samples is not fixed; compute with the whole batch"
        )


class CaptureSamples(TorchFunctionMode):
    """Give all samples as one object where a forward goes through the batch, and the batch where it joins them.

    Args:
        batch: returns the number of samples of the running trace, as every input has it.
    """

    def __init__(self, batch: Callable[[], Sequence[Any]]) -> None:
        super().__init__()
        self._batch = batch

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _UNBIND and (kwargs.get("dim") or (*args, 0)[1]) == 0 and self._is_batch(args[0]):
            return (_Samples(args[0]),)
        if function is torch.Tensor.__len__ and self._is_batch(args[0]):
            # what list() asks first, which takes this error for an answer
            raise TypeError("the number of samples is not fixed: write x.shape[0] for len(x)")
        if function in (*_CAT, torch.stack):
            whole = _whole(*args, **kwargs)
            if whole is not None:
                return whole if function is torch.stack else whole.flatten(0, 1)
        if function in _SCATTER and len(args) == 3 and self._is_batch(args[0]) and _by_rows(*args):
            return scattered_rows(*args)
        return function(*args, **kwargs)

    def _is_batch(self, tensor: object) -> bool:
        """Return True for a tensor that has a size for the samples first, which is no number."""
        if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0:
            return False
        size: Any = tensor.shape[0]
        batch = self._batch()
        if not isinstance(size, torch.SymInt) or str(size) not in map(str, batch):
            return False
        for other in batch:  # a size of every input, and one number
            torch._check(size == other)  # type: ignore[no-untyped-call]
        return True


def _whole(tensors: Any, dim: int = 0, **more: Any) -> torch.Tensor | None:
    """Return the tensor whose samples are joined along the batch; None if no list of all samples is."""
    alone = isinstance(tensors, (list, tuple)) and [type(x) for x in tensors] == [_Samples]
    return tensors[0].whole if alone and dim == 0 and not more else None


def _by_rows(x: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> bool:
    """Return True if a mask takes or leaves whole rows, and the source has as many of them for every sample."""
    if x.dim() != 3 or mask.dim() != 3 or not (mask.shape[2] == 1 or mask.stride(2) == 0):
        return False
    samples, _, width = x.shape
    return str(source.numel()) == str(samples * width * (source.numel() // (samples * width)))


def scattered_rows(x: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Write rows of the source into the masked places of every sample, as many for one sample as for another.

    So are the features of its images written into the tokens of a sample. A sample with another number of masked places
    is given a place that there is not, which the gather refuses.
    """
    samples, _, width = x.shape
    rows, chosen = source.reshape(samples, -1, width), mask[:, :, :1]
    count = chosen.long().cumsum(1)
    wrong = (count[:, -1:] != rows.shape[1]).long()
    place = (count - 1).clamp(min=0) + wrong * rows.shape[1]
    return torch.where(chosen, rows.gather(1, place.expand(-1, -1, width)), x)
