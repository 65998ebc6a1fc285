"""An ordinary training loop: evaluation, accumulation, parameter groups, and the trained module back."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import loop_jobs
import models
import pytest
import torch
from harness import pool
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.swa_utils import AveragedModel
from transformers.trainer_pt_utils import LabelSmoother

import autoplan
from autoplan.runtime.batch import Batches
from autoplan.runtime.given_module import GivenModule
from autoplan.runtime.outputs import why_no_outputs
from autoplan.runtime.param_groups import grouped_parameters, settings_of

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed._functional_collectives.*:FutureWarning")

EVALUATED: list[tuple[str, dict[str, Any], list[int]]] = [
    ("gpt", {"tp": 2, "num_micro_batches": 4}, [5]),
    ("gpt", {"pp": 2, "num_micro_batches": 2}, [5]),
    ("gpt", {"dp": 2, "zero_stage": 3, "num_micro_batches": 2}, [3, 6]),
    ("llama", {"dp": 2, "zero_stage": 1}, [1, 7]),
    ("llama", {"cp": 2}, [3]),
    ("mixtral", {"dp": 2, "ep": 2}, [2, 5]),
    ("llama", {"pp": 2, "schedule": "Interleaved1F1B", "virtual_stages": 2, "num_micro_batches": 4}, [7]),
    ("llama", {"pp": 2, "schedule": "ZBV", "virtual_stages": 2, "num_micro_batches": 4}, [3]),
]


@pytest.mark.processes
@pytest.mark.parametrize(("family", "pins", "sizes"), EVALUATED, ids=str)
def test_an_evaluation_is_that_of_the_module(family: str, pins: dict[str, Any], sizes: list[int]) -> None:
    """Loss and logits: without dropout, on any number of samples, which data ranks share unequally."""
    for rank, (errors, shapes) in enumerate(pool(2).run(loop_jobs.evaluate, family, pins, sizes)):
        loss, own, every, guesses, again = errors
        assert loss < (2e-7 if family != "gpt" else 1e-12)  # Hugging Face computes losses in float32
        assert own < 1e-12 and every < 1e-12 and guesses == again == 0
        rows = sizes[rank if len(sizes) > 1 else 0]
        assert shapes == [(n, loop_jobs.SEQ, 96) for n in (rows, sum(sizes))] + [(sum(sizes), loop_jobs.SEQ)]


@pytest.mark.processes
@pytest.mark.parametrize(
    "pins", [{"dp": 2, "zero_stage": 1}, {"dp": 2, "zero_stage": 3}, {"pp": 2, "num_micro_batches": 2}], ids=str
)
def test_an_evaluation_changes_nothing(pins: dict[str, Any]) -> None:
    """Neither the next dropout masks nor gathered parameters, which an update would make stale."""
    asked, alone = (pool(2).run(loop_jobs.between_steps, "gpt", pins, ask) for ask in (True, False))
    assert asked == alone and asked[0][-1] != asked[0][0]


@pytest.mark.processes
@pytest.mark.parametrize(
    "pins", [{"dp": 2, "zero_stage": 2, "num_micro_batches": 2}, {"pp": 2, "num_micro_batches": 2}, {"tp": 2}], ids=str
)
def test_batches_of_one_step_are_one_batch(pins: dict[str, Any]) -> None:
    for loss, gradient in pool(2).run(loop_jobs.accumulate, "llama", pins):
        assert loss < 1e-6 and gradient < 1e-5  # Hugging Face computes losses in float32


@pytest.mark.processes
@pytest.mark.parametrize("pins", [{"dp": 2}, {"dp": 2, "zero_stage": 3, "num_micro_batches": 2}], ids=str)
def test_data_ranks_may_have_different_numbers_of_samples(pins: dict[str, Any]) -> None:
    """Losses, dropout masks and the samples that were seen are those of one data rank with all of them."""
    (wanted, seen), _ = pool(2).run(loop_jobs.unequal, {"tp": 2, "num_micro_batches": 2}, [8])
    assert seen == 32
    for losses, samples in pool(2).run(loop_jobs.unequal, pins, [2, 6]):
        assert losses == pytest.approx(wanted, rel=1e-12) and samples == seen


@pytest.mark.usefixtures("one_process")
def test_gradients_that_nobody_uses_are_named_once() -> None:
    """A loop that accumulates as PyTorch does would train on its last batch alone."""
    _, pm = loop_jobs.program("gpt", {}, optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    batch = loop_jobs.batch_of("gpt", 4)
    assert pm.optimizer is not None
    uses: list[Callable[[], Any]] = [pm.optimizer.step, pm.grad_norm, pm.gradients, pm.zero_grad]
    for use in uses:  # none of these steps is warned of
        pm.step(batch)
        use()
    pm.step(batch)
    with pytest.warns(UserWarning, match=r"a second step without an update.*pm\.step\(\[batch, batch\]\)") as seen:
        pm.step(batch)
    assert seen[0].filename == __file__
    pm.step(batch)  # once


@pytest.mark.usefixtures("one_process")
def test_a_checkpoint_before_the_update_is_warned_of(tmp_path: Path) -> None:
    """It counts a step that nobody makes. Neither after an update, nor where the gradients were dropped on purpose."""
    _, pm = loop_jobs.program("gpt", {}, optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    batch = loop_jobs.batch_of("gpt", 4)
    assert pm.optimizer is not None
    for end in (pm.optimizer.step, pm.zero_grad, pm.optimizer.zero_grad):
        pm.step(batch)
        pm.grad_norm()
        end()
        pm.save_checkpoint(tmp_path)
    pm.step(batch)
    pm.clip_grad_norm_(1.0)
    with pytest.warns(UserWarning, match=r"between step and optimizer\.step\(\): it counts step 4 and") as seen:
        pm.save_checkpoint(tmp_path)
    assert seen[0].filename == __file__
    pm.save_checkpoint(tmp_path / "own", optimizer=torch.optim.SGD(pm.parameters(), lr=0.1))


@pytest.mark.usefixtures("one_process")
def test_a_load_drops_the_gradients_before_it(tmp_path: Path) -> None:
    """A training that goes back in the middle of a step: no old gradient is applied, and no new step warns of it."""
    _, pm = loop_jobs.program("gpt", {}, optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    pm.save_checkpoint(tmp_path)
    batch, before = loop_jobs.batch_of("gpt", 4), pm.state_dict()
    assert pm.optimizer is not None
    pm.step(batch)
    pm.load_checkpoint(tmp_path)
    pm.optimizer.step()
    assert all(torch.equal(t, before[name]) for name, t in pm.state_dict().items())
    pm.step(batch)
    pm.load_checkpoint(tmp_path)
    pm.step(batch)


@pytest.mark.usefixtures("one_process")
def test_a_process_alone_goes_on_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook: the group stays, nothing of the failed step counts, and no gradient is missed."""
    pins = {"num_micro_batches": 4}
    (_, pm), (_, other) = (
        loop_jobs.program("gpt", pins, optimizer=functools.partial(torch.optim.SGD, lr=0.1)) for _ in range(2)
    )
    batch = loop_jobs.batch_of("gpt", 4)
    wrong = {**batch, "ids": batch["ids"].clone()}
    wrong["ids"][2] = 1000  # in the third micro-batch: the first two had their backward
    monkeypatch.setattr(Batches, "_indices", lambda self, batch: None)  # which sees it before the step
    for call in (pm.step, pm.eval_step):
        with pytest.raises(autoplan.RankFailure, match="index out of range"):
            call(wrong)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "a second step without an update")
        found, wanted = ((p.step(batch).item(), p.clip_grad_norm_(1.0).item()) for p in (pm, other))
    assert found == wanted and pm.progress == other.progress


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("of", ["the module", "the program", "another module", "the module, by hand"])
def test_an_optimizer_of_the_module_does_not_train_the_program(of: str) -> None:
    """As in a loop of PyTorch that was not changed: its updates would do nothing, without a word."""
    model, pm = loop_jobs.program("gpt", {})
    given = {"the program": pm, "another module": copy.deepcopy(model)}.get(of, model)
    optimizer = torch.optim.SGD(given.parameters(), lr=0.1)
    batch = loop_jobs.batch_of("gpt", 4)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            pm.step(batch)
            for p in model.parameters() if of == "the module, by hand" else ():
                p.grad = torch.zeros_like(p)
            optimizer.step()
    said = [w for w in found if "its steps do nothing" in str(w.message)]
    assert len(said) == (of == "the module")
    assert all("this SGD has the parameters of the" in str(w.message) and w.filename == __file__ for w in said)


