"""Checkpoints: a training goes on under another plan; what is damaged is refused by name and the older one offered."""

from __future__ import annotations

import json
import os
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_jobs
import pytest
import torch
from harness import JobError, Pool, pool
from parity import fake_group

from autoplan.runtime.checkpoint import folders
from autoplan.runtime.checkpoint.contents import _place_of_number, merged_facts
from autoplan.runtime.checkpoint.door import CheckpointError
from autoplan.runtime.checkpoint.values import Encoder, decode
from autoplan.runtime.model import ParallelModel
from autoplan.runtime.step_log import StepLog
from experiments.state.checkpoints import verdict
from experiments.state.jobs import CONTROLS, SCALER, STEPS, go_on, load_and_go_on, save_and_go_on, scheduler_of
from experiments.state.plans import Cell, Job, Training, job_of, world_of

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed._functional_collectives.*:FutureWarning")

DROPOUT = Training("dropout")


def run_cell(cell: Cell, root: Path, control: str = "") -> list[str]:
    """What is wrong with a cell."""
    truth = pool(world_of(cell.saved)).run(save_and_go_on, job_of(cell.training, cell.saved), str(root), timeout_s=120)
    job = job_of(cell.training, cell.loaded)
    found = pool(world_of(cell.loaded)).run(load_and_go_on, job, [str(root)], control, timeout_s=120)
    return verdict(cell, [of_rank[0] for of_rank in found], truth)


@pytest.mark.processes
def test_a_training_goes_on_under_another_plan(tmp_path: Path) -> None:
    assert run_cell(Cell(DROPOUT, "pp2", "tp2"), tmp_path) == []


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    "cell",
    [
        Cell(Training("llama"), "ZeRO 3, dp4", "tp2, ZeRO 3, dp2"),
        Cell(Training("llama"), "optimizer on the host, dp2", "pp2, ZeRO 2, dp2"),
        Cell(Training("tied"), "ZeRO 1, dp2", "pp2, tp2"),
        Cell(Training("mixtral"), "ep2, etp2", "ep2, ZeRO 3, dp4"),
        Cell(Training("few experts"), "ep2, ZeRO 3, dp4", "ZeRO 3, dp4"),  # fewer local ones than replicas
        Cell(Training("llama", "bf16"), "pp2", "dp2"),
    ],
    ids=str,
)
def test_more_plans(cell: Cell, tmp_path: Path) -> None:
    """All pairs: `python -m experiments.state.checkpoints`."""
    assert run_cell(cell, tmp_path) == []


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("control", CONTROLS)
def test_what_is_not_restored_is_seen(control: str, tmp_path: Path) -> None:
    training = Training("dropout", "fp16") if control == SCALER else DROPOUT  # only fp16 has a loss scaler
    assert run_cell(Cell(training, "pp2", "tp2"), tmp_path, control)


@pytest.mark.processes
def test_a_checkpoint_is_written_beside_the_training(tmp_path: Path) -> None:
    """It holds the step at which it was asked for, not those that ran meanwhile."""
    assert pool(2).run(checkpoint_jobs.beside, job_of(DROPOUT, "dp2"), str(tmp_path)) == [[], []]


@pytest.mark.processes
def test_ranks_with_one_batch_have_one_state(tmp_path: Path) -> None:
    """Generators are those of their first rank, whole; and the first batch after a load is compared."""
    found = pool(2).run(checkpoint_jobs.ranks_that_differ, job_of(DROPOUT, "pp2"), str(tmp_path))
    (truth, first, said, refused), (own, second, *texts) = found
    assert first == second == truth != own
    assert texts == [said, refused]
    assert "another batch (its contents) on rank 1 than rank 0" in said
    assert "states['other'] holds this rank's parts of tensors" in refused and "as optimizer=" in refused


