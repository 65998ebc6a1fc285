"""The loops of docs/migrate.md run as they stand, on two processes and on one, and learn."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migrate.md"
*LOOPS, TRAINER, LIGHTNING = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


@pytest.mark.slow
@pytest.mark.all_cases
@pytest.mark.processes
@pytest.mark.parametrize("num", [1, 2])
@pytest.mark.parametrize("text", LOOPS, ids=["nanogpt", "ddp"])
def test_a_loop_of_the_page_runs(text: str, num: int, tmp_path: Path) -> None:
    said = run(text, num, tmp_path)
    losses = losses_in(said)
    assert len(losses) >= 3 and losses[-1] < 0.8 * losses[0], said
    if "val loss" in text:
        assert len(re.findall(r"val loss \d", said)) == 2 and "saved" in said


def run(text: str, num: int, folder: Path, *arguments: str, name: str = "train.py") -> str:
    """Run a script on so many processes; return what it printed."""
    (folder / name).write_text(text)
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num)] if num > 1 else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *start, name, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def losses_in(said: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"(?:iter|epoch) \d+: loss (\d+\.\d+)", said)]


PLAIN = """
import train
from transformers import LlamaForCausalLM, Trainer

losses, metrics = train.job(Trainer, "plain", 12)
resumed, _ = train.job(train.AutoplanTrainer, "out", 12, resume="out/checkpoint-8")
for losses in (losses, resumed):
    for step, loss in enumerate(losses):
        print(f"iter {step}: loss {loss:.4f}")
