"""Sinks: one more term in the softmax of every query of attention, a learned number per head that has no value.

    out_i = sum_j e^(s_ij) v_j / (e^sink + sum_j e^(s_ij))

With `lse`, the log-sum-exp of the scores alone, this is attention times ``e^(lse - total)``, where ``total`` is
``log(e^lse + e^sink)``. The backward of attention that is given this out and ``total`` has the probabilities of the
whole softmax, and so the right gradients of queries, keys and values; a query whose keys are all hidden gives zero.
The gradient of the sink is ``-sum e^(sink - total) (grad . out)``, over the queries of its head.

Sources: Xiao et al., Efficient Streaming Language Models with Attention Sinks, 2023 (arXiv 2309.17453);
`eager_attention_forward` of GPT-OSS in transformers.
"""

from __future__ import annotations

import torch


def with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the out [b, h, s, e] and the log-sum-exp [b, h, s] of the softmax with a sink per head, [h]."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[None, :, None])
    return (out * (lse - total).exp_().unsqueeze(-1)).to(out.dtype), total


def gradient_of_sinks(grad: torch.Tensor, out: torch.Tensor, total: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the sinks, [h], of what `with_sinks` returned and the gradient of its out."""
    taken = (sinks.to(total.dtype)[None, :, None] - total).exp_()
    dots = (grad.to(total.dtype) * out.to(total.dtype)).sum(-1)
    return -(taken * dots).sum((0, 2)).to(sinks.dtype)