@pytest.mark.processes
def test_one_rank_cannot_write(tmp_path: Path) -> None:
    """All ranks say so alike, the older checkpoint is there, and the training goes on."""
    found = pool(2).run(checkpoint_jobs.full_disk_of_one_rank, job_of(DROPOUT, "dp2"), str(tmp_path))
    (said, losses, left), other = found
    assert other[0] == said and other[1] == losses
    assert said.startswith(f"the checkpoint of step 2 in {tmp_path} was not written: rank 1: ")
    assert "File too large" in said and "the checkpoint of step 1 is complete: load it with step=1" in said
    assert left == ["step_0000000001", "step_0000000003"]


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("where", ["before its file", "after its file"])
def test_a_rank_is_killed_while_a_checkpoint_is_written(where: str, tmp_path: Path) -> None:
    """The older one is whole, found by name, and a training that goes on from it has the losses of one that ran on."""
    job = job_of(DROPOUT, "dp2")
    with Pool(2, group_timeout_s=60.0) as own:
        truth = own.run(save_and_go_on, job, str(tmp_path / "truth"), timeout_s=120)
    with Pool(2, group_timeout_s=60.0) as own, pytest.raises(JobError, match="rank 1: the process died"):
        own.run(checkpoint_jobs.killed_while_writing, job, str(tmp_path / "killed"), where, timeout_s=120)
    assert folders.steps_in(tmp_path / "killed") == [STEPS]
    found = pool(2).run(load_and_go_on, job, [str(tmp_path / "killed")], timeout_s=120)
    assert [f[0].after.losses for f in found] == [t.losses for t in truth]


# -- one process ------------------------------------------------------------------------------------------------------


def alone() -> Job:
    return job_of(DROPOUT, "one rank")


def started(root: Path, steps: tuple[int, ...] = (1, 2)) -> ParallelModel:
    """A program that was trained and saved after these steps."""
    pm = alone().program()
    scheduler = scheduler_of(pm)
    for step in steps:
        go_on(pm, scheduler, step - pm.progress.num_steps)
        pm.save_checkpoint(root, states={"scheduler": scheduler})
    return pm


def state_of(pm: ParallelModel) -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in pm.state_dict().items()}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def change(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)


def change_manifest(path: Path) -> None:
    path.write_text(path.read_text().replace('"num_samples": 24', '"num_samples": 25'))


