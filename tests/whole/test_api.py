"""The door, as a user walks through it, and everything it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import api_jobs
import models
import pytest
import torch
from harness import Pool, pool
from parity import spread_out

import autoplan
from autoplan.api import plan_program
from autoplan.capture.export import capture
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.errors import PinError
from autoplan.runtime.optim import check_elementwise

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed._functional_collectives.*:FutureWarning")


@pytest.mark.processes
def test_a_model_and_a_cluster_are_enough() -> None:
    """A Hugging Face model without anything else; rank 0's values are used although the ranks' models differ."""
    results = pool(2).run(api_jobs.alone)
    assert results[0] == results[1]
    assert results[0][0] == pytest.approx(results[0][1], rel=1e-5)


@pytest.mark.processes
@pytest.mark.processes
def test_only_values_that_differ_are_sent() -> None:
    """Tensor by tensor (`autoplan.runtime.whole`: a bucket of device memory each); what is alike stays where it is."""
    wanted = ([0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 3.0], True, [(3,), (4,)])
    assert pool(2).run(api_jobs.values_of_first) == [wanted] * 2


@pytest.mark.parametrize("pins", [{"tp": 2}, {"dp": 2, "zero_stage": 3}, {"pp": 2, "recompute": "full"}], ids=str)
def test_training_goes_down_and_all_ranks_agree(pins: dict[str, Any]) -> None:
    results = pool(2).run(api_jobs.train, pins, pins.get("tp") == 2)
    assert results[0] == results[1]
    assert results[0][-1] < results[0][0] - 0.3


@pytest.mark.processes
@pytest.mark.parametrize("pins", spread_out([{"tp": 2}, {"dp": 2, "zero_stage": 2}, {"pp": 2}], 3), ids=str)
def test_state_dict_moves_between_plans(pins: dict[str, Any]) -> None:
    assert max(pool(2).run(api_jobs.state_round_trip, pins)) < 2e-6


@pytest.mark.processes
@pytest.mark.parametrize("pins", [{"tp": 2}, {"pp": 2, "num_micro_batches": 2}, {"dp": 2, "zero_stage": 3}], ids=str)
def test_shapes_may_change(pins: dict[str, Any]) -> None:
    assert max(pool(2).run(api_jobs.changing_shapes, pins)) < 1e-5


@pytest.mark.processes
@pytest.mark.parametrize(
    "pins", spread_out([{"tp": 2}, {"pp": 2, "recompute": "full"}, {"dp": 2, "zero_stage": 2}], 3), ids=str
)
def test_models_that_are_not_a_plain_stack(pins: dict[str, Any]) -> None:
    assert max(pool(2).run(api_jobs.odd_models, pins)) < 2e-6


@pytest.mark.processes
@pytest.mark.parametrize("pins", spread_out([{"tp": 2}, {"pp": 2}, {"dp": 2, "zero_stage": 2}], 3), ids=str)
def test_bfloat16(pins: dict[str, Any]) -> None:
    """Rounding of 8 bits, summed in another order: a few per cent in the norm of a gradient, not more."""
    for loss, want, worst in pool(2).run(api_jobs.bfloat16, pins):
        assert loss == pytest.approx(want, rel=2e-3)
        assert worst < 0.05


REFUSED = [
    ({"pins": {"tp": 3}}, r"PinError: pin tp=3 does not divide the 2 devices; nearest legal: tp=2"),
    ({"pins": {"tpp": 2}}, r"unknown pin 'tpp'; did you mean 'tp'\?"),
    ({"pins": {"dp": 2, "tp": 2}}, r"dp=2 x tp=2 x pp=1 = 4 devices, but the cluster has 2; nearest legal: dp=1"),
    ({"pins": {"zero_stage": 4}}, r"zero_stage=4 does not exist; use 0, 1, 2 or 3"),
    ({"pins": {"pp": 2, "stages": [4]}}, r"stages=\[4\] has 1 entries for pp=2"),
    ({"pins": {"pp": 2, "stages": [4, 4]}}, r"add up to the model's 4 layers"),
    ({"pins": {"schedule": "ZB"}}, r"schedule='ZB' is not known; use GPipe, 1F1B"),
    ({"pins": {"recompute": "some"}}, r"recompute='some' is not supported; use none, selective, full, offload"),
    ({"pins": {"recompute": {"layer9": "full"}}}, r"recompute names 'layer9', which is not a block"),
    ({"pins": {"num_micro_batches": 0}}, r"num_micro_batches=0: must be a whole number of at least 1"),
    (
        {"cluster": "local:4"},
        r"the cluster has 4 devices but this job has 2 processes; start it with torchrun --nproc-per-node 4",
    ),
    ({"device": "cuda"}, r"DeviceError: the program is to run on CUDA devices, but the process sees no GPU \(CUDA_VIS"),
    ({"device": "tpu"}, r"DeviceError: device='tpu' is not a device; use 'cpu', 'cuda' or 'cuda:1'"),
    ({"seed": "a"}, r"seed='a' must be a whole number of 64 bits"),
    ({"init": print}, r"init= gives values to a model on the meta device, and all tensors of this one have theirs"),
    ({"cluster": "h1000"}, r"cluster 'h1000' is not known; use 'local'"),
]


@pytest.mark.processes
@pytest.mark.parametrize(("kwargs", "message"), REFUSED, ids=[str(k) for k, _ in REFUSED])
def test_refused_alike_on_every_rank(kwargs: dict[str, Any], message: str) -> None:
    import re

    results = pool(2).run(api_jobs.refused, kwargs)
    assert results[0] == results[1]
    assert re.search(message, results[0]), results[0]


@pytest.mark.processes
def test_uncapturable_on_every_rank() -> None:
    first, second = pool(2).run(api_jobs.refused, {}, "gpt")
    assert first == second and "example_inputs is needed" in first


@pytest.mark.processes
def test_an_error_while_rank_0_plans_reaches_everybody() -> None:
    results = pool(2).run(api_jobs.breaks_on_rank_0)
    assert all("mask" in r and r.startswith("CaptureError") for r in results), results


@pytest.mark.processes
def test_heads_must_divide() -> None:
    found = pool(2).run(api_jobs.refused, {"pins": {"tp": 2}})
    assert found == ["accepted", "accepted"]
    graph = capture(models.make_llama(), models.token_batch(2, 16))
    with pytest.raises(PinError, match=r"tp=8 does not divide the 4 attention heads at .*; nearest legal: tp=4"):
        plan_program(graph, Cluster.local(8), {"tp": 8}, 8, 16)
    with pytest.raises(PinError, match=r"pp=8 needs at least as many layers, the model has 4; nearest legal: pp=4"):
        plan_program(graph, Cluster.local(8), {"pp": 8}, 8, 16)


@pytest.mark.processes
def test_optimizer_that_needs_whole_tensors() -> None:
    results = pool(2).run(api_jobs.refused_optimizer)
    assert all("LBFGS is not known to be element-wise" in r for r in results)


def test_own_optimizer_may_say_it_is_elementwise() -> None:
    class Mine(torch.optim.SGD):
        pass

    made = Mine([torch.nn.Parameter(torch.zeros(1))])
    with pytest.raises(ValueError, match="autoplan_elementwise = True"):
        check_elementwise(made, sharded=True)
    check_elementwise(made, sharded=False)
    Mine.autoplan_elementwise = True  # type: ignore[attr-defined]
    check_elementwise(made, sharded=True)


@pytest.mark.processes
def test_batches_that_do_not_fit() -> None:
    first, second = pool(2).run(api_jobs.bad_batches)
    assert first == second
    micro, missing, uneven, empty = first
    assert "a batch of 4 cannot be cut into 3 micro-batches; use 3 or 6 samples" in micro
    assert "the batch has input_ids; this program takes input_ids, labels" in missing
    assert "different batch sizes: {'input_ids': 6, 'labels': 3}" in uneven
    assert "no label of the global batch is valid" in empty


@pytest.mark.processes
@pytest.mark.parametrize(
    ("how", "reason"), [("killed", "rank 1"), ("raised", "TypeError: 'NoneType' object is not callable")]
)
def test_a_rank_that_ends_takes_the_others_along(how: str, reason: str) -> None:
    """The rank that is left ends within seconds, and says why."""
    with Pool(2) as fresh:
        outcomes = fresh.run_each(api_jobs.dies, how, timeout_s=60.0)
    assert outcomes[1].status == ("died" if how == "killed" else "raised")
    assert outcomes[0].status == "raised"
    assert "RankFailure" in str(outcomes[0].value) and reason in str(outcomes[0].value)


def test_one_process_needs_no_launcher(tmp_path: Path) -> None:
    """Without torchrun: one device, the same call."""
    script = tmp_path / "train.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "import models, autoplan\n"
        "pm = autoplan.parallelize(models.make_llama())\n"
        "batch = models.token_batch(2, 16)\n"
        "print(round(pm.step(batch).item(), 4) == round(models.make_llama()(**batch).loss.item(), 4))\n"
    )
    out = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr
    assert out.stdout.strip() == "True"


def test_door() -> None:
    assert {"parallelize", "ParallelModel", "Cluster", "Plan"} <= set(autoplan.__all__)
