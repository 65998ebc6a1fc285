"""Measurements of one kind of machine: operations, collectives, overheads, and how well they interpolate.

    Profile.load("cpu-2core-gloo-w2")      a shipped profile, one of the user's cache, or a path
    profile.op_s(work, "forward")          a measured time, or None
    profile.collective_s("all_reduce", 2**20, group_size=2, stride=1)

The text form is JSON, schema version 2. It is checked on reading: ProfileError names the field and the expected value.
Times are seconds of one call on one rank while all ranks of the job run the same (co-running processes share memory
bandwidth): the median, with the quartiles as its spread.

A device that works off a queue (CUDA) has two times for everything: its own, measured by its events, and the time of
the host, which fills the queue (`host_forward_s`, `host_backward_s`, `host_overheads`). A pass takes the longer of the
two (`time.host`). On a CPU the one time includes both, and there are no host times.
"""

from __future__ import annotations

import importlib.resources
import json
import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from autoplan.cost_models.hardware.collective_kinds import MEASURED_COLLECTIVES
from autoplan.cost_models.json_fields import JsonField
from autoplan.cost_models.quantity import Quantity, Tag
from autoplan.cost_models.work import OpWork, Plain
from autoplan.errors import ProfileError
from autoplan.files import cache_folder, json_of, write_whole
from autoplan.ops.saved import TensorFacts
from autoplan.ops.table import op_record
from autoplan.units import DEVICE_TYPES, DTYPE_BYTES

