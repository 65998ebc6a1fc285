"""What the main thread of a rank does, read off its stack when another rank asks: it costs the main thread nothing."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

# Modules whose innermost frames wait for other ranks: the functions of the first are the collectives by name; those of
# the second wait for what a pipeline sends.
_COLLECTIVES = "torch.distributed.distributed_c10d"
_FUNCTIONAL = "_c10d_functional::"
_PIPELINE = "torch.distributed.pipelining.schedules"
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
        if module == "torch._ops" and frame.f_code.co_name == "__call__":
            # of an overload or a packet; without calling anything of theirs, which another thread may be making
            known = getattr(frame.f_locals.get("self"), "__dict__", {})
            op = str(known.get("_qualified_op_name") or known.get("_name") or "")
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
    named = [f.function for f in stack[:4] if f.module == _COLLECTIVES and not f.function.startswith("_")]
    ops = [f.op for f in stack[:4] if f.op.startswith(_FUNCTIONAL)]
    collective = next((name for name in reversed(named) if name != "wrapper"), "")
    if not named and ops:
        collective = ops[0].removeprefix(_FUNCTIONAL).removesuffix(".default")
    elif not named and stack and stack[0].module == _PIPELINE:
        collective = "send or receive of the pipeline"
    own = next((f for f in stack if not (f.module.startswith(("torch", "autoplan.")) or _is_library(f.file))), None)
    line = f"{Path(own.file).name}:{own.line} ({own.function})" if own is not None else ""
    return Place(phase, collective, line)


def _is_library(file: str) -> bool:
    """Whether a file is of Python's standard library."""
    return file.startswith("<frozen") or (file.startswith(_LIBRARY) and "site-packages" not in file)


_LIBRARY = str(Path(threading.__file__).parent)


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
    # First the stack as it is, at once: the thread that is read goes on as soon as this one lets it, and Python 3.11
    # has crashed in f_back of frames that were left meanwhile.
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return map(Frame.of, frames)
