"""torch.export with symbolic sizes b, s and t (a second sequence)."""

from __future__ import annotations

import logging
import math
import mmap
import operator
import re
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import count
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.export import _trace
from torch.export.dynamic_shapes import refine_dynamic_shapes_from_suggested_fixes
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError, GuardOnDataDependentSymNode, ShapeEnv
from torch.utils._pytree import tree_structure
from torch.utils._sympy.reference import PythonReferenceAnalysis
from torch.utils._sympy.value_ranges import ValueRanges

from autoplan.capture.frontend.frames import place_of_frame
from autoplan.capture.frontend.layer_tracer import LayerTracer
from autoplan.capture.frontend.lengths import length_symbols, target_inputs
from autoplan.errors import CaptureError, LengthError

if TYPE_CHECKING:
    from autoplan.capture.frontend.inputs import LossModule

# What torch says of a condition on a size that does not hold for all sizes; and such a condition that is a bound or a
# number. Others (`size != 9`) are not in the fixes that torch suggests.
_VIOLATION = re.compile(r"^  - .*", re.MULTILINE)
_IS_A_BOUND = re.compile(
    r"generated guard -?\d+ <= \S+ and \S+ <= \S+$|specialized it to be a constant|specialized value of"
)

# What torch says where sizes do not hold for all lengths, or where it takes numbers and no symbols
# (`is_causal=length > 1`); of a module that a forward moves; and where there is no process group.
_OF_A_LENGTH = re.compile(r"Constraints violated|must be \w+, not Sym(Bool|Int|Float)")
_IN_MEMORY = 1 << 26  # bytes
_MULTIPLE = re.compile(r"^Constraints violated \((\d+)\*_b\)")
_FEW = "k not in range for dimension"
_MOVED = "_apply(): Couldn't swap"
_NO_GROUP = "Default process group has not been initialized"

_LOGS = {"torch.fx.experimental.symbolic_shapes": logging.ERROR, "torch._subclasses.fake_tensor": logging.CRITICAL}
_BOUND = re.compile(r"Expected op to be '==', got \S+ for (.+)")

# Where torch begins to say how to go on with torch.export.
_ADVICE = re.compile(r"\n\s*(?:For more information, run with|The error above occurred when calling torch\.export)")


def _dims(
    example_inputs: Mapping[str, torch.Tensor], targets: frozenset[str], any_length: bool, samples: int | None
) -> tuple[list[dict[int, Any]], list[torch.Tensor]]:
    """Return dynamic dims and stand-in tensors: batch 2 and the given sequence lengths, made distinct.

    Distinct lengths keep one size from being mistaken for another.

    Args:
        any_length: False: sequences have the lengths of the example.
        samples: the least number of samples, instead of 2.
    """
    batch = torch.export.Dim("b")
    sequences = {symbol: torch.export.Dim(symbol) for symbol in ("s", "t")}
    first = next(iter(example_inputs.values()))
    if first.dim() < 1:
        raise CaptureError("the first example input needs a batch dim")
    for name, tensor in example_inputs.items():
        if tensor.dim() == 0 or tensor.shape[0] != first.shape[0]:
            raise CaptureError(
                f"input {name} has shape {tuple(tensor.shape)}; dim 0 must be the batch, {first.shape[0]}: give it as "
                f"[{first.shape[0]}, ...] and flatten it in the forward"
            )
    symbols = length_symbols(example_inputs, targets)
    sizes = {symbol: int(example_inputs[name].shape[1]) for name, symbol in symbols.items()}
    if any_length and "t" in sizes and sizes["t"] == sizes["s"]:
        sizes["t"] += -1 if sizes["t"] > 2 else 1  # down: positions may be learned
    stand_in = next(size for size in count(samples or 2) if size not in sizes.values())
    dims, tensors = [], []
    for name, tensor in example_inputs.items():
        mine: dict[int, Any] = {0: batch}
        shape = [stand_in, *tensor.shape[1:]]
        if name in symbols and any_length:
            mine[1], shape[1] = sequences[symbols[name]], sizes[symbols[name]]
        dims.append(mine)
        tensors.append(_zeros(shape, tensor.dtype))
    return dims, tensors