PROFILE_SCHEMA_VERSION = 2
PHASES = ("forward", "backward")
_LONG_S = 1e-4  # a product of this long or longer says how fast products can be
# On CPUs collectives are measured between compute phases of this length, in seconds.
LINK_WORK_S = 0.002
OVERHEADS = (
    "step_s",  # fixed cost of ParallelModel.step: a model with next to no work, one micro-batch
    "micro_batch_s",  # fixed cost of one more micro-batch in the step
    "op_forward_s",  # one more operation in a program, beyond its time in a chain of equal operations
    "op_backward_s",
    "zero_block_forward_s",  # hooks of fully_shard around one block without anything to gather or reduce
    "zero_block_backward_s",
    "zero_gather_s",  # gathering one block, without the collective: copies, buffers
    "zero_gather_tensor_s",  # per parameter of the block
    "zero_gather_byte_s",  # per gathered byte
    "zero_reduce_s",  # reduce-scatter of the gradients of one block, likewise
    "zero_reduce_tensor_s",
    "zero_reduce_byte_s",
    # a rank waits at a collective for slower ranks: this times the square root of the compute seconds since the last
    # collective (noise of many small disturbances), beyond the wait that the link times include; seconds ** 0.5
    "straggler_sqrt_s",
    "all_reduce_byte_s",  # ZeRO 0: copies into flat buffers and back, per byte of gradients
    "pipeline_action_s",  # one forward or backward of one micro-batch in a pipeline schedule, without its sends
    "split_layer_s",  # extra cost of a split backward, per layer and micro-batch (walks over the graph)
    "optimizer_step_s",  # fixed cost of optimizer.step() of AdamW
    "optimizer_tensor_s",  # one more tensor in it, without its elements
    "zero_optimizer_tensor_s",  # likewise, for a shard that fully_shard made
    "comm_s",  # host time to start one collective inside a block; the link times include the rest
    "clip_s",  # fixed cost of clip_grad_norm_
    "clip_tensor_s",  # one more tensor in it
    # a collective beside products of the same length; no seconds: the share of the shorter that the other hid, and the
    # slowdown of each over running alone (at least 1)
    "overlap_fraction",
    "overlap_compute_slowdown",
    "overlap_collective_slowdown",
)
# Seconds of one large product: in short bursts, as operations are measured, and at the end of many seconds without a
# pause, when the device is as warm and as short of power as in training.
CLOCK = ("burst_s", "sustained_s")
BANDWIDTH_BYTES = 1 << 20  # messages of at least this size reveal the bandwidth
# The error of an interpolation that was never checked against held-out measurements.
UNKNOWN_ERROR = 0.5


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds: the median of `repeats` samples and their quartiles, `0 <= low <= median <= high`."""

    median: float
    low: float
    high: float
    repeats: int

    def quantity(self, tag: Tag = Tag.MEASURED) -> Quantity:
        """Return the time as an interval."""
        return Quantity(self.low, self.median, self.high, tag)


@dataclass(frozen=True)
class MeasuredOp:
    """One measured operation. `backward_s` is None if no gradient flows through it.

    `host_*`: host seconds to queue it, if the device works off a queue; else None.
    """

    work: OpWork
    forward_s: Timing
    backward_s: Timing | None = None
    host_forward_s: Timing | None = None
    host_backward_s: Timing | None = None

    def host_s(self, phase: str) -> Timing | None:
        """Return the host time of one phase."""
        return self.host_forward_s if phase == "forward" else self.host_backward_s


@dataclass(frozen=True, slots=True)
class LinkRecord:
    """One measured collective over ranks `r0 + i * stride`. `num_bytes` as in CommWork.

    `time_s`: all groups of the grid at once, as a mesh runs them. `alone_s`: the group of rank 0 while the others rest;
    None if it was not measured.
    """

    kind: str
    group_size: int
    stride: int
    num_bytes: int
    time_s: Timing
    alone_s: Timing | None = None

    @property
    def sharing(self) -> float | None:
        """The slowdown because the other groups use the same links and cards; None if not measured."""
        return None if self.alone_s is None else self.time_s.median / self.alone_s.median

    def crosses_nodes(self, ranks_per_node: int) -> bool:
        """Return True if some group of the grid has ranks on two nodes of `ranks_per_node` consecutive ranks."""
        return bool(ranks_per_node % (self.group_size * self.stride))


@dataclass(frozen=True, slots=True)
class ErrorStats:
    """Relative errors `|predicted / measured - 1|` over `count` shapes that were held out of the interpolation."""

    count: int
    median: float
    p90: float
    max: float

    @staticmethod
    def of(errors: Iterable[float]) -> ErrorStats:
        """Return the statistics of relative errors. Raises ProfileError if there are none."""
        found = sorted(errors)
        if not found:
            raise ProfileError("held-out error statistics need at least one shape")
        at = [found[min(len(found) - 1, math.ceil(q * len(found)) - 1)] for q in (0.5, 0.9)]
        return ErrorStats(len(found), at[0], at[1], found[-1])


@dataclass(frozen=True, eq=False)  # compared and hashed by identity: caches are per profile
class Profile:
    """Measurements of one kind of machine.

    Attributes:
        host_overheads: Overheads of the host alone, with the names of `overheads`; then `overheads` are of the device,
            except for `step_s` and `micro_batch_s`, which the host spends before the first forward, while the device is
            idle.
        clock: See CLOCK.
        held_out: Errors by op class or collective.
        failed: The reason why an operation cannot be measured, by `OpWork.key`.
        notes: How it was measured, and what there was no time for.
        machine: Provenance that no price depends on, as the profiler found it (topology, clocks before and after,
            nodes).

    Example:
        >>> from autoplan import Profile
        >>> profile = Profile("mine", "cpu", world_size=2, num_threads=1)  # autoplan profile measures one
        >>> Profile.from_json(profile.to_json()).world_size
        2
    """

    name: str
    device_type: str
    world_size: int
    num_threads: int
    hardware: Mapping[str, Plain] = field(default_factory=dict)
    software: Mapping[str, str] = field(default_factory=dict)
    date: str = ""
    ops: tuple[MeasuredOp, ...] = ()
    links: tuple[LinkRecord, ...] = ()
    overheads: Mapping[str, float] = field(default_factory=dict)
    held_out: Mapping[str, ErrorStats] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    machine: Mapping[str, Any] = field(default_factory=dict)
    host_overheads: Mapping[str, float] = field(default_factory=dict)
    clock: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def has_host(self) -> bool:
        """True if the host was measured apart from the device."""
        return any(r.host_forward_s is not None for r in self.ops)

    @property
    def sustained(self) -> float:
        """The time of a large product in training over its time in short bursts, at least 1; 1 if not measured."""
        return max(1.0, self.clock["sustained_s"] / self.clock["burst_s"]) if self.clock else 1.0

    @cached_property
    def by_key(self) -> dict[str, MeasuredOp]:
        """The operations by `OpWork.key`."""
        return {r.work.key: r for r in self.ops}

    @cached_property
    def product_flops(self) -> Mapping[str, float]:
        """The most FLOP/s of a measured product, by dtype; products too short to say so are left out."""
        out: dict[str, float] = {}
        for r in self.ops:
            if r.work.flops and op_record(r.work.op).weights and r.forward_s.median > _LONG_S:
                dtype = r.work.inputs[0].dtype
                out[dtype] = max(out.get(dtype, 0.0), r.work.flops / r.forward_s.median)
        return out

    @cached_property
    def settled(self) -> frozenset[str]:
        """The keys of operations that need no measurement: measured, or known not to be measurable."""
        return frozenset(self.by_key.keys() | self.failed.keys())

    @cached_property
    def _curves(self) -> dict[tuple[str, int, int], _Curve]:
        found: dict[tuple[str, int, int], list[LinkRecord]] = {}
        for r in self.links:
            found.setdefault((r.kind, r.group_size, r.stride), []).append(r)
        return {key: _Curve.of(records) for key, records in found.items()}

    def op_s(self, work: OpWork, phase: str) -> Quantity | None:
        """Return the measured time of exactly this work, or None. Raises ProfileError for an unknown phase."""
        if phase not in PHASES:
            raise ProfileError(f"phase {phase!r} is not known; use {' or '.join(PHASES)}")
        record = self.by_key.get(work.key)
        timing = None if record is None else record.forward_s if phase == "forward" else record.backward_s
        return None if timing is None else timing.quantity()

    def collective_s(self, kind: str, num_bytes: float, group_size: int, stride: int) -> Quantity | None:
        """Return the seconds of one collective, or None if this kind was not measured over such a group.

        Between measured sizes the time is linear in log-log and never falls with the size. Below the smallest size it
        is constant; above the largest size it grows with the bandwidth of that size. If only small messages were
        measured, larger ones give None: small messages reveal a latency (`longest_s`) but no bandwidth.

        Raises: ProfileError for an unknown kind.
        """
        if kind not in MEASURED_COLLECTIVES:
            raise ProfileError(f"unknown collective {kind!r}; known: {', '.join(MEASURED_COLLECTIVES)}")
        curve = self._curves.get((kind, group_size, stride))
        if curve is None:
            return None
        if curve.sizes[-1] < min(num_bytes, BANDWIDTH_BYTES):
            return None
        low, mid, high = (curve.at(num_bytes, which) for which in range(3))
        if num_bytes in curve.sizes:
            return Quantity(low, mid, high, Tag.MEASURED)
        error = self.held_out[kind].p90 if kind in self.held_out else UNKNOWN_ERROR
        return Quantity(min(low, mid / (1 + error)), mid, max(high, mid * (1 + error)), Tag.FITTED)

    def longest_s(self, kind: str, group_size: int, stride: int) -> Quantity | None:
        """Return the seconds of the largest measured message, a lower bound for larger ones; None if there is none."""
        curve = self._curves.get((kind, group_size, stride))
        if curve is None:
            return None
        low, mid, high = (row[-1] for row in curve.times)
        return Quantity(low, mid, high, Tag.MEASURED)

    def merged(self, other: Profile) -> Profile:
        """Return both profiles together; `other` wins where both measured the same thing. Its name is kept.

        Raises: ProfileError if the two differ in machine kind, world size or thread count.
        """
        for what in ("device_type", "world_size", "num_threads"):
            mine, theirs = getattr(self, what), getattr(other, what)
            if mine != theirs:
                raise ProfileError(
                    f"profiles {self.name!r} and {other.name!r} differ in {what}: {mine!r} and {theirs!r}"
                )
        for mapping in ("hardware", "software"):
            a, b = getattr(self, mapping), getattr(other, mapping)
            for key in a.keys() & b.keys():
                if a[key] != b[key]:
                    names = f"profiles {self.name!r} and {other.name!r}"
                    raise ProfileError(f"{names} differ in {mapping}.{key}: {a[key]!r} and {b[key]!r}")
        links = {(r.kind, r.group_size, r.stride, r.num_bytes): r for r in (*self.links, *other.links)}
        together = ("hardware", "software", "overheads", "held_out", "failed", "machine", "host_overheads")
        return replace(
            other,
            **{name: {**getattr(self, name), **getattr(other, name)} for name in together},  # type: ignore[arg-type]
            date=max(self.date, other.date),
            ops=tuple({**self.by_key, **other.by_key}.values()),
            links=tuple(links[k] for k in sorted(links)),
            notes=tuple(dict.fromkeys((*self.notes, *other.notes))),
            clock=dict(other.clock or self.clock),
        )

    # -- text form ---------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Return the text form: stable, one record per line."""
        head: dict[str, Any] = {
            "schema": PROFILE_SCHEMA_VERSION,
            **{name: getattr(self, name) for name in ("name", "device_type", "world_size", "num_threads")},
            "hardware": dict(sorted(self.hardware.items())),
            "software": dict(sorted(self.software.items())),
            "date": self.date,
            "failed": dict(sorted(self.failed.items())),
            "notes": list(self.notes),
            "overheads": {k: _short(v) for k, v in sorted(self.overheads.items())},
            "held_out": {k: _rounded(e) for k, e in sorted(self.held_out.items())},
        }
        for what, seconds in (("host_overheads", self.host_overheads), ("clock", self.clock)):
            if seconds:
                head[what] = {k: _short(v) for k, v in sorted(seconds.items())}
        if self.machine:
            head["machine"] = dict(sorted(self.machine.items()))
        lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in head.items()]
        ops = sorted(self.ops, key=lambda r: r.work.key)
        lines.append('"ops": [\n' + ",\n".join(json.dumps(_op_json(r)) for r in ops) + "\n]")
        links = sorted(self.links, key=lambda r: (r.kind, r.group_size, r.stride, r.num_bytes))
        lines.append('"links": [\n' + ",\n".join(json.dumps(_link_json(r)) for r in links) + "\n]")
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def save(self, path: Path | str) -> None:
        """Write the profile atomically; missing folders are created."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, self.to_json())

    @staticmethod
    def from_json(text: str, source: str = "profile") -> Profile:
        """Read and check a profile. Raises ProfileError that names the field of `source` and the expected value."""
        try:
            data = json_of(text)
        except ValueError as exc:
            raise ProfileError(f"{source} is not JSON: {exc}") from exc
        return _read_profile(JsonField(source, "", data))

    @staticmethod
    def of(given: Profile | Path | str | None) -> Profile | None:
        """Return a profile, or the one of a name or path (`load`). Raises ProfileError for anything else."""
        if given is None or isinstance(given, Profile):
            return given
        if isinstance(given, Path | str):
            return Profile.load(given)
        raise ProfileError(
            f"profile={given!r:.80} is of type {type(given).__name__}; give a name, the path of a .json, or an "
            "autoplan.Profile"
        )

    @staticmethod
    def load(path_or_name: Path | str) -> Profile:
        """Load a profile from a path (ends in `.json`), the user's cache or the shipped profiles; the cache wins.

        Raises: ProfileError for an unknown name (lists the known ones), or a missing or invalid file.
        """
        if str(path_or_name).endswith(".json"):
            path = Path(path_or_name)
            if not path.is_file():
                raise ProfileError(f"profile {str(path)!r} is not a file; names known: {', '.join(known()) or 'none'}")
            return Profile.from_json(_text(path), f"profile {path.name}")
        name = str(path_or_name)
        mine = user_folder() / f"{name}.json"
        shipped = importlib.resources.files("autoplan.profiles") / f"{name}.json"
        if re.fullmatch(r"[\w.+-]+", name):
            for place in (mine, shipped):
                if place.is_file():
                    return Profile.from_json(_text(place), f"profile {name}.json")
        raise ProfileError(
            f"profile {name!r} is not known; known: {', '.join(known()) or 'none'}, or a path to a .json"
        )


def user_folder() -> Path:
    """Return the folder of profiles that this user measured: `profiles` in the cache folder of autoplan."""
    return cache_folder("profiles")


def known() -> tuple[str, ...]:
    """Return the names of the shipped profiles and of the profiles in the user's cache."""
    names = {p.name for p in importlib.resources.files("autoplan.profiles").iterdir() if _is_profile(p)}
    if user_folder().is_dir():
        names |= {p.name for p in user_folder().iterdir() if _is_profile(p)}
    return tuple(sorted(n.removesuffix(".json") for n in names))