@pytest.mark.usefixtures("one_process")
def test_a_program_is_neither_copied_nor_pickled() -> None:
    """The hooks of its optimizer would be the original's."""
    _, pm = loop_jobs.program("gpt", {}, optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    for way in (copy.copy, copy.deepcopy, pickle.dumps, AveragedModel):
        with pytest.raises(TypeError, match=r"cannot be copied or pickled.*pm\.to_module\(None\)"):
            way(pm)
    for name, instead in {
        "module": r"pm\.to_module\(\)",
        "to": "device= .*precision=",
        "no_sync": r"step\(\[batch",
    }.items():
        with pytest.raises(AttributeError, match=f"'ParallelModel' has no attribute '{name}': .*{instead}"):
            getattr(pm, name)
    with pytest.raises(AttributeError, match=r"has no attribute 'modul'$"):
        _ = pm.modul  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"is not called: pm\.step\(batch\) does forward and backward"):
        pm(torch.zeros(1))


@pytest.mark.processes
@pytest.mark.parametrize("pins", [{"tp": 2}, {"dp": 2, "zero_stage": 3}], ids=str)
def test_a_parameter_is_in_one_group(pins: dict[str, Any]) -> None:
    """Torch takes a part and the tensor of `pm.parameters()` for two, and would update it twice."""
    for texts, still in pool(2).run(loop_jobs.regrouped, pins):
        found = ["1 of 1 parameters are not those in pm.optimizer.param_groups" in text for text in texts]
        assert found == [True, True]
        assert still == ["lm_head.weight"]


