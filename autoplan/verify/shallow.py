"""Verify fewer layers of the same Hugging Face config where the whole model costs too much.

The small model has at least one layer of every kind and random weights; if that still costs too much, narrower products
and fewer heads. It stands for the model only if its captured blocks are the model's, op by op.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autoplan.capture.export import capture
from autoplan.capture.frontend.huggingface import is_hf_model
from autoplan.capture.frontend.layer_tracer import layer_modules
from autoplan.capture.passes.cast import computing_in, main_dtype
from autoplan.errors import CaptureError
from autoplan.ir.graph import Block, ModelGraph
from autoplan.verify.check import Verification, choose_sizes, compare_or_say
from autoplan.verify.cost import cost_of_parameters
from autoplan.verify.runs import VerifyTask

# names of config entries; other entries are left as they are
_DEPTHS = (
    "num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers", "encoder_layers", "decoder_layers",
)  # fmt: skip
_INNER = (
    "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "ffn_dim", "d_ff", "n_inner",
    "encoder_ffn_dim", "decoder_ffn_dim",
)  # fmt: skip
_HEADS = ("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads")
_NARROW, _VOCAB = 64, 1024


@dataclass(frozen=True)
class _Change:
    """A change that makes a config smaller; `text` describes it."""

    make: Callable[[Any], None]
    text: str
    widths: bool  # True if it changes other sizes than the number of layers


def _depths(graph: ModelGraph, model: nn.Module) -> dict[int, int]:
    """Return the length of each list of layers -> how many of its first layers show every kind of block."""
    blocks = {call.name: call.block for call in graph.calls}
    lists: dict[str, list[str]] = {}
    for name in layer_modules(model):
        lists.setdefault(name.rpartition(".")[0], []).append(blocks.get(name, ""))
    out: dict[int, int] = {}
    for kinds in lists.values():
        last = max(kinds.index(kind) for kind in set(kinds)) + 1
        out[len(kinds)] = max(out.get(len(kinds), 0), min(len(kinds), max(2, last)))
    return out


def _changes(depths: Mapping[int, int]) -> Iterator[_Change]:
    def fewer(config: Any) -> None:
        before = {name: getattr(config, name, None) for name in _DEPTHS}
        for name, number in before.items():
            if isinstance(number, int) and number in depths:
                setattr(config, name, depths[number])
        for name, value in list(vars(config).items()):
            if isinstance(value, list) and len(value) in depths and len(value) in before.values():
                setattr(config, name, value[: depths[len(value)]])

    def narrow(config: Any) -> None:
        fewer(config)
        for name in _INNER:
            if isinstance(getattr(config, name, None), int):
                setattr(config, name, min(getattr(config, name), _NARROW))
        if getattr(config, "vocab_size", 0) > _VOCAB:
            config.vocab_size = _VOCAB
            for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
                token = getattr(config, name, None)
                if isinstance(token, int) and token >= _VOCAB:
                    setattr(config, name, _VOCAB - 1)

    def few_heads(config: Any) -> None:
        narrow(config)
        heads, shared = getattr(config, "num_attention_heads", 1), getattr(config, "num_key_value_heads", None)
        ratio = heads // shared if shared else 1
        kept = min(heads, 2 * ratio)
        config.hidden_size = max(1, config.hidden_size // heads) * kept
        for name in _HEADS:
            if hasattr(config, name):
                setattr(config, name, kept)
        if shared:
            config.num_key_value_heads = kept // ratio

    layers = " and ".join(f"{few} of {many} layers" for many, few in depths.items())
    yield _Change(fewer, layers, False)
    yield _Change(narrow, f"{layers}, with narrow feed-forward layers and few tokens", True)
    yield _Change(few_heads, f"{layers}, with narrow feed-forward layers, few tokens and heads", True)


def _signature(block: Block, widths: bool) -> tuple[Any, ...]:
    """Return the part of a captured block that a smaller model must share; with `widths`, whole numbers may differ."""

    def attributes(attrs: Mapping[str, Any]) -> tuple[Any, ...]:
        kept = ((k, v) for k, v in sorted(attrs.items()) if not widths or isinstance(v, (bool, str, float)))
        return tuple((k, str(v)) for k, v in kept)

    return tuple((n.op, n.inputs, n.outputs, n.scope, n.source, attributes(n.attrs)) for n in block.nodes)


def verify_shallow(task: VerifyTask, limit_s: float) -> Verification:
    """Compare graph and module of a smaller model of the same class. The outcome says why if it is not done.

    Raises:
        CaptureError: if the graph is not the module.
    """
    if not is_hf_model(task.model):
        return Verification(False, "")
    reason = ""
    task = replace(task, example={n: x.cpu() for n, x in task.example.items()})
    for change in _changes(_depths(task.graph, task.model)):
        config = copy.deepcopy(task.model.config)
        try:
            change.make(config)
            with torch.device("meta"):
                empty = _like(task, config)
            cost = cost_of_parameters(sum(p.numel() for p in empty.parameters()))
            if cost.seconds > limit_s or not cost.fits:
                reason = f"{change.text} of the same config would take about {cost}"
                continue
            small = _captured(task, empty)
        except Exception as exc:  # of any type: only the class knows whether a config is legal
            reason = f"{change.text} of the same config: {type(exc).__name__}: {(str(exc).splitlines() or [''])[0]}"
            continue
        kinds = {_signature(b, change.widths) for b in small.blocks.values()}
        if not {_signature(b, change.widths) for b in task.graph.blocks.values()} <= kinds:
            reason = f"{change.text} of the same config are captured in other blocks"
            continue
        shallow = replace(task, model=empty, graph=small)
        sizes, least = choose_sizes(shallow, limit_s)
        if sizes is None:
            reason = f"{change.text} of the same config would take about {least}"
            continue
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = _like(task, config)
        outcome = compare_or_say(replace(shallow, model=model), sizes)
        return Verification(outcome.done, f"on {change.text} of the same config, {outcome.text}")
    return Verification(False, reason)


def _like(task: VerifyTask, config: Any) -> nn.Module:
    """Return a model of this config with the dtype, mode and frozen parameters of the task's model."""
    model: nn.Module = type(task.model)(config)
    model.to(main_dtype(task.model)).train(task.model.training)
    theirs = dict(task.model.named_parameters())
    for name, p in model.named_parameters():
        if name in theirs:
            p.requires_grad_(theirs[name].requires_grad)
    return model


def _captured(task: VerifyTask, model: nn.Module) -> ModelGraph:
    with computing_in(model, task.dtype):
        graph = capture(model, task.example, task.loss_fn)
    if not graph.calls:
        raise CaptureError("nothing was captured")
    return graph