def _is_profile(path: Any) -> bool:
    with suppress(OSError):
        return path.name.endswith(".json") and b'"device_type"' in path.read_bytes()[:1000]
    return False


def _text(path: Any) -> str:
    """Return the text of a file. Raises ProfileError if it cannot be read, or is not in UTF-8."""
    try:
        text: str = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"profile {path.name} cannot be read: {error}") from error
    return text


# -- link curves -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Curve:
    """Time over bytes, for the low, middle and high times, as knots that never fall.

    Isotonic regression of the logarithms by pooling adjacent violators (Barlow et al., Statistical Inference under
    Order Restrictions, 1972): if a larger message was measured faster, both get their mean.
    """

    sizes: tuple[int, ...]
    times: tuple[tuple[float, ...], ...]

    @staticmethod
    def of(records: Iterable[LinkRecord]) -> _Curve:
        ordered = sorted(records, key=lambda r: r.num_bytes)
        columns = [[t.low, t.median, t.high] for t in (r.time_s for r in ordered)]
        rows = [_never_falling(column) for column in zip(*columns, strict=True)]
        return _Curve(tuple(r.num_bytes for r in ordered), tuple(rows))

    def at(self, num_bytes: float, which: int) -> float:
        """Return the time at any size; exact at the measured sizes."""
        sizes, times = self.sizes, self.times[which]
        if num_bytes <= sizes[0]:
            return times[0]
        if num_bytes >= sizes[-1]:
            return times[-1] * num_bytes / sizes[-1]
        i = bisect_left(sizes, num_bytes)
        if sizes[i] == num_bytes:
            return times[i]
        share = math.log(num_bytes / sizes[i - 1]) / math.log(sizes[i] / sizes[i - 1])
        return float(times[i - 1] * (times[i] / times[i - 1]) ** share) if times[i - 1] else times[i] * share