DAMAGE: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "truncated": ("rank_00000.safetensors", cut, "rank_00000.safetensors has "),
    "changed": ("rank_00000.safetensors", change, "rank_00000.safetensors was changed"),
    "missing": ("rank_00000.safetensors", Path.unlink, "rank_00000.safetensors cannot be read: No such file"),
    "manifest changed": ("checkpoint.json", change_manifest, "checkpoint.json is not the one that was written"),
    "manifest missing": ("checkpoint.json", Path.unlink, "checkpoint.json cannot be read: No such file"),
    "marker empty": ("complete.json", lambda p: p.write_text(""), "complete.json or checkpoint.json has another form"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_named_and_the_older_checkpoint_offered(how: str, tmp_path: Path) -> None:
    name, harm, said = DAMAGE[how]
    with fake_group(1):
        pm = started(tmp_path)
        before = state_of(pm)
        harm(tmp_path / "step_0000000002" / name)
        with pytest.raises(CheckpointError) as caught:
            pm.load_checkpoint(tmp_path, states={"scheduler": scheduler_of(pm)})
        assert said in str(caught.value) and "step_0000000002 is damaged" in str(caught.value)
        assert "the checkpoint of step 1 is complete: load it with step=1" in str(caught.value)
        assert all(torch.equal(before[n], t) for n, t in pm.state_dict().items())
        resumed = pm.load_checkpoint(tmp_path, states={"scheduler": scheduler_of(pm)}, step=1)
        assert resumed is not None and (resumed.step, resumed.num_samples) == (1, 12)
        with pytest.warns(RuntimeWarning, match=r"step_0000000002 is damaged: .* passed over"):
            resumed = pm.load_checkpoint(tmp_path, states={"scheduler": scheduler_of(pm)}, older=True)
        assert resumed is not None and resumed.step == 1
        (tmp_path / "step_0000000001" / "checkpoint.json").unlink()
        with pytest.warns(RuntimeWarning), pytest.raises(CheckpointError, match="step_0000000001 is damaged"):
            pm.load_checkpoint(tmp_path, states={"scheduler": scheduler_of(pm)}, older=True)


def test_the_newest_is_the_last_one_written(tmp_path: Path) -> None:
    """Also after going back: not the highest step; and the older one is that written before."""
    with fake_group(1):
        pm = started(tmp_path, (1, 2, 5))
        states = {"scheduler": scheduler_of(pm)}
        assert pm.load_checkpoint(tmp_path, states=states, step=2) is not None
        go_on(pm, states["scheduler"], 1)
        pm.save_checkpoint(tmp_path, states=states, keep=3)
        assert folders.steps_in(tmp_path) == [3, 5, 2]
        resumed = pm.load_checkpoint(tmp_path, states=states)
        assert resumed is not None and resumed.step == pm.progress.num_steps == 3
        change(tmp_path / "step_0000000003" / "rank_00000.safetensors")
        with pytest.raises(CheckpointError, match="the checkpoint of step 5 is complete: load it with step=5"):
            pm.load_checkpoint(tmp_path, states=states)
        with pytest.raises(CheckpointError, match="step=2 and older=True"):
            pm.load_checkpoint(tmp_path, states=states, step=2, older=True)
        marker = tmp_path / "step_0000000002" / "complete.json"
        text = json.loads(marker.read_text())
        del text["number"]  # written before there were numbers
        marker.write_text(json.dumps(text))
        assert folders.steps_in(tmp_path) == [3, 5, 2]


def test_a_replacement_that_was_interrupted_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the two renames no folder has the name of the checkpoint."""

    def die(source: Path, target: Path) -> None:
        if Path(source).suffix == ".writing":
            raise OSError(28, "No space left on device", str(target))
        rename(source, target)

    rename = os.rename
    with fake_group(1):
        pm = started(tmp_path)
        with monkeypatch.context() as patched, pytest.raises(CheckpointError, match="No space left"):
            patched.setattr(os, "rename", die)
            pm.save_checkpoint(tmp_path, states={"scheduler": scheduler_of(pm)})
        assert folders.steps_in(tmp_path) == [2, 1]
        final = tmp_path / "step_0000000002"
        final.rename(tmp_path / ".step_0000000002.old")  # as a job leaves it that is killed there
        assert folders.steps_in(tmp_path) == [1]
        resumed = pm.load_checkpoint(tmp_path, states={"scheduler": scheduler_of(pm)})
        assert resumed is not None and resumed.step == 2


def test_what_was_not_completed_is_passed_over_with_a_warning(tmp_path: Path) -> None:
    with fake_group(1):
        pm = started(tmp_path)
        states = {"scheduler": scheduler_of(pm)}
        (tmp_path / "step_0000000002" / "complete.json").unlink()
        with pytest.warns(
            RuntimeWarning, match=r"step_0000000002 in \S+ without complete.json: .* step 1 is the newest"
        ):
            resumed = pm.load_checkpoint(tmp_path, states=states)
        assert resumed is not None and resumed.step == 1
        with pytest.raises(CheckpointError, match=r"it has the steps 1, and step_0000000002 without its complete.json"):
            pm.load_checkpoint(tmp_path, states=states, step=2)
        (tmp_path / "step_0000000001" / "complete.json").unlink()
        with pytest.warns(RuntimeWarning, match="step_0000000001, step_0000000002 .* there is no complete one"):
            assert pm.load_checkpoint(tmp_path, states=states) is None
        pm.save_checkpoint(tmp_path, states=states)  # of step 1: the other one is of no later training
        with pytest.warns(RuntimeWarning, match="step_0000000002"):
            assert pm.load_checkpoint(tmp_path, states=states) is not None


def test_a_folder_of_other_checkpoints_is_named(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """Where a training begins anew, files that another library wrote are no checkpoint; a log is fine."""
    with fake_group(1):
        pm = started(tmp_path / "own")
        (tmp_path / "out" / "checkpoint-8").mkdir(parents=True)
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs" / "train.jsonl").touch()
        recwarn.clear()
        assert pm.load_checkpoint(tmp_path / "logs") is None and not recwarn
        with pytest.warns(RuntimeWarning, match=r"out has no checkpoint .*, but checkpoint-8: nothing is loaded"):
            assert pm.load_checkpoint(tmp_path / "out") is None


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("unpickled")

    with fake_group(1):
        pm = started(tmp_path)
        for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
            monkeypatch.setattr(module, name, never)
        assert pm.load_checkpoint(tmp_path, states={"scheduler": scheduler_of(pm)}) is not None
    files = {path.suffix for path in (tmp_path / "step_0000000002").iterdir()}
    assert files == {".json", ".safetensors"}


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path) -> None:
    with fake_group(1):
        pm = started(tmp_path, (1,))
        go_on(pm, scheduler_of(pm), 1)
        with (
            checkpoint_jobs.files_up_to(4096),
            pytest.raises(CheckpointError, match=r"was not written: \S*rank_00000.safetensors: File too large"),
        ):
            pm.save_checkpoint(tmp_path)
        assert [p.name for p in tmp_path.iterdir()] == ["step_0000000001"]
        blocked = tmp_path / "a file"
        blocked.write_text("")
        with pytest.raises(CheckpointError, match="a file"):
            pm.save_checkpoint(blocked)


def test_a_failure_beside_the_training_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also if the script ends without waiting for the checkpoint."""
    with fake_group(1):
        pm = started(tmp_path, (1,))
        with checkpoint_jobs.files_up_to(4096):
            saving = pm.save_checkpoint(tmp_path / "other", wait=False)
            assert pm._checkpoints._threads is not None
            pm._checkpoints._threads.shutdown()  # waits for the thread, with its callbacks
        assert "the checkpoint of step 1 in" in caplog.text and "was not written" in caplog.text
        with pytest.raises(CheckpointError, match="was not written"):
            saving.wait()
        assert pm.load_checkpoint(tmp_path, model_only=True) is not None  # it was told once
        with checkpoint_jobs.files_up_to(4096):
            pm._checkpoints._threads = None
            assert pm.save_checkpoint(tmp_path / "other", wait=False)._future.exception() is not None
        with pytest.raises(CheckpointError, match="was not written"):  # nobody waited for it
            pm.load_checkpoint(tmp_path, model_only=True)
        assert pm.load_checkpoint(tmp_path, model_only=True) is not None


def test_old_checkpoints_are_removed(tmp_path: Path) -> None:
    with fake_group(1):
        pm = started(tmp_path, (1, 2))
        (tmp_path / ".step_0000000007.writing").mkdir()  # of a job that was killed
        go_on(pm, scheduler_of(pm), 1)
        pm.save_checkpoint(tmp_path, keep=2)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["step_0000000002", "step_0000000003"]
        pm.save_checkpoint(tmp_path, keep=2)  # once more: replaced
        assert folders.steps_in(tmp_path) == [3, 2]
        with pytest.raises(CheckpointError, match="keep=0"):
            pm.save_checkpoint(tmp_path, keep=0)
        (tmp_path / "step_0000000003" / "complete.json").write_text("")  # damaged: none of those that are kept
        go_on(pm, scheduler_of(pm), 1)
        pm.save_checkpoint(tmp_path, keep=1)
        assert folders.steps_in(tmp_path) == [3, 4]


def test_what_does_not_fit_is_named_and_nothing_changes(tmp_path: Path) -> None:
    with fake_group(1):
        pm = started(tmp_path)
        before = state_of(pm)
        states = {"scheduler": scheduler_of(pm)}
        other = torch.optim.SGD(pm.parameters(), lr=0.1)
        refusals: list[tuple[str, dict[str, Any]]] = [
            ("no complete checkpoint of step 9 .* it has the steps 1, 2", {"states": states, "step": 9}),
            ("it has states\\['scheduler'\\], which was not given", {}),
            ("it has no states\\['loader'\\]", {"states": {**states, "loader": states["scheduler"]}}),
            ("state of AdamW, and this optimizer is SGD; model_only=True", {"states": states, "optimizer": other}),
        ]
        for text, arguments in refusals:
            with pytest.raises(CheckpointError, match=text):
                pm.load_checkpoint(tmp_path, **arguments)
        manifest = folders.read_manifest(tmp_path / "step_0000000002")
        manifest["tensors"]["model/head.weights"] = manifest["tensors"].pop("model/head.weight")
        manifest["tensors"]["model/head.bias"]["shape"] = [3]
        folders.write_manifest(tmp_path / "step_0000000002", manifest)
        with pytest.raises(CheckpointError, match=r"it lacks head\.weight; the model lacks head\.weights; head"):
            pm.load_checkpoint(tmp_path, states=states)
        assert all(torch.equal(before[n], t) for n, t in pm.state_dict().items())
        assert pm.load_checkpoint(tmp_path / "none", states=states) is None


def test_arguments_that_are_none_are_named_and_the_training_goes_on(tmp_path: Path) -> None:
    """Also the folder of one checkpoint, as `Saving.wait` returns it: there the training would begin anew."""
    with fake_group(1):
        pm = started(tmp_path)
        scheduler = scheduler_of(pm)
        arguments: list[tuple[str, dict[str, Any]]] = [
            (
                r"states is a ExponentialLR; give objects by name: states=\{'scheduler': scheduler\}",
                {"states": scheduler},
            ),
            (r"states\['a'\] is a int, which has no state_dict and no load_state_dict", {"states": {"a": 3}}),
            (r"states has the name 3, a int", {"states": {3: scheduler}}),
            (r"states\['pm'\] is a ParallelModel; a checkpoint holds the parallel model", {"states": {"pm": pm}}),
            (
                "optimizer updates tensors that are not parameters of this program",
                {"optimizer": torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1)},
            ),
        ]
        for text, given in arguments:
            for call in (pm.save_checkpoint, pm.load_checkpoint):
                with pytest.raises(CheckpointError, match=text):
                    call(tmp_path, **given)
        with pytest.raises(CheckpointError, match="keep='a'"):
            pm.save_checkpoint(tmp_path, keep="a")  # type: ignore[arg-type]
        with pytest.raises(CheckpointError, match="no complete checkpoint of step '2'"):
            pm.load_checkpoint(tmp_path, states={"scheduler": scheduler}, step="2")  # type: ignore[arg-type]
        one = tmp_path / "step_0000000002"
        with pytest.raises(CheckpointError, match=rf"is one checkpoint; give the folder of all, {tmp_path}, with step"):
            pm.load_checkpoint(one)
        with pytest.raises(CheckpointError, match=r"complete\.json is a file; give the folder of all checkpoints"):
            pm.load_checkpoint(one / "complete.json")


