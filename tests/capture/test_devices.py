"""Where ranks run: the choice as a table of what a process sees, without any GPU."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from plain_models import assert_equal, filled
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autoplan import devices
from autoplan.capture.export import capture
from autoplan.capture.frontend.host import examples_on_host, module_on_host
from autoplan.devices import DevicePlace, Sight, device_kind, pick, read, settle, size_of_job
from autoplan.errors import CaptureError, DeviceError
from experiments.compatibility.families import class_loss

FOUR = Sight(num_gpus=4)


def seen(**environment: str) -> Sight:
    return replace(FOUR, environment=environment)


CUDA = {"cuda": "nccl"}
PICKED: list[tuple[str | None, str, Sight, str]] = [
    (None, "cpu", FOUR, "cpu"),
    ("cpu", "cpu", FOUR, "cpu"),
    (None, "cuda", seen(LOCAL_RANK="3"), "cuda:3"),
    ("cuda", "cuda", seen(LOCAL_RANK="3", LOCAL_WORLD_SIZE="4"), "cuda:3"),
    ("cuda:1", "cuda", seen(LOCAL_RANK="3"), "cuda:1"),
    (None, "cuda", seen(SLURM_LOCALID="2"), "cuda:2"),
    (None, "cuda", seen(OMPI_COMM_WORLD_LOCAL_RANK="1"), "cuda:1"),
    (None, "cuda", seen(LOCAL_RANK="1", SLURM_LOCALID="0"), "cuda:1"),  # torchrun started by Slurm
    # one visible GPU per process, whatever its number on the host
    (None, "cuda", Sight(1, environment={"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"}), "cuda:0"),
    # set by torch.cuda.set_device, bound by device_id=, given by the model: in this order, before LOCAL_RANK
    (None, "cuda", replace(seen(LOCAL_RANK="3"), current=2), "cuda:2"),
    (None, "cuda", replace(seen(LOCAL_RANK="3"), current=2, model=torch.device("cuda:1")), "cuda:1"),
    (None, "cuda", replace(FOUR, model=torch.device("cuda:1"), bound=torch.device("cuda:3")), "cuda:3"),
    ("cuda:3", "cuda", replace(FOUR, bound=torch.device("cuda:3")), "cuda:3"),
    ("cuda:2", "cuda", replace(FOUR, model=torch.device("cuda:1")), "cuda:2"),
    (None, "cuda", FOUR, "cuda:0"),  # one process, or told apart later by what the others picked
    (None, "cuda", replace(seen(LOCAL_RANK="1"), backends={"cpu": "gloo", "cuda": "nccl"}), "cuda:1"),
]


@pytest.mark.parametrize(("requested", "kind", "sight", "want"), PICKED)
def test_picked(requested: str | None, kind: str, sight: Sight, want: str) -> None:
    assert pick(read(requested), kind, sight) == torch.device(want)


REFUSED: list[tuple[Any, str, Sight, str]] = [
    (None, "cuda", seen(LOCAL_RANK="5"), r"LOCAL_RANK=5, but the process sees 4 GPUs: .*-per-node 4.*device='cpu'"),
    # all ranks of the host alike, not only those without a GPU
    (None, "cuda", seen(LOCAL_RANK="0", LOCAL_WORLD_SIZE="8"), r"LOCAL_WORLD_SIZE=8, but the process sees 4 GPUs"),
    (None, "cuda", Sight(), r"to run on CUDA devices, but the process sees no GPU; .*device='cpu' with cluster='lo"),
    (None, "cuda", Sight(environment={"CUDA_VISIBLE_DEVICES": ""}), r"no GPU \(CUDA_VISIBLE_DEVICES=''\)"),
    ("cuda:4", "cuda", FOUR, r"'cuda:4' does not exist: the process sees 4 GPUs; the last is 'cuda:3'"),
    ("cpu", "cuda", FOUR, r"device='cpu', but the cluster has cuda devices; .*cluster='local'"),
    ("cuda", "cpu", FOUR, r"device='cuda', but the cluster has cpu devices"),
    ("tpu", "cpu", FOUR, r"device='tpu' is not a device; use 'cpu', 'cuda' or 'cuda:1'"),
    ("xpu", "cpu", FOUR, r"device='xpu': programs run on the CPU or on CUDA"),
    (3.5, "cpu", FOUR, r"device=3.5 is not a device"),
    (None, "cuda", seen(LOCAL_RANK="first"), r"LOCAL_RANK='first' is not a number"),
    ("cuda:1", "cuda", replace(FOUR, bound=torch.device("cuda:2")), r"bound to cuda:2 \(device_id=\)"),
    (None, "cpu", replace(FOUR, backends=CUDA), r"no backend for cpu tensors \(it has nccl for cuda\); pass device="),
    ("cuda", "cuda", replace(FOUR, backends={"cpu": "gloo"}), r"no backend for cuda tensors .*cpu:gloo,cuda:nccl"),
]  # fmt: skip


@pytest.mark.parametrize(("requested", "kind", "sight", "message"), REFUSED)
def test_refused(requested: Any, kind: str, sight: Sight, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        pick(read(requested), kind, sight)


@pytest.mark.parametrize(
    ("requested", "sight", "want"),
    [
        (None, Sight(), "cpu"),
        (None, FOUR, "cuda"),
        ("cpu", FOUR, "cpu"),
        ("cuda:1", FOUR, "cuda"),
        (None, replace(FOUR, model=torch.device("cuda:1")), "cuda"),
        (None, replace(FOUR, backends=devices.backends_of("cuda:nccl")), "cuda"),  # a plain init_process_group()
        (None, replace(FOUR, backends=devices.backends_of("cpu:gloo,cuda:nccl")), "cuda"),
        (None, replace(FOUR, backends=devices.backends_of("cpu:gloo,cuda:gloo,xpu:gloo")), "cpu"),
        (None, replace(FOUR, backends=devices.backends_of("cpu:gloo")), "cpu"),
        (
            "cuda",
            replace(FOUR, backends=devices.backends_of("cpu:gloo,cuda:gloo")),
            "cuda",
        ),
    ],
)
def test_kind_of_a_local_cluster(requested: str | None, sight: Sight, want: str) -> None:
    assert device_kind(read(requested), sight) == want


def gpu(index: int, gpu: str, host: str = "a", backend: str = "nccl") -> DevicePlace:
    return DevicePlace(f"cuda:{index}", gpu, host, backend)


def test_ranks_with_a_gpu_each_go_together() -> None:
    found = settle([gpu(0, "u0"), gpu(1, "u1"), gpu(0, "u2", "b"), gpu(0, "u3", "b")], 1)
    assert found == devices.Placement(torch.device("cuda:1"), on_host=2, on_device=1)


def test_ranks_that_share_a_gpu_need_gloo() -> None:
    with pytest.raises(DeviceError, match=r"ranks 1, 2 share cuda:0 of host a, and NCCL takes one rank per GPU"):
        settle([gpu(1, "u1"), gpu(0, "u0"), gpu(0, "u0")], 0)
    shared = [gpu(0, "u0", backend="gloo"), gpu(0, "u0", backend="gloo")]
    assert settle(shared, 1) == devices.Placement(torch.device("cuda:0"), on_host=2, on_device=2)


def test_cpu_ranks_share_their_host() -> None:
    places = [DevicePlace("cpu", "", host, "gloo") for host in "aabb"]
    assert settle(places, 3) == devices.Placement(torch.device("cpu"), on_host=2, on_device=2)


def test_what_one_rank_lacks_every_rank_is_told() -> None:
    places = [gpu(0, "u0"), DevicePlace("cuda", "", "a", "nccl", "no GPU here")]
    for rank in range(2):
        with pytest.raises(DeviceError, match="rank 1: no GPU here"):
            settle(places, rank)
    with pytest.raises(DeviceError, match=r"rank 1 on cpu, rank 0 on cuda; pass device='cpu'"):
        settle([gpu(0, "u0"), DevicePlace("cpu", "", "b", "gloo")], 0)


@pytest.mark.parametrize("name", devices.STARTED_TOGETHER)
def test_processes_that_know_nothing_of_each_other_are_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """srun and mpirun set no RANK: without a word every process would train a model of its own."""
    for variable in ("RANK", *devices.STARTED_TOGETHER):
        monkeypatch.delenv(variable, raising=False)
    for value, told in (("1", False), ("8", True)):
        monkeypatch.setenv(name, value)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            try:
                assert devices.start("cpu", "cpu", 20.0) == devices.Placement(torch.device("cpu"))
            finally:
                dist.destroy_process_group()
        said = [str(w.message) for w in found if "RANK" in str(w.message)]
        assert [f"{name}=8, but RANK is not set" in text and "start torchrun" in text for text in said] == [True] * told


@pytest.mark.parametrize(("kind", "bound"), [("cuda", torch.device("cuda:1")), ("cpu", None)])
def test_a_group_made_here_is_bound_to_the_gpu(
    kind: str, bound: torch.device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`device_id` connects NCCL at the start, and lets the mesh split its groups off the default one."""
    given: dict[str, Any] = {}
    placement = devices.Placement(torch.device("cpu" if bound is None else bound))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(devices, "_meet", lambda *_: placement)
    monkeypatch.setattr(devices, "give_back_at_exit", lambda: given.update(ends="here"))
    monkeypatch.setattr(devices, "init_process_group", lambda backend, **options: given.update(options, of=backend))
    assert devices.start(None, kind, 20.0) is placement
    assert given["device_id"] == bound and given["of"] == devices.BACKENDS[kind] and given["ends"] == "here"


