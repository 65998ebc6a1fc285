"""Defaults of training frameworks, and how to read the words of their flags.

There is one default per framework and field, never per row, campaign, model, or anything measured. Patterns are
case-insensitive regular expressions, tried in order; the first match counts. If a source leaves a choice open, all
alternatives are priced: the first is the prediction, the others widen its interval.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from autoplan.config.parallel import Mode
from autoplan.config.recompute import MODULES

Found = TypeVar("Found")


class Framework(StrEnum):
    """The framework that trained the model, as far as it changes how kernels, stages and blank fields are read."""

    COMPOSER = "Composer FSDP"
    JAX = "MaxText, Pax"
    MEGATRON_DEEPSPEED = "Megatron-DeepSpeed"
    BIGSCIENCE = "Megatron-DeepSpeed of BigScience"
    MEGATRON = "Megatron-LM"
    NEMO = "NeMo, Megatron Bridge"  # the recipes that performance is published with
    MEGATRON_TESTS = "Megatron-LM, functional tests"
    BRIDGE_LIBRARY = "Megatron Bridge, library recipes"
    AUTOMODEL = "NeMo Automodel"
    INTERNEVO = "InternEvo"
    TORCHTITAN = "torchtitan"
    OTHER = "other"


@dataclass(frozen=True)
class Defaults:
    """The choices of a framework for a row that does not state them. The first of each is the prediction."""

    modes: tuple[Mode, ...]
    recompute: tuple[str, ...]
    zero_stages: tuple[int, ...]


DEFAULTS: Mapping[Framework, Defaults] = {
    # torch.nn modules with a fused attention kernel (llm-foundry README: FSDP full shard unless said otherwise)
    Framework.COMPOSER: Defaults((Mode.EAGER,), ("none", "full"), (3,)),
    # XLA; MaxText's default remat policy is full, but its published runs choose their own
    Framework.JAX: Defaults((Mode.COMPILED,), ("full", "none"), (3,)),
    # Megatron's fused softmax, bias and gelu; --checkpoint-activations was usual before FlashAttention
    Framework.MEGATRON_DEEPSPEED: Defaults((Mode.FUSED,), ("full", "none"), (1, 0)),
    Framework.BIGSCIENCE: Defaults((Mode.FUSED,), ("full", "none"), (1, 0)),
    # Transformer Engine; performance recipes recompute at most the attention core (NVIDIA NeMo performance guide)
    Framework.MEGATRON: Defaults((Mode.FUSED,), ("none", "selective"), (1,)),
    Framework.MEGATRON_TESTS: Defaults((Mode.FUSED,), ("none", "selective"), (1,)),
    # Transformer Engine's modules under fully_shard (examples/llm_benchmark: *_te_deepep.yaml)
    Framework.AUTOMODEL: Defaults((Mode.FUSED, Mode.EAGER), ("none", "full"), (3,)),
    Framework.NEMO: Defaults((Mode.FUSED,), ("none", "selective"), (1,)),
    Framework.BRIDGE_LIBRARY: Defaults((Mode.FUSED,), ("none", "selective"), (1,)),
    # plain torch except for kernels of flash-attention and apex; norms copy the residual in 32 bits
    # (internlm/model/modeling_internlm.py, modules/mlp.py, ops/norm.py)
    Framework.INTERNEVO: Defaults((Mode.EAGER, Mode.FUSED), ("none", "full"), (1,)),
    # torch.compile per block and selective activation checkpointing by operation are torchtitan's defaults
    Framework.TORCHTITAN: Defaults((Mode.COMPILED, Mode.EAGER), ("selective", "none", "full"), (3,)),
    Framework.OTHER: Defaults((Mode.FUSED, Mode.EAGER, Mode.COMPILED), ("none", "full"), (1, 0, 3)),
}

# Frameworks whose performance recipes keep and reduce gradients in 16 bits (grad_reduce_in_fp32=False); InternEvo
# reduces them in their own dtype (internlm/solver/optimizer/utils.py, reduce_tensor).
FRAMEWORKS_OF_GRADIENTS_16 = frozenset((Framework.NEMO, Framework.BRIDGE_LIBRARY, Framework.INTERNEVO))
# Frameworks that do so for fp16: Megatron's --accumulate-allreduce-grads-in-fp32 is off by default, and always on for
# bf16 (megatron/arguments.py); DeepSpeed's fp16 engine sums in fp16.
GRADIENTS_16_IN_FP16 = frozenset(
    (Framework.MEGATRON, Framework.MEGATRON_TESTS, Framework.MEGATRON_DEEPSPEED, Framework.BIGSCIENCE)
)

# Words -> name of a planner's precision, or int8 (published_words). If a source leaves two open: the one that all of
# its devices have.
PRECISION_WORDS: tuple[tuple[str, str], ...] = (
    (r"FP8 or NVFP4", "fp8"),
    (r"FP4|float4|e2m1", "fp4"),
    (r"INT8|AQT", "int8"),
    (r"FP8|float8|e4m3|e5m2", "fp8"),
    (r"BF16|bfloat", "bf16"),
    (r"FP16|float16|\bhalf\b", "fp16"),
    (r"FP32|TF32|float32", "fp32"),
)

# Formats of 8 and 4 bits, by the words of rows: scales per block of 32 (MXFP8) or 128 elements, or per tensor. The
# planner distinguishes blocks where the device multiplies by their scales. A sweep has one format.
BLOCKS = "mxfp8"
FORMATS: tuple[tuple[str, str], ...] = ((r"FP4", "fp4"), (r"MX|fine[- ]grained|block", BLOCKS), (r"FP8", "fp8"))

# ZeRO stages; several if the words leave the stage open. A shard group smaller than dp is hybrid ZeRO; a smaller group
# of FSDP is read as all of dp.
ZERO_STAGE_WORDS: tuple[tuple[str, tuple[int, ...]], ...] = (
    (r"^0", (0,)),
    (r"^1|zero-?1", (1,)),
    (r"^2|SHARD_GRAD_OP|zero-?2|optim_grads$", (2,)),
    (r"^3|FSDP|zero-?3|optim_grads_params", (3,)),
    (r"(zero|stage)\W*(stage\W*)?1|distributed.?optimizer", (1,)),
    (r"(zero|stage)\W*(stage\W*)?2", (2,)),
    (r"(zero|stage)\W*(stage\W*)?3|HSDP|hybrid.?shard", (3,)),
    (r"(zero|stage)\W*(stage\W*)?0|^(none|no|off|false|ddp)\b", (0,)),
)

# If fully_shard keeps the gathered parameters until the end of the step (reshard_after_forward=False) and reduces once,
# it sends as much as ZeRO 1. This holds in pipelines (torchtitan, distributed/fsdp.py; Automodel,
# distributed/parallelizer.py), and for Automodel with experts (MoEParallelizerConfig, its examples/llm_benchmark;
# defer_fsdp_grad_sync).
KEPT_IN_PIPELINES = frozenset((Framework.TORCHTITAN, Framework.AUTOMODEL))
KEPT_WITH_EXPERTS = frozenset((Framework.AUTOMODEL,))

# Words of a row -> offload. Megatron's and NeMo's cpu_offloading offloads activations, FSDP's CPUOffload parameters and
# optimizer, ZeRO-Offload the optimizer, ZeRO-Infinity parameters as well.
OFFLOADED: tuple[tuple[str, str], ...] = (
    (r"activation|cpu[-_]offloading|\bact\b", "activations"),
    (r"optim|CPU-?Adam|ZeRO-?Offload|\bstates?\b|moments", "optimizer"),
    (r"param|weight|ZeRO-?Infinity|FSDP|\bCPUOffload\b", "parameters"),
)


RECOMPUTE_WORDS: tuple[tuple[str, str], ...] = (
    (r"^none|^(no|off|false|0|disabled)$|^off-?load", "none"),
    (r"^full|^(yes|on|true|1|all|uniform|block|enabled)$", "full"),
)
# torchtitan's selective recompute: every other layer, or every other product within layers, which costs about as much
EVERY_OTHER = r"^selective \((op|every other layer|2)\)"
CORE_ATTENTION = r"^selective( \(core_attn\))?$"  # the planner's selective recompute
_MODULE = f"(?:{'|'.join(MODULES)})"  # of Megatron's --recompute-modules
MODULES_RECOMPUTED = rf"^selective \(({_MODULE}(?:, ?{_MODULE})*)\)$"

# Words of a row (letters and digits only) -> the planner's schedules; several if the planner lacks the exact one. ZBB
# (Qi et al., Zero Bubble Pipeline Parallelism, 2023) on chunks of one rank is interleaved; ZB-H2 and the adaptive
# schedules of that paper have the bubble of ZBV or less. V-half and V-min (Qi et al., Pipeline Parallelism with
# Controllable Memory, 2024) hold fewer micro-batches than ZBV at the cost of a bubble of at most 1F1B's. Breadth-first
# (Lamy-Poirier, 2022) is GPipe over the chunks of Interleaved1F1B.
SCHEDULE_WORDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"^(1f1b|1f1binterleaved|interleaved(1f1b|pipeline|1f1bpipeline)?|looped1f1b)$", ("1F1B",)),
    (r"^(vpp|virtualpipeline(parallel(ism)?)?|megatron(interleaved)?|pipedream(flush|2bw)?)$", ("1F1B",)),
    (r"^((plain|non)(interleaved)?1f1b|1f1bnoninterleaved|noninterleaved|none|no|na|default)$", ("1F1B",)),
    (r"^(gpipe|allforwardallbackward|afab|fthenb|filldrain)$", ("GPipe",)),
    (r"^(zbh1|zbb|zerobubble(h1)?|interleavedzerobubble|zerobubbleinterleaved|zb1p|zb)$", ("ZB-H1",)),
    (r"^(zbh2|zerobubbleh2|zb2p)$", ("ZBV", "ZB-H1")),
    (r"^(zbv|zbvzerobubble|zerobubblev|vschedule)$", ("ZBV",)),
    (r"^v(half|min)$", ("ZBV", "1F1B")),
    (r"^(dualpipev|cutinhalf)$", ("DualPipeV",)),
    (r"^dualpipe$", ("DualPipe",)),
    (r"^(loopedbfs|bfs|breadthfirst)$", ("1F1B", "GPipe")),
)
# Chunks per rank of an interleaved schedule if a run does not state it (torchtitan, parallelisms/pipelining_utils.py).
DEFAULT_CHUNKS: Mapping[Framework, int] = {Framework.TORCHTITAN: 2}
# the schedule with several chunks per rank
INTERLEAVED: Mapping[str, str] = {"1F1B": "Interleaved1F1B", "ZB-H1": "InterleavedZeroBubble"}

# Vocabulary size if a row does not state it: GPT-2's byte pairs, which Megatron's examples, functional tests and mock
# data use, padded to a multiple of 128 tp (--make-vocab-size-divisible-by).
MEGATRONS = (
    Framework.MEGATRON,
    Framework.MEGATRON_TESTS,
    Framework.NEMO,
    Framework.BRIDGE_LIBRARY,
    Framework.MEGATRON_DEEPSPEED,
    Framework.BIGSCIENCE,
)
VOCAB: Mapping[Framework, int] = dict.fromkeys(MEGATRONS, 50257)
VOCAB_MULTIPLE = 128


# (rank, layers) of adapters. NeMo's and Megatron-Bridge's performance recipes: target_modules = ["linear_qkv"], dim 16
# of the 70B ones (scripts/performance); Hugging Face PEFT's default: rank 8, queries and values.
ADAPTERS: Mapping[Framework, tuple[int, tuple[str, ...]]] = dict.fromkeys(
    (Framework.MEGATRON, Framework.NEMO, Framework.BRIDGE_LIBRARY), (16, ("q_proj", "k_proj", "v_proj"))
)
USUAL_ADAPTERS: tuple[int, tuple[str, ...]] = (8, ("q_proj", "v_proj"))


# Frameworks whose recipes of such models keep the optimizer's moments in 16 bits (exp_avg_dtype = bfloat16: DeepSeek-V3
# and V4, Moonlight, Kimi), as DeepSeek-V3 was trained (arXiv 2412.19437, section 3.3.3).
FRAMEWORKS_OF_MOMENTS_16 = frozenset((Framework.NEMO, Framework.BRIDGE_LIBRARY))


def find(table: Sequence[tuple[str, Found]], text: str) -> Found | None:
    """Return the entry of the first pattern that matches in `text`, or None."""
    return next((value for pattern, value in table if re.search(pattern, text, re.IGNORECASE)), None)
