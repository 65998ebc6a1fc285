"""How the rows of published tables are read: which framework and year they are of, and what they leave open.

Patterns are case-insensitive regular expressions, tried in order; the first match counts. The defaults of frameworks
and the words of their flags are data of the package (autoplan/stacks).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from experiments.published.defaults import MEGATRONS, Framework, find


class Formula(StrEnum):
    """The formula behind a quoted TFLOP/s figure."""

    FULL_ATTENTION = "6 N + 12 L h s per token"
    CAUSAL_ATTENTION = "6 N + 6 L h s per token"
    HARDWARE = "96 B s L h^2 (1 + s / 6h + V / 16Lh)"
    HARDWARE_8N = "8 * 12 L h^2 per token"


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
    (r"Aleph-Alpha/", Framework.ALEPH_ALPHA),
    (r"KempnerForge", Framework.KEMPNER),
    (r"foundation-model-stack/fms-fsdp|Modalities/", Framework.FSDP),
    (r"torchtitan", Framework.TORCHTITAN),
    (r"InternEvo", Framework.INTERNEVO),
    (r"bigscience|OpenLLM-France", Framework.BIGSCIENCE),
    (r"Hugging Face (Trainer|transformers)", Framework.TRANSFORMERS),
    (r"DeepSpeed", Framework.MEGATRON_DEEPSPEED),
    (r"Megatron-Bridge (skills|examples)/", Framework.BRIDGE_LIBRARY),
    (r"Automodel", Framework.AUTOMODEL),
    (r"functional_tests", Framework.MEGATRON_TESTS),
    (r"NeMo|Megatron-Bridge|dgxc-benchmarking|training_results", Framework.NEMO),
    (r"Megatron|Korthikanti|calculon|SC21|2205\.05198|2402\.15627|SimuMax|ModelZoo|Primus", Framework.MEGATRON),
)

# Notes of a run of Megatron Bridge that took a recipe of scripts/performance and not one of the library.
PERFORMANCE_RECIPE = r"performance recipe"

SHARD_GROUP = r"^1.*group=(\d+)|FSDP \(degree (\d+)\)"  # ranks that share the optimizer's state, or all state

# The same where the row leaves it open, from the recipe that its source names: FSDP over 1 and 16 nodes of 8, DP over
# the others (NVIDIA/dgxc-benchmarking, v24.11.1, paxml/configure.sh: DCN_MESH_SHAPE=[DP,FSDP,1]; google/paxml,
# contrib/gpu/scripts_gpu/configs.py: ICI_MESH_SHAPE = [1, 8, 1]).
SHARD_GROUPS: tuple[tuple[str, int], ...] = ((r"paxml/README_5b", 8), (r"paxml/README_175b", 128))

# Everything is sharded over all devices: a row that says so and states no degrees has no other parallelism.
ALL_SHARDED = r"^(3\b|zero-?3|FSDP)(?!/)"

UNKNOWN_SCHEDULE = ("1F1B", "ZB-H1")

# Frameworks that compile blocks unless a row's flags do not say so, and the words that do (float8 and asynchronous
# tensor parallelism need it).
COMPILES = frozenset((Framework.TORCHTITAN, Framework.KEMPNER, Framework.FSDP))
COMPILED = r"(?<!no )(?<!no torch\.)(?<!without )(?<!without torch\.)compile|float8|AsyncTP"

# Schedules with one chunk per rank if the row does not state the number.
ONE_CHUNK = r"^(1f1b|plain.*|non.*|1f1bnon.*|none|no|na|default|pipedream.*|zb(h1|h2|1p|2p)?|zerobubble(h1|h2)?)$"

# Micro-batch sizes if a row does not state one and its schedule accumulates gradients; JAX's trainers run the whole
# batch of a device at once. The first is the prediction.
MICRO_BATCHES = (1, 2, 4)

# ZeRO 3 without a pipeline gathers all parameters per micro-batch, so few are run
MICRO_BATCHES_GATHERED = (8, 4, 2, 1)

AT_ONCE = frozenset((Framework.JAX,))

# Frameworks that ran as many micro-batches as stages, until this year (torchtitan, parallelisms/pipelining_utils.py;
# its pull request 1073 made one sequence each the default).
AS_MANY_AS_STAGES: Mapping[Framework, float] = {Framework.TORCHTITAN: 2025.3}

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
# sizes. LATENT_Q_RANKS: the rank of the queries, or None if they are projected in one step (DeepSeek-V2-Lite). A model
# is taken to use it if it has many experts and as many key-value heads as heads, since Megatron supports it: so do all
# of Megatron-LM's tests that train 16 experts or more without grouped queries (tests/functional_tests/test_cases), and
# of Megatron Bridge's recipes DeepSeek-V2 to V4, Moonlight and Kimi. (least number of experts, since) If the framework
# is not known: models whose heads would otherwise be narrower than any usual (DeepSeek-V3: 7168 / 128).
LATENT_EXPERTS: tuple[int, float] = (16, 2024.8)

# Every DeepSeek since V2 (arXiv 2405.04434) and every test that is named after one, however few experts it has.
LATENT_NAMES = r"deep[-_ ]?seek"

# Frameworks that support it, and frameworks whose kernels are deterministic (NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 in
# every test), for which latent attention has no fused kernel: "unfused attention since MLA with fused attention and
# deterministic mode leads to NaN" (their model_config.yaml).
LATENT_FRAMEWORKS = frozenset(MEGATRONS)

DETERMINISTIC = frozenset((Framework.MEGATRON_TESTS,))

LATENT_Q_RANKS: tuple[int | None, ...] = (1536, None)

LATENT: Mapping[str, int] = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}

# What the sources of rows state of a run beside the columns of the table, in the words of notes and flags: (searched
# for in the source, words). The words of all patterns that match hold; those of the row itself come first.
#
# Megatron-LM's functional tests: the model_config.yaml in the folder of the golden values that a row names
# (NVIDIA/Megatron-LM, tests/functional_tests/test_cases, August 2026). moe_ffn is --moe-ffn-hidden-size, shared_ffn
# --moe-shared-expert-intermediate-size, first_dense_layers the zeros of --moe-layer-freq, mtp_layers --mtp-num-layers,
# ETP --expert-tensor-parallel-size, vpp the chunks of --pipeline-model-parallel-layout over the stages; a backend of
# `local` is Megatron's own, which is not fused. The heads of all with experts are as in LATENT. Left: a dense model
# with latent attention (gpt3_mcore_te_tp2_pp2_mla), layers that are not gated, with experts.
_FUNCTIONAL = r"functional_tests/test_cases/"
_SMALL_EXPERTS = "moe_ffn=1024 shared_ffn=1024 q_lora_rank=1536 kv_lora_rank=512 ETP=1 attention-backend=unfused"
STATED_BY_SOURCE: tuple[tuple[str, str], ...] = (
    (
        rf"{_FUNCTIONAL}moe/deepseek_proxy_fsdp_ep2_fsdp2",
        "moe_ffn=1024 shared_ffn=1024 first_dense_layers=1 q_lora_rank=256 kv_lora_rank=128 ETP=1 "
        "attention-backend=unfused",
    ),
    (rf"{_FUNCTIONAL}moe/gpt3_(moe_)?mcore_te_tp2_pp2_ep4_etp1_", _SMALL_EXPERTS),
    (rf"{_FUNCTIONAL}moe/.*_etp1_(memory_speed|mtp_resume|resume)", "first_dense_layers=1"),
    (rf"{_FUNCTIONAL}moe/.*_etp1_(selective|fine_grained|no_mtp)", "first_dense_layers=3 vpp=4"),
    (rf"{_FUNCTIONAL}moe/.*_fine_grained_offloading", "fine-grained-activation-offloading=True"),
    (rf"{_FUNCTIONAL}moe/.*_etp1_(memory_speed|mtp_resume|selective|fine_grained)", "mtp_layers=1"),
    (
        rf"{_FUNCTIONAL}mixtral/deepseekv3_proxy_flex_",
        "moe_ffn=2048 shared_ffn=2048 first_dense_layers=3 mtp_layers=1 q_lora_rank=1536 kv_lora_rank=512 ETP=1 "
        "NVTE_FUSED_ATTN=1",
    ),
    (rf"{_FUNCTIONAL}mixtral/deepseekv3_proxy_flex_tp1pp4", "vpp=2"),
    (rf"{_FUNCTIONAL}mixtral/deepseekv3_proxy_flex_tp2pp2", "vpp=1"),
    (rf"{_FUNCTIONAL}mixtral/mixtral_8x7b_tp1pp4ep8vpp8_", "ETP=1"),
    (rf"{_FUNCTIONAL}moe/gpt3_moe_mcore_te_ep8_", "moe_ffn=1024"),
    (rf"{_FUNCTIONAL}moe/gpt3_moe_mcore_te_tp4_ep2_etp2_", "moe_ffn=1024 shared_ffn=512 ETP=2"),
    (rf"{_FUNCTIONAL}moe/.*_scoped_cudagraph", "first_dense_layers=4 mtp_layers=1 vpp=4"),
    (rf"{_FUNCTIONAL}moe/gpt3_mcore_te_tp2_pp1_te_.*8experts_etp1_ep4", "ETP=1 attention-backend=unfused"),
    (rf"{_FUNCTIONAL}moe/gpt3_mcore_te_tp2_pp1_te_8experts2parallel_", "attention-backend=unfused"),
    (rf"{_FUNCTIONAL}moe/gpt3_mcore_tp2_pp2_ep2_etp2_", "ETP=2"),
    (rf"{_FUNCTIONAL}(moe/gpt3_mcore_tp2_pp2_|gpt/gpt3_mcore_tp\d)", "transformer-impl=local"),
    (rf"{_FUNCTIONAL}\w+/gpt3_mcore_\w*cp2[_/]", "attention-backend=flash"),
    (
        rf"{_FUNCTIONAL}(gpt/gpt3_15b_8t_release(_sm)?_gb200|gpt/.*_cross_entropy_loss_fusion|mixtral/deepseekv3_proxy_"
        rf"|moe/gpt3_mcore_te_tp2_pp2_ep4_etp1_(memory_speed|mtp_resume|resume_torch_dist_attn|selective_recompute_exp))",
        "cross-entropy-loss-fusion=True",
    ),
    (rf"{_FUNCTIONAL}(bert/|t5/t5_release|gpt/gpt3_mcore_te_tp2_pp2_mla)", "attention-backend=unfused"),
    (rf"{_FUNCTIONAL}gpt/gpt3_mcore_te_(tp1_pp1|tp1_pp4_vp1|tp4_pp1)_dist_opt", "attention-backend=unfused"),
    (rf"{_FUNCTIONAL}gpt/gpt3_mcore_te_tp1_pp4_vp(1/|1_tun|1_une|2_account)", "attention-backend=unfused"),
)


def stated_by(source: str) -> str:
    """Return what a source states of a run beside the columns of the table (STATED_BY_SOURCE); "" if nothing."""
    return " ".join(words for pattern, words in STATED_BY_SOURCE if re.search(pattern, source))


# Runs of which their own source says that the step is not that of the settings alone: (searched for in source, notes
# and model, why). They are priced and counted like all others; averages are given with and without them.
DOUBTED: tuple[tuple[str, str], ...] = (
    (
        r"te_tp2_pp2_ep4_etp1_memory_speed/golden_values_dev_dgxh100_dgxc",
        "its steps 2 to 50 take 1.1 to 14.7 s (golden values), those of another machine with the same settings 1.01 to "
        "1.36 s: it waits for something that no setting states",
    ),
    (
        r"deepseek_proxy_fsdp_ep2_fsdp2_1node/golden_values_dev_dgx_gb200",
        "its steps 2 to 49 take 0.14 to 11.1 s (golden values; 0.12 to 0.15 s in those of April 2026): it waits for "
        "something that no setting states",
    ),
    (
        r"container 26\.06\.01.*GPT OSS 120B",
        "a performance regression of this release alone, says its source (docs/performance-summary-archive.md, "
        "gpt-oss-note: NVIDIA/cudnn-frontend, issue 256)",
    ),
)


def doubt_of(source: str, notes: str, model: str) -> str:
    """Return why a run's own source says that the step is not that of its settings alone; "" for all other runs."""
    return find(DOUBTED, " | ".join((source, notes, model))) or ""


