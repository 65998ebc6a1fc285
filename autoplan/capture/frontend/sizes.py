"""torch.export with symbolic sizes b, s and t (a second sequence), and the lengths for which the graph holds."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.export.dynamic_shapes import refine_dynamic_shapes_from_suggested_fixes

from autoplan.capture.frontend.layer_tracer import LayerTracer
from autoplan.capture.frontend.lengths import length_symbols, target_inputs
from autoplan.errors import CaptureError

if TYPE_CHECKING:
    from autoplan.capture.frontend.inputs import LossModule


def _dims(
    example_inputs: Mapping[str, torch.Tensor], targets: frozenset[str]
) -> tuple[list[dict[int, Any]], list[torch.Tensor]]:
    """Return dynamic dims and stand-in tensors: batch 2 and the given sequence lengths, made distinct.

    Distinct lengths keep one size from being mistaken for another.
    """
    batch = torch.export.Dim("b")
    sequences = {symbol: torch.export.Dim(symbol) for symbol in ("s", "t")}
    first = next(iter(example_inputs.values()))
    if first.dim() < 1:
        raise CaptureError("the first example input needs a batch dim")
    for name, tensor in example_inputs.items():
        if tensor.dim() == 0 or tensor.shape[0] != first.shape[0]:
            raise CaptureError(
                f"input {name} has shape {tuple(tensor.shape)}; dim 0 must be the batch, {first.shape[0]}"
            )
    symbols = length_symbols(example_inputs, targets)
    sizes = {symbol: int(example_inputs[name].shape[1]) for name, symbol in symbols.items()}
    if "t" in sizes and sizes["t"] == sizes["s"]:
        sizes["t"] += -1 if sizes["t"] > 2 else 1  # down: positions may be learned
    stand_in = next(size for size in (2, 3, 4) if size not in sizes.values())
    dims, tensors = [], []
    for name, tensor in example_inputs.items():
        mine: dict[int, Any] = {0: batch}
        shape = [stand_in, *tensor.shape[1:]]
        if name in symbols:
            mine[1], shape[1] = sequences[symbols[name]], sizes[symbols[name]]
        dims.append(mine)
        tensors.append(torch.zeros(shape, dtype=tensor.dtype, device=tensor.device))
    return dims, tensors


def export_symbolic(
    wrapper: LossModule, example_inputs: Mapping[str, torch.Tensor], tracer: LayerTracer
) -> tuple[torch.export.ExportedProgram, dict[str, str]]:
    """Export the model.

    Returns:
        The exported program, and b, s or t for each of torch's symbols.

    Raises:
        CaptureError: if torch.export fails.
    """
    dims, tensors = _dims(example_inputs, target_inputs(wrapper.model))
    quiet = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level = quiet.level
    quiet.setLevel(logging.ERROR)
    try:
        program = _export_refining(wrapper, tensors, dims, tracer)
    except CaptureError:
        raise
    except Exception as exc:
        raise CaptureError(f"torch.export cannot capture {type(wrapper.model).__name__}: {_where(exc)}{exc}") from exc
    finally:
        quiet.setLevel(level)
    symbols: dict[str, str] = {}
    placeholders = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    for spec, mine in zip(_user_inputs(program), dims, strict=True):
        shape = placeholders[spec].meta["val"].shape
        for i, dim in mine.items():
            if isinstance(shape[i], torch.SymInt):
                symbols[str(shape[i].node.expr)] = dim.__name__
    return program, symbols


def _export_refining(
    wrapper: LossModule, tensors: list[torch.Tensor], dims: list[dict[int, Any]], tracer: LayerTracer
) -> torch.export.ExportedProgram:
    """Export the model, with torch's suggested fixes where the model fixes or bounds a dim.

    Examples are features in dim 1 and a table of positions.
    """
    shapes: dict[str, Any] = {"tensors": tuple(dims)}
    try:
        return torch.export.export(wrapper, tuple(tensors), strict=False, dynamic_shapes=shapes)
    except torch._dynamo.exc.UserError as exc:
        if "Suggested fixes" not in str(exc):
            raise
        # torch's parser accepts no text after the fixes
        fixes = str(exc).split("Suggested fixes:")[1].strip().split("\n\n")[0]
        refined: Any = refine_dynamic_shapes_from_suggested_fixes(f"Suggested fixes:\n{fixes}", shapes)
        for mine in refined["tensors"]:
            if not isinstance(mine[0], torch.export.Dim):
                raise CaptureError(
                    f"{type(wrapper.model).__name__} works for one batch size only ({_where(exc)}it fixes dim 0 to "
                    f"{mine[0]})"
                ) from exc
        tracer.reset()
        return torch.export.export(wrapper, tuple(tensors), strict=False, dynamic_shapes=refined)


def bounds_of(
    program: torch.export.ExportedProgram, symbols: Mapping[str, str], model: str
) -> dict[str, tuple[int, int | None]]:
    """Return the bounds (low, high) of the sequence lengths for which this graph is the model.

    Where the forward asks for the length of a sequence, other lengths have another graph.

    Raises:
        CaptureError: if the forward asks for the batch size, which differs from one micro-batch to another.
    """
    out = {}
    for symbol, found in program.range_constraints.items():
        name = symbols.get(str(symbol))
        low, high = (int(bound) if bound.is_Integer else None for bound in (found.lower, found.upper))
        low = low or 0
        if name is None or (low == 0 and high is None):
            continue
        if name == "b":
            kept = f"up to {high}" if high is not None else f"from {low} on"
            raise CaptureError(
                f"the forward of {model} asks how large the batch is (this graph is that of {kept}); micro-batches are "
                "smaller than the batch: compute the same for every size"
            )
        out[name] = (low, high)
    return out


def _where(exc: BaseException) -> str:
    """Return the innermost frame outside torch, as 'file:line: '."""
    import traceback

    for frame in reversed(traceback.extract_tb(exc.__traceback__)):
        if "/torch/" not in frame.filename and "autoplan/capture" not in frame.filename:
            return f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno} ({frame.line}): "
    return ""


def _user_inputs(program: torch.export.ExportedProgram) -> list[str]:
    from torch.export.graph_signature import InputKind

    return [s.arg.name for s in program.graph_signature.input_specs if s.kind is InputKind.USER_INPUT]
