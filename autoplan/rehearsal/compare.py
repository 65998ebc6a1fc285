"""Comparison of a rehearsed rank with its plan, up to the first difference.

Equal to the byte: every collective of the ledger, the sums at the end of a step, what ZeRO moves. Equal to the
operation: FLOPs of products, and of attention forward, to rounding. With frozen parameters a backward may end early: it
may compute less, and gather as little as half. Attention over a cut sequence may have a mask on a CPU, whose kernel
computes all pairs of tokens.

Memory may differ: parameters and optimizer state by `STATE_TOLERANCE`, the peak by `MEMORY_TOLERANCE`. The kernels
that a rehearsal runs are the CPU's, which keep other tensors than those of a GPU (a loss over a large vocabulary keeps
more, attention with keys wider than values holds its scores), so that the peak is compared with the plan's prediction
plus the difference that the memory model sees between the two; without the graph of the model that is not known, and
`UNKNOWN_KERNELS_TOLERANCE` holds. What a plan keeps on the host is in the same memory here and counts with the rest;
gradients there are made after the fullest moment of a first step, and with several stages per rank the price counts
activations there as if all micro-batches in flight were of the stage with most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from autoplan.errors import RehearsalError
from autoplan.rehearsal.expected import BACKWARD, BY_ATTENTION, BY_PRODUCTS, FORWARD, REPEATED, Expected, Messages
from autoplan.rehearsal.rank import Observed
from autoplan.units import bytes_text

_ROUNDING = 1e-6
MEMORY_TOLERANCE = 0.10  # of the predicted bytes of all tensors at the fullest moment
UNKNOWN_KERNELS_TOLERANCE = 0.35
STATE_TOLERANCE = 0.10  # of parameters and optimizer state
MEMORY_FLOOR_BYTES = 64 * 2**20  # below which bookkeeping of a step weighs: differences are not judged


@dataclass(frozen=True)
class Row:
    """A line of the comparison. `expected` None: the figure is shown and not compared."""

    name: str
    expected: float | None
    observed: float
    unit: str


@dataclass(frozen=True)
class RankReport:
    """The report of one rank: the lines of the comparison, and the differences in words, the first one first.

    Attributes:
        predicted_bytes: of all tensors at the fullest moment on the device: low, expected, high.
        predicted_terms: the expected ones by term.
        kernels: by term what the kernels of a CPU add (`Expected.kernels`).
    """

    rank: int
    coordinates: Mapping[str, int]
    stages: tuple[int, ...]
    num_micro_batches: int
    rows: tuple[Row, ...]
    differences: tuple[str, ...]
    peak_bytes: int
    predicted_bytes: tuple[float, float, float]
    predicted_terms: Mapping[str, float]
    kernels: Mapping[str, float] | None
    seconds: float


def compared(observed: Observed, said: Expected, stages: tuple[int, ...], trained: bool = True) -> RankReport:
    """Return the comparison of a rank with its expectations.

    Args:
        trained: every parameter is trained. Else a backward may end early: it computes and gathers less.
    """
    messages: Messages = Counter((r.kind, r.axis, r.phase, r.bytes) for r in observed.collectives)
    differences, rows = _own(messages, said), []
    for found, lines in (
        _ledger(messages, said, observed),
        _again(messages, said, observed),
        _sums(messages, said, observed, trained),
    ):
        differences += found
        rows += lines
    if said.unlisted:
        differences.append(said.unlisted)
    left = ", ".join(f"{n} {k} over {a} of {b:,} bytes in the {p}" for (k, a, p, b), n in sorted(messages.items()))
    if left:
        differences.append(f"it sends what is not planned: {left}")
    for found, lines in (_flops(observed, said, trained), _memory(observed, said, len(stages))):
        differences += found
        rows += lines
    return RankReport(
        rank=observed.rank,
        coordinates=observed.place.coordinates,
        stages=stages,
        num_micro_batches=observed.num_micro_batches,
        rows=tuple(rows),
        differences=tuple(differences),
        peak_bytes=observed.peak_bytes,
        predicted_bytes=said.memory_bytes,
        predicted_terms=said.memory,
        kernels=said.kernels,
        seconds=observed.seconds,
    )


def raise_first(report: RankReport) -> None:
    """Raise RehearsalError with the first difference of a rank, if there is one."""
    if report.differences:
        more = len(report.differences) - 1
        place = " ".join(f"{name}={i}" for name, i in report.coordinates.items())
        raise RehearsalError(
            f"rank {report.rank} ({place}) differs from its plan: {report.differences[0]}"
            + (f"; and {more} more differences" if more else "")
        )


def _own(messages: Messages, said: Expected) -> list[str]:
    """Take the runtime's own collectives of a step out of `messages`; return those that are missing."""
    wrong = [
        f"{kind} over {axis} in the {phase} of {size:,} bytes, once per step: {messages[kind, axis, phase, size]} "
        f"times, {count} are expected"
        for (kind, axis, phase, size), count in said.own.items()
        if messages[kind, axis, phase, size] < count
    ]
    messages.subtract(said.own)
    for key in [key for key, count in messages.items() if count <= 0]:
        del messages[key]
    return wrong


def _ledger(messages: Messages, said: Expected, observed: Observed) -> tuple[list[str], list[Row]]:
    """Take the collectives of the ledger out of `messages`; return what differs, and the lines."""
    return _taken(messages, said.per_micro_batch, observed.num_micro_batches, "the ledger says")


