"""Clocks, power and other processes of the devices, before and after measuring: times hold at the clocks they have.

GPUs are read by `nvidia-smi --query-gpu` while they are kept busy (an idle one rests at a fraction of its clock). CPUs
are read by the fastest core of /proc/cpuinfo, which is a working one, and the governor of cpufreq. Virtual machines
often show a constant clock. A figure that the driver does not give is None.

`measure_clock` measures the effect of the clocks: the time of a large product in short bursts, as operations are
measured, and after seconds without a pause, as in training, when a GPU is at its power limit. CPUs are left out: they
are measured under load of all ranks, each in chains that follow one another closely.
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoplan.cost_models.profile import MeasuredOp, Profile
from autoplan.profiler.job import Job
from autoplan.profiler.system import System, Unreadable, rows_of
from autoplan.runtime.fused import cuda_capability

CLOCK_QUERY = (
    "nvidia-smi",
    "--query-gpu=index,uuid,clocks.current.sm,clocks.max.sm,clocks.current.memory,power.draw,temperature.gpu",
    "--format=csv,noheader,nounits",
)
PROCESS_QUERY = ("nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader")
WARNING = "warning: "  # the first word of notes that put the times in doubt
_FALLEN = 0.05  # of a clock: a larger fall is reported
_SEVERAL, _SPREAD = 3, 0.25  # repeats that have a spread, and the largest of an idle machine (measured: 0.04 to 0.07)
SUSTAINED_S = 10.0  # of load without a pause
_LAST_S = 1.0  # the part of it that counts
_BURST_S, _PAUSE_S, _BURSTS = 0.03, 0.1, 9  # a burst is as long as an operation's measurement; a rest before it
_PIECE_S = 0.25  # of load between two looks at the clock; the gaps in between are a hundredth of it
_MAX_PIECE = 800  # products: the queue of launches holds about 1,000
_SIZE = 8192  # of the product that takes most power in training
_FIRST_BFLOAT16 = (8, 0)  # compute capability: older GPUs (V100, T4) compute it without matrix units


@dataclass(frozen=True)
class DeviceState:
    """The state of one device at one time. For a CPU: the fastest core, and the kernel's governor of clocks.

    `num_processes`: processes that compute on it, as far as the driver can see (not through containers).
    """

    index: int
    clock_mhz: float | None
    max_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    num_processes: int | None = None
    governor: str = ""

    def data(self) -> dict[str, Any]:
        """Return the known figures as plain data."""
        return {k: v for k, v in dataclasses.asdict(self).items() if v not in (None, "")}


def _figure(text: str) -> float | None:
    """Read a figure; None for [N/A], [Not Supported] or [Unknown Error], which nvidia-smi writes for unknown ones."""
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else None


def parse_clocks(text: str, processes: str = "") -> tuple[DeviceState, ...]:
    """Return the devices of `CLOCK_QUERY` with the processes of `PROCESS_QUERY`. Raises Unreadable for other lines."""
    counts: dict[str, int] = {}
    for line in filter(None, map(str.strip, processes.splitlines())):
        uuid = line.partition(",")[0].strip()
        counts[uuid] = counts.get(uuid, 0) + 1
    out = []
    for parts in rows_of(text, 7, "a line of index, uuid, clocks, power and temperature"):
        clock, most, memory, power, temperature = (_figure(p) for p in parts[2:])
        company = counts.get(parts[1]) if counts else None
        out.append(DeviceState(int(parts[0]), clock, most, memory, power, temperature, company))
    return tuple(out)


def read_states(system: System, device_type: str) -> tuple[DeviceState, ...]:
    """Return the state of all devices of this machine. Raises Unreadable if its driver does not answer."""
    if device_type == "cuda":
        clocks = system.run(*CLOCK_QUERY)
        try:
            company = system.run(*PROCESS_QUERY)
        except Unreadable:
            company = ""  # not allowed in some containers: the number of processes stays unknown
        return parse_clocks(clocks, company)
    found = [float(x) for x in re.findall(r"^cpu MHz\s*:\s*([\d.]+)", system.read("/proc/cpuinfo"), re.MULTILINE)]
    try:
        governor = system.read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    except Unreadable:
        governor = ""  # virtual machines have none
    return (DeviceState(0, max(found, default=None), governor=governor),)


def clock_warnings(before: Sequence[DeviceState], after: Sequence[DeviceState], where: str = "") -> list[str]:
    """Return warnings about devices whose clock fell by more than 5 %, or that other processes used, too."""
    out, first = [], {s.index: s for s in before}
    for state in after:
        name = f"device {state.index}{where}"
        old = first.get(state.index)
        if old is not None and old.clock_mhz and state.clock_mhz and state.clock_mhz < (1 - _FALLEN) * old.clock_mhz:
            hot = f", {state.temperature_c:.0f} C" if state.temperature_c is not None else ""
            power = f", {state.power_w:.0f} W" if state.power_w is not None else ""
            out.append(
                f"{WARNING}{name}: its clock fell from {old.clock_mhz:.0f} to {state.clock_mhz:.0f} MHz while "
                f"measuring{hot}{power}; later times are longer than the first"
            )
        company = max((s.num_processes or 0 for s in (old, state) if s is not None), default=0)
        if company > 1:
            out.append(f"{WARNING}{name} was shared: {company} processes computed on it while it was measured")
    return out


def load_warning(load: float, local_processes: int, num_cores: int) -> list[str]:
    """Return a warning if other programs (a load average before measuring) leave too few cores for the processes."""
    if load + local_processes <= num_cores + 0.5:
        return []
    return [
        f"{WARNING}the CPU was shared: load {load:.1f} before {local_processes} measuring process(es) on "
        f"{num_cores} cores"
    ]


def time_warnings(ops: Sequence[MeasuredOp], clock: Mapping[str, float]) -> list[str]:
    """Return warnings about times that differ too much between repeats, or contradict each other.

    Args:
        ops: the operations that were measured.
        clock: the seconds of `large_product` (`cost_models.profile.CLOCK`); empty: not measured.
    """
    out, several = [], [r.forward_s for r in ops if r.forward_s.repeats >= _SEVERAL]
    spread = statistics.median((t.high - t.low) / t.median for t in several) if several else 0.0
    if spread > _SPREAD:
        out.append(
            f"{WARNING}half of the operations differ by {100 * spread:.0f} % or more between repeats (quartiles), as "
            "beside other work; measure again on an idle machine"
        )
    known = Profile("", "cuda", 1, 1, ops=tuple(ops)).product_flops
    fastest = max(known.get(name, 0.0) for name in ("bfloat16", "float16"))
    peak = 2.0 * _SIZE**3 / clock["burst_s"] if clock else math.inf
    if fastest > (1 + _SPREAD) * peak:
        out.append(
            f"{WARNING}a product ran at {fastest / 1e12:,.0f} TFLOP/s, but one of {_SIZE:,} x {_SIZE:,} at "
            f"{peak / 1e12:,.0f}: the device did other work in between; measure again"
        )
    return out


def half_dtype(device: torch.device) -> torch.dtype:
    """Return the 16-bit dtype in which a GPU multiplies fastest: bfloat16, or float16 where matrix units lack it."""
    old = torch.version.hip is None and (cuda_capability(device) or _FIRST_BFLOAT16) < _FIRST_BFLOAT16
    return torch.float16 if old else torch.bfloat16


def large_product(device: torch.device) -> Callable[[], object]:
    """Return one product of random numbers, which draws as much power as training does (ones draw less)."""
    a, b, out = (torch.randn(_SIZE, _SIZE, device=device).to(half_dtype(device)) for _ in range(3))
    return lambda: torch.mm(a, b, out=out)


def measure_clock(
    job: Job, product: Callable[[], object], pause: Callable[[float], None] = time.sleep
) -> dict[str, float]:
    """Return the seconds of one product (`cost_models.profile.CLOCK`) on the slowest rank; nothing if time is short.

    A collective; takes about 12 s.

    Args:
        job: of a device with a queue.
        product: queues one product.
        pause: lets the device rest for so many seconds.
    """

    def each_s(count: int) -> float:
        def several() -> None:
            for _ in range(count):
                product()

        return job.slowest([job.wall(several)])[0] / count

    product()  # chooses a kernel
    once_s = each_s(1)
    burst = max(1, round(_BURST_S / once_s))
    bursts = []
    for _ in range(_BURSTS):
        pause(_PAUSE_S)
        bursts.append(each_s(burst))
    piece = min(_MAX_PIECE, max(1, round(_PIECE_S / once_s)))
    worked_s, pieces = 0.0, []
    while worked_s < SUSTAINED_S:
        if not job.goes_on():
            return {}
        pieces.append(each_s(piece))
        worked_s += piece * pieces[-1]
    last = max(1, round(_LAST_S / (piece * pieces[-1])))
    return {"burst_s": statistics.median(bursts), "sustained_s": statistics.median(pieces[-last:])}
