"""A model as planning takes it: its graph, captured and verified, and the facts by which the model is recognised."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoplan.config.pins import Pins
from autoplan.config.precision import executed_precision
from autoplan.errors import CaptureError
from autoplan.ir.graph import ModelGraph
from autoplan.plans.folder import ModelOutline, TensorOutline
from autoplan.program.facts import Facts, facts_of_model
from autoplan.program.legality import check_pins

if TYPE_CHECKING:
    import torch
    from torch import nn

    from autoplan.capture.frontend.inputs import LossFn


@dataclass(frozen=True)
class CapturedModel:
    """A captured model, and the sizes of its example.

    Attributes:
        name: the text that names the model on the command line; None: its graph itself belongs to the plan.
        verified: the line on the comparison of the graph with the module.
        seq_len, target_len: tokens per sequence; target_len None: not of a length of its own.
        batch: number of examples; 0 for a model given by name.
    """

    graph: ModelGraph
    name: str | None = None
    verified: str = ""
    seq_len: int | None = None
    target_len: int | None = None
    batch: int = 0


def captured(
    model: nn.Module | Path | str,
    example_inputs: Mapping[str, torch.Tensor] | None,
    loss_fn: LossFn | None,
    precision: str,
    verify: bool | str,
) -> CapturedModel:
    """Return the graph of a model, and the sizes of its example. Loads no torch for a model of the catalog."""
    computed = executed_precision(precision).captured
    if isinstance(model, Path | str):
        from autoplan.catalog import load_model

        model = str(model)
        if example_inputs is not None or loss_fn is not None:
            raise CaptureError(f"the model {model!r} brings its example and its loss; give the module instead")
        graph = load_model(model)
        # such rules look at no device
        check_pins(Pins(), Facts(1, facts_of_model(graph), precision=precision, as_given=True))
        return CapturedModel(graph, model)
    import torch

    from autoplan.capture.frontend.inputs import check_arguments
    from autoplan.capture.frontend.lengths import lengths_of
    from autoplan.verify.door import check_verify

    verify = check_verify(verify)
    example = examples(model, example_inputs)
    check_arguments(model, example, loss_fn)
    graph, verified = capture_verified(
        model, example, loss_fn, None if computed is None else getattr(torch, computed), verify
    )
    seq_len, target_len = lengths_of(graph, model, example)
    return CapturedModel(graph, None, verified, seq_len, target_len, int(next(iter(example.values())).shape[0]))


def examples(model: nn.Module, given: Mapping[str, torch.Tensor] | None) -> Mapping[str, torch.Tensor]:
    """Return the example inputs, or the default ones of a Hugging Face language model."""
    from torch import nn

    from autoplan.capture.frontend.huggingface import default_example, is_hf_model

    if not isinstance(model, nn.Module):
        raise CaptureError(
            f"model={model!r:.80} is of type {type(model).__name__}; give an nn.Module (autoplan.plan and "
            "autoplan.compile also take a text: a name of `autoplan models`, a config.json, package.module:factory)"
        )
    if given is not None:
        return given
    if not is_hf_model(model):
        raise CaptureError("example_inputs is needed to capture a model that is not a Hugging Face language model")
    return default_example(model)


def capture_verified(
    model: nn.Module,
    example_inputs: Mapping[str, torch.Tensor],
    loss_fn: LossFn | None = None,
    dtype: torch.dtype | None = None,
    verify: bool | str = True,
) -> tuple[ModelGraph, str]:
    """Return the captured graph, with that of its evaluation if it is another, and the line on its verification."""
    from autoplan.capture.export import capture, capture_evaluation
    from autoplan.capture.frontend.cache import cached
    from autoplan.capture.passes.cast import computing_in
    from autoplan.verify.door import verify_capture, verify_evaluation
    from autoplan.verify.runs import VerifyTask

    with computing_in(model, dtype):
        if loss_fn is not None:
            graph = capture(model, example_inputs, loss_fn)
        else:
            graph = cached(model, example_inputs, lambda: capture(model, example_inputs))
    task = VerifyTask(model, graph, example_inputs, loss_fn, dtype)
    verified = verify_capture(task, verify)

    def evaluation() -> ModelGraph:
        with computing_in(model, dtype):
            return capture_evaluation(graph, model, example_inputs, loss_fn)

    return verify_evaluation(task, evaluation, verify), verified


def model_facts(model: nn.Module | Path | str, loss_fn: LossFn | None = None) -> dict[str, Any]:
    """Return the facts besides tensors that identify a model: its class, its Hugging Face config if known, the numbers
    that its forward and the loss function read, as text, and the names of its trained parameters (none if they are not
    known)."""
    if isinstance(model, Path | str):
        from autoplan.catalog import built_model, configs, shipped_name

        built = built_model(str(model))
        if built is not None:
            return model_facts(*built)
        values = configs().get(shipped_name(str(model)), {"config": {}})["config"]
        # a null in a config.json is what transformers makes of it
        known = {name: value for name, value in values.items() if value is not None}
        return {
            "class": next(iter(values.get("architectures") or []), None),
            "config": known,
            "numbers": {},
            "trained": [],
        }
    from autoplan.runtime.given_numbers import GivenNumbers

    config: Any = getattr(model, "config", None)
    values = config.to_dict() if hasattr(config, "to_dict") else {}
    numbers = GivenNumbers(model, loss_fn).texts()
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    return {"class": type(model).__qualname__, "config": _in_json(values), "numbers": numbers, "trained": trained}


_NOT_IN_JSON = object()


def _in_json(value: Any) -> Any:
    """Return a value of a config without the entries that JSON has not, which are not compared."""
    if isinstance(value, Mapping):
        items = {str(name): _in_json(item) for name, item in value.items()}
        return {name: item for name, item in items.items() if item is not _NOT_IN_JSON}
    if isinstance(value, list | tuple):
        found = [_in_json(item) for item in value]
        return _NOT_IN_JSON if _NOT_IN_JSON in found else found
    return value if value is None or isinstance(value, str | int | float | bool) else _NOT_IN_JSON


def outline_of(model: nn.Module, loss_fn: LossFn | None) -> ModelOutline:
    """Return the facts by which a module is recognised: parameters, buffers, class, config, and numbers."""
    from autoplan.capture.frontend.buffers import all_buffers

    def tensors(pairs: Iterable[tuple[str, torch.Tensor]], trainable: bool) -> dict[str, TensorOutline]:
        return {
            name: TensorOutline(tuple(t.shape), str(t.dtype).removeprefix("torch."), trainable and t.requires_grad)
            for name, t in pairs
        }

    parameters = tensors(model.named_parameters(), True)
    return ModelOutline(parameters, tensors(all_buffers(model), False), model_facts(model, loss_fn))
