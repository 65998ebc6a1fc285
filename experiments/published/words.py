"""What the words of a published row say about schedule, precision, recompute and offloading, as the planner names them.

Every reader returns `Words`: the choices, the likeliest first. The first is the prediction and the others widen its
interval; words that say nothing known are read as the default of the field, which `note` says.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Generic, TypeVar

from autoplan.config.recompute import modules_choice
from autoplan.cost_models.hardware.parts import Device
from autoplan.schedules.schedule import SCHEDULES
from experiments.published import defaults as tables
from experiments.published import reading
from experiments.published.defaults import find
from experiments.published.table import Row

Choice = TypeVar("Choice")


@dataclass(frozen=True)
class Words(Generic[Choice]):
    """Choices, the likeliest first. `assumed`: the row leaves the field open; `note`: how its words were taken."""

    choices: tuple[Choice, ...]
    assumed: bool = False
    note: str = ""


# -- schedules ---------------------------------------------------------------------------------------------------------


def schedule_of(row: Row, pp: int) -> Words[str]:
    """Schedules of the planner with one chunk per rank, or as many as they fix. Without a pipeline all are 1F1B."""
    plain = _bare(row["schedule"])
    if pp == 1 or not plain:
        return Words(("1F1B",))
    found = find(tables.SCHEDULE_WORDS, plain)
    if found is not None:
        return Words(found, len(found) > 1)
    note = f"schedule={row['schedule']} is not known: priced as {' or '.join(reading.UNKNOWN_SCHEDULE)}"
    return Words(reading.UNKNOWN_SCHEDULE, True, note)


def chunks_of(row: Row, schedule: str, layers: int, pp: int) -> tuple[int, ...]:
    """Chunks per rank: those that the schedule fixes, else as stated, in the column or with the schedule's name
    (`VP=2`). Where they are not: one if the schedule says so, else the framework's default, or as many as there are
    layers for, with as many in every chunk, embedding and loss counting as layers or not (Megatron's
    --account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split; Llama 3, arXiv 2407.21783,
    section 3.3.2, took a layer each from the first and the last stage)."""
    if pp == 1:
        return (1,)
    fewest, most = SCHEDULES[schedule].virtual_stages
    if most is not None and (fewest, most) != (1, 1):
        return (fewest,)
    if most is not None and schedule not in tables.INTERLEAVED:
        return (1,)
    stated = stated_chunks(row)
    if stated is not None:
        return (stated or 1,)
    if re.search(reading.ONE_CHUNK, _bare(row["schedule"])):
        return (1,)
    usual = tables.DEFAULT_CHUNKS.get(row.framework)
    if usual is not None:
        return tuple(dict.fromkeys((min(usual, max(1, layers // pp)), 1)))
    even = (v for v in range((layers + 2) // pp, 1, -1) if any((layers + ends) % (pp * v) == 0 for ends in (0, 1, 2)))
    return tuple(dict.fromkeys((next(even, max(1, layers // pp)), 1)))


_CHUNKS = r"\b(?:VPP|VP|virtual[ _-]?(?:pipeline|stages?|size)*|chunks|v)\s*[=: ]\s*(\d+)"


def stated_chunks(row: Row) -> int | None:
    """Chunks per rank in the column, with the schedule's name or in the source; None where none says it."""
    said = f"{row['schedule']} {row.stated}"
    if not row["vpp"] and (match := re.search(_CHUNKS, said, re.IGNORECASE)) is not None:
        return int(match.group(1))
    return row.count("vpp")


def _bare(text: str) -> str:
    """Letters and digits of a schedule's name, without its chunks and torch's prefix."""
    plain = re.sub(_CHUNKS, "", text, flags=re.IGNORECASE)
    return re.sub(r"[^a-z0-9]", "", plain.lower()).removeprefix("schedule").removesuffix("schedule")


# -- precision ---------------------------------------------------------------------------------------------------------

INT8 = "int8"  # products of 8-bit integers: priced as those of 8-bit floats at the device's speed for either


def usual_precision(device: Device) -> str:
    """Where a row is silent: bf16 if the device has it."""
    return "bf16" if "bfloat16" in device.peak_flops_by_dtype else "fp16"


def precision_of_words(row: Row, device: Device) -> Words[str]:
    """Names of the planner's precisions, and INT8."""
    text, usual = row["precision"], usual_precision(device)
    if not text:
        return Words((usual,), True)
    name = find(tables.PRECISION_WORDS, text)
    if name is None:
        return Words((usual,), True, f"precision={text} is not known: priced as {usual}")
    if name == INT8:
        fast = {"float8", INT8} & device.peak_flops_by_dtype.keys()
        if not fast:
            return Words((usual,), True, f"precision={text} is priced as {usual}: the device has no products in 8 bits")
        # of two that a row leaves open, the one that all devices have
        both = (usual, INT8) if find(tables.PRECISION_WORDS[-3:], text) else (INT8, usual)
        return Words(both, True)
    blocks = name == "fp8" and find(tables.FORMATS, text) == tables.BLOCKS
    if blocks and "float4" in device.peak_flops_by_dtype:  # devices that multiply by scales per block
        name = tables.BLOCKS
    return Words((name,))


