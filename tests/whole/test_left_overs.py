"""What is left of a loop of PyTorch around a program says what there is in its place, or works."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import re
import warnings
import weakref
from pathlib import Path
from typing import Any

import left_over_jobs
import pytest
import torch
from harness import pool

import autoplan
from autoplan.errors import PinError

pytestmark = pytest.mark.usefixtures("one_process")


@pytest.mark.processes
def test_a_loop_under_torch_compile_is_that_without_it() -> None:
    for (step, *compiled), plain in pool(2).run(left_over_jobs.compiled_loop, {"dp": 2, "zero_stage": 2}):
        assert compiled == plain and step == plain[0]


@pytest.mark.processes
@pytest.mark.parametrize("pins", [{"dp": 2}, {"tp": 2}, {"pp": 2}], ids=str)
def test_a_dtype_that_torch_would_refuse_is_refused_by_the_name_of_the_input(pins: dict[str, int]) -> None:
    for said, off in pool(2).run(left_over_jobs.other_dtypes, pins):
        captured = dict.fromkeys(("ids torch.int16", "labels torch.uint8", "labels torch.float32"), "int64")
        captured |= dict.fromkeys(("scale torch.float64", "scale torch.float16"), "float32")
        for name, wanted in captured.items():
            given, dtype = name.split()
            assert said.pop(name).startswith(f"{given} is {dtype}; the program was captured with {wanted}"), name
        assert said == {}
        assert off.keys() == {"ids torch.int32", "labels torch.int32", "weights torch.float64"}
        assert max(off.values()) < 1e-6


def test_rows_and_classes_have_the_dtypes_that_torch_takes() -> None:
    _, pm = left_over_jobs.made()
    batch = left_over_jobs.batch_of()
    with pytest.raises(ValueError, match=r"and takes torch\.int32, too: give ids\.to\(torch\.int64\)"):
        pm.step({**batch, "ids": batch["ids"].bool()})


def test_the_loss_of_a_step_has_no_backward() -> None:
    _, pm = left_over_jobs.made()
    loss = pm.step(left_over_jobs.batch_of())
    penalty = torch.ones((), requires_grad=True)
    for wrong in (loss, loss / 2, penalty + loss, torch.amp.GradScaler("cpu").scale(loss)):
        with pytest.raises(RuntimeError, match=r"pm\.step\(batch\) has done the backward"):
            wrong.backward()
    with pytest.raises(RuntimeError, match=r"pm\.step\(batch\) has done the backward"):
        torch.autograd.grad(loss, [penalty])


def test_else_the_loss_of_a_step_is_a_tensor_as_any_other() -> None:
    _, pm = left_over_jobs.made()
    loss = pm.step(left_over_jobs.batch_of())
    stored = io.BytesIO()
    torch.save({"loss": loss}, stored)
    stored.seek(0)
    for plain in (torch.load(stored)["loss"], copy.deepcopy(loss), pickle.loads(pickle.dumps(loss)), loss.detach()):
        assert type(plain) is torch.Tensor and torch.equal(plain, loss)
    assert f"{loss:.3f}" == f"{loss.item():.3f}" and repr(loss) == repr(loss.detach())
    assert loss.numpy() == loss.item() == float(loss) and type(torch.stack([loss, loss]).mean()) is torch.Tensor
    assert type(loss).__module__ == "torch" and type(loss).__name__ == "Tensor"  # as loggers know tensors
    assert torch.compile(lambda x: x / 2, backend="eager")(loss).item() == loss.item() / 2


def test_clipping_the_given_module_warns() -> None:
    model, pm = left_over_jobs.made()
    batch = left_over_jobs.batch_of()

    def clip() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    assert left_over_jobs.said_by(clip) == []  # before any step
    pm.step(batch)
    (said,) = left_over_jobs.said_by(clip)
    assert "to clip them does nothing" in said and "pm.clip_grad_norm_(max_norm)" in said
    assert left_over_jobs.said_by(clip) == []  # once
    for other in (copy.deepcopy(model), pm.to_module()):
        assert other is not None and {*map(id, other.parameters())}.isdisjoint(map(id, model.parameters()))
        assert len(list(other.parameters())) == len(list(model.parameters()))
    model, pm = left_over_jobs.made()
    pm.step(batch)
    for p in model.parameters():  # its owner trains the module, too
        p.grad = torch.ones_like(p)
    assert left_over_jobs.said_by(clip) == []


def test_the_given_module_is_freed_and_pickled_as_ever() -> None:
    model, pm = left_over_jobs.made()
    read: torch.nn.Module = pickle.loads(pickle.dumps(model))
    assert [id(p) for p in read.parameters()] == [id(p) for _, p in read.named_parameters()]
    gone = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert gone() is None and pm.given is not None
    finally:
        gc.enable()


def test_a_mode_or_a_dtype_that_comes_too_late_warns() -> None:
    batch = left_over_jobs.batch_of()
    model, pm = left_over_jobs.made(dropout=0.1)
    assert left_over_jobs.said_by(lambda: pm.step(batch)) == []
    pm.zero_grad()
    model.eval()
    (said,) = left_over_jobs.said_by(lambda: pm.step(batch))
    assert said.startswith("drop (Dropout) was set to eval mode after autoplan.parallelize")
    pm.zero_grad()
    assert left_over_jobs.said_by(lambda: pm.step(batch)) == []
    model, pm = left_over_jobs.made()
    model.bfloat16().eval()  # without dropout the modes are the same
    (said,) = left_over_jobs.said_by(lambda: pm.step(batch))
    assert said.startswith("embed.weight was converted from torch.float32 to torch.bfloat16 after")


def test_warnings_name_the_line_of_the_script() -> None:
    model, pm = left_over_jobs.made()
    batch = left_over_jobs.batch_of()
    pm.step(batch)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        pm.step(batch)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        model.state_dict()
        model(batch["ids"], batch["scale"])
    assert [Path(w.filename).name for w in found] == [Path(__file__).name] * 4


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"timeout_s": "a"}, "timeout_s='a' must be a positive number of seconds"),
        ({"timeout_s": -1}, "timeout_s=-1 must be a positive number of seconds"),
        ({"pins": "tp=2"}, "pins='tp=2' is of type str; give a mapping"),
        ({"folder": 5}, "folder=5 is of type int; give the path of a folder"),
        ({"program": {}}, "program={} is of type dict; give the path of a folder"),
        ({"plan": 5}, "plan=5 is of type int; give an autoplan.Plan, or the path of its file"),
        ({"check": "yes"}, "check='yes' is of type str; give True or False"),
        ({"param_groups": 5, "optimizer": torch.optim.SGD}, "param_groups=5 is of type int; give {pattern: settings}"),
    ],
    ids=str,
)
def test_arguments_of_another_type_are_named(given: dict[str, Any], says: str) -> None:
    with pytest.raises(PinError, match=re.escape(says)):
        autoplan.parallelize(
            left_over_jobs.Net(), example_inputs=left_over_jobs.batch_of(), loss_fn=left_over_jobs.loss_fn, **given
        )
    assert autoplan.Cluster.parse(Path("local:2")).num_devices == 2
    with pytest.raises(PinError, match="cluster=5 is of type int; give a text"):
        autoplan.Cluster.parse(5)  # type: ignore[arg-type]
