"""Ops in terms of others: forms that autoplan writes itself, and PyTorch's own decompositions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree

from autoplan.capture import positions
from autoplan.capture.draws import drawn_form
from autoplan.capture.frontend.inplace import ALLOCATIONS
from autoplan.capture.frontend.written_out import attention_of_four_dims, written_attention
from autoplan.capture.ops import OPS, SKIP

_Function = Callable[..., Any]
Known = Callable[[fx.Node], bool]
Traces = dict[object, fx.GraphModule | None]  # the decompositions of one capture, by op and arguments


def other_form(target: str, node: fx.Node, traces: Traces) -> fx.GraphModule | None:
    """Return the ops of another form of `node` that can be split in more ways; None if there is none.

    Args:
        target: the op that the node is: that without side effect where the node's own changes its argument.
    """
    drawn = drawn_form(target, node)
    if drawn is not None:
        return _once(traces, node, drawn, {}, pre_dispatch=True)
    for found in (*_OWN.get(target, ()), *_loss_of_samples(target, node.target)):
        if found.covers(node):
            return _once(traces, node, found.function, {}, pre_dispatch=True)
    return None


def _values(given: Any) -> Any:
    """Return arguments with fake tensors in place of nodes."""
    return pytree.tree_map(lambda leaf: leaf.meta["val"] if isinstance(leaf, fx.Node) else leaf, given)


def decomposed(node: fx.Node, op: torch._ops.OpOverload, known: Known, traces: Traces) -> fx.GraphModule | None:
    """Return the ops that PyTorch decomposes an op into, with symbolic sizes, source and module of `node`.

    An op of a decomposition may have no derivative, or another one than the whole: so all parts must be known.

    Args:
        op: the op that the node is, if another than its target.
        known: True for a node that the capture can translate.

    Returns:
        None if PyTorch has no decomposition whose parts are all known.
    """
    for table in _tables(op):
        found = _once(traces, node, op, table)
        if found is None:
            continue
        parts = [n for n in found.graph.nodes if n.op == "call_function"]
        if all(_plain(n) or (known(n) and n.target is not op) for n in parts):
            return found
    return None


@functools.cache
def _tables(op: torch._ops.OpOverload) -> tuple[Mapping[Any, _Function], ...]:
    """Return the decompositions of an op to try: into core ATen, then all that PyTorch has.

    Other ops with a record stay whole. The op itself may have one, for other forms than that of the node.
    """
    import torch._refs  # registers further decompositions

    tables = torch._decomp.core_aten_decompositions(), torch._decomp.decomposition_table
    return tuple({o: how for o, how in table.items() if o is op or str(o) not in OPS} for table in tables)


def _plain(node: fx.Node) -> bool:
    """Return True for sizes and parts of tuples."""
    return str(node.target) in SKIP or not isinstance(node.target, torch._ops.OpOverload)


def _once(
    traces: Traces, node: fx.Node, function: _Function, table: Mapping[Any, _Function], pre_dispatch: bool = False
) -> fx.GraphModule | None:
    """Return the trace of a function of a node's arguments, from `traces` if it was made for equal arguments."""
    key = (function, id(table) if table else 0, _form(node))
    if key not in traces:
        traces[key] = _traced(node, function, table, pre_dispatch)
    found = traces[key]
    for inner in found.graph.nodes if found is not None else ():
        for name in ("stack_trace", "nn_module_stack"):
            inner.meta[name] = node.meta.get(name)
    return found


def _form(node: fx.Node) -> str:
    """Return the arguments of a node as text: types, shapes and strides of tensors, sizes, and plain values."""
    order = {given: i for i, given in enumerate(node.all_input_nodes)}
    flat, spec = pytree.tree_flatten((node.args, node.kwargs))

    def text(leaf: Any) -> str:
        if not isinstance(leaf, fx.Node):
            return f"{type(leaf).__name__} {leaf!r}"
        value = leaf.meta["val"]
        if not isinstance(value, torch.Tensor):
            return f"{order[leaf]}: {value}"
        return f"{order[leaf]}: {value.dtype} {tuple(value.shape)} {value.stride()} {value.requires_grad}"

    return f"{[text(leaf) for leaf in flat]} {spec}"


def _traced(
    node: fx.Node, function: _Function, table: Mapping[Any, _Function], pre_dispatch: bool = False
) -> fx.GraphModule | None:
    """Trace a function of a node's arguments. `pre_dispatch`: composite ops of the function stay whole."""
    flat, spec = pytree.tree_flatten((node.args, node.kwargs))
    nodes = node.all_input_nodes  # each once, also if it is given twice

    def run(*given: Any) -> Any:
        values = dict(zip(nodes, given, strict=True))
        leaves = [values[leaf] if isinstance(leaf, fx.Node) else leaf for leaf in flat]
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        return function(*args, **kwargs)

    trace = make_fx(run, decomposition_table=dict(table), tracing_mode="symbolic", pre_dispatch=pre_dispatch)
    try:
        found = trace(*(n.meta["val"] for n in nodes))
    except Exception:  # a decomposition may raise anything for arguments that it does not handle
        return None
    found.graph.eliminate_dead_code()
    return found


