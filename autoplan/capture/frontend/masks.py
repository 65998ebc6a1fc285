"""The masks that Hugging Face models ask transformers for, handed out in a form that keeps attention whole.

A model asks `transformers.masking_utils` for a mask and gives it to its layers. A layer that passes it on to the
registered attention function, or to torch's, needs no s x s elements: attention reads from it whether it is causal, its
window, chunks and documents. So the model gets a `PendingMask`. Any other use of one (adding it to scores, slicing it)
ends the trace, and the model is traced once more with the mask that transformers makes: a tensor, or None where 'sdpa'
gets none. Every mask is thus taken by an attention function, used as a tensor, or unused in the module, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Protocol

import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from autoplan.capture.frontend import windows  # noqa: F401  registers the ops
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
        ahead: with a window, a query sees so many keys behind itself.
        chunk: a query sees the keys of its own chunk of so many tokens only.
        counted: padding or documents hide some tokens from others.
        padded: padding does.
        added: the mask is added to the scores, as 'eager' does; else it says which take part.
        replaced: with 'sdpa', transformers gives None for it, and attention goes by the module's `is_causal`.
    """

    config: int
    causal: bool
    window: int | None
    ahead: int | None
    chunk: int | None
    counted: bool
    padded: bool
    added: bool
    replaced: bool

    @property
    def local(self) -> tuple[int | None, int | None, int | None] | None:
        """The window, what it has ahead, and the chunk; None without any."""
        return None if self.window is None and self.chunk is None else (self.window, self.ahead, self.chunk)


