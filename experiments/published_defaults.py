"""Tables for published_rows.py: how the words of a published row are read, and what stands for a blank field.

One default per framework and field, never per row, campaign, model, or anything measured. Patterns are regular
expressions, tried in order, case-insensitive; the first that is found counts. Where a source leaves a choice open, all
`alternatives` are priced: the first is the prediction, the others widen its interval.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from autoplan.cost_models.config import MODULES, Mode

Found = TypeVar("Found")


class Framework(StrEnum):
    """What trained the model, as far as it changes how kernels, stages and blank fields are read."""

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


class Formula(StrEnum):
    """Which arithmetic a quoted TFLOP/s figure counts."""

    FULL_ATTENTION = "6 N + 12 L h s per token"
    CAUSAL_ATTENTION = "6 N + 6 L h s per token"
    HARDWARE = "96 B s L h^2 (1 + s / 6h + V / 16Lh)"
    HARDWARE_8N = "8 * 12 L h^2 per token"


@dataclass(frozen=True)
class Defaults:
    """What a framework does where a row is silent. The first of each is the prediction."""

    modes: tuple[Mode, ...]
    recompute: tuple[str, ...]
    zero_stages: tuple[int, ...]


@dataclass(frozen=True)
class Memory:
    """A kind of memory figure. `unit`: bytes. `last_stage`: of the last pipeline stage, else of the fullest.

    `comparable`: of live tensors, as the planner predicts; else it holds the allocator's cache and the context, too.
    """

    unit: float
    last_stage: bool = False
    comparable: bool = True


# Looked for in the source and the flags together.
FRAMEWORKS: tuple[tuple[str, Framework], ...] = (
    (r"MaxText|PaxML|\bPAX\b|\bJAX\b", Framework.JAX),
    (r"Composer|llm-foundry", Framework.COMPOSER),
    (r"torchtitan", Framework.TORCHTITAN),
    (r"InternEvo", Framework.INTERNEVO),
    (r"bigscience|OpenLLM-France", Framework.BIGSCIENCE),
    (r"DeepSpeed", Framework.MEGATRON_DEEPSPEED),
    (r"Megatron-Bridge (skills|examples)/", Framework.BRIDGE_LIBRARY),
    (r"Automodel", Framework.AUTOMODEL),
    (r"functional_tests", Framework.MEGATRON_TESTS),
    (r"NeMo|Megatron-Bridge|dgxc-benchmarking|training_results", Framework.NEMO),
    (r"Megatron|Korthikanti|calculon|SC21|2205\.05198|2402\.15627|SimuMax|ModelZoo|Primus", Framework.MEGATRON),
)

DEFAULTS: Mapping[Framework, Defaults] = {
    # torch.nn modules with a fused attention kernel (llm-foundry README: FSDP full shard unless said otherwise)
    Framework.COMPOSER: Defaults((Mode.EAGER,), ("none", "full"), (3,)),
    # XLA; MaxText's default remat policy is full, its published runs choose their own
    Framework.JAX: Defaults((Mode.COMPILED,), ("full", "none"), (3,)),
    # Megatron's fused softmax, bias and gelu; --checkpoint-activations was usual before FlashAttention
    Framework.MEGATRON_DEEPSPEED: Defaults((Mode.FUSED,), ("full", "none"), (1, 0)),
    Framework.BIGSCIENCE: Defaults((Mode.FUSED,), ("full", "none"), (1, 0)),
    # Transformer Engine; performance recipes compute at most the attention core again (NVIDIA NeMo performance guide)
    Framework.MEGATRON: Defaults((Mode.FUSED,), ("none", "selective"), (1,)),
    Framework.MEGATRON_TESTS: Defaults((Mode.FUSED,), ("none", "selective"), (1,)),
    # Transformer Engine's modules under fully_shard (examples/llm_benchmark: *_te_deepep.yaml)
    Framework.AUTOMODEL: Defaults((Mode.FUSED, Mode.EAGER), ("none", "full"), (3,)),
    Framework.NEMO: Defaults((Mode.FUSED,), ("none", "selective"), (1,)),
    Framework.BRIDGE_LIBRARY: Defaults((Mode.FUSED,), ("none", "selective"), (1,)),
    Framework.INTERNEVO: Defaults((Mode.FUSED,), ("none", "full"), (1,)),  # apex and flash-attention kernels
    # torch.compile per block and selective activation checkpointing by operation are torchtitan's defaults
    Framework.TORCHTITAN: Defaults((Mode.COMPILED, Mode.EAGER), ("selective", "none", "full"), (3,)),
    Framework.OTHER: Defaults((Mode.FUSED, Mode.EAGER, Mode.COMPILED), ("none", "full"), (1, 0, 3)),
}

# Whose performance recipes keep and reduce gradients in 16 bits (grad_reduce_in_fp32=False); InternEvo reduces them in
# the dtype that they have (internlm/solver/optimizer/utils.py, reduce_tensor).
GRADIENTS_16 = frozenset((Framework.NEMO, Framework.BRIDGE_LIBRARY, Framework.INTERNEVO))

# Name of a planner's precision, or None where it has none. Of two that a source leaves open, the one that all of its
# devices have.
PRECISIONS: tuple[tuple[str, str | None], ...] = (
    (r"FP8 or NVFP4", "fp8"),
    (r"FP4", "fp4"),
    (r"INT8", None),
    (r"FP8", "fp8"),
    (r"BF16|bfloat", "bf16"),
    (r"FP16|float16", "fp16"),
    (r"FP32|TF32", "fp32"),
)

# Formats of 8 and 4 bits, by what rows call them: scales per block of 32 (MXFP8) or 128 elements, per tensor. The
# planner tells blocks apart where the device multiplies by their scales. Sweeps are of one format.
BLOCKS = "mxfp8"
FORMATS: tuple[tuple[str, str], ...] = ((r"FP4", "fp4"), (r"MX|fine[- ]grained|block", BLOCKS), (r"FP8", "fp8"))

# ZeRO stages: several where the words leave it open. A shard group smaller than dp is hybrid ZeRO; a smaller group of
# FSDP is read as all of dp.
ZERO_STAGES: tuple[tuple[str, tuple[int, ...]], ...] = (
    (r"^0", (0,)),
    (r"^1|zero-?1", (1,)),
    (r"^2|SHARD_GRAD_OP|zero-?2|optim_grads$", (2,)),
    (r"^3|FSDP|zero-?3|optim_grads_params", (3,)),
)

SHARD_GROUP = r"^1.*group=(\d+)"  # ranks that share the optimizer's state

# Everything is sharded over all devices: a row that says so and states no degree has no other.
ALL_SHARDED = r"^(3\b|zero-?3|FSDP)(?!/)"

RECOMPUTE: tuple[tuple[str, str], ...] = ((r"^none", "none"), (r"^full", "full"))
# torchtitan's selective recompute: every other layer, or within layers every other product, which costs about as much
EVERY_OTHER = r"^selective \((op|every other layer|2)\)"
CORE_ATTENTION = r"^selective( \(core_attn\))?$"  # what the planner's selective recompute is
_MODULE = f"(?:{'|'.join(MODULES)})"  # of Megatron's --recompute-modules
MODULES_AGAIN = rf"^selective \(({_MODULE}(?:, ?{_MODULE})*)\)$"

# The planner's schedule for a row's words; None: none is the same. ZBB (Qi et al., Zero Bubble Pipeline Parallelism,
# 2023) on chunks of one rank is interleaved; V-half and V-min (Qi et al., Pipeline Parallelism with Controllable
# Memory, 2024) hold fewer micro-batches than ZBV at the cost of a bubble.
SCHEDULES: tuple[tuple[str, str | None], ...] = (
    (r"^(1F1B|1F1B.?interleaved|interleaved( ?1F1B)?|Interleaved1F1B)$", "1F1B"),
    (r"^(GPipe|all.?forward.?all.?backward)$", "GPipe"),
    (r"^(ZB-?H1|ZBB|zero.?bubble|InterleavedZeroBubble)$", "ZB-H1"),
    (r"^ZB-?V$", "ZBV"),
    (r"^DualPipe-?V$", "DualPipeV"),
)
# with several chunks per rank
INTERLEAVED: Mapping[str, str] = {"1F1B": "Interleaved1F1B", "ZB-H1": "InterleavedZeroBubble"}

# Entries of the tokenizer where a row is silent: GPT-2's byte pairs, which Megatron's examples, functional tests and
# mock data use, made divisible by 128 tp (--make-vocab-size-divisible-by).
_MEGATRONS = (
    Framework.MEGATRON,
    Framework.MEGATRON_TESTS,
    Framework.NEMO,
    Framework.BRIDGE_LIBRARY,
    Framework.MEGATRON_DEEPSPEED,
    Framework.BIGSCIENCE,
)
VOCAB: Mapping[Framework, int] = dict.fromkeys(_MEGATRONS, 50257)
VOCAB_MULTIPLE = 128

# Micro-batches where a row is silent and its schedule accumulates gradients; JAX's trainers run the batch of a device
# at once. The first is the prediction.
MICRO_BATCHES = (1, 2, 4)
AT_ONCE = frozenset((Framework.JAX,))

# (rank, layers) of adapters. NeMo's and Megatron-Bridge's performance recipes: target_modules = ["linear_qkv"], dim 16
# of the 70B ones (scripts/performance); Hugging Face PEFT's default: rank 8, queries and values.
ADAPTERS: Mapping[Framework, tuple[int, tuple[str, ...]]] = dict.fromkeys(
    (Framework.MEGATRON, Framework.NEMO, Framework.BRIDGE_LIBRARY), (16, ("q_proj", "k_proj", "v_proj"))
)
USUAL_ADAPTERS: tuple[int, tuple[str, ...]] = (8, ("q_proj", "v_proj"))

# (device, memory in GB): catalog id and overrides of Cluster.parse. A800 is an A100 with NVLink cut to 400 GB/s both
# ways (NVIDIA A800 data sheet). Memory as the sources write it.
DEVICES: Mapping[tuple[str, int], tuple[str, str]] = {
    ("V100", 16): ("v100-sxm2-16gb", ""),
    ("V100", 32): ("v100-sxm2-32gb", ""),
    ("A100", 40): ("a100-sxm4-40gb", ""),
    ("A100", 80): ("a100-sxm4-80gb", ""),
    ("A800", 80): ("a100-sxm4-80gb", "scaleup=200"),
    ("H100", 80): ("h100-sxm5-80gb", ""),
    # Meta's of 95 or 96 GB: HBM2e and 500 W (pytorch/torchtitan benchmarks)
    ("H100", 94): ("h100-sxm5-80gb", "memory_gb=94,power=500"),
    ("H800", 80): ("h800-sxm-80gb", ""),
    ("H200", 141): ("h200-sxm-141gb", ""),
    ("B200", 180): ("b200-sxm-180gb", ""),
    ("B300", 270): ("b300-sxm-288gb", ""),
    ("GB200", 186): ("gb200-nvl72", ""),
    ("GB300", 279): ("gb300-nvl72", ""),
    ("MI300X", 192): ("mi300x-192gb", ""),
    ("MI325X", 256): ("mi325x-256gb", ""),
    ("MI355X", 288): ("mi355x-288gb", ""),
    ("TPU V5P", 95): ("tpu-v5p", ""),
    ("TPU V5E", 16): ("tpu-v5e", ""),
    ("TPU V6E", 32): ("tpu-v6e", ""),
    ("TPU TRILLIUM", 32): ("tpu-v6e", ""),
    ("L40S", 48): ("l40s-48gb", ""),
}
# What is left out of a device's name: vendors, form factors, memory.
NOT_NAMES = r"\b(NVIDIA|AMD|Google|Instinct|Tensor Core|GPU|SXM\d?|HGX|DGX|NVL72|\d+ ?GB)\b"
SAME_MEMORY = 0.07  # relative: sources count GB or GiB, with or without what the driver keeps

# Gbit/s of the network: per device, or of the node as links times speed.
NIC_PER_DEVICE = r"(\d+) Gb/s per GPU"
NIC_PER_NODE = r"(\d+)\s*x\s*(?:[A-Z]+ )*(\d+) Gb/s (?:\w+ )?per node"

# Share of a fabric's bandwidth that NCCL reaches, where its transport is not made for it: all-reduce between two nodes
# with 4 x 100 Gb/s of Omni-Path, 135 Gb/s (bigscience-workshop/bigscience, experiments/README.md; less on more nodes,
# experiments/bandwidth: "nccl ... doesn't fully utilize Intel OPA full bandwidth").
REACHED: tuple[tuple[str, float], ...] = ((r"Omni-?Path|\bOPA\b", 0.34),)


USUAL_NIC = 100.0  # where neither row nor catalog names a network: Ethernet of cloud hosts

# Quoted TFLOP/s, used only where a row has neither seconds nor tokens. A bare `model` is that of NeMo and dgxc tables:
# full attention (recomputed for the collection); anything else is not read.
TFLOPS: tuple[tuple[str, Formula], ...] = (
    (r"8 ?\*? ?N", Formula.HARDWARE_8N),
    (r"hardware.*96 ?BsL|hardware.*96Bls|SC21", Formula.HARDWARE),
    (r"Megatron-Bridge FLOPs", Formula.CAUSAL_ATTENTION),
    (r"non-causal|^model$|3\*\(2N\+4Lhs\)", Formula.FULL_ATTENTION),
    (r"^model \(causal\)$", Formula.CAUSAL_ATTENTION),
)

MEMORY: tuple[tuple[str, Memory], ...] = (
    (r"max_memory_allocated.*LAST rank", Memory(1e9, last_stage=True)),
    (r"max allocated GiB", Memory(2.0**30)),
    (r"allocated GB", Memory(1e9)),
    (r"reserved|nvidia-smi", Memory(1e9, comparable=False)),
)

# Projections of multi-head latent attention (DeepSeek-V3, arXiv 2412.19437, and its descendants): ranks and head sizes.
# The rank of the queries is that, or they are projected in one step (DeepSeek-V2-Lite).
# Experts that are many, with as many key-value heads as heads, have it since Megatron knows it: of Megatron-LM's tests
# all that train 16 experts or more without grouped queries (tests/functional_tests/test_cases), as of Megatron Bridge's
# recipes DeepSeek-V2 to V4, Moonlight and Kimi. (least number of experts, since)
LATENT_EXPERTS: tuple[int, float] = (16, 2024.8)
# Frameworks that know it; and those whose kernels are deterministic (NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 in every test),
# with which latent attention has no fused kernel: "unfused attention since MLA with fused attention and deterministic
# mode leads to NaN" (their model_config.yaml).
LATENT_FRAMEWORKS = frozenset(_MEGATRONS)
DETERMINISTIC = frozenset((Framework.MEGATRON_TESTS,))
# Whose recipes of such models keep the optimizer's moments in 16 bits (exp_avg_dtype = bfloat16: DeepSeek-V3 and V4,
# Moonlight, Kimi), as DeepSeek-V3 was trained (arXiv 2412.19437, section 3.3.3).
MOMENTS_16 = frozenset((Framework.NEMO, Framework.BRIDGE_LIBRARY))
LATENT_Q_RANKS: tuple[int | None, ...] = (1536, None)
LATENT: Mapping[str, int] = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
HEAD_DIMS = (128, 64)  # usual ones beside hidden / heads
EXPERT_EVERY = (1, 2)  # experts in every layer, or in every second one
# Published counts are rounded, and some leave out embeddings. The usual kind of decoder is taken if it gives the count
# up to this (less with experts, where attention is a small part of all parameters), else the nearest one, up to the
# last.
USUAL, USUAL_WITH_EXPERTS, PARAMS_TOLERANCE = 0.05, 0.01, 0.1


def find(table: Sequence[tuple[str, Found]], text: str) -> Found | None:
    """The entry of the first pattern that is found in `text`, or None."""
    return next((value for pattern, value in table if re.search(pattern, text, re.IGNORECASE)), None)
