"""Whole random programs: a module and its loss as source text, and the strategies that draw them."""

from __future__ import annotations

import functools
import inspect
import linecache
import re
import textwrap
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from experiments.compatibility.fuzz.scope import CAPTURED, RUN, VOCAB, WIDTH, Draw, Pick, Scope, Unfit, batch_of
from experiments.compatibility.fuzz.stateful import ALL_OPERATIONS

FILE = "fuzzed.py"  # the name of a program's source in messages
HEAD = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n\n\n"


@dataclass(frozen=True)
class FuzzProgram:
    """A module and its loss. `text` defines `Model` and `loss_fn`; `inputs`: what a batch has."""

    text: str
    inputs: tuple[str, ...]

    captured = CAPTURED
    runs = RUN

    @functools.cached_property
    def space(self) -> Mapping[str, Any]:
        """The names that the text defines."""
        module = types.ModuleType("fuzzed")
        module.__file__ = FILE
        linecache.cache[FILE] = (len(self.text), None, self.text.splitlines(True), FILE)
        exec(compile(self.text, FILE, "exec"), module.__dict__)
        return module.__dict__

    def model(self) -> nn.Module:
        """Return a new module in float64; all have the same values."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model: nn.Module = self.space["Model"]()
        return model.double()

    def batch(self, size: tuple[int, int], seed: int = 0) -> dict[str, torch.Tensor]:
        """Return a batch of [samples, tokens]."""
        whole = batch_of(size, seed)
        return {name: whole[name] for name in self.inputs}

    def env(self, size: tuple[int, int]) -> dict[str, int]:
        """Return the sizes of a batch by symbol."""
        return {"b": size[0], "s": size[1], "t": size[1]}

    def loss(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss of the module itself."""
        names = inspect.signature(model.forward).parameters
        found: torch.Tensor = self.loss_fn(model(**{n: batch[n] for n in names}), batch)
        return found

    @property
    def loss_fn(self) -> Callable[..., torch.Tensor]:
        """The loss of output and batch."""
        found: Callable[..., torch.Tensor] = self.space["loss_fn"]
        return found


def _statement(scope: Scope, names: Sequence[str]) -> None:
    """Draw one statement and keep it if PyTorch computes it."""
    pick = Pick(scope)
    try:
        text = ALL_OPERATIONS[pick.one(names)](pick)
    except (Unfit, IndexError):
        return
    out = scope.fresh()
    lines = [f"{out} = {text}"] if isinstance(text, str) else [line.replace("{out}", out) for line in text]
    used = [line for line in pick.init if re.search(rf"self\.{_made_by(line)}\b", "\n".join(lines))]
    scope.add(lines, used, [out])


def _made_by(line: str) -> str:
    """Return the attribute that a line of an `__init__` sets."""
    found = re.match(r"self\.(?:register_buffer\(\")?(\w+)", line)
    assert found is not None
    return found[1]


def _floats(scope: Scope, shaped_as: str = "") -> list[str]:
    """Return the names of float64 values that are no arguments, the latest first."""
    like = scope.on_both(shaped_as) if shaped_as else ()
    found = [n for n in scope.names[::-1] if n not in scope.arguments]
    found = [n for n in found if scope.on_both(n)[0].dtype is torch.float64]
    return [
        n for n in found if not like or all(a.shape == b.shape for a, b in zip(scope.on_both(n), like, strict=True))
    ]


def _layer(draw: Draw[Any], outer: Scope, h: str, names: Sequence[str]) -> tuple[str, list[str]] | None:
    """Draw a class of layers. Returns its source and its further arguments in the model; None if it does nothing."""
    extra = (
        draw(st.lists(st.sampled_from([n for n in outer.names if n != h]), max_size=1)) if len(outer.names) > 1 else []
    )
    given = {"h": outer.on_both(h), **{f"given{i}": outer.on_both(n) for i, n in enumerate(extra)}}
    scope = Scope(draw, {n: tuple(t.detach().clone() for t in v) for n, v in given.items()})
    for _ in range(draw(st.integers(1, 4))):
        _statement(scope, names)
    found = _floats(scope, "h")
    if not found:
        return None
    result = draw(st.sampled_from([f"h + {found[0]}", found[0], f"h + torch.tanh({found[-1]})"]))
    return scope.text("Layer", result), extra