def _never_falling(values: Sequence[float]) -> tuple[float, ...]:
    pools: list[tuple[float, int]] = []  # sum of logarithms, count
    for value in values:
        pool = (math.log(max(value, 1e-12)), 1)
        while pools and pools[-1][0] / pools[-1][1] > pool[0] / pool[1]:
            last = pools.pop()
            pool = (last[0] + pool[0], last[1] + pool[1])
        pools.append(pool)
    return tuple(math.exp(total / count) for total, count in pools for _ in range(count))


# -- schema ------------------------------------------------------------------------------------------------------------


def _short(value: float) -> float:
    """Round to four digits; more would be noise."""
    return float(f"{value:.4g}")


_TENSOR = re.compile(r"(\w+)\[([\d,]*)\](\*?)")


def _tensor_json(t: TensorFacts) -> str:
    return f"{t.dtype}[{','.join(map(str, t.shape))}]{'*' if t.requires_grad else ''}"


def _rounded(record: Timing | ErrorStats) -> dict[str, float]:
    return {n: x if isinstance(x, int) else _short(x) for n, x in asdict(record).items()}


def _op_json(r: MeasuredOp) -> dict[str, Any]:
    return {
        "op": r.work.op,
        "inputs": [_tensor_json(t) for t in r.work.inputs],
        "outputs": [_tensor_json(t) for t in r.work.outputs],
        "attrs": dict(r.work.attrs),
        "flops": r.work.flops,
        "moved_bytes": r.work.moved_bytes,
        "forward_s": _rounded(r.forward_s),
        "backward_s": None if r.backward_s is None else _rounded(r.backward_s),
        **{f"host_{p}_s": _rounded(t) for p in PHASES if (t := r.host_s(p)) is not None},
    }


