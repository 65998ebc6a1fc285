"""A number that a forward or a loss function reads may not change under a program that has its old value."""

from __future__ import annotations

import functools
import gc
import sys
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import autoplan
from autoplan.runtime.given_numbers import GivenNumbers

WEIGHT = 0.5


@dataclass
class Config:
    scale: float = 2.0
    cached: bool = False
    unread: float = 1.0


class Inner(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, self.rates, self.seen, self.name = config, [0.1, 0.2], 0, "inner"
        self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.1)
        self.unread = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        if self.config.cached:
            return x
        return self.dropout(self.linear(x)) * self.config.scale * sum(self.rates) * len(self.name)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.temperature = Inner(Config()), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) / self.temperature

    def loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        return output.mean() * self.weight


def other(x: torch.Tensor) -> torch.Tensor:
    return x * WEIGHT


def of_global(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return other(output).mean()


def of_closure(weight: float) -> tuple[Any, Any]:
    def anneal(to: float) -> None:
        nonlocal weight
        weight = to

    return lambda output, batch: (output * weight).mean(), anneal


class Loss:
    def __init__(self) -> None:
        self.beta, self.calls = 1.0, 0

    def __call__(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        self.calls += 1
        return (output * self.beta).mean()

    def named(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        return output.mean() * self.beta


loss = 0.0  # a global that has the name of an attribute


def counted(output: Any, batch: Any) -> torch.Tensor:
    global CALLS
    CALLS += 1
    return output.loss


CALLS = 0


class Annealed(nn.Module):
    """Its number is changed by a method, read behind a property in a decorated forward that a base class begins."""

    def __init__(self) -> None:
        super().__init__()
        self._tau, self.epoch, self.widest, self.form = 1.0, 0, 0, {"rate": 0.1, "kind": "x"}
        self.plain = types.SimpleNamespace(scale=1.0)

    @property
    def tau(self) -> float:
        return self._tau

    def anneal(self, to: float) -> None:
        self._tau = to

    def report(self) -> str:
        return f"epoch {self.epoch}"

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        setattr(self, "widest", max(self.widest, x.shape[-1]))  # noqa: B010
        return self.scaled(x) / self.tau

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.plain.scale * self.form["rate"]


class Derived(Annealed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Slots:
    __slots__ = ("weight",)

    def __init__(self) -> None:
        self.weight = 1.0

    def loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        return output.mean() * self.weight


class Loose(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        return self.get(name, Loose())


class Odd(nn.Module):
    config = Loose()

    def __init__(self) -> None:
        super().__init__()
        self.more = Loose(a=1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.config.a * self.more.a


class Deep(nn.Module):
    """Its numbers are in objects of objects, one of which has itself inside."""

    def __init__(self) -> None:
        super().__init__()
        rope = types.SimpleNamespace(scale=1.0, unread=1.0, steps=0)
        self.config = types.SimpleNamespace(rope=rope, by_kind={"full": Config()}, rates=[0.1], cached=False)
        self.config.rope.config = self.config
        self.table = {"rope": {"scale": 1.0}, "rate": 0.5}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        config = self.config
        rope = config.rope.config.rope
        x = x * rope.scale * config.by_kind["full"].scale * config.rates[0] * rope.steps
        return x * self.table["rope"]["scale"] * self.table["rate"]


DEEP: dict[str, Callable[[Any], Any]] = {
    "config.rope.scale": lambda m: setattr(m.config.rope, "scale", 2.0),
    "config.by_kind['full'].scale": lambda m: setattr(m.config.by_kind["full"], "scale", 3.0),
    "config.rates[0]": lambda m: m.config.rates.__setitem__(0, 0.2),
    "table['rope']['scale']": lambda m: m.table["rope"].update(scale=2.0),
    "table": lambda m: m.table.update(rate=0.25),
}

CHANGES = {
    "temperature": lambda m: setattr(m, "temperature", 2.0),
    "inner.rates": lambda m: m.inner.rates.append(0.3),
    "inner.config.scale": lambda m: setattr(m.inner.config, "scale", 3.0),
    "inner.dropout.p": lambda m: setattr(m.inner.dropout, "p", 0.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_numbers_of_modules(name: str) -> None:
    model = Model()
    numbers = GivenNumbers(model, None)
    assert numbers.changed() is None
    CHANGES[name](model)
    told = numbers.changed()
    assert told is not None and name in told and "give what changes as an input" in told


ANNEALED = {
    "_tau": lambda m: m.anneal(0.5),
    "form": lambda m: m.form.update(rate=0.2),
    "plain.scale": lambda m: setattr(m.plain, "scale", 2.0),
}


@pytest.mark.parametrize("kind", [Annealed, Derived])
@pytest.mark.parametrize("name", ANNEALED)
def test_numbers_behind_methods_and_properties(name: str, kind: type[Annealed]) -> None:
    model = kind()
    numbers = GivenNumbers(model, None)
    model(torch.ones(2))  # it keeps a number itself
    model.epoch, model.form["kind"] = 3, "y"
    assert numbers.changed() is None
    ANNEALED[name](model)
    assert f"{kind.__name__}.{name} was" in (numbers.changed() or "")


@pytest.mark.parametrize("name", DEEP)
def test_numbers_in_objects_of_objects(name: str) -> None:
    model = Deep()
    numbers = GivenNumbers(model, None)
    model.config.rope.unread, model.config.rope.steps, model.config.cached = 2.0, 3, True
    model.config.by_kind["other"] = Config(4.0)
    assert numbers.changed() is None
    DEEP[name](model)
    assert (numbers.changed() or "").startswith(f"Deep.{name} was ")


class Weighted:
    def __init__(self) -> None:
        self.loss, self.module = types.SimpleNamespace(weight=1.0), nn.Linear(2, 2)

    def function(self) -> Any:
        return lambda output, batch: output.mean() * self.loss.weight


SETTINGS = types.SimpleNamespace(loss=types.SimpleNamespace(weight=1.0), seen=0.0)


def of_settings(output: torch.Tensor, batch: Any) -> torch.Tensor:
    SETTINGS.seen += 1.0
    return output.mean() * SETTINGS.loss.weight


def test_numbers_in_objects_of_loss_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A closure and a global; the object may hold a module, and is not kept alive."""
    weighted = Weighted()
    closed, alive = GivenNumbers(Model(), weighted.function()), weakref.ref(weighted)
    weighted.loss.weight = 0.5
    assert (closed.changed() or "").startswith("self.loss.weight, which loss_fn reads, was 1.0 when")
    del weighted
    gc.collect()
    assert alive() is None and closed.changed() is None
    numbers = GivenNumbers(Model(), of_settings)
    of_settings(torch.ones(2), None)
    assert numbers.changed() is None
    monkeypatch.setattr(SETTINGS.loss, "weight", 0.5)
    assert (numbers.changed() or "").startswith("SETTINGS.loss.weight, which loss_fn reads, was 1.0 when")


def test_what_has_no_attributes_to_look_at_is_passed_over() -> None:
    numbers = GivenNumbers(Odd(), Slots().loss)
    assert numbers.changed() is None
    for function in (torch.mean, torch.nn.functional.cross_entropy):
        assert GivenNumbers(nn.Linear(2, 2), function).changed() is None


def test_a_rope_that_follows_the_length_is_no_change() -> None:
    """`setattr(self, f"{prefix}max_seq_len_cached", n)`, in another file."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    small = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = LlamaConfig(vocab_size=64, num_hidden_layers=1, max_position_embeddings=16, rope_parameters=rope, **small)
    model = LlamaForCausalLM(config)
    numbers = GivenNumbers(model, None)
    model(torch.zeros(1, 40, dtype=torch.long))
    assert numbers.changed() is None
    model.config.attention_dropout = 0.5
    assert "config.attention_dropout" in (numbers.changed() or "")


def of_local_class() -> tuple[GivenNumbers, Any]:
    large = nn.Linear(8, 8)

    class Local(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return large(x)

    return GivenNumbers(Local(), lambda output, batch: large(output).mean()), weakref.ref(large)


def test_no_class_is_kept_alive() -> None:
    numbers, alive = of_local_class()
    gc.collect()
    assert alive() is None and numbers.changed() is None


def test_values_that_are_looked_at_together() -> None:
    """Another object of the same value is none; a tensor of the same value, None and nothing at all are told apart."""
    model = Model()
    numbers = GivenNumbers(model, None)
    drop = model.inner.dropout
    drop.p = float("0.1")
    assert numbers.changed() is None
    drop.p = torch.tensor(0.1)
    assert "inner.dropout.p was 0.1" in (numbers.changed() or "") and "no number" in (numbers.changed() or "")
    drop.p, drop.inplace = 0.1, None
    assert "inner.dropout.inplace was False" in (numbers.changed() or "")
    del drop.inplace
    model.inner.name = "outer"
    assert "inner.name was 'inner'" in (numbers.changed() or "")
    model.inner.name = "inner"
    assert numbers.changed() is None  # of what is gone nothing is known


def test_what_is_no_number_of_the_forward_may_change() -> None:
    """A counter of its own, what no method reads, modes, training, the whole model."""
    model = Model()
    numbers = GivenNumbers(model, None)
    model.inner.seen, model.inner.unread, model.inner.config.unread = 7, 7.0, 7.0
    model.inner.config.cached = True
    model.eval()
    model.new = 3
    assert numbers.changed() is None
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None and numbers.changed() is None


def test_numbers_of_loss_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = GivenNumbers(Model(), of_global)
    assert numbers.changed() is None
    monkeypatch.setitem(globals(), "WEIGHT", 0.25)
    told = numbers.changed()
    assert told is not None and told.startswith("WEIGHT, which loss_fn reads, was 0.5 when") and "is 0.25 now" in told

    monkeypatch.setattr(sys.modules[__name__], "loss", 3.0)
    numbers = GivenNumbers(Model(), counted)
    monkeypatch.setattr(sys.modules[__name__], "loss", 2.0)
    counted(types.SimpleNamespace(loss=torch.ones(())), None)
    assert numbers.changed() is None

    closed, anneal = of_closure(1.0)
    numbers = GivenNumbers(Model(), functools.partial(closed))
    anneal(1)  # the same number
    assert numbers.changed() is None
    anneal(0.5)
    assert "weight, which loss_fn reads" in (numbers.changed() or "")

    for make in (lambda held: held, lambda held: held.named):
        held = Loss()
        numbers = GivenNumbers(Model(), make(held))
        held(torch.ones(2), None)
        assert numbers.changed() is None
        held.beta = float("nan")
        assert "beta was 1.0" in (numbers.changed() or "")
    numbers = GivenNumbers(Model(), held)
    assert numbers.changed() is None  # nan still


def test_a_method_of_the_model_may_be_the_loss_function() -> None:
    """It reads other attributes than the forward."""
    model = Model()
    model.weight = 1.0
    numbers = GivenNumbers(model, model.loss)
    model.weight = 0.5
    assert "weight was 1.0" in (numbers.changed() or "")


class Tensors(nn.Module):
    """Reads a buffer, one that is not persistent, an attribute, an entry; has a norm and a table of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("kept", torch.ones(()))
        self.register_buffer("passing", torch.ones(4), persistent=False)
        self.register_buffer("table", torch.ones(4), persistent=False)
        self.plain, self.entries, self.unread = torch.ones(()), {"a": torch.ones(())}, torch.ones(())

    def forward(self, x: torch.Tensor, grow: bool = False) -> torch.Tensor:
        if grow:
            self.register_buffer("table", torch.ones(8), persistent=False)
        return self.norm(self.linear(x)) * self.kept * self.passing * self.table[:4] * self.plain * self.entries["a"]


MOVED: dict[str, Callable[[Tensors], Any]] = {
    "kept": lambda m: m.kept.fill_(0.5),
    "passing": lambda m: m.passing[2:].mul_(2),
    "plain": lambda m: setattr(m, "plain", torch.tensor(0.5)),
    "plain ": lambda m: setattr(m, "plain", 0.5),
    "entries['a']": lambda m: m.entries.update(a=torch.tensor(0.5)),
}


@pytest.mark.parametrize("name", MOVED)
def test_tensors_of_modules(name: str) -> None:
    model = Tensors()
    numbers = GivenNumbers(model, None)
    model.kept = torch.ones(())  # the same value
    model(torch.ones(2, 4), grow=True)  # it changes its statistics and makes a table
    model.unread.fill_(2.0)
    assert numbers.changed() is None
    MOVED[name](model)
    told = numbers.changed() or ""
    assert told.startswith(f"Tensors.{name.strip()} was changed after the program was made")


def test_tensors_that_are_cast_or_deleted_or_of_a_load() -> None:
    model = Tensors()
    numbers = GivenNumbers(model, None)
    model.half()
    assert numbers.changed() is None
    model.float()
    model.load_state_dict({**model.state_dict(), "kept": torch.tensor(3.0)})
    assert "Tensors.kept" in (numbers.changed() or "")
    numbers.loaded({})  # something else
    assert "Tensors.kept" in (numbers.changed() or "")
    numbers.loaded({"kept": torch.tensor(4.0)})
    assert numbers.changed() is None  # the program was given what counts
    model.kept.fill_(4.0)
    assert numbers.changed() is None  # the module has it, too
    model.kept = torch.tensor(3.0)
    assert numbers.changed() is None  # as in the load
    model.kept.fill_(5.0)
    assert "Tensors.kept" in (numbers.changed() or "")
    model.kept.fill_(4.0)
    model.passing.zero_()
    assert "Tensors.passing" in (numbers.changed() or "")
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None and numbers.changed() is None


def weighed(output: torch.Tensor, batch: Any, weight: torch.Tensor) -> torch.Tensor:
    return (output * weight).mean()


class Weighing(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        return (output * self.weight).mean()


@pytest.mark.parametrize(
    "make",
    [
        lambda weight: lambda output, batch: (output * weight).mean(),
        lambda weight: functools.partial(weighed, weight=weight),
        Weighing,
    ],
)
def test_tensors_of_loss_functions(make: Callable[[torch.Tensor], Any]) -> None:
    weight = torch.ones(4)
    numbers = GivenNumbers(Model(), loss := make(weight))
    assert numbers.changed() is None and callable(loss)
    weight[2] = 0.5
    assert "weight" in (numbers.changed() or "") and "was changed" in (numbers.changed() or "")
    weight[2] = 1.0
    assert numbers.changed() is None


def test_a_buffer_of_the_loss_function_is_not_in_the_state_of_the_program() -> None:
    """A load does not give it to the program, whatever the buffers of the model are called."""
    loss = Weighing(torch.ones(4))
    numbers = GivenNumbers(Model(), loss)
    loss.weight.fill_(2.0)
    numbers.loaded({"weight": torch.full((4,), 2.0)})
    assert "loss_fn.weight was changed" in (numbers.changed() or "")


@pytest.mark.parametrize("how", ["state", "checkpoint"])
def test_a_buffer_that_is_changed_after_a_load(how: str, tmp_path: Path, one_process: None) -> None:
    """Of the module that was given in: its state does not change the program's, and a step refuses it."""
    batch, model = {"x": torch.ones(4, 4)}, Tensors().eval()
    pm = autoplan.parallelize(model, example_inputs=batch, loss_fn=lambda output, _: output.mean(), global_batch_size=4)
    state = pm.state_dict() | {"kept": torch.tensor(3.0)}
    pm.load_state_dict(state)
    if how == "checkpoint":
        pm.save_checkpoint(tmp_path)
        pm.load_state_dict({"kept": torch.ones(())}, strict=False)
        assert pm.load_checkpoint(tmp_path) is not None
    loss = pm.step(batch).item()
    model.load_state_dict(state)
    assert pm.step(batch).item() == loss
    model.kept.fill_(5.0)
    model.norm.running_mean.fill_(5.0)
    assert pm.state_dict()["kept"] == 3.0 and not pm.state_dict()["norm.running_mean"].any()
    with pytest.raises(ValueError, match=r"^Tensors\.kept was changed after the program was made or loaded"):
        pm.step(batch)


def test_the_state_of_a_program_is_not_that_of_the_module(one_process: None) -> None:
    batch, model = {"x": torch.ones(4, 4)}, Tensors().eval()
    pm = autoplan.parallelize(model, example_inputs=batch, loss_fn=lambda output, _: output.mean(), global_batch_size=4)
    model.kept.fill_(5.0)
    model.norm.running_mean.fill_(5.0)  # as when somebody trains the module beside the program
    assert pm.state_dict()["kept"] == 1.0 and not pm.state_dict()["norm.running_mean"].any()


def test_a_step_refuses_a_tensor_that_the_program_does_not_have(one_process: None) -> None:
    batch, weight = {"x": torch.ones(4, 4)}, torch.ones(())
    model = Tensors().eval()
    pm = autoplan.parallelize(
        model, example_inputs=batch, loss_fn=lambda output, _: (output * weight).mean(), global_batch_size=4
    )
    first = pm.step(batch).item()
    weight.fill_(2.0)
    for call in (pm.step, pm.eval_step):
        with pytest.raises(ValueError, match=r"weight, which loss_fn reads, was changed after"):
            call(batch)
    weight.fill_(1.0)
    model.kept.fill_(2.0)
    with pytest.raises(ValueError, match=r"Tensors.kept was changed after"):
        pm.step(batch)
    pm.load_state_dict({"kept": model.kept}, strict=False)  # model.state_dict() would bring its old parameters, too
    assert pm.step(batch).item() == pytest.approx(2 * first)


def test_a_step_refuses_what_the_program_does_not_have(one_process: None) -> None:
    batch = {"x": torch.ones(4, 4)}
    model, (loss, anneal) = Model(), of_closure(1.0)
    pm = autoplan.parallelize(model, example_inputs=batch, loss_fn=loss, global_batch_size=4)
    first = pm.step(batch)
    anneal(0.5)
    for call in (pm.step, pm.eval_step):
        with pytest.raises(ValueError, match=r"weight, which loss_fn reads, was 1.0 .* is 0.5 now"):
            call(batch)
    anneal(1.0)
    model.temperature = 4.0
    with pytest.raises(ValueError, match=r"Model.temperature was 1.0"):
        pm.step(batch)
    model.temperature = 1.0
    assert pm.step(batch).shape == first.shape
    del model
    assert torch.isfinite(pm.step(batch))
