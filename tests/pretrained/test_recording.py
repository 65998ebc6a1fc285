"""The initialisation of models on the meta device: of numbers, of values, and what torch leaves undone there."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import models
import numpy as np
import pretrained_jobs
import pytest
import torch
from harness import pool
from torch import nn
from torch.nn.init import trunc_normal_

from autoplan.errors import CaptureError
from autoplan.pretrained.weights import values_of


class Weight(nn.Module):
    """A weight and a buffer, without an initialisation of their own."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(*shape, dtype=dtype))
        self.b: torch.Tensor
        self.register_buffer("b", torch.empty(4))


def started(init: Callable[[Any], Any], *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Return the weight that an initialisation makes on the meta device; its buffer is filled here."""

    def both(model: Any) -> None:
        init(model)
        model.b.fill_(1.0)

    with torch.device("meta"):
        model = Weight(*(shape or (4,)), dtype=dtype)
    values, buffers = values_of(model, None, both, seed)
    assert buffers["b"].eq(1).all() and torch.equal(values["w"], values["w"])
    return values["w"]


NUMBERS = [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.tensor(NUMBERS, device=p.device),
        lambda p: torch.tensor(np.array(NUMBERS), device=p.device),
        lambda p: torch.as_tensor(NUMBERS, device=p.device, dtype=p.dtype),
        lambda p: torch.as_tensor(np.array(NUMBERS, np.float32), device=p.device),
        lambda p: torch.asarray(obj=NUMBERS, device=p.device),
        lambda p: torch.from_numpy(np.array(NUMBERS)).to(p.device),
        lambda p: torch.FloatTensor(NUMBERS).to(p),
        lambda p: torch.as_tensor(torch.tensor(NUMBERS), device=p.device),
        lambda p: p.new_tensor(NUMBERS),
        lambda p: p.new(NUMBERS),
        lambda p: torch.tensor(data=1.0, device=p.device) + torch.arange(4, device=p.device),
        lambda p: torch.linspace(1, 4, 4, device=p.device),
        lambda p: 1 + torch.cumsum(torch.ones_like(p), 0) - torch.ones(4, 4).to(p).fill_diagonal_(1.0)[0],
        lambda p: torch.tensor([float(n) for n in torch.linspace(1, 4, 4, device=p.device)], device=p.device),
        lambda p: torch.from_numpy(torch.linspace(1, 4, 4, device=p.device).numpy() * 1).to(p),
        lambda p: torch.linspace(1, 4, 4, device=p.device).cpu().to(p.device),
        lambda p: torch.tensor(torch.linspace(1, 4, 4, device=p.device).tolist(), device=p.device),
        lambda p: (torch.arange(8, device=p.device) % 2 * torch.arange(8, device=p.device)).unique()[:1] + 1
        + torch.arange(7, device=p.device)[torch.arange(7, device=p.device) < 4],
    ],
)  # fmt: skip
def test_tensors_of_numbers_have_their_values(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def copied(model: Any) -> None:
        nn.init.normal_(model.w)
        model.w.copy_(make(model.w))

    def in_place_of_data(model: Any) -> None:
        nn.init.normal_(model.w)
        model.w.data = make(model.w).to(model.w.dtype)

    def replaced(model: Any) -> None:
        model.w = nn.Parameter(make(model.w).float())

    def under_a_device(model: Any) -> None:
        with torch.device("meta"):
            model.w.copy_(make(model.w))

    for init in (copied, in_place_of_data, replaced, under_a_device):
        assert started(init).tolist() == NUMBERS, init


def test_buffers_of_numbers_have_their_values() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.empty(4))
            self.register_buffer("steps", torch.empty(4))
            self.register_buffer("frequencies", torch.empty(4))

        def reset_parameters(self) -> None:
            with torch.no_grad():
                self.scale.copy_(torch.tensor(NUMBERS, device=self.scale.device))
                self.steps.copy_(torch.tensor(NUMBERS, device=self.scale.device) * 2)
            self.frequencies = torch.tensor(NUMBERS, device=self.scale.device) ** 2

    with torch.device("meta"):
        model = Scaled()
    values, buffers = values_of(model, None, None, 0)
    assert values["scale"].tolist() == NUMBERS
    assert buffers["steps"].tolist() == [2, 4, 6, 8] and buffers["frequencies"].tolist() == [1, 4, 9, 16]


# -- initialisations that torch does not run on the meta device --------------------------------------------------------


def truncated(w: torch.Tensor) -> None:
    trunc_normal_(w, std=0.02, a=-0.03, b=0.03)


def tail(w: torch.Tensor) -> None:
    trunc_normal_(w, std=1.0, a=1.5, b=3.0)


def sparse(w: torch.Tensor) -> None:
    nn.init.sparse_(w, 0.25, std=0.5)


def rejected(w: torch.Tensor) -> torch.Tensor:
    """A copy of torch's truncated normal: it asks what it has drawn, and nothing of a tensor on the meta device."""
    if w.is_meta:
        return w
    w.normal_()
    while bool((mask := w.abs() > 1).any()):
        w.copy_(torch.where(mask, torch.empty_like(w).normal_(), w))
    return w


INITS = [truncated, tail, nn.init.orthogonal_, sparse, rejected]


@pytest.mark.parametrize("fill", INITS)
@pytest.mark.parametrize("before", [False, True])
def test_initialisations_that_ask_for_the_device_have_their_distribution(
    fill: Callable[[torch.Tensor], Any], before: bool
) -> None:
    def init(model: Any) -> None:
        if before:
            model.w.uniform_(-9, 9)
        fill(model.w)

    found = started(init, 96, 64)
    wanted = Weight(96, 64)
    torch.manual_seed(0)
    with torch.no_grad():
        init(wanted)
    real = wanted.w.detach()
    assert abs(float(found.std() - real.std())) < 0.06 * float(real.std())
    assert abs(float(found.mean() - real.mean())) < 0.07 * float(real.std())
    assert float(found.max() - found.min()) <= 1.6 * float(real.max() - real.min())
    if fill is truncated:
        assert float(found.abs().max()) <= 0.03
    if fill is tail:
        assert float(found.min()) >= 1.5 and float(found.max()) <= 3
    if fill is nn.init.orthogonal_:
        assert torch.allclose(found.T @ found, torch.eye(64), atol=1e-5)
    if fill is sparse:
        assert found.eq(0).sum(0).eq(24).all()
    assert not torch.equal(found, started(init, 96, 64, seed=1))


def test_dirac_and_eye_are_theirs() -> None:
    kernel = started(lambda model: nn.init.dirac_(model.w, 2), 4, 2, 3)
    assert torch.equal(kernel, nn.init.dirac_(torch.empty(4, 2, 3), 2))
    assert torch.equal(started(lambda model: nn.init.eye_(model.w), 3, 5), torch.eye(3, 5))


def test_initialisations_reach_views_and_copies_of_other_dtypes() -> None:
    """As transformers makes orthogonal matrices of 16 bits, and a module parts of one weight."""

    def init(model: Any) -> None:
        for part in model.w.chunk(2):
            single = torch.empty_like(part, dtype=torch.float32)
            nn.init.orthogonal_(single, gain=2.0)
            part.copy_(single)

    found = started(init, 8, 8, dtype=torch.bfloat16).float()
    for part in found.chunk(2):
        assert torch.allclose(part @ part.T, 4 * torch.eye(4), atol=0.1)


def test_a_generator_gives_no_values_of_its_own() -> None:
    """Its numbers would be others on every rank that asks."""
    generator = torch.Generator().manual_seed(3)
    one = started(lambda model: model.w.normal_(generator=generator), 64)
    other = started(lambda model: model.w.normal_(generator=generator.manual_seed(4)), 64)
    assert torch.equal(one, other) and one.std() > 0.5


def test_random_numbers_of_the_host_depend_on_the_seed_alone() -> None:
    def init(model: Any) -> None:
        model.w.copy_(torch.randn(4) + torch.from_numpy(np.random.rand(4)))

    torch.manual_seed(1)
    np.random.seed(1)
    one, after = started(init), (torch.rand(1), np.random.rand())
    torch.manual_seed(2)
    np.random.seed(2)
    assert torch.equal(one, started(init)) and not torch.equal(one, started(init, seed=1))
    torch.manual_seed(1)
    np.random.seed(1)
    assert after == (torch.rand(1), np.random.rand())


def test_metadata_that_changes_later_is_not_taken_for_that_of_before() -> None:
    def init(model: Any) -> None:
        turned = torch.empty(2, 3, device="meta")
        turned.copy_(torch.arange(6.0).view(2, 3))
        turned.t_()
        model.w.copy_(turned)

    assert started(init, 3, 2).tolist() == [[0, 3], [1, 4], [2, 5]]


# -- what has no values is refused -------------------------------------------------------------------------------------


def half(model: Any) -> None:
    model.w[:2].normal_()


def scaled(model: Any) -> None:
    model.w.mul_(2.0)


def of_nothing(model: Any) -> None:
    model.w.copy_(torch.empty(4, device="meta") + 1)


def first_then_nothing(model: Any) -> None:
    model.w.normal_()
    model.w.copy_(torch.empty_like(model.w))


@pytest.mark.parametrize("init", [half, scaled, of_nothing, first_then_nothing])
def test_values_that_nothing_wrote_are_never_read(init: Callable[[Any], Any]) -> None:
    with pytest.raises(CaptureError, match=r"'w' is on the meta device.*init.*pass init="):
        started(init)


def test_parts_that_make_a_whole_are_values() -> None:
    def init(model: Any) -> None:
        for i, row in enumerate(model.w):
            row[1::2].fill_(i)
            row[0::2] = -1.0

    assert started(init, 2, 4).tolist() == [[-1, 0, -1, 0], [-1, 1, -1, 1]]


def test_what_asks_for_values_that_are_not_there_is_refused() -> None:
    with pytest.raises(
        CaptureError, match=r"init asks for the values of a tensor that has none yet \(aten._local.*pass init="
    ):
        started(lambda model: model.w.fill_(float(model.w[0])))
    with pytest.raises(CaptureError, match=r"init cannot run on the meta device.*weights="):
        started(lambda model: model.w.untyped_storage().tolist())


def test_the_module_that_cannot_start_is_named() -> None:
    class Asking(Weight):
        def reset_parameters(self) -> None:
            self.b.fill_(float(self.w.norm()))

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(Asking(2, 2)))
    with pytest.raises(CaptureError, match=r"asks for the values of a tensor that has none yet .* \(in '1.0'\)"):
        values_of(model, None, None, 0)