def _zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of zeros that nobody reads: that of very many samples is a file without blocks."""
    size = math.prod(shape) * dtype.itemsize
    if size < _IN_MEMORY:
        return torch.zeros(shape, dtype=dtype)
    with tempfile.TemporaryFile() as file:
        file.truncate(size)
        return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=dtype).view(*shape)


def export_symbolic(
    wrapper: LossModule, example_inputs: Mapping[str, torch.Tensor], tracer: LayerTracer
) -> tuple[torch.export.ExportedProgram, dict[str, str]]:
    """Export the model.

    Returns:
        The exported program, and b, s or t for each of torch's symbols.

    Raises:
        LengthError: if the sizes are those of some lengths only.
        CaptureError: if torch.export fails.
    """
    dims, tensors = _dims(example_inputs, target_inputs(wrapper.model), wrapper.any_length, wrapper.samples)
    wrapper.with_results = True
    try:
        with _without_logs():
            program = _export_refining(wrapper, tensors, dims, tracer)
            _drop_other_results(program, wrapper)
    except CaptureError:
        raise
    except Exception as exc:
        name, error = type(wrapper.model).__name__, LengthError if _OF_A_LENGTH.search(str(exc)) else CaptureError
        raise error(f"torch.export cannot capture {name}: {_place_of(exc)}{_said(exc)}") from exc
    finally:
        wrapper.with_results = False
    symbols: dict[str, str] = {}
    placeholders = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    for spec, mine in zip(_user_inputs(program), dims, strict=True):
        shape = placeholders[spec].meta["val"].shape
        for i, dim in mine.items():
            if not isinstance(shape[i], torch.SymInt) or shape[i].node.expr.is_number:
                continue
            expr = shape[i].node.expr
            if not expr.is_Symbol:
                raise LengthError(
                    f"{type(wrapper.model).__name__} works for some lengths only: dim {i} of its inputs must have the "
                    f"form {re.sub(r's[0-9]+', 'n', str(expr))}; cut or pad in a way that works for any length"
                )
            symbols[str(expr)] = dim.__name__
    return program, symbols


@contextmanager
def _without_logs() -> Iterator[None]:
    """Leave out what torch logs and prints of an error before it raises it: pages, for one that is told in a sentence.

    `print` in `torch.export._trace` writes the graph so far (tried on 2.13).
    """
    levels = {logging.getLogger(name): level for name, level in _LOGS.items()}
    before = {logger: logger.level for logger in levels}
    try:
        for logger, level in levels.items():
            logger.setLevel(level)
        with patch.object(_trace, "print", lambda *args, **kwargs: None, create=True):
            yield
    finally:
        for logger, level in before.items():
            logger.setLevel(level)


def _drop_other_results(program: torch.export.ExportedProgram, wrapper: LossModule) -> None:
    """Take from the outputs of a program what does not lead to the loss: it may need ops that cannot be captured.

    The last outputs are the results of the model, in the order of `wrapper.results`, and the loss.
    """
    output = next(n for n in program.graph.nodes if n.op == "output")
    given, loss = list(output.args[0]), output.args[0][-1]
    above, left = set[Any](), [loss]
    while left:
        node = left.pop()
        if node not in above:
            above.add(node)
            left += node.all_input_nodes
    first = len(given) - 1 - len(wrapper.results)
    kept = [i for i in range(first, len(given)) if given[i] in above and given[i].op != "placeholder"]
    wrapper.results = tuple(wrapper.results[i - first] for i in kept[:-1])
    output.args = ((*given[:first], *(given[i] for i in kept)),)
    specs = program.graph_signature.output_specs
    specs[first:] = [specs[i] for i in kept]
    signature = program.module_call_graph[0].signature
    if signature is not None:
        signature.out_spec = tree_structure(tuple(kept))


def _export_refining(
    wrapper: LossModule, tensors: list[torch.Tensor], dims: list[dict[int, Any]], tracer: LayerTracer
) -> torch.export.ExportedProgram:
    """Export the model, with torch's suggested fixes where the model fixes or bounds a dim.

    Examples are features in dim 1 and a table of positions. Other conditions on a length become assertions in the
    graph, which `lengths_held` reads.
    """
    shapes: dict[str, Any] = {"tensors": tuple(dims)}
    refined = defer = False
    while True:
        try:
            # results of ops are not kept by their arguments: few ops of one trace are alike
            with (
                _bounds_accepted(wrapper, shapes) as found,
                torch._dynamo.config.patch(fake_tensor_cache_enabled=False),
                # a quotient of sizes (`numel / 1024**3 > 2`): torch's own asks whether a traced size is a float
                patch.object(PythonReferenceAnalysis, "int_truediv", staticmethod(operator.truediv)),
            ):
                program = torch.export.export(
                    wrapper,
                    tuple(tensors),
                    strict=False,
                    dynamic_shapes=shapes,
                    prefer_deferred_runtime_asserts_over_guards=defer,
                )
            return _bounded(program, found)
        except torch._dynamo.exc.UserError as exc:
            if "Suggested fixes" in str(exc) and not refined:
                shapes, refined = _refined(wrapper, shapes, exc), True
            elif "Not all values of" in str(exc) and not defer:
                defer = True
            else:
                raise
        tracer.reset()


@contextmanager
def _bounds_accepted(wrapper: LossModule, shapes: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Let exports inside the context go on where a model fixes a dim to a number or bounds it.

    torch raises an error when the model has been traced, and means the trace to be made again with the fixes that it
    suggests. The trace is that of the sizes with these fixes as it is.

    `produce_guards_and_solve_constraints` is private to torch (tried on 2.13): there is no public way to go on. Where
    there is no such function, the model is traced again.

    Yields:
        a list that receives the dynamic shapes with the fixes.
    """
    name, found, places = "produce_guards_and_solve_constraints", list[dict[str, Any]](), list[str]()
    original = getattr(_trace, name, None)
    if original is None:
        yield found
        return

    def accept(*args: Any, **kwargs: Any) -> None:
        try:
            original(*args, **kwargs)
        except ConstraintViolationError as exc:
            if "Suggested fixes" not in str(exc) or not all(map(_IS_A_BOUND.search, _VIOLATION.findall(str(exc)))):
                raise
            refined = _refined(wrapper, shapes, exc, places)
            if not _only_bounds(shapes, refined):
                raise
            found.append(refined)

    with patch.object(_trace, name, accept), _fixed_batches(places):
        yield found


