"""Arguments of a request and of planning in code: written in any legal form they mean the same, others are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import autoplan
from autoplan.config.parallel import Launch, Mode, ParallelConfig, RunOptions
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.errors import AutoplanError, CaptureError, PinError, ProfileError
from autoplan.search.planner import PlanRequest, estimate_config, search_plan
from autoplan.search.request import space_of

_CONFIG = ParallelConfig(dp=2, micro_batch_size=4, num_micro_batches=2)
_PINS = {"tp": 1, "pp": 1, "micro_batch_size": 4, "zero_stage": 1}


def _request(**given: Any) -> PlanRequest:
    usual = {"graph": autoplan.load_model("gpt2"), "cluster": Cluster.parse("2xh100")}
    return PlanRequest(**{**usual, "seq_len": 128, "global_batch_size": 16, **given})


def _step_s(request: PlanRequest, config: ParallelConfig = _CONFIG) -> float:
    return estimate_config(request, config).estimate.step_time_s.mid


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ({"mode": "fused"}, {"mode": Mode.FUSED}),
        ({"mode": "compiled"}, {"mode": Mode.COMPILED}),
        (
            {"mode": "fused", "options": {"launch": "graphs", "overlap": "tp"}},
            {"mode": Mode.FUSED, "options": RunOptions(launch=Launch.GRAPHS, overlap=frozenset({"tp"}))},
        ),
        (
            {"mode": "fused", "options": RunOptions(launch="blocking")},
            {"mode": Mode.FUSED, "options": {"launch": Launch.BLOCKING}},
        ),  # type: ignore[arg-type]
    ],
    ids=str,
)
def test_words_are_priced_as_what_they_stand_for(written: dict[str, Any], meant: dict[str, Any]) -> None:
    assert _request(**written) == _request(**meant)
    assert _step_s(_request(**written)) == _step_s(_request(**meant)) != _step_s(_request())


@pytest.mark.parametrize(
    "given", [{"attention": "fast"}, {"dispatcher": "mail"}, {"overlap": ["dp"]}, {"fused_loss": 1}]
)
def test_options_of_no_kind_are_refused(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(PinError, match=name):
        RunOptions(**given)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ({"offload": ("activations",)}, {"recompute": "offload"}),
        ({"offload": "optimizer"}, {"offload": ("optimizer",)}),
        ({"offload": "activations+optimizer"}, {"recompute": "offload", "offload": ("optimizer",)}),
        ({"offload": ["optimizer", "parameters"]}, {"offload": ("parameters",)}),
    ],
    ids=str,
)
def test_offload_of_a_configuration_is_read_as_a_pin(written: dict[str, Any], meant: dict[str, Any]) -> None:
    request = _request()
    found, wanted = (estimate_config(request, replace(_CONFIG, **given)) for given in (written, meant))
    assert (found.config, found.estimate) == (wanted.config, wanted.estimate)


def test_offloaded_activations_are_not_recomputed_too() -> None:
    with pytest.raises(PinError, match="a layer has one kind of recompute"):
        estimate_config(_request(), replace(_CONFIG, offload=("activations",), recompute="full"))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"graph": "gpt2"}, "graph='gpt2' is of type str; give autoplan.load_model"),
        ({"cluster": "2xh100"}, "cluster='2xh100' is of type str; give autoplan.Cluster.parse"),
        ({"profile": "cpu-2core-gloo-w2"}, "profile='cpu-2core-gloo-w2' is of type str; give autoplan.Profile.load"),
        ({"constants": {}}, "constants={} is of type dict"),
        ({"like": 3}, "like=3 is of type int"),
        ({"mode": "fast"}, "mode 'fast' is not known; use eager, fused, compiled"),
        ({"options": "graphs"}, "options='graphs' must be a mapping"),
        ({"precision": None}, "precision None is not known"),
    ],
    ids=str,
)
def test_arguments_of_another_type_are_refused(given: dict[str, Any], named: str) -> None:
    with pytest.raises(PinError) as error:
        _step_s(_request(**given))
    assert named in str(error.value)


@pytest.mark.parametrize("name", ["top", "least_tp"])
@pytest.mark.parametrize("value", [0, -1, 2.5, "3", None, True])
def test_counts_of_a_search_are_whole_numbers(name: str, value: object) -> None:
    with pytest.raises(PinError, match=f"{name}=.* must be a whole number of at least 1"):
        search_plan(_request(pins=_PINS, **{name: value}))


def test_numbers_of_numpy_are_numbers() -> None:
    pins = {name: np.int64(value) for name, value in _PINS.items()}
    request = _request(
        seq_len=np.int32(128), global_batch_size=np.int64(16), pins=pins, top=np.int8(1), gap=np.float32(0)
    )
    assert (request, type(request.seq_len)) == (_request(pins=_PINS, gap=0.0), int)
    assert search_plan(request).plans[0].config.micro_batch_size == 4
    given: dict[str, Any] = {"dp": np.int64(1), "pp": np.int64(2), "num_micro_batches": np.int64(4)}
    found = estimate_config(_request(), replace(_CONFIG, **given, stages=np.array([6, 6]))).config
    assert found == replace(_CONFIG, dp=1, pp=2, stages=(6, 6), num_micro_batches=4) and type(found.dp) is int
    with pytest.raises(PinError, match=r"seq_len=128\.0: must be a whole number"):
        search_plan(_request(seq_len=np.float64(128)))


def test_pins_are_a_mapping() -> None:
    with pytest.raises(PinError, match="give a mapping from names to values"):
        _request(pins=["tp"])


@pytest.mark.parametrize("more", [{}, {"cp": 1, "tp": 1}, {"pp": None, "dp": None, "zero_stage": None}])
def test_pins_are_refused_for_what_was_asked(more: dict[str, Any]) -> None:
    """The rule that is named is broken without any choice that nobody asked for: no other cp, ZeRO or copies of it."""
    pins = {"schedule": "ZB-H1", "pp": 7, "dp": 8, "micro_batch_size": 1, "zero_stage": 2, **more}
    given = {name: value for name, value in pins.items() if value is not None}
    with pytest.raises(PinError, match="'ZB-H1' runs 64 micro-batches on 7 stages in 9 rounds, which must be equal"):
        space_of(_request(cluster=Cluster.parse("7x8xh100"), global_batch_size=512, pins=given))


def test_a_configuration_has_a_type_of_its_own() -> None:
    with pytest.raises(PinError, match=r"give an autoplan\.ParallelConfig"):
        estimate_config(_request(), {"dp": 2})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "error", "named"),
    [
        ({"seq_len": 0}, PinError, "seq_len=0: must be a whole number of at least 1"),
        ({"target_len": 0}, PinError, "target_len=0: must be a whole number of at least 1"),
        ({"global_batch_size": 0}, PinError, "global_batch_size=0: must be a whole number of at least 1"),
        ({"global_batch_size": 10**30}, PinError, "must be a whole number of at most 10,000,000"),
        ({"top": 0}, PinError, "top=0 must be a whole number of at least 1"),
        ({"cluster": {"nodes": 2}}, PinError, "cluster={'nodes': 2} is of type dict; give a text"),
        ({"cluster": None}, PinError, "cluster=None is of type NoneType"),
        ({"profile": 3}, ProfileError, "profile=3 is of type int; give a name"),
        (
            {"profile": "cpu-2core-gloo-w2"},
            PinError,
            "measured on cpu devices, the cluster 1 x 2 x h100-sxm5-80gb",
        ),
        ({"precision": None}, PinError, "precision None is not known"),
        ({"model": 3}, CaptureError, "model=3 is of type int; give an nn.Module"),
        ({"model": ""}, AutoplanError, "unknown model ''"),
    ],
    ids=str,
)
def test_planning_refuses_what_it_cannot_use(given: dict[str, Any], error: type[Exception], named: str) -> None:
    usual = {"model": "gpt2", "cluster": "2xh100", "seq_len": 128, "global_batch_size": 16, "pins": _PINS}
    with pytest.raises(error) as raised:
        autoplan.plan(**{**usual, **given})
    assert named in str(raised.value)


def test_a_cluster_may_be_a_path(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("nodes: 1\ndevices_per_node: 2\ndevice: h100-sxm5-80gb\n")
    by_path, by_name = (
        autoplan.plan("gpt2", cluster, seq_len=128, global_batch_size=16, pins=_PINS) for cluster in (file, "2xh100")
    )
    assert (by_path.config, by_path.estimate) == (by_name.config, by_name.estimate)
    assert by_path.document["asked"]["cluster"] == str(file)
