"""Degrees and settings of a plan: `ParallelConfig`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from autoplan.config.choice import Written, choice, is_count
from autoplan.config.context_methods import INNER, methods_text, read_methods
from autoplan.config.kernels import Attention as Attention
from autoplan.config.kernels import Dispatcher as Dispatcher
from autoplan.config.kernels import FusedLoss as FusedLoss
from autoplan.config.kernels import Launch as Launch
from autoplan.config.kernels import Mode as Mode
from autoplan.config.kernels import Reruns as Reruns
from autoplan.config.kernels import Sends as Sends
from autoplan.config.numbers import read_list
from autoplan.config.offload import offload_text, read_offload
from autoplan.config.recompute import NONE, read_recompute, recompute_label, recompute_of_text, recompute_text
from autoplan.config.run_options import OVERLAPS as OVERLAPS
from autoplan.config.run_options import RunOptions as RunOptions
from autoplan.errors import PinError
from autoplan.schedules.schedule import PLAIN_SCHEDULE, SCHEDULES

_INNER_NAMES = ", ".join(f'`"{name}"`' for name in INNER)
ZERO_STAGES = (0, 1, 2, 3)


def _zero_stage(name: str, value: object) -> str | None:
    if is_count(value, 0) and value in ZERO_STAGES:
        return None
    return f"{name}={value!r} does not exist; use 0, 1, 2 or 3"


def _schedule(name: str, value: object) -> str | None:
    known = isinstance(value, str) and value in SCHEDULES
    return None if known else f"{name}={value!r} is not known; use {', '.join(SCHEDULES)}"


def _stages(name: str, value: object) -> str | None:
    if isinstance(value, (list, tuple)) and value and all(is_count(n, 0) for n in value):
        return None
    return f"{name}={value!r}: must be positive numbers, the layers of every stage, e.g. [3, 5]"


def _recompute(name: str, value: object) -> str | None:
    if isinstance(value, tuple) and value and all(is_count(n, 0) for n in value):
        return None  # layers per stage, see `autoplan.program.legality`
    return _unreadable(read_recompute, value)


def _context_method(name: str, value: object) -> str | None:
    words = [value] if isinstance(value, str) else [*value, *value.values()] if isinstance(value, Mapping) else [None]
    if all(isinstance(word, str) for word in words):
        return None
    return f"{name}={value!r} must be the name of a method, such as {INNER[0]!r}, or a mapping from block to one"


def _offload(name: str, value: object) -> str | None:
    return _unreadable(read_offload, value)


def _unreadable(read: Callable[[object], object], value: object) -> str | None:
    try:
        read(value)
    except PinError as error:
        return str(error)
    return None


def _state_slack(name: str, value: object) -> str | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 1 <= value < math.inf:
        return None
    return f"{name}={value!r}: must be a number of at least 1"


def _above_one(name: str, short: str = "") -> Callable[[ParallelConfig, int], str]:
    def label(c: ParallelConfig, layers: int) -> str:
        value = getattr(c, name)
        return f"{short or name}{value}" if value > 1 else ""

    return label


def _cp_label(c: ParallelConfig, layers: int) -> str:
    method = "" if c.context_method is None else f" {methods_text(c.context_method)}"
    return f"cp{c.cp}{method}" if c.cp > 1 else ""


def _zero_label(c: ParallelConfig, layers: int) -> str:
    copies = f"-replicas{c.zero_replicas}" if c.zero_replicas > 1 else ""
    return f"zero{c.zero_stage}{copies}" if c.dp * c.cp > 1 else ""


def _recompute_label(c: ParallelConfig, layers: int) -> str:
    how = recompute_label(c.recompute, layers)
    return "" if how == NONE else f"recompute {how}"


@dataclass(frozen=True)
class ParallelConfig:
    """The degrees and settings of one plan.

    The world size is pp * dp * cp * tp; ep and etp fold into dp * cp * tp. A choice is declared here; commands, files
    and reports are derived from its record.

    Example:
        >>> from autoplan import ParallelConfig
        >>> config = ParallelConfig(dp=4, tp=2, pp=2, zero_stage=1, num_micro_batches=8)
        >>> config.but(tp=4).tp
        4
    """

    dp: int = choice(
        1,
        "Data-parallel degree; default: all remaining devices.",
        left_out=True,
        said=lambda _: True,
        label=_above_one("dp"),
        label_at=4,
    )
    tp: int = choice(1, "Tensor-parallel degree.", said=lambda _: True, label=_above_one("tp"), label_at=1)
    pp: int = choice(1, "Pipeline stages.", said=lambda _: True, label=_above_one("pp"), label_at=3)
    cp: int = choice(
        1,
        "Context-parallel degree.",
        label=_cp_label,
        label_at=2,
        about=(
            "Number of ranks that every sequence is cut over (zig-zag, or in parts without an order); if left out, "
            "searched where at least 8,192 tokens per rank remain (4,096 with fewer sequences than devices), "
            "otherwise 1"
        ),
    )
    ep: int = choice(
        1,
        "Expert-parallel degree, folded into dp x cp x tp.",
        label=_above_one("ep"),
        label_at=5,
        about="Number of ranks that experts are spread over, with token dispatch; folded from dp, cp, tp",
    )
    etp: int | None = choice(  # None: as tp
        None,
        "Tensor-parallel degree inside experts; default: as tp.",
        left_out=True,
        said=lambda c: c.etp not in (None, c.tp),
        open_word="as tp",
        label=lambda c, _: f"etp{c.etp}" if c.ep > 1 and c.etp not in (None, c.tp) else "",
        label_at=6,
    )
    zero_stage: int = choice(
        1,
        "ZeRO stage, 0 to 3; default: that of --like, else 1.",
        word="ZeRO",
        left_out=True,
        flags=("--zero", "--zero-stage"),
        obstacle=_zero_stage,
        least=0,
        most=3,
        said=lambda _: True,
        label=_zero_label,
        label_at=7,
        about="ZeRO stage, 0 to 3: data parallelism shards nothing, the optimizer state, gradients too, parameters too",
    )
    micro_batch_size: int = choice(
        1,
        "Sequences per micro-batch.",
        word="micro-batch",
        flags=("--micro-batch-size", "--mbs"),
        said=lambda _: True,
        label=lambda c, _: f"mbs{c.micro_batch_size}",
        label_at=8,
    )
    # Not on the command line: it follows from the batch
    num_micro_batches: int = choice(
        1,
        label=lambda c, _: f"x{c.num_micro_batches}",
        label_at=9,
        about="Number of micro-batches that the batch of a data-parallel rank is cut into",
    )
    schedule: str = choice(
        PLAIN_SCHEDULE,
        f"Pipeline schedule: {', '.join(SCHEDULES)}.",
        written=Written.WORD,
        left_out=True,
        obstacle=_schedule,
        said=lambda c: (c.schedule, c.virtual_stages) != (PLAIN_SCHEDULE, 1),
        label=lambda c, _: "" if c.schedule == PLAIN_SCHEDULE else c.schedule,
        label_at=13,
        about=", ".join(f'`"{name}"`' for name, schedule in SCHEDULES.items() if schedule.torch_class),
    )
    virtual_stages: int = choice(  # chunks per rank, which the schedule places
        1,
        "Pipeline stages per rank; default: the fewest that the schedule allows.",
        word="stages per rank",
        left_out=True,
        label=_above_one("virtual_stages", "vpp"),
        label_at=10,
        about="Pipeline stages per rank (2 in the V-shaped schedules)",
    )
    # One of: a kind for all layers (RECOMPUTE, GROUPS joined by `+`, or modules); a mapping from block call to a kind;
    # the number of layers of each stage (chunk) that are recomputed in full
    recompute: str | Mapping[str, str] | tuple[int, ...] = choice(
        "none",
        "none (the default), selective, full, products, offload, groups of regions (attention+norms), recomputed "
        "layers per stage (3,0,0,0), or a choice per layer, counted from 0: 0-3=full,4-31=mlp.",
        written=Written.WORD,
        left_out=True,
        obstacle=_recompute,
        read=recompute_of_text,
        text=recompute_text,
        label=_recompute_label,
        label_at=11,
        about=(
            '`"none"`, `"full"`, `"selective"` (the attention core), regions (`"attention"`, `"mlp"`, `"norms"`, '
            'joined by `+`), `"offload"` (activations are copied to the host), or a mapping from block to one of these'
        ),
    )
    stages: tuple[int, ...] | None = choice(  # per chunk with virtual stages, in model order; None: balanced
        None,
        "Layers per stage: 10,11,11; default: balanced.",
        open_word="even",
        written=Written.LIST,
        obstacle=_stages,
        may_be_open=True,
        read=lambda text, _: read_list(f"--stages {text}", text),
        said=lambda c: c.stages is not None and c.pp * c.virtual_stages > 1,
        about=("Layers of every stage, e.g. `[3, 5]`; with several stages per rank all of them, in model order"),
    )
    state_slack: float = choice(
        1.02,
        "Limit on the stored state of a layout, as a multiple of the least possible.",
        written=Written.NUMBER,
        obstacle=_state_slack,
        reported=False,
        about="Limit on the stored state per device, as a multiple of the least that `tp` allows (1.02)",
    )
    # One name of `config.context_methods` for all blocks with attention, a mapping from block to name, or None (with cp
    # > 1: undecided). The available methods depend on cp and on the model.
    context_method: str | Mapping[str, str] | None = choice(
        None,
        "Attention over cut sequences: gather, ring, ulysses, ulysses2xring2, or BLOCK=METHOD,...",
        word="context method",
        open_word="none",
        written=Written.WORD,
        obstacle=_context_method,
        may_be_open=True,
        read=lambda text, _: read_methods(text),
        text=lambda value, _: methods_text(value),
        about=(
            f'How attention over a cut sequence works: {_INNER_NAMES}, `"ulysses"` or a product such as '
            '`"ulysses2xring2"`, for all blocks or a mapping from block to one; if left out, the cheapest that '
            "fits"
        ),
    )
    # The number of copies of the sharded state: ZeRO shards over dp * cp / zero_replicas neighbours
    zero_replicas: int = choice(
        1,
        "Hybrid ZeRO: number of copies of the sharded state.",
        word="ZeRO replicas",
        about=(
            "number of copies of the sharded state (hybrid ZeRO: neighbours share a copy); a divisor of dp; if"
            " left out, 1 or as many as keep the shards inside one scale-up domain, node or rail group"
        ),
    )
    offload: tuple[str, ...] = choice(  # OFFLOADS other than activations, which `recompute` places
        (),
        "What is kept on the host: any of activations, optimizer, parameters, joined by +, or none.",
        written=Written.WORD,
        obstacle=_offload,
        text=lambda value, _: offload_text(value),
        label=lambda c, _: f"offload {'+'.join(c.offload)}" if c.offload else "",
        label_at=12,
        about=(
            'What is kept on the host: `"activations"`, `"optimizer"`, `"parameters"` (ZeRO 1 to 3), joined by `+`, or'
            ' `"none"`; if left out, searched where memory binds and the speed of the host\'s link is known. '
            "`pm.parameters()` are then on the host; the training loop stays as it is"
        ),
    )

    def __hash__(self) -> int:
        # mappings are not hashable; of those, few configurations differ in anything but the context method alone
        known = self.__dict__.get("_hash")
        if known is None:
            method = self.context_method
            how = method if method is None or isinstance(method, str) else frozenset(method.items())
            known = self.__dict__["_hash"] = hash((_DEGREES(self), how))
        return int(known)

    def __getstate__(self) -> dict[str, Any]:
        # another process hashes strings otherwise
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    def but(self, **changes: Any) -> ParallelConfig:
        """Return a copy with other values. Faster than `dataclasses.replace`: a search makes some 100,000 copies."""
        made = object.__new__(ParallelConfig)
        made.__dict__.update(self.__dict__)
        made.__dict__.pop("_hash", None)
        made.__dict__.update(changes)
        return made

    @property
    def num_devices(self) -> int:
        """World size."""
        return self.pp * self.stage_ranks

    @property
    def stage_ranks(self) -> int:
        """The number of ranks of one pipeline stage, which ep and etp divide a second time."""
        return self.dp * self.cp * self.tp

    @property
    def num_shards(self) -> int:
        """The number of ranks that ZeRO shards over."""
        return self.dp * self.cp // self.zero_replicas

    @property
    def expert_tp(self) -> int:
        """The number of ranks that each expert is sharded over: etp, or tp if etp is None."""
        return self.tp if self.etp is None else self.etp

    @property
    def spreads_experts(self) -> bool:
        """True if experts are laid out over ep x etp (the expert mesh); False if they follow tensor parallelism."""
        return self.ep > 1 or self.expert_tp != self.tp

    @property
    def methods(self) -> tuple[tuple[str, str], ...]:
        """Sorted pairs (block, its context-parallel method) if the method is chosen per block; else empty."""
        return tuple(sorted(self.context_method.items())) if isinstance(self.context_method, Mapping) else ()

    @property
    def num_actions(self) -> int:
        """The approximate number of actions in a simulation of the pipeline."""
        return 2 * self.pp * self.num_micro_batches * self.virtual_stages


def scatters_each(config: ParallelConfig, options: RunOptions) -> bool:
    """Return True if every backward leaves gradients of ZeRO 2 and 3 in shards; False if they are whole until the last.

    One micro-batch is the last one.
    """
    return config.zero_stage >= 2 and not (options.reduce_once and config.num_micro_batches > 1)


def sums_in_32_bits(config: ParallelConfig, options: RunOptions) -> bool:
    """Return True if ZeRO keeps whole gradients of 16 bits as sums in 32 bits until it reduces these.

    `fully_shard` does with a reduce_dtype of float32. What is cast only to be all-reduced stays in 16 bits.
    """
    whole = config.zero_stage > 0 and not scatters_each(config, options)
    return options.wide_sums and whole and not options.all_reduced


_DEGREES = attrgetter(
    *("dp", "tp", "pp", "cp", "ep", "etp", "zero_stage", "micro_batch_size", "num_micro_batches"),
    *("schedule", "virtual_stages", "zero_replicas", "offload"),
)