@contextmanager
def _fixed_batches(places: list[str]) -> Iterator[None]:
    """Note where the code makes a number of the batch size; torch's error at the end of a trace does not say.

    `ShapeEnv._set_replacement` is private to torch (tried on 2.13); without it, no place is noted.
    """
    name = "_set_replacement"
    original: Any = getattr(ShapeEnv, name, None)

    def noting(self: Any, symbol: Any, value: Any, *args: Any) -> Any:
        sources = self.var_to_sources.get(symbol, ())
        if value.is_number and any(str(source.name).endswith("size()[0]") for source in sources):
            places.append(place_of_frame(traceback.extract_stack()))
        return original(self, symbol, value, *args)

    with nullcontext() if original is None else patch.object(ShapeEnv, name, noting):
        yield


def _only_bounds(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Return True if every dim is as it was, but for its bounds, or is a number."""
    pairs = [(b[i], a[i]) for b, a in zip(before["tensors"], after["tensors"], strict=True) for i in b]
    return all(isinstance(a, int) or (type(a) is type(b) and a.__name__ == b.__name__) for b, a in pairs)


def _bounded(program: torch.export.ExportedProgram, found: list[dict[str, Any]]) -> torch.export.ExportedProgram:
    """Give the symbols of a program the bounds that were found while it was traced."""
    placeholders = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    for shapes in found:
        for spec, mine in zip(_user_inputs(program), shapes["tensors"], strict=True):
            for i, dim in mine.items():
                size = placeholders[spec].meta["val"].shape[i]
                if not isinstance(dim, int) and isinstance(size, torch.SymInt):
                    program.range_constraints[size.node.expr] &= ValueRanges(dim.min, dim.max)
    return program


def _refined(wrapper: LossModule, shapes: dict[str, Any], exc: Exception, places: Sequence[str] = ()) -> dict[str, Any]:
    """Return the dynamic shapes with the fixes that torch suggests. `places`: where the batch size became a number."""
    # torch's parser accepts no text after the fixes
    fixes = str(exc).split("Suggested fixes:")[1].strip().split("\n\n")[0]
    refined: Any = refine_dynamic_shapes_from_suggested_fixes(f"Suggested fixes:\n{fixes}", shapes)
    for mine in refined["tensors"]:
        if not isinstance(mine[0], torch.export.Dim):
            raise CaptureError(
                f"{type(wrapper.model).__name__} works for one batch size only "
                f"({next(iter(places), '') or _place_of(exc)}it fixes dim 0 to {mine[0]}): Python makes the size "
                "of the batch a number, as float(), int(), range() and a comparison do, or samples are grouped by a "
                "number (x.view(-1, 2)); compute with x.shape[0] itself, and give what groups need as inputs or along "
                "another dim"
            ) from exc
    out: dict[str, Any] = refined
    return out


def _place_of(exc: BaseException) -> str:
    """Return the place in the user's code where an error was raised, as `place_of_frame`."""
    return place_of_frame(traceback.extract_tb(exc.__traceback__))


def _said(exc: BaseException) -> str:
    """Return the cause in a sentence, or what torch says without its advice on torch.export."""
    if isinstance(exc, GuardOnDataDependentSymNode):
        return (
            "Python reads the value of a tensor here (a condition, float(), int(), .item(), a tensor where a number is "
            "expected), and the graph must be the same for every batch; compute with the tensor itself (torch.where), "
            "or leave this code out in training"
        )
    if isinstance(exc, (DataDependentOutputException, DynamicOutputShapeException)):
        return (
            f"{exc.func} needs the values of its tensors, for a number that Python reads or for the size of a result, "
            "and a graph is made without values; compute with tensors alone, or leave this code out in training"
        )
    if (needed := _MULTIPLE.search(str(exc))) is not None:
        return (
            f"it takes batches of a multiple of {needed[1]} samples only, and micro-batches have any size; cut or join "
            "along another dim"
        )
    if (bound := _BOUND.search(str(exc))) is not None:
        return (
            f"the forward holds for {bound[1]} only (b samples, sequences of s or t), and micro-batches have any size: "
            "compute with sizes that hold for all, or leave this code out in training"
        )
    if _FEW in str(exc):
        return (
            "topk takes more samples than a micro-batch may have (few are traced); choose samples by a threshold or by "
            "weights, or take the largest along another dim"
        )
    if _MOVED in str(exc):
        return "the forward moves or casts a module; do that before, or cast the tensors that the module is given"
    if _NO_GROUP in str(exc):
        return (
            "the forward needs the other processes of a job (torch.distributed), and a program computes what one "
            "process computes: leave this out where `torch.distributed.is_initialized()` is False, as in the capture"
        )
    if isinstance(exc, KeyError):
        return f"KeyError: {', '.join(map(str, exc.args))}"
    text = _ADVICE.split(str(exc), maxsplit=1)[0].strip()
    if any("/numpy/" in frame.filename for frame in traceback.extract_tb(exc.__traceback__)):
        return (
            f"the forward computes with numpy ({text}), whose numbers a graph would keep as constants; compute with "
            "torch, give what numpy makes as an input, or leave this out in training"
        )
    return text


def _user_inputs(program: torch.export.ExportedProgram) -> list[str]:
    from torch.export.graph_signature import InputKind

    return [s.arg.name for s in program.graph_signature.input_specs if s.kind is InputKind.USER_INPUT]
