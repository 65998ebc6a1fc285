"""Words of a run's setup: its mode, the kernels of attention and loss, how kernels are launched, how tokens travel, how
stages send."""

from __future__ import annotations

from enum import StrEnum

AUTO = "auto"  # the price decides
# `compile` and `async_tp` of `parallelize` and `plan`, unless the caller says otherwise. On CUDA alone they can be more
# than False; async TP is tried before its use (`autoplan.runtime.async_tp`).
COMPILE = AUTO
ASYNC_TP = AUTO


class Mode(StrEnum):
    """The execution mode: op by op, with fused kernels (Megatron, Transformer Engine), or torch.compile."""

    EAGER = "eager"
    FUSED = "fused"
    COMPILED = "compiled"


class Attention(StrEnum):
    """The kernel that computes the core of attention.

    UNFUSED: two batched products and a fused softmax, with the scores in memory (before 2022). FLASH1: Dao et al.,
    2022.
    FLASH2: Dao, 2023; the kernel of PyTorch's scaled_dot_product_attention on most devices. FUSED: made for the device
    (cuDNN and Transformer Engine, FlashAttention-3).
    """

    UNFUSED = "unfused"
    FLASH1 = "flash1"
    FLASH2 = "flash2"
    FUSED = "fused"


class FusedLoss(StrEnum):
    """The kernels of the cross entropy over a vocabulary.

    NO: the steps of a softmax in kernels of their own, over logits in 32 bits; the gradient takes their place (the
    losses of Megatron and of autoplan's runtime). TORCH: PyTorch's `F.cross_entropy`, which keeps the log-probabilities
    and makes their gradient beside that of the logits. CHUNKED: the same over a part of the tokens at a time, while the
    logits stay in 16 bits (torchtune's losses, with 8 parts). COMPILED: the steps compiled into three kernels
    (Megatron's `native` fusion). FLASH: one kernel reads the logits in 16 bits, and the backward writes their gradient
    in place (flash-attention's CrossEntropyLoss). ONLINE: the forward reads them twice and writes the gradient in
    place, which the backward scales (Transformer Engine's parallel cross entropy, Liger). LINEAR: so, in one function
    with the head's product, which makes the logits of as many tokens at a time as fit in the place of the hidden states
    (Liger's LigerFusedLinearCrossEntropyFunction).
    """

    NO = "no"
    TORCH = "torch"
    CHUNKED = "chunked"
    COMPILED = "compiled"
    FLASH = "flash"
    ONLINE = "online"
    LINEAR = "linear"

    @property
    def narrow(self) -> bool:
        """True if the kernel reads 16-bit logits as the product wrote them: no cast of all of them is stored."""
        return self in (FusedLoss.CHUNKED, FusedLoss.FLASH, FusedLoss.ONLINE, FusedLoss.LINEAR)


class Reruns(StrEnum):
    """The part of a layer's forward that full recompute runs again.

    NEEDED: up to the last tensor that the backward needs, without the product that would follow and what it sends
    (`torch.utils.checkpoint` with use_reentrant=False, which stops early since torch 2.1; rematerialisation in XLA and
    in torch.compile, which compute nothing that is not used).
    WHOLE: all of it (checkpoints that run the forward anew, as those of Megatron and DeepSpeed and use_reentrant=True).
    """

    NEEDED = "needed"
    WHOLE = "whole"


class Launch(StrEnum):
    """The way the host starts kernels.

    ASYNC: ahead of the device, which waits if the host is slower.
    GRAPHS: from CUDA graphs, at no cost, except for experts, whose row counts the host must know; their router is in a
    graph, too (Megatron-Core's cuda_graph_scope `attn, moe_router, moe_preprocess`).
    ROUTER_GRAPHS: ahead of the device, the router of experts from CUDA graphs (`moe_router, moe_preprocess`).
    FULL_GRAPHS: from CUDA graphs, experts included.
    BLOCKING: one kernel at a time (CUDA_LAUNCH_BLOCKING=1), so that host and device alternate.
    """

    ASYNC = "async"
    GRAPHS = "graphs"
    ROUTER_GRAPHS = "router_graphs"
    FULL_GRAPHS = "full_graphs"
    BLOCKING = "blocking"


class Dispatcher(StrEnum):
    """The way rows travel to the experts on other ranks and back (token dispatch).

    ALL_TO_ALL: one copy per chosen expert (Megatron-Core `--moe-token-dispatcher-type alltoall`).
    FLEX: a row travels once to each node and once to each device with experts for it, and is summed on the way back
    (`flex` with DeepEP or HybridEP).
    FLEX_FP8: as FLEX, with 8 bits on the way to the experts (DeepSeek-V3, arXiv 2412.19437, section 3.3.2; Megatron
    sends 16 bits both ways).
    """

    ALL_TO_ALL = "alltoall"
    FLEX = "flex"
    FLEX_FP8 = "flex_fp8"


class Sends(StrEnum):
    """The messages of a pipeline stage whose tensor-parallel ranks hold the same values.

    WHOLE: Every rank sends all of it.
    SPLIT: Every rank sends a part, and the receiving ranks gather the parts (`--scatter-gather-tensors-in-pipeline` of
    Megatron-LM, from February 2021 to March 2023).
    SERIAL: Parts, too; a rank sends and receives one message after the other, those of gradients included, and computes
    nothing meanwhile (DeepSpeed, runtime/pipe/engine.py: `is_pipe_partitioned`, and a command for each message).
    """

    WHOLE = "whole"
    SPLIT = "split"
    SERIAL = "serial"