_CALLS: tuple[tuple[str, ...], ...] = (
    ("for layer in self.layers:", "    {out} = layer({out}{extra})"),
    ("{out} = self.layers[0]({out}{extra})", "{out} = self.layers[1]({out}{extra})"),
    ("{out} = self.layers[1]({out}{extra})", "{out} = self.layers[0]({out}{extra})"),
    ("for layer in self.layers:", "    {out} = {out} + 0.5 * layer({out}{extra})"),
    ("{out} = self.layers[0](self.layers[0]({out}{extra}){extra})",),  # one layer twice
    ("for k, layer in enumerate(self.layers):", "    {out} = layer({out} * (k + 1){extra})"),
    (
        "for layer in self.layers:",
        "    {out} = torch.utils.checkpoint.checkpoint(layer, {out}{extra}, use_reentrant=False)",
    ),
)
_CALLS_OF_ATTRIBUTES: tuple[tuple[str, ...], ...] = (
    ("{out} = self.first({out}{extra})", "{out} = self.second({out}{extra})"),
    ("{out} = self.second({out}{extra})", "{out} = self.first({out}{extra}) + {out}"),
    ("for _ in range(3):", "    {out} = self.first({out}{extra})"),  # one layer three times
    ("near = self.first({out}{extra})", "{out} = self.second(near.sin(){extra}) + near"),
    ("{out} = self.first({out}{extra}) * self.second({out}{extra})",),  # side by side
)


def _layers(draw: Draw[Any], scope: Scope, h: str, names: Sequence[str]) -> tuple[str, str]:
    """Draw repeated layers. Returns the source of their class, and the value behind them."""
    found = _layer(draw, scope, h, names)
    if found is None:
        return "", h
    text, extra = found
    space: dict[str, Any] = {"torch": torch, "nn": nn, "F": torch.nn.functional}
    exec(text, space)
    for each in scope.spaces:
        each["Layer"] = space["Layer"]
    out, num = scope.fresh(), draw(st.integers(2, 4))
    if draw(st.booleans()):
        init, calls = f"self.layers = nn.ModuleList(Layer() for _ in range({num}))", draw(st.sampled_from(_CALLS))
    else:  # no list of layers
        init, calls = "self.first, self.second = Layer(), Layer()", draw(st.sampled_from(_CALLS_OF_ATTRIBUTES))
    more = "".join(f", {n}" for n in extra)
    lines = [line.replace("{out}", out).replace("{extra}", more) for line in (f"{out} = {h}", *calls)]
    made = scope.add(lines, [init], [out])
    return (text, out) if made else ("", h)


_MASK = 'batch["mask"]'
_TERMS: tuple[str, ...] = (
    "{o}.square().mean()",
    "{o}.mean()",
    "{o}.sum()",
    "{o}.square().sum() / {o}.shape[0]",
    "{o}.abs().sum() / {o}.numel()",
    "F.mse_loss({o}, torch.ones_like({o}))",
    "{o}.flatten(1).sum(-1).mean()",
    "{o}.tanh().sum(-1).mean()",
    '({o} * batch["u"].reshape(-1, *[1] * ({o}.dim() - 1))).sum() / batch["u"].sum()',
    f"({{o}}.flatten(2).sum(-1) * {_MASK}).sum() / {_MASK}.sum()",
    "{o}.square().mean().sqrt()",
)
_ENTROPIES: tuple[str, ...] = (
    'F.cross_entropy({o}.flatten(0, 1), batch["labels"].flatten())',
    'F.cross_entropy({o}.transpose(1, 2), batch["labels"])',
    'F.cross_entropy({o}.view(-1, {o}.size(-1)), batch["labels"].view(-1), ignore_index=3)',
    'F.cross_entropy({o}.flatten(0, 1), batch["labels"].flatten(), label_smoothing=0.1)',
    'F.cross_entropy({o}.flatten(0, 1), batch["labels"].flatten(), reduction="sum")',
    'F.nll_loss(F.log_softmax({o}, -1).flatten(0, 1), batch["labels"].flatten())',
    'F.cross_entropy({o}[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())',
    'F.cross_entropy({o}.flatten(0, 1), F.one_hot(batch["labels"], 16).double().flatten(0, 1))',
    'F.cross_entropy({o}.flatten(0, 1), batch["labels"].flatten(), reduction="none").mean()',
    'F.cross_entropy({o}.flatten(0, 1), batch["labels"].flatten(), weight=torch.arange(1.0, 17).double())',
    f'(F.cross_entropy({{o}}.transpose(1, 2), batch["labels"], reduction="none") * {_MASK}).sum() / {_MASK}.sum()',
)


