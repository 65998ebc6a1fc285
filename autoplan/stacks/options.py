"""Options of published runs beyond their degrees: attention kernel, launch, overlap.

There is one default per (framework, era), never per row, campaign or model. The era is the date of the release that a
row names (`container 26.04`, `release v25.02`, `NeMo 24.07`), else of its source (for a preprint some months before its
number), else of the first year in which its devices were used. The flags of a row take precedence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoplan.config.parallel import Attention, Dispatcher, Launch, RunOptions
from autoplan.stacks.defaults import Framework, find

_PLAIN, _OLD = RunOptions(), RunOptions(Attention.UNFUSED)
# Megatron's defaults: --overlap-p2p-communication with virtual stages, a ring for context parallelism
_INTERLEAVED = frozenset({"pp", "cp"})
_RECIPES = frozenset({"pp", "cp", "tp"})  # NeMo's performance recipes add user buffers for tensor parallelism

# ZeRO's overlap: until v2.2 (early 2021) the README's commands take --DDP-impl torch, which reduces during the
# backward; Megatron's own implementation reduces at the end, and --overlap-grad-reduce and --overlap-param-gather are
# off by default.
_MEGATRON = tuple(
    (since, RunOptions(attention, overlap=_INTERLEAVED, overlap_zero=beside))
    for since, attention, beside in (
        (0.0, Attention.UNFUSED, True),
        (2021.3, Attention.UNFUSED, False),
        (2023.0, Attention.FLASH1, False),
        (2023.8, Attention.FLASH2, False),
        (2024.3, Attention.FUSED, False),
    )
)

# (since, options); the last that applies counts. FlashAttention: 2022, in Megatron and PyTorch from 2023 on;
# FlashAttention-2 from the end of 2023; cuDNN's kernel through Transformer Engine from 2024 on.
DEFAULT_OPTIONS: Mapping[Framework, Sequence[tuple[float, RunOptions]]] = {
    # MPT's loss_fn is "fused_crossentropy", flash-attention's (llmfoundry/models/mpt/modeling_mpt.py)
    Framework.COMPOSER: (
        (0.0, RunOptions(Attention.FLASH1, fused_loss=True)),
        (2023.8, RunOptions(Attention.FLASH2, fused_loss=True)),
    ),
    Framework.JAX: ((0.0, RunOptions(Attention.FUSED, Launch.GRAPHS)),),  # XLA launches command buffers; cuDNN
    # DeepSpeed's pipelines reduce when all micro-batches are done (runtime/pipe/engine.py), and overlap_comm is off
    Framework.MEGATRON_DEEPSPEED: (
        (0.0, RunOptions(Attention.UNFUSED, overlap_zero=False, zero_by_tensor=True)),
        (2022.0, RunOptions(Attention.UNFUSED, overlap_zero=False)),
        (2023.8, RunOptions(Attention.FLASH2, overlap_zero=False)),
    ),
    # the launch scripts of BLOOM, and of runs that follow it on the same machine, set CUDA_LAUNCH_BLOCKING=1
    Framework.BIGSCIENCE: (
        (0.0, RunOptions(Attention.UNFUSED, Launch.BLOCKING, overlap_zero=False)),
        (2023.8, RunOptions(Attention.FLASH2, Launch.BLOCKING, overlap_zero=False)),
    ),
    Framework.MEGATRON: _MEGATRON,
    Framework.MEGATRON_TESTS: _MEGATRON,
    Framework.AUTOMODEL: ((0.0, RunOptions(Attention.FUSED, dispatcher=Dispatcher.FLEX)),),
    Framework.NEMO: (
        (0.0, RunOptions(Attention.FLASH2, overlap=_RECIPES)),
        (2024.3, RunOptions(Attention.FUSED, overlap=_RECIPES)),
        # recipes of Megatron Bridge (scripts/performance, its history) capture CUDA graphs of the parts without dynamic
        # sizes
        (2025.6, RunOptions(Attention.FUSED, Launch.GRAPHS, overlap=_RECIPES, narrow_gather=True)),
        (
            2026.0,
            RunOptions(
                Attention.FUSED, Launch.GRAPHS, overlap=_RECIPES, dispatcher=Dispatcher.FLEX, narrow_gather=True
            ),
        ),
    ),
    # src/megatron/bridge/recipes: cuda_graph_impl = "none" nearly everywhere, tp_comm_overlap in dense recipes
    Framework.BRIDGE_LIBRARY: ((0.0, RunOptions(Attention.FUSED, overlap=_RECIPES, narrow_gather=True)),),
    # its configs: overlap_sync_grad = True, overlap_sync_param = False; flash-attention's loss (losses/ce_loss.py)
    Framework.INTERNEVO: (
        (0.0, RunOptions(Attention.FLASH1, overlap_gather=False, fused_loss=True)),
        (2023.8, RunOptions(Attention.FLASH2, overlap_gather=False, fused_loss=True)),
    ),
    Framework.TORCHTITAN: ((0.0, RunOptions(Attention.FLASH2, narrow_gather=True)),),
    Framework.OTHER: ((0.0, _OLD), (2022.9, RunOptions(Attention.FLASH1)), (2023.8, _PLAIN)),
}

# Recipes of Megatron Bridge that differ by device or precision: (since, pattern of both, changed options).
_RECIPE_CHANGES: tuple[tuple[float, str, Mapping[str, object]], ...] = (
    # DeepEP and the exchange of experts beside other micro-batches on H100; HybridEP where NVLink joins a rack
    (2025.6, r"^H100", {"dispatcher": Dispatcher.FLEX, "overlap": _RECIPES | {"ep"}}),
    (2025.8, r"^H100", {"dispatcher": Dispatcher.ALL_TO_ALL, "overlap": _RECIPES}),
    (2025.8, r"^GB", {"dispatcher": Dispatcher.FLEX}),
    # full_iteration graphs, moe_a2a_overlap and the fused grouped MLP of MXFP8
    (
        2026.4,
        r"MXFP8|NVFP4|FP8-MX",
        {
            "dispatcher": Dispatcher.FLEX,
            "launch": Launch.FULL_GRAPHS,
            "overlap": _RECIPES | {"ep"},
            "fused_experts": True,
        },
    ),
)
EXPERTS_WHOLE_SINCE = 2025.6  # etp = 1 in every recipe with experts of Megatron Bridge

# Words of flags -> options.
_LAUNCH: tuple[tuple[str, Launch], ...] = (
    (r"CUDA_LAUNCH_BLOCKING=1", Launch.BLOCKING),
    (r"full[- ]iteration.{0,12}graph", Launch.FULL_GRAPHS),
    (r"CUDA[- ]?graph", Launch.GRAPHS),
    (r"token[- ]?drop", Launch.FULL_GRAPHS),  # experts take a fixed number of rows, so nothing waits for their sizes
)
_ATTENTION: tuple[tuple[str, Attention], ...] = (
    (r"FlashAttention-?3|cuDNN", Attention.FUSED),
    (r"FlashAttention-?2|flash-?attn-?2", Attention.FLASH2),
    (r"xformers", Attention.FLASH1),
)
_DISPATCHERS: tuple[tuple[str, Dispatcher], ...] = (
    (r"dispatcher[-_a-z]*[=: ]+all-?to-?all|all-?to-?all dispatcher|A2A dispatcher", Dispatcher.ALL_TO_ALL),
    (r"(no|without) (DeepEP|HybridEP)|(DeepEP|HybridEP) off", Dispatcher.ALL_TO_ALL),
    (r"DeepEP|HybridEP|dispatcher[-_a-z]*[=: ]+flex|flex dispatcher", Dispatcher.FLEX),
)
_OVERLAPS: tuple[tuple[str, str], ...] = (
    (r"TP(?:/\w+)* (?:comm )?overlap|tp-comm-overlap=True|AsyncTP", "tp"),
    # DualPipe was made to overlap the exchanges of one chunk with another's compute (arXiv 2412.19437, section 3.2.1)
    (r"EP[- ](?:comm )?overlap|1f1b[- ]overlap|overlap-moe|Dual-?Pipe", "ep"),
    (r"TP/DP/PP overlap|overlap-p2p|PP overlap", "pp"),
)
_OVERLAPS_ZERO = r"overlap-(grad-reduce|param-gather)|\bDP\b[^;]*overlap|comm overlap"

# Fine-tuning recipes of NeMo pack SQuAD (Rajpurkar et al., 2016) to the sequence length; a paragraph with its question
# and the prompt around it is about 200 tokens. Megatron Bridge, NeMo's successor, takes mock data instead
# (scripts/performance/argument_parser.py, --data). (framework, until, tokens)
_FINE_TUNED = r"\b(SFT|LoRA|LORA)\b|[Ff]ine-?tun"
_PACKED: tuple[tuple[Framework, float, int], ...] = ((Framework.NEMO, 2025.6, 200),)


def default_options(
    framework: Framework, era: float, flags: str, device: str, precision: str, notes: str = ""
) -> RunOptions:
    """Return the options of a framework at a time, changed by the flags of the run."""
    usual = next(options for since, options in reversed(DEFAULT_OPTIONS[framework]) if era >= since)
    if framework is Framework.NEMO:
        for since, pattern, changed in _RECIPE_CHANGES:
            if era >= since and re.search(pattern, f"{device} {precision}"):
                usual = replace(usual, **changed)  # type: ignore[arg-type]
    launch, attention = find(_LAUNCH, flags), find(_ATTENTION, flags)
    said = {name for pattern, name in _OVERLAPS if re.search(pattern, flags, re.IGNORECASE)}
    return replace(
        usual,
        launch=launch or usual.launch,
        attention=attention or usual.attention,
        dispatcher=find(_DISPATCHERS, flags) or usual.dispatcher,
        overlap=usual.overlap | said,
        overlap_zero=usual.overlap_zero or re.search(_OVERLAPS_ZERO, flags, re.IGNORECASE) is not None,
        document_len=_document_len(framework, era) if re.search(_FINE_TUNED, f"{flags} {notes}") else None,
    )


def _document_len(framework: Framework, era: float) -> int | None:
    return next((tokens for known, until, tokens in _PACKED if known is framework and era < until), None)