def test_a_module_comes_after_its_parts() -> None:
    """As in constructors: it may fill the parameters of modules that have an initialisation of their own."""
    arguments: Any = {
        "d_model": 16,
        "nhead": 2,
        "num_encoder_layers": 1,
        "num_decoder_layers": 1,
        "batch_first": True,
    }
    torch.manual_seed(0)
    real = nn.Transformer(**arguments)
    values, _ = values_of(nn.Transformer(**arguments, device="meta"), None, None, 0)
    for name, value in real.named_parameters():
        assert models.alike(value.detach(), values[name]), name
    assert values["encoder.layers.0.self_attn.out_proj.bias"].eq(0).all()


def test_what_has_values_keeps_them() -> None:
    """Trained layers under a new head on the meta device."""
    trained = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    trained[1].running_mean.fill_(5.0)  # type: ignore[union-attr, operator]
    before = {n: t.clone() for n, t in trained.state_dict().items()}
    values, buffers = values_of(nn.Sequential(trained, nn.Linear(3, 2, device="meta")), None, None, 0)
    assert values["1.weight"].std() > 0
    for name, tensor in before.items():
        assert torch.equal({**values, **buffers}[f"0.{name}"], tensor), name


def test_a_parameter_of_another_shape_is_refused() -> None:
    def init(model: Any) -> None:
        model.w = nn.Parameter(torch.ones(5, device="meta"))

    with pytest.raises(CaptureError, match=r"another shape or dtype, \(5,\) in torch.float32 in place of 'w'"):
        started(init)