def on_cuda(model: nn.Module) -> nn.Module:
    """The model with parameters and buffers on a GPU that there is none of: fake tensors."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    instead: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None:
                    continue
                if id(tensor) not in instead:
                    with mode:
                        made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda:0")
                    instead[id(tensor)] = nn.Parameter(made) if isinstance(tensor, nn.Parameter) else made
                held[name] = instead[id(tensor)]  # type: ignore[assignment]
    return model


def test_a_model_on_a_gpu_is_captured_with_examples_on_the_host() -> None:
    """As the same model on the host; its tensors are its own again afterwards."""
    want = capture(models.make_llama(num_hidden_layers=2), models.token_batch(2, 16))
    model = on_cuda(models.make_llama(num_hidden_layers=2))
    before = {n: id(p) for n, p in model.named_parameters()}
    assert devices.device_of(model) == torch.device("cuda:0")
    assert capture(model, models.token_batch(2, 16)).content_hash == want.content_hash
    assert {n: id(p) for n, p in model.named_parameters()} == before


def test_tied_parameters_stay_one_on_the_host() -> None:
    model = on_cuda(models.make_llama(num_hidden_layers=1, tie_word_embeddings=True))
    with module_on_host(model):
        found = {p.device.type for p in (*model.parameters(), *model.buffers())}
        assert found == {"cpu"}
        assert model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")
    assert {p.device.type for p in model.parameters()} == {"cuda"}


class Positions(nn.Module):
    """Layers of its own, positions in a buffer, and targets that its loss reads beside the output."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) * self.scale + torch.arange(ids.shape[1], device=ids.device).unsqueeze(-1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def test_a_model_without_values_is_captured_as_one_with_values() -> None:
    ids = torch.zeros(2, 3, dtype=torch.int64)
    batch = {"ids": ids, "labels": ids}

    def loss(out: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(out.flatten(0, 1), batch["labels"].flatten())

    with torch.device("meta"):
        empty = Positions()
    assert capture(empty, batch, loss) == capture(Positions(), batch, loss)
    assert {t.device.type for t in (*empty.parameters(), *empty.buffers())} == {"meta"}


def test_examples_come_to_the_host() -> None:
    with FakeTensorMode():
        given = {"x": torch.empty(2, 3, device="cuda:0"), "y": torch.empty(2, 3)}
        found = examples_on_host(given)
    assert {n: x.device.type for n, x in found.items()} == {"x": "cpu", "y": "cpu"}
    assert found["y"] is given["y"]


def test_a_model_on_two_devices_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    on_cuda(model[0])
    with pytest.raises(DeviceError, match=r"'0.weight' on cuda:0.*move it to one, or leave it on the CPU"):
        devices.device_of(model)


def test_tests_see_no_gpu() -> None:
    assert not torch.cuda.is_available()


class Moves(nn.Module):
    """Moves a part to where its input is, as code without a device of its own does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last.to(x.device)(self.first.to(x)(x).tanh())
        return out


def test_a_forward_may_move_a_module_to_where_it_is() -> None:
    batch = {"x": torch.randn(4, 4, dtype=torch.float64), "labels": torch.tensor([0, 1, 2, 0])}
    assert_equal(filled(Moves()), batch, class_loss, ("tp 2",))


def test_a_forward_that_casts_a_module_is_refused() -> None:
    class Casts(Moves):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.first.float().weight.sum()

    with pytest.raises(CaptureError, match="the forward moves or casts a module"):
        capture(Casts().double(), {"x": torch.zeros(4, 4, dtype=torch.float64)}, lambda out, _: out.mean())


def test_variables_of_torchrun_that_are_wrong_are_named() -> None:
    """Missing ones, words, and a rank that is none of the job's, which would wait for the others."""
    whole = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "29500"}
    assert (size_of_job(whole), size_of_job({}), size_of_job({"WORLD_SIZE": "1"})) == (2, 1, 1)
    for changed, said in {
        "WORLD_SIZE": "RANK=1, but WORLD_SIZE is not set: start the script with torchrun",
        "MASTER_ADDR MASTER_PORT": "RANK=1, but MASTER_ADDR, MASTER_PORT are not set",
        "RANK": "WORLD_SIZE=2, but RANK is not set: .* or unset WORLD_SIZE to train by one process",
        "RANK=x": "RANK='x' must be a whole number of at least 0 and below WORLD_SIZE=2",
        "RANK=2": "RANK='2' must be .* below WORLD_SIZE=2",
        "WORLD_SIZE=0": "WORLD_SIZE='0' must be a whole number of at least 1; torchrun sets it",
        "MASTER_PORT=http": "MASTER_PORT='http' must be a whole number",
    }.items():
        name, equals, value = changed.partition("=")
        given = {**whole, name: value} if equals else {n: x for n, x in whole.items() if n not in changed.split()}
        with pytest.raises(DeviceError, match=said):
            size_of_job(given)
