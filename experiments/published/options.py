"""Options of published runs beyond their degrees: attention kernel, launch, overlap.

There is one default per (framework, era), never per row, campaign or model (profiles/stacks). The era is the date of
the release that a row names (`container 26.04`, `release v25.02`, `NeMo 24.07`), else of its source (for a preprint
some months before its number), else of the first year in which its devices were used. The flags of a row take
precedence.
"""

from __future__ import annotations

import re
from dataclasses import replace

from autoplan.config.parallel import Attention, Dispatcher, FusedLoss, Launch, RunOptions
from autoplan.stacks.records import stacks_of_frameworks
from experiments.published.defaults import Framework, find

# Words of flags -> options.
_LAUNCH: tuple[tuple[str, Launch], ...] = (
    (r"CUDA_LAUNCH_BLOCKING=1", Launch.BLOCKING),
    (r"full[- ]iteration.{0,12}graph", Launch.FULL_GRAPHS),
    (r"graphs?\W{0,2}(moe_router|moe_preprocess)\W+(moe_router|moe_preprocess)(?!\W+(attn|mlp))", Launch.ROUTER_GRAPHS),
    (r"CUDA[- ]?graph|\bTE graphs", Launch.GRAPHS),
    (r"token[- ]?drop", Launch.FULL_GRAPHS),  # experts take a fixed number of rows, so nothing waits for their sizes
)
_ATTENTION: tuple[tuple[str, Attention], ...] = (
    (r"FlashAttention-?3|cuDNN", Attention.FUSED),
    (r"FlashAttention-?2|flash-?attn-?2", Attention.FLASH2),
    (r"xformers", Attention.FLASH1),
    # Megatron's words; its own implementation of a layer keeps scores in memory
    (r"attention-backend=(unfused|local)|transformer-impl=local", Attention.UNFUSED),
    (r"attention-backend=flash", Attention.FLASH2),
    (r"attention-backend=fused|NVTE_FUSED_ATTN=1", Attention.FUSED),
)
_DISPATCHERS: tuple[tuple[str, Dispatcher], ...] = (
    (r"dispatcher[-_a-z]*[=: ]+all-?to-?all|all-?to-?all dispatcher|A2A dispatcher|^A2A$", Dispatcher.ALL_TO_ALL),
    # a capacity factor goes with all-to-all: other dispatchers know no capacity (Megatron-Core, transformer_config.py)
    (r"token[- ]?drop", Dispatcher.ALL_TO_ALL),
    (r"(no|without) (DeepEP|HybridEP)|(DeepEP|HybridEP) off", Dispatcher.ALL_TO_ALL),
    (r"DeepEP|HybridEP|dispatcher[-_a-z]*[=: ]+flex|flex dispatcher", Dispatcher.FLEX),
)
# Megatron's own kernels unless --cross-entropy-fusion-impl says otherwise (megatron/training/arguments.py)
_LOSSES: tuple[tuple[str, FusedLoss], ...] = ((r"cross-entropy[- ](loss[- ])?fusion", FusedLoss.COMPILED),)
_OVERLAPS: tuple[tuple[str, str], ...] = (
    (r"TP(?:/\w+)* (?:comm )?overlap|tp-comm-overlap=True|AsyncTP", "tp"),
    # DualPipe was made to overlap the exchanges of one chunk with another's compute (arXiv 2412.19437, section 3.2.1)
    (r"EP[- ](?:comm )?overlap|A2A[_ ]overlap|1f1b[- ]overlap|overlap-moe|Dual-?Pipe", "ep"),
    (r"TP/DP/PP overlap|overlap-p2p|PP overlap", "pp"),
)
# Words that switch an overlap off
_APART: tuple[tuple[str, str], ...] = (
    (r"EP[- ](?:comm )?overlap(?: is)? (?:off|disabled)|(?:no|without) EP[- ]overlap|A2A_OVERLAP=(?:0|False)", "ep"),
)
# Megatron adds gradients apart from products with this flag (RunOptions.fused_accumulation)
_ADDED_APART = r"no-gradient-accumulation-fusion=True"
_OVERLAPS_ZERO = r"overlap-(grad-reduce|param-gather)|\bDP\b[^;]*overlap|comm overlap"

_FINE_TUNED = r"\b(SFT|LoRA|LORA)\b|[Ff]ine-?tun"

# Packed documents without their lengths, so that attention goes over all of a sequence: MLPerf's fine-tuning
# (packed_sequence_return_cu_seqlen: False of megatron_gpt_peft_tuning_config.yaml in its submissions).
_WHOLE = r"MLPerf"


def default_options(
    framework: Framework, era: float, flags: str, device: str, precision: str, notes: str = "", model: str = ""
) -> RunOptions:
    """Return the options of a framework at a time, changed by the words of the run.

    Args:
        flags: Flags, which may say everything.
        notes: What is told of the run: launch, dispatcher and overlap of experts are read there, too.
        model: Its name: some recipes differ by model.
    """
    usual = stacks_of_frameworks()[framework].options_at(era, device, precision, model)
    both = f"{flags}; {notes}"
    launch, attention = find(_LAUNCH, both), find(_ATTENTION, flags)
    said = {name for pattern, name in _OVERLAPS if re.search(pattern, both if name == "ep" else flags, re.IGNORECASE)}
    apart = {name for pattern, name in _APART if re.search(pattern, both, re.IGNORECASE)}
    return replace(
        usual,
        launch=launch or usual.launch,
        attention=attention or usual.attention,
        dispatcher=find(_DISPATCHERS, flags) or find(_DISPATCHERS, notes) or usual.dispatcher,
        overlap=(usual.overlap | said) - apart,
        fused_loss=find(_LOSSES, flags) or usual.fused_loss,
        overlap_zero=usual.overlap_zero or re.search(_OVERLAPS_ZERO, flags, re.IGNORECASE) is not None,
        fused_accumulation=usual.fused_accumulation and re.search(_ADDED_APART, flags) is None,
        document_len=_document_len(framework, era)
        if re.search(_FINE_TUNED, f"{flags} {notes}") and not re.search(_WHOLE, model)
        else None,
    )


def _document_len(framework: Framework, era: float) -> int | None:
    packed = stacks_of_frameworks()[framework].packed
    return packed.tokens if packed is not None and era < packed.until else None