@pytest.mark.usefixtures("one_process")
def test_tensors_without_values_in_memory_are_named() -> None:
    _, pm = loop_jobs.program("gpt", {})
    batch = loop_jobs.batch_of("gpt", 4)
    pm.step(batch)  # of the same shapes
    kinds: list[tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = [
        ("ids is on the meta device", lambda x: x.to("meta")),
        (r"ids is a tensor of torch\.sparse_coo; give to_dense\(\)", torch.Tensor.to_sparse),
        ("ids is a nested tensor; pad it", lambda x: torch.nested.as_nested_tensor([x[0], x[1]], layout=torch.jagged)),
    ]
    for text, kind in kinds:
        for call in (pm.step, pm.eval_step):
            with pytest.raises(ValueError, match=text):
                call({n: kind(x) for n, x in batch.items()})
    with torch.inference_mode():
        made = {n: x.clone() for n, x in batch.items()}
    with pytest.raises(ValueError, match=r"ids was made in torch\.inference_mode\(\).*clone\(\)"):
        pm.step(made)
    assert pm.eval_step(made) == pm.eval_step(batch)


@pytest.mark.processes
def test_a_checkpoint_is_saved_and_loaded_in_inference_mode(tmp_path: Path) -> None:
    """As a function that evaluates and keeps the best does; the moments can be updated outside of it."""
    for found, wanted in pool(2).run(loop_jobs.saved_in_inference_mode, str(tmp_path)):
        assert found == wanted


@pytest.mark.processes
def test_an_optimizer_of_whole_tensors_trains_where_none_is_split() -> None:
    """Under data parallelism alone every rank has whole gradients."""
    for error, moved in pool(2).run(loop_jobs.whole_tensors, {"dp": 2, "zero_stage": 0}):
        assert error < 1e-6 and moved > 1e-3  # Hugging Face computes losses in float32


@pytest.mark.processes
@pytest.mark.parametrize("pins", [{"zero_stage": 0}, {"zero_stage": 3}, {"offload": "optimizer"}], ids=str)
def test_the_optimizer_drops_gradients_that_are_sharded(pins: dict[str, Any]) -> None:
    for dropped, zeroed in pool(2).run(loop_jobs.dropped_by_the_optimizer, {"dp": 2, **pins}):
        assert dropped == zeroed == 0.0


@pytest.mark.usefixtures("one_process")
def test_parameters_and_groups_are_in_the_order_of_the_model() -> None:
    """Not in that of their use: for `zip` with the module's, states of its optimizer, a scheduler's list of rates."""

    class Backwards(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.third, self.second, self.first = (torch.nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.third(self.second(self.first(x).tanh()).tanh())
            return out

    model = Backwards()
    batch = {"x": torch.randn(4, 4)}
    pm = autoplan.parallelize(
        model, "local", example_inputs=batch, loss_fn=lambda out, batch: out.square().mean(), verify=False,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1), global_batch_size=4,
        param_groups=lambda name, shape: {"lr": {"first": 1.0, "second": 2.0, "third": 3.0}[name.split(".")[0]]},
    )  # fmt: skip
    for (name, mine), (wanted, given) in zip(pm.named_parameters(), model.named_parameters(), strict=True):
        assert name == wanted and torch.equal(mine, given)
    assert pm.optimizer is not None
    assert [group["lr"] for group in pm.optimizer.param_groups] == [3.0, 2.0, 1.0]


@pytest.mark.usefixtures("one_process")
def test_a_step_under_autocast_is_refused() -> None:
    """It would compute in 16 bits what the plan computes in another dtype, and send it so between stages."""
    _, pm = loop_jobs.program("gpt", {})
    batch = loop_jobs.batch_of("gpt", 4)
    for call in (pm.step, pm.eval_step, pm.eval_outputs):
        with torch.autocast("cpu"), pytest.raises(ValueError, match=r"region is active.*precision='bf16-autocast'"):
            call(batch)
        with torch.autocast("cpu", enabled=False):
            call(batch)


@pytest.mark.usefixtures("one_process")
def test_a_parameter_that_is_frozen_later_is_named() -> None:
    """In the module that was given, which the program does not look at any more."""
    model, pm = loop_jobs.program("gpt", {})
    batch, weight = loop_jobs.batch_of("gpt", 4), model.get_parameter("norm.weight")
    weight.requires_grad_(False)
    for call in (pm.step, pm.eval_step):
        with pytest.raises(ValueError, match=r"norm\.weight was trained when the program was made"):
            call(batch)
    weight.requires_grad_(True)
    pm.step(batch)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("trained", [True, False])
def test_a_parameter_of_the_program_stays_trained_or_frozen(trained: bool) -> None:
    """No collective would sum the gradient of one that is trained later: every data-parallel rank had its own."""
    _, pm = loop_jobs.program("gpt", {}, frozen=() if trained else ("norm.weight",))
    batch, weight = loop_jobs.batch_of("gpt", 4), dict(pm.named_parameters())["norm.weight"]
    pm.step(batch)
    weight.requires_grad_(not trained)
    with pytest.raises(ValueError, match=rf"norm\.weight was {'trained' if trained else 'frozen'} when the program"):
        pm.step(batch)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("late", "message"),
    [
        (
            lambda m: m.load_state_dict(dict(m.named_parameters()), strict=False),
            r"^tok\.weight was written to after .* pm\.load_state_dict$",
        ),
        (lambda m: m.blocks[1].register_forward_hook(lambda *_: None), r"^a hook was registered on blocks\.1 after"),
        (lambda m: m.norm.weight.register_hook(lambda g: g), r"^a hook was registered on norm\.weight after"),
    ],
)
def test_what_comes_too_late_for_a_program_is_named_once(late: Callable[[Any], Any], message: str) -> None:
    """Weights that are loaded into the module, and its hooks; not what a load gives to the program itself."""
    (model, pm), (other, loaded) = (loop_jobs.program("gpt", {}) for _ in range(2))
    batch = loop_jobs.batch_of("gpt", 4)
    late(model)
    with pytest.warns(UserWarning, match=message) as seen:
        pm.step(batch)
    assert seen[0].filename == __file__
    late(model)
    pm.step(batch)  # once
    loaded.load_state_dict(other.state_dict())
    late(other)
    loaded.step(batch)


@pytest.mark.usefixtures("one_process")
def test_training_in_eval_mode_is_named_once() -> None:
    """A model of from_pretrained is in evaluation: `pm.train()` where `model.train()` stood has no dropout."""
    batch = loop_jobs.batch_of("gpt", 4)

    def program(model: torch.nn.Module) -> Any:
        return autoplan.parallelize(
            model, "local", example_inputs=batch, loss_fn=models.gpt_loss, global_batch_size=4, verify=False
        )

    pm = program(loop_jobs.make("gpt").eval())
    with pytest.warns(UserWarning, match=r"in eval mode .*drops nothing\): call model\.train\(\) before") as seen:
        pm.train()
    assert seen[0].filename == __file__
    for silent in (pm, program(models.make_gpt().double().eval()), program(loop_jobs.make("gpt"))):
        silent.eval()
        silent.train()


@pytest.mark.usefixtures("one_process")
def test_batches_are_not_added_up_where_the_loss_cannot_be() -> None:
    """Its denominator is of the whole batch, and no sum over parts of it."""

    def loss_fn(output: torch.Tensor, batch: Any) -> torch.Tensor:
        padding = batch["labels"].eq(0)
        return output.square().sum(-1).masked_fill(padding, 0.0).sum() / (2 * padding.numel() - padding.sum())

    batch = {"input": torch.ones(2, 3, 4), "labels": torch.ones(2, 3, dtype=torch.long)}
    model = torch.nn.Linear(4, 4)
    wanted = loss_fn(model(batch["input"]), batch).item()
    pm = autoplan.parallelize(model, "local", example_inputs=batch, loss_fn=loss_fn, global_batch_size=2)
    assert pm.step(batch).item() == pytest.approx(wanted)
    with pytest.raises(ValueError, match=r"rsub_scalar at .*, so a step takes one batch; it was given 2"):
        pm.step([batch, batch])


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("cast", [True, False], ids=["long", "bool"])
def test_a_loss_over_the_labels_that_are_not_padding_is_added_up(cast: bool) -> None:
    """Padding is counted, and the number of labels less that: as Trainer's LabelSmoother does, and without its cast."""
    smoother = LabelSmoother(epsilon=0.2)

    def loss_fn(output: torch.Tensor, batch: Any) -> torch.Tensor:
        if cast:
            loss: torch.Tensor = smoother({"logits": output}, batch["labels"], shift_labels=True)
            return loss
        padding = batch["labels"].eq(-100)
        return output.square().sum(-1).masked_fill(padding, 0.0).sum() / (padding.numel() - padding.sum())

    torch.manual_seed(0)
    batch = {"input": torch.randn(4, 3, 4), "labels": torch.randint(0, 5, (4, 3))}
    batch["labels"][0, 1:] = batch["labels"][2:, 2] = -100  # other numbers of labels in every part
    model = torch.nn.Linear(4, 5)
    loss = loss_fn(model(batch["input"]), batch)
    wanted = torch.autograd.grad(loss, list(model.parameters()))
    for micro_batches, given in ((2, batch), (1, [{n: x[i : i + 1] for n, x in batch.items()} for i in range(4)])):
        example = batch if micro_batches == 2 else given[0]
        pm = autoplan.parallelize(
            model, "local", example_inputs=example, loss_fn=loss_fn, global_batch_size=len(example["labels"]),
            pins={"num_micro_batches": micro_batches},
        )  # fmt: skip
        assert pm.step(given).item() == pytest.approx(loss.item())
        found = pm.gradients()
        for (name, _), gradient in zip(model.named_parameters(), wanted, strict=True):
            torch.testing.assert_close(found[name], gradient)


@pytest.mark.usefixtures("one_process")
def test_an_optimizer_is_one() -> None:
    with pytest.raises(ValueError, match=r"optimizer returned a list; return one torch\.optim\.Optimizer"):
        loop_jobs.program("gpt", {}, optimizer=lambda groups: [torch.optim.SGD(groups, lr=0.1)])


@pytest.mark.processes
@pytest.mark.parametrize(("pins", "by_pattern"), [({"dp": 2, "zero_stage": 2}, False), ({"pp": 2}, True)], ids=str)
def test_groups_are_those_of_one_process(pins: dict[str, Any], by_pattern: bool) -> None:
    """On every rank the same groups, in the same order, with their own learning rates and weight decay."""
    results = pool(2).run(loop_jobs.groups, pins, by_pattern)
    for error, mine, alone in results:
        assert error < 1e-6 and len(mine) == len(alone) == 2
    if "pp" in pins:  # stages share the parameters
        assert [sum(mine[k] for _, mine, _ in results) for k in range(2)] == results[0][2]


@pytest.mark.processes
def test_a_group_that_is_empty_on_a_rank_goes_on_with_its_learning_rate(tmp_path: Path) -> None:
    rates = [[0.01, 0.005, 0.02], [0.01, 0.005, 0.02], [0.005, 0.0025, 0.01]]
    for of_rank in pool(2).run(loop_jobs.groups_after_a_load, str(tmp_path)):
        assert of_rank == [pytest.approx(each) for each in rates]


def test_groups_by_patterns_and_functions() -> None:
    shapes = {"a.weight": (2, 3), "a.bias": (2,), "norm.weight": (2,)}
    found = settings_of({"*.bias": {"lr": 1.0}, "norm*": {"lr": 2.0}}, shapes)
    assert found == {"a.weight": {}, "a.bias": {"lr": 1.0}, "norm.weight": {"lr": 2.0}}
    assert grouped_parameters(["a.bias"], ["p"], found) == [
        {"params": []},
        {"params": ["p"], "lr": 1.0},
        {"params": [], "lr": 2.0},
    ]
    assert settings_of(lambda name, shape: {"lr": len(shape)}, shapes)["a.weight"] == {"lr": 2}
    with pytest.raises(ValueError, match=r"'\*\.bais' fits no trained parameter; the nearest name is 'a.bias'"):
        settings_of({"*.bais": {}}, shapes)
    with pytest.raises(ValueError, match="give a mapping"):
        settings_of(lambda name, shape: 1.0, shapes)  # type: ignore[arg-type,return-value]
    with pytest.raises(ValueError, match="contain 'params'"):
        settings_of({"*": {"params": []}}, shapes)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("family", "pins"), [("gpt", {"pp": 2, "num_micro_batches": 2}), ("llama", {"dp": 2, "zero_stage": 3})], ids=str
)
def test_the_trained_module_comes_back_and_the_old_one_says_so(family: str, pins: dict[str, Any]) -> None:
    first, second = pool(2).run(loop_jobs.give_back, family, pins)
    assert second == {"rank": 1, "trained": None}
    assert first["error"] < 1e-6 and first["trainable"] and first["early"] == []
    given, back = first["num_parameters"]
    assert given == back  # tied parameters are one again
    (said,) = first["said"]  # once
    assert said.startswith(f"this {first['trained']} has the values that it had before")