def _link_json(r: LinkRecord) -> dict[str, Any]:
    return {
        "kind": r.kind,
        "group_size": r.group_size,
        "stride": r.stride,
        "bytes": r.num_bytes,
        "time_s": _rounded(r.time_s),
        **({} if r.alone_s is None else {"alone_s": _rounded(r.alone_s)}),
    }


def _read_tensor(f: JsonField) -> TensorFacts:
    match = _TENSOR.fullmatch(f.text())
    if match is None or match.group(1) not in DTYPE_BYTES:
        raise f.fail('a tensor such as "float32[2,128]*" (a star: needs a gradient)')
    shape = tuple(int(x) for x in match.group(2).split(",") if x)
    return TensorFacts(shape, match.group(1), match.group(3) == "*")


def _read_timing(f: JsonField) -> Timing:
    f.only("median", "low", "high", "repeats")
    low, median, high = f.get("low").number(), f.get("median").number(positive=True), f.get("high").number()
    if not low <= median <= high:
        raise f.fail("low <= median <= high")
    return Timing(median, low, high, f.get("repeats").count())


def _read_op(f: JsonField) -> MeasuredOp:
    host = [f"host_{phase}_s" for phase in PHASES]
    f.only("op", "inputs", "outputs", "attrs", "flops", "moved_bytes", "forward_s", "backward_s", *host)
    work = OpWork(
        f.get("op").text(),
        tuple(_read_tensor(t) for t in f.get("inputs").each()),
        tuple(_read_tensor(t) for t in f.get("outputs").each()),
        tuple(sorted((k, v.plain()) for k, v in f.get("attrs").items())),
        f.get("flops").number(),
        f.get("moved_bytes").number(),
    )
    backward = f.get("backward_s")
    return MeasuredOp(
        work,
        _read_timing(f.get("forward_s")),
        None if backward.value is None else _read_timing(backward),
        *(_read_timing(f.get(name)) if name in f.value else None for name in host),
    )