def _taken(messages: Messages, sized: Messages, times: int, says: str) -> tuple[list[str], list[Row]]:
    """Take collectives out of `messages`; return what differs, and the lines.

    Args:
        sized: those of one micro-batch, with their bytes.
        times: micro-batches.
        says: who expects them, for messages.
    """
    wrong, rows = [], []
    for (kind, axis, phase, size), count in sorted(sized.items()):
        found, wanted = messages.pop((kind, axis, phase, size), 0), count * times
        rows.append(Row(f"{kind} over {axis}, {phase}, {size:,} bytes", wanted, found, "times"))
        if found != wanted:
            wrong.append(
                f"{kind} over {axis} in the {phase} of {size:,} bytes: {found} times, {says} {wanted} "
                f"({count} per micro-batch)"
            )
    return wrong, rows


def _sums(messages: Messages, said: Expected, observed: Observed, trained: bool) -> tuple[list[str], list[Row]]:
    """Take what moves parameters and gradients out of `messages`."""
    wrong, rows = [], []
    wanted = Counter(said.deferred)
    wanted.update(said.zero)
    for (kind, axis), size in sorted(wanted.items()):
        mine = [key for key in messages if key[:2] == (kind, axis) and key[2] != REPEATED]
        found = sum(key[3] * messages.pop(key) for key in mine)
        what = f"{kind} over {axis} of parameters and gradients"
        rows.append(Row(what, size, found, "bytes"))
        # a block without a backward gathers its parameters for the forward alone
        least = size if trained or kind != "all_gather" else size // 2
        if not least <= found <= size:
            wrong.append(
                f"{what}: {found:,} bytes, {size:,} are expected in {observed.num_micro_batches} micro-batches"
            )
    return wrong, rows


def _again(messages: Messages, said: Expected, observed: Observed) -> tuple[list[str], list[Row]]:
    """Take the collectives that a recompute repeats out of `messages`; return what differs, and the lines.

    Without the graph, whatever the forward sends may be repeated.
    """
    if said.again is not None:
        return _taken(messages, said.again, observed.num_micro_batches, "the price counts")
    forward = {(kind, axis, size) for kind, axis, phase, size in said.per_micro_batch if phase == FORWARD}
    for key in list(messages):
        kind, axis, phase, size = key
        if phase == REPEATED and (kind, axis, size) in forward:
            del messages[key]
    return [], []


def _flops(observed: Observed, said: Expected, trained: bool) -> tuple[list[str], list[Row]]:
    """Return how the FLOPs differ, and their lines: forward, backward, and what a recompute repeats of a forward.

    How many the backward of a kernel of attention has is its own affair: they are shown.
    """
    if said.flops is None:
        return [], []
    wrong, rows, times = [], [], observed.num_micro_batches
    phases = (said.flops, FORWARD, FORWARD), (said.flops, BACKWARD, BACKWARD), (said.flops_again, FORWARD, REPEATED)
    for what in (BY_PRODUCTS, BY_ATTENTION):
        for flops, priced, phase in phases:
            found, wanted = float(observed.flops.get((what, phase), 0)), flops.least[what, priced] * times
            least = wanted if phase == FORWARD or trained else 0.0
            most = wanted + flops.spare[what, priced] * times
            judged = (what, phase) != (BY_ATTENTION, BACKWARD)
            if found or wanted:
                rows.append(Row(f"FLOPs of {what}, {phase}", wanted if judged else None, found, "FLOPs"))
            if judged and not least * (1 - _ROUNDING) <= found <= most * (1 + _ROUNDING):
                wrong.append(f"FLOPs of {what} in the {phase}: {found:.6g}, the price counts {wanted:.6g}")
    return wrong, rows


def _memory(observed: Observed, said: Expected, num_stages: int) -> tuple[list[str], list[Row]]:
    low, mid, high = said.memory_bytes
    known, hosted = said.kernels is not None, said.host.get("state", 0.0)
    expected = mid + sum((said.kernels or {}).values()) + sum(said.host.values())
    least = expected - (observed.state_bytes["gradients"] if hosted else 0.0)
    if num_stages > 1:
        least -= said.host.get("activations", 0.0)
    tolerance = MEMORY_TOLERANCE if known else UNKNOWN_KERNELS_TOLERANCE
    states = [observed.state_bytes[n] for n in ("parameters", "optimizer", *(["gradients"] if hosted else []))]
    predicted = hosted + sum(said.memory.get(name, 0.0) for name in ("parameters", "optimizer"))
    what = "parameters and optimizer state" + (", gradients on the host" if hosted else "")
    rows = [
        Row(what, predicted, float(sum(states)), "bytes"),
        Row("peak of all tensors", expected, float(observed.peak_bytes), "bytes"),
    ]
    allowed = max(tolerance * expected, MEMORY_FLOOR_BYTES)
    wrong = []
    if abs(sum(states) - predicted) > max(STATE_TOLERANCE * predicted, MEMORY_FLOOR_BYTES):
        wrong.append(f"{what} take {bytes_text(sum(states))}, predicted are {bytes_text(predicted)}")
    if not least - allowed <= observed.peak_bytes <= expected + allowed:
        kernels = f" with the kernels of a CPU, {bytes_text(mid)} with those of the device" if known else ""
        wrong.append(
            f"the peak of its tensors is {bytes_text(observed.peak_bytes)}, predicted are {bytes_text(expected)}"
            f"{kernels} ({bytes_text(low)} to {bytes_text(high)}); more than {tolerance:.0%} apart"
        )
    return wrong, rows
