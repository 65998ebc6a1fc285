"""The setup of a run beside its degrees (`RunOptions`): kernels, launch, overlap, dispatch, buffers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from autoplan.config.choice import Written, choice, choices_of, is_count
from autoplan.config.kernels import Attention, Dispatcher, FusedLoss, Launch, Mode, Reruns, Sends
from autoplan.config.numbers import read_count
from autoplan.errors import PinError

# Communication that may run beside compute. tp: Megatron's user buffers, or with compiled blocks PyTorch's async TP,
# pieces of products (`cost_models.time.pieces`). ep: experts of one micro-batch beside another micro-batch. pp:
# transfers between stages of an interleaved schedule. cp: keys and values that travel around a ring while attention
# works (Megatron's cp-comm-type p2p, its default).
OVERLAPS = ("tp", "ep", "pp", "cp")


def _overlap(name: str, value: Any) -> str | None:
    unknown = sorted(set(value) - set(OVERLAPS))
    return f"{name} of {unknown[0]!r} is not known; use {', '.join(OVERLAPS)}" if unknown else None


def _document_len(name: str, value: object) -> str | None:
    return None if value is None or is_count(value) else f"{name}={value!r} must be a whole number of at least 1 token"


def _zero_bucket(name: str, value: object) -> str | None:
    return (
        None if value is None or is_count(value) else f"{name}={value!r} must be a whole number of at least 1 element"
    )


@dataclass(frozen=True)
class RunOptions:
    """The setup of a run beyond its mode and degrees. A value other than the default has a price of its own.

    An option is declared here and read where it is priced; commands, files and reports are derived from its record.
    """

    # None: the kernel of the mode
    attention: Attention | None = choice(
        None,
        "Attention kernel: unfused, flash1, flash2 or fused; default: that of the mode.",
        written=Written.WORD,
        words=Attention,
        said_as="{} attention",
        executed=((Attention.FLASH2, tuple(Mode)),),
        about="Attention kernel: `unfused`, `flash1`, `flash2` or `fused`; default: that of the mode",
    )
    launch: Launch = choice(
        Launch.ASYNC,
        "How kernels are launched: async, graphs, router_graphs, full_graphs or blocking.",
        written=Written.WORD,
        words=Launch,
        said_as="{} launch",
        of_step=True,
        about=(
            "How kernels are launched: `async` (ahead of the device), `graphs` (from CUDA graphs, but for experts), "
            "`router_graphs` (only the router of experts from graphs), `full_graphs` (experts too) or `blocking` (one "
            "at a time)"
        ),
    )
    overlap: frozenset[str] = choice(
        frozenset(),
        f"Communication that overlaps with computing, separated by commas: {', '.join(OVERLAPS)}.",
        written=Written.WORDS,
        words=OVERLAPS,
        obstacle=_overlap,
        said_as="overlap of {}",
        of_step=True,
        about=(
            "Communication that overlaps with computing, separated by commas: `tp` (in compiled mode async TP), `ep`, "
            "`pp`, `cp`"
        ),
        executed=((frozenset({"tp"}), (Mode.COMPILED,)),),
    )
    dispatcher: Dispatcher = choice(
        Dispatcher.ALL_TO_ALL,
        "How tokens are sent to experts: alltoall, flex or flex_fp8.",
        written=Written.WORD,
        words=Dispatcher,
        said_as="{} dispatcher",
        of_step=True,
        about=(
            "How tokens are sent to experts: `alltoall` (a copy per chosen expert), `flex` (once to each node and to "
            "each device with experts for it, as DeepEP does) or `flex_fp8` (the same, in 8 bits on the way there)"
        ),
    )
    sequence_parallel: bool = choice(
        True,
        "Whether tensor-parallel ranks may split norms and residuals along the sequence, or each computes all of them.",
        written=Written.SWITCH,
        said_as="no sequence parallelism",
        executed=True,
        about="Every tensor-parallel rank computes all of the norms and residuals",
    )
    # True: one kernel computes grouped products, activation and casts (Transformer Engine's fused grouped MLP,
    # Megatron-Bridge `cutedsl_fused_grouped_mlp`; DeepGEMM's products reach the same speed). False: one product per
    # expert over several streams, as in Transformer Engine's GroupedLinear.
    fused_experts: bool = choice(
        False,
        "One kernel computes the products, activation and casts of experts.",
        written=Written.SWITCH,
        said_as="fused experts",
    )
    # Transformer Engine's FP8 attention (fp8_dot_product_attention)
    narrow_attention: bool = choice(
        False,
        "The core of attention multiplies in 8 bits, where the device does.",
        written=Written.SWITCH,
        said_as="attention in 8 bits",
    )
    # torchtitan's enable_fsdp_float8_all_gather and Megatron's --fp8-param-gather
    narrow_gather: bool = choice(
        False,
        "ZeRO gathers weights of 8-bit products in 8 bits.",
        written=Written.SWITCH,
        said_as="weights gathered in 8 bits",
        of_narrow=True,
        of_step=True,
    )
    fused_loss: FusedLoss = choice(
        FusedLoss.NO,
        "Kernels of the cross entropy: no, torch, chunked, compiled, flash, online or linear.",
        written=Written.WORD,
        words=FusedLoss,
        former=("no", "flash"),
        said_as="{} loss",
        about=(
            "Kernels of the cross entropy: one per step of a softmax in 32 bits, whose gradient takes the place of "
            "the logits (`no`, Megatron's default), PyTorch's (`torch`), these for an eighth of the tokens at a time "
            "(`chunked`, torchtune's), the steps compiled (`compiled`, Megatron's `native` fusion), over 16-bit "
            "logits, whose gradient is written in place (`flash`, flash-attention's; `online`, Transformer Engine's "
            "`te`), or in one with the head's product, which makes some logits at a time (`linear`, Liger's)"
        ),
        executed=((FusedLoss.TORCH, (Mode.COMPILED,)), (FusedLoss.COMPILED, (Mode.COMPILED,))),
    )
    whole_losses: bool = choice(
        False,
        "Every tensor-parallel rank gathers all logits and computes the whole loss.",
        written=Written.SWITCH,
        said_as="whole losses",
    )
    # flash-attention's and Apex's kernels, and Liger's: in eager mode a norm that a model writes out in operations is
    # one kernel, which keeps its input alone. Fused and compiled modes always have such kernels.
    fused_norms: bool = choice(
        False,
        "A norm is one kernel in eager mode, however many operations the model writes.",
        written=Written.SWITCH,
        said_as="fused norms",
    )
    # Megatron's --overlap-grad-reduce and --overlap-param-gather, which are off by default; fully_shard, torch's
    # DistributedDataParallel and the emitted programs always overlap, but for ZeRO 0 under a split backward.
    overlap_zero: bool = choice(
        True,
        "Whether what ZeRO 0, 1 and 2 send overlaps with computing.",
        written=Written.SWITCH,
        said_as="ZeRO not overlapped",
        of_step=True,
        about="What ZeRO 0, 1 and 2 send does not overlap with computing",
    )
    # InternEvo's overlap_sync_param is off by default, although gradients are reduced during the backward
    overlap_gather: bool = choice(
        True,
        "Whether the parameter gathers of ZeRO 1 and 2 overlap with computing.",
        written=Written.SWITCH,
        said_as="gathers of ZeRO not overlapped",
        said_with="overlap_zero",
        of_step=True,
        about="The parameter gathers of ZeRO 1 and 2 do not overlap with computing",
    )
    # A collective of a list of tensors, one per rank (DeepSpeed until the end of 2021: `_allgather_param` and
    # `_reduce_scatter_gradient` of deepspeed/runtime/zero/partition_parameters.py; overlap_comm is off by default)
    zero_by_tensor: bool = choice(
        False,
        "ZeRO 3 gathers and reduces each parameter by itself, without overlap (as DeepSpeed in 2021).",
        written=Written.SWITCH,
        said_as="ZeRO 3 by tensor",
        of_step=True,
    )
    # BF16_Optimizer of DeepSpeed (deepspeed/runtime/bf16_optimizer.py, which BLOOM ran from 28 February 2022 on): every
    # backward leaves 16-bit gradients, `update_hp_grads` adds them to whole float32 sums, `_bf16_reduce_grads` of
    # runtime/pipe/engine.py all-reduces those, and the update is of a shard.
    whole_sums: bool = choice(
        False,
        "ZeRO 1 keeps whole 32-bit sums beside 16-bit gradients and all-reduces them (as DeepSpeed's BF16_Optimizer).",
        written=Written.SWITCH,
        said_as="whole sums of gradients",
        of_step=True,
    )
    # reduce_dtype=float32 of PyTorch's MixedPrecisionPolicy over parameters in 16 bits; allreduce_tensor_in_float32 of
    # Aleph Alpha's scaling (src/scaling/core/optimizer/allreduce.py)
    wide_sums: bool = choice(
        False,
        "ZeRO reduces gradients that are kept in 16 bits in 32 bits (reduce_dtype of PyTorch's FSDP).",
        written=Written.SWITCH,
        said_as="gradients reduced in 32 bits",
        of_step=True,
    )
    # Optimizer.step of Aleph Alpha's scaling (src/scaling/core/optimizer/optimizer.py)
    all_reduced: bool = choice(
        False,
        "ZeRO 1 all-reduces gradients, of which each rank then takes its shard (as Aleph Alpha's scaling).",
        written=Written.SWITCH,
        said_as="gradients all-reduced",
        of_step=True,
    )
    # `no_sync` and `set_requires_gradient_sync(False)` of PyTorch's FSDP, which accelerate and NeMo Automodel call in
    # all micro-batches but the last one: whole gradients stay until then, in the dtype in which they are reduced
    # (torch/distributed/fsdp/_fully_shard/_fsdp_param.py, unsharded_accumulated_grad)
    reduce_once: bool = choice(
        False,
        "ZeRO 2 and 3 keep whole gradients and reduce them in the last micro-batch alone (no_sync of PyTorch's FSDP).",
        written=Written.SWITCH,
        said_as="gradients reduced once",
        of_step=True,
    )
    # Hooks of DeepSpeed's ZeRO 3 around every module, which fetch and release its parameters
    # (deepspeed/runtime/zero/parameter_offload.py, _register_deepspeed_module)
    module_hooks: bool = choice(
        False,
        "The host runs hooks of ZeRO 3 around every module in every pass (as DeepSpeed).",
        written=Written.SWITCH,
        said_as="hooks around every module",
        of_step=True,
    )
    # Gradients of DeepSpeed's ZeRO 1 to 3 with offload_optimizer: their sum is on the host, and is added to on the
    # device (async_accumulate_grad_in_cpu_via_gpu of deepspeed/runtime/zero/stage_1_and_2.py, partition_grads of
    # stage3.py)
    host_sums: bool = choice(
        False,
        "With an optimizer on the host, gradients go there and back in every micro-batch (as DeepSpeed).",
        written=Written.SWITCH,
        said_as="gradients summed on the host",
        of_step=True,
        about=(
            "With an optimizer on the host, the sum of gradients is there, too: every micro-batch copies it to the "
            "device and back, and the host scales it and rounds parameters to 16 bits (as DeepSpeed)"
        ),
    )
    # reduce_bucket_size and allgather_bucket_size of DeepSpeed, 5e8 elements each by default (runtime/zero/config.py)
    zero_bucket: int | None = choice(
        None,
        "Elements of a buffer in which ZeRO 1 reduces and gathers; such buffers find no freed memory as large.",
        obstacle=_zero_bucket,
        read=lambda text, _: read_count(text, "zero_bucket"),
        said_as="buckets of {} elements",
        of_step=True,
    )
    # PYTORCH_CUDA_ALLOC_CONF (torch, docs/source/notes/cuda.rst): segments grow by pages, and freed memory is joined
    expandable_segments: bool = choice(
        False,
        "The allocator's segments grow (expandable_segments:True), so that little memory is lost between them.",
        written=Written.SWITCH,
        said_as="expandable segments",
        of_step=True,
    )
    # gradient_accumulation_fusion of Megatron-LM (megatron/core/tensor_parallel/layers.py, 22 February 2022) and
    # fuse_wgrad_accumulation of Transformer Engine
    fused_accumulation: bool = choice(
        True,
        "Products of fused kernels add the gradient of a weight to that of earlier micro-batches themselves.",
        written=Written.SWITCH,
        said_as="gradients added apart from products",
        about="Kernels of their own, not the products, add the gradient of a weight to that of earlier micro-batches",
    )
    sends: Sends = choice(
        Sends.WHOLE,
        "How stages send what all tensor-parallel ranks hold: whole, split or serial.",
        written=Written.WORD,
        words=Sends,
        said_as="{} sends",
        of_step=True,
        about=(
            "How stages without sequence parallelism send what all tensor-parallel ranks hold: `whole`, `split` (a "
            "part per rank) or `serial` (parts, one message after the other)"
        ),
    )
    # None: as the mode does
    reruns: Reruns | None = choice(
        None,
        "What full recompute runs again: needed (up to the last tensor that the backward needs) or whole; default: "
        "needed in eager mode.",
        written=Written.WORD,
        words=Reruns,
        said_as="recompute of {} forwards",
        about=(
            "What full recompute runs again: `needed` (up to the last tensor that the backward needs; the default in "
            "eager mode) or `whole` (the default in the others)"
        ),
        executed=((Reruns.NEEDED, (Mode.EAGER,)), (Reruns.WHOLE, (Mode.COMPILED,))),
    )
    # Krell et al., Efficient Sequence Packing without Cross-contamination, 2021; None: a sequence is one document
    document_len: int | None = choice(
        None,
        "Tokens per document of packed sequences, read as --seq-len: attention stays within a document.",
        obstacle=_document_len,
        read=lambda text, _: read_count(text, "document_len"),
        said_as="documents of {} tokens",
        executed=True,
    )

    def __post_init__(self) -> None:
        for record in choices_of(RunOptions):
            given = getattr(self, record.name)
            if given is None and record.default is None:
                continue
            value = record.value_of(given)
            object.__setattr__(self, record.name, value)
            reason = record.obstacle and record.reason(value)
            if reason:
                raise PinError(reason)

    @property
    def of_operations(self) -> RunOptions:
        """These options, with the default of those that change no price of a single operation."""
        return replace(self, **{record.name: record.default for record in choices_of(RunOptions) if record.of_step})

    def attention_in(self, mode: Mode) -> Attention:
        """Return the kernel of `mode`: the pinned one, else FUSED in fused modes and FLASH2 in the others."""
        if self.attention is not None:
            return self.attention
        return Attention.FUSED if mode is Mode.FUSED else Attention.FLASH2

    def reruns_in(self, mode: Mode) -> Reruns:
        """Return what full recompute runs again in `mode`: the pinned part, else what is usual.

        Compiled blocks of the emitted programs are one function to autograd, which recomputes all of it.
        """
        if self.reruns is not None:
            return self.reruns
        return Reruns.NEEDED if mode is Mode.EAGER else Reruns.WHOLE
