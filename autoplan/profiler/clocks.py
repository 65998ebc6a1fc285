"""Clocks, power and company of the devices, before and after measuring: times hold at the clocks they were taken at.

GPUs by `nvidia-smi --query-gpu` while they are kept busy (an idle one rests at a fraction of its clock); CPUs by the
fastest core of /proc/cpuinfo, which is one that works, and the governor of cpufreq. Virtual machines often show a
constant clock. A figure that the driver does not give is None.

`measure_clock` tells what the clocks come to: a large product in short bursts, as operations are measured, and after
seconds without a pause, as in training, when a GPU is at its limit of power. Not on CPUs, which are measured under load
of all ranks, each in chains that follow one another closely.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoplan.profiler.job import Job
from autoplan.profiler.system import System, Unreadable

CLOCK_QUERY = (
    "nvidia-smi",
    "--query-gpu=index,uuid,clocks.current.sm,clocks.max.sm,clocks.current.memory,power.draw,temperature.gpu",
    "--format=csv,noheader,nounits",
)
PROCESS_QUERY = ("nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader")
WARNING = "warning: "  # how notes begin that put the times in doubt
_FALLEN = 0.05  # of a clock: more than this is told
SUSTAINED_S = 10.0  # of load without a pause
_LAST_S = 1.0  # of it, which count
_BURST_S, _PAUSE_S, _BURSTS = 0.03, 0.1, 9  # a burst as long as an operation is measured, and a rest before it
_PIECE_S = 0.25  # of the load, between two looks at the clock: the gaps in between are a hundredth of that
_MAX_PIECE = 800  # products: the queue of launches holds about 1,000
_SIZE, _DTYPE = 8192, torch.bfloat16  # of the product: what training spends most power on


@dataclass(frozen=True)
class DeviceState:
    """One device at one time. `num_processes` that compute on it, as far as the driver tells (not through containers).

    For a CPU: the fastest core, and how the kernel chooses clocks.
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
        """What is known, as plain data."""
        return {k: v for k, v in dataclasses.asdict(self).items() if v not in (None, "")}


def _figure(text: str) -> float | None:
    """nvidia-smi writes [N/A], [Not Supported] or [Unknown Error] for what it cannot tell."""
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else None


def parse_clocks(text: str, processes: str = "") -> tuple[DeviceState, ...]:
    """Devices of `CLOCK_QUERY` with the processes of `PROCESS_QUERY`. Unreadable for a line of another form."""
    counts: dict[str, int] = {}
    for line in filter(None, map(str.strip, processes.splitlines())):
        uuid = line.partition(",")[0].strip()
        counts[uuid] = counts.get(uuid, 0) + 1
    out = []
    for line in filter(None, map(str.strip, text.splitlines())):
        parts = [p.strip() for p in line.split(",")]
        if len(parts) != 7 or not parts[0].isdigit():
            raise Unreadable(f"nvidia-smi: {line!r} is not a line of index, uuid, clocks, power and temperature")
        clock, most, memory, power, temperature = (_figure(p) for p in parts[2:])
        company = counts.get(parts[1]) if counts else None
        out.append(DeviceState(int(parts[0]), clock, most, memory, power, temperature, company))
    return tuple(out)


def read_states(system: System, device_type: str) -> tuple[DeviceState, ...]:
    """All devices of this machine now. Unreadable if its driver does not answer."""
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


def warnings(before: Sequence[DeviceState], after: Sequence[DeviceState], where: str = "") -> list[str]:
    """Devices whose clock fell by more than 5 %, or that others computed on as well."""
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
    """Where other programs (a load average before measuring) leave fewer cores than the processes that measure."""
    if load + local_processes <= num_cores + 0.5:
        return []
    return [
        f"{WARNING}the CPU was shared: load {load:.1f} before {local_processes} measuring process(es) on "
        f"{num_cores} cores"
    ]


def large_product(device: torch.device) -> Callable[[], object]:
    """One product of random numbers, which draws the power that training does (ones draw less)."""
    a, b, out = (torch.randn(_SIZE, _SIZE, device=device).to(_DTYPE) for _ in range(3))
    return lambda: torch.mm(a, b, out=out)


def measure_clock(
    job: Job, product: Callable[[], object], pause: Callable[[float], None] = time.sleep
) -> dict[str, float]:
    """Seconds of one product (`cost_models.profile.CLOCK`), of the slowest rank; nothing where there is no time.

    A collective; takes about 12 s.

    Args:
        job: of a device with a queue.
        product: queues it.
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