def _loss(draw: Draw[Any], scope: Scope, outs: Sequence[str]) -> tuple[str, str]:
    """Draw what the model returns, and the text of the loss."""
    form = draw(st.sampled_from(("tuple", "dict"))) if len(outs) > 1 else "one"
    result = {
        "one": outs[0],
        "tuple": ", ".join(outs),
        "dict": "{" + ", ".join(f'"o{i}": {o}' for i, o in enumerate(outs)) + "}",
    }[form]
    terms = []
    for i, out in enumerate(outs):
        name = {"one": "out", "tuple": f"out[{i}]", "dict": f'out["o{i}"]'}[form]
        logits = [tuple(t.shape) for t in scope.on_both(out)] == [(*size, VOCAB) for size in (CAPTURED, RUN)]
        term = draw(st.sampled_from(_ENTROPIES if logits and i == 0 else _TERMS)).replace("{o}", name)
        terms.append(term if i == 0 else f"{draw(st.sampled_from((1.0, 0.3)))} * {term}")
    lines = [f"loss = {terms[0]}", *(f"loss = loss + {t}" for t in terms[1:]), "return loss"]
    return result, "def loss_fn(out, batch):\n" + textwrap.indent("\n".join(lines), "    ") + "\n"


def draw_program(
    draw: Draw[Any], most: int, with_layers: bool, names: Sequence[str] = tuple(ALL_OPERATIONS)
) -> FuzzProgram | None:
    """Draw a program of at most `most` statements beside its layers. None if nothing comes of it that can learn."""
    batches = [batch_of(size) for size in (CAPTURED, RUN)]
    chosen = draw(
        st.sampled_from((("x",), ("ids",), ("ids", "x"), ("x", "mask"), ("ids", "mask"), ("x", "ids", "mask", "u")))
    )
    scope = Scope(draw, {n: [b[n] for b in batches] for n in chosen})
    if "ids" in chosen:
        scope.add(
            [f"h = self.embed(ids){' + x' if 'x' in chosen else ''}"],
            [f"self.embed = nn.Embedding({VOCAB}, {WIDTH})"],
            ["h"],
        )
    else:
        scope.add(["h = x * self.scale"], [f"self.scale = nn.Parameter(torch.randn({WIDTH}))"], ["h"])
    for _ in range(draw(st.integers(1, most))):
        _statement(scope, names)
    layer = ""
    if with_layers and draw(st.booleans()):
        like = [n for n in _floats(scope) if scope.on_both(n)[0].dim() > 1]
        if like:
            layer, _ = _layers(draw, scope, like[0], names)
            for _ in range(draw(st.integers(0, 3))):
                _statement(scope, names)
    if "ids" in chosen and with_layers and draw(st.booleans()):
        wide = [n for n in _floats(scope) if scope.on_both(n)[1].shape == (*RUN, WIDTH)]
        if wide:
            tied = ["self.head.weight = self.embed.weight"] if draw(st.booleans()) else []
            head = f"self.head = nn.Linear({WIDTH}, {VOCAB}, bias=False)"
            scope.add([f"logits = self.head({wide[0]})"], [head, *tied], ["logits"])
    outs = _outputs(draw, scope)
    result, loss = _loss(draw, scope, outs)
    text = HEAD + "".join(f"{part}\n\n" for part in (layer, scope.text("Model", result)) if part) + loss
    program = FuzzProgram(text, tuple(dict.fromkeys((*chosen, "mask", "u", "labels"))) if "batch[" in loss else chosen)
    return program


def _outputs(draw: Draw[Any], scope: Scope) -> list[str]:
    """Draw which values the model returns: the last one, and perhaps others."""
    floats = _floats(scope)
    num = draw(st.integers(1, min(3, len(floats))))
    outs = [floats[0], *(draw(st.sampled_from(floats)) for _ in range(num - 1))]
    return list(dict.fromkeys(outs))


@st.composite
def programs(
    draw: Draw[Any], most: int = 6, with_layers: bool = True, names: Sequence[str] = tuple(ALL_OPERATIONS)
) -> FuzzProgram | None:
    """Draw programs; see `draw_program`."""
    return draw_program(draw, most, with_layers, names)
