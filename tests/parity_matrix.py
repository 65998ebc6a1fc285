"""Every pair of what a plan may hold: run, and equal to one device, or refused with a message.

    python tests/parity_matrix.py --write docs/parity.md      # a few minutes; real processes over gloo, float64

A pair is run in the smallest plan that has both of its features and what these need by themselves (ZeRO needs data
parallelism, expert parallelism needs experts), and some plans of eight processes have many at once.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from mixed import error_of, gradients_by_hand
from parity import (
    ENCODER_DECODER,
    SEQ,
    TARGET,
    Case,
    Trained,
    cluster_of,
    graph_of,
    one_device,
    train_reference,
    trained,
    worst,
)

from autoplan.config.parallel import Mode
from autoplan.errors import CaptureError, PinError
from autoplan.report.files import write_text
from autoplan.search.planner import search_plan
from autoplan.search.request import PlanRequest

NUM_SAMPLES = 12  # of the global batch
NUM_STEPS = 3
LOSS_TOLERANCE = GRADIENT_TOLERANCE = 1e-12  # float64, sums in another order
PARAMETER_TOLERANCE = 1e-9  # AdamW amplifies rounding where a gradient is nearly zero
FACTOR = 1.25  # bf16: error of all gradients against float64, over that of one device in bf16
LOSS_TOLERANCE_16 = 2e-3

FEATURES: Mapping[str, Mapping[str, Any]] = {
    "dp": {"dp": 2},
    "tp": {"tp": 2},
    "pp": {"pp": 2, "num_micro_batches": 2},
    "ep": {"dp": 2, "ep": 2},
    "ep over tp": {"tp": 2, "ep": 2, "etp": 1},
    "ep over cp": {"cp": 2, "ep": 2},
    "etp": {"dp": 2, "ep": 2, "tp": 2, "etp": 2},
    "cp": {"cp": 2, "context_method": "gather"},
    "ring": {"cp": 2, "context_method": "ring"},
    "Ulysses": {"cp": 2, "context_method": "ulysses"},
    "Ulysses x ring": {"cp": 4, "context_method": "ulysses2xring2"},
    "ZeRO 1": {"zero": 1},
    "ZeRO 2": {"zero": 2},
    "ZeRO 3": {"zero": 3},
    "hybrid ZeRO": {"dp": 4, "zero": 1, "zero_replicas": 2},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "GPipe": {"pp": 2, "schedule": "GPipe", "num_micro_batches": 2},
    "interleaved": {"pp": 2, "schedule": "Interleaved1F1B", "virtual": 2, "num_micro_batches": 6},
    "ZB-H1": {"pp": 2, "schedule": "ZB-H1", "num_micro_batches": 6},
    "ZBV": {"pp": 2, "schedule": "ZBV", "virtual": 2, "num_micro_batches": 6},
    "DualPipeV": {"pp": 2, "schedule": "DualPipeV", "virtual": 2, "num_micro_batches": 6},
    "recompute": {"recompute": "full"},
    "regions": {"recompute": "attention+mlp+norms"},
    "offload": {"recompute": "offload"},
    "optimizer on the host": {"offload": "optimizer"},
    "parameters on the host": {"offload": "parameters"},
    "compile": {"compile": "aot_eager"},
    "micro-batches": {"num_micro_batches": 3},
    "unequal labels": {"labels": "unequal"},
}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "Llama": {"family": "llama"},
    "tied": {"family": "llama-tied"},
    "dropout": {"family": "gpt-untied", "dropout": 0.25},
    "windows": {"family": "qwen2-mixed"},
    "Mixtral": {"family": "mixtral"},
    "Qwen3-MoE": {"family": "qwen3-moe"},
    "DeepSeek-V3": {"family": "deepseek"},
    "router loss": {"family": "mixtral-aux"},
    "capacity": {"family": "gpt-switch"},
    "padding": {"family": "llama-padded"},
    "packed": {"family": "llama-packed"},
    "padded BERT": {"family": "bert-padded"},
    "padded T5": {"family": "t5-padded"},
    "encoder-decoder": {"family": "encdec"},
    "T5": {"family": "t5"},
    "BART": {"family": "bart"},
    "skip connections": {"family": "skips"},
}
# of each axis, of ZeRO, schedules and recompute those that differ most
WITH_FAMILIES = ("dp", "tp", "pp", "ep", "cp", "ring", "Ulysses", "ZeRO 3", "interleaved", "recompute", "regions")
# and of each kind of model one has all of them
IN_FULL = ("Mixtral", "DeepSeek-V3", "router loss", "encoder-decoder", "T5")
# no plan has two of these
ONE_OF = (
    ("ZeRO 1", "ZeRO 2", "ZeRO 3"),
    ("GPipe", "interleaved", "ZB-H1", "ZBV", "DualPipeV"),
    ("bf16", "fp16"),
    ("cp", "ring", "Ulysses", "Ulysses x ring"),
    ("recompute", "regions", "offload"),
    ("ep over tp", "etp"),
    ("optimizer on the host", "parameters on the host"),
)

TOGETHER = (
    Case("llama", dp=2, tp=2, pp=2, zero=2, num_micro_batches=3, labels="unequal", schedule="GPipe"),
    Case("llama-tied", dp=2, cp=2, tp=2, zero=3, num_micro_batches=2, recompute="full"),
    Case("qwen2-mixed", cp=2, tp=2, pp=2, num_micro_batches=3, labels="unequal", recompute="full"),
    Case("gpt-untied", dp=2, cp=2, pp=2, zero=1, num_micro_batches=2),
    Case("qwen2-mixed", dp=2, cp=4, zero=3, num_micro_batches=2, recompute="full", context_method="ulysses2xring2"),
    Case("deepseek", cp=4, tp=2, zero=1, num_micro_batches=3, labels="unequal", context_method="ring"),
    Case("deepseek", dp=4, ep=2, pp=2, zero=1, num_micro_batches=3, recompute="full", labels="unequal"),
    Case("mixtral", dp=2, tp=2, pp=2, zero=3, num_micro_batches=3, labels="unequal"),
    Case(
        "llama-tied", dp=2, tp=2, pp=2, zero=2, num_micro_batches=6, schedule="DualPipeV", virtual=2, labels="unequal"
    ),
    Case("deepseek", dp=4, ep=2, pp=2, zero=1, num_micro_batches=3, schedule="ZBV", virtual=2, recompute="full"),
    Case("qwen2-mixed", cp=2, dp=2, pp=2, zero=3, num_micro_batches=6, schedule="Interleaved1F1B", virtual=2),
    Case("gpt-untied", pp=2, tp=4, num_micro_batches=6, schedule="InterleavedZeroBubble", virtual=2, dropout=0.25),
    Case("encdec", dp=2, pp=4, zero=2, num_micro_batches=3, labels="unequal", recompute="full"),
    Case("t5", dp=2, tp=2, pp=2, zero=3, num_micro_batches=2, labels="unequal", stages=(1, 3)),
    Case("skips", dp=2, pp=4, zero=1, num_micro_batches=3, labels="unequal", recompute="full"),
    Case("qwen3-moe", dp=2, cp=2, tp=2, ep=4, etp=1, zero=3, num_micro_batches=3, labels="unequal", recompute="full"),
    Case("mixtral", dp=2, cp=2, tp=2, ep=2, etp=2, zero=1, num_micro_batches=2),
    Case("deepseek", dp=2, tp=2, pp=2, ep=4, etp=1, zero=2, num_micro_batches=3, labels="unequal"),
    Case("llama-tied", dp=2, tp=2, pp=2, zero=1, num_micro_batches=3, labels="unequal", precision="bf16"),
    Case("gpt-untied", dp=4, pp=2, zero=3, zero_replicas=2, num_micro_batches=3, recompute="full"),
    Case("qwen3-moe-aux", dp=2, cp=2, tp=2, ep=4, etp=1, zero=3, num_micro_batches=3, labels="unequal"),
    Case("mixtral-aux", dp=2, tp=2, pp=2, zero=2, num_micro_batches=3, labels="unequal", recompute="full"),
)


@dataclass(frozen=True)
class Result:
    """What became of one case.

    Attributes:
        refused: the message, or empty.
        loss, gradient, parameter: largest relative differences from one device over three AdamW steps with clipping.
        factor: of a plan in bf16, see FACTOR; 0 of the others.
    """

    refused: str = ""
    loss: float = 0.0
    gradient: float = 0.0
    parameter: float = 0.0
    factor: float = 0.0

    @property
    def equal(self) -> bool:
        if self.factor:
            return not self.refused and self.loss <= LOSS_TOLERANCE_16 and self.factor < FACTOR
        return (
            not self.refused
            and self.loss <= LOSS_TOLERANCE
            and self.gradient < GRADIENT_TOLERANCE
            and self.parameter < PARAMETER_TOLERANCE
        )


def case_of(*names: str) -> Case:
    """The smallest plan that has all of the features."""
    values: dict[str, Any] = {}
    for name in names:
        for key, value in {**FEATURES, **FAMILIES}[name].items():
            values[key] = max(value, values.get(key, value)) if isinstance(value, int) else value
    case = Case(**values)
    if case.ep > 1 and "family" not in values:
        case = replace(case, family="mixtral")
    if {"dp", "ep"} <= set(names):
        case = replace(case, dp=4)  # replicas of experts as well
    if case.offload == "parameters" and not case.zero:
        case = replace(case, zero=3)
    if case.zero and case.dp * case.cp == 1:
        case = replace(case, dp=2)
    if case.pp > 1 and case.num_micro_batches == 1:
        case = replace(case, num_micro_batches=2)
    return replace(case, num_micro_batches=3) if case.dp == 4 else case


def pairs() -> Iterator[tuple[str, str]]:
    """Every feature with every later one, the main ones with every family, and all with some families."""
    excluded = {frozenset(p) for group in ONE_OF for p in itertools.combinations(group, 2)}
    found = [*itertools.combinations(FEATURES, 2), *itertools.product(WITH_FAMILIES, FAMILIES)]
    found += itertools.product((f for f in FEATURES if f not in WITH_FAMILIES), IN_FULL)
    return (p for p in found if frozenset(p) not in excluded)


def refusal(case: Case) -> str:
    """The message with which capture or the search refuses the case, or empty."""
    try:
        graph = graph_of(case.family, case.dropout, case.precision)
    except CaptureError as e:
        return str(e)
    request = PlanRequest(
        graph,
        cluster_of(case.world, case.prices),
        SEQ,
        NUM_SAMPLES,
        case.pins,
        precision=case.precision,
        memory_risk=0.5,
        equal_within=0.0,
        gap=0.0,
        mode=Mode.EAGER if case.compile is None else Mode.COMPILED,
        executed=True,
        target_len=TARGET if graph.has_target else None,
    )
    try:
        search_plan(request)
    except PinError as e:
        return str(e)
    return ""


@functools.lru_cache(maxsize=16)
def wanted(family: str, dropout: float, labels: str, *micro_batches: int) -> Trained:
    """One device; `micro_batches`, where they matter: how many, and of how many ranks each is."""
    single = Case(family, dropout=dropout, labels=labels)
    if micro_batches:
        single = replace(single, num_micro_batches=micro_batches[0], micro_batches_of=micro_batches[1])
    return train_reference(single, torch.float64, NUM_STEPS, "adamw")


def check(case: Case) -> Result:
    """Plan, and if that is not refused train three steps on real processes beside one device."""
    message = refusal(case)
    if message:
        return Result(message)
    one, usual = one_device(case), Case(case.family, dropout=case.dropout, labels=case.labels)
    micro_batches = () if one == usual else (one.num_micro_batches, one.micro_batches_of)
    want = wanted(case.family, case.dropout, case.labels, *micro_batches)
    if case.precision != "native":
        return _in_16_bits(case, want)
    got = trained(case, "float64", NUM_STEPS, "adamw")
    floating = {n: p for n, p in want.parameters.items() if p.is_floating_point()}
    return Result(
        loss=max(abs(a - b) / abs(b) for a, b in zip(got.losses, want.losses, strict=True)),
        gradient=worst(got.gradients, want.gradients)[0],
        parameter=worst({n: got.parameters[n] for n in floating}, floating)[0],
    )


def _in_16_bits(case: Case, exact: Trained) -> Result:
    """Gradients as good as those of one device in 16 bits (by hand, but for dropout, whose masks are autoplan's, and
    for losses and inputs that `mixed` does not know), and the first loss; what follows an AdamW step in 16 bits is no
    longer the same for any two orders of summation."""
    got = trained(case, "float32", NUM_STEPS, "adamw")
    if case.dropout or case.family.endswith("-aux") or case.family in ENCODER_DECODER:
        one = Case(case.family, dropout=case.dropout, labels=case.labels, precision=case.precision)
        one = replace(one, num_micro_batches=case.num_micro_batches, micro_batches_of=case.dp)
        alone = trained(one, "float32", 1, "adamw").gradients
    else:
        alone = gradients_by_hand(case, 0)
    return Result(
        loss=abs(got.losses[0] - exact.losses[0]) / abs(exact.losses[0]),
        factor=error_of(got.gradients, exact.gradients) / error_of(alone, exact.gradients),
    )


def cell(result: Result, notes: dict[str, int]) -> str:
    if result.refused:
        text = re.sub(r"\.py:\d+", ".py", result.refused)  # lines of torch's files differ between its versions
        return f"[{notes.setdefault(text, len(notes) + 1)}]"
    return "yes" if result.equal else "**NO**"


def render(found: Mapping[tuple[str, str], Result], together: Mapping[Case, Result]) -> str:
    """The document."""
    notes: dict[str, int] = {}
    columns = [*list(FEATURES)[1:], *FAMILIES]
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name in FEATURES:
        cells = [cell(found[name, c], notes) if (name, c) in found else "" for c in columns]
        lines.append(f"| **{name}** | " + " | ".join(cells) + " |")
    ran = [r for r in [*found.values(), *together.values()] if not r.refused]
    narrow = [r for r in ran if r.factor]
    exact = [r for r in ran if not r.factor] or ran
    largest = {k: max(getattr(r, k) for r in exact) for k in ("loss", "gradient", "parameter")}
    worst_16 = [max((getattr(r, k) for r in narrow), default=0.0) for k in ("loss", "factor")]
    many = [f"- `{c}`: {cell(r, notes)}" for c, r in together.items()]
    return "\n".join(
        [
            "# What runs with what",
            "",
            "Generated by `python tests/parity_matrix.py --write docs/parity.md`; do not edit.",
            "",
            "*yes*: on real processes over gloo, three AdamW steps with clipping in float64 give the losses, gradients",
            f"and parameters of one device (to {LOSS_TOLERANCE:g}, {GRADIENT_TOLERANCE:g} and "
            f"{PARAMETER_TOLERANCE:g}, relative). A number: refused when planned, with the",
            "message below. Every degree is 2 (dp 4 with ep 2), 3 micro-batches, stages as planned; a pair runs in the",
            "smallest plan that has both and what they need. Small Llama (also with tied embeddings), GPT (dropout),",
            "Qwen2 (sliding windows), mixtures of experts, encoder-decoders (source and target of different lengths)",
            "and a GPT with skip connections over several layers, with random weights.",
            "",
            f"*bf16*, *fp16*: the error of all gradients against float64 is less than {FACTOR:g} times that of one",
            "device in as many bits with the same micro-batches (`test_precision.py`: the same bits, where sums",
            "keep their order). *compile*: each block by torch.compile with the backend aot_eager, which needs no",
            "compiler; test_compiled.py has inductor.",
            "",
            *lines,
            "",
            f"{sum(r.equal for r in ran)} of {len(ran)} plans that run are equal; largest relative differences: loss "
            f"{largest['loss']:.1e}, gradients {largest['gradient']:.1e}, parameters {largest['parameter']:.1e}; in 16 "
            f"bits: loss {worst_16[0]:.1e}, factor {worst_16[1]:.2f}.",
            "",
            "Refused:",
            "",
            *[f"{i}. {text}" for text, i in notes.items()],
            "",
            "Many at once, on eight processes:",
            "",
            *many,
            "",
        ]
    )


def kept(path: Path | None) -> dict[str, Result]:
    """What an interrupted run had found, by the name of the case."""
    if path is None or not path.exists():
        return {}
    return {name: Result(**fields) for name, fields in json.loads(path.read_text()).items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FILE", help="where the document goes; otherwise it is printed")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="results so far: a run that was interrupted goes on")
    args = parser.parse_args()
    start, known = time.perf_counter(), kept(args.keep)

    def result(case: Case, name: str) -> Result:
        if str(case) not in known:
            known[str(case)] = check(case)
            print(f"{time.perf_counter() - start:5.0f} s  {name}: {known[str(case)]}", file=sys.stderr, flush=True)
            if args.keep:
                write_text(args.keep, json.dumps({n: asdict(r) for n, r in known.items()}))
        return known[str(case)]

    found = {pair: result(case_of(*pair), " x ".join(pair)) for pair in pairs()}
    together = {case: result(case, str(case)) for case in TOGETHER}
    text = render(found, together)
    if args.write:
        args.write.parent.mkdir(parents=True, exist_ok=True)
        write_text(args.write, text)
    else:
        print(text)
    return 0 if all(r.refused or r.equal for r in [*found.values(), *together.values()]) else 1


if __name__ == "__main__":
    sys.exit(main())
