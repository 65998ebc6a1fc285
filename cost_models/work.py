"""The work of one rank as plain data: operations, collectives, parameters and activations of every block.

Derived from a ModelGraph and its layout by `autoplan.program.workload`; priced by `cost_models.time.price`. Sizes are
those of one rank and one micro-batch.

    Workload    the model: units (layers), the blocks they call, the activations that cross between them
    BlockWork   one call of one block
    OpWork      one operation: what a profile measures and the roofline prices
    CommWork    one collective
    ParamWork   one stored parameter
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

from autoplan.config.adapters import PACKED_BYTES
from autoplan.config.recompute import FULL, OFFLOAD, SELECTIVE, region_groups
from autoplan.cost_models.hardware.collective_kinds import COLLECTIVE_KINDS
from autoplan.cost_models.routing import Routing
from autoplan.ops.saved import TensorFacts
from autoplan.units import dtype_bytes, most

Plain = str | int | float | bool | None | tuple[int, ...]


@dataclass(frozen=True)
class OpWork:
    """One operation on one rank.

    Attributes:
        op: A name of the rule table.
        attrs: Other attributes that its time depends on, sorted.
        flops: FLOPs of the forward pass.
        moved_bytes: Memory traffic of the forward pass (0 for a view).

    Two works with equal `key` take the same time.
    """

    op: str
    inputs: tuple[TensorFacts, ...]
    outputs: tuple[TensorFacts, ...]
    attrs: tuple[tuple[str, Plain], ...]
    flops: float
    moved_bytes: float

    def __hash__(self) -> int:
        # prices are known by work, and many blocks share one
        known = self.__dict__.get("_hash")
        if known is None:
            found = hash((self.op, self.inputs, self.outputs, self.attrs, self.flops, self.moved_bytes))
            known = self.__dict__["_hash"] = found
        return int(known)

    def __getstate__(self) -> dict[str, Any]:
        # another process hashes strings otherwise
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    @property
    def key(self) -> str:
        """The work as text: `linear(bfloat16[2,128,64]*,bfloat16[256,64]*)`; a star marks inputs with a gradient."""
        args = [f"{t.dtype}[{','.join(map(str, t.shape))}]{'*' if t.requires_grad else ''}" for t in self.inputs]
        if not args:
            args = [f"->{t.dtype}[{','.join(map(str, t.shape))}]" for t in self.outputs]
        return f"{self.op}({','.join([*args, *(f'{k}={v}' for k, v in self.attrs)])})"

    @property
    def matmul_dtype(self) -> str | None:
        """The dtype of its products, if it differs from the dtype of the operands (8 and 4 bits); else None."""
        given = dict(self.attrs).get("matmul_dtype")
        return given if isinstance(given, str) else None

    def num_started(self, phase: str) -> int:
        """Return how many operations of torch it is in a phase: one, or those that a function of its own consists of.

        The backward of such a function has about two for each.
        """
        inside = dict(self.attrs).get("kernels")
        return (2 if phase == "backward" else 1) * inside if isinstance(inside, int) else 1

    @property
    def has_backward(self) -> bool:
        """True if a gradient flows through it."""
        return any(t.requires_grad for t in self.inputs)


@dataclass(frozen=True)
class CommWork:
    """One collective.

    Attributes:
        num_bytes: The gathered or reduced tensor on one rank (all_to_all: the local tensor).
        axis: A sub-axis or a named product of sub-axes.
        phase: forward or backward.
        per: micro_batch or step.
        routing: How tokens chose the experts it has a copy for; None for collectives that are not made for experts.
        part: (ranks, stride) if it runs over a part of its axis.
        behind_attention: For a step of a ring: the ranks of the ring, where attention over the keys that have arrived
            hides it.
        products: Positions in the block's `ops` of the products that read what it gathers, or whose result it reduces
            and scatters.
    """

    what: str
    kind: str
    num_bytes: float
    axis: str
    phase: str
    per: str = "micro_batch"
    routing: Routing | None = None
    part: tuple[int, int] | None = None
    behind_attention: int = 0
    products: tuple[int, ...] = ()


ParameterKind = tuple[str, bool, bool, bool, bool]  # dtype, trainable, of experts, packed, narrow


@dataclass(frozen=True)
class ParamWork:
    """A stored parameter: local elements before ZeRO.

    Attributes:
        expert: replicated over the expert-data ranks, not over dp.
        packed: stored in 4 bits, and frozen.
        narrow: The weight of products in 8 bits with one scale.
        again: an earlier call of the model uses it, too.
    """

    name: str
    num_elements: int
    dtype: str
    trainable: bool
    expert: bool = False
    packed: bool = False
    narrow: bool = False
    again: bool = False

    @property
    def kind(self) -> ParameterKind:
        """What its bytes per element depend on."""
        return self.dtype, self.trainable, self.expert, self.packed, self.narrow

    @property
    def width(self) -> float:
        """Bytes of one element as it is stored."""
        return PACKED_BYTES if self.packed else dtype_bytes(self.dtype)


@dataclass(frozen=True)
class Recomputed:
    """The recomputation of a call in its backward.

    `ops`: positions in the call's `ops`. `beside`: additional operations. `comms`: collectives.
    """

    ops: frozenset[int]
    beside: tuple[OpWork, ...] = ()
    comms: tuple[CommWork, ...] = ()


class Gathered(Enum):
    """The fate of parameters that ZeRO 3 gathers for a forward: freed, kept, or gathered again."""

    TWICE = "twice"  # freed, and gathered a second time for the backward
    LAST = "last"  # of the last block of the model: kept if its backward follows directly
    DROP = "drop"  # freed; the backward needs none


@dataclass(frozen=True)
class BlockWork:
    """One call of a block on one rank and micro-batch. The Workload counts the activations that it keeps, per unit.

    Attributes:
        selective_ops: Positions in `ops` that selective recompute reruns.
        joined_ops: Positions in `ops` that hand-written modules start together with another operation (queries, keys
            and values of one input; a norm with the product after it).
        same_kernel: Positions in `ops` that run in the kernel of another operation.
        needed: The forward as far as full recompute needs it: up to the last tensor that the backward reads.
        group_ops: Positions in `ops` that recomputing a group of regions reruns, by group.
        modules: The recomputation of modules, if any are recomputed.
        freed_bytes: Bytes that it does not keep, by recompute choice other than `full` and `selective`.
        gathered: Whether ZeRO 3 gathers its parameters for the backward, too.
    """

    name: str
    ops: tuple[OpWork, ...]
    comms: tuple[CommWork, ...]
    params: tuple[ParamWork, ...]
    selective_ops: frozenset[int] = frozenset()
    joined_ops: frozenset[int] = frozenset()
    same_kernel: frozenset[int] = frozenset()
    needed: Recomputed | None = None
    group_ops: Mapping[str, frozenset[int]] = field(default_factory=dict)
    modules: Recomputed | None = None
    freed_bytes: Mapping[str, float] = field(default_factory=dict)
    gathered: Gathered = Gathered.TWICE

    @property
    def offloaded_bytes(self) -> float:
        """Bytes that it sends to the host and back if its activations are offloaded."""
        return self.freed_bytes.get(OFFLOAD, 0.0)


@dataclass(frozen=True)
class SharedValue:
    """An activation that several calls keep, or that crosses more than one cut. A stage holds it once.

    Attributes:
        made, last: The unit that makes it, and the last unit that takes it.
        num_bytes: Bytes on one rank, for one micro-batch.
        kept, kept_recomputed: The units of the calls that keep it: without recompute, and with all layers recomputed.
    """

    made: int
    last: int
    num_bytes: float
    kept: tuple[int, ...]
    kept_recomputed: tuple[int, ...]

    def crosses(self, cut: int) -> bool:
        """Return True if it crosses from unit `cut` - 1 to unit `cut`."""
        return self.made < cut <= self.last

    def held(self, start: int, stop: int, sent: bool) -> bool:
        """Return True if a stage of units start .. stop - 1 holds it.

        `sent`: True to count it also if the stage only makes and sends it.
        """
        used = any(start <= u < stop for u in (*self.kept, *self.kept_recomputed))
        return used or self.crosses(start) or (sent and self.crosses(stop))


@dataclass(frozen=True)
class KeptAtCut:
    """Bytes of what crosses a cut that a layer keeps for its own backward: the unit before it, and the one after it.

    By recompute choice of that unit. A pipeline that is cut there holds these values anyway. Those of `SharedValue` are
    not included.
    """

    before: Mapping[str, float]
    after: Mapping[str, float]


@dataclass(frozen=True)
class TiedParam:
    """A parameter that units `first` and `last` use, and none between: its gradient waits in the last for the first.

    With more than two uses there is one for each use and the next, which may be in the same unit.
    """

    first: int
    last: int
    param: ParamWork

    @property
    def num_bytes(self) -> float:
        """Its bytes on one rank, before ZeRO."""
        return self.param.num_elements * self.param.width


@dataclass(frozen=True)
class MessageKind:
    """Messages between single ranks: their kind (all_to_all, send_recv), axis, and part of it (see `CommWork`)."""

    kind: str
    axis: str
    part: tuple[int, int] | None


@dataclass(frozen=True)
class Workload:
    """The model on one rank. A unit, one layer with the glue after it, lies between possible cuts of a pipeline.

    Attributes:
        axes: The sub-axes of tensor parallelism with their sizes, major to minor.
        units: Names of the blocks that each unit calls; embedding in the first unit, head and loss in the last.
        free: Blocks without parameters that every stage computes for itself.
        cut_bytes: Bytes that cross from unit i to i + 1, per micro-batch.
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
    # bytes that autograd keeps per unit; values that several units keep count once, in the first
    unit_saved: tuple[float, ...]
    unit_selective: tuple[float, ...]  # likewise, if the attention core is recomputed
    unit_kept: tuple[float, ...]  # likewise, under full recompute of the layers
    # the most bytes that a unit needs while it runs, beyond those that it and the units before it keep; without and
    # with recompute
    unit_transient: tuple[float, ...]
    unit_recompute_transient: tuple[float, ...]
    tied: tuple[TiedParam, ...]
    free_saved: float  # bytes that the parameter-free blocks make, on every stage
    tokens: float  # of one micro-batch of one data-parallel rank, whole sequence
    model_flops: float  # of forward and backward of one such micro-batch, whole model, all ranks, without recompute
    micro_batch_size: int
    seq_len: int
    # of one call of each block: the byte counts that kept and needed activations are summed from
    activation_bytes: Mapping[str, tuple[float, ...]] = field(default_factory=dict, compare=False)
    # per unit: bytes kept under the other recompute choices, if all layers of the unit make them
    unit_choices: tuple[Mapping[str, float], ...] = ()
    # of the bytes of the last unit, those that do not wait between the two parts of a split backward: its logits
    last_spent: float = 0.0
    # not included in the bytes of units above
    shared: tuple[SharedValue, ...] = ()
    kept_at_cuts: tuple[KeptAtCut, ...] = ()  # by cut, as `cut_bytes`; empty: units keep nothing of what crosses
    masked_flops: float = 0.0  # of model_flops, the part that causal masks hide: the later half of each query's keys

    @cached_property
    def main_dtype(self) -> str:
        """The dtype of most parameters; float32 without any."""
        params = (p for unit in self.units for name in unit for p in self.blocks[name].params)
        return most((p.dtype, p.num_elements) for p in params) or "float32"

    @cached_property
    def messages(self) -> frozenset[MessageKind]:
        """The collectives that are messages between single ranks."""
        sent = (c for block in self.blocks.values() for c in block.comms if COLLECTIVE_KINDS[c.kind].is_message)
        return frozenset(MessageKind(c.kind, c.axis, c.part) for c in sent)

    @cached_property
    def has_expert_parameters(self) -> bool:
        """True if parameters of experts are laid out on the axes of experts."""
        return any(p.expert for block in self.blocks.values() for p in block.params)

    @cached_property
    def unit_kinds(self) -> tuple[int, ...]:
        """A number per unit, the same for units that call the same blocks as layers and beside them."""
        found: dict[object, int] = {}
        return tuple(found.setdefault(unit, len(found)) for unit in zip(self.units, self.is_layer, strict=True))

    @cached_property
    def layer_kinds(self) -> tuple[int, ...]:
        """A number per unit, the same for units with the same layers."""
        found: dict[object, int] = {}
        layers = (
            tuple(b for b, layer in zip(unit, marked, strict=True) if layer)
            for unit, marked in zip(self.units, self.is_layer, strict=True)
        )
        return tuple(found.setdefault(unit, len(found)) for unit in layers)

    @cached_property
    def kept_kinds(self) -> tuple[int, ...]:
        """A number per unit, the same for units of one kind that keep as many bytes under every recompute choice."""
        found: dict[object, int] = {}
        choices = (tuple(each.items()) for each in self.unit_choices) if self.unit_choices else [()] * len(self.units)
        units = zip(self.unit_kinds, self.unit_selective, choices, strict=True)
        return tuple(found.setdefault(unit, len(found)) for unit in units)

    def recompute_choices(self, unit: int) -> list[str]:
        """Return the recompute choices of a unit."""
        if not self.layers[unit]:
            return []
        return [FULL, SELECTIVE, *(self.unit_choices[unit] if self.unit_choices else ())]

    def recompute_of(self, unit: int, how: str) -> str:
        """Return what a choice for all layers is for this one: the groups of regions that it has; empty if none."""
        known = self.recompute_choices(unit)
        return how if how in known else "+".join(group for group in region_groups(how) if group in known)
