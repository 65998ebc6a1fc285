"""Capture models that are given by a Hugging Face config or by a factory function.

Both are built on fake tensors where possible (405B parameters then need no memory), and captured as usual.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from autoplan.capture.export import capture
from autoplan.capture.frontend.cache import cached
from autoplan.capture.frontend.config_file import label_dims, model_from_config
from autoplan.capture.frontend.huggingface import default_example, is_hf_model
from autoplan.capture.frontend.inputs import LossFn, check_arguments
from autoplan.errors import CaptureError
from autoplan.files import json_of
from autoplan.ir.graph import ModelGraph

_log = logging.getLogger(__name__)
Built = tuple[nn.Module, Mapping[str, torch.Tensor] | None, LossFn | None]  # a model, its example, its loss function


def graph_of_config(config: Mapping[str, Any], where: str) -> ModelGraph:
    """Capture the model of a config, without the cache."""
    model = model_from_config(config, where)
    return capture(model, _example(model))


def _example(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return fake tensors of the usual shapes for a model, with labels of the shape that its class takes."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        main = getattr(model, "main_input_name", "input_ids")
        if main == "pixel_values" and label_dims(model) == 1:
            return _images(model)
        if main == "input_features":
            return _spectrograms(model)
        example = default_example(model)
        if label_dims(model) == 1:
            example["labels"] = example["labels"][:, 0].clone()
    return example


def _images(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a batch of 2 images of the size in the config, with one label each."""
    config: Any = model.config
    size = getattr(config, "image_size", 224)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    pixels = torch.zeros(2, getattr(config, "num_channels", 3), height, width)
    return {"pixel_values": pixels.to(config.dtype), "labels": torch.zeros(2, dtype=torch.long)}


def _spectrograms(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a batch of 2 spectrograms of the size in the config, as in Whisper, and the tokens of their words.

    Raises:
        CaptureError: if the config does not give this size.
    """
    config: Any = model.config
    names = ("num_mel_bins", "max_source_positions", "max_target_positions")
    if not all(isinstance(getattr(config, name, None), int) for name in names):
        raise CaptureError(
            f"{type(model).__name__}: the shape of its input_features does not follow from its config; write a "
            "function that returns (model, example_inputs) and give it as package.module:function"
        )
    bins, positions, tokens = (int(getattr(config, name)) for name in names)
    features = torch.zeros(2, bins, 2 * positions)  # the first convolutions halve the number of frames
    return {"input_features": features.to(config.dtype), "labels": torch.zeros(2, tokens, dtype=torch.long)}


def load_config(path: Path) -> ModelGraph:
    """Return the graph of the model that a config.json describes, from the cache if it is there. Raises CaptureError as
    `built_of_config`."""
    model, _, _ = built_of_config(path)
    return _priced(model, _example(model))


def built_of_config(path: Path) -> Built:
    """Return the model that a config.json describes, on fake tensors.

    Raises:
        CaptureError: for a file that is missing, is not a JSON object, or does not describe a model that can be built.
    """
    try:
        config = json_of(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise CaptureError(f"{path}: cannot be read ({exc.strerror})") from exc
    except ValueError as exc:
        raise CaptureError(f"{path}: not JSON ({exc})") from exc
    if not isinstance(config, dict):
        raise CaptureError(
            f"{path}: holds a value of type {type(config).__name__}, not the fields of a Hugging Face config"
        )
    return model_from_config(config, str(path)), None, None


def _priced(model: nn.Module, example: Mapping[str, torch.Tensor], loss_fn: LossFn | None = None) -> ModelGraph:
    """Return the graph of a model, with the positions of its config, from the cache if it brings its loss."""
    if loss_fn is not None:
        graph = capture(model, example, loss_fn)
    else:
        graph = cached(model, example, lambda: capture(model, example))
    own: Any = model
    return graph.of_config(own.config.to_dict()) if is_hf_model(model) else graph


def load_factory(text: str) -> ModelGraph:
    """Return the graph of the model that `package.module:factory` returns.

    Raises: CaptureError, as `built_of_factory`, and for a model that needs an example and has none.
    """
    model, example, loss_fn = built_of_factory(text)
    if example is None:
        if not is_hf_model(model):
            raise CaptureError(
                f"{text}: return (model, example_inputs) or (model, example_inputs, loss_fn); only a Hugging Face "
                "language model needs no example"
            )
        example = _example(model)
    return _priced(model, example, loss_fn)


def built_of_factory(text: str) -> Built:
    """Return what `package.module:factory` returns.

    The factory takes no arguments and returns a module, `(module, example_inputs)` or `(module, example_inputs,
    loss_fn)`. It is called under fake tensors first, and on the CPU if that fails.

    Raises:
        CaptureError: names what is missing or has another form.
    """
    module_name, _, name = text.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as exc:
        raise CaptureError(f"{text}: cannot import {module_name!r}: {exc}") from exc
    if not hasattr(module, name):
        raise CaptureError(f"{text}: module {module_name!r} has no {name!r}")
    factory = getattr(module, name)
    if not callable(factory):
        raise CaptureError(f"{text}: {name!r} is of type {type(factory).__name__}, not a function that returns a model")
    return _build(text, factory)


def _build(text: str, factory: Callable[[], Any]) -> Built:
    """Call the factory, on fake tensors if the model can be built so."""
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            made = _read(text, factory())
        if all(isinstance(p, FakeTensor) for p in (*made[0].parameters(), *made[0].buffers())):
            return made
    except CaptureError:
        raise
    except Exception as exc:  # it needs values, e.g. loads a checkpoint: build it on the CPU and show its errors
        _log.debug("%s cannot be built on fake tensors: %s", text, exc)
    try:
        return _read(text, factory())
    except CaptureError:
        raise
    except Exception as exc:
        raise CaptureError(f"{text}: the factory failed with {type(exc).__name__}: {exc}") from exc


def _read(text: str, made: Any) -> Built:
    parts = made if isinstance(made, tuple) else (made,)
    model, example, loss_fn = (*parts, None, None)[:3]
    if not isinstance(model, nn.Module) or len(parts) > 3:
        raise CaptureError(
            f"{text}: returned something of type {type(made).__name__}; return a module or (module, example_inputs[, "
            "loss_fn])"
        )
    try:
        check_arguments(model, {"any": torch.empty(0)} if example is None else example, loss_fn)
    except CaptureError as exc:
        raise CaptureError(f"{text}: {exc}") from exc
    return model, example, loss_fn