# Models whose layers differ from what their dimensions say, by name: (pattern, family).
LLAMA_4, DEEPSEEK_V3 = "llama4", "deepseek_v3"
FAMILIES: tuple[tuple[str, str], ...] = (
    (r"llama[-_ ]?4", LLAMA_4),
    (r"deep[-_ ]?seek[-_ ]?v3\b", DEEPSEEK_V3),
)

# A shared expert as wide as a routed one in every layer with experts (Llama 4's config.json and modeling_llama4.py).
SHARED_AS_ROUTED = frozenset((LLAMA_4,))

# Groups of experts, and how many of them a token takes experts of (config.json; moe_router_num_groups and
# moe_router_group_topk of NeMo and Megatron Bridge, whose forced balance draws scores and keeps the groups).
ROUTING_GROUPS: Mapping[str, tuple[int, int]] = {DEEPSEEK_V3: (8, 4)}

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

# -- the year of a run -------------------------------------------------------------------------------------------------

# Years as decimals. The run was set up by then at the latest.
_RELEASE = r"(?:container|release v?|NeMo |ngc)[ :]?(2\d)\.(\d\d)"
_IN_NAME = r"[-_](20[12]\d)-?([01]\d)(?=[-_.])"  # llama3_h100_202412_torchtitan.md
_PREPRINT = r"\b([12]\d)(0[1-9]|1[0-2])\.\d{4,5}\b"  # arXiv 2412.19437
_DATE = r"\bdate ([01]\d)-([0-3]\d)\b"  # month and day of a run, in the year of its source
_BEFORE_PAPER = 0.3  # years from a run to the preprint about it, roughly: 0.2 for SC21, 0.8 for Korthikanti
_SOURCES: tuple[tuple[str, float], ...] = (
    (r"bigscience", 2022.2),
    # git blame: A100 of 40 GB from December 2022 (precision `bf16`, later Composer's `amp_bf16`), the other tables from
    # October 2023 and January 2024, with torch 2.1
    (r"llm-foundry .*README\.md:(22[89]|2[3-9]\d|3\d\d)", 2022.97),
    (r"llm-foundry", 2023.79),
    (r"vTrain|llama1|LLaMA paper|2302\.", 2023.4),
    (r"Megatron-LM git history", 2021.0),
    (r"2205\.05198|SC21", 2021.5),
    (r"Lucie-Training", 2024.4),
    (r"2402\.15627", 2023.6),
    (r"InternEvo|performance_long_sequence|TinyLlama|torchtitan@3faaa1a", 2024.2),
    (r"Megatron-LM README", 2024.4),
    (r"QwenLM/Qwen", 2023.9),
    (r"fms-fsdp|Modalities/modalities|gist\.github\.com/chenyaofo", 2024.4),
    (r"KempnerForge", 2026.2),
    (r"SimuMax|Megatron-Bridge|Primus|MoE-ModelZoo|Automodel|functional_tests|torchtitan|maxtext|gpu-recipes", 2025.7),
)
_DEVICES: tuple[tuple[str, float], ...] = (
    (r"V100", 2021.0),
    (r"A100|A800|TPU v4", 2022.5),
    (r"H100|H800|MI250|MI300X|v5p|TPU", 2024.0),
    (r"H200|MI325", 2024.9),
    (r"B200|GB200", 2025.4),
    (r".", 2026.0),
)

