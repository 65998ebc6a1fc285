"""Programs to measure fixed costs with, written as codegen writes them: of next to no work, or of small operations."""

from __future__ import annotations

from collections.abc import Mapping

from autoplan.codegen.schedules import schedule_spec
from autoplan.cost_models.work import OpWork
from autoplan.ops.saved import TensorFacts
from autoplan.profiler.lattice import attention_task
from autoplan.profiler.ops import MeasureTask
from autoplan.runtime.spec import CarriedSpec, ParamSpec, ProgramSpec, SizeSource, StageSpec
from autoplan.schedules.schedule import PLAIN_SCHEDULE
from autoplan.units import LossUnit

HIDDEN_SIZE = 16  # elements that a tiny layer computes with
_TINY = '''"""A pipeline stage of next to no work."""

from autoplan.runtime.program import *  # noqa: F403


class Layer(Block):
    def __init__(self, *, recompute: bool = False, site: int = 0) -> None:
        super().__init__(recompute=recompute, site=site)
%(declared)s

    def compute(self, x: Tensor) -> Tensor:
%(computed)s
        return x
'''
_STAGE = """

class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({f"layer{i}": Layer() for i in range(%(first)d, %(last)d)})

    def forward(self, %(carried)s*, x: Tensor, loss_denominator: Tensor, rng: Tensor) -> Tensor:
        h = %(start)s
        for block in self.blocks.values():
            h = block(h)
        return %(result)s

    def count(self, *, x: Tensor) -> Tensor:
        return (x[:, 0] != 0).sum()
"""


def tiny_program(
    num_layers: int, axes: tuple[tuple[str, int], ...], zero_stage: int, size: int = HIDDEN_SIZE, num_params: int = 1
) -> tuple[ProgramSpec, dict[str, str]]:
    """Return a program of layers that multiply HIDDEN_SIZE elements by the first of their parameters.

    Each layer has `num_params` parameters of `size` elements. The layers are divided evenly over the stages.
    """
    names = [f"weight{i}" for i in range(num_params)]
    layer = _TINY % {
        "declared": "\n".join(f"        self.{n} = parameter(({size},), torch.float32, True)" for n in names),
        "computed": "\n".join(f"        x = x * self.{n}[:{HIDDEN_SIZE}]" for n in names),
    }
    return _program(layer, dict.fromkeys(names, (size,)), num_layers, axes, zero_stage)


def _program(
    layer: str,
    parameters: Mapping[str, tuple[int, ...]],
    num_layers: int,
    axes: tuple[tuple[str, int], ...],
    zero_stage: int,
) -> tuple[ProgramSpec, dict[str, str]]:
    pp = dict(axes)["pp"]
    each = num_layers // pp
    shape = (((1, 1, ("b",)),), ((HIDDEN_SIZE, 1, ()),))
    stages, sources = [], {}
    for index in range(pp):
        first, last = index * each, (index + 1) * each
        params = tuple(
            ParamSpec(
                f"layer{i}", name, f"layer{i}.{name}", sizes, tuple((n,) for n in sizes), "float32", True, (), (), ()
            )
            for i in range(first, last)
            for name, sizes in parameters.items()
        )
        values = {name: CarriedSpec(name, shape, "float32", ()) for name in ("before", "after")}
        name = f"stage{index}.py"
        stages.append(
            StageSpec(
                index,
                name,
                tuple(f"layer{i}" for i in range(first, last)),
                params,
                (),
                (values["before"],) if index else (),
                (values["after"],) if index < pp - 1 else (),
            )
        )
        sources[name] = layer + _STAGE % {
            "first": first,
            "last": last,
            "carried": "before: Tensor, " if index else "",
            "start": "before" if index else "x",
            "result": "h" if index < pp - 1 else "h.sum() / loss_denominator",
        }
    spec = ProgramSpec(
        "next to nothing",
        axes,
        (),
        zero_stage,
        schedule_spec(PLAIN_SCHEDULE),
        ("x",),
        (SizeSource("b", "x", 0),),
        LossUnit.TOKENS,
        tuple(stages),
        (),
        (),
        (),
    )
    return spec, sources


# -- a small decoder layer ---------------------------------------------------------------------------------------------

