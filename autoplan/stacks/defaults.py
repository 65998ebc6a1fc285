"""Defaults of training frameworks, and how to read the words of their flags and of published rows.

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


class Formula(StrEnum):
    """The formula behind a quoted TFLOP/s figure."""

    FULL_ATTENTION = "6 N + 12 L h s per token"
    CAUSAL_ATTENTION = "6 N + 6 L h s per token"
    HARDWARE = "96 B s L h^2 (1 + s / 6h + V / 16Lh)"
    HARDWARE_8N = "8 * 12 L h^2 per token"


@dataclass(frozen=True)
class Defaults:
    """The choices of a framework for a row that does not state them. The first of each is the prediction."""

    modes: tuple[Mode, ...]
    recompute: tuple[str, ...]
    zero_stages: tuple[int, ...]


@dataclass(frozen=True)
class Memory:
    """A kind of memory figure.

    Attributes:
        unit: Bytes per unit of the figure.
        last_stage: True if it is of the last pipeline stage; False if of the fullest.
        comparable: True if it counts live tensors, as the planner predicts; False if it includes the allocator's cache
            and the context.
    """

    unit: float
    last_stage: bool = False
    comparable: bool = True


# Searched for in the source and the flags together.
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

SHARD_GROUP = r"^1.*group=(\d+)"  # ranks that share the optimizer's state

# Everything is sharded over all devices: a row that says so and states no degrees has no other parallelism.
ALL_SHARDED = r"^(3\b|zero-?3|FSDP)(?!/)"

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
UNKNOWN_SCHEDULE = ("1F1B", "ZB-H1")
# Schedules with one chunk per rank if the row does not state the number.
ONE_CHUNK = r"^(1f1b|plain.*|non.*|1f1bnon.*|none|no|na|default|pipedream.*|zb(h1|h2|1p|2p)?|zerobubble(h1|h2)?)$"
# Chunks per rank of an interleaved schedule if a run does not state it (torchtitan, parallelisms/pipelining_utils.py).
DEFAULT_CHUNKS: Mapping[Framework, int] = {Framework.TORCHTITAN: 2}
# the schedule with several chunks per rank
INTERLEAVED: Mapping[str, str] = {"1F1B": "Interleaved1F1B", "ZB-H1": "InterleavedZeroBubble"}

# Vocabulary size if a row does not state it: GPT-2's byte pairs, which Megatron's examples, functional tests and mock
# data use, padded to a multiple of 128 tp (--make-vocab-size-divisible-by).
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

# Micro-batch sizes if a row does not state one and its schedule accumulates gradients; JAX's trainers run the whole
# batch of a device at once. The first is the prediction.
MICRO_BATCHES = (1, 2, 4)
# ZeRO 3 without a pipeline gathers all parameters per micro-batch, so few are run
MICRO_BATCHES_GATHERED = (8, 4, 2, 1)
AT_ONCE = frozenset((Framework.JAX,))
# Frameworks that ran as many micro-batches as stages, until this year (torchtitan, parallelisms/pipelining_utils.py;
# its pull request 1073 made one sequence each the default).
AS_MANY_AS_STAGES: Mapping[Framework, float] = {Framework.TORCHTITAN: 2025.3}

# (rank, layers) of adapters. NeMo's and Megatron-Bridge's performance recipes: target_modules = ["linear_qkv"], dim 16
# of the 70B ones (scripts/performance); Hugging Face PEFT's default: rank 8, queries and values.
ADAPTERS: Mapping[Framework, tuple[int, tuple[str, ...]]] = dict.fromkeys(
    (Framework.MEGATRON, Framework.NEMO, Framework.BRIDGE_LIBRARY), (16, ("q_proj", "k_proj", "v_proj"))
)
USUAL_ADAPTERS: tuple[int, tuple[str, ...]] = (8, ("q_proj", "v_proj"))

# Gbit/s of the network: per device, or of the node as number of links times speed.
NIC_PER_DEVICE = r"(\d+) Gb/s per GPU"
NIC_PER_NODE = r"(\d+)\s*x\s*(?:[A-Z]+ )*(\d+) Gb/s (?:\w+ )?per node"

# A layer that was measured alone, without embedding, loss and optimizer.
SINGLE_LAYER = r"\b(single|one|1)\b[\w -]*\blayer\b"

# Share of a fabric's bandwidth that NCCL reaches if it has no transport for the fabric: all-reduce between two nodes
# with 4 x 100 Gb/s of Omni-Path, 135 Gb/s (bigscience-workshop/bigscience, experiments/README.md; less on more nodes,
# experiments/bandwidth: "nccl ... doesn't fully utilize Intel OPA full bandwidth").
REACHED: tuple[tuple[str, float], ...] = ((r"Omni-?Path|\bOPA\b", 0.34),)


USUAL_NIC = 100.0  # if neither row nor catalog names a network: Ethernet of cloud hosts

# Quoted TFLOP/s, used only if a row has neither seconds nor tokens. A bare `model` is the formula of NeMo and dgxc
# tables: full attention (recomputed for the collection); other texts are not read.
TFLOPS_FORMULAS: tuple[tuple[str, Formula], ...] = (
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

# Multi-head latent attention (DeepSeek-V3, arXiv 2412.19437, and its descendants): ranks of the projections and head
# sizes. The queries have this rank, or are projected in one step (DeepSeek-V2-Lite). A model is taken to use it if it
# has many experts and as many key-value heads as heads, since Megatron supports it: so do all of Megatron-LM's tests
# that train 16 experts or more without grouped queries (tests/functional_tests/test_cases), and of Megatron Bridge's
# recipes DeepSeek-V2 to V4, Moonlight and Kimi. (least number of experts, since) If the framework is not known: models
# whose heads would otherwise be narrower than any usual (DeepSeek-V3: 7168 / 128).
LATENT_EXPERTS: tuple[int, float] = (16, 2024.8)
# Frameworks that support it, and frameworks whose kernels are deterministic (NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 in
# every test), for which latent attention has no fused kernel: "unfused attention since MLA with fused attention and
# deterministic mode leads to NaN" (their model_config.yaml).
LATENT_FRAMEWORKS = frozenset(_MEGATRONS)
DETERMINISTIC = frozenset((Framework.MEGATRON_TESTS,))
# Frameworks whose recipes of such models keep the optimizer's moments in 16 bits (exp_avg_dtype = bfloat16: DeepSeek-V3
# and V4, Moonlight, Kimi), as DeepSeek-V3 was trained (arXiv 2412.19437, section 3.3.3).
FRAMEWORKS_OF_MOMENTS_16 = frozenset((Framework.NEMO, Framework.BRIDGE_LIBRARY))
LATENT_Q_RANKS: tuple[int | None, ...] = (1536, None)
LATENT: Mapping[str, int] = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
# Key-value heads if the row does not state them: 8 (grouped queries) in Llama 2 from 34B on (arXiv 2307.09288, table 1)
# and in all of Llama 3 (April 2024; arXiv 2407.21783, table 3), as many as heads before. (number, all models since,
# models with at least this many parameters, since) KV_HEADS: other numbers, tried to match the published number of
# parameters.
GROUPED: tuple[int, float, float, float] = (8, 2024.3, 30e9, 2023.0)
KV_HEADS = (4, 2, 16, 1)
LAYER_WEIGHTS = 12  # times hidden squared: parameters of a layer, roughly
GATED_SINCE = 2023.1  # LLaMA: SwiGLU; GPTs before have 4 h
# Vocabulary sizes of GPT-2, LLaMA and Llama 3, with the year since which each is usual.
TOKENIZERS: tuple[tuple[float, int], ...] = ((0.0, 50257), (2023.1, 32000), (2024.3, 128256))
# Experts per token with few and with many experts (Mixtral: 2 of 8; Qwen3 and DeepSeek-V3: 8 of 128 and 256).
MANY_EXPERTS = 64
TOP_K_OF_EXPERTS: tuple[tuple[int, ...], tuple[int, ...]] = ((2, 4), (8, 4))
HEAD_DIMS = (128, 64)  # usual head dims besides hidden / heads
EXPERT_EVERY = (1, 2)  # experts in every layer, or in every second one
# Published parameter counts are rounded, and some omit embeddings. The usual kind of decoder is taken if it matches the
# count within the first share (within the second for experts, where attention is a small part of all parameters); else
# the nearest kind, within the third share.
USUAL, USUAL_WITH_EXPERTS, PARAMS_TOLERANCE = 0.05, 0.01, 0.1
ROUNDED = 0.01  # candidates for blank dimensions that are off by this much more than the best count as equally good


def find(table: Sequence[tuple[str, Found]], text: str) -> Found | None:
    """Return the entry of the first pattern that matches in `text`, or None."""
    return next((value for pattern, value in table if re.search(pattern, text, re.IGNORECASE)), None)
