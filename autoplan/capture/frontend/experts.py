"""Capture the experts of a mixture as one op: `hidden, top_k_index, top_k_weights -> hidden`, with stacked weights.

A trace of their forward would loop over the experts that were chosen, with sizes that depend on the data. The experts
classes of Hugging Face are found by transformers' own dispatch, and layers without it by name (Llama 4). A class of the
user is registered with one decorator:

    @experts_forward(gate_up="w_in", down="w_out", activation="silu")
    class MyExperts(nn.Module):
        def forward(self, hidden, top_k_index, top_k_weights): ...

Shapes: hidden [tokens, h], index and weights [tokens, top_k], gate_up [experts, 2 f, h] (gate rows first, then up; or
[experts, f, h] if not gated), down [experts, h, f]. Other forms are stated (`autoplan.runtime.expert_forms`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional

from autoplan.capture.frontend.huggingface import configured
from autoplan.capture.frontend.marker import marker
from autoplan.errors import CaptureError
from autoplan.runtime.expert_forms import ACTIVATIONS, GATES, Activation, ExpertForm, activation

_MARK = "_autoplan_experts"
_NAME = "autoplan_capture"
_Module = TypeVar("_Module", bound=type[nn.Module])


@dataclass(frozen=True)
class ExpertsSpec:
    """The attributes that hold the weights of an experts class, its biases if it has any, and its form."""

    gate_up: str
    down: str
    form: ExpertForm
    gate_up_bias: str | None = None
    down_bias: str | None = None


def experts_forward(
    *,
    gate_up: str = "gate_up_proj",
    down: str = "down_proj",
    activation: str = "silu",
    gated: bool = True,
    gate_up_bias: str | None = None,
    down_bias: str | None = None,
    interleaved: bool = False,
    transposed: bool = False,
    scales_inputs: bool = False,
    alpha: float | None = None,
    limit: float | None = None,
) -> Callable[[_Module], _Module]:
    """Return a class decorator that captures the module as one op instead of tracing its forward.

    Args:
        gate_up: attribute that holds [experts, 2 f, h] (gate, then up), or [experts, f, h] with `gated=False`.
        down: attribute that holds [experts, h, f].
        activation: activation of the gate (or of the only projection), by its name in torch.nn.functional, or a name in
            `autoplan.runtime.expert_forms`.
        gated: True if the first projection is `activation(gate) * up`.
        gate_up_bias, down_bias: attributes that hold [experts, 2 f] (or [experts, f]) and [experts, h], if any.
        interleaved: True if gate and up alternate.
        transposed: True if the weights are [experts, h, 2 f] (or [experts, h, f]) and [experts, f, h].
        scales_inputs: True if the routing weights scale what experts take, not what they give.
        alpha, limit: numbers of the activation, if it takes any.

    Raises:
        ValueError: an activation that is not known, other numbers than it takes, or one bias of two.

    Example:
        >>> import torch, autoplan
        >>> @autoplan.experts_forward(activation="silu")
        ... class Experts(torch.nn.Module):
        ...     pass  # holds gate_up_proj and down_proj; its forward takes (hidden, indices, weights)
    """
    if (gate_up_bias is None) != (down_bias is None):
        raise ValueError("experts_forward: biases are added to both products; give gate_up_bias and down_bias")
    form = ExpertForm(activation, gated, interleaved, transposed, scales_inputs, alpha, limit)

    def mark(cls: _Module) -> _Module:
        setattr(cls, _MARK, ExpertsSpec(gate_up, down, form, gate_up_bias, down_bias))
        return cls

    return mark


marker(
    "experts(Tensor hidden, Tensor index, Tensor weights, Tensor gate_up, Tensor down, SymInt num_experts, "
    "SymInt top_k, SymInt intermediate_size, str activation, bool gated, Tensor? gate_up_bias=None, "
    "Tensor? down_bias=None, bool interleaved=False, bool transposed=False, bool scales_inputs=False, "
    "float? alpha=None, float? limit=None, SymInt groups=1, SymInt top_groups=1) -> Tensor",
    lambda hidden, *rest, **more: torch.empty_like(hidden),
)


def _call(
    module: nn.Module, spec: ExpertsSpec, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Call the op in place of the module's forward. Raises CaptureError unless the shapes fit stacked experts."""
    gate_up, down, form = getattr(module, spec.gate_up), getattr(module, spec.down), spec.form
    name, width = type(module).__name__, hidden.shape[-1]
    if hidden.dim() != 2 or index.dim() != 2 or index.shape != weights.shape:
        raise CaptureError(
            f"{name}: experts take hidden [tokens, h], index and weights [tokens, top_k]; got {list(hidden.shape)}, "
            f"{list(index.shape)} and {list(weights.shape)}"
        )
    num_experts, size = down.shape[0], down.shape[1 if form.transposed else 2]
    want = [list(shape) for shape in form.shapes(num_experts, size, width)]
    if [list(gate_up.shape), list(down.shape)] != want:
        raise CaptureError(
            f"{name}: {spec.gate_up} {list(gate_up.shape)} and {spec.down} {list(down.shape)} should be {want[0]} and "
            f"{want[1]} (gated={form.gated}, transposed={form.transposed})"
        )
    biases = [getattr(module, n) for n in (spec.gate_up_bias, spec.down_bias) if n is not None]
    columns = [[num_experts, (1 + form.gated) * size], [num_experts, width]]
    if biases and [list(b.shape) for b in biases] != columns:
        raise CaptureError(
            f"{name}: {spec.gate_up_bias} {list(biases[0].shape)} and {spec.down_bias} {list(biases[1].shape)} should "
            f"be {columns[0]} and {columns[1]}"
        )
    result: torch.Tensor = torch.ops.autoplan.experts(
        hidden, index, weights, gate_up, down, num_experts, index.shape[1], size, form.activation, form.gated,
        *(biases or (None, None)), form.interleaved, form.transposed, form.scales_inputs, form.alpha, form.limit,
        *_groups(module, num_experts),
    )  # fmt: skip
    return result


