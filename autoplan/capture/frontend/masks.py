"""The masks that Hugging Face models ask transformers for, handed out in a form that keeps attention whole.

A model asks `transformers.masking_utils` for a mask and gives it to its layers. A layer that passes it on to the
registered attention function needs no s x s elements: the function reads from it whether attention is causal, its
window and its documents. So the model gets a `PendingMask`. Any other use of one (adding it to scores, slicing it) ends
the trace, and the model is traced once more with the mask that transformers makes: a tensor, or None where 'sdpa' gets
none. Every mask is thus taken by the attention function, used as a tensor, or unused in the module, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from autoplan.errors import CaptureError


class MaskUsed(CaptureError):
    """A PendingMask was used as a tensor; the model is to be traced once more."""


@dataclass(frozen=True)
class Asked:
    """The mask that a model asked for.

    Attributes:
        config: id of the config of the model that asked.
        causal: a query sees no later key.
        window: a query sees the last `window` keys only, itself included.
        counted: padding or documents hide some tokens from others.
        padded: padding does.
        replaced: with 'sdpa', transformers gives None for it, and attention goes by the module's `is_causal`.
    """

    config: int
    causal: bool
    window: int | None
    counted: bool
    padded: bool
    replaced: bool


@dataclass(eq=False)
class Ledger:
    """The masks that are given as transformers makes them, over all traces of one capture.

    Attributes:
        tensors: the masks that are tensors in the next trace.
        used: the masks that were used as tensors in the last one.
        notes: what a user may not expect of the attention, in sentences.
        as_run: model files take the branches of a run, not those for torch.compile.
    """

    tensors: set[Asked] = field(default_factory=set)
    used: set[Asked] = field(default_factory=set)
    notes: set[str] = field(default_factory=set)
    as_run: bool = False

    def again(self) -> bool:
        """Return True if the last trace used masks that were not tensors; the next trace gets them as tensors."""
        new = self.used - self.tensors
        self.tensors |= new
        self.used.clear()
        return bool(new)


class PendingMask:
    """A mask that only the registered attention function accepts; every other use raises MaskUsed.

    A test for None gives the right answer: neither this mask nor the module's is None.
    """

    def __init__(self, asked: Asked, documents: torch.Tensor | None, lengths: tuple[Any, Any], ledger: Ledger) -> None:
        self._asked, self._documents, self._lengths, self._ledger = asked, documents, lengths, ledger

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        for leaf in pytree.tree_leaves((args, kwargs or {}), is_leaf=lambda x: isinstance(x, PendingMask)):
            if isinstance(leaf, PendingMask):
                leaf._use(getattr(function, "__name__", str(function)))
        raise MaskUsed(f"a mask is used by {function}")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # names that protocols probe for
            raise AttributeError(name)
        self._use(name)

    @property
    def asked(self) -> Asked:
        """The request, for the registered attention function only."""
        return self._asked

    def refuse(self, name: str) -> NoReturn:
        """End the trace: `name` needs the mask as a tensor."""
        self._use(name)

    def _use(self, name: str) -> NoReturn:
        self._ledger.used.add(self._asked)
        raise MaskUsed(f"the model uses an attention mask by itself ({name})")


def _operator(name: str) -> Callable[..., NoReturn]:
    def use(self: PendingMask, *args: Any) -> NoReturn:
        self._use(name)

    return use


for _name in (
    "add radd iadd sub rsub isub mul rmul imul truediv rtruediv and rand or ror xor rxor invert neg abs eq ne lt le gt "
    "ge getitem setitem len iter bool float int matmul rmatmul pow rpow"
).split():
    setattr(PendingMask, f"__{_name}__", _operator(f"__{_name}__"))
PendingMask.__hash__ = object.__hash__  # type: ignore[method-assign]


def _rebuilt(documents: Any, lengths: Any, asked: Asked, ledger: Ledger) -> PendingMask:
    return PendingMask(asked, documents, lengths, ledger)


# The tracer delimits layers by the tensors that enter them; the documents of a mask are such a tensor.
pytree.register_pytree_node(
    PendingMask,
    lambda mask: ([mask._documents, mask._lengths], (mask._asked, mask._ledger)),
    lambda children, context: _rebuilt(*children, *context),
)


def taken(mask: PendingMask, query: torch.Tensor, key: torch.Tensor) -> tuple[Asked, torch.Tensor | None]:
    """Return the request and the documents [b, s] of a mask, for the registered attention function only.

    Raises:
        CaptureError: if the mask has other lengths than the attention.
    """
    asked, (q, kv) = mask._asked, mask._lengths
    if key.shape[2] != kv or (asked.causal and query.shape[2] != q):
        raise CaptureError(
            f"attention of {query.shape[2]} over {key.shape[2]} tokens is given a mask of {q} x {kv}: attention over "
            "tokens of an earlier segment is not supported"
        )
    return asked, mask._documents


def documents_of(mask: torch.Tensor, causal: bool, window: int | None) -> torch.Tensor:
    """Return the document of every token [b, s] (for `autoplan.runtime.attention`), from a mask of the valid tokens.

    Valid tokens are document 1. Padding is seen by no token and sees document 1 (-2), as in transformers. Where a
    query would see no valid token, it sees its like (UNSEEING), and `values_unseen` says what.
    """
    counts = (mask != 0).to(torch.int64)
    if not causal:
        return 3 * counts - 2 * counts.amax(-1, keepdim=True)
    so_far = counts.cumsum(-1)
    if window is not None:
        so_far = so_far - F.pad(so_far, (window, 0))[:, : -window or None]
    return 3 * counts - 2 * (so_far > 0).to(torch.int64)


UNSEEING = 0  # in `documents_of`


def values_unseen(value: torch.Tensor, documents: torch.Tensor | None) -> torch.Tensor:
    """Return the values [b, kv, s, e] with zeros for UNSEEING tokens, which only their like see: attention is zero
    there, as in all kernels of transformers but 'eager'. Without documents of padding, None, there are no such tokens.
    """
    return value if documents is None else value.masked_fill((documents == UNSEEING)[:, None, :, None], 0.0)


@dataclass(frozen=True)
class _Pattern:
    """A mask function of transformers that attention can apply by itself.

    Attributes:
        causal, window: see `Asked`.
        function: the function without documents.
        documents: the document of every token [b, s] if a token sees its own document only.
    """

    causal: bool
    window: int | None
    function: Any
    documents: torch.Tensor | None = None


def _pattern(function: Any) -> _Pattern | None:
    """Return the pattern of a mask function of transformers; None for a function of somebody else."""
    from transformers import masking_utils

    if function is masking_utils.causal_mask_function:
        return _Pattern(True, None, function)
    if function is masking_utils.bidirectional_mask_function:
        return _Pattern(False, None, function)
    if getattr(function, "__qualname__", "") != "and_masks.<locals>.and_mask":
        return None
    parts = _cells(function)["mask_functions"]
    made_by = [getattr(part, "__qualname__", "").removesuffix(".<locals>.inner_mask") for part in parts]
    if made_by == ["packed_sequence_mask_function", "remap_positions_for_packed_sequence"]:
        found = _pattern(_cells(parts[1])["mask_function"])
        return found and replace(found, documents=_cells(parts[0])["packed_sequence_mask"])
    window, causal = None, False
    for part, maker in zip(parts, made_by, strict=True):
        if maker == "sliding_window_overlay" and window is None:
            window = int(_cells(part)["sliding_window"])
            continue
        found = _pattern(part)
        if found is None or found.window is not None or found.documents is not None:
            return None
        causal |= found.causal
    return _Pattern(causal, window, function) if causal else None


def _cells(function: Any) -> dict[str, Any]:
    """Return the variables that a function takes from where it was made."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells}


