"""What a capture is given: batches and who reads them, regions that cast, arguments of other types."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import models
import pytest
import torch
from parity import worst
from test_faithful import DIM, Model, given, mean_square, run
from torch import nn

from autoplan.api import parallelize
from autoplan.capture.export import capture
from autoplan.errors import CaptureError, PinError
from autoplan.verify.check import verify_whole
from autoplan.verify.runs import VerifyTask

Batch = Mapping[str, torch.Tensor]


def assert_equal(model: nn.Module, batch: dict[str, torch.Tensor], loss: Any, **inputs: torch.Tensor) -> None:
    """The program computes `loss(model(**inputs), batch)` and its gradients."""
    model = model.double()
    got_loss, got = run(model, capture(model, batch, loss), batch)
    model.zero_grad()
    want = loss(model(**inputs), batch)
    want.backward()
    assert got_loss == pytest.approx(want.item(), rel=1e-12)
    assert worst(got, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})[0] < 1e-12


def cast_off(model: Model, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        y, z = x + model.weight[0], x * 2
    return y * z


def test_a_region_without_autocast_is_inlined() -> None:
    batch = given()
    assert_equal(Model(cast_off), batch, mean_square, x=batch["x"])


def size_of_a_region(model: Model, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        start = -x.shape[1]
        y = x[:, start:] + model.weight[0]
    return y[:, start:] * 2


def test_a_region_may_return_a_size() -> None:
    """As the rotary embedding of x-transformers, which torch.export then returns beside the tensor."""
    batch = given()
    assert_equal(Model(size_of_a_region), batch, mean_square, x=batch["x"])


def cast_on(model: Model, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ model.weight
    return y.to(x.dtype)


def test_what_autocast_casts_is_refused() -> None:
    """Inlined, the product would be that of the dtype outside: another number."""
    batch = {"x": given()["x"].float()}
    with pytest.raises(CaptureError, match=r"\.py:\d+: the model computes in a region of .*bfloat16"):
        capture(Model(cast_on), batch, mean_square)
    with torch.autocast("cpu"), pytest.raises(CaptureError, match="region is active"):
        capture(Model(lambda _, x: x), batch, mean_square)


def partly_without(model: Model, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        fixed, same = x * 2 + model.weight[0], x
        with torch.enable_grad():
            trained = x @ model.weight
    return fixed * trained + same


def frozen_use(model: Model, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return x @ model.only_here  # type: ignore[operator]


def test_no_gradient_flows_through_a_region_without_gradients() -> None:
    batch = given()
    assert_equal(Model(partly_without), batch, mean_square, x=batch["x"])
    model = Model(frozen_use)
    model.only_here = nn.Parameter(torch.ones(DIM, DIM))
    graph = capture(model, {"x": batch["x"].float()}, mean_square)
    assert graph.notes[0].startswith("first.bias, first.weight, only_here do not influence the loss")
    assert {n for n, p in graph.params.items() if p.trainable} == {"weight", "last.weight", "last.bias"}
    with pytest.raises(CaptureError, match=r"no trainable parameter influences the loss \(not 'first.bias'"):
        capture(model, {"x": batch["x"].float()}, lambda out, batch: out.detach().square().mean())


class Open(nn.Module):
    """Its forward hands what it does not name to a part that knows `scale` only."""

    def __init__(self, required: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.required = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), required

    def forward(self, x: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        if self.required:
            return self.part(self.first(x), more["scale"])
        return self.part(self.first(x), **more)

    def part(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        return self.last(x if scale is None else x * scale)


def against_labels(out: torch.Tensor, batch: Batch) -> torch.Tensor:
    return (out - batch["labels"]).square().mean()


def test_inputs_that_the_loss_reads_are_not_for_the_models_kwargs() -> None:
    x, labels, scale = given()["x"], given()["x"].flip(0), given()["x"].flip(1)
    assert_equal(Open(), {"x": x, "labels": labels}, against_labels, x=x)
    for required in (False, True):
        batch = {"x": x, "labels": labels, "scale": scale}
        assert_equal(Open(required), batch, against_labels, x=x, scale=scale)
    with pytest.raises(AssertionError):  # negative control: another loss without the scale
        without = functools.partial(assert_equal, Open(), {"x": x, "labels": labels, "scale": scale}, against_labels)
        without(x=x)


def test_example_inputs_that_are_no_mapping() -> None:
    model, x = Open(), torch.zeros(2, 4, DIM)
    with pytest.raises(CaptureError, match=r"of type tuple; .*: \{'x': example_inputs\[0\]\}$"):
        parallelize(model, example_inputs=(x,), loss_fn=mean_square)  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match=r"of type Tensor; .*: \{'x': example_inputs\}$"):
        parallelize(model, example_inputs=x, loss_fn=mean_square)  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match=r"example_inputs\['x'\] is of type list; .*: leave out what"):
        parallelize(model, example_inputs={"x": [1, 2]}, loss_fn=mean_square)  # type: ignore[dict-item]
    with pytest.raises(CaptureError, match="example_inputs is empty"):
        parallelize(model, example_inputs={}, loss_fn=mean_square)
    with pytest.raises(CaptureError, match="loss_fn is of type str"):
        parallelize(model, example_inputs={"x": x}, loss_fn="mse")  # type: ignore[arg-type]


def test_a_loss_fn_that_returns_no_loss() -> None:
    model, x = Open(), torch.zeros(2, 4, DIM)
    try:  # what is returned is known in the capture, for which there is a process group
        with pytest.raises(CaptureError, match="loss_fn returned a tuple; return the loss alone"):
            parallelize(model, example_inputs={"x": x}, loss_fn=lambda out, batch: (out.mean(), out))  # type: ignore[arg-type,return-value]
    finally:
        torch.distributed.destroy_process_group()


def test_a_loss_of_every_sample_and_an_input_that_the_batch_lacks() -> None:
    example = {"input": torch.randn(4, 3), "labels": torch.randn(4, 3)}
    with pytest.raises(
        CaptureError, match=r"loss_fn returned a loss of 1 dims; the loss is a scalar, such as its mean"
    ):
        capture(nn.Linear(3, 3), example, lambda out, batch: (out - batch["labels"]).square().sum(-1))
    with pytest.raises(CaptureError, match=r"KeyError: 'target'; the batch has input, labels"):
        capture(nn.Linear(3, 3), example, lambda out, batch: (out - batch["target"]).square().mean())


def test_a_model_that_is_wrapped_for_several_devices() -> None:
    with pytest.raises(CaptureError, match=r"wrapped in DataParallel, .* give the model inside it, model\.module"):
        capture(nn.DataParallel(nn.Linear(3, 3)), {"input": torch.randn(4, 3)}, lambda out, batch: out.mean())


def test_samples_that_there_may_not_be(capfd: pytest.CaptureFixture[str]) -> None:
    """The largest losses of a batch, and what torch finds for some numbers of samples only; no page of torch beside."""
    example = {"input": torch.randn(8, 3), "labels": torch.randn(8, 3)}

    def hardest(out: torch.Tensor, batch: Any) -> torch.Tensor:
        return (out - batch["labels"]).square().sum(-1).topk(4).values.mean()

    def read(out: torch.Tensor, batch: Any) -> torch.Tensor:
        return out.square().mean() * (2.0 if out.sum().item() > 0 else 1.0)

    with pytest.raises(CaptureError, match="topk takes more samples than a micro-batch may have"):
        capture(nn.Linear(3, 3), example, hardest)
    with pytest.raises(CaptureError, match="Python reads the value of a tensor here"):
        capture(nn.Linear(3, 3), example, read)
    assert capfd.readouterr().err == ""


def test_an_optimizer_that_is_no_factory() -> None:
    model, batch = Open(), {"x": torch.zeros(2, 4, DIM)}
    made = torch.optim.SGD(model.parameters(), lr=0.5)
    with pytest.raises(PinError, match=r"of type SGD; .*: functools.partial\(torch.optim.SGD, lr=0.5\)$"):
        parallelize(model, example_inputs=batch, loss_fn=mean_square, optimizer=made)  # type: ignore[arg-type]
    with pytest.raises(PinError, match="of type str"):
        parallelize(model, example_inputs=batch, loss_fn=mean_square, optimizer="adamw")  # type: ignore[arg-type]


def test_a_tensor_that_stands_for_several_is_refused_by_name() -> None:
    """As torchao's quantised weights."""
    from torch.testing._internal.two_tensor import TwoTensor

    model = nn.Linear(4, 4)
    weight = TwoTensor(torch.randn(4, 4), torch.randn(4, 4))
    model.weight = nn.Parameter(weight)
    with pytest.raises(CaptureError, match=r"'weight' is a TwoTensor .*cannot be split; give plain tensors"):
        capture(model, {"input": torch.randn(2, 4)}, lambda out, batch: out.square().mean())