# Fields of Hugging Face configs: groups of experts, and how many of them a token takes experts of
_GROUPED = ("n_group", "topk_group")


def _groups(module: nn.Module, num_experts: int) -> tuple[int, int]:
    """Return the groups of experts and how many a token chooses from, as the config of the module has them."""
    config = getattr(module, "config", None)
    groups, chosen = (getattr(config, name, None) for name in _GROUPED)
    if not isinstance(groups, int) or not isinstance(chosen, int) or not 0 < chosen < groups or num_experts % groups:
        return 1, 1
    return groups, chosen


@dataclass(frozen=True)
class _Form:
    """The capture of an experts class of Hugging Face.

    `spec`: as the one op. `why_dense`: why it cannot be; then every expert computes every token.
    """

    spec: ExpertsSpec | None
    why_dense: str = ""


def _forms(modules: Iterable[nn.Module], form_of: Callable[[nn.Module], _Form]) -> dict[nn.Module, _Form]:
    """Return the form of every module. Equal modules of one model are asked once: it takes some 10 ms."""
    known: dict[object, _Form] = {}
    out = {}
    for module in modules:
        key = _likeness(module)
        if key not in known:
            known[key] = form_of(module)
        out[module] = known[key]
    return out


def _likeness(module: nn.Module) -> tuple[object, ...]:
    """Return what a module's functions can depend on, without its tensors and the state of its children."""
    own = tuple((n, v if type(v) in (bool, int, float, str) else id(v)) for n, v in vars(module).items() if n[0] != "_")
    children = tuple((n, *_likeness(m)) for n, m in module.named_children())
    return type(module), own, children


def _form_of(module: nn.Module) -> _Form:
    """Return the form of experts by the flags that transformers' use_experts_implementation sets."""
    flags = vars(module)
    if flags.get("has_post_expert_norm"):
        return _Form(None, "end with a norm")
    gated, first = bool(flags.get("has_gate", True)), "gate_up_proj" if flags.get("has_gate", True) else "up_proj"
    own: Any = module
    form = _between(module, own._apply_gate if gated else own.act_fn, gated)
    if form is None:
        return _Form(None, _NO_FUNCTION)
    form = replace(form, transposed=bool(flags.get("is_transposed")))
    biases = (f"{first}_bias", "down_proj_bias") if flags.get("has_bias") else (None, None)
    return _Form(ExpertsSpec(first, "down_proj", form, *biases))


_NO_FUNCTION = "have a function between their products that autoplan.runtime.expert_forms does not have"


def _between(module: nn.Module, function: Activation, gated: bool) -> ExpertForm | None:
    """Return a form whose function between the products computes the same as that of a module; None if none does.

    Names come from the config, numbers from the module; the values decide.
    """
    config = getattr(module, "config", None)
    given = [getattr(config, name, None) for name in ("hidden_act", "hidden_activation", "mlp_hidden_act")]
    names = (*(str(g) for g in given if g), "silu", "gelu", "relu", *ACTIVATIONS)
    known = [ExpertForm(name, gated) for name in dict.fromkeys(names) if activation(name) is not None]
    numbers = [float(x) for x in vars(module).values() if type(x) in (int, float)]
    for name, gate in GATES.items() if gated else ():
        for values in itertools.product(numbers, repeat=len(gate.numbers)):
            chosen: dict[str, Any] = dict(zip(gate.numbers, values, strict=True))
            known.append(ExpertForm(name, True, **chosen))
    # also beyond every number, which may be a limit; four columns tell gates that alternate from gates that come first
    far = torch.tensor([0.0, *numbers], dtype=torch.float64) * 1.5
    x = torch.cat((torch.linspace(-4.0, 4.0, 65, dtype=torch.float64), far, -far))
    pairs = torch.cartesian_prod(x, x)
    x = torch.cat((pairs, pairs.flip(0)), 1) if gated else x
    wanted = function(x)
    for form in (*known, *(replace(form, interleaved=True) for form in known if gated)):
        if torch.equal(form.between(x), wanted):
            return form
    return None


