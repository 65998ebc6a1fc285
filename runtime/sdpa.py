"""The choice of torch's attention kernel, and the inputs that it needs.

The CUDA kernels and what they take (aten/native/transformers/cuda/sdp_utils.cpp of torch 2.13):

| kernel | dtypes | masks | fewer key heads | causal, other numbers of keys | head dims |
|---|---|---|---|---|---|
| flash | 16 bits | no | yes | aligned at the end, windows too, if it is called by itself | equal, to 256 |
| memory-efficient | 16 and 32 bits | yes | no | aligned at the start | multiples of 16 bytes |
| math | all | yes | yes | aligned at the start | all, but it holds all scores |

Flash needs compute capability 8.0. To avoid math: keys and values are repeated for all query heads where flash does not
apply (32 heads of 128 in 16 bits over 8,192 keys, of 8 key heads: 96 MB more instead of 4.3 GB of scores). Windows and
causal masks that end with the keys go to flash as they are. Large scores are refused. On a CPU torch's own choice is
used.

The table was read from the source. On an H200 (torch 2.11) causal attention, windows and packed documents of 32 query
and 8 key heads over 8,192 keys in bfloat16 peaked at 10 to 22 % of what the scores alone would take
(experiments/gpu/found); what else the table says was not run.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend

from autoplan.runtime.fused import cuda_capability
from autoplan.torch_kernels import LARGEST_HEAD

HALVES = (torch.float16, torch.bfloat16)
HEAD_MULTIPLE = 8  # CUDA's kernels take head dims that are multiples of this
_FIRST_FLASH = (8, 0)  # compute capability; before it (V100, T4) there is only the memory-efficient kernel
_LARGEST_ANYWHERE = 192  # larger dims lack a backward on some devices
_LARGE_SCORES_BYTES = 1 << 30

Kernel = Literal["torch", "repeated", "flash", "masked"]


def choose(
    device_type: str,
    dtype: torch.dtype,
    capability: tuple[int, int] | None,
    sizes: tuple[int, int],
    *,
    grouped: bool,
    masked: bool,
    causal: Literal["", "start", "end"] = "",
    square: bool = True,
    window: bool = False,
) -> Kernel:
    """Return how attention is computed.

    Args:
        capability: compute capability of a CUDA device, None elsewhere.
        sizes: head dims of keys and of values.
        grouped: True if there are fewer key heads than query heads.
        masked: True if there is a mask besides the following.
        causal: "start": the first query is aligned with the first key; "end": the last query with the last key.
        square: True if there are as many keys as queries.
        window: True if a query sees only a fixed number of keys, up to its own or on both sides of it.

    Returns:
        ``flash``: call flash attention directly. ``masked``: make a mask for what torch has no argument for, then
            choose once more. ``repeated``: torch's own choice, with keys and values repeated for all query heads.
            ``torch``: torch's own choice.
    """
    cuda, half = device_type == "cuda", dtype in HALVES
    if window or causal == "end":
        if not cuda or not half or masked or capability is None or capability < _FIRST_FLASH:
            return "masked"
        return "flash" if max(sizes) <= _largest_head(capability) else "masked"
    if not cuda or not grouped or not (half or dtype == torch.float32):
        return "torch"
    too_old = capability is not None and capability < _FIRST_FLASH
    by_flash = half and not masked and sizes[0] == sizes[1] <= LARGEST_HEAD and (square or not causal) and not too_old
    return "torch" if by_flash else "repeated"


def _largest_head(capability: tuple[int, int]) -> int:
    everywhere = capability == (8, 0) or capability[0] in (9, 10)
    return LARGEST_HEAD if everywhere else _LARGEST_ANYWHERE


def choose_for(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    masked: bool,
    causal: Literal["", "start", "end"] = "",
    window: bool = False,
) -> Kernel:
    """Apply `choose` to these tensors, [b, h, s, d], [b, kv, t, d] and [b, kv, t, e]."""
    return choose(
        q.device.type,
        q.dtype,
        cuda_capability(q.device),
        (k.shape[3], v.shape[3]),
        grouped=q.shape[1] != k.shape[1],
        masked=masked,
        causal=causal,
        square=q.shape[2] == k.shape[2],
        window=window,
    )


def padded(x: torch.Tensor, size: int) -> torch.Tensor:
    """Pad the head dim with zeros: they add nothing to scores, and in values they are columns to drop."""
    return x if x.shape[3] == size else functional.pad(x, (0, size - x.shape[3]))


def multiple_of_head(size: int) -> int:
    """Return the head dim to which CUDA kernels need tensors padded."""
    return -(-size // HEAD_MULTIPLE) * HEAD_MULTIPLE


def sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None,
    mask: torch.Tensor | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """``F.scaled_dot_product_attention``, grouped if there are fewer key heads, by a kernel that does not hold scores.

    Args:
        q: [b, h, s, d]; k: [b, kv, t, d]; v: [b, kv, t, e].
        mask: bool or additive, broadcastable to [b, h, s, t]; not together with ``causal`` (aligned at the start).

    Raises:
        ValueError: on CUDA only the kernel that holds all scores takes the inputs, and the scores are large.
    """
    grouped, value_size = q.shape[1] != k.shape[1], v.shape[3]
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    if grouped and choose_for(q, k, v, masked=mask is not None, causal="start" if causal else "") == "repeated":
        times = q.shape[1] // k.shape[1]
        k, v, grouped = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1), False
    if q.device.type == "cuda" and q.dtype != torch.float64:
        q, k, v = (padded(x, multiple_of_head(x.shape[3])) for x in (q, k, v))
        refuse_large_scores(q, k, v, mask, causal, scale, grouped)
    out = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=0.0, is_causal=causal, scale=scale, enable_gqa=grouped
    )  # torch copies a mask of unaligned rows to one that the kernel takes
    return _columns(out, value_size)


def refuse_large_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    grouped: bool,
    limit_bytes: int = _LARGE_SCORES_BYTES,
) -> None:
    """Raise ValueError if torch would compute all scores at once and they take more than `limit_bytes`.

    It is not called in compiled blocks: torch's answer is not a tensor, and would break their graph at every attention.
    """
    if torch.compiler.is_compiling():
        return
    num_bytes = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * q.dtype.itemsize
    if num_bytes <= limit_bytes:
        return
    choice = torch._fused_sdp_choice(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=grouped)
    if choice == SDPBackend.MATH.value:
        raise ValueError(
            f"attention: no kernel of torch for {q.device.type} takes {q.dtype} queries {tuple(q.shape)}, keys "
            f"{tuple(k.shape)} and values {tuple(v.shape)}{' with a mask' if mask is not None else ''} without all "
            f"scores in memory, {num_bytes / 1e9:.1f} GB; use bfloat16, and kernels that are not switched off "
            "(torch.backends.cuda)"
        )


def flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None,
    window: int | None,
    ahead: int | None = None,
) -> torch.Tensor:
    """Flash attention called directly, with the last query at the last key. Call it only if `choose` says so.

    Args:
        q: [b, h, s, d]; k: [b, kv, t, d]; v: [b, kv, t, e]; s <= t.
        window: number of keys that a query sees, including its own; None: all keys up to its own.
        ahead: number of keys behind its own that it sees, too; None: causal.
    """
    size = multiple_of_head(max(k.shape[3], v.shape[3]))
    queries, keys, values = (padded(x, size).transpose(1, 2) for x in (q, k, v))
    out: torch.Tensor = torch.ops.aten._flash_attention_forward(
        queries, keys, values, None, None, q.shape[2], k.shape[2], 0.0, not ahead, False,
        scale=1.0 / math.sqrt(q.shape[3]) if scale is None else scale,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else ahead or 0,
    )[0]  # fmt: skip
    return _columns(out.transpose(1, 2), v.shape[3])


def _columns(x: torch.Tensor, size: int) -> torch.Tensor:
    return x if x.shape[3] == size else x[..., :size]
