"""Models that no rank ever has whole: values of their own, or from files, and back into files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import models
import pretrained_jobs
import pytest
import torch
from harness import pool
from torch import nn

from autoplan.errors import CaptureError
from autoplan.pretrained import export
from autoplan.pretrained.export import Exporter
from autoplan.pretrained.weights import Weights, is_empty, values_of
from autoplan.runtime.values import Recording

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed._functional_collectives.*:FutureWarning")


def equal(a: Any, b: Any) -> bool:
    return set(a) == set(b) and all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("family", "pins"),
    [
        pytest.param("tied", {"dp": 2, "zero_stage": 3}),
        pytest.param("mixtral", {"tp": 2}, marks=pytest.mark.slow),
        pytest.param("llama", {"pp": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_model_starts_without_being_whole(family: str, pins: dict[str, Any], tmp_path: Path) -> None:
    real = pretrained_jobs.made(family, "cpu")
    real.save_pretrained(tmp_path / "given")
    arguments = family, pins, str(tmp_path / "given"), str(tmp_path / "saved")
    found, _ = pool(2).run(pretrained_jobs.start, *arguments, timeout_s=200)
    assert equal(found["weights"], real.state_dict())
    assert found["loss"] == pytest.approx(float(real(**models.token_batch(2, 16)).loss.detach()), rel=1e-6)
    assert equal(type(real).from_pretrained(tmp_path / "saved").state_dict(), real.state_dict())
    # the same values on one process, in distribution those of the class
    one, _ = values_of(pretrained_jobs.made(family, "meta"), None, None, seed=5)
    assert all(torch.equal(one[name], found["own"][name]) for name in one)
    for name, value in real.named_parameters():
        assert abs(float(one[name].std(correction=0)) - float(value.detach().std(correction=0))) < 4e-3, name
    other, _ = values_of(pretrained_jobs.made(family, "meta"), None, None, seed=6)
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


@pytest.mark.processes
@pytest.mark.slow
def test_what_gives_no_values_is_one_error(tmp_path: Path) -> None:
    pretrained_jobs.made("llama", "cpu").save_pretrained(tmp_path)
    first, second = pool(2).run(pretrained_jobs.refusals, str(tmp_path), timeout_s=120)
    assert first == second
    assert "cannot be read: there is no such folder; give one that save_pretrained wrote" in first["no weights"]
    assert "cannot be read: it has neither model.safetensors.index.json nor model.safetensors" in first["empty folder"]
    assert first["none on one rank"].startswith("rank 1: weights=")
    assert "lack model.layers.0.mlp.experts.down_proj" in first["other weights"]
    assert "'model.layers.0" in first["half an init"] and "init does not give it any" in first["half an init"]


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="setrlimit(2) of Linux limits private memory")
def test_a_model_larger_than_the_memory_of_a_process_starts() -> None:
    """Half of it under ZeRO 3 fits beside a limit that is three quarters of it; built whole it does not."""
    for found in pool(2).run(pretrained_jobs.limited, 0.75, timeout_s=120):
        assert "can't allocate memory" in found["whole"]  # negative control
        assert found["loss"] == 9
        assert found["total"] / 2 < found["private"] < 0.75 * found["total"]


# -- one process ------------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """Modules with several ways of initialisation, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 4, padding_idx=2)
        self.attention, self.norm = nn.MultiheadAttention(4, 2), nn.BatchNorm1d(4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))


def test_the_initialisation_of_plain_modules_is_theirs() -> None:
    with torch.device("meta"):
        model = Plain()
    assert is_empty(model) and not is_empty(Plain())
    values, buffers = values_of(model, None, None, seed=0)
    assert values["tokens.weight"][2].eq(0).all() and values["tokens.weight"][3].ne(0).all()
    assert values["attention.in_proj_bias"].eq(0).all() and values["norm.weight"].eq(1).all()
    assert buffers["norm.running_var"].eq(1).all() and buffers["norm.num_batches_tracked"] == 0
    assert not torch.equal(values["layers.0.weight"], values["layers.1.weight"])
    assert torch.equal(values["layers.0.weight"], values["layers.0.weight"])