def _dense(module: nn.Module, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Compute every expert for every token, and sum the results by the weights of the router.

    Shapes: hidden [t, h], index and weights [t, k], products [e, t, f] and [e, t, h].
    """
    flags: Any = module
    gated, transposed = flags.has_gate, flags.is_transposed
    first = flags.gate_up_proj if gated else flags.up_proj
    second = flags.down_proj
    rows = torch.matmul(hidden.unsqueeze(0), first if transposed else first.transpose(1, 2))
    if flags.has_bias:
        rows = rows + (flags.gate_up_proj_bias if gated else flags.up_proj_bias).unsqueeze(1)
    rows = flags._apply_gate(rows) if gated else flags.act_fn(rows)
    rows = torch.matmul(rows, second if transposed else second.transpose(1, 2))
    if flags.has_bias:
        rows = rows + flags.down_proj_bias.unsqueeze(1)
    if flags.has_post_expert_norm:
        rows = flags.post_expert_norm(rows)
    chosen = functional.one_hot(index, second.shape[0])
    share = (chosen.to(weights.dtype) * weights.unsqueeze(-1)).sum(1)
    return (rows * share.t().unsqueeze(-1)).sum(0).to(hidden.dtype)


def _of_every_token(layer: nn.Module) -> _Form:
    """Return the form of experts that take every token once per expert, scaled by scores that are 0 where not chosen.

    So Llama 4 computes them. No biases: an expert gives 0 for 0, and only the choices count.
    """
    experts: Any = layer.get_submodule("experts")

    def function(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        out: torch.Tensor = up * experts.act_fn(gate)
        return out

    form = _between(experts, function, gated=True)
    if form is None:
        return _Form(None, _NO_FUNCTION)
    return _Form(ExpertsSpec("gate_up_proj", "down_proj", replace(form, transposed=True, scales_inputs=True)))


def _choose_tokens(layer: nn.Module, spec: ExpertsSpec, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the forward of such a layer with the one op: the choices of a token are its largest scores."""
    parts: Any = layer
    flat = hidden.reshape(-1, parts.hidden_dim)
    scores, logits = parts.router(flat)
    weights, index = torch.topk(scores, parts.top_k, dim=-1)
    return parts.shared_expert(flat) + _call(parts.experts, spec, flat, index, weights), logits


_OF_EVERY_TOKEN = ("transformers.models.llama4.modeling_llama4.Llama4TextMoe",)


def _layers_of_every_token(model: nn.Module, notes: list[str]) -> dict[nn.Module, ExpertsSpec]:
    """Return the layers of a model whose experts take every token, and are not captured so, with their forms."""
    found = {}
    named = (m for m in model.modules() if f"{type(m).__module__}.{type(m).__qualname__}" in _OF_EVERY_TOKEN)
    for module, form in _forms(named, _of_every_token).items():
        note = dense_note(type(module).__name__, form.why_dense)
        if form.spec is not None:
            found[module] = form.spec
        elif note not in notes:
            notes.append(note)
    return found


@contextmanager
def capture_experts(model: nn.Module) -> Iterator[None]:
    """Replace the forward of registered classes by the one op, and restore it on exit."""
    marked = [(m, getattr(type(m), _MARK)) for m in model.modules() if hasattr(type(m), _MARK)]
    try:
        for module, spec in marked:
            module.forward = lambda hidden, index, weights, m=module, s=spec: _call(m, s, hidden, index, weights)
        yield
    finally:
        for module, _ in marked:
            module.__dict__.pop("forward", None)


@contextmanager
def capture_hf_experts(model: nn.Module, notes: list[str]) -> Iterator[None]:
    """Capture the experts of a Hugging Face model as one op, or as plain ops, through transformers' own dispatch.

    Args:
        notes: receives a sentence for every class of experts that is captured as plain ops.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    # by their dicts: the trace of a module that several others hold sees a stand-in with the same dict
    stacked = (m for m in model.modules() if "is_transposed" in vars(m))
    forms = {id(vars(m)): form for m, form in _forms(stacked, _form_of).items()}

    def run(
        module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        form = forms[id(vars(module))]
        if form.spec is not None:
            return _call(module, form.spec, hidden_states, top_k_index, top_k_weights)
        note = dense_note(type(module).__name__, form.why_dense)
        if note not in notes:
            notes.append(note)
        return _dense(module, hidden_states, top_k_index, top_k_weights)

    ALL_EXPERTS_FUNCTIONS.register(_NAME, run)
    layers = _layers_of_every_token(model, notes)
    try:
        for layer, spec in layers.items():
            layer.forward = lambda hidden_states, m=layer, s=spec: _choose_tokens(m, s, hidden_states)
        with configured(model, "_experts_implementation", _NAME):
            yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


def dense_note(name: str, why: str) -> str:
    """Return the sentence of a graph whose experts are plain ops."""
    return (
        f"{name}: its experts {why}, so every expert computes every token, which is exact and slow; for tokens that go "
        "to their experts only, stack the weights as gate_up [experts, 2 f, h] and down [experts, h, f] and decorate "
        "the class with autoplan.experts_forward"
    )
