"""What the main thread of a rank does, read off its stack when another rank asks: it costs the main thread nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

# Modules whose innermost frames wait for other ranks. The functions of the first are the collectives by name.
_COLLECTIVES = "torch.distributed.distributed_c10d"
_WAITING = (_COLLECTIVES, "torch.distributed._functional_collectives", "torch.distributed.pipelining.schedules")
# Function -> phase; the innermost on the stack counts.
_PHASES = {
    "_engine_run_backward": "backward",
    "backward_one_chunk": "backward",
    "backward_weight_one_chunk": "backward",
    "forward_one_chunk": "forward",
    "_call_impl": "forward",
    "reduce_deferred": "gradient reduction",
    "_sum_tied": "gradient reduction",
    "new_group": "making process groups",
    "materialise": "sharding parameters",
    "search_plan": "planning",
    "_capture": "capture",
    "_machine_profile": "measuring this machine",
    "_same_values": "comparing parameters of the ranks",
}


@dataclass(frozen=True)
class Frame:
    """One Python frame."""

    module: str
    function: str
    line: int
    file: str
    op: str = ""  # of torch.ops: the name of the operation

    @classmethod
    def of(cls, frame: FrameType, line: int | None = None) -> Frame:
        """The frame as plain values."""
        module, op = str(frame.f_globals.get("__name__", "")), ""
        if module == "torch._ops":
            op = str(frame.f_locals.get("self", ""))
        return cls(module, frame.f_code.co_name, line or frame.f_lineno, frame.f_code.co_filename, op)


@dataclass(frozen=True)
class Place:
    """Where a thread is. `collective`: the one it waits in, "" if none is on its stack; `phase`: of a step, or "";
    `line`: file and line of the innermost frame outside torch and autoplan."""

    phase: str
    collective: str
    line: str

    def __str__(self) -> str:
        where = [text for text in (self.phase, self.collective) if text]
        return ", ".join(where) or (f"at {self.line}" if self.line else "")


def place_of(frames: Iterable[Frame]) -> Place:
    """The place that a stack says, innermost frame first."""
    stack = list(frames)
    phase = next((_PHASES[f.function] for f in stack if f.function in _PHASES), "")
    waiting = [f for f in stack[:4] if f.module in _WAITING or f.op.startswith("_c10d_functional")]
    named = [f for f in waiting if f.module == _COLLECTIVES and not f.function.startswith("_")]
    collective = ""
    if named:
        collective = named[-1].function if named[-1].function != "wrapper" else named[0].function
    elif waiting:
        collective = waiting[0].op or waiting[0].function
    own = next((f for f in stack if not f.module.startswith(("torch", "autoplan."))), None)
    line = f"{Path(own.file).name}:{own.line} ({own.function})" if own is not None else ""
    return Place(phase, collective.removeprefix("_c10d_functional.").removesuffix(".default"), line)


def of_thread(ident: int) -> Place:
    """Where the thread with this identifier is now."""
    return place_of(_outwards(sys._current_frames().get(ident)))


def of_traceback(traceback: TracebackType | None) -> Place:
    """Where an exception was raised."""
    found = []
    while traceback is not None:
        found.append(Frame.of(traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    return place_of(reversed(found))


def _outwards(frame: FrameType | None) -> Iterator[Frame]:
    while frame is not None:
        yield Frame.of(frame)
        frame = frame.f_back