# An era is never before the device was sold.
_RELEASED: tuple[tuple[str, float], ...] = (
    (r"B300|MI35[05]X|TPU ?v?7", 2025.6),
    (r"B200", 2025.0),
    (r"\bH200|MI325X", 2024.6),
)


def era_of(source: str, notes: str, device: str) -> float:
    """Return the year of a run, with decimals, as far as its row tells."""
    if (match := re.search(_RELEASE, f"{source} {notes}")) is not None:
        return 2000 + int(match.group(1)) + (int(match.group(2)) - 0.5) / 12
    if (match := re.search(_IN_NAME, source)) is not None:
        return int(match.group(1)) + (int(match.group(2)) - 0.5) / 12
    if (match := re.search(r"training_results_v(\d)\.(\d)", source)) is not None:
        return 2020.4 + int(match.group(1)) + 0.5 * int(match.group(2))  # v3.0 in June 2023, two rounds a year
    year = find(_SOURCES, source)
    if year is not None and (match := re.search(_DATE, notes)) is not None:
        return int(year) + (int(match.group(1)) - 1) / 12 + (int(match.group(2)) - 0.5) / 365
    if year is None and (match := re.search(_PREPRINT, source)) is not None:
        year = 2000 + int(match.group(1)) + (int(match.group(2)) - 0.5) / 12 - _BEFORE_PAPER
    if year is None:
        return find(_DEVICES, device) or 2026.0
    return max(year, find(_RELEASED, device) or year)  # a page that grew with the devices