_KEEPS = frozenset(
    "to.dtype to.device to.dtype_layout _to_copy.default expand.default unsqueeze.default view.default "
    "reshape.default slice.Tensor alias.default clone.default contiguous.default".split()
)
_ONES = frozenset("ones.default ones_like.default new_ones.default full.default full_like.default".split())
_RANGES = frozenset(("arange.default", "arange.start"))


def _made_by(
    tensor: torch.Tensor, makers: frozenset[str], through: frozenset[str] = frozenset()
) -> torch.fx.Node | None:
    """Return the traced op that made all of `tensor` if it is one of `makers`, looking through copies, casts and views.

    `get_proxy_mode` and `get_proxy_slot` are private to torch (tried on 2.13): there is no public way to ask a trace
    which op made a tensor.
    """
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

    mode = get_proxy_mode()
    slot = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    node: Any = getattr(getattr(slot, "proxy", None), "node", None)
    while node is not None:
        name = str(node.target).removeprefix("aten.")
        if name in makers and isinstance(node, torch.fx.Node):
            return node
        if name not in _KEEPS | through or len(node.all_input_nodes) == 0:
            return None
        if name == "slice.Tensor" and len(node.args) > 4 and node.args[4] != 1:
            return None
        if name in through and any(isinstance(a, torch.fx.Node) for a in node.args[1:]):
            return None
        node = node.args[0]
    return None


def _all_ones(mask: torch.Tensor) -> bool:
    """Return True if the model itself made a mask in which every token is valid."""
    node = _made_by(mask, _ONES)
    if node is None:
        return False
    return "full" not in str(node.target) or node.args[1] in (1, 1.0, True)