# -- recompute and offloading ------------------------------------------------------------------------------------------

HALF = "half"  # of every stage's layers, in full


def recompute_of(row: Row, usual: tuple[str, ...]) -> tuple[str, ...]:
    """Return what is computed again, the likeliest first. `usual`: of the framework."""
    text = row["recompute"]
    if not text:
        return usual
    if re.search(tables.CORE_ATTENTION, text):  # of modules that flags name, else of Megatron's only default
        named = re.search(tables.MODULES_IN_FLAGS, row["flags"])
        return (modules_choice(named[1].split()),) if named is not None else ("selective",)
    if re.search(tables.SELECTIVE_BY_OPERATION, text):
        return ("products",)
    if re.search(tables.EVERY_OTHER, text):
        return (HALF, "selective", "full")
    if (named := re.search(tables.MODULES_RECOMPUTED, text)) is not None:
        return (modules_choice(name.strip() for name in named[1].split(",")),)
    found = find(tables.RECOMPUTE_WORDS, text)
    return (found,) if found else ("selective", "none", "full")  # of other parts of a layer: it lies between


@dataclass(frozen=True)
class OnHost:
    """What is offloaded: state (`ParallelConfig.offload`), and whether activations are."""

    state: tuple[str, ...] = ()
    activations: bool = False

    def __bool__(self) -> bool:
        return bool(self.state) or self.activations


_OFFLOAD = r"off-?load|ZeRO-?Infinity|CPU-?Adam"
_NEGATED = r"\b(none|false|off|no|not|without|disabled)\b(?!-?load)|(?<![\d.])0 ?%|=\s*0(?![\d.])"
_STATED = r"off-?load\w*\W+(true|on|yes|enabled|required|\d)"  # in notes, which also tell what was tried
_AS_NEEDED = r"off-?load\w* required"  # as much as does not fit otherwise


def offload_of(row: Row, zero_stage: int, shards: int) -> Words[OnHost]:
    """Return what is on the host; nothing where no words say so.

    Of a share of it below a half, or as much as is required, nothing is the prediction, else all of it, and the other
    one widens the interval; what runs beside other work, too. Words that do not say what is offloaded: parameters where
    ZeRO 3 shards them, else the optimizer's state; activations widen the interval.
    """
    texts = {name: row[name] for name in ("flags", "recompute", "zero_stage", "notes")} | {"source": row.stated}
    said = [
        part
        for column, text in texts.items()
        for part in re.split(r"[;|]|, ", text)
        if re.search(_OFFLOAD, part, re.IGNORECASE)
        and not re.search(_NEGATED, part, re.IGNORECASE)
        and (column != "notes" or re.search(_STATED, part, re.IGNORECASE))
    ]
    nothing = OnHost()
    if not said:
        return Words((nothing,))
    text = "; ".join(said)
    kinds = {name for pattern, name in tables.OFFLOADED if re.search(pattern, text, re.IGNORECASE)}
    if re.search(_OFFLOAD, row["recompute"], re.IGNORECASE) and not kinds:
        kinds = {"activations"}
    state = tuple(name for name in ("optimizer", "parameters") if name in kinds)
    assumed = not kinds
    if assumed:
        state = ("parameters",) if zero_stage == 3 else ("optimizer",)
    if "parameters" in state:  # the optimizer's state goes with them, and only shards can be on the host
        state = ("parameters",) if zero_stage > 0 and shards > 1 else ("optimizer",)
    all_of_it = OnHost(state, "activations" in kinds)
    share = 0.0 if re.search(_AS_NEEDED, text, re.IGNORECASE) else _share(text)
    choices = [all_of_it, nothing] if share < 1 or re.search(r"overlap|async", text, re.IGNORECASE) else [all_of_it]
    if share < 0.5:
        choices.reverse()
    if assumed:
        choices.append(OnHost((), activations=True))
    return Words(tuple(choices), len(choices) > 1)


def _share(text: str) -> float:
    """Of what is offloaded, 1 where it is not said."""
    if (match := re.search(r"(\d+(?:\.\d+)?) ?%", text)) is not None:
        return float(match.group(1)) / 100
    if (match := re.search(r"(?:fraction|ratio|share)\W{0,3}([01]?\.\d+)", text, re.IGNORECASE)) is not None:
        return float(match.group(1))
    return 1.0
