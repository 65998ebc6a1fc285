"""How torch.autocast treats operations: facts from PyTorch 2.13, by type of device.

Sources: `aten/src/ATen/autocast_mode.h` (CUDA) and `aten/src/ATen/autocast_mode.cpp` (CPU). Only operations that a
record can stand for are named; an operation in no list computes in the dtypes that it is given, with PyTorch's own
promotion.
"""

from __future__ import annotations

from enum import Enum

from autoplan.ir.graph import Node
from autoplan.ops.generic import FUNCTION, POINTWISE
from autoplan.ops.products import adds_bias
from autoplan.ops.record import WITHOUT_AUTOCAST
from autoplan.ops.table import op_record


class AutocastRule(Enum):
    """What autocast does with the floating inputs of an operation."""

    LOWER = "lower"  # casts them to the 16-bit dtype
    FLOAT32 = "float32"  # casts them to float32
    WIDEST = "widest"  # casts them to the widest dtype among them
    NONE = "none"


_LOWER = frozenset(
    (
        *("linear", "matmul", "mm", "bmm", "addmm", "addbmm", "baddbmm", "linalg_vecdot", "prelu"),
        *("conv1d", "conv2d", "conv3d", "convolution", "scaled_dot_product_attention"),
        # forms of attention that the capture makes of written-out masks and biases
        *("masked_attention", "biased_attention"),
    )
)
_LOWER_CUDA = frozenset(("mv", "addmv", "addr", "einsum", "chain_matmul", "linalg_multi_dot"))
_LOSSES = frozenset(
    (
        *("nll_loss", "nll_loss2d", "cross_entropy_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss"),
        *("mse_loss", "binary_cross_entropy_with_logits", "poisson_nll_loss", "cosine_embedding_loss"),
        *("hinge_embedding_loss", "margin_ranking_loss", "soft_margin_loss", "triplet_margin_loss"),
        *("multi_margin_loss", "multilabel_margin_loss", "cdist", "prod"),
    )
)
_FLOAT32_CUDA = frozenset(
    (
        *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt"),
        *("sinh", "tan", "pow", "softplus", "layer_norm", "native_layer_norm", "rms_norm", "group_norm"),
        *("cosine_similarity", "dist", "pdist", "renorm", "logsumexp", "linalg_vector_norm", "linalg_matrix_norm"),
        *("frobenius_norm", "nuclear_norm", "norm", "softmax", "log_softmax", "cumsum", "cumprod", "sum"),
        *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d"),
        *("upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"),
    )
)
_FLOAT32_CPU = frozenset(
    (
        *("avg_pool3d", "adaptive_avg_pool3d", "binary_cross_entropy", "ctc_loss", "ctc_losses", "grid_sampler"),
        *("polar", "quantile", "nanquantile", "stft", "trace", "view_as_complex", "max_pool3d", "inverse"),
        *("reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d", "replication_pad3d"),
        *("fft_fft", "fft_ifft", "fft_rfft", "fft_irfft", "fft_hfft", "fft_ihfft", "fft_fft2", "fft_ifft2"),
        *("fft_rfft2", "fft_irfft2", "fft_fftn", "fft_ifftn", "fft_rfftn", "fft_irfftn"),
    )
)
_WIDEST = {
    "cpu": frozenset(("cat", "stack", "index_copy")),
    "cuda": frozenset(
        ("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "index_put", "scatter_add", "tensordot")
    ),
}
_RULES = {
    "cpu": {AutocastRule.LOWER: _LOWER, AutocastRule.FLOAT32: _LOSSES | _FLOAT32_CPU},
    "cuda": {AutocastRule.LOWER: _LOWER | _LOWER_CUDA, AutocastRule.FLOAT32: _LOSSES | _FLOAT32_CUDA},
}
# ops of the IR that stand for calls of several functions, or for a form of one -> the function that decides
_STANDS_FOR = {
    "attention": "scaled_dot_product_attention",
    "dropped_attention": "scaled_dot_product_attention",
    "convolution": "convolution",
    "cross_entropy_sum": "cross_entropy_loss",
    "pow_scalar": "pow",
}
# ops that are several products, whose casts are not known here
NOT_KNOWN = frozenset(("experts", "recurrent", "scan"))


def autocast_rule(node: Node, device_type: str) -> AutocastRule:
    """Return what autocast does with the inputs of a node on a type of device.

    >>> from autoplan.ir.graph import Node
    >>> node = Node("y", "layer_norm", ("x",), ("y",))
    >>> autocast_rule(node, "cuda"), autocast_rule(node, "cpu")
    (<AutocastRule.FLOAT32: 'float32'>, <AutocastRule.NONE: 'none'>)
    """
    if node.attrs.get(WITHOUT_AUTOCAST):
        return AutocastRule.NONE
    if adds_bias(node):
        return AutocastRule.LOWER
    names = _functions(node)
    for rule, listed in _RULES[device_type].items():
        if names & listed:
            return rule
    return AutocastRule.WIDEST if names & _WIDEST[device_type] else AutocastRule.NONE


def autocast_functions(device_type: str) -> dict[AutocastRule, frozenset[str]]:
    """Return the functions of every rule, by the name of their ATen op without its overload."""
    return {**_RULES[device_type], AutocastRule.WIDEST: _WIDEST[device_type]}


def _functions(node: Node) -> set[str]:
    """Return the names of the ATen ops that a node stands for."""
    record = op_record(node.op)
    if node.op in (POINTWISE, FUNCTION):
        return {node.attrs["call"].partition("(")[0].split(".")[-2]}
    if node.op in _STANDS_FOR:
        return {_STANDS_FOR[node.op]}
    found = {target.split(".")[1] for target in record.aten}
    return found or {node.op}