def test_an_optimizer_of_ones_own_and_the_model_alone(tmp_path: Path) -> None:
    with fake_group(1):
        pm = started(tmp_path)
        own = torch.optim.SGD(pm.parameters(), lr=0.1, momentum=0.9)
        go_on(pm, scheduler_of(pm), 1)
        own.step()
        pm.save_checkpoint(tmp_path / "own", optimizer=own)
        momenta = [own.state[p]["momentum_buffer"].clone() for p in pm.parameters()]
        own.step()
        pm.load_checkpoint(tmp_path / "own", optimizer=own)
        assert all(
            torch.equal(m, own.state[p]["momentum_buffer"]) for m, p in zip(momenta, pm.parameters(), strict=True)
        )
        pm.load_checkpoint(tmp_path, model_only=True, step=1)
        assert pm.progress.num_steps == 3


def test_an_optimizer_that_is_not_given_is_missed(tmp_path: Path) -> None:
    """A script that makes its own optimizer must not go on without its moments."""
    with fake_group(1):
        pm = started(tmp_path, (1,))
        states = {"scheduler": scheduler_of(pm)}
        pm.optimizer = None
        with pytest.raises(CheckpointError, match="it has the state of AdamW, and there is no optimizer here: give"):
            pm.load_checkpoint(tmp_path, states=states)
        assert pm.load_checkpoint(tmp_path, model_only=True) is not None