def _read_link(f: JsonField) -> LinkRecord:
    f.only("kind", "group_size", "stride", "bytes", "time_s", "alone_s")
    return LinkRecord(
        f.get("kind").text(MEASURED_COLLECTIVES),
        f.get("group_size").count(),
        f.get("stride").count(),
        f.get("bytes").count(),
        _read_timing(f.get("time_s")),
        _read_timing(f.get("alone_s")) if "alone_s" in f.value else None,
    )


def _read_stats(f: JsonField) -> ErrorStats:
    f.only("count", "median", "p90", "max")
    return ErrorStats(f.get("count").count(), *(f.get(name).number() for name in ("median", "p90", "max")))


def _read_overheads(f: JsonField) -> dict[str, float]:
    overheads = {k: v.number() for k, v in f.items()}
    for name in overheads:
        if name not in OVERHEADS:
            raise ProfileError(f"{f.source}: {f.path}.{name} is not known; known: {', '.join(OVERHEADS)}")
    return overheads


def _read_clock(f: JsonField) -> dict[str, float]:
    f.only(*CLOCK)
    return {name: f.get(name).number(positive=True) for name in CLOCK}


def _read_profile(f: JsonField) -> Profile:
    if f.get("schema").value != PROFILE_SCHEMA_VERSION:
        raise f.get("schema").fail(f"{PROFILE_SCHEMA_VERSION}, the version this autoplan reads")
    f.only("schema", *Profile.__dataclass_fields__)
    return Profile(
        name=f.get("name").text(),
        device_type=f.get("device_type").text(DEVICE_TYPES),
        world_size=f.get("world_size").count(),
        num_threads=f.get("num_threads").count(),
        hardware={k: v.plain() for k, v in f.get("hardware").items()},
        software={k: v.text() for k, v in f.get("software").items()},
        date=f.get("date").text(),
        ops=tuple(_read_op(r) for r in f.get("ops").each()),
        links=tuple(_read_link(r) for r in f.get("links").each()),
        overheads=_read_overheads(f.get("overheads")),
        held_out={k: _read_stats(v) for k, v in f.get("held_out").items()},
        failed={k: v.text() for k, v in f.get("failed").items()},
        notes=tuple(n.text() for n in f.get("notes").each()),
        machine={k: v.value for k, v in f.get("machine").items()} if "machine" in f.value else {},
        host_overheads=_read_overheads(f.get("host_overheads")) if "host_overheads" in f.value else {},
        clock=_read_clock(f.get("clock")) if "clock" in f.value else {},
    )
