"""Does a model fit, and what makes it fit: each way is a search of its own."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from command_line import one_line_error, run

from autoplan.catalog import load_model
from autoplan.config.adapters import read_adapters
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.errors import PinError
from autoplan.program.adapters import with_adapters
from autoplan.report.fit import fit_report
from autoplan.search.planner import NothingFits, PlanRequest, search_plan
from autoplan.sweeps.fit import Fit, Way, _more_devices, fit, larger

REQUEST = PlanRequest(load_model("gpt2"), Cluster.parse("h100-sxm5-80gb"), 1024, 4)


def test_what_fits_says_with_which_plan() -> None:
    found = fit(REQUEST, ways=False, seconds=600)
    assert found.fits is True and found.ways == () and found.closest is None
    assert found.asked.planned is not None
    assert found.asked.planned.config == search_plan(REQUEST).plans[0].config


@pytest.mark.slow
def test_every_way_is_what_a_search_says() -> None:
    tight = replace(REQUEST, cluster=REQUEST.cluster.with_(memory_gb=2.1))
    found = fit(tight, seconds=600)
    assert found.fits is False and found.asked.shortage is not None and found.closest is not None
    with pytest.raises(NothingFits) as refused:
        search_plan(replace(tight, patient=False))
    assert found.asked.shortage.needed_bytes == refused.value.report.needed_bytes
    assert found.closest.estimate.peak_memory_bytes.high > 2.1e9
    ways = {way.name: way for way in found.ways}
    names = list(ways)
    assert names[0] == "nothing recomputed, nothing on the host" and any(
        n.startswith("adapters lora:16") for n in names
    )
    for way in found.ways:
        if way.status == "fits":
            assert way.planned is not None and way.planned.estimate.peak_memory_bytes.high <= 2.1e9
            assert way.planned.config == search_plan(way.request).plans[0].config
        else:
            assert way.status == "does not fit" and way.shortage is not None
            assert way.shortage.needed_bytes > way.shortage.available_bytes
    assert ways["adapters lora:16"].status == ways["adapters qlora:16:all-linear"].status == "fits"
    assert ways["adapters lora:16"].request.adapters == "lora:16"
    (more,) = [way for name, way in ways.items() if "devices" in name]
    assert more.status == "fits" and more.request.cluster.num_devices > 1


def test_frozen_weights_in_4_bits_are_a_way_for_a_model_with_adapters() -> None:
    lora = read_adapters("lora:16")
    made = replace(REQUEST, graph=with_adapters(REQUEST.graph, lora), adapters=str(lora))
    tight = replace(made, cluster=made.cluster.with_(memory_gb=0.8), pins={"micro_batch_size": 1})
    (way,) = [way for way in fit(tight, seconds=600).ways if way.name.startswith("adapters")]
    packed = replace(lora, packed=True)
    assert way.request.adapters == str(packed)
    assert way.request.graph == with_adapters(REQUEST.graph, packed)


def test_sequences_get_shorter_until_they_fit() -> None:
    long = replace(REQUEST, cluster=REQUEST.cluster.with_(memory_gb=2.1), patient=False)
    found = fit(long, seconds=600)
    (shorter,) = [way for way in found.ways if way.name.startswith("sequences")]
    r = shorter.request
    assert shorter.status == "fits" and r.seq_len < 1024 and r.seq_len * r.global_batch_size == 4096
    assert shorter.name == f"sequences of {r.seq_len} tokens, {r.global_batch_size} of them"
    with pytest.raises(NothingFits):
        search_plan(replace(long, seq_len=2 * r.seq_len, global_batch_size=r.global_batch_size // 2))


def test_a_node_is_filled_before_there_are_more() -> None:
    one = Cluster.parse("h100-sxm5-80gb")
    assert [str(c) for c in (larger(one), larger(larger(larger(larger(one)))))] == [
        "1 x 2 x h100-sxm5-80gb",
        "2 x 8 x h100-sxm5-80gb",
    ]


def test_more_devices_say_when_the_batch_grows() -> None:
    names = [name for name, _ in _more_devices(replace(REQUEST, global_batch_size=4))][:3]
    assert names == [
        "2 devices (1 x 2 x h100-sxm5-80gb)",
        "4 devices (1 x 4 x h100-sxm5-80gb)",
        "8 devices (1 x 8 x h100-sxm5-80gb), 8 sequences",
    ]


def test_what_was_not_decided_is_not_called_infeasible() -> None:
    found = Fit(Way("", REQUEST, "stopped", reason="no plan was found within 1 s"), ())
    data = fit_report(found)
    assert data["fits"] is None and data["status"] == "stopped"


def test_a_task_that_is_illegal_is_an_error() -> None:
    with pytest.raises(PinError, match="1024"):
        fit(replace(REQUEST, seq_len=4096))


def test_fit_on_the_command_line() -> None:
    """Without a length the model's own, without a batch a sequence per device; the exit code is the answer."""
    data = json.loads(run("fit", "gpt2", "--cluster", "2xh100", "--no-ways", "--json").stdout)
    assert data["fits"] is True and data["status"] == "ok" and data["ways"] == []
    assert (data["request"]["seq_len"], data["request"]["global_batch_size"]) == (1024, 2)
    words = ("fit", "gpt2", "--cluster", "h100@memory_gb=2.1", "--gbs", "4", "--seconds", "600")
    no = run(*words)
    assert no.exit_code == 3 and " NO, it does not fit" in no.stdout
    assert "adapters qlora:16:all-linear" in no.stdout and "memory per device, GB" in no.stdout
    data = json.loads(run(*words, "--json").stdout)
    assert (
        data["fits"] is False and data["shortage"]["available_bytes"] == 2.1e9 and data["plan"]["recompute"] == "full"
    )
    assert {way["status"] for way in data["ways"]} == {"fits", "does not fit"}
    assert "--cluster is missing" in one_line_error(run("fit", "gpt2"), 2)
    assert "No such option: --tokens" in run("fit", "gpt2", "--cluster", "2xh100", "--tokens", "1B").stderr


def test_a_plan_that_runs_has_more_devices_as_a_way() -> None:
    names = [name for name, _ in _more_devices(replace(REQUEST, executed=True))]
    assert names[0] == "2 devices (1 x 2 x h100-sxm5-80gb)"


def test_the_usual_length_is_one_that_the_model_has() -> None:
    """4,096 tokens are more than the 2,048 positions of TinyLlama."""
    data = json.loads(run("fit", "tinyllama-1.1b", "--cluster", "h100", "--no-ways", "--json").stdout)
    assert data["request"]["seq_len"] == 2048 and data["model"]["notes"] == []


def test_what_a_way_assumes_is_told() -> None:
    words = ("fit", "gpt2", "--cluster", "h100@memory_gb=2.1", "--gbs", "4", "--seconds", "600")
    text = " ".join(run(*words).stdout.split())
    assert "Note: 128 GB of host memory per device are assumed, not verified" in text
    assert "adapters qlora:16:all-linear: autoplan's own runtime does not run this plan" in text
    ways = {way["name"]: way for way in json.loads(run(*words, "--json").stdout)["ways"]}
    assert ways["adapters qlora:16:all-linear"]["priced_not_executed"]
    assert ways["adapters lora:16"]["priced_not_executed"] == []
