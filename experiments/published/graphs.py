"""Graphs of published decoders: a few layers are captured like any other model, the rest are further calls of them."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

from autoplan.errors import GraphError
from autoplan.ir.graph import Call, ModelGraph, check
from autoplan.program.adapters import with_adapters
from autoplan.program.multi_token import with_mtp
from experiments.published.shapes import Shape


@lru_cache(maxsize=4)
def graph_of(shape: Shape) -> ModelGraph:
    """Return the graph of a decoder with these dimensions. CaptureError if its layers cannot be captured."""
    if shape.adapters is not None:
        return with_adapters(graph_of(replace(shape, adapters=None)), shape.adapters)
    if shape.predicting:
        decoder = replace(shape, layers=shape.layers - shape.predicting, predicting=0)
        return with_mtp(graph_of(decoder), shape.predicting)
    # every kind of layer twice, so that the last ones show how layers follow one another
    few = shape.first_dense + 2 * shape.kind.expert_every
    if shape.layers <= few:
        return _captured(shape)
    return deepened(_captured(replace(shape, layers=few)), shape.layers, shape.kind.expert_every)


@lru_cache(maxsize=256)
def _captured(shape: Shape) -> ModelGraph:
    """From the user's cache if it is there."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from autoplan.capture.export import capture
    from autoplan.capture.frontend.cache import cached
    from autoplan.capture.frontend.config_file import model_from_config
    from autoplan.capture.frontend.huggingface import default_example

    config = shape.config()
    model = model_from_config(config, f"{config['model_type']} of {shape.layers} layers, {shape.hidden} wide")
    with FakeTensorMode(allow_non_fake_inputs=True):
        example = default_example(model)
    return cached(model, example, lambda: capture(model, example))


def deepened(graph: ModelGraph, num_layers: int, period: int) -> ModelGraph:
    """The graph with `num_layers` layers: its last `period` layers are repeated in turn.

    Raises: GraphError if layers are not named `prefix.NUMBER`, or hand over other values than those before them.
    """
    calls, values, params, buffers = list(graph.calls), dict(graph.values), dict(graph.params), dict(graph.buffers)
    layers = [k for k, c in enumerate(calls) if c.params and re.search(r"\.\d+$", c.name)]
    if len(layers) <= period or layers != list(range(layers[0], layers[-1] + 1)):
        raise GraphError(f"{graph.name}: {len(layers)} layers in a row are too few to repeat the last {period}")
    end = layers[-1] + 1
    last = calls[end - 1]
    made: list[Call] = []
    for number in range(len(layers), num_layers):
        at = end - period + (number - len(layers)) % period
        like, before, previous = calls[at], calls[at - 1], (made or [last])[-1]
        if len(before.outputs) != len(previous.outputs):
            raise GraphError(f"{graph.name}: {before.name} and {previous.name} hand over different values")
        name = re.sub(r"\d+$", str(number), like.name)
        received = dict(zip(before.outputs, previous.outputs, strict=True))
        outputs = tuple(f"{name}.out{k}" for k in range(len(like.outputs)))
        values |= {new: replace(values[old], name=new) for new, old in zip(outputs, like.outputs, strict=True)}
        for bound, known in ((like.params, params), (like.buffers, buffers)):
            for full in bound.values():
                new = full.replace(f"{like.name}.", f"{name}.", 1)
                known[new] = replace(known[full], name=new)
        made.append(
            Call(
                name=name,
                block=like.block,
                inputs=tuple(received.get(value, value) for value in like.inputs),
                outputs=outputs,
                params={k: v.replace(f"{like.name}.", f"{name}.", 1) for k, v in like.params.items()},
                buffers={k: v.replace(f"{like.name}.", f"{name}.", 1) for k, v in like.buffers.items()},
            )
        )
    if made:
        handed = dict(zip(last.outputs, made[-1].outputs, strict=True))
        rest = [replace(c, inputs=tuple(handed.get(v, v) for v in c.inputs)) for c in calls[end:]]
        calls = [*calls[:end], *made, *rest]
    out = replace(graph, calls=tuple(calls), values=values, params=params, buffers=buffers)
    check(out)
    return out