def test_what_an_optimizer_keeps_comes_back_in_its_dtype(tmp_path: Path) -> None:
    """A copy in another dtype than the parameter's stays one; a list of tensors is refused before anything is lost."""
    with fake_group(1):
        pm = started(tmp_path, (1,))
        own = torch.optim.SGD(pm.parameters(), lr=0.1)
        for p in pm.parameters():
            own.state[p] = {"single": p.detach().float(), "same": p.detach().clone(), "step": torch.tensor(3.0)}
        pm.save_checkpoint(tmp_path / "own", optimizer=own)
        pm.load_checkpoint(tmp_path / "own", optimizer=own)
        for p in pm.parameters():
            kept = own.state[p]
            assert (kept["single"].dtype, kept["same"].dtype) == (torch.float32, p.dtype)
            assert torch.equal(kept["single"], p.detach().float()) and kept["step"].dtype == torch.float32
            kept["history"] = [p.detach().clone()]
        with pytest.raises(CheckpointError, match=r"the optimizer's 'history' of \S+\[0\] is a tensor inside"):
            pm.save_checkpoint(tmp_path / "own", optimizer=own)


def test_options_that_are_tensors_come_back_as_numbers(tmp_path: Path) -> None:
    with fake_group(1):
        pm = started(tmp_path, (1,))
        betas = torch.tensor(0.75), torch.tensor(0.5)
        own = torch.optim.AdamW(pm.parameters(), torch.tensor(0.25), betas, foreach=False)
        pm.save_checkpoint(tmp_path / "own", optimizer=own)
        own.param_groups[0]["lr"].zero_()
        own.param_groups[0]["betas"] = 0.0, 0.0
        pm.load_checkpoint(tmp_path / "own", optimizer=own)
        assert own.param_groups[0]["betas"] == (0.75, 0.5) and own.param_groups[0]["lr"] == 0.25


