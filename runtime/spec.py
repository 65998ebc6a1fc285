"""ProgramSpec: everything that every rank needs to run a program, as plain JSON.

It holds sub-axes, parameters and their sharding, stages, the activations sent between them, and the ledger of
collectives. Checkpoints carry it. Sizes may depend on b (micro-batch per data-parallel rank), s (sequence length) and t
(length of the target sequence).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from autoplan.units import LossUnit

SPEC_VERSION = 3

Terms = tuple[tuple[int, int, tuple[str, ...]], ...]  # numerator, denominator, symbols: sum of products


def evaluate_terms(size: Terms, env: Mapping[str, int]) -> int:
    """Return the value of a symbolic size.

    Raises:
        ValueError: a shard would not be whole.
        KeyError: a symbol is missing; names it.
    """
    total = Fraction(0)
    for numerator, denominator, symbols in size:
        term = Fraction(numerator, denominator)
        for name in symbols:
            term *= env[name]
        total += term
    if total.denominator != 1:
        raise ValueError(
            f"a local size is {total} for {dict(env)}: the sequence or batch is not divisible by its shards"
        )
    return int(total)


@dataclass(frozen=True)
class ShardSpec:
    """One sub-axis that splits factor `position` of tensor dim `dim` of a parameter."""

    axis: str
    dim: int
    position: int


@dataclass(frozen=True)
class ParamSpec:
    """A parameter of one block of a stage.

    Attributes:
        shape: the full shape.
        factor_shape: the full shape with every dim as a tuple of factors.
        shards: the sub-axes that split it, major to minor.
        reduce_axes: sub-axes on which its gradient is a pending sum, reduced once per step.
    """

    block: str
    attr: str
    name: str
    shape: tuple[int, ...]
    factor_shape: tuple[tuple[int, ...], ...]
    dtype: str
    trainable: bool
    shards: tuple[ShardSpec, ...]
    reduce_axes: tuple[str, ...]
    used_as: tuple[tuple[str, str], ...]  # (sub-axis, R | I | S): the type the program sees


@dataclass(frozen=True)
class BufferSpec:
    """A replicated buffer of one block of a stage. `updated`: every forward writes to it, alike on all ranks."""

    block: str
    attr: str
    name: str
    updated: bool = False


@dataclass(frozen=True)
class CarriedSpec:
    """An activation sent from one stage to the next: local shape, dtype, and its type per sub-axis."""

    name: str
    shape: tuple[Terms, ...]
    dtype: str
    types: tuple[tuple[str, str], ...]
    requires_grad: bool = True  # if floating point: a gradient comes back


@dataclass(frozen=True)
class StageSpec:
    """One pipeline stage. `source` is the file name of its module."""

    index: int
    source: str
    calls: tuple[str, ...]
    params: tuple[ParamSpec, ...]
    buffers: tuple[BufferSpec, ...]
    carried_in: tuple[CarriedSpec, ...]
    carried_out: tuple[CarriedSpec, ...]


@dataclass(frozen=True)
class LedgerEntry:
    """One collective that the program performs.

    Attributes:
        bytes: size of the gathered or reduced tensor on one rank (all_to_all: of the local tensor).
        phase: forward or backward; a recompute repeats those of the forward that it needs.
        per: `micro_batch` or `step`.
    """

    stage: int
    call: str
    what: str
    kind: str
    axis: str
    bytes: Terms
    phase: str
    per: str


class TiedPlace(NamedTuple):
    """The place of one copy of a tied parameter."""

    stage: int
    block: str
    attr: str


@dataclass(frozen=True)
class TiedSpec:
    """Copies of one parameter in several blocks, whose gradients are summed."""

    name: str
    places: tuple[TiedPlace, ...]


class SizeSource(NamedTuple):
    """The dim of an input from which a size (b, s or t) is read; it has `times` this size."""

    symbol: str
    input: str
    dim: int
    times: int = 1

    def read(self, tensors: Mapping[str, Any]) -> int:
        """Return the size in a batch."""
        size: int = tensors[self.input].shape[self.dim]
        return size // self.times


class SizeBound(NamedTuple):
    """The least and the largest value of a size (s or t) for which a program is valid; `high` None: unlimited."""

    symbol: str
    low: int
    high: int | None


class IndexLimit(NamedTuple):
    """An input whose numbers are 0 to `size` - 1, or `ignored`. `of`: whose size that is, in words."""

    input: str
    size: int
    ignored: int | None
    of: str


class DtypeLimit(NamedTuple):
    """An input, and the dtypes that the program takes it in."""

    input: str
    dtypes: tuple[str, ...]


@dataclass(frozen=True)
class OutputSpec:
    """A tensor that the model returns besides the loss.

    Attributes:
        stage, block: where it is made.
        sizes: every dim as a tuple of factors, for the b and s of a rank's micro-batch.
        batch_dim: the dim whose slowest factor is the batch.
        shards: the sub-axes that split it, major to minor.
        pending: sub-axes over which it is a pending sum.
        lengths: (dim, position) of the factors that context parallelism cuts.
        runs: of each of them its runs (`runtime.context.own_part`), if sequences are cut so.
    """

    name: str
    stage: int
    block: str
    sizes: tuple[tuple[Terms, ...], ...]
    batch_dim: int
    shards: tuple[ShardSpec, ...]
    pending: tuple[str, ...]
    lengths: tuple[tuple[int, int], ...]
    runs: tuple[tuple[tuple[int, int], ...], ...] = ()


@dataclass(frozen=True)
class ScheduleSpec:
    """The pipeline schedule of a program.

    Attributes:
        name: its name in messages.
        torch_class: the class of torch.distributed.pipelining that runs it.
        splits_backward: True if a backward has two parts, for the inputs of a stage and for its parameters.
    """

    name: str
    torch_class: str
    splits_backward: bool


@dataclass(frozen=True)
class ProgramSpec:
    """Everything a rank needs besides the emitted modules (mixed precision: `autoplan.runtime.precision`)."""

    model: str
    axes: tuple[tuple[str, int], ...]  # sub-axes, major to minor over ranks
    groups: tuple[tuple[str, tuple[str, ...]], ...]
    zero_stage: int
    schedule: ScheduleSpec
    inputs: tuple[str, ...]
    sizes_from: tuple[SizeSource, ...]
    loss_count: LossUnit
    stages: tuple[StageSpec, ...]
    tied: tuple[TiedSpec, ...]
    recompute: tuple[tuple[str, str], ...]  # call, none | full | selective | offload | regions: attention+norms
    ledger: tuple[LedgerEntry, ...]
    stage_ranks: tuple[int, ...] = ()  # the pipeline rank that holds each stage; several per rank: virtual stages
    version: int = SPEC_VERSION
    input_shapes: tuple[tuple[str, tuple[Terms, ...]], ...] = ()  # input -> its shape; may be empty
    compute_dtype: str | None = None  # parameters of this dtype are copies of float32 masters; None: compute as stored
    loss_share: bool = False  # the program takes `loss_share`, 1 / number of micro-batches
    gradient_dtype: str | None = None  # dtype of sums over micro-batches and ranks; None: the parameter's
    offload: tuple[str, ...] = ()  # offloaded state: optimizer, parameters (autoplan.runtime.offload)
    bounds: tuple[SizeBound, ...] = ()
    whole: tuple[Terms, ...] = ()  # local sizes, fractions of b, s and t, that must be whole numbers
    input_dtypes: tuple[tuple[str, str], ...] = ()  # input -> its dtype in the example
    outputs: tuple[OutputSpec, ...] = ()  # what an evaluation can return besides the loss
    more_loss_counts: tuple[tuple[str, LossUnit], ...] = ()  # further denominators: input, and what it counts
    one_part: str = ""  # why a batch cannot be computed in parts that are added up; "": it can
    evaluation: ProgramSpec | None = None  # what the `evaluate` of its stages computes, if that is something else
    equal_samples: bool = False  # it uses the size of micro-batches that data-parallel ranks share, each with as many
    no_evaluation: str = ""  # why there is none although it would be something else
    draws: bool = True  # it draws random numbers: its stages read `rng`
    sequence_chunks: int = 2  # that a rank of context parallelism has; 1: an equal part of every run
    index_limits: tuple[IndexLimit, ...] = ()  # inputs that are rows of tables or classes
    autocast_dtype: str | None = None  # 16-bit dtype that the program casts operands of products to, as torch.autocast
    dtype_limits: tuple[DtypeLimit, ...] = ()
    draws_counts: bool = False  # what the loss counts depends on random numbers: `count` of its stages takes `rng`

    @property
    def loss_counts(self) -> tuple[tuple[str, LossUnit], ...]:
        """Every denominator of the loss: the input, and what it counts."""
        return (("loss_denominator", self.loss_count), *self.more_loss_counts)

    def stages_of(self, rank: int) -> tuple[StageSpec, ...]:
        """Return the stages that a rank of the pipeline holds, in model order."""
        return tuple(stage for index, stage in enumerate(self.stages) if self.rank_of(index) == rank)

    def rank_of(self, stage: int) -> int:
        """Return the rank of the pipeline that holds a stage."""
        return self.stage_ranks[stage] if self.stage_ranks else stage

    def to_json(self) -> str:
        """Return the spec as JSON text."""
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> ProgramSpec:
        """Return the spec that `to_json` wrote. Raises ValueError for another version."""
        data = json.loads(text)
        if data.get("version") != SPEC_VERSION:
            raise ValueError(
                f"program version {data.get('version')!r} cannot be read; this runtime reads {SPEC_VERSION}"
            )
        return _program(data)


def _tuples(data: Any) -> Any:
    return tuple(_tuples(x) for x in data) if isinstance(data, list) else data


def _plain(data: dict[str, Any], *apart: str) -> dict[str, Any]:
    """Return the fields of a record, but for those that are records themselves."""
    return {name: _tuples(value) for name, value in data.items() if name not in apart}


def _sharded(data: dict[str, Any]) -> dict[str, Any]:
    return {**_plain(data, "shards"), "shards": tuple(ShardSpec(**s) for s in data["shards"])}


def _stage(data: dict[str, Any]) -> StageSpec:
    return StageSpec(
        **_plain(data, "params", "buffers", "carried_in", "carried_out"),
        params=tuple(ParamSpec(**_sharded(p)) for p in data["params"]),
        buffers=tuple(BufferSpec(**b) for b in data["buffers"]),
        carried_in=tuple(CarriedSpec(**_plain(c)) for c in data["carried_in"]),
        carried_out=tuple(CarriedSpec(**_plain(c)) for c in data["carried_out"]),
    )


def _program(data: dict[str, Any]) -> ProgramSpec:
    own = "schedule stages tied ledger outputs sizes_from bounds index_limits loss_count more_loss_counts".split()
    own += ["evaluation", "dtype_limits"]
    return ProgramSpec(
        **_plain(data, *own),
        loss_count=LossUnit(data["loss_count"]),
        more_loss_counts=tuple((name, LossUnit(what)) for name, what in data.get("more_loss_counts", ())),
        schedule=ScheduleSpec(**data["schedule"]),
        stages=tuple(map(_stage, data["stages"])),
        tied=tuple(TiedSpec(t["name"], tuple(TiedPlace(*place) for place in t["places"])) for t in data["tied"]),
        ledger=tuple(LedgerEntry(**_plain(e)) for e in data["ledger"]),
        sizes_from=tuple(SizeSource(*size) for size in data["sizes_from"]),
        bounds=tuple(SizeBound(*bound) for bound in data.get("bounds", ())),
        index_limits=tuple(IndexLimit(*limit) for limit in data.get("index_limits", ())),
        dtype_limits=tuple(DtypeLimit(name, tuple(dtypes)) for name, dtypes in data.get("dtype_limits", ())),
        outputs=tuple(OutputSpec(**_sharded(o)) for o in data.get("outputs", ())),
        evaluation=_program(data["evaluation"]) if data.get("evaluation") else None,
    )