# -- forms of autoplan -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Form:
    """A form of an op that is written in terms of others: `covers` tells whether a node has it."""

    covers: Callable[[fx.Node], bool]
    function: _Function


def _given(covers: Callable[..., bool], function: _Function) -> tuple[_Form, ...]:
    """Return the form of an op whose arguments, with fake tensors, are covered."""
    return (_Form(lambda node: covers(*_values(node.args), **_values(node.kwargs)), function),)


def _loss(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Put classes last and join all other dims, as a loss over a split vocabulary takes them.

    A cross entropy with probabilities as targets is written as sums; its mean is over the samples. So is one of
    smoothed labels with weights of classes; its mean is over the weights of the labels.
    """
    dim = 1 if input.dim() > 1 else 0
    last = input.movedim(dim, -1)
    if weight is not None and label_smoothing and not target.is_floating_point():
        scores, ignored = F.log_softmax(last, -1), target == ignore_index
        place, counts = target.masked_fill(ignored, 0), (~ignored).to(last.dtype)  # -100 is no class
        weights = F.embedding(place, weight.unsqueeze(-1)).squeeze(-1) * counts
        own = scores.gather(-1, place.unsqueeze(-1)).squeeze(-1) * weights
        every = (scores * weight).sum(-1) * counts
        losses = (label_smoothing - 1) * own - (label_smoothing / last.shape[-1]) * every
        return losses.sum() / weights.sum() if reduction == 1 else losses.sum() if reduction == 2 else losses
    if not target.is_floating_point():
        how, last, target = "mean" if reduction == 1 else "sum", last.flatten(0, -2), target.flatten()
        return F.cross_entropy(last, target, weight, None, ignore_index, None, how, label_smoothing)
    share = target.movedim(dim, -1)
    if label_smoothing:
        share = share * (1 - label_smoothing) + label_smoothing / last.shape[-1]
    terms = share * F.log_softmax(last, -1)
    losses = -(terms if weight is None else terms * weight).sum(-1)
    return losses.sum() / losses.numel() if reduction == 1 else losses.sum() if reduction == 2 else losses


def _is_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: Any = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> bool:
    weighed = weight is not None and label_smoothing > 0 and input.dim() > 1
    return target.is_floating_point() or weighed or (input.dim() > 2 and reduction != 0)


def _patches(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *rest: Any) -> torch.Tensor:
    """Write a convolution whose kernels do not overlap (patches of an image) as a product of matrices."""
    kernel = list(weight.shape[2:])
    if set(kernel) == {1}:
        return F.linear(input.movedim(1, -1), weight.flatten(1), bias).movedim(-1, 1)
    num, cut = len(kernel), [n for size, k in zip(input.shape[2:], kernel, strict=True) for n in (size // k, k)]
    places, inside = range(2, 2 + 2 * num, 2), range(3, 3 + 2 * num, 2)
    rows = input.reshape(*input.shape[:2], *cut).permute(0, *places, 1, *inside).flatten(num + 1)
    return F.linear(rows, weight.flatten(1), bias).movedim(-1, 1)


def _are_patches(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> bool:
    kernel = list(weight.shape[2:])
    strides = list(stride) if isinstance(stride, (list, tuple)) else [stride]
    plain = padding in (0, "valid") or (not isinstance(padding, str) and not any(padding))
    if strides * (len(kernel) // len(strides)) != kernel or groups != 1 or not plain or input.dim() != len(kernel) + 2:
        return False
    sizes = zip(input.shape[2:], kernel, strict=True)
    return all(isinstance(size, int) and size % k == 0 for size, k in sizes)


def _vector_product(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Write a product with a vector as one of matrices."""
    rows, columns = self.dim() == 1, other.dim() == 1
    product = (self.unsqueeze(0) if rows else self) @ (other.unsqueeze(-1) if columns else other)
    product = product.squeeze(-1) if columns else product
    return product.squeeze(-1 if columns else -2) if rows else product


def _has_vector(self: torch.Tensor, other: torch.Tensor) -> bool:
    return 1 in (self.dim(), other.dim())


def _copy(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Write what a tensor becomes when another is copied into all of it."""
    return src.to(self.dtype).expand(self.shape)


def _variance(
    self: torch.Tensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write variance and mean as sums, which can be added up over parts of a batch. `dim`: `unbiased` if a bool."""
    dims, unbiased = _reduced(self, dim), dim if isinstance(dim, bool) else unbiased
    mean = self.mean(dims, keepdim=True)
    number = math.prod(self.shape[d] for d in dims) - (int(unbiased) if correction is None else correction)
    variance = (self - mean).square().sum(dims, keepdim=keepdim) / number
    return variance, mean if keepdim else mean.reshape(variance.shape)


def _norm(self: torch.Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False) -> torch.Tensor:
    """Write a norm as a root whose gradient at zero is zero, as PyTorch's own is; that of its decomposition is NaN."""
    powers = (self.square() if ord == 2 else self.abs().pow(ord)).sum(_reduced(self, dim), keepdim=keepdim)
    zero = powers == 0
    positive = powers.masked_fill(zero, 1.0)
    return (positive.sqrt() if ord == 2 else positive.pow(1 / ord)).masked_fill(zero, 0.0)


def _is_root(self: torch.Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, **more: Any) -> bool:
    return self.is_floating_point() and 1 < ord < math.inf and not more


def _reduced(x: torch.Tensor, dim: Any) -> list[int]:
    given = None if isinstance(dim, bool) else [dim] if isinstance(dim, int) else dim
    return [d % x.dim() for d in given] if given else list(range(x.dim()))


def _is_of_a_batch(self: torch.Tensor, dim: Any = None, *_: Any, **__: Any) -> bool:
    """Return True for real numbers along dims that are not all of fixed size, as those of a batch are not."""
    return self.is_floating_point() and not all(isinstance(self.shape[d], int) for d in _reduced(self, dim))


def _bincount(self: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor:
    """Count numbers below `minlength`, which PyTorch counts up to the largest that there is."""
    counted = torch.ones_like(self) if weights is None else weights
    return counted.new_zeros(minlength).scatter_add(0, self.to(torch.int64), counted)


def _dropout(input: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the dropout of a program where every op makes a new tensor as that of a model; nothing reads its mask."""
    return F.dropout(input, p, train is not False), torch.ones_like(input, dtype=torch.bool)


def _without_mask(node: fx.Node) -> bool:
    return all(user.args[1:] == (0,) for user in node.users)


def _counts_few(self: torch.Tensor, weights: Any = None, minlength: int = 0) -> bool:
    whole = weights is None or weights.dtype in (torch.float32, torch.float64)
    return minlength > 0 and whole and self.dtype is torch.int64


def _written_slice(
    self: torch.Tensor, src: torch.Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> torch.Tensor:
    """Join what stands before a slice, what is written into it, and what stands behind.

    Of two sequences that are joined one may be written so, and PyTorch has no derivative of complex `slice_scatter`.
    """
    size = self.shape[dim]
    begin = 0 if start is None else start + size if start < 0 else start
    behind = begin + src.shape[dim]
    around = [(begin, self.narrow(dim, 0, begin)), (size - behind, self.narrow(dim, behind, size - behind))]
    before, after = ([] if statically_known_true(length == 0) else [part] for length, part in around)
    written = [*before, src.to(self.dtype), *after]
    return torch.cat(written, dim) if len(written) > 1 else written[0]


def _is_joined(node: fx.Node) -> bool:
    """Return True for a slice of a complex tensor, or of a dim of fixed size behind the batch.

    A tensor that was only allocated is joined of what is written into it (`autoplan.capture.frontend.inplace`).
    """

    def covers(
        self: torch.Tensor, src: torch.Tensor, dim: int = 0, start: Any = 0, end: Any = 0, step: int = 1
    ) -> bool:
        fixed = all(isinstance(x, int | None) for x in (self.shape[dim], src.shape[dim], start))
        return step == 1 and (self.is_complex() or (fixed and dim % self.dim() > 0 and not allocated))

    maker = node.args[0]
    while isinstance(maker, fx.Node) and maker.target == node.target:
        maker = maker.args[0]
    allocated = isinstance(maker, fx.Node) and str(maker.target) in ALLOCATIONS
    return covers(*_values(node.args), **_values(node.kwargs))


def _join(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Leave out tensors of shape [0], which PyTorch joins with anything."""
    return torch.cat([x for x in tensors if x.shape != (0,)], dim)


def _joins_batches(tensors: Sequence[torch.Tensor], dim: int = 0) -> bool:
    """Return True for tensors of one shape that are joined along the batch."""
    first, others = tensors[0], tensors[1:]
    if dim != 0 or not others or not first.dim():
        return False
    size: Any = first.shape[0]
    alike = all(x.dim() == first.dim() and statically_known_true(x.shape[0] == size) for x in others)
    return isinstance(size, torch.SymInt) and alike


def _join_batches(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Join along a dim of its own, so that each part has the samples of a rank."""
    return torch.cat([x.unsqueeze(0) for x in tensors]).flatten(0, 1)


def _is_written_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> bool:
    """Return True for attention whose numbers depend on the kernel, and which torch computes by single operations.

    Where an additive mask hides all keys of a query by large numbers, fused kernels have other gradients: torch takes
    none of them if it broadcasts keys over the heads, but a rank with as many query heads as key heads would.
    """
    broadcast = not enable_gqa and query.dim() > 2 and query.shape[-3] != key.shape[-3]
    return broadcast and attn_mask is not None and attn_mask.is_floating_point()


def _repeats(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> bool:
    """Return True for attention that repeats keys or values for several samples (a dim of size 1, or none)."""
    samples = [tuple(x.shape[:-3]) for x in (query, key, value)]
    return len({x.dim() for x in (query, key, value)}) > 1 or samples.count(samples[0]) < len(samples)


def _has_other_dims(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> bool:
    """Return True for attention without a dim of heads, or with several of samples (windows of an image)."""
    return bool(query.dim() != 4)


def _extremes(name: str) -> tuple[_Form, ...]:
    """Return the form of the largest or smallest elements along the batch: those alone, and their places."""
    value, place = getattr(torch, f"a{name}"), getattr(torch, f"arg{name}")

    def function(self: torch.Tensor, dim: int, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        return value(self, dim, keepdim), place(self, dim, keepdim)

    return _given(lambda self, dim, *_: dim == 0 and self.dim() > 0 and not isinstance(self.shape[0], int), function)


# Losses whose mean is that of their elements or samples, by aten/src/ATen/native/Loss*.cpp. It is not for nll_loss,
# which leaves out ignored targets and divides by the weights of classes, and ctc_loss, by the lengths of targets.
_OF_SAMPLES = frozenset(
    f"aten.{name}.default"
    for name in (
        "binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss hinge_embedding_loss huber_loss "
        "kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss poisson_nll_loss "
        "smooth_l1_loss soft_margin_loss triplet_margin_loss"
    ).split()
)


def _loss_of_samples(target: str, op: Any) -> tuple[_Form, ...]:
    """Return the form of a loss of `_OF_SAMPLES`: the mean or sum of the losses of its elements or samples."""
    if target not in _OF_SAMPLES or target in OPS or target in _OWN:
        return ()
    schema: Any = op._schema
    place = [a.name for a in schema.arguments].index("reduction")

    def reduction(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return args[place] if place < len(args) else kwargs.get("reduction", schema.arguments[place].default_value)

    def function(*args: Any, **kwargs: Any) -> torch.Tensor:
        how = reduction(args, kwargs)
        if place < len(args):
            args = (*args[:place], 0, *args[place + 1 :])
        else:
            kwargs = {**kwargs, "reduction": 0}
        losses: torch.Tensor = op(*args, **kwargs)
        return losses.mean() if how == 1 else losses.sum()

    return (_Form(lambda node: reduction(node.args, node.kwargs) in (1, 2), function),)


_VARIANCES: Mapping[str, _Function] = {
    "var": lambda *given, **how: _variance(*given, **how)[0],
    "std": lambda *given, **how: _variance(*given, **how)[0].sqrt(),
    "var_mean": _variance,
}
_OWN: Mapping[str, tuple[_Form, ...]] = {
    "aten.scaled_dot_product_attention.default": (
        *_given(_is_written_out, written_attention),
        *_given(_repeats, written_attention),
        *_given(_has_other_dims, attention_of_four_dims),
    ),
    "aten.cross_entropy_loss.default": _given(_is_loss, _loss),
    **{f"aten.conv{n}d.default": _given(_are_patches, _patches) for n in (1, 2, 3)},
    "aten.slice_scatter.default": (_Form(_is_joined, _written_slice),),
    "aten.linalg_vector_norm.default": _given(_is_root, _norm),
    "aten.linalg_norm.default": _given(
        lambda self, ord=None, dim=None, keepdim=False, **more: ord is None and not more,
        lambda self, ord=None, dim=None, keepdim=False: torch.linalg.vector_norm(self, 2, dim, keepdim),
    ),
    "aten.matmul.default": _given(_has_vector, _vector_product),
    "aten.copy.default": _given(lambda *given: True, _copy),
    **{
        f"aten.{name}.{overload}": _given(_is_of_a_batch, function)
        for name, function in _VARIANCES.items()
        for overload in ("default", "dim", "correction")
    },
    "aten.native_dropout.default": (_Form(_without_mask, _dropout),),
    "aten.bincount.default": _given(_counts_few, _bincount),
    "aten.max.dim": _extremes("max"),
    "aten.min.dim": _extremes("min"),
    "aten.cat.default": (
        *_given(lambda tensors, dim=0: any(x.shape == (0,) for x in tensors), _join),
        *_given(_joins_batches, _join_batches),
    ),
    "aten.index.Tensor": (
        _Form(positions.is_view, positions.viewed),
        _Form(positions.is_gather, positions.written_gather),
    ),
}
