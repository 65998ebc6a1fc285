"""Attention that a Hugging Face model writes out in its own file, as BLOOM and MPT do, as one op.

A model that adds its mask to scores, or fills them by it, would need the mask as a tensor of all pairs. While the mask
is a `PendingMask`, the result is a `PendingScores` instead: what they were made of is looked up among the last
products, and softmax, dropout and the product with values end in one op of attention. A bias of the scores is taken
along if it is alike for all queries (ALiBi). Any other use of scores ends the trace, and the model is traced once more
with its mask as a tensor.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autoplan.capture.frontend import windows  # noqa: F401  registers the ops
from autoplan.capture.frontend.masks import HiddenPairs, Ledger, PendingMask, end_trace_at_operators, taken

# what hides pairs: the least number of the dtype of queries, which is that of the scores or a narrower one
_LEAST = torch.finfo(torch.float16).min
_ADDS = frozenset(("add", "__add__", "__radd__"))
_SCALES = frozenset(("mul", "__mul__", "__rmul__", "div", "__truediv__", "true_divide"))
_PRODUCTS = frozenset(("matmul", "__matmul__", "bmm"))
_VIEWS = frozenset(("view", "reshape"))
_FOLLOWED = _ADDS | _SCALES | _PRODUCTS | _VIEWS | {"baddbmm", "transpose"}


@dataclass(frozen=True)
class _Product:
    """The product of queries and keys that scores were made of: `scale` (q k^T) and the sum of `biases`."""

    query: torch.Tensor
    turned_key: torch.Tensor
    scale: float
    biases: tuple[tuple[torch.Tensor, float], ...] = ()


class _Made(NamedTuple):
    """What made a tensor, which is held so that no other gets its id."""

    tensor: torch.Tensor
    version: int
    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


class ScoresMode(TorchFunctionMode):
    """A mode that remembers what scores of attention are made of, and makes them pending where a mask is added."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger
        self._made: dict[int, _Made] = {}

    def __enter__(self) -> Any:
        self._ledger.scores = self._pending
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *args: Any) -> None:
        self._ledger.scores = None
        self._made.clear()
        super().__exit__(*args)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out, name = func(*args, **kwargs or {}), getattr(func, "__name__", "")
        if name in _FOLLOWED and isinstance(out, torch.Tensor) and out.dim() in (3, 4):
            self._made[id(out)] = _Made(out, out._version, name, args, kwargs or {})
        return out

    def _of(self, x: torch.Tensor) -> tuple[str, Sequence[Any], Mapping[str, Any]]:
        """Return the name and the arguments of the function that made a tensor; "" if it is not followed.

        Nor is one that was changed in place since.
        """
        found = self._made.get(id(x))
        return ("", (), {}) if found is None or found.version != x._version else (found.name, found.args, found.kwargs)

    def _product(self, x: torch.Tensor) -> _Product | None:
        """Return the product that scores are made of; None for anything else."""
        name, args, kwargs = self._of(x)
        if name in _VIEWS:
            return self._product(args[0])
        if name == "baddbmm":
            bias, first, second = (*args, *(kwargs[n] for n in ("batch1", "batch2") if n in kwargs))
            return _Product(first, second, float(kwargs.get("alpha", 1)), ((bias, float(kwargs.get("beta", 1))),))
        if kwargs or len(args) != 2:
            return None
        if name in _PRODUCTS:
            return _Product(args[0], args[1], 1.0)
        if name in _SCALES:
            return self._scaled(name, *args)
        if name not in _ADDS or not all(isinstance(a, torch.Tensor) for a in args):
            return None
        for one, other in (args, args[::-1]):
            found = self._product(one)
            if found is not None:
                return None if self._product(other) else replace(found, biases=(*found.biases, (other, 1.0)))
        return None

    def _scaled(self, name: str, one: Any, other: Any) -> _Product | None:
        x, factor = (one, other) if isinstance(one, torch.Tensor) else (other, one)
        if not isinstance(factor, (int, float)) or not isinstance(x, torch.Tensor):
            return None
        found, divides = self._product(x), "div" in name
        if found is None or (divides and x is other):
            return None
        factor = 1.0 / factor if divides else float(factor)
        return replace(
            found, scale=found.scale * factor, biases=tuple((bias, by * factor) for bias, by in found.biases)
        )

    def by_head(self, x: torch.Tensor, shape: tuple[Any, ...]) -> torch.Tensor | None:
        """Return [b, h, s, d] of that or of [b * h, s, d], from which it was made if possible; None for another x."""
        if x.dim() == 4:
            return x
        name, args, _ = self._of(x)
        if name in _VIEWS and args[0].dim() == 4 and tuple(args[0].shape[:2]) == shape[:2]:
            source: torch.Tensor = args[0]
            return source
        return x.reshape(*shape[:2], *x.shape[1:]) if x.dim() == 3 else None

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        """Return x with its last two dims exchanged, or what it was made from by that."""
        name, args, kwargs = self._of(x)
        if name == "transpose" and not kwargs and {d % x.dim() for d in args[1:]} == {x.dim() - 2, x.dim() - 1}:
            source: torch.Tensor = args[0]
            return source
        return x.transpose(-1, -2)

    def _pending(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> PendingScores | None:
        """Return scores with a mask, from a call that one was given to; None where no op of attention computes it."""
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        if len(tensors) != 1 or kwargs or tensors[0].dim() != 4 or not tensors[0].is_floating_point():
            return None
        (scores,) = tensors
        mask, found = _mask_of(name, args, scores), self._product(scores)
        if mask is None or found is None or mask.asked.padded or mask.asked.window == 0:
            return None
        shape = tuple(scores.shape)
        query, key = (self.by_head(x, shape) for x in (found.query, self._turned(found.turned_key)))
        bias, ok = _key_bias(found.biases, shape)
        if not ok or query is None or key is None:
            return None
        return PendingScores(self, mask, (query, key), bias, found.scale, shape, scores.dtype)


def _mask_of(name: str, args: Sequence[Any], scores: torch.Tensor) -> PendingMask | None:
    """Return the mask that a call adds to scores or hides pairs of them by; None if it does something else."""
    added = next((x for x in args if isinstance(x, PendingMask)), None)
    hidden = next((x for x in args if isinstance(x, HiddenPairs)), None)
    if hidden is not None and name == "masked_fill" and args[0] is scores and args[1] is hidden:
        return hidden.mask if args[2] <= _LEAST else None
    if added is not None and name in _ADDS and len(args) == 2:
        return added if added.asked.added else None
    return None


def _key_bias(biases: Sequence[tuple[torch.Tensor, float]], shape: tuple[Any, ...]) -> tuple[torch.Tensor | None, bool]:
    """Return the sum of biases [b or 1, h or 1, 1, t], None without any; and False if one is not alike for queries."""
    total: torch.Tensor | None = None
    for bias, factor in biases:
        if bias.dim() not in (3, 4) or not _is_one(bias.shape[-2]):
            return None, False
        heads = bias.shape[0]
        if bias.dim() == 3 and not (_is_one(heads) or statically_known_true(heads == shape[1])):
            bias = bias.reshape(*shape[:2], *bias.shape[1:])  # [b * h, 1, t]
        bias = bias if bias.dim() == 4 else bias.unsqueeze(0)
        bias = bias if factor == 1.0 else bias * factor
        total = bias if total is None else total + bias
    return total, True


def _is_one(size: Any) -> bool:
    return bool(statically_known_true(size == 1))


class PendingScores:
    """Scores of attention with a mask, or their softmax. Only what attention does to them is accepted.

    Args:
        given: queries [b, h, s, d] and keys [b, h, t, d].
        shape: of the scores, [b, h, s, t].
    """

    def __init__(
        self,
        mode: ScoresMode,
        mask: PendingMask,
        given: tuple[torch.Tensor, torch.Tensor],
        bias: torch.Tensor | None,
        scale: builtins.float,
        shape: tuple[Any, ...],
        dtype: torch.dtype,
        *,
        shares: bool = False,
        dropped: builtins.float = 0.0,
        flat: bool = False,
    ) -> None:
        self._how = {"shares": shares, "dropped": dropped, "flat": flat}
        self._all = (mode, mask, given, bias, scale, shape, dtype)
        self._mask, self._whole = mask, shape
        self.dtype: torch.dtype = dtype

    def _with(self, **how: Any) -> PendingScores:
        return PendingScores(*self._all, **{**self._how, **how})

    @property
    def shape(self) -> torch.Size:
        """Their shape, of three dims after a view of samples and heads as one."""
        b, heads, *rest = self._whole
        return torch.Size((b * heads, *rest) if self._how["flat"] else self._whole)

    def size(self, dim: int | None = None) -> Any:
        """As of a tensor."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """As of a tensor."""
        return len(self.shape)

    def float(self) -> PendingScores:
        """Return them as they are: all kernels compute a softmax in 32 bits or more."""
        return self

    def to(self, dtype: Any) -> PendingScores:
        """Return them as they are; see `float`."""
        return self if isinstance(dtype, torch.dtype) and dtype.is_floating_point else self._use("to")

    type = to

    def view(self, *shape: Any) -> PendingScores:
        """Return them with samples and heads as one dim, or as two."""
        sizes = shape[0] if len(shape) == 1 else shape
        if len(sizes) not in (3, 4) or sizes[-2] != self._whole[2]:
            self._use("view")
        return self._with(flat=len(sizes) == 3)

    reshape = view

    def softmax(self, dim: int, dtype: Any = None) -> PendingScores:
        """Return the shares of the keys."""
        if self._how["shares"] or dim % self.dim() != self.dim() - 1:
            self._use("softmax")
        return self._with(shares=True)

    def __matmul__(self, values: Any) -> torch.Tensor:
        mode, mask, (query, key), bias, scale, shape, _ = self._all
        value = mode.by_head(values, shape) if isinstance(values, torch.Tensor) else None
        if not self._how["shares"] or value is None or value.dtype != query.dtype:
            self._use("matmul")
        asked, documents = taken(mask, query, key)
        how = asked.causal, scale, *(asked.local or (None, None, None)), None, self._how["dropped"]
        found: torch.Tensor = torch.ops.autoplan.masked_attention(query, key, value, documents, None, bias, *how)
        return found.reshape(self.shape[0], *found.shape[2:]) if self._how["flat"] else found

    def matmul(self, values: Any) -> torch.Tensor:
        """Return the products of shares and values."""
        return self.__matmul__(values)

    def bmm(self, values: Any) -> torch.Tensor:
        """Return the products of shares and values."""
        return self.__matmul__(values)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        kwargs.pop("_stacklevel", None)
        leaves = pytree.tree_leaves((args, kwargs), is_leaf=lambda x: isinstance(x, (PendingScores, SpentScores)))
        scores = next(x for x in leaves if isinstance(x, (PendingScores, SpentScores)))
        name = getattr(function, "__name__", str(function))
        if isinstance(scores, PendingScores) and args and args[0] is scores:
            if function is F.softmax or name == "softmax":
                return scores.softmax(*args[1:], **kwargs)
            if function is F.dropout:
                return scores._dropped(*args[1:], **kwargs)
            if name in _PRODUCTS and len(args) == 2 and not kwargs:
                return scores @ args[1]
        return scores._use(name)

    def _dropped(self, p: builtins.float = 0.5, training: bool = True, inplace: bool = False) -> PendingScores:
        if not training or not p:
            return self
        if not self._how["shares"] or self._how["dropped"] or not math.isfinite(p):
            self._use("dropout")
        return self._with(dropped=float(p))

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # names that protocols probe for
            raise AttributeError(name)
        self._use(name)

    def _use(self, name: str) -> NoReturn:
        self._mask.refuse(name)


class SpentScores:
    """Shares that a layer hands out, which nothing may read: no tensor holds them."""

    def __init__(self, mask: PendingMask) -> None:
        self._mask = mask

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        leaves = pytree.tree_leaves((args, kwargs or {}), is_leaf=lambda x: isinstance(x, SpentScores))
        next(x for x in leaves if isinstance(x, SpentScores))._use(getattr(function, "__name__", str(function)))

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._use(name)

    def _use(self, name: str) -> NoReturn:
        self._mask.refuse(name)


end_trace_at_operators(PendingScores, SpentScores)
for _kind in (PendingScores, SpentScores):
    pytree.register_pytree_node(
        _kind, lambda scores: ([scores._mask], None), lambda children, _: SpentScores(*children)
    )