@pytest.mark.processes
def test_the_old_values_of_the_module_are_not_read_without_a_word() -> None:
    for found in pool(2).run(loop_jobs.read_old_values):
        state, pickled = found.pop("read")
        assert "that it had before autoplan.parallelize; pm.state_dict() returns the trained values" in state
        assert "pm.save_pretrained(folder)" in state and "pm.to_module() returns the trained module" in pickled
        again, _ = found.pop("again")
        assert "has the values that it had when they were loaded last; pm.state_dict()" in again
        assert found == {"early": [], "own": [], "copied": [], "pickled": [], "renewed": []}


def test_a_module_that_cannot_be_copied_says_what_to_do() -> None:
    model = torch.nn.Linear(2, 2)
    model.source = (x for x in [1])  # type: ignore[assignment]
    given = GivenModule(model)
    assert "Linear cannot be copied (TypeError: cannot pickle 'generator' object)" in given.reason
    with pytest.raises(RuntimeError, match=r"load pm\.state_dict"):
        given.filled(model.state_dict(), {})


class Rotary(torch.nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, device=device))
        self.register_buffer("kept", torch.ones(2, device=device))
        self.register_buffer("inv_freq", torch.ones(2, device=device), persistent=False)
        self.original_inv_freq = self.inv_freq


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")
def test_the_trained_module_is_on_the_host() -> None:
    """All of it, of a module on a GPU; here the GPU is fake."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        on_gpu, on_meta = Rotary("cuda"), Rotary("meta")
        values = dict(Rotary("cuda").named_buffers())
        for given in (GivenModule(on_gpu), GivenModule(on_meta, values)):
            back = given.filled({"weight": torch.ones(2), "kept": torch.ones(2)}, {})
            tensors = {**dict(back.named_parameters()), **dict(back.named_buffers())}
            assert {name: t.device.type for name, t in tensors.items()} == dict.fromkeys(tensors, "cpu")
            assert len(tensors) == 3 and back.original_inv_freq is back.inv_freq
        assert on_gpu.inv_freq.device.type == "cuda"


@pytest.mark.processes
def test_what_cannot_be_done_is_said_on_all_ranks() -> None:
    results = pool(2).run(loop_jobs.refused)
    assert results[0] == results[1]
    expected = [
        "pm.eval() was called",
        "was given no batch",
        "must have the same shapes",
        "must have the same shapes",
        "rank 1: the batch has no samples; where there are fewer than data-parallel ranks, give all",
        "this program takes input_ids, labels",
        "gradients are dropped",
        "'*.bais' fits no trained parameter",
    ]
    for said, wanted in zip(results[0], expected, strict=True):
        assert wanted in said


def test_outputs_that_cannot_be() -> None:
    """Negative: other rows than those there are, no function, and a program without outputs."""
    some = SimpleNamespace(model="Net", outputs=("logits",))
    none = SimpleNamespace(model="Net", outputs=())
    assert "Net has no output besides the loss" in str(why_no_outputs(none, "own", None))  # type: ignore[arg-type]
    assert why_no_outputs(some, "all", lambda out: out) is None  # type: ignore[arg-type]
    assert str(why_no_outputs(some, "mine", None)).startswith("rows='mine'; give 'own'")  # type: ignore[arg-type]
    assert "each is of type int" in str(why_no_outputs(some, "own", 3))  # type: ignore[arg-type]


@pytest.mark.usefixtures("one_process")
def test_a_frozen_tied_weight_is_held_once() -> None:
    """Without gradients to sum it is in no TiedSpec, and each of its uses had a copy."""
    model, pm = loop_jobs.program("gpt", {}, frozen=("tok.weight",))
    own = model.get_parameter("tok.weight")
    held = [p for p in pm.stage.state_dict(keep_vars=True).values() if torch.equal(p, own)]
    assert len(held) == 2 and held[0] is held[1]
    batch = loop_jobs.batch_of("gpt", 4)
    torch.testing.assert_close(
        pm.eval_step(batch), loop_jobs.loss_alone(model.eval(), "gpt", batch), rtol=1e-12, atol=0
    )