def test_a_group_without_parameters_gets_its_options_back(tmp_path: Path) -> None:
    """It is known by its place; not in the checkpoints of earlier versions, nor where there are other groups."""
    with fake_group(1):
        pm = started(tmp_path, (1,))
        groups = [{"params": list(pm.parameters())}, {"params": [], "lr": 0.5, "momentum": 0.25}]
        own = torch.optim.SGD(groups, lr=0.1)
        pm.save_checkpoint(tmp_path / "own", optimizer=own)
        path = tmp_path / "own" / "step_0000000001"
        manifest = folders.read_manifest(path)
        for in_order, wanted in ((None, (0.5, 0.25)), ([], (9.0, 9.0))):
            for group in own.param_groups:
                group["lr"] = group["momentum"] = 9.0
            if in_order is not None:
                manifest["facts"]["optimizer"]["in_order"] = in_order
                folders.write_manifest(path, manifest)
            pm.load_checkpoint(tmp_path / "own", optimizer=own)
            first, second = own.param_groups
            assert first["lr"] == 0.1 and (second["lr"], second["momentum"]) == wanted


def test_the_groups_of_ranks_are_told_apart_by_their_place() -> None:
    """A rank without a group's parameters says nothing of it; where ranks have other groups, no place is known."""
    facts: dict[str, Any] = {"random": {}, "data_states": {}, "optimizer": {"class": "SGD", "scalars": {}}}
    ranks = [[[{"lr": 1}, []], [{"lr": 2}, ["a"]]], [[{"lr": 3}, ["b"]], [{"lr": 4}, []]]]
    every = [{**facts, "optimizer": {**facts["optimizer"], "groups": groups}} for groups in ranks]
    assert merged_facts(every)["optimizer"]["in_order"] == [{"lr": 3}, {"lr": 2}]
    every[1]["optimizer"]["groups"] = ranks[1][:1]
    assert merged_facts(every)["optimizer"]["in_order"] == []


