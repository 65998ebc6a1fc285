"""Capture: nn.Module + example inputs -> ModelGraph, by torch.export (non-strict, pre-dispatch ATen, fake tensors).

`capture` runs, in order: wrap model and loss; export with symbolic batch and sequence and marked layers; inline no_grad
regions; translate ATen to IR ops; cut into blocks and merge identical ones; normalise the loss; infer factors; check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from autoplan.capture.evaluation import evaluation_beside, with_evaluation
from autoplan.capture.frontend.alone import in_one_process, products_in_order
from autoplan.capture.frontend.bags import CaptureBags
from autoplan.capture.frontend.batch_norm import capture_batch_norm
from autoplan.capture.frontend.buffers import all_buffers, attributes_restored
from autoplan.capture.frontend.checked_losses import CaptureCheckedLosses
from autoplan.capture.frontend.counters import Counters
from autoplan.capture.frontend.derivatives import RefuseDerivatives
from autoplan.capture.frontend.empty import without_empty_parts
from autoplan.capture.frontend.equal_parts import CaptureParts
from autoplan.capture.frontend.expert_loops import ExpertLoops
from autoplan.capture.frontend.experts import capture_experts, capture_hf_experts
from autoplan.capture.frontend.held import HeldParameters
from autoplan.capture.frontend.host import examples_on_host, module_on_host, no_moves
from autoplan.capture.frontend.huggingface import (
    capture_attention,
    check_masks,
    configured,
    files_with_branches,
    holds_hf_model,
    own_hooks,
    recorded_outputs,
)
from autoplan.capture.frontend.inplace import CaptureData, can_be_functional, refuse_shared, without_mutation
from autoplan.capture.frontend.inputs import LossFn, LossModule, check_arguments, uncompiled
from autoplan.capture.frontend.layer_tracer import LayerTracer, block_kinds, layer_modules
from autoplan.capture.frontend.lengths import length_symbols, target_inputs
from autoplan.capture.frontend.lengths_held import Lengths, of_every_batch
from autoplan.capture.frontend.masks import Ledger
from autoplan.capture.frontend.own_backward import checked_backwards, refuse_gradient_hooks
from autoplan.capture.frontend.packed import capture_packed
from autoplan.capture.frontend.pending_scores import ScoresMode
from autoplan.capture.frontend.recurrences import find_scans
from autoplan.capture.frontend.recurrent import capture_recurrent
from autoplan.capture.frontend.rehearsal import rehearse_capture
from autoplan.capture.frontend.repeated import CaptureRepeated, capture_repeated
from autoplan.capture.frontend.samples import CaptureSamples
from autoplan.capture.frontend.scans import Scan, ScanForms, Scans
from autoplan.capture.frontend.selections import CaptureSelections, has_unknown_sizes, without_selections
from autoplan.capture.frontend.sizes import export_symbolic
from autoplan.capture.frontend.state import state_refused
from autoplan.capture.frontend.torch_transformer import capture_transformers
from autoplan.capture.layers.assemble import assemble
from autoplan.capture.passes.sequences import with_sequence
from autoplan.capture.translate import Translator, dtype_name
from autoplan.errors import CaptureError, LengthError
from autoplan.ir.graph import ModelGraph, Parameter
from autoplan.ops.factors import infer_factors
from autoplan.runtime.precision import active_autocast


def capture(
    model: nn.Module,
    example_inputs: Mapping[str, torch.Tensor],
    loss_fn: LossFn | None = None,
) -> ModelGraph:
    """Capture `model` and its loss.

    Args:
        model: an ordinary module. Its classes stay untouched. Its parameters may be on any device, also fake or meta;
            tensors on an accelerator are captured as if they were on the host.
        example_inputs: name -> tensor. Only shapes and dtypes matter. Dim 0 is the batch. Dim 1 is the sequence if it
            is as long as that of the first input, else it may be a second sequence (`capture.frontend.lengths`).
        loss_fn: `(model output, batch) -> scalar`; not needed if the model returns a loss (Hugging Face with `labels`).

    Returns:
        A checked ModelGraph with factors. Its loss is a sum over valid tokens divided by the input `loss_denominator`.
        It has the graph of an evaluation beside it if the forward updates buffers (`capture.evaluation`).

    Raises:
        CaptureError: names the op and the source line that cannot be captured.
    """
    check_arguments(model, example_inputs, loss_fn)
    _refuse_autocast()
    example_inputs = examples_on_host(example_inputs)
    check_masks(model, example_inputs)
    refuse_gradient_hooks(model)
    return with_evaluation(model, lambda changing: _in_its_mode(model, example_inputs, loss_fn, changing))


def capture_evaluation(
    graph: ModelGraph, model: nn.Module, example_inputs: Mapping[str, torch.Tensor], loss_fn: LossFn | None = None
) -> ModelGraph:
    """Return a graph that `capture` made of these arguments with that of the evaluation, or why there is none."""
    example_inputs = examples_on_host(example_inputs)
    return evaluation_beside(model, graph, lambda changing: _in_its_mode(model, example_inputs, loss_fn, changing))


def _in_its_mode(
    model: nn.Module,
    example_inputs: Mapping[str, torch.Tensor],
    loss_fn: LossFn | None,
    changing: frozenset[str],
) -> ModelGraph:
    """Capture the model in the mode, training or evaluation, that its modules have.

    Args:
        changing: buffers that another capture of the model changes.
    """
    counters = Counters(model)
    wrapped: Callable[..., LossModule] = partial(
        LossModule,
        model,
        tuple(example_inputs),
        loss_fn,
        HeldParameters(model),
        counters,
        changing=changing,
    )
    with in_one_process(), module_on_host(model), uncompiled(), attributes_restored(model):
        found: tuple[Scan, ...] = ()
        if holds_hf_model(model):
            found = find_scans(model, wrapped(), example_inputs)
        graph, wrapped = _of_any_length(wrapped, example_inputs, Scans(found))

        def of_samples(number: int) -> ModelGraph:
            return _in_layers(partial(wrapped, samples=number), example_inputs, Scans(found))

        graph = of_every_batch(graph, of_samples)
        counters.refuse_if_used(graph, lambda: _in_layers(wrapped, example_inputs, Scans(found)))
    return with_sequence(infer_factors(graph).in_order())


def _of_any_length(
    wrapped: Callable[..., LossModule], example_inputs: Mapping[str, torch.Tensor], scans: Scans
) -> tuple[ModelGraph, Callable[..., LossModule]]:
    """Return the graph of any length of the sequence, or where there is none that of the example; and what made it.

    Examples of the latter are `length // 2` (a table around its middle), and chunks that a sequence is cut into.
    """
    try:
        return _in_layers(wrapped, example_inputs, scans), wrapped
    except LengthError as exc:
        wrapped = partial(wrapped, any_length=False)
        graph = _in_layers(wrapped, example_inputs, scans)
        lengths = "sequences of the example's length alone, and they are not cut (cp)"
        return replace(graph, notes=(*graph.notes, f"the graph is that of {lengths}: {exc}")), wrapped


def _in_layers(
    wrapped: Callable[[], LossModule], example_inputs: Mapping[str, torch.Tensor], scans: Scans
) -> ModelGraph:
    """Capture with the layers that `layer_modules` finds; of a list alone if those in sequences cannot be delimited."""
    model = wrapped().model

    def tried(lists_only: bool) -> ModelGraph:
        graph = _capture(wrapped(), example_inputs, scans, merge=True, lists_only=lists_only)
        if graph is None:  # a value enters or leaves a layer past its arguments: trace them one by one
            graph = _capture(wrapped(), example_inputs, scans, merge=False, lists_only=lists_only)
        if graph is None:
            raise CaptureError(
                f"{type(model).__name__}: its layers exchange tensors that are neither arguments nor results; "
                "pass these tensors through the forward of the layers"
            )
        return graph

    try:
        return tried(lists_only=False)
    except CaptureError:
        if layer_modules(model).keys() == layer_modules(model, lists_only=True).keys():
            raise
        try:  # a block that changes what it is given in place is no layer
            return tried(lists_only=True)
        except CaptureError:
            pass
        raise


def _capture(
    wrapper: LossModule,
    example_inputs: Mapping[str, torch.Tensor],
    scans: Scans,
    *,
    merge: bool,
    lists_only: bool = False,
) -> ModelGraph | None:
    names, model = tuple(example_inputs), wrapper.model
    ledger, loops, failure = Ledger(), ExpertLoops(model), None
    recorded = recorded_outputs if holds_hf_model(model) else dict
    expected = _rehearsed(wrapper, example_inputs, LayerTracer(model, merge, recorded, lists_only), ledger, scans)
    while True:
        tracer = LayerTracer(model, merge, recorded, lists_only, expected)
        try:
            program, symbols = _exported(wrapper, example_inputs, tracer, ledger, loops, scans)
        except CaptureError as exc:
            if tracer.hidden.read:
                expected = frozenset()
                continue
            if ledger.again() or loops.again():
                continue
            if failure is None and wrapper.gives_more():  # it may have missed an input that it looks up by name
                failure = exc
                continue
            if not ledger.as_run and files_with_branches(model):  # a branch for torch.compile may lack something
                ledger.as_run, failure = True, failure or exc
                continue
            raise failure or exc from exc
        if tracer.hidden.read:  # and the model went on
            expected = frozenset()
        elif not ledger.again() and not wrapper.gives_more():
            break
    lengths = Lengths(program, symbols, type(model).__name__)
    try:
        trace = Translator(program, wrapper, lengths, names).run()
    except CaptureError:
        if not can_be_functional(program) or has_unknown_sizes(program):  # which no form of the program would change
            raise
        refuse_shared(program, model)
        trace = Translator(without_mutation(program), wrapper, lengths, names).run()
    graph = assemble(trace, type(model).__name__, *_parameters(model), block_kinds(model))
    if graph is None:
        return None
    fixed = _fixed_lengths(wrapper, example_inputs, symbols)
    return replace(
        graph, bounds=lengths.bounds | fixed, notes=(*graph.notes, *loops.notes, *scans.notes, *sorted(ledger.notes))
    )


def _fixed_lengths(
    wrapper: LossModule, example_inputs: Mapping[str, torch.Tensor], symbols: Mapping[str, str]
) -> dict[str, tuple[int, int]]:
    """Return the bounds of sequences whose length is a number in the graph. Dim 1 of real numbers may be features.

    Args:
        symbols: b, s or t for each of torch's symbols of the trace.
    """
    sequences = length_symbols(example_inputs, target_inputs(wrapper.model))
    fixed = {symbol: example_inputs[name] for name, symbol in sequences.items() if symbol not in symbols.values()}
    return {
        symbol: (x.shape[1], x.shape[1])
        for symbol, x in fixed.items()
        if not (wrapper.any_length and x.is_floating_point())
    }


def _refuse_autocast() -> None:
    """Raise CaptureError inside a torch.autocast region of the caller, since the graph does not contain its casts."""
    problem = active_autocast()
    if problem is not None:
        raise CaptureError(problem)


def _exported(
    wrapper: LossModule,
    example_inputs: Mapping[str, torch.Tensor],
    tracer: LayerTracer,
    ledger: Ledger,
    loops: ExpertLoops,
    scans: Scans,
) -> tuple[torch.export.ExportedProgram, dict[str, str]]:
    """Export once.

    Args:
        ledger: which masks of a Hugging Face model are tensors in this trace.
        loops: which loops over experts were shown to be traceable, and what a user may not expect of the graph.
        scans: the functions that go along the sequence.
    """
    with _patched(wrapper, tracer, ledger, loops, scans):
        program, symbols = export_symbolic(wrapper, example_inputs, tracer)
    ledger.notes.update(without_selections(program))
    without_empty_parts(program)
    return program, symbols


def _rehearsed(
    wrapper: LossModule, example_inputs: Mapping[str, torch.Tensor], tracer: LayerTracer, ledger: Ledger, scans: Scans
) -> frozenset[str]:
    """Return the layers that an export can expect to repeat others."""
    loops = ExpertLoops(wrapper.model)
    forms = ScanForms(scans.found, min((t.shape[1] for t in example_inputs.values() if t.ndim > 1), default=0))
    return rehearse_capture(
        wrapper, example_inputs, tracer, ledger, lambda: _patched(wrapper, tracer, ledger, loops, forms)
    )


@contextmanager
def _patched(
    wrapper: LossModule, tracer: LayerTracer, ledger: Ledger, loops: ExpertLoops, scans: Scans | ScanForms
) -> Iterator[None]:
    """Let the model run in the form that is traced.

    Modes that replace functions of torch are active in its forward alone: torch.export reads some fifty attributes of
    every parameter, each of which would pass through all of them.
    """
    model = wrapper.model

    @contextmanager
    def within() -> Iterator[None]:
        with ExitStack() as stack:
            samples = partial(CaptureSamples, wrapper.batch)
            for make in (
                tracer.hidden.forward,
                experts,
                recurrent,
                RefuseDerivatives,
                CaptureBags,
                CaptureCheckedLosses,
                CaptureParts,
                CaptureRepeated,
                CaptureData,
                CaptureSelections,
                samples,
                batch_norms,
            ):
                stack.enter_context(make())
            stack.enter_context(no_moves())
            stack.enter_context(state_refused(model, wrapper.counters))
            if holds_hf_model(model):
                stack.enter_context(ScoresMode(ledger))
            yield

    with ExitStack() as stack:
        stack.enter_context(tracer.active())  # first: the patches below make layers differ from one another
        stack.enter_context(checked_backwards())
        stack.enter_context(products_in_order())
        stack.enter_context(capture_experts(model))
        experts = stack.enter_context(loops.active())
        recurrent = stack.enter_context(capture_recurrent())
        stack.enter_context(scans.active())
        stack.enter_context(capture_packed())
        stack.enter_context(capture_repeated())
        stack.enter_context(capture_transformers())
        batch_norms = stack.enter_context(capture_batch_norm(model))
        if holds_hf_model(model):
            stack.enter_context(configured(model, "use_cache", False))
            stack.enter_context(capture_attention(model, ledger))
            stack.enter_context(capture_hf_experts(model, loops.notes))
            stack.enter_context(own_hooks(model))
        wrapper.within = within
        yield


def _parameters(model: nn.Module) -> tuple[dict[str, Parameter], dict[str, Parameter]]:
    """Return (parameters, buffers) by their first name; further names of the same tensor are aliases."""

    def collect(pairs: Any) -> dict[str, Parameter]:
        names: dict[int, list[str]] = {}
        tensors: dict[int, torch.Tensor] = {}
        for name, tensor in pairs:
            names.setdefault(id(tensor), []).append(name)
            tensors[id(tensor)] = tensor
        out = {}
        for key, mine in names.items():
            t = tensors[key]
            out[mine[0]] = Parameter(
                mine[0], tuple(t.shape), dtype_name(t.dtype), bool(t.requires_grad), tuple(mine[1:])
            )
        return out

    return (
        collect(model.named_parameters(remove_duplicate=False)),
        collect(all_buffers(model, remove_duplicate=False)),
    )
