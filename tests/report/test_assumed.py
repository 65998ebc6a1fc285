"""What reports say of assumptions: uneven routing, catalog fields that nothing confirms and that were not given."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from autoplan.catalog import load_model
from autoplan.config.parallel import Mode, ParallelConfig
from autoplan.cost_models.hardware import catalog
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.report.arguments import imbalance_of
from autoplan.report.data import estimate_report
from autoplan.report.text import estimate_text
from autoplan.search.estimate import estimate_config
from autoplan.search.request import PlanRequest

UNCONFIRMED = "gb300-nvl72"


def _request(model: str, cluster: Cluster) -> PlanRequest:
    return PlanRequest(load_model(model), cluster, 4096, 8, mode=Mode.FUSED)


def _text(request: PlanRequest) -> str:
    out = Console(file=io.StringIO(), width=200)
    found = estimate_config(request, ParallelConfig(dp=8, tp=1))
    estimate_text(out, request.graph.name, "", request, found)
    return " ".join(out.file.getvalue().split())  # type: ignore[attr-defined]


def test_uneven_routing_is_among_the_assumptions() -> None:
    """One factor for all models with experts, its value and source, as text and as data; of no others."""
    request = _request("qwen3-30b-a3b", Cluster.parse("1x8xh100-sxm5-80gb"))
    assert "the fullest rank has 1.00 times the mean number of rows (imbalance, one factor for all models" in _text(
        request
    )
    given = replace(request, constants=request.constants.with_({"imbalance": 1.25}), constants_file="mine.json")
    text = _text(given)
    assert "has 1.25 times" in text and "constants of mine.json" in text
    found = estimate_config(given, ParallelConfig(dp=8))
    assert estimate_report(given, found)["request"]["imbalance"] == {
        "value": 1.25,
        "what": "rows of the fullest rank's experts over the mean",
        "source": "constants of mine.json",
    }
    dense = _request("llama-3.2-1b", Cluster.parse("1x8xh100-sxm5-80gb"))
    assert imbalance_of(dense) is None and "imbalance" not in _text(dense)


def test_what_is_given_needs_no_source() -> None:
    """A catalog field is not called unconfirmed where the command line gives another figure."""
    assert {"scaleout_gbit_s_per_device", "mem_gb"} <= set(catalog.device(UNCONFIRMED).unverified)
    plain = Cluster.parse(f"2x4x{UNCONFIRMED}")
    assert plain.unverified == plain.device.unverified
    some = Cluster.parse(f"2x4x{UNCONFIRMED}@nic=800")
    assert "scaleout_gbit_s_per_device" not in some.unverified and "mem_gb" in some.unverified
    both = Cluster.parse(f"2x4x{UNCONFIRMED}@memory_gb=270,nic=800")
    assert not {"scaleout_gbit_s_per_device", "mem_gb"} & set(both.unverified)
    assert "mem_gb" in _text(_request("llama-3.2-1b", plain))
    assert "mem_gb" not in _text(_request("llama-3.2-1b", both))


@pytest.mark.parametrize(
    ("given", "gone"),
    [
        ({"nic_gbit_s": 800}, {"scaleout_gbit_s_per_device"}),
        ({"device_overrides": {"memory_gb": 270, "source": "my data sheet"}}, {"mem_gb"}),
        ({"nic_gbit_s": 800, "device_overrides": {"memory_gb": 270}}, {"scaleout_gbit_s_per_device", "mem_gb"}),
        ({"device_overrides": {"launch_us": 5}}, set()),
    ],
)
def test_what_a_file_gives_needs_no_source(given: dict[str, object], gone: set[str]) -> None:
    cluster = Cluster.of_mapping({"nodes": 2, "devices_per_node": 4, "device": UNCONFIRMED, **given})
    assert set(catalog.device(UNCONFIRMED).unverified) - set(cluster.unverified) == gone
