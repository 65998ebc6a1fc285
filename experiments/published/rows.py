"""Published training measurements as the planner's input: a model, a cluster, configurations, seconds.

    rows = read_rows(path)
    shapes = Shapes(rows)
    case = interpret(row, shapes)      # Unpriced says why a row cannot be priced

Columns are those of the collection: dimensions of the model, devices, degrees, batch, and what was measured. Nothing of
a row that was measured decides how it is read.
"""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import dataclass, field, replace

from autoplan.config.parallel import (
    Attention,
    Mode,
    ParallelConfig,
    RunOptions,
)
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.errors import AutoplanError
from autoplan.schedules.schedule import num_copies
from autoplan.stacks.like import equal_stages
from autoplan.stacks.records import stacks_of_frameworks
from experiments.published import defaults as tables
from experiments.published import reading
from experiments.published.defaults import Framework, find
from experiments.published.devices import cluster_of as cluster_of
from experiments.published.devices import clusters_of
from experiments.published.options import default_options
from experiments.published.reading import Formula, Memory, era_of
from experiments.published.shapes import Adapters as Adapters
from experiments.published.shapes import Kind as Kind
from experiments.published.shapes import Shape as Shape
from experiments.published.shapes import Shapes as Shapes
from experiments.published.table import COLUMNS as COLUMNS
from experiments.published.table import Row, Unmeasured, Unpriced, Unstated
from experiments.published.table import read_rows as read_rows
from experiments.published.words import (
    HALF,
    INT8,
    OnHost,
    chunks_of,
    offload_of,
    precision_of_words,
    recompute_of,
    schedule_of,
    stated_chunks,
    usual_precision,
)

# -- how it ran --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """One way to read a row: the configuration and how its kernels run.

    `again`: recompute of single layers, as a user writes it; "" where the configuration says it. `shape`, `cluster`,
    `precision`: where they are not the task's. `instead`: fields that are not as the row says.
    """

    mode: Mode
    config: ParallelConfig
    options: RunOptions
    again: str = field(default="", repr=False)
    shape: Shape | None = field(default=None, repr=False)
    cluster: Cluster | None = field(default=None, repr=False)
    precision: str | None = field(default=None, repr=False)
    instead: tuple[str, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class _Reading:
    """One choice for every field that rows may leave open."""

    zero_stage: int
    recompute: str
    virtual_stages: int
    etp: int | None
    mode: Mode
    micro_batch: int
    schedule: str
    on_host: OnHost


@dataclass(frozen=True)
class Task:
    """What is priced: the first legal setting is the prediction, the others widen its interval. Rows may share one.

    `last`: priced only where no setting is legal: what is nearest to the row. `layer`: what one layer adds to a model.
    """

    shape: Shape
    cluster: Cluster
    precision: str
    seq_len: int
    global_batch_size: int
    settings: tuple[Setting, ...]
    last: tuple[Setting, ...] = ()
    layer: bool = False


@dataclass(frozen=True)
class Case:
    """A row as the planner sees it.

    `measured_s`: seconds of one step, from what the row states first of seconds, tokens, arithmetic; NaN without, and
    `unmeasured` says why if that is a fault. `assumed`: fields that the row leaves open; `notes`: what is priced in
    another way than the row says.
    """

    row: Row
    task: Task
    framework: Framework
    measured_s: float
    assumed: tuple[str, ...]
    unmeasured: str = ""
    notes: tuple[str, ...] = ()

    @property
    def memory(self) -> tuple[Memory, float] | None:
        """What kind of memory figure the row has, and its bytes; None without one. Unmeasured for one that cannot be
        read."""
        size = self.row.measured("peak_mem_gb")
        if size is None:
            return None
        kind = find(reading.MEMORY, self.row["mem_kind"])
        if kind is None:
            said = self.row["mem_kind"] or "blank"
            raise Unmeasured(f"not compared: mem_kind {said!r} does not say what peak_mem_gb counts")
        return kind, kind.unit * size


def interpret(row: Row, shapes: Shapes) -> Case:
    """The case of a row. Raises: Unstated for one that no planner could price, Unpriced, AutoplanError for a cluster
    that cannot be."""
    model, framework, seq_len = shapes.read(row), row.framework, row.needed("seq_len")
    shape = model.shape
    ran = _settings(row, shape, framework)
    settings, batch, assumed, notes = list(ran.settings), ran.batch, list(ran.assumed), list(ran.notes)
    measured_s, unmeasured = math.nan, ""
    try:
        measured_s = _measured_s(row, shape, seq_len, batch)
    except Unmeasured as exc:
        unmeasured = str(exc)
    where = clusters_of(row)
    cluster = where.cluster
    words = precision_of_words(row, cluster.device)
    if INT8 in words.choices:
        cluster = _with_int8(cluster)
    era = era_of(row["source"], row["notes"], row["gpu"])
    precision, *others = (_full_name(name, shape.kind.latent, framework, era) for name in words.choices)
    first = settings[0]
    settings += [replace(first, precision=name) for name in others]
    settings += [replace(first, shape=s) for s in model.others]
    settings += [replace(first, cluster=c) for c in where.others]
    plain = _full_name(usual_precision(cluster.device), shape.kind.latent, framework, era)
    last = list(ran.last)
    if plain not in (precision, *others):
        in_plain = [replace(s, precision=plain, instead=(*s.instead, "precision")) for s in (first, *ran.last)]
        last = [in_plain[0], *last, *in_plain[1:]]
    assumed += [name for name in (*model.assumed, *where.assumed) if name not in assumed]
    assumed += ["precision"] if words.assumed else []
    notes = [*row.faults, *notes, *model.notes, *where.notes, *([words.note] if words.note else [])]
    layer = shape.layers == 1 and re.search(reading.SINGLE_LAYER, row["model"], re.IGNORECASE) is not None
    if layer:
        notes.append("a layer alone: priced as what the forward and backward of a second one add to a model")
    task = Task(shape, cluster, precision, seq_len, batch, tuple(settings), tuple(last), layer)
    return Case(row, task, framework, measured_s, tuple(assumed), unmeasured, tuple(notes))


def own_precision(row: Row, shapes: Shapes | None = None) -> str:
    """The name of a row's precision where its columns say it, blank where not: of rows that are not priced."""
    name = find(tables.PRECISION_WORDS, row["precision"])
    if name is None:
        return ""
    latent = False
    with suppress(AutoplanError):  # without a device no words of blocks are told apart
        name = precision_of_words(row, cluster_of(row).device).choices[0]
    with suppress(AutoplanError):
        latent = shapes is not None and shapes.of(row).kind.latent
    return _full_name(name, latent, row.framework, era_of(row["source"], row["notes"], row["gpu"]))


