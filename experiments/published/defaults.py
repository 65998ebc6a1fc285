"""Defaults of the frameworks that published rows name (read from profiles/stacks), and the words of their flags.

There is one default per framework and field, never per row, campaign, model, or anything measured. Patterns are
case-insensitive regular expressions, tried in order; the first match counts. If a source leaves a choice open, all
alternatives are priced: the first is the prediction, the others widen its interval.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from autoplan.config.recompute import MODULES
from autoplan.stacks.records import Framework as Framework
from autoplan.stacks.records import KeptGathered, Stack, StackKernels, stacks_of_frameworks

_Found = TypeVar("_Found")


# What each framework does by default: its record (profiles/stacks).
_STACKS = stacks_of_frameworks()
DEFAULTS: Mapping[Framework, StackKernels] = {framework: _STACKS[framework].kernels for framework in Framework}


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

# ZeRO stages; several if the words leave the stage open. A stated shard group smaller than dp is hybrid ZeRO.
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


def _where(true: Callable[[Stack], bool]) -> frozenset[Framework]:
    return frozenset(framework for framework in Framework if true(_STACKS[framework]))


def mtp_layers(framework: Framework, era: float, model: str) -> int:
    """Return the layers for tokens after the next that a framework adds to a model."""
    return _STACKS[framework].mtp_layers_at(era, model)


KEPT_IN_PIPELINES = _where(lambda s: KeptGathered.PIPELINES in s.kept_gathered)
KEPT_WITH_EXPERTS = _where(lambda s: KeptGathered.EXPERTS in s.kept_gathered)

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
EVERY_OTHER = r"^selective \((every other layer|2)\)"  # layers, of torchtitan
SELECTIVE_BY_OPERATION = r"^selective \(op\)"  # torchtitan's selective recompute within layers
CORE_ATTENTION = r"^selective( \(core_attn\))?$"  # the planner's selective recompute
_MODULE = f"(?:{'|'.join(MODULES)})"  # of Megatron's --recompute-modules
MODULES_RECOMPUTED = rf"^selective \(({_MODULE}(?:, ?{_MODULE})*)\)$"
# Megatron's own flag, beside "selective"
MODULES_IN_FLAGS = rf"recompute-modules=\[({_MODULE}(?: {_MODULE})*)\]"

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
DEFAULT_CHUNKS: Mapping[Framework, int] = {f: s.chunks for f, s in _STACKS.items() if s.chunks is not None}
# the schedule with several chunks per rank
INTERLEAVED: Mapping[str, str] = {"1F1B": "Interleaved1F1B", "ZB-H1": "InterleavedZeroBubble"}

# Vocabulary size if a row does not state it, padded to a multiple of VOCAB_MULTIPLE times tp.
VOCAB: Mapping[Framework, int] = {f: s.vocab.vocab_size for f, s in _STACKS.items() if s.vocab is not None}
VOCAB_MULTIPLE = 128
MEGATRONS = tuple(VOCAB)
# (rank, layers) of adapters; of other frameworks Hugging Face PEFT's default: rank 8, queries and values
ADAPTERS: Mapping[Framework, tuple[int, tuple[str, ...]]] = {
    f: (s.adapters.rank, s.adapters.layers) for f, s in _STACKS.items() if s.adapters is not None
}
USUAL_ADAPTERS: tuple[int, tuple[str, ...]] = (8, ("q_proj", "v_proj"))


def find(table: Sequence[tuple[str, _Found]], text: str) -> _Found | None:
    """Return the entry of the first pattern that matches in `text`, or None."""
    return next((value for pattern, value in table if re.search(pattern, text, re.IGNORECASE)), None)
