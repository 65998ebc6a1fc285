"""ParallelConfig: the degrees and settings of one plan; Precision and Mode: how it computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from autoplan.errors import PinError
from autoplan.units import DTYPE_BYTES


class Mode(StrEnum):
    """How the program runs: op by op, with fused kernels (Megatron, Transformer Engine), or torch.compile."""

    EAGER = "eager"
    FUSED = "fused"
    COMPILED = "compiled"


class Attention(StrEnum):
    """Which kernel computes the core of attention.

    UNFUSED: two batched products and a fused softmax, scores in memory (before 2022). FLASH1 (Dao et al., 2022), FLASH2
    (Dao, 2023; what PyTorch's scaled_dot_product_attention runs on most devices), FUSED: made for the device (cuDNN and
    Transformer Engine, FlashAttention-3).
    """

    UNFUSED = "unfused"
    FLASH1 = "flash1"
    FLASH2 = "flash2"
    FUSED = "fused"


class Launch(StrEnum):
    """How the host starts kernels.

    ASYNC: ahead of the device, which waits where the host is slower. GRAPHS: from CUDA graphs, at no cost, but for
    experts whose numbers of rows the host has to know. FULL_GRAPHS: these too. BLOCKING: one at a time
    (CUDA_LAUNCH_BLOCKING=1), so that host and device take turns.
    """

    ASYNC = "async"
    GRAPHS = "graphs"
    FULL_GRAPHS = "full_graphs"
    BLOCKING = "blocking"


class Dispatcher(StrEnum):
    """How rows travel to the experts of other ranks and back.

    ALL_TO_ALL: a copy per chosen expert (Megatron-Core `--moe-token-dispatcher-type alltoall`). FLEX: a row once to
    each node and once to each device that has experts for it, summed on the way back (`flex` with DeepEP or HybridEP).
    FLEX_FP8: the same, in 8 bits on the way to the experts (DeepSeek-V3, arXiv 2412.19437, section 3.3.2; Megatron
    sends 16 bits both ways).
    """

    ALL_TO_ALL = "alltoall"
    FLEX = "flex"
    FLEX_FP8 = "flex_fp8"


# What may run at the same time as computing: Megatron's user buffers or PyTorch's AsyncTP (tp), experts of one
# micro-batch beside another one (ep), transfers between stages of an interleaved schedule (pp), keys and values that
# travel around a ring while attention works on those that are there (cp; Megatron's cp-comm-type p2p, its default).
OVERLAPS = ("tp", "ep", "pp", "cp")


@dataclass(frozen=True)
class RunOptions:
    """How a run is set up beyond its mode and degrees. `attention` None: what the mode brings.

    `sequence_parallel`: tensor-parallel ranks may share norms and residuals instead of each computing all of them.
    `narrow_gather`: ZeRO gathers weights of 8-bit products in 8 bits (torchtitan's enable_fsdp_float8_all_gather and
    Megatron's --fp8-param-gather).
    `fused_experts`: grouped products with the activation and casts in one kernel (Transformer Engine's fused grouped
    MLP, Megatron-Bridge `cutedsl_fused_grouped_mlp`; DeepGEMM's products reach the same), else one product per expert
    over several streams, as Transformer Engine's GroupedLinear.
    `fused_loss`: one kernel reads the logits as the head's product left them, without a copy in 32 bits, and writes
    their gradient in their place (flash-attention's CrossEntropyLoss, Transformer Engine's `te` cross entropy, Liger).
    `overlap_zero`: what ZeRO 1 and 2 move once per step hides behind computing (Megatron's --overlap-grad-reduce and
    --overlap-param-gather, which are off by default; fully_shard and the emitted programs always do), in fused modes
    the gradients of ZeRO 0, too (as torch's DistributedDataParallel; emitted programs reduce them at the end).
    `overlap_gather`: of these the gathers, too (InternEvo's overlap_sync_param is off by default, while gradients are
    reduced beside the backward).
    `zero_by_tensor`: ZeRO 3 gathers and reduces every parameter by itself, through lists of a tensor per rank and
    beside nothing (DeepSpeed until the end of 2021: `_allgather_param` and `_reduce_scatter_gradient` of
    deepspeed/runtime/zero/partition_parameters.py; overlap_comm is off by default).
    `document_len`: tokens of a document where sequences are packed of several and attention stays within each (Krell
    et al., Efficient Sequence Packing without Cross-contamination, 2021); None: a sequence is one document.
    """

    attention: Attention | None = None
    launch: Launch = Launch.ASYNC
    overlap: frozenset[str] = frozenset()
    dispatcher: Dispatcher = Dispatcher.ALL_TO_ALL
    sequence_parallel: bool = True
    fused_experts: bool = False
    narrow_gather: bool = False
    fused_loss: bool = False
    overlap_zero: bool = True
    document_len: int | None = None
    overlap_gather: bool = True
    zero_by_tensor: bool = False

    def __post_init__(self) -> None:
        given = self.document_len
        if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
            raise PinError(f"document_len={given!r} must be a whole number of at least 1 token")
        for name in sorted(self.overlap):
            if name not in OVERLAPS:
                raise PinError(f"overlap of {name!r} is not known; use {', '.join(OVERLAPS)}")

    def attention_in(self, mode: Mode) -> Attention:
        """The kernel of a mode: fused modes bring their own, else that of scaled_dot_product_attention."""
        if self.attention is not None:
            return self.attention
        return Attention.FUSED if mode is Mode.FUSED else Attention.FLASH2


MASTER_BYTES = 4  # per element of what 16-bit parameters are copies of
_SHORT = {None: "native", "bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True)
class Precision:
    """Bytes per parameter and what is computed in which dtype.

    `compute` is the dtype of activations and weights in the forward, None: the model's own. `grad_bytes` per local
    parameter element, None: those of the parameter. `state_bytes` of the optimizer (AdamW moments and master weights),
    None: two moments in the parameter's dtype. `matmul` is the dtype of matrix products where it differs.
    """

    name: str
    compute: str | None = None
    grad_bytes: float | None = None
    state_bytes: float | None = None
    matmul: str | None = None

    @property
    def gradients(self) -> str | None:
        """The dtype in which gradients are summed over micro-batches and ranks; None: that of the parameter."""
        if self.grad_bytes is None or self.compute is None:
            return None
        return self.compute if self.grad_bytes == DTYPE_BYTES[self.compute] else "float32"

    @property
    def has_masters(self) -> bool:
        """True if parameters are computed with in 16 bits and kept in float32, which `state_bytes` counts."""
        return self.compute is not None and DTYPE_BYTES[self.compute] < MASTER_BYTES

    @property
    def compute_name(self) -> str:
        """The name of the precision that computes everything in `compute`."""
        return _SHORT[self.compute]


# Mixed precision as Megatron-LM and torchtitan run it: gradients accumulate in fp32; AdamW holds two fp32 moments and a
# fp32 master copy (2 + 4 + 12 bytes per parameter, Rajbhandari et al., ZeRO, 2020, section 3.1 with fp32 gradients).
PRECISIONS: dict[str, Precision] = {
    "native": Precision("native"),
    "bf16": Precision("bf16", "bfloat16", 4.0, 12.0),
    "fp16": Precision("fp16", "float16", 4.0, 12.0),
    "fp32": Precision("fp32", "float32", 4.0, 8.0),
    "fp8": Precision("fp8", "bfloat16", 4.0, 12.0, matmul="float8"),
    # MXFP8: a scale per 32 elements, along the dim that a product sums over (OCP Microscaling Formats, 2023)
    "mxfp8": Precision("mxfp8", "bfloat16", 4.0, 12.0, matmul="float8_block32"),
    # NVFP4: operands of products in layers are 4 bits with a scale per 16 (NVIDIA, Pretraining LLMs with NVFP4, 2025;
    # Megatron-Bridge's bf16_with_nvfp4_mixed: parameters stay bf16 and are gathered so, no layer is left out)
    "fp4": Precision("fp4", "bfloat16", 4.0, 12.0, matmul="float4"),
}


# Gradients kept and reduced in 16 bits: `grad_reduce_in_fp32=False`, which NVIDIA's performance recipes set.
GRADIENTS_16 = "-grad16"
# Both moments of AdamW kept in 16 bits beside a float32 master copy (DeepSeek-V3, arXiv 2412.19437, section 3.3.3;
# Megatron's --use-precision-aware-optimizer with --exp-avg-dtype bf16). Priced, not executed.
MOMENTS_16 = "-mom16"


def precision_of(name: str) -> Precision:
    """The precision of a name, or of a name with GRADIENTS_16, MOMENTS_16 or both (in this order) behind it where
    gradients and moments are wider otherwise.

    PinError names the known ones.
    """
    short = name.endswith(MOMENTS_16)
    rest = name.removesuffix(MOMENTS_16)
    base = PRECISIONS.get(rest.removesuffix(GRADIENTS_16))
    narrow = rest.endswith(GRADIENTS_16)
    if base is None or ((narrow or short) and (base.grad_bytes is None or base.compute == "float32")):
        known = ", ".join(PRECISIONS)
        raise PinError(f"precision {name!r} is not known; use {known}, or bf16{GRADIENTS_16} for 16-bit gradients")
    if narrow:
        base = replace(base, name=name, grad_bytes=2.0)
    if short:
        base = replace(base, name=name, state_bytes=MASTER_BYTES + 2 * 2.0)
    return base


def executed_precision(name: str) -> Precision:
    """The precision of a name, of those that the runtime computes in. PinError for products in 8 and 4 bits."""
    reason = precision_obstacle(name)
    if reason is not None:
        raise PinError(reason)
    return precision_of(name)


def precision_obstacle(name: str) -> str | None:
    """Why the runtime does not compute in the precision of a name, or None if it does."""
    found = precision_of(name)
    if found.matmul is not None:
        known = ", ".join(n for n, p in PRECISIONS.items() if p.matmul is None)
        return (
            f"precision {name!r} is priced, but not executed: products in {found.matmul} have no kernel here; use "
            f"{known}, or bf16{GRADIENTS_16} for 16-bit gradients; nearest: {found.compute_name}"
        )
    if name.endswith(MOMENTS_16):
        return (
            f"precision {name!r} is priced, but not executed: moments of the optimizer are float32 here; nearest: "
            f"{name.removesuffix(MOMENTS_16)}"
        )
    return None


@dataclass(frozen=True)
class ParallelConfig:
    """Degrees and settings of one plan.

    The world is pp * dp * cp * tp; ep and etp fold into dp * cp * tp. `virtual_stages`: chunks per rank, which the
    schedule places. `stages`: number of layers per pipeline stage (per chunk with virtual stages, in model order), or
    None for balanced arithmetic. `recompute`: one value for all layers (RECOMPUTE, GROUPS with `+`, or modules), a
    mapping from block call to one, or how many layers of each stage (chunk) are recomputed in full (a tuple).
    `context_method`: one name of `config.context_methods` for all blocks with attention, a mapping from block to
    one, or None (with cp > 1: not decided). `zero_replicas`: how many copies of the sharded state there are (hybrid
    ZeRO): ZeRO shards over dp * cp / zero_replicas neighbours. `offload`: what state is on the host, of OFFLOADS
    without activations, which `recompute` says.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None  # None: as tp
    zero_stage: int = 1
    micro_batch_size: int = 1
    num_micro_batches: int = 1
    schedule: str = "1F1B"
    virtual_stages: int = 1
    recompute: str | Mapping[str, str] | tuple[int, ...] = "none"
    stages: tuple[int, ...] | None = None
    state_slack: float = 1.02
    context_method: str | Mapping[str, str] | None = None
    zero_replicas: int = 1
    offload: tuple[str, ...] = ()

    @property
    def num_devices(self) -> int:
        """World size."""
        return self.pp * self.dp * self.cp * self.tp


class Degrees(Protocol):
    """What rules read of a configuration: of a ParallelConfig, or of one that is decided in part."""

    @property
    def pp(self) -> int: ...
    @property
    def dp(self) -> int: ...
    @property
    def tp(self) -> int: ...
    @property
    def cp(self) -> int: ...
    @property
    def ep(self) -> int: ...
    @property
    def etp(self) -> int | None: ...
    @property
    def zero_stage(self) -> int: ...
    @property
    def micro_batch_size(self) -> int: ...
    @property
    def num_micro_batches(self) -> int: ...
    @property
    def schedule(self) -> str: ...
    @property
    def virtual_stages(self) -> int: ...
    @property
    def recompute(self) -> str | Mapping[str, str] | tuple[int, ...]: ...
    @property
    def stages(self) -> tuple[int, ...] | None: ...
    @property
    def context_method(self) -> str | Mapping[str, str] | None: ...
    @property
    def zero_replicas(self) -> int: ...
    @property
    def offload(self) -> tuple[str, ...]: ...
