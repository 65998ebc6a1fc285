"""The price of a plan in parts: time by term, memory by stage and term."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from autoplan.config import numbers
from autoplan.config.html import table
from autoplan.cost_models.memory.ranks import NOT_ALLOCATED
from autoplan.cost_models.quantity import Quantity, total
from autoplan.cost_models.time.simulation import TimelineEvent

_FAMILIES = ("tp", "cp", "ep", "dp", "pp")  # of axes, whose collectives are terms of a step


def comm_term(family: str) -> str:
    """Return the name of the term of a step for the collectives over a family of axes."""
    return f"{family}_comm"


COMM_TERMS = frozenset(map(comm_term, _FAMILIES))


@dataclass(frozen=True)
class StageEstimate:
    """One pipeline rank: its layers, the cost of a micro-batch, and its memory by term."""

    index: int
    num_layers: int
    num_recomputed: int
    forward_s: Quantity
    backward_s: Quantity
    in_flight: int
    memory: Mapping[str, Quantity]  # bytes by term, at the fullest moment of the step
    fullest: str = ""  # the name of that moment
    host_memory: Mapping[str, Quantity] = field(default_factory=dict)  # bytes in host memory, by term

    @property
    def memory_bytes(self) -> Quantity:
        """The sum of all terms."""
        return total(list(self.memory.values()))

    @property
    def allocated_bytes(self) -> Quantity:
        """Bytes of tensors alone, as `torch.cuda.max_memory_allocated` counts."""
        return total([size for name, size in self.memory.items() if name not in NOT_ALLOCATED])

    @property
    def host_bytes(self) -> Quantity:
        """The bytes in host memory."""
        return total(list(self.host_memory.values()))


@dataclass(frozen=True)
class Estimate:
    """Time and memory of one plan. `breakdown` adds up to the step: seconds of the busiest rank by term.

    `mfu` counts attention in full, as PaLM (appendix B) and NeMo's tables do; `mfu_causal` counts the half of it that a
    causal mask leaves, as Megatron Bridge does. They are far apart for long sequences. Frozen weights count without the
    gradient that they do not have: 4 N per token, not 6 N.
    """

    step_time_s: Quantity
    breakdown: Mapping[str, Quantity]
    stages: tuple[StageEstimate, ...]
    tokens_per_step: float
    tokens_per_s: float
    tokens_per_s_per_device: float
    mfu: float
    mfu_causal: float
    memory_capacity_bytes: float
    events: tuple[TimelineEvent, ...] = field(default=(), repr=False)
    host_capacity_bytes: float = math.inf  # a device's share of its host

    @property
    def peak_memory_bytes(self) -> Quantity:
        """The memory of the fullest stage."""
        return max((s.memory_bytes for s in self.stages), key=lambda q: q.mid)

    @property
    def fits(self) -> bool:
        """True if every stage's expected memory fits the device, and its offloaded data its share of the host."""
        return self.peak_memory_bytes.mid <= self.memory_capacity_bytes and self.fits_host

    @property
    def peak_allocated_bytes(self) -> Quantity:
        """The tensors of the stage that has most of them, as `torch.cuda.max_memory_allocated` counts."""
        return max((s.allocated_bytes for s in self.stages), key=lambda q: q.mid)

    @property
    def peak_host_bytes(self) -> Quantity:
        """The host memory of the stage that uses most of it."""
        return max((s.host_bytes for s in self.stages), key=lambda q: q.mid)

    @property
    def fits_host(self) -> bool:
        """True if the offloaded data fits a device's share of its host."""
        return self.peak_host_bytes.mid <= self.host_capacity_bytes

    def _repr_html_(self) -> str:
        """Return two tables for a notebook: the step by term, and the memory of every stage by term."""
        seconds = [(name, _q(q, 1.0), str(q.tag)) for name, q in self.breakdown.items() if q.mid > 0]
        seconds.append(("step", _q(self.step_time_s, 1.0), str(self.step_time_s.tag)))
        verdict = "fits" if self.fits else f"does not fit: {self.missing()}"
        rates = f"{numbers.scaled(self.tokens_per_s)} tokens/s, MFU {100 * self.mfu:.0f} %; {verdict}"
        terms = dict.fromkeys(term for stage in self.stages for term in stage.memory)
        rows = [(term, *(_q(s.memory[term], 1e9) if term in s.memory else "" for s in self.stages)) for term in terms]
        rows.append(("total", *(_q(s.memory_bytes, 1e9) for s in self.stages)))
        heads = ("term", *(f"stage {s.index}" for s in self.stages))
        limit = f"GB per device, low to high; a device has {self.memory_capacity_bytes / 1e9:.1f}"
        return table("step", ("term", "seconds, low to high", "evidence"), seconds, rates) + table(
            "memory", heads, rows, limit
        )

    def missing(self) -> str:
        """Return the shortage of a plan that does not fit, in words: of the fullest stage's device, or of its host."""
        fullest = max(self.stages, key=lambda s: s.memory_bytes.mid)
        term = max(fullest.memory, key=lambda t: fullest.memory[t].mid)
        over = fullest.memory_bytes.mid - self.memory_capacity_bytes
        if over > 0:
            return (
                f"stage {fullest.index} needs {fullest.memory_bytes.mid / 1e9:.1f} GB, {numbers.gigabytes(over)} more "
                f"than a device has; its largest term is {term} ({fullest.memory[term].mid / 1e9:.1f} GB)"
            )
        held = max(self.stages, key=lambda s: s.host_bytes.mid)
        return (
            f"stage {held.index} offloads {held.host_bytes.mid / 1e9:.1f} GB to the host, where a device's share "
            f"of the memory is {self.host_capacity_bytes / 1e9:.1f} GB (@host_memory_gb)"
        )


def _q(q: Quantity, unit: float) -> str:
    """Return a quantity in a unit, with its interval."""
    if q.low == q.high:
        return numbers.digits(q.mid / unit)
    return f"{numbers.digits(q.mid / unit)} ({numbers.digits(q.low / unit)} to {numbers.digits(q.high / unit)})"