def _full_name(precision: str, latent: bool, framework: Framework, era: float) -> str:
    """With what the framework keeps in 16 bits."""
    name = "fp8" if precision == INT8 else precision
    return stacks_of_frameworks()[framework].in_16_bits(name, latent, era)


def _with_int8(cluster: Cluster) -> Cluster:
    """With products of 8-bit integers at the place of 8-bit floats, where the device has none of these."""
    peaks = cluster.device.peak_flops_by_dtype
    if "float8" in peaks:
        return cluster
    return replace(cluster, device=replace(cluster.device, peak_flops_by_dtype={**peaks, "float8": peaks[INT8]}))


def _degrees(row: Row) -> tuple[dict[str, int], list[str]]:
    """tp, pp, cp and dp, and which of them were filled in: the one that is blank follows from the devices, cp is 1 as
    in every framework, and what shards all parameters over all devices leaves no other degree, nor do degrees that
    take all devices. A dp that contradicts the devices is read as what they leave. Unstated if degrees are missing, or
    contradict the devices without it."""
    devices = row.num_devices
    stated = {name: row.count(name) for name in ("tp", "pp", "cp", "dp")}
    found = {name: value for name, value in stated.items() if value}
    if not found and re.search(reading.ALL_SHARDED, row["zero_stage"], re.IGNORECASE):
        found = {"tp": 1, "pp": 1}
    found.setdefault("cp", 1)
    rest = math.prod(value for name, value in found.items() if name != "dp")
    missing = [name for name in ("tp", "pp", "dp") if name not in found]
    if missing:
        known = math.prod(found.values())
        if known == devices:
            found |= dict.fromkeys(missing, 1)
        elif len(missing) > 1 or devices % known:
            raise Unstated(f"{missing[0]} is not stated")
        else:
            found[missing[0]] = devices // known
    elif rest * found["dp"] != devices:
        batch = row.count("global_batch")
        if devices % rest or (batch is not None and batch % (devices // rest)):
            raise Unstated(f"the degrees are those of {rest * found['dp']} devices, not {devices}")
        found["dp"] = devices // rest
    return found, [name for name in found if found[name] != stated[name]]


def _micro_batches(
    row: Row, framework: Framework, era: float, dp: int, pp: int, batch: int, gathered: bool
) -> tuple[tuple[int, ...], str]:
    """Sequences per micro-batch, the most likely first, and what is not as stated: more than the batch has for a rank.

    `gathered`: ZeRO 3. Unpriced where it has none for some.
    """
    if dp > batch:
        raise Unpriced(f"dp={dp} is more than the global batch of {batch}")
    stated = row.count("micro_batch")
    if stated is None and (match := re.search(r"\b(\d+) micro-?batches", row["flags"])) is not None:
        stated = batch // (dp * int(match.group(1)))
    if stated is None and framework in reading.AT_ONCE:
        stated = batch // dp
    note = ""
    if stated and dp * stated > batch:
        note = f"micro_batch={stated} is priced as {batch // dp}: dp={dp} leaves no more of the global batch of {batch}"
        stated = batch // dp
    if stated:
        return (stated,), note
    if pp > 1 and batch % (dp * pp) == 0 and era < reading.AS_MANY_AS_STAGES.get(framework, 0.0):
        return tuple(dict.fromkeys((batch // (dp * pp), 1))), note
    usual = reading.MICRO_BATCHES_GATHERED if gathered and pp == 1 else reading.MICRO_BATCHES
    return tuple(n for n in usual if batch % (dp * n) == 0) or (1,), note


@dataclass(frozen=True)
class _Ran:
    """Every reading of a row, its global batch size, the fields that were filled in, and what is not as stated."""

    settings: tuple[Setting, ...]
    last: tuple[Setting, ...]
    batch: int
    assumed: tuple[str, ...]
    notes: tuple[str, ...]


def _settings(row: Row, shape: Shape, framework: Framework) -> _Ran:
    """Return how a row ran."""
    defaults, notes = tables.DEFAULTS[framework], []
    degrees, assumed = _degrees(row)
    tp, pp, cp, dp = (degrees[name] for name in ("tp", "pp", "cp", "dp"))
    if not row["n_gpus"]:
        assumed.append("n_gpus")
    ep = row.count("ep") or 1
    if ep > 1 and not shape.num_experts:
        notes.append(f"ep={ep} is left: the model has no experts")
        ep = 1
    zero = find(tables.ZERO_STAGE_WORDS, row["zero_stage"]) if row["zero_stage"] else None
    if zero is None:
        zero = defaults.zero_stages
        if row["zero_stage"]:
            notes.append(f"zero_stage={row['zero_stage']} is not known: priced as {zero[0]}")
    unknown_zero = bool(notes) and notes[-1].startswith("zero_stage")
    kept = (pp > 1 and framework in tables.KEPT_IN_PIPELINES) or (
        shape.num_experts > 0 and framework in tables.KEPT_WITH_EXPERTS
    )
    if zero[0] == 3 and kept:
        zero = (1, *zero)
    if pp > 1 and zero[0] == 2:  # in a pipeline gradients are reduced once per step, not after each micro-batch
        zero = (1, 2)
    batch, era = row.needed("global_batch"), era_of(row["source"], row["notes"], row["gpu"])
    said = f"{row['flags']} {row['schedule']} {row['model']} {row.stated}"
    options = default_options(framework, era, said, row["gpu"], row["precision"], row["notes"], row["model"])
    split = row["sp"] != "0" if row["sp"] else options.sequence_parallel  # blank: as the framework has it
    options = replace(options, sequence_parallel=split or tp == 1)
    if shape.kind.latent and framework in reading.DETERMINISTIC and not row.stated:
        options = replace(options, attention=Attention.UNFUSED)
    if options.whole_sums and find(tables.PRECISION_WORDS, row["precision"]) == "bf16":
        # ZeRO 0 of DeepSpeed's file: the BF16 optimizer shards its state itself
        zero = tuple(dict.fromkeys(stage or 1 for stage in zero))
    micro, less = _micro_batches(row, framework, era, dp, pp, batch, zero[0] == 3)
    if less:
        notes.append(less)
        assumed.append("micro_batch")
    if batch % (dp * micro[0]):  # no framework runs a part of a micro-batch: the nearest whole number of them
        batch = dp * micro[0] * round(batch / (dp * micro[0]))
        assumed.append("global_batch")
    if shape.adapters is not None:  # ZeRO 1 and 2 shard what is trained, which is next to nothing
        zero = tuple(dict.fromkeys(0 if stage < 3 else stage for stage in zero))
        if not row["zero_stage"] and dp * cp == 1:  # on one device adapters are trained without it
            zero = (0,)
    stack, where = stacks_of_frameworks()[framework], (era, row["gpu"], row["precision"], row["model"])
    recompute = recompute_of(row, stack.recompute_at(*where, zero[0]))
    schedules, on_host = schedule_of(row, pp), offload_of(row, zero[0], dp * cp)
    notes += [words.note for words in (schedules, on_host) if words.note]
    virtual = chunks_of(row, schedules.choices[0], shape.layers, pp)
    etps = _expert_tensor_degrees(shape, tp, ep, dp * cp * tp, stack.experts_whole(era), row.noted("ETP"))
    modes = _modes(row, framework)
    choices = {
        "zero_stage": zero,
        "recompute": recompute,
        "vpp": virtual,
        "etp": etps,
        "mode": modes,
        "micro_batch": micro,
        "schedule": schedules.choices,
        "offload": on_host.choices,
    }
    blank = [name for name in ("zero_stage", "recompute", "micro_batch") if not row[name]]
    if pp > 1 and schedules.choices[0] in tables.INTERLEAVED and stated_chunks(row) is None:
        blank.append("vpp")
    blank += ["zero_stage"] if unknown_zero else []
    assumed += [n for n, found in choices.items() if (len(found) > 1 or n in blank) and n not in assumed]
    usual = _Reading(
        zero[0], recompute[0], virtual[0], etps[0], modes[0], micro[0], schedules.choices[0], on_host.choices[0]
    )
    # one field at a time departs from the usual
    readings = [usual, *(replace(usual, zero_stage=v) for v in zero[1:])]
    readings += [replace(usual, recompute=v) for v in recompute[1:]]
    readings += [replace(usual, virtual_stages=v) for v in virtual[1:]]
    readings += [replace(usual, etp=v) for v in etps[1:]]
    readings += [replace(usual, mode=v) for v in modes[1:]]
    readings += [replace(usual, micro_batch=v) for v in micro[1:]]
    readings += [
        replace(usual, schedule=v, virtual_stages=chunks_of(row, v, shape.layers, pp)[0]) for v in schedules.choices[1:]
    ]
    readings += [replace(usual, on_host=v) for v in on_host.choices[1:]]

    def setting(r: _Reading, instead: tuple[str, ...] = ()) -> Setting:
        chunks = r.virtual_stages if pp > 1 else 1
        of_layers = "=" in r.recompute and not r.on_host.activations
        again: str | tuple[int, ...] = "none" if "=" in r.recompute else r.recompute
        if r.on_host.activations and r.recompute != "full":  # of layers computed again, only their inputs are kept
            again = "offload"
        elif r.recompute == HALF:
            again = tuple(n // 2 for n in _layers(shape.layers, pp * chunks))
        config = ParallelConfig(
            dp=dp,
            tp=tp,
            pp=pp,
            cp=cp,
            ep=ep,
            etp=r.etp,
            zero_stage=r.zero_stage,
            zero_replicas=_zero_replicas(row, dp * cp) if r.zero_stage else 1,
            micro_batch_size=r.micro_batch,
            num_micro_batches=batch // (dp * r.micro_batch),
            schedule=tables.INTERLEAVED.get(r.schedule, r.schedule) if chunks > 1 else r.schedule,
            virtual_stages=chunks,
            recompute=again,
            stages=_stages(shape, pp, chunks) if num_copies(r.schedule) == 1 else None,
            offload=r.on_host.state,
        )
        return Setting(r.mode, config, options, r.recompute if of_layers else "", instead=instead)

    plain = {"schedule": replace(usual, schedule="1F1B", virtual_stages=1)} if pp > 1 else {}
    if usual.on_host:
        plain["offload"] = replace(usual, on_host=OnHost())
    last = [setting(r, (name,)) for name, r in plain.items() if r != usual]
    if len(last) > 1:
        last.append(setting(replace(plain["schedule"], on_host=OnHost()), tuple(plain)))
    return _Ran(tuple(map(setting, readings)), tuple(last), batch, tuple(assumed), tuple(notes))


def _expert_tensor_degrees(
    shape: Shape, tp: int, ep: int, ranks: int, whole: bool, stated: int
) -> tuple[int | None, ...]:
    """As noted (`stated`, 0: nothing), else as tp (None, Megatron's default) and 1, whichever ep leaves ranks for.

    `whole`: 1 is usual.
    """
    if not shape.num_experts or tp == 1:
        return (None,)
    usual: tuple[int | None, ...] = (1, None) if whole else (None, 1)
    if stated:
        usual = (None,) if stated == tp else (stated,)
    legal = [etp for etp in usual if ranks % (ep * (etp or tp)) == 0 and shape.expert_ffn % (etp or tp) == 0]
    return tuple(legal) or (None,)


def _stages(shape: Shape, pp: int, chunks: int) -> tuple[int, ...] | None:
    """Equal chunks, as far as they are."""
    return equal_stages(shape.layers, pp, chunks, shape.predicting)


def _zero_replicas(row: Row, ranks: int) -> int:
    """Copies of the sharded state, of a group that is stated, or of the row's recipe, and divides the ranks."""
    group = re.search(reading.SHARD_GROUP, row["zero_stage"])
    by_recipe = find(reading.SHARD_GROUPS, row["source"]) or ranks
    size = int(group[1] or group[2]) if group is not None else by_recipe
    return ranks // size if ranks % size == 0 else 1


def _modes(row: Row, framework: Framework) -> tuple[Mode, ...]:
    """Of the framework; where it says what it compiles, only that."""
    modes = tables.DEFAULTS[framework].modes
    if framework in reading.COMPILES and not re.search(reading.COMPILED, row["flags"], re.IGNORECASE):
        return tuple(reversed(modes))
    return modes


def _layers(layers: int, chunks: int) -> tuple[int, ...]:
    """Layers per chunk, as even as they go: at most as many as any chunk has, where stages are uneven."""
    return (layers // chunks,) * chunks


# -- what was measured -------------------------------------------------------------------------------------------------


def _measured_s(row: Row, shape: Shape, seq_len: int, batch: int) -> float:
    """Seconds of one step of `batch` sequences, NaN of a run that ran out of memory or has only a memory figure.

    Unmeasured if the row has no result, or one that no run has.
    """
    if (seconds := row.measured("step_time_s")) is not None:
        return seconds
    devices, tokens = row.num_devices, batch * seq_len
    if (rate := row.measured("tokens_per_s_per_gpu")) is not None:
        return tokens / (rate * devices)
    tflops, formula = row.measured("tflops_per_gpu"), find(reading.TFLOPS_FORMULAS, row["tflops_kind"])
    if tflops is None and (row.out_of_memory or row["peak_mem_gb"]):
        return math.nan
    if tflops is None or formula is None:
        raise Unmeasured("not compared: nothing measured that gives seconds")
    return tokens * flops_per_token(formula, shape, seq_len) / (tflops * 1e12 * devices)


def flops_per_token(formula: Formula, shape: Shape, seq_len: int) -> float:
    """Arithmetic of one token in a step as `formula` counts it."""
    layers, hidden = shape.layers, shape.hidden
    width = shape.heads * shape.kind.head_dim
    if formula is Formula.HARDWARE_8N:
        return 8.0 * 12 * layers * hidden**2
    if formula is Formula.HARDWARE:
        return 96.0 * layers * hidden**2 * (1 + seq_len / (6 * hidden) + shape.vocab / (16 * layers * hidden))
    attention = 12.0 if formula is Formula.FULL_ATTENTION else 6.0
    return 6.0 * shape.matmul_params + attention * layers * width * seq_len
