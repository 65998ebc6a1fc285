"""The op `draw`: random numbers of a distribution, as many as its input has elements, in their places.

Its input is a number expanded to the right shape and dtype, which takes no memory and whose value is not read. The ATen
ops that become it are in `autoplan.capture.draws`, the numbers in `autoplan.runtime.draws`.
"""

from __future__ import annotations

from autoplan.ir.graph import OF_THE_WHOLE_BATCH
from autoplan.ir.symbols import Expr
from autoplan.ops.arguments import Args, IrOp, IrResult
from autoplan.ops.elementwise import UNARY, random_block_bytes
from autoplan.ops.record import Inside, OpKind, OpRecord, Trait
from autoplan.ops.saved import Form, OpFacts, keeps
from autoplan.ops.text import OpText, literal

_TENSORS = 6  # of int64 or of the result, that a block of numbers needs at a time on the CPU (runtime/draws.py)


def _lowered(a: Args) -> IrResult:
    parameters = (*a["parameters"], *a["bounds"])
    attrs = {"distribution": a["distribution"], "parameters": parameters}
    if any(isinstance(p, Expr) and "b" in p.symbols for p in parameters):
        attrs[OF_THE_WHOLE_BATCH] = True
    number, size = IrOp("full", (), {"scalar": 0}, shape=()), [IrOp("expand", ("$0",), {})] * bool(a["size"])
    return [number, *size, IrOp("draw", ("$0",), attrs)]


def _text(t: OpText) -> str:
    parameters = "".join(f"{literal(t.whole(p) if isinstance(p, Expr) else p)}, " for p in t.attrs["parameters"])
    return f"draw({t.args[0]}, {t.attrs['distribution']!r}, ({parameters.rstrip()}), rng, {t.over})"


# Operations of torch that make the numbers, and bytes per element that they read and write in float32 (counted by a
# TorchDispatchMode): where nothing fuses them, each is a kernel.
_WORK = {
    "uniform": (77, 324),
    "normal": (107, 739),
    "exponential": (86, 427),
    "bernoulli": (77, 318),
    "integers": (78, 348),
}


def _inside(f: OpFacts) -> Inside:
    num, num_bytes = _WORK[f.attrs["distribution"]]
    return Inside(num, float(num_bytes * f.outputs[0].num_elements))


def _workspace(f: OpFacts) -> tuple[int, ...]:
    x = f.inputs[0]
    return (random_block_bytes(f, _TENSORS) + x.num_bytes, 0)


RECORDS = (
    OpRecord(
        "draw",
        OpKind.ELEMENTWISE,
        UNARY,
        keeps(form=Form.NEW, workspace=_workspace),
        _text,
        {"autoplan.draw.default": _lowered},
        variable="drawn",
        inside=_inside,
        has=(
            Trait.TRANSCENDENTAL,
            Trait.RANDOM,
            Trait.STOPS_GRADIENT,
            Trait.RUNS_ON_DEVICE,
        ),
    ),
)