_TOKENS, _HIDDEN, _INNER, _HEADS = 64, 128, 320, 4
_HEAD_DIM = _HIDDEN // _HEADS
DECODER_INPUT = (1, _TOKENS, _HIDDEN)
_DECODER_PARAMETERS: Mapping[str, tuple[int, ...]] = {
    "norm": (_HIDDEN,),
    **{name: (_HIDDEN, _HIDDEN) for name in ("q", "k", "v", "o")},
    **{name: (_INNER, _HIDDEN) for name in ("gate", "up")},
    "down": (_HIDDEN, _INNER),
}
_DECLARED = "\n".join(
    f"        self.{name} = parameter({sizes}, torch.float32, True)" for name, sizes in _DECODER_PARAMETERS.items()
)
_HEADS_OF = "\n".join(
    f"""        {n}_proj = F.linear(scaled, self.{n})
        {n}_split = {n}_proj.reshape(1, {_TOKENS}, {_HEADS}, {_HEAD_DIM})
        {n}_heads = {n}_split.transpose(1, 2)
        del {n}_proj, {n}_split"""
    for n in ("q", "k", "v")
)
_DECODER = f'''"""A decoder layer of small operations."""

from autoplan.runtime.program import *  # noqa: F403


class Layer(Block):
    def __init__(self, *, recompute: bool = False, site: int = 0) -> None:
        super().__init__(recompute=recompute, site=site)
{_DECLARED}

    def compute(self, x: Tensor) -> Tensor:
        square = x * x
        mean = square.mean((-1,), keepdim=True)
        del square
        inverse = torch.rsqrt(mean)
        del mean
        normal = x * inverse
        del inverse
        scaled = self.norm * normal
        del normal
{_HEADS_OF}
        del scaled
        attended = attention(q_heads, k_heads, v_heads, causal=True, scale=None)
        del q_heads, k_heads, v_heads
        back = attended.transpose(1, 2)
        whole = back.reshape(1, {_TOKENS}, {_HIDDEN})
        del attended, back
        o_proj = F.linear(whole, self.o)
        del whole
        middle = x + o_proj
        del o_proj
        gate_proj = F.linear(middle, self.gate)
        active = F.silu(gate_proj)
        del gate_proj
        up_proj = F.linear(middle, self.up)
        both = active * up_proj
        del active, up_proj
        down_proj = F.linear(both, self.down)
        del both
        return middle + down_proj
'''


def decoder_program(num_layers: int, world_size: int) -> tuple[ProgramSpec, dict[str, str]]:
    """Return a program of `_DECODER` layers, one copy on every rank; its input has the shape DECODER_INPUT."""
    return _program(_DECODER, _DECODER_PARAMETERS, num_layers, (("pp", 1), ("dp", world_size)), 0)


def decoder_tasks() -> list[tuple[MeasureTask, int]]:
    """Return the operations of one layer, and how often each occurs."""
    x, inner = TensorFacts(DECODER_INPUT, "float32", True), TensorFacts((1, _TOKENS, _INNER), "float32", True)
    column = TensorFacts((1, _TOKENS, 1), "float32", True)
    heads = TensorFacts((1, _TOKENS, _HEADS, _HEAD_DIM), "float32", True)
    turned = TensorFacts((1, _HEADS, _TOKENS, _HEAD_DIM), "float32", True)
    norm = TensorFacts((_HIDDEN,), "float32", True)

    def task(op: str, inputs: tuple[TensorFacts, ...], output: TensorFacts, text: str, *parameters: int) -> MeasureTask:
        return MeasureTask(OpWork(op, inputs, (output,), (), 0.0, 0.0), text, frozenset(parameters))

    def linear(x: TensorFacts, columns: int, out: TensorFacts) -> MeasureTask:
        weight = TensorFacts((columns, x.shape[-1]), "float32", True)
        return task("linear", (x, weight), out, "F.linear(x0, x1)", 1)

    return [
        (task("mul", (x, x), x, "x0 * x1"), 1),
        (task("mean", (x,), column, "x0.mean((-1,), keepdim=True)"), 1),
        (task("rsqrt", (column,), column, "torch.rsqrt(x0)"), 1),  # NaNs take as long
        (task("mul", (x, column), x, "x0 * x1"), 1),
        (task("mul", (norm, x), x, "x0 * x1", 0), 1),
        (linear(x, _HIDDEN, x), 4),
        (task("reshape", (x,), heads, f"x0.reshape(1, {_TOKENS}, {_HEADS}, {_HEAD_DIM})"), 4),
        (task("transpose", (heads,), turned, "x0.transpose(1, 2)"), 4),
        (attention_task(1, _HEADS, _TOKENS, _HEAD_DIM, "float32"), 1),
        (task("add", (x, x), x, "x0 + x1"), 2),
        (linear(x, _INNER, inner), 2),
        (task("silu", (inner,), inner, "F.silu(x0)"), 1),
        (task("mul", (inner, inner), inner, "x0 * x1"), 1),
        (linear(inner, _HIDDEN, x), 1),
    ]