@dataclass(eq=False)
class Ledger:
    """The masks that are given as transformers makes them, over all traces of one capture.

    Attributes:
        tensors: the masks that are tensors in the next trace.
        used: the masks that were used as tensors in the last one.
        notes: what a user may not expect of the attention, in sentences.
        as_run: model files take the branches of a run, not those for torch.compile.
        scores: gives scores with a mask for a call of torch by name and arguments (`capture.frontend.pending_scores`);
            None for calls that no op of attention computes.
    """

    tensors: set[Asked] = field(default_factory=set)
    used: set[Asked] = field(default_factory=set)
    notes: set[str] = field(default_factory=set)
    as_run: bool = False
    scores: Callable[[str, Sequence[Any], Mapping[str, Any]], Any] | None = None

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
    ) -> Any:
        if function is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs or {})
        for leaf in pytree.tree_leaves((args, kwargs or {}), is_leaf=lambda x: isinstance(x, PendingMask)):
            if isinstance(leaf, PendingMask):
                return leaf._called(function, args, kwargs or {})
        raise MaskUsed(f"a mask is used by {function}")

    def _called(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return scores with this mask, or end the trace."""
        name = getattr(function, "__name__", str(function))
        scores = None if self._ledger.scores is None else self._ledger.scores(name, args, kwargs)
        return self._use(name) if scores is None else scores

    def to(self, dtype: Any) -> HiddenPairs:
        """Return the pairs that are hidden, of a mask that is added: all others are 0."""
        return HiddenPairs(self) if dtype is torch.bool and self._asked.added else self._use("to")

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


# operators of tensors, each of which ends a trace
OPERATORS = (
    "add radd iadd sub rsub isub mul rmul imul truediv rtruediv and rand or ror xor rxor invert neg abs eq ne lt le gt "
    "ge getitem setitem len iter bool float int matmul rmatmul pow rpow"
).split()


class _Pending(Protocol):
    def _use(self, name: str) -> NoReturn: ...


def ends_trace(name: str) -> Callable[..., NoReturn]:
    """Return a method of something pending that no operation but those of attention may read."""

    def use(self: _Pending, *args: Any) -> NoReturn:
        self._use(name)

    return use


class HiddenPairs:
    """The pairs of queries and keys that a PendingMask hides, True; only to fill scores with."""

    def __init__(self, mask: PendingMask) -> None:
        self.mask = mask

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leaves = pytree.tree_leaves((args, kwargs or {}), is_leaf=lambda x: isinstance(x, HiddenPairs))
        hidden = next(x for x in leaves if isinstance(x, HiddenPairs))
        return hidden.mask._called(function, args, kwargs or {})

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # names that protocols probe for
            raise AttributeError(name)
        self._use(name)

    def _use(self, name: str) -> NoReturn:
        self.mask.refuse(name)


def end_trace_at_operators(*kinds: type[_Pending]) -> None:
    """Give classes of something pending the operators of tensors that they do not define, each by `ends_trace`."""
    for kind in kinds:
        for name in (f"__{each}__" for each in OPERATORS):
            if name not in vars(kind):
                setattr(kind, name, ends_trace(name))
        kind.__hash__ = object.__hash__  # type: ignore[method-assign]


end_trace_at_operators(PendingMask, HiddenPairs)


def _rebuilt(documents: Any, lengths: Any, asked: Asked, ledger: Ledger) -> PendingMask:
    return PendingMask(asked, documents, lengths, ledger)


# The tracer delimits layers by the tensors that enter them; the documents of a mask are such a tensor.
pytree.register_pytree_node(
    PendingMask,
    lambda mask: ([mask._documents, mask._lengths], (mask._asked, mask._ledger)),
    lambda children, context: _rebuilt(*children, *context),
)

pytree.register_pytree_node(
    HiddenPairs, lambda hidden: ([hidden.mask], None), lambda children, context: HiddenPairs(*children)
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


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute `F.scaled_dot_product_attention`, which a model gives a PendingMask. Other ones end the trace."""
    mask = next(x for x in (attn_mask, query, key, value) if isinstance(x, PendingMask))
    asked, (length, num_keys), documents = mask._asked, mask._lengths, mask._documents
    fits = attn_mask is mask and query.dim() == 4 and (query.shape[2], key.shape[2]) == (length, num_keys)
    unlike = documents is not None and length != num_keys
    if not fits or unlike or is_causal or asked.window == 0 or (asked.added and asked.padded):
        mask.refuse("scaled_dot_product_attention")
    if documents is None and asked.local is None:
        return F.scaled_dot_product_attention(
            query, key, value, None, dropout_p, is_causal=asked.causal, scale=scale, enable_gqa=enable_gqa
        )
    seen = values_unseen(value, documents if asked.padded else None)
    how = documents, None, None, asked.causal, scale, *(asked.local or (None, None, None)), None, dropout_p
    out: torch.Tensor = torch.ops.autoplan.masked_attention(query, key, seen, *how)
    return out


def documents_of(mask: torch.Tensor, pattern: _Pattern) -> torch.Tensor:
    """Return the document of every token [b, s] (for `autoplan.runtime.attention`), from a mask of the valid tokens.

    Valid tokens are document 1, or of the document of their chunk. Padding is seen by no token and sees that document
    (-2 for 1), as in transformers. Where a query would see no valid token, it sees its like (UNSEEING), and
    `values_unseen` says what.
    """
    counts = (mask != 0).to(torch.int64)
    if pattern.chunk is not None and pattern.left_padding is not None:
        number, seen = _in_chunks(counts, pattern.chunk, pattern.left_padding)
        return torch.where(counts > 0, 1 + number, torch.where(seen > 0, -2 - number, UNSEEING))
    if pattern.window is not None:
        seen = _in_window(counts, pattern.window, pattern.ahead or 0)
    elif pattern.causal:
        seen = counts.cumsum(-1)
    else:
        return 3 * counts - 2 * counts.amax(-1, keepdim=True)
    return 3 * counts - 2 * (seen > 0).to(torch.int64)


def _in_window(counts: torch.Tensor, window: int, ahead: int) -> torch.Tensor:
    """Return the sums [b, s] over the last `window` tokens, itself included, and the `ahead` next ones."""
    if ahead:
        sums = F.pad(counts, (window, ahead)).cumsum(-1)
        return sums[:, window + ahead :] - sums[:, : -window - ahead]
    sums = counts.cumsum(-1)
    return sums - F.pad(sums, (window, 0))[:, : -window or None]


def _in_chunks(counts: torch.Tensor, chunk: int, left_padding: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of every token's chunk [b, s], and the sum so far over the tokens of its chunk.

    Chunks begin after the padding on the left; those of the padding have negative numbers.
    """
    places = torch.arange(counts.shape[-1], device=counts.device) - left_padding[:, None]
    number = places.div(chunk, rounding_mode="floor")
    sums = counts.cumsum(-1)
    before = sums - counts
    added = torch.where(places == number * chunk, before - F.pad(before, (chunk, 0))[:, :-chunk], 0)
    return number, sums - added.cumsum(-1)


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
        causal, window, ahead, chunk: see `Asked`.
        function: the function without documents.
        documents: the document of every token [b, s] if a token sees its own document only.
        left_padding: number of tokens [b] before the first chunk.
    """

    causal: bool
    function: Any
    window: int | None = None
    ahead: int | None = None
    chunk: int | None = None
    documents: torch.Tensor | None = None
    left_padding: torch.Tensor | None = None


def _pattern(function: Any) -> _Pattern | None:
    """Return the pattern of a mask function of transformers; None for a function of somebody else."""
    from transformers import masking_utils

    if function is masking_utils.causal_mask_function:
        return _Pattern(True, function)
    if function is masking_utils.bidirectional_mask_function:
        return _Pattern(False, function)
    if getattr(function, "__qualname__", "") != "and_masks.<locals>.and_mask":
        return None
    parts = _cells(function)["mask_functions"]
    made_by = [getattr(part, "__qualname__", "").removesuffix(".<locals>.inner_mask") for part in parts]
    if made_by == ["packed_sequence_mask_function", "remap_positions_for_packed_sequence"]:
        return _packed(_cells(parts[0])["packed_sequence_mask"], _cells(parts[1]))
    out = _Pattern(False, function)
    for part, maker in zip(parts, made_by, strict=True):
        found = _overlay(maker, part) or _pattern(part)
        if found is None or found.documents is not None or not _apart(out, found):
            return None
        found = replace(found, causal=found.causal or out.causal, function=function)
        out = replace(out, **{name: x for name, x in vars(found).items() if x is not None})
    return out if out.causal == (out.ahead is None) else None


def _overlay(maker: str, function: Any) -> _Pattern | None:
    """Return the pattern of a function that transformers lays over others: a window or chunks."""
    if maker == "sliding_window_overlay":
        return _Pattern(False, function, window=int(_cells(function)["sliding_window"]))
    if maker == "sliding_window_bidirectional_overlay":  # up to so many tokens away
        distance = int(_cells(function)["sliding_window"])
        return _Pattern(False, function, window=distance + 1, ahead=distance)
    if maker == "chunked_overlay":
        cells = _cells(function)
        return _Pattern(False, function, chunk=int(cells["chunk_size"]), left_padding=cells["left_padding"])
    return None


def _apart(one: _Pattern, other: _Pattern) -> bool:
    """Return True unless both have windows or chunks."""
    return any(x.window is None and x.chunk is None for x in (one, other))


def _packed(documents: torch.Tensor, cells: dict[str, Any]) -> _Pattern | None:
    """Return the pattern of documents in one sequence, from the variables of the function of one document.

    Chunks begin with the document, so each is a document of its own.
    """
    found = _pattern(cells["mask_function"])
    if found is None or found.chunk is None:
        return found and replace(found, documents=documents)
    number = cells["position_ids"].div(found.chunk, rounding_mode="floor")
    new = (documents[:, 1:] != documents[:, :-1]) | (number[:, 1:] != number[:, :-1])
    return replace(found, documents=F.pad(new.to(torch.int64), (1, 0)).cumsum(-1))


def _cells(function: Any) -> dict[str, Any]:
    """Return the variables that a function takes from where it was made."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells}


_KEEPS = frozenset(
    "to.dtype to.device to.dtype_layout _to_copy.default expand.default unsqueeze.default view.default "
    "reshape.default repeat.default slice.Tensor alias.default clone.default contiguous.default".split()
)
_ONES = frozenset("ones.default ones_like.default new_ones.default full.default full_like.default".split())
_ZEROS = frozenset("zeros.default zeros_like.default new_zeros.default".split())
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
        if name == "repeat.default" and node.args[1][-1] != 1:
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
    """A request of transformers to a mask function: its arguments, of which `given` are those for `make`.

    `masked`: a mask of the valid tokens was given; `attention_mask` is None if it says that all are.
    """

    mask_function: Any
    q_length: Any
    kv_length: Any
    offsets: tuple[Any, Any]
    attention_mask: torch.Tensor | None
    may_be_causal: bool
    may_be_bidirectional: bool
    masked: bool
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
    masked = attention_mask is not None
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
        masked=masked,
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
        if found is not None and request.offsets == (0, 0) and _begins_with_sequence(found, request):
            sees_all = not found.causal and found.ahead is None
            if sees_all and request.attention_mask is None and request.may_be_bidirectional:
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
    replaced = may_skip and pattern.causal and pattern.window is None and pattern.chunk is None and not counted
    how = pattern.causal, pattern.window, pattern.ahead, pattern.chunk
    return Asked(id(request.config), *how, counted, padded, implementation == "eager", replaced)


def _begins_with_sequence(pattern: _Pattern, request: _Request) -> bool:
    """Return True unless chunks begin elsewhere than with the first valid token."""
    left = pattern.left_padding
    return left is None or request.masked or _made_by(left, _ZEROS) is not None


def _pending(request: _Request, pattern: _Pattern, asked: Asked, ledger: Ledger) -> PendingMask:
    documents = pattern.documents
    if request.attention_mask is not None:
        documents = documents_of(request.attention_mask, pattern)
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