def test_a_question_for_the_device_is_refused() -> None:
    def init(model: Any) -> None:
        model.w.normal_()
        if model.w.device.type != "meta":
            nn.init.ones_(model.w)

    with pytest.raises(CaptureError, match=r"asks whether a tensor is on the meta device"):
        started(init)


# -- models of transformers --------------------------------------------------------------------------------------------

TEXT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
IMAGE = {**TEXT, "image_size": 32, "patch_size": 8}
IDS = {"vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.parametrize(
    ("name", "config", "arguments"),
    [
        ("RwkvForCausalLM", "RwkvConfig", {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128}),
        ("ModernBertForMaskedLM", "ModernBertConfig", {**TEXT, **IDS, "cls_token_id": 1, "sep_token_id": 2}),
        ("ViTForImageClassification", "ViTConfig", IMAGE),
        ("ViTMAEForPreTraining", "ViTMAEConfig", {**IMAGE, "decoder_hidden_size": 32, "decoder_num_hidden_layers": 1}),
        ("XLNetModel", "XLNetConfig", {"vocab_size": 128, "d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 96}),
        ("CLIPModel", "CLIPConfig", {"text_config": {**TEXT, "vocab_size": 128}, "vision_config": IMAGE}),
        ("SiglipModel", "SiglipConfig", {"text_config": {**TEXT, "vocab_size": 128}, "vision_config": IMAGE}),
    ],
)
def test_models_start_with_the_distribution_of_their_class(name: str, config: str, arguments: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")

    def made(device: str) -> Any:
        with torch.device(device):
            return getattr(transformers, name)(getattr(transformers, config)(**arguments))

    torch.manual_seed(0)
    real = made("cpu")
    values, buffers = values_of(made("meta"), None, None, 0)
    for which, value in real.named_parameters():
        assert models.alike(value.detach(), values[which]), which
    for which, value in real.named_buffers():
        assert torch.equal(value, buffers[which]), which


@pytest.mark.processes
@pytest.mark.parametrize("pins", [{"tp": 2}, pytest.param({"dp": 2, "zero_stage": 3}, marks=pytest.mark.slow)])
def test_they_are_the_same_under_every_plan(pins: dict[str, Any]) -> None:
    values, _ = values_of(pretrained_jobs.drawn(), None, None, seed=5)
    for found in pool(2).run(pretrained_jobs.drawn_state, pins, timeout_s=120):
        assert set(found) == set(values) and all(torch.equal(found[n], values[n]) for n in values)
    assert abs(float(values["0.up.weight"].std()) - 0.02) < 2e-3


def test_the_truncation_of_a_class_is_kept() -> None:
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.ViTModel(transformers.ViTConfig(**{**IMAGE, "initializer_range": 1.0}))
    values, _ = values_of(model, None, None, 0)
    weight = values["embeddings.position_embeddings"]
    assert float(weight.abs().max()) <= 2 and math.isclose(float(weight.std()), 0.88, abs_tol=0.03)
