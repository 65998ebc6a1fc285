"""A folder of a program is read whole or refused by name, and its model is recognised."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import nn

import autoplan
from autoplan.api import parallelize
from autoplan.captured import model_facts, outline_of
from autoplan.errors import CaptureError, PinError
from autoplan.plans.folder import check_model, read_program
from autoplan.plans.record import Plan

TOKENS = models.token_batch(4, 16)
BATCH = {"ids": TOKENS["input_ids"], "labels": TOKENS["labels"]}
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 128,
    "rms_norm_eps": 0.25,
}


def weighted(weight: float) -> Callable[..., torch.Tensor]:
    return lambda logits, batch: weight * models.gpt_loss(logits, batch)


def made(model: nn.Module, loss_fn: Any, folder: Path, batch: Any = BATCH, **pins: Any) -> Plan:
    """Write the program of a model for two devices."""
    plan = autoplan.plan(model, "local:2", example_inputs=batch, loss_fn=loss_fn, pins=pins, verify=False)
    autoplan.compile(model, plan, folder, example_inputs=batch, loss_fn=loss_fn, verify=False)
    return plan


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("programs") / "gpt"
    made(models.make_gpt(), weighted(1.0), out, tp=2)
    return out


def with_eps(model: nn.Module, eps: float) -> nn.Module:
    model.norm.eps = eps  # type: ignore[union-attr]
    return model


@pytest.mark.parametrize(
    ("model", "weight", "said"),
    [
        (lambda: models.make_gpt(num_heads=8), 1.0, r"blocks\.0\.num_heads is 8, in the program 4"),
        (lambda: models.make_gpt(dropout=0.5), 1.0, r"drop\.p is 0\.5, in the program 0\.0"),
        (lambda: with_eps(models.make_gpt(), 0.5), 1.0, r"norm\.eps is 0\.5, in the program 1e-05"),
        (models.make_gpt, 0.5, r"weight, which loss_fn reads, is 0\.5, in the program 1\.0"),
    ],
    ids=["heads", "dropout", "eps", "loss"],
)
def test_a_model_with_other_numbers_is_refused(folder: Path, model: Any, weight: float, said: str) -> None:
    """Its parameters are the same."""
    program = read_program(folder)
    check_model(program, outline_of(models.make_gpt(), weighted(1.0)))
    with pytest.raises(CaptureError, match=f"was made for another model: .*{said}"):
        check_model(program, outline_of(model(), weighted(weight)))


def test_a_config_that_gains_a_value_is_refused(tmp_path: Path) -> None:
    """Without a window the config has None there."""
    from transformers import MistralConfig, MistralForCausalLM

    def mistral(window: int | None) -> Any:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
        config = MistralConfig(vocab_size=96, num_key_value_heads=2, sliding_window=window, **sizes)
        return MistralForCausalLM(config)

    made(mistral(None), None, tmp_path, TOKENS)
    check_model(read_program(tmp_path), outline_of(mistral(None), None))
    with pytest.raises(CaptureError, match=r"config\.sliding_window is 4, in the program None"):
        check_model(read_program(tmp_path), outline_of(mistral(4), None))


def factory() -> tuple[nn.Module, Any, Any]:
    return models.make_gpt(), BATCH, weighted(0.5)


def test_every_text_of_a_model_says_what_it_is(tmp_path: Path) -> None:
    shipped = model_facts("llama-3.1-8b")
    assert shipped["config"]["num_hidden_layers"] == 32 and None not in shipped["config"].values()
    assert model_facts("meta-llama/Llama-3.1-8B") == shipped
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for text in (tmp_path, tmp_path / "config.json"):
        found = model_facts(str(text))
        assert found["class"] == "LlamaForCausalLM" and found["config"]["rms_norm_eps"] == 0.25
    found = model_facts("test_program_folder:factory")
    assert found["class"] == "GPT"
    assert found["numbers"]["weight, which loss_fn reads,"] == "0.5" and found["numbers"]["blocks.0.num_heads"] == "4"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        *[
            (lambda d, n=n: d.pop(n), f"damaged .{n} is missing, or of another kind")
            for n in ("files", "buffers", "unused")
        ],
        (lambda d: d.update(files=[]), "damaged .files is missing, or of another kind"),
        (lambda d: d["files"].pop("plan.json"), "damaged .files: plan.json is missing"),
        (lambda d: d["files"].pop("program.json"), "damaged .files: program.json is missing"),
        (lambda d: d["files"].pop("stage0.py"), "damaged .files: stage0.py is missing"),
        (lambda d: d["files"].update({"../plan.json": "1"}), "damaged .files: ../plan.json is missing"),
        (lambda d: d.update(schema=1), "not of this version"),
        (lambda d: d.update(autoplan="0.0.9"), "was written by autoplan 0.0.9, and this is"),
    ],
)
def test_a_damaged_fingerprint_is_refused_by_name(folder: Path, changed: Any, said: str, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    data = json.loads((folder / "fingerprint.json").read_text())
    changed(data)
    (tmp_path / "fingerprint.json").write_text(json.dumps(data))
    with pytest.raises(PinError, match=f"{said}.*compile the plan again"):
        read_program(tmp_path)
    (tmp_path / "fingerprint.json").write_text(json.dumps(data)[:99])
    with pytest.raises(PinError, match=r"cannot be read .*; compile the plan again"):
        read_program(tmp_path)


def test_a_parameter_without_influence_on_the_loss_is_not_missed(tmp_path: Path) -> None:
    """One that was trained in the capture, not a new one."""
    model, loss_fn = models.make_gpt(), weighted(1.0)
    model.unused = nn.Linear(3, 3)
    made(model, loss_fn, tmp_path, tp=2)
    check_model(read_program(tmp_path), outline_of(model, loss_fn))
    model.other = nn.Linear(3, 3, bias=False)
    with pytest.raises(
        CaptureError, match=r"another model: parameter other.weight is trained, but not in the program;"
    ):
        check_model(read_program(tmp_path), outline_of(model, loss_fn))


def test_files_of_an_earlier_program_go_and_those_of_the_user_stay(tmp_path: Path) -> None:
    model, loss_fn = models.make_gpt(), weighted(1.0)
    made(model, loss_fn, tmp_path, pp=2, num_micro_batches=2)
    (tmp_path / "stage1.txt").write_text("mine")
    assert (tmp_path / "stage1.py").exists()
    made(model, loss_fn, tmp_path, tp=2)
    names = ["fingerprint.json", "plan.json", "program.json", "stage0.py", "stage1.txt"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    read_program(tmp_path)


def test_a_folder_that_cannot_be_written_is_an_error_that_names_it(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    plan = read_program(folder).plan
    for out in (tmp_path / "file", tmp_path / "file" / "program"):
        with pytest.raises(PinError, match=rf"{out} cannot be written \(.*\); name another folder"):
            autoplan.compile(models.make_gpt(), plan, out, example_inputs=BATCH, loss_fn=weighted(1.0), verify=False)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("how", ["plan", "program"])
def test_check_and_async_tp_hold_for_what_is_given(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`check` type-checks the program, and async_tp=False leaves async TP out of a plan that has it."""
    model, loss_fn = models.make_gpt(), weighted(1.0)
    plan = autoplan.plan(model, "local:1", example_inputs=BATCH, loss_fn=loss_fn, verify=False)
    autoplan.compile(model, plan, tmp_path, example_inputs=BATCH, loss_fn=loss_fn, verify=False)
    checked: list[Any] = []
    rows: list[int | None] = []

    class Stopped(Exception):
        pass

    def started(*args: Any, async_tp: int | None, **kwargs: Any) -> None:
        rows.append(async_tp)
        raise Stopped

    monkeypatch.setattr("autoplan.api._type_check", checked.append)
    monkeypatch.setattr("autoplan.api.ParallelModel", started)
    monkeypatch.setattr(Plan, "async_tp", True)
    given = {"plan": plan} if how == "plan" else {"program": tmp_path}
    for async_tp, check in (("auto", True), (False, False)):
        with pytest.raises(Stopped):
            parallelize(
                model,
                example_inputs=BATCH,
                loss_fn=loss_fn,
                verify=False,
                async_tp=async_tp,
                check=check,
                **given,
            )
    assert len(checked) == 1 and rows == [plan.rows, None]