print(f"accuracy {metrics['eval_accuracy']:.4f}, eval loss {metrics['eval_loss']:.4f}")
pairs = zip(*(LlamaForCausalLM.from_pretrained(f"{folder}/trained").parameters() for folder in ("plain", "out")))
print("difference", max((a - b).abs().max().item() for a, b in pairs))
"""


@pytest.mark.slow
@pytest.mark.processes
def test_the_trainer_of_the_page_is_the_plain_one(tmp_path: Path) -> None:
    """Losses, metrics and saved model on two processes against the plain Trainer on one; resumed on one process."""
    pytest.importorskip("accelerate")
    said = run(TRAINER, 2, tmp_path)
    found, plain = losses_in(said), run(PLAIN, 1, tmp_path, name="plain.py")
    wanted = losses_in(plain)
    assert len(found) == 12 and len(wanted) == 24 and wanted[11] < 0.8 * wanted[0]
    assert found == pytest.approx(wanted[:12], abs=2e-4) and found == pytest.approx(wanted[12:], abs=2e-4)
    of_run, of_plain = (
        [float(x) for x in re.findall(r"(?:accuracy|eval loss) (\S+?),?\s", text)] for text in (said, plain)
    )
    assert of_run == pytest.approx(of_plain, abs=2e-4) and of_plain[0] > 0.9
    assert float(plain.rsplit("difference ", 1)[1]) < 1e-3


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # of transformers, since 5.23
def test_the_trainer_of_the_page_uses_its_arguments_or_refuses_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    page: dict[str, Any] = {}
    exec(TRAINER.partition("\ndef accuracy")[0], page)
    model = page["LlamaForCausalLM"](page["LlamaConfig"](vocab_size=8, hidden_size=32, num_hidden_layers=1))
    given: list[dict[str, Any]] = []
    made = types.SimpleNamespace(optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    monkeypatch.setattr(page["autoplan"], "parallelize", lambda model, **how: given.append(how) or made)

    def trainer(plan: dict[str, Any] | None = None, more: dict[str, Any] | None = None, **arguments: Any) -> Any:
        args = page["Arguments"](str(tmp_path), per_device_train_batch_size=2, use_cpu=True, report_to=[], **arguments)
        rows = [{"input_ids": torch.arange(4), "labels": torch.arange(4)}] * 2
        return page["AutoplanTrainer"](model=model, args=args, train_dataset=rows, plan=plan, **(more or {}))

    trainer().create_optimizer()
    trainer(gradient_checkpointing=True, torch_compile=True, torch_compile_backend="eager").create_optimizer()
    trainer({"pins": {"tp": 2, "recompute": "mlp"}}, gradient_checkpointing=True).create_optimizer()
    trainer({"plan": "plan.json"}, gradient_checkpointing=True).create_optimizer()
    assert [how.get("pins") for how in given] == [None, {"recompute": "full"}, {"tp": 2, "recompute": "mlp"}, None]
    assert [how["compile"] for how in given] == ["auto", "eager", "auto", "auto"]
    for name, value in {
        "save_total_limit": 2,
        "neftune_noise_alpha": 5.0,
        "torch_compile_mode": "reduce-overhead",
        "gradient_checkpointing_kwargs": {"use_reentrant": False, "every_n_layers": 2},
    }.items():
        with pytest.raises(ValueError, match=rf"^{name}(\['every_n_layers'\])?: not done here"):
            trainer(**{name: value})
    with pytest.raises(ValueError, match=r"^optimizers: not done here"):
        trainer(more={"optimizers": (made.optimizer, None)})


def test_a_lightning_checkpoint_holds_the_batches_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module of the page with the hooks of Lightning, which need not be installed: a checkpoint between two
    accumulated batches goes on, on another number of ranks, as if there had been none."""
    for name, found in {
        "lightning": {"LightningModule": nn.Module},
        "lightning.pytorch": {},
        "lightning.pytorch.callbacks": {"ModelCheckpoint": object},
        "lightning.pytorch.strategies": {"SingleDeviceStrategy": object},
    }.items():
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**found))
    page: dict[str, Any] = {}
    exec(LIGHTNING.partition("\ntorch.manual_seed(0)")[0], page)

    def program(rank: int, ranks: int) -> Any:
        made = page["Program"].__new__(page["Program"])
        nn.Module.__init__(made)
        made.accumulate, made.waiting, made.log = 2, [], lambda *args, **kwargs: None
        made.trainer = types.SimpleNamespace(is_last_batch=False)
        made.optimizers = lambda: types.SimpleNamespace(step=lambda: None)
        made.pm = types.SimpleNamespace(data_rank=rank, data_world=ranks, steps=[], clip_grad_norm_=lambda norm: None)
        made.pm.step = lambda batches: made.pm.steps.append(batches) or torch.zeros(())
        return made

    def batch(first: int) -> list[torch.Tensor]:
        return [torch.arange(first, first + 4), torch.arange(first, first + 4)]

    checkpoint: dict[str, Any] = {}
    before, after = program(0, 2), program(2, 4)
    before.training_step(batch(0), 0)
    before.on_save_checkpoint(checkpoint)
    after.on_load_checkpoint(checkpoint)
    after.training_step(batch(4), 1)
    ((first, second),) = after.pm.steps
    assert before.pm.steps == [] and after.waiting == []
    assert first["input"].tolist() == [2] and second["target"].tolist() == [6]


@pytest.mark.slow
@pytest.mark.processes
def test_the_lightning_module_of_the_page_trains_as_a_plain_loop(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    torch.manual_seed(0)
    features = torch.randn(256, 16)
    targets = features @ torch.randn(16, 4)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(3):
        losses = []
        for first in range(0, 256, 32):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(features[first : first + 32]), targets[first : first + 32])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        scheduler.step()
    evaluated = nn.functional.mse_loss(model(features), targets).item()
    for num, resumed in ((2, ()), (1, ("checkpoints/epoch=1.ckpt",))):
        said = run(LIGHTNING, num, tmp_path, *resumed)
        found = [float(x) for x in re.findall(r"loss (\d+\.\d+)", said)]
        assert "steps 24," in said and found == pytest.approx([sum(losses) / len(losses), evaluated], rel=1e-5)
