"""Activity of a rank's main thread, read from its stack when another rank asks: it costs the thread nothing.

The stack is read with the lock of the interpreter held from the first frame to the last, so that no thread runs
meanwhile. A loop that follows frames would let the thread run on between two of them, which Python 3.11 does not
survive; `faulthandler` reads all threads without their locks, and has met one that C++ was still making.
"""

from __future__ import annotations

import functools
import gc
import operator
import re
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, repeat, starmap, takewhile
from pathlib import Path
from types import CodeType, TracebackType

import torch

_TORCH = Path(torch.__file__).parent
_AUTOPLAN = Path(__file__).parent.parent
_LIBRARY = Path(threading.__file__).parent  # Python's own
# Files whose innermost frames wait for other ranks. The first defines the collectives, by name. The second is on the
# stack of any operator and of functional collectives, which are named by their caller. The third waits for transfers of
# the pipeline.
_COLLECTIVES = str(_TORCH / "distributed" / "distributed_c10d.py")
_OPERATORS = str(_TORCH / "_ops.py")
_PIPELINE = str(_TORCH / "distributed" / "pipelining" / "schedules.py")
_FUNCTIONAL = re.compile(r"_?(all_reduce|all_gather|reduce_scatter|all_to_all|broadcast)")
# Function -> phase; the innermost on the stack counts.
STACK_PHASES = {
    "_engine_run_backward": "backward",
    "backward_one_chunk": "backward",
    "backward_weight_one_chunk": "backward",
    "forward_one_chunk": "forward",
    "_call_impl": "forward",
    "reduce_deferred": "gradient reduction",
    "sum_tied": "gradient reduction",
    "new_group": "making process groups",
    "_synchronised": "sharding parameters",
    "search_plan": "planning",
    "_capture": "capture",
    "_machine_profile": "measuring this machine",
    "_same_values": "comparing parameters of the ranks",
}


@dataclass(frozen=True)
class Frame:
    """One Python frame: file, function and line number."""

    file: str
    function: str
    line: int


@dataclass(frozen=True)
class StackPlace:
    """The position of a thread in the code.

    Attributes:
        phase: phase of a step, or "".
        collective: the collective it waits in, "" if none is on its stack.
        line: file and line of the innermost frame outside torch and autoplan.
    """

    phase: str
    collective: str
    line: str

    def __str__(self) -> str:
        where = [text for text in (self.phase, self.collective) if text]
        return ", ".join(where) or (f"at {self.line}" if self.line else "")


def place_of(frames: Iterable[Frame]) -> StackPlace:
    """Return the place that a stack shows, innermost frame first."""
    stack = list(frames)
    phase = next((STACK_PHASES[f.function] for f in stack if f.function in STACK_PHASES), "")
    foreign = [f for f in stack if not _is_ours(f.file)]
    own = next((f for f in foreign if "site-packages" not in f.file), foreign[0] if foreign else None)
    line = f"{Path(own.file).name}:{own.line} ({own.function})" if own is not None else ""
    return StackPlace(phase, _collective_of(stack), line)


def _collective_of(stack: Sequence[Frame]) -> str:
    """Return the collective that a stack waits in, "" if there is none."""
    named = [f.function for f in stack[:4] if f.file == _COLLECTIVES and not f.function.startswith("_")]
    if named or not stack:
        return next((name for name in reversed(named) if name != "wrapper"), "")
    if stack[0].file == _OPERATORS:
        found = (_FUNCTIONAL.match(f.function) for f in stack[1:6])
        return next((match[1] for match in found if match), "")
    return "send or receive of the pipeline" if stack[0].file == _PIPELINE else ""


def _is_ours(file: str) -> bool:
    """Return True if a file belongs to torch, autoplan or Python's standard library."""
    path = Path(file)
    if file.startswith("<frozen") or path.is_relative_to(_TORCH) or path.is_relative_to(_AUTOPLAN):
        return True
    return path.is_relative_to(_LIBRARY) and "site-packages" not in file


_CODE_AND_LINE = operator.attrgetter("f_code", "f_lineno")
_IS_FRAME = functools.partial(operator.is_not, None)


def of_thread(ident: int) -> StackPlace:
    """Return the place of the thread with this identifier; an empty place if there is none."""
    return place_of(Frame(code.co_filename, code.co_name, line or 0) for code, line in _stack(ident))


def _stack(ident: int) -> list[tuple[CodeType, int | None]]:
    """Return code and line of the frames of a thread, innermost first; none if there is no such thread.

    The work is one call of C code: `sys._current_frames`, its item for the thread, then `f_back` until it is None.
    Between two bytecodes of Python the lock of the interpreter may change hands, in here it does not. A collection of
    garbage could run Python, so none starts meanwhile. No frame outlives the call.
    """
    innermost = map(operator.methodcaller("get", ident), starmap(sys._current_frames, [()]))
    frames = accumulate(chain(innermost, repeat("f_back")), getattr)
    collects = gc.isenabled()
    gc.disable()
    try:
        return list(map(_CODE_AND_LINE, takewhile(_IS_FRAME, frames)))
    finally:
        if collects:
            gc.enable()


def of_traceback(traceback: TracebackType | None) -> StackPlace:
    """Return the place where an exception was raised."""
    found = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        found.append(Frame(code.co_filename, code.co_name, traceback.tb_lineno))
        traceback = traceback.tb_next
    return place_of(reversed(found))