def document_starts(position_ids: torch.Tensor) -> torch.Tensor | None:
    """Return the document of every token [b, s] by jumps of the positions; None if all positions are consecutive.

    Does the same as find_packed_sequence_indices of transformers, which reads values and so cannot run in a trace.
    """
    if _made_by(position_ids, _RANGES, frozenset(("add.Tensor",))) is not None:
        return None
    follows = position_ids[:, 1:] - position_ids[:, :-1] == 1
    return F.pad((~follows).to(torch.int64), (1, 0)).cumsum(-1)


def _is_index_based(make: Callable[..., Any], function: Any) -> bool:
    """Return True if a mask function of a model gives for tensors of indices what it gives for every index.

    transformers maps such functions over indices by torch.vmap, which leaves no plain ops in a trace.
    """
    given = {"batch_size": 2, "q_length": 12, "kv_length": 12, "mask_function": function, "allow_is_causal_skip": False}

    def same() -> bool:
        return torch.equal(*(make(**given, use_vmap=by_vmap) for by_vmap in (True, False)))

    try:
        return untraced(same)
    except Exception:  # it reads tensors of the trace, or needs single indices
        return False


def untraced(compute: Callable[[], bool]) -> bool:
    """Return the result of a function that computes with real tensors, outside the running trace.

    A trace belongs to its thread, so another one leaves nothing in it.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(compute).result()


@dataclass(frozen=True)
class _Request:
    """A request of transformers to a mask function: its arguments, of which `given` are those for `make`."""

    mask_function: Any
    q_length: Any
    kv_length: Any
    offsets: tuple[Any, Any]
    attention_mask: torch.Tensor | None
    may_be_causal: bool
    may_be_bidirectional: bool
    config: Any
    given: dict[str, Any]


def _request(
    *,
    batch_size: Any,
    q_length: Any,
    kv_length: Any,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    config: Any = None,
    **kwargs: Any,
) -> _Request:
    """Return the arguments of a mask function; a mask in which all tokens are valid is None."""
    if attention_mask is not None and _all_ones(attention_mask):
        attention_mask = None
    sizes = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length}
    return _Request(
        mask_function=mask_function,
        q_length=q_length,
        kv_length=kv_length,
        offsets=(q_offset, kv_offset),
        attention_mask=attention_mask,
        may_be_causal=allow_is_causal_skip,
        may_be_bidirectional=allow_is_bidirectional_skip,
        config=config,
        given={**sizes, "q_offset": q_offset, "kv_offset": kv_offset, **kwargs},
    )


def mask_function(implementation: str, make: Callable[..., Any], ledger: Ledger) -> Callable[..., Any]:
    """Return the function that gives models their masks for `implementation`, 'sdpa' or 'eager'.

    Args:
        make: makes the mask of 'sdpa', a tensor [b, 1, q, kv] of bool (True takes part). The mask of 'eager' is added
            to the scores: 0, or the least number of its dtype.
    """

    def ask(**kwargs: Any) -> torch.Tensor | PendingMask | None:
        request = _request(**kwargs)
        found = _pattern(request.mask_function)
        if found is not None and request.offsets == (0, 0):
            if not found.causal and request.attention_mask is None and request.may_be_bidirectional:
                return None  # as transformers: every token sees every token
            asked = _asked(request, found, implementation)
            if asked not in ledger.tensors:
                return _pending(request, found, asked, ledger)
            if asked.replaced:
                return None
        seen = _seen(request, found, make)
        if implementation == "sdpa":
            return seen
        dtype = kwargs.get("dtype", torch.float32)
        return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)

    return ask


def _asked(request: _Request, pattern: _Pattern, implementation: str) -> Asked:
    padded = request.attention_mask is not None
    counted = padded or pattern.documents is not None
    may_skip = implementation == "sdpa" and request.may_be_causal
    replaced = may_skip and pattern.causal and pattern.window is None and not counted
    return Asked(id(request.config), pattern.causal, pattern.window, counted, padded, replaced)


def _pending(request: _Request, pattern: _Pattern, asked: Asked, ledger: Ledger) -> PendingMask:
    documents = pattern.documents
    if request.attention_mask is not None:
        documents = documents_of(request.attention_mask, pattern.causal, pattern.window)
    return PendingMask(asked, documents, (request.q_length, request.kv_length), ledger)


def _seen(request: _Request, pattern: _Pattern | None, make: Callable[..., Any]) -> torch.Tensor:
    """Return the mask [b, 1, q, kv] of bool, without the padding and the tokens of other documents."""
    given = dict(request.given)
    if given.get("use_vmap") and _is_index_based(make, request.mask_function):
        given["use_vmap"] = False
    function = request.mask_function if pattern is None else pattern.function
    seen: torch.Tensor = make(**given, mask_function=function, allow_is_causal_skip=False)
    if request.attention_mask is not None:
        seen = seen & request.attention_mask.to(torch.bool)[:, None, None, :]
    if pattern is not None and pattern.documents is not None:
        seen = seen & (pattern.documents[:, None, :, None] == pattern.documents[:, None, None, :])
    return seen