def test_what_init_does_is_done() -> None:
    """Parents that change the parameters of children, views, products of other tensors, and numbers of torch.tensor."""

    def init(model: nn.Module) -> None:
        for p in model.parameters():
            p.data.fill_(1.0)
        for i, layer in enumerate(model.layers):  # type: ignore[arg-type]
            layer.weight.normal_().mul_(1 / (i + 1))
            layer.weight[1:3, 0] = 7.0
        model.layers[2].weight.copy_(model.layers[0].weight @ torch.full((4, 4), 2.0, device="meta"))  # type: ignore
        model.layers[0].bias.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))  # type: ignore

    with torch.device("meta"):
        model = Plain()
    values, _ = values_of(Plain().to("cpu"), None, None, seed=0)
    recording = Recording(0)
    with torch.no_grad(), recording:
        init(model)
    first = recording.values(model.layers[0].weight)  # type: ignore[arg-type]
    assert first[1:3, 0].eq(7).all() and first.std() > 0.5
    assert torch.allclose(recording.values(model.layers[2].weight), first @ torch.full((4, 4), 2.0))  # type: ignore
    assert recording.values(model.layers[0].bias).tolist() == [1, 2, 3, 4]  # type: ignore[arg-type]
    assert not recording.gives(model.norm.running_mean)  # type: ignore[arg-type]
    assert values["norm.weight"].eq(1).all()


def test_a_parameter_without_a_way_to_begin_is_named() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), Scaled())
    with pytest.raises(CaptureError, match=r"'1.scale' is on the meta device .* Scaled has no reset_parameters"):
        values_of(model, None, None, seed=0)


def test_weights_of_plain_modules_go_by_their_names(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    real = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    safetensors.save_model(real, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    values, _ = values_of(model, tmp_path, None, seed=0)
    assert equal(values, {n: p.detach() for n, p in real.named_parameters()})
    with torch.device("meta"):
        wider = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    with pytest.raises(CaptureError, match=r"1\.weight has shape \(2, 4\), and the model's \(3, 4\)"):
        values_of(wider, tmp_path, None, seed=0)
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-1])
    with pytest.raises(CaptureError, match="cannot be read"):
        Weights(tmp_path, model)


def test_masters_are_written_in_the_dtype_of_the_model(tmp_path: Path) -> None:
    """As its config says; mixed precision keeps them in float32."""
    real = pretrained_jobs.made("mixtral", "cpu").to(torch.bfloat16)
    masters = {n: t.float() * (1 + 2**-12) for n, t in real.state_dict().items()}
    Exporter(real).write(tmp_path, masters.__getitem__, 0, torch.device("cpu"))
    found = type(real).from_pretrained(tmp_path)
    assert found.dtype == torch.bfloat16
    assert equal(found.state_dict(), {n: t.to(torch.bfloat16) for n, t in masters.items()})


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    """They have the shape of the parameter, and without their scales are other weights."""
    safetensors = pytest.importorskip("safetensors.torch")
    for dtype in (torch.float8_e4m3fn, torch.int8):
        state = {"weight": torch.ones(4, 3).to(dtype), "weight_scale_inv": torch.ones(1), "bias": torch.ones(4)}
        safetensors.save_file(state, tmp_path / "model.safetensors")
        with pytest.raises(CaptureError, match=rf"weight is in {dtype}, as quantized weights are"):
            values_of(nn.Linear(3, 4), tmp_path, None, seed=0)


@pytest.mark.parametrize("sizes", [(20_000, 10**9), (10**9, 20_000), (20_000, 60_000)])
def test_files_of_an_earlier_model_are_not_left(
    sizes: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers reads a single file first, we the index: either may be of the model before."""
    real = pretrained_jobs.made("llama", "cpu")
    before = {n: t.clone() for n, t in real.state_dict().items()}
    after = {n: t + 1 for n, t in before.items()}
    for size, state in zip(sizes, (before, after), strict=True):
        monkeypatch.setattr(export, "SHARD_BYTES", size)
        Exporter(real).write(tmp_path, state.__getitem__, 0, torch.device("cpu"))
    assert equal(type(real).from_pretrained(tmp_path).state_dict(), after)
    values, _ = values_of(pretrained_jobs.made("llama", "meta"), tmp_path, None, seed=0)
    assert equal(values, {n: after[n] for n, _ in real.named_parameters()})
    index = tmp_path / "model.safetensors.index.json"
    named = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    assert {path.name for path in tmp_path.glob("*.safetensors")} == named


def test_files_are_cut_at_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `save_pretrained` does: an index, files that transformers reads, and experts under the names of its files."""
    monkeypatch.setattr(export, "SHARD_BYTES", 20_000)
    real = pretrained_jobs.made("mixtral", "cpu")
    state = {n: t.clone() for n, t in real.state_dict().items()}
    asked: list[str] = []

    def whole(name: str) -> torch.Tensor:
        asked.append(name)
        return state[name]

    Exporter(real).write(tmp_path, whole, 0, torch.device("cpu"))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2 and sorted(asked) == sorted(state)
    assert "model.layers.0.block_sparse_moe.experts.3.w1.weight" in index["weight_map"]
    assert equal(type(real).from_pretrained(tmp_path).state_dict(), state)
    with torch.device("meta"):
        values, _ = values_of(pretrained_jobs.made("mixtral", "meta"), tmp_path, None, seed=0)
    assert equal(values, {n: p.detach() for n, p in real.named_parameters()})