def test_a_class_that_turns_its_cache_off_itself_is_not_told_to_again() -> None:
    """As T5Gemma's classifier, whose forward does not name use_cache, and has it beside its **kwargs."""
    from transformers import LlamaConfig, LlamaPreTrainedModel
    from transformers.models.llama.modeling_llama import LlamaModel

    class Scorer(LlamaPreTrainedModel):
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            self.model, self.score = LlamaModel(config), nn.Linear(config.hidden_size, 1)

        def forward(self, input_ids: torch.Tensor, **more: Any) -> torch.Tensor:
            hidden = self.model(input_ids, use_cache=False, **more).last_hidden_state
            out: torch.Tensor = self.score(hidden)
            return out

    model, batch = Scorer(LlamaConfig(**models.DENSE)), {"input_ids": models.token_batch(4, 8)["input_ids"]}
    assert_equal(model, batch, mean_square, **batch)


class Quantised(nn.Module):
    """A frozen weight in 8 bits with a scale per row, and a small trained one on top."""

    def __init__(self, inside: int, out: int) -> None:
        super().__init__()
        weight = torch.randn(out, inside)
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("numbers", (weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale.double())
        self.down, self.up = nn.Linear(inside, 2, bias=False), nn.Linear(2, out, bias=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.up(self.down(input))
        return out + nn.functional.linear(input, self.numbers.to(input.dtype) * self.scale)


def test_a_weight_in_8_bits_below_a_trained_one() -> None:
    torch.manual_seed(0)
    model, example = (
        nn.Sequential(Quantised(8, 16), nn.GELU(), Quantised(16, 8)).double(),
        {"input": torch.randn(4, 8).double()},
    )

    def loss(out: torch.Tensor, batch: object) -> torch.Tensor:
        return out.square().mean()

    assert verify_whole(VerifyTask(model, capture(model, example, loss), example, loss), limit_s=60.0).done
