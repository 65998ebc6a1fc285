"""Capture: nn.Module + example inputs -> ModelGraph, by torch.export (non-strict, pre-dispatch ATen, fake tensors).

`capture` runs, in order: wrap model and loss; export with symbolic batch and sequence and marked layers; inline no_grad
regions; translate ATen to IR ops; cut into blocks and merge identical ones; normalise the loss; infer factors; check.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autoplan.capture.frontend.experts import capture_experts, capture_hf_experts, refuse_separate_experts
from autoplan.capture.frontend.host import examples_on_host, module_on_host
from autoplan.capture.frontend.huggingface import (
    capture_attention,
    check_masks,
    is_hf_model,
    own_hooks,
    recorded_outputs,
)
from autoplan.capture.frontend.inputs import LossFn, LossModule, check_arguments
from autoplan.capture.frontend.layer_tracer import LayerTracer
from autoplan.capture.frontend.masks import Ledger
from autoplan.capture.frontend.recurrences import refuse_loops
from autoplan.capture.frontend.sizes import bounds_of, export_symbolic
from autoplan.capture.layers.assemble import assemble
from autoplan.capture.translate import Translator, dtype_name
from autoplan.errors import CaptureError
from autoplan.ir.graph import ModelGraph, Parameter
from autoplan.ops.factors import infer_factors


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

    Raises:
        CaptureError: names the op and the source line that cannot be captured.
    """
    check_arguments(model, example_inputs, loss_fn)
    _refuse_autocast()
    example_inputs = examples_on_host(example_inputs)
    check_masks(model, example_inputs)
    with module_on_host(model):
        if is_hf_model(model):
            refuse_separate_experts(model)
            refuse_loops(model, LossModule(model, tuple(example_inputs), loss_fn), example_inputs)
        graph = _capture(model, example_inputs, loss_fn, merge=True)
        if graph is None:  # a layer read an attribute in which it differs from the others: trace them one by one
            graph = _capture(model, example_inputs, loss_fn, merge=False)
    if graph is None:
        raise CaptureError(f"{type(model).__name__}: layers could not be delimited")
    return infer_factors(graph).in_order()


def _capture(
    model: nn.Module, example_inputs: Mapping[str, torch.Tensor], loss_fn: LossFn | None, *, merge: bool
) -> ModelGraph | None:
    names = tuple(example_inputs)
    wrapper = LossModule(model, names, loss_fn)
    ledger, failure = Ledger(), None
    while True:
        tracer = LayerTracer(model, merge, recorded_outputs if is_hf_model(model) else dict)
        try:
            program, symbols = _exported(wrapper, example_inputs, tracer, ledger)
        except CaptureError as exc:
            if ledger.again():
                continue
            if failure is None and wrapper.gives_more():  # it may have missed an input that it looks up by name
                failure = exc
                continue
            raise failure or exc from exc
        if not ledger.again() and not wrapper.gives_more():
            break
    bounds = bounds_of(program, symbols, type(model).__name__)
    if tracer.unproved and merge:
        return None
    trace = Translator(program, wrapper, symbols, names).run()
    graph = assemble(trace, type(model).__name__, *_parameters(model))
    return graph if graph is None else replace(graph, bounds=bounds)


def _refuse_autocast() -> None:
    """Raise CaptureError inside a torch.autocast region of the caller, since the graph does not contain its casts."""
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            raise CaptureError(
                f"a torch.autocast({kind!r}) region is active: the program would not cast as it does; leave it, and "
                "pass precision='bf16' or 'fp16' to autoplan.parallelize"
            )


def _exported(
    wrapper: LossModule, example_inputs: Mapping[str, torch.Tensor], tracer: LayerTracer, ledger: Ledger
) -> tuple[torch.export.ExportedProgram, dict[str, str]]:
    """Export once; `ledger` says which masks of a Hugging Face model are tensors in this trace."""
    model = wrapper.model
    with ExitStack() as stack:
        stack.enter_context(tracer.active())  # first: the patches below make layers differ from one another
        stack.enter_context(capture_experts(model))
        if is_hf_model(model):
            stack.enter_context(capture_attention(model, ledger))
            stack.enter_context(capture_hf_experts(model))
            stack.enter_context(own_hooks(model))
        return export_symbolic(wrapper, example_inputs, tracer)


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
        collect(model.named_buffers(remove_duplicate=False)),
    )