def test_ranks_may_update_one_group_by_different_kernels(tmp_path: Path) -> None:
    """A rank whose part is not contiguous leaves the kernel out; under another plan one rank may have both parts."""
    with fake_group(1):
        pm = started(tmp_path, (1,))
        folder = tmp_path / "step_0000000001"
        manifest = folders.read_manifest(folder)
        groups = manifest["facts"]["optimizer"]["groups"]
        assert all("fused" not in options for options, _ in groups)
        options, names = groups.pop()
        groups += [[{**options, "fused": True}, names[:1]], [{**options, "fused": False}, names[1:]]]
        assert len(names) > 1
        folders.write_manifest(folder, manifest)
        assert pm.load_checkpoint(tmp_path, states={"scheduler": scheduler_of(pm)}) is not None


def test_the_step_is_where_the_update_counts_it() -> None:
    """A kernel on a GPU reads the step there: one on the host would be an address that it cannot read."""
    parameter = torch.zeros(2, device="meta")
    places = {
        (entry, name): _place_of_number(entry, parameter, {name: True}).type
        for entry in ("step", "eta")
        for name in ("foreach", "fused", "capturable")
    }
    assert {key for key, place in places.items() if place == "cpu"} == {("step", "foreach")}


def test_a_log_counts_the_steps_after_a_load(tmp_path: Path) -> None:
    """Neither the steps that were loaded, nor those of a training that went back."""
    with fake_group(1):
        pm = started(tmp_path, (3,))
        states = {"scheduler": scheduler_of(pm)}
        for resumed in (started(tmp_path / "other", (1,)), pm):
            log = StepLog(resumed, show=None, tokens_per_sample=1)
            go_on(resumed, states["scheduler"], 0 if resumed is not pm else 2)
            assert resumed.load_checkpoint(tmp_path, states=states) is not None
            go_on(resumed, states["scheduler"], 1)
            row = log(0.0)
            assert row is not None and (row.step, row.num_steps) == (4, 1)
            assert row.tokens_per_s == pytest.approx(12 / row.step_s)


def test_a_state_that_cannot_be_stored_is_named(tmp_path: Path) -> None:
    class Loader:
        def state_dict(self) -> Any:
            return {"open": [1, object()]}

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError(state)

    with fake_group(1):
        pm = started(tmp_path)
        with pytest.raises(CheckpointError, match=r"states\['loader'\]\['open'\]\[1\] is a object"):
            pm.save_checkpoint(tmp_path, states={"loader": Loader()})


def test_values_come_back_as_they_were() -> None:
    given = {
        "a": (1, 2.5, [None, "x"]),
        "milestones": Counter({3: 1, 5: 2}),
        "by number": {1: True, (2, 3): float("inf")},
        "$tensor": "a name like ours",
        "t": [torch.arange(3), torch.tensor(1.5)],
    }
    encoder = Encoder("states/x/")
    text = json.dumps(encoder.encode(given, "x"))
    back = decode(json.loads(text), encoder.tensors)
    tensors = given.pop("t"), back.pop("t")
    assert back == given and type(back["milestones"]) is Counter
    assert all(torch.equal(a, b) for a, b in zip(*tensors, strict=True))
