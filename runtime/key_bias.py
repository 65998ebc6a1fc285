"""Attention whose scores have a bias by head and key, as the slopes of ALiBi, in kernels that take no bias.

    q k^T scale + bias_j  =  scale [q, 1] [k, bias_j / scale]^T

The bias is further columns of queries and keys, so no mask of all pairs is made, and keys take it along wherever they
are sent. A softmax does not see what a bias says of the query alone: slope (j - i) is slope j (Press, Smith, Lewis,
Train Short, Test Long, 2022).

In 16 bits one column has too few digits: it is split into three, whose products a kernel adds up in float32.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from autoplan.runtime.parts import wide_of
from autoplan.runtime.sdpa import padded
from autoplan.torch_kernels import BIAS_COLUMNS, biased_width

_FACTORS = {torch.float16: 256.0}  # of the columns of queries, so that large biases stay finite


def with_key_bias(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """Return queries, keys and values with the columns of a bias, all of one width, and the scale.

    Args:
        bias: [b or 1, h or 1, 1, t], added to the scores; its gradient is that of the first column.

    Returns:
        [b, h, s, w], [b, kv or h, t, w] twice: keys and values are repeated for the query heads where their biases
        differ.
    """
    heads, groups = q.shape[1], k.shape[1]
    if bias.ndim != 4 or bias.shape[1] not in (1, heads) or bias.shape[2:] != (1, k.shape[2]):
        raise ValueError(
            f"attention: key_bias must have the shape [b or 1, {heads} or 1, 1, {k.shape[2]}], not {tuple(bias.shape)}"
        )
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    if bias.shape[1] != 1 and groups != heads:
        k, v = (x.repeat_interleave(heads // groups, 1) for x in (k, v))
    factor, size = _FACTORS.get(q.dtype, 1.0), biased_width(k.shape[3], v.shape[3])
    left = (bias / (scale * factor)).to(wide_of(q.dtype)).squeeze(2).expand(k.shape[0], k.shape[1], -1)
    columns = []
    for _ in range(BIAS_COLUMNS):
        columns.append(left.to(q.dtype))
        left = left - columns[-1].to(left.dtype)
    keys = torch.cat((k, torch.stack(columns, -1)), -1)
    queries = functional.pad(q, (0, BIAS_COLUMNS), value=factor)
    return padded(queries, size), padded(keys, size), padded(v, size), scale
