"""Type-check an emitted program with spmd_types.

Every stage is executed once, in one process, on a fake process group of its tensor-parallel ranks. The types of
parameters, inputs and carried activations are asserted, and the types of results are checked.

    python -m autoplan.codegen.check FOLDER [--batch 2] [--sequence 8]

A dropped or doubled conversion makes types disagree and is reported with the emitted line.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from spmd_types import I, P, R, V
from torch import nn

from autoplan.runtime.convert import typed
from autoplan.runtime.evaluate import evaluating
from autoplan.runtime.mesh import AxisMesh, use_mesh
from autoplan.runtime.params import buffer_owner, local_param_shape
from autoplan.runtime.program import load_module, unwritten_folder
from autoplan.runtime.spec import CarriedSpec, ProgramSpec, StageSpec, evaluate_terms

_TYPES = {"R": R, "I": I, "P": P, "S": V}


@contextmanager
def _fake_group(world: int) -> Iterator[None]:
    """Open a process group whose collectives only give results of the right shape."""
    if dist.is_initialized():
        raise RuntimeError("the type check makes its own process group; run it before or in another process")
    dist.init_process_group("fake", rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def check_program(spec: ProgramSpec, sources: Mapping[str, str], *, batch: int = 2, sequence: int = 8) -> None:
    """Execute every stage under the type checker. A program without tensor-parallel sub-axes has no types to check.

    Raises:
        spmd_types.SpmdTypeError: a type does not fit; names the emitted line, the operand types and a fix.
        RuntimeError: a default process group exists already.
    """
    tensor = _tensor_axes(spec)
    axes = [(name, size if name in tensor else 1) for name, size in spec.axes]
    world = math.prod(size for _, size in axes)
    if world == 1:
        return
    with _fake_group(world):
        mesh = AxisMesh(axes, dict(spec.groups), device_type="cpu")
        env = {"b": batch, "s": sequence, "t": sequence}
        env |= {symbol: low for symbol, low, high in spec.bounds if low == high}
        for stage in spec.stages:
            path = unwritten_folder() / stage.source
            module = load_module(path, f"autoplan_check_{stage.index}", sources[stage.source])
            try:
                _check_stage(module.Stage(), spec, stage, mesh, env)
                if spec.evaluation is not None:
                    made = module.Stage()
                    with evaluating([made]):
                        _check_stage(made, spec.evaluation, spec.evaluation.stages[stage.index], mesh, env)
            finally:
                sys.modules.pop(f"autoplan_check_{stage.index}", None)


def _tensor_axes(spec: ProgramSpec) -> tuple[str, ...]:
    """Return the sub-axes of tensor parallelism, on which values have types."""
    return dict(spec.groups).get("tp", ("tp",))


def _input(name: str, spec: ProgramSpec, env: Mapping[str, int]) -> torch.Tensor:
    """Return zeros of the shape that the program was captured with, in the dtype that it computes with."""
    dtype: torch.dtype = getattr(torch, dict(spec.input_dtypes).get(name, "int64"))
    if dtype.is_floating_point and spec.compute_dtype is not None:
        dtype = getattr(torch, spec.compute_dtype)
    return torch.zeros([evaluate_terms(size, env) for size in dict(spec.input_shapes)[name]], dtype=dtype)


def _carried(c: CarriedSpec, env: Mapping[str, int]) -> torch.Tensor:
    x = torch.zeros([evaluate_terms(s, env) for s in c.shape], dtype=getattr(torch, c.dtype))
    return x.requires_grad_() if x.is_floating_point() and c.requires_grad else x


def _as_it_is(x: torch.Tensor, types: Mapping[str, Any], mesh: AxisMesh) -> dict[str, Any]:
    """Return `types` with I in place of R on axes where `x` is I: without a gradient both mean the same."""
    import spmd_types

    found, out = spmd_types.get_local_type(x), dict(types)
    for name, kind in types.items():
        if kind is R and any(found.get(key) is I for key in mesh.type_axes(name)):
            out[name] = I
    return out


def _fill(stage: nn.Module, this: StageSpec, mesh: AxisMesh) -> None:
    """Give a stage parameters and buffers of zeros in the shapes of one rank."""
    with torch.no_grad():
        for p in this.params:
            value = torch.zeros(local_param_shape(p, mesh.size), dtype=getattr(torch, p.dtype))
            setattr(stage.get_submodule(f"blocks.{p.block}"), p.attr, nn.Parameter(value, requires_grad=p.trainable))
        for b in this.buffers:
            owner = buffer_owner(stage, b)
            setattr(owner, b.attr, torch.zeros_like(getattr(owner, b.attr)))


def _assert_types(
    stage: nn.Module, this: StageSpec, inputs: Mapping[str, torch.Tensor], carried: Sequence[torch.Tensor]
) -> None:
    """Tell the checker the types of everything that a stage is given."""
    for p in this.params:
        parameter = stage.get_submodule(f"blocks.{p.block}").get_parameter(p.attr)
        typed(parameter, R, **{a: _TYPES[t] for a, t in p.used_as})
    for x in (*(getattr(buffer_owner(stage, b), b.attr) for b in this.buffers), *inputs.values()):
        typed(x, R)
    for c, x in zip(this.carried_in, carried, strict=True):
        typed(x, R, **{a: _TYPES[t] for a, t in c.types})


def _check_stage(stage: nn.Module, spec: ProgramSpec, this: StageSpec, mesh: AxisMesh, env: Mapping[str, int]) -> None:
    from spmd_types.checker import typecheck

    _fill(stage, this, mesh)
    inputs = {name: _input(name, spec, env) for name in spec.inputs}
    inputs |= {name: torch.ones(()) for name, _ in spec.loss_counts}
    inputs |= {"rng": torch.zeros(3, dtype=torch.int64)}
    inputs |= {"loss_share": torch.ones(())} if spec.loss_share else {}
    carried = [_carried(c, env) for c in this.carried_in]
    names = [name for name in _tensor_axes(spec) if mesh.size(name) > 1]
    with use_mesh(mesh), typecheck():
        _assert_types(stage, this, inputs, carried)
        out = stage(*carried, **inputs)
        outs = list(out) if isinstance(out, tuple) else [out]
        wanted: list[dict[str, Any]] = [{a: _TYPES[t] for a, t in c.types} for c in this.carried_out]
        for x, types in zip(outs, wanted or [dict.fromkeys(names, I)], strict=True):
            typed(x, **(types if x.requires_grad else _as_it_is(x, types, mesh)))
        if not this.carried_out:
            outs[0].backward()


def check_main() -> None:
    """Check a folder that `parallelize(folder=...)` wrote."""
    parser = argparse.ArgumentParser(description=check_main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=8)
    args = parser.parse_args()
    spec = ProgramSpec.from_json((args.folder / "program.json").read_text())
    sources = {s.source: (args.folder / s.source).read_text() for s in spec.stages}
    check_program(spec, sources, batch=args.batch, sequence=args.sequence)
    print(f"{spec.model}: {len(spec.stages)} stage(s) type-check")


if __name__ == "__main__":
    check_main()
