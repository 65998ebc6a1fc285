"""What one rank does, as plain data: operations, collectives, parameters and activations of every block.

Derived from a ModelGraph and its layout by `autoplan.program.workload`; priced by `cost_models.time.price`. Sizes
are those of one rank and one micro-batch.

    Workload    the model: units (layers), which blocks they call, what crosses between them
    BlockWork   one call of one block
    OpWork      one operation: what a profile measures and the roofline prices
    CommWork    one collective
    ParamWork   one stored parameter
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from autoplan.config.recompute import OFFLOAD
from autoplan.units import dtype_bytes

Plain = str | int | float | bool | None | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorWork:
    """A local tensor: shape, dtype, whether a gradient flows through it."""

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool = False

    @property
    def num_elements(self) -> int:
        """Element count."""
        out = 1
        for size in self.shape:
            out *= size
        return out

    @property
    def num_bytes(self) -> int:
        """Bytes."""
        return self.num_elements * dtype_bytes(self.dtype)


@dataclass(frozen=True)
class OpWork:
    """One operation on one rank. `op` is a name of the rule table; `attrs` what else its time depends on, sorted.

    `flops` and `moved_bytes` are those of the forward pass (0 bytes for a view). Two works with equal `key` take the
    same time.
    """

    op: str
    inputs: tuple[TensorWork, ...]
    outputs: tuple[TensorWork, ...]
    attrs: tuple[tuple[str, Plain], ...]
    flops: float
    moved_bytes: float

    @property
    def key(self) -> str:
        """`linear(bfloat16[2,128,64]*,bfloat16[256,64]*)`: a star marks what needs a gradient."""
        args = [f"{t.dtype}[{','.join(map(str, t.shape))}]{'*' if t.requires_grad else ''}" for t in self.inputs]
        if not args:
            args = [f"->{t.dtype}[{','.join(map(str, t.shape))}]" for t in self.outputs]
        return f"{self.op}({','.join([*args, *(f'{k}={v}' for k, v in self.attrs)])})"

    @property
    def matmul_dtype(self) -> str | None:
        """Dtype that its products run in, where that is not the dtype of its operands (8 and 4 bits)."""
        given = dict(self.attrs).get("matmul_dtype")
        return given if isinstance(given, str) else None

    @property
    def has_backward(self) -> bool:
        """True if a gradient flows through it."""
        return any(t.requires_grad for t in self.inputs)


@dataclass(frozen=True)
class CommWork:
    """One collective. `num_bytes`: the gathered or reduced tensor on one rank (all_to_all: the local one).

    `top_k`: copies of each row in it, of collectives made for experts; 0 for all others.
    `axis` is a sub-axis or a named product; `phase` forward or backward; `per` micro_batch or step.
    `part`: (ranks, stride) where it is over a part of its axis; `behind_attention`: a step of a ring over that many
    ranks, which attention over the keys that are there hides.
    """

    what: str
    kind: str
    num_bytes: float
    axis: str
    phase: str
    per: str = "micro_batch"
    top_k: int = 0
    part: tuple[int, int] | None = None
    behind_attention: int = 0


@dataclass(frozen=True)
class ParamWork:
    """A stored parameter: local elements before ZeRO. `expert`: replicated over the expert-data ranks, not over dp."""

    name: str
    num_elements: int
    dtype: str
    trainable: bool
    expert: bool = False


@dataclass(frozen=True)
class Recomputed:
    """What a call runs again in its backward: positions in its `ops`, operations beside those, and what they send."""

    ops: frozenset[int]
    beside: tuple[OpWork, ...] = ()
    comms: tuple[CommWork, ...] = ()


class Gathered(Enum):
    """What becomes of the parameters that ZeRO 3 gathers for a forward."""

    AGAIN = "again"  # dropped, and gathered again for the backward
    LAST = "last"  # of the last block of the model: kept where its backward follows at once
    DROP = "drop"  # the backward needs none


@dataclass(frozen=True)
class BlockWork:
    """One call of a block on one rank and micro-batch; what it keeps is counted per unit in the Workload.

    `selective_ops`: positions in `ops` that selective recompute runs again; `joined_ops`: of those that hand-written
    modules start together with another one (queries, keys and values of one input; a norm with the product after it);
    `group_ops`: those that computing a group of regions again runs; `modules`: what the modules that are computed again
    do, where some are; `freed_bytes`: what it does not keep under each choice of recompute beside `full` and
    `selective`; `gathered`: whether ZeRO 3 gathers its parameters for the backward, too.
    """

    name: str
    ops: tuple[OpWork, ...]
    comms: tuple[CommWork, ...]
    params: tuple[ParamWork, ...]
    selective_ops: frozenset[int] = frozenset()
    joined_ops: frozenset[int] = frozenset()
    group_ops: Mapping[str, frozenset[int]] = field(default_factory=dict)
    modules: Recomputed | None = None
    freed_bytes: Mapping[str, float] = field(default_factory=dict)
    gathered: Gathered = Gathered.AGAIN

    @property
    def offloaded_bytes(self) -> float:
        """What it sends to the host and back if its activations wait there."""
        return self.freed_bytes.get(OFFLOAD, 0.0)


@dataclass(frozen=True)
class SharedValue:
    """An activation that several calls keep, or that crosses more than one cut: a stage holds it once.

    Attributes:
        made, last: the unit that makes it, and the last one that takes it.
        num_bytes: on one rank, of one micro-batch.
        kept, kept_recomputed: the unit of every call that keeps it, without recompute and with all layers recomputed.
    """

    made: int
    last: int
    num_bytes: float
    kept: tuple[int, ...]
    kept_recomputed: tuple[int, ...]

    def crosses(self, cut: int) -> bool:
        """True if it goes from unit `cut` - 1 to unit `cut`."""
        return self.made < cut <= self.last

    def held(self, start: int, stop: int, sent: bool) -> bool:
        """True if a stage of units start .. stop - 1 holds it. `sent`: also what it only makes and sends."""
        used = any(start <= u < stop for u in (*self.kept, *self.kept_recomputed))
        return used or self.crosses(start) or (sent and self.crosses(stop))


@dataclass(frozen=True)
class Workload:
    """The model on one rank. A unit is what a pipeline may be cut between: one layer with the glue after it.

    `units`: names of the blocks each calls, embedding in the first, head and loss in the last. `free`: blocks without
    parameters that every stage computes for itself. `cut_bytes[i]`: what crosses from unit i to i + 1 per micro-batch.
    `axes`: the sub-axes of tensor parallelism with their sizes, major to minor.
    """

    model: str
    axes: tuple[tuple[str, int], ...]
    blocks: Mapping[str, BlockWork]
    units: tuple[tuple[str, ...], ...]
    unit_calls: tuple[tuple[str, ...], ...]  # names of the calls, as `units`
    layers: tuple[bool, ...]  # per unit: True if it holds a layer, which recompute applies to
    is_layer: tuple[tuple[bool, ...], ...]  # per call, as `units`
    free: tuple[str, ...]
    cut_bytes: tuple[float, ...]
    unit_saved: tuple[float, ...]  # bytes that autograd keeps of each unit, what several keep once, with the first
    unit_selective: tuple[float, ...]  # the same if the attention core is computed again
    unit_kept: tuple[float, ...]  # and under full recompute of its layers
    # the most a unit needs while it runs beyond what it and the units before it keep, without and with recompute
    unit_transient: tuple[float, ...]
    unit_recompute_transient: tuple[float, ...]
    tied: tuple[tuple[int, int, float], ...]  # first and last unit that use a parameter, bytes of its gradient
    free_saved: float  # what the parameter-free blocks make, on every stage
    tokens: float  # of one micro-batch of one data-parallel rank, whole sequence
    model_flops: float  # forward and backward of one such micro-batch, whole model, all ranks, without recompute
    micro_batch_size: int
    seq_len: int
    # of one call of each block, every number of bytes that what is kept and needed is added up from
    activation_bytes: Mapping[str, tuple[float, ...]] = field(default_factory=dict, compare=False)
    # per unit: bytes kept under the other choices of recompute, if all of its layers make them
    unit_choices: tuple[Mapping[str, float], ...] = ()
    # of these nothing is in the bytes of units above
    shared: tuple[SharedValue, ...] = ()
    masked_flops: float = 0.0  # of model_flops what causal masks hide: the later half of each query's keys
