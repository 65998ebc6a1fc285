"""A plan that was made elsewhere, and a program that was written elsewhere, run as if they had been searched here."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import api_jobs
import models
import pytest
from harness import pool

import autoplan
from autoplan.capture.export import capture
from autoplan.catalog import load_model
from autoplan.codegen.program import compile_program
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.errors import CaptureError, InfeasibleError, LayoutError, PinError
from autoplan.planning import cluster_text, graph_of_plan, planned, ready_plan
from autoplan.plans.layouts import layouts_of
from autoplan.plans.record import Plan
from autoplan.plans.sections import SECTIONS
from autoplan.search.planner import PlanRequest

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed._functional_collectives.*:FutureWarning")

BATCH = models.token_batch(4, 16)
# plans of every kind: stages with recompute by layer, interleaved stages, experts that tokens travel to, a ring
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "tp": ("llama-3.2-1b", "1x8xh100-sxm5-80gb", {"tp": 4}),
    "stages": ("llama-3.2-1b", "1x8xh100-sxm5-80gb", {"pp": 4, "recompute": "attention+mlp"}),
    "chunks": ("llama-3.2-1b", "1x8xh100-sxm5-80gb", {"pp": 2, "virtual_stages": 2}),
    "experts": ("mixtral-8x7b", "8x8xh100-sxm5-80gb", {"ep": 8, "tp": 2, "etp": 1}),
    "ring": ("llama-3.2-1b", "1x8xh100-sxm5-80gb", {"cp": 4, "tp": 2, "context_method": "ring"}),
}


def plan_here(model: Any, **pins: Any) -> Plan:
    return autoplan.plan(model, "local:2", example_inputs=BATCH, pins=pins, verify=False)


def test_a_plan_is_read_as_it_was_written() -> None:
    plan = plan_here(models.make_llama(), tp=2)
    again = Plan.from_json(plan.to_json())
    assert plan.estimate is not None
    assert again == replace(plan, estimate=replace(plan.estimate, events=()))
    assert again.to_json() == plan.to_json()


@pytest.mark.parametrize("kind", KINDS)
def test_written_layouts_make_the_same_program(kind: str) -> None:
    name, cluster, pins = KINDS[kind]
    request = PlanRequest(
        load_model(name), Cluster.parse(cluster), 4096, 64, pins, executed=True, time_limit_s=600, equal_within=0
    )
    plan, layouts = planned(request, name, cluster)
    again = Plan.from_json(plan.to_json())
    found = layouts_of(again, request.graph)
    assert compile_program(request.graph, found) == compile_program(request.graph, layouts)
    assert "graph" not in plan.document and again.config == plan.config
    pinned = planned(replace(request, pins=again.pins), name, cluster)[0]  # a search that keeps all of it
    assert pinned.config == plan.config.but(recompute=pinned.config.recompute)
    assert pinned.recompute == plan.recompute and pinned.stages == plan.stages


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda d: d.update(layuot={}), "unknown section 'layuot'; known: schema"),
        (lambda d: d.pop("plan"), "holds no plan"),
        (lambda d: d.update(schema=9), "schema 9 cannot be read"),
        (
            lambda d: d["plan"].update(num_micro_batches=7),
            r"num_micro_batches=7, which are \d+ sequences; its request has",
        ),
        (lambda d: d["plan"].update(pipes=2), "plan: unknown choice 'pipes'"),
        (lambda d: d["plan"].update(tp="two"), "tp='two'"),
        (lambda d: d["program"].update(stagse=[]), "unknown key 'stagse'; did you mean 'stages'?"),
        (lambda d: d["program"].pop("layout"), "its program lacks layout"),
        (lambda d: d["estimate"].pop("step_time_s"), "estimate lacks step_time_s"),
        (lambda d: d["made_for"].update(hash="1"), "made_for: unknown key 'hash'"),
        (lambda d: d["plan"].pop("zero_stage"), "its plan lacks zero_stage"),
        (lambda d: d["plan"].update(schedule={}), "schedule={} is not known; use GPipe"),
        (lambda d: d["plan"].update(context_method=[1]), r"context_method=\(1,\) must be the name of a method"),
        (lambda d: d.update(model=None), "model must be an object, not null"),
        (lambda d: d["request"].update(seq_len="x"), 'request: seq_len must be a whole number of at least 1, not "x"'),
        (
            lambda d: d["request"].update(seq_len=True),
            "request: seq_len must be a whole number of at least",
        ),
        (lambda d: d["program"].update(notes=5), "program: notes must be a list, not 5"),
        (lambda d: d["program"]["stages"].append(5), "program: stages: 1 must be a list, not 5"),
        (lambda d: d["program"]["layout"].update({"x/y": 1}), "program: layout: x/y must be a text, not 1"),
        (lambda d: d["estimate"].update(mfu=None), "estimate: mfu must be a number, not null"),
        (lambda d: d["estimate"]["step_time_s"].update(evidence=None), "step_time_s: evidence must be one of exact"),
        (lambda d: d["estimate"]["memory_bytes"].append(3), "estimate: memory_bytes: 1 must be an object, not 3"),
        (lambda d: d["certificate"].update(gap=float("nan")), "is not JSON .NaN is no number of JSON."),
    ],
)
def test_a_text_that_is_no_plan_is_refused_by_name(changed: Any, said: str) -> None:
    data = json.loads(plan_text())
    changed(data)
    with pytest.raises(PinError, match=said.replace("?", r"\?")):
        Plan.from_json(json.dumps(data))


@cache
def plan_text() -> str:
    """Not made while tests are collected, which every process of every run does."""
    return plan_here(models.make_llama(), tp=2).to_json()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda d: d["program"]["layout"].update({"layer/attend": "R"}), "a layout of 'layer/attend'"),
        (lambda d: d["program"]["layout"].update({"x/y": "R"}), "a layout of 'x/y', which the graph has not$"),
        (lambda d: d["program"]["layout"].popitem(), "the plan has no layout of"),
        (lambda d: d["program"]["layout"].update({next(iter(d["program"]["layout"])): "sideways"}), "cannot be 'side"),
        (lambda d: d["program"]["stages"][0].reverse(), "stage 0 of the plan holds"),
        (lambda d: d["program"]["stages"].append(["x"]), "stage 1 of the plan holds x; its degrees make it nothing"),
        (lambda d: d["program"]["stages"].clear(), "stage 0 of the plan holds nothing; its degrees make it"),
        (lambda d: d["program"].update(axes=[["dp", 2]]), "names the mesh axes dp=2"),
        (
            lambda d: d["program"]["recompute"].update({next(iter(d["program"]["recompute"])): "full"}),
            "is full in the program of the plan and none by its choices: one of the two was changed",
        ),
    ],
)
def test_layouts_that_the_graph_has_not_are_refused_by_name(changed: Any, said: str) -> None:
    data = json.loads(plan_text())
    changed(data)
    plan = Plan.from_json(json.dumps(data))
    with pytest.raises(LayoutError, match=said):
        ready_plan(plan, graph_of_plan(Plan.from_json(plan_text())) or pytest.fail())


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"intermediate_size": 56}, r"parameter model.layers.0.mlp.gate_proj.weight is float32\[56, 32\], in the plan"),
        ({"num_hidden_layers": 2}, "parameter model.layers.2.* is missing"),
        ({"tie_word_embeddings": True}, "lm_head"),
        ({"rms_norm_eps": 0.5}, "operation add_scalar of block layer is .*scalar=0.5"),
    ],
    ids=str,
)
def test_another_model_is_refused_with_what_differs(config: dict[str, Any], said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        ready_plan(Plan.from_json(plan_text()), capture(models.make_llama(**config), BATCH))


def test_a_plan_of_a_module_is_read_by_the_command_line(tmp_path: Path) -> None:
    from command_line import run

    file = tmp_path / "plan.json"
    file.write_text(plan_text())
    result = run("estimate", str(file), "--json")
    assert result.exit_code == 0, result.output
    again, then = json.loads(result.stdout), json.loads(plan_text())
    assert again["estimate"]["step_time_s"] == then["estimate"]["step_time_s"]
    assert again["plan"] == then["plan"] and again["program"]["layout"] == then["program"]["layout"]


@pytest.mark.parametrize("command", ["estimate", "plan"])
def test_an_answer_about_a_plan_of_a_module_keeps_its_graph(command: str, tmp_path: Path) -> None:
    """It stands in for the plan file in every command; so does the answer about this answer."""
    from command_line import run

    data = json.loads(plan_text())
    data["program"]["capture"] = "capture verified on 4 samples"
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(data))
    answers = []
    for name in ("first", "second"):
        result = run(command, str(file), "--json")
        assert result.exit_code == 0, result.output
        file = tmp_path / f"{command}-{name}.json"
        file.write_text(result.stdout)
        answers.append(json.loads(result.stdout))
    first, second = answers
    assert first["graph"] == second["graph"] == data["graph"]
    assert first["program"] == second["program"] == data["program"]
    assert graph_of_plan(Plan.read(file)) == graph_of_plan(Plan.from_json(plan_text()))
    for words in (("launch", str(file), "--for", "slurm"), ("export", str(file), "--to", "torchtitan")):
        assert run(*words).exit_code == 0, run(*words).output
    shown = run("estimate", str(file))
    assert shown.exit_code == 0 and file.name in shown.stdout  # in its next command: the name is no model
    (tmp_path / "other.json").write_text(run("estimate", str(file), "--adapters", "lora:2", "--json").stdout)
    refused = run("estimate", str(tmp_path / "other.json"), "--adapters", "lora:4")
    assert "holds the graph of its model with adapters=lora:2, to which no others can be added" in refused.stderr


def test_the_writers_of_a_plan_write_the_same_sections() -> None:
    from command_line import TASK, run

    written = json.loads(run("plan", *TASK, "--runnable", "--json").stdout)
    plan = autoplan.plan("gpt2", "1x4xh100-sxm5-80gb", seq_len=1024, global_batch_size=16).to_data()
    assert [set(data) for data in (written, plan)] == [set(SECTIONS) - {"graph"}] * 2
    for name in ("model", "cluster", "request", "made_for", "estimate", "certificate", "program"):
        assert set(written[name]) == set(plan[name])


def test_a_cluster_is_named_as_it_is_read() -> None:
    for text in ("2x8xh100-sxm5-80gb@nic=400.0,price=2.5", "local:4", "local:2@memory_gb=3.5"):
        cluster = Cluster.parse(text)
        found = cluster_text(cluster)
        assert found is not None and Cluster.parse(found) == cluster
    odd = replace(Cluster.local(2), device=replace(Cluster.local(2).device, memory_bytes=1))
    assert cluster_text(odd) is None


def test_an_older_answer_of_the_command_line_is_solved_again() -> None:
    """Its layouts are open; with another price they may have been others, which is refused."""
    plan = autoplan.plan("llama-3.2-1b", "1x4xh100-sxm5-80gb", seq_len=4096, global_batch_size=16, pins={"tp": 4})
    data = plan.to_data()
    del data["program"]
    open_plan = Plan.from_json(json.dumps(data))
    graph = load_model("llama-3.2-1b")
    ready, layouts = ready_plan(open_plan, graph)
    assert ready.layout == plan.layout and compile_program(graph, layouts).spec.axes[-1] == ("tp", 4)
    data["estimate"]["step_time_s"]["mid"] *= 1.01
    with pytest.raises(PinError, match="has the price"):
        ready_plan(Plan.from_json(json.dumps(data)), graph)
    data["priced_not_executed"] = ["mode fused is priced (kernels of Megatron), but not executed"]
    for given in (data, {**plan.to_data(), "priced_not_executed": data["priced_not_executed"]}):  # layouts or not
        with pytest.raises(InfeasibleError, match="does not execute this plan: mode fused is priced"):
            ready_plan(Plan.from_json(json.dumps(given)), graph)


# -- on processes ------------------------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("pins", [{"tp": 2}, {"pp": 2, "num_micro_batches": 2}], ids=str)
def test_a_given_plan_and_a_written_program_train_as_one_device(pins: dict[str, Any], tmp_path: Path) -> None:
    model, wanted = models.make_llama(), api_jobs.of_one_device()
    plan = plan_here(model, **pins)
    (tmp_path / "plan.json").write_text(plan.to_json())
    autoplan.compile(model, plan, tmp_path / "program", example_inputs=BATCH, verify=False)
    degrees = str(plan.config.but(recompute="none"))
    for kwargs in ({"plan": plan}, {"plan": tmp_path / "plan.json"}, {"program": tmp_path / "program"}):
        for loss, config, _ in pool(2).run(api_jobs.given, {**kwargs, "verify": False}):
            assert loss == pytest.approx(wanted, rel=1e-5) and config == degrees


@pytest.mark.processes
def test_what_cannot_run_is_refused_on_every_rank(tmp_path: Path) -> None:
    model = models.make_llama()
    plan, folder = plan_here(model, tp=2), tmp_path / "program"
    autoplan.compile(model, plan, folder, example_inputs=BATCH, verify=False)
    larger = autoplan.plan(model, "local:4", example_inputs=BATCH, verify=False, pins={"tp": 2, "dp": 2})
    text = (folder / "stage0.py").read_text()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"plan": larger}, "the plan is for 4 devices (dp=2 tp=2), and this job has 2 processes"),
        ({"plan": plan, "pins": {"tp": 2}}, "pins= is for a search, and plan= leaves nothing to search"),
        ({"plan": plan, "program": folder}, "plan= and program= were both given"),
        ({"plan": plan, "precision": "bf16"}, "precision='bf16', but the plan is for 'native'"),
        ({"plan": plan, "global_batch_size": 64}, "global_batch_size=64, but the plan is for"),
        ({"cluster": Cluster.local(4)}, "autoplan.compile(model, plan, folder) writes the program"),
        ({"program": tmp_path}, "holds no program (there is no fingerprint.json)"),
    ]
    for kwargs, said in cases:
        first, second = pool(2).run(api_jobs.refused, kwargs)
        assert first == second and said in first, first
    first, second = pool(2).run(api_jobs.refused, {"program": folder}, "gpt")
    assert first == second and "was made for another model: parameter model.embed_tokens.weight is missing" in first
    (folder / "stage0.py").write_text(text + "\n")
    first, second = pool(2).run(api_jobs.refused, {"program": folder})
    assert first == second and "stage0.py is not as it was written" in first


@pytest.mark.processes
def test_another_version_or_cluster_than_the_plans_is_a_warning() -> None:
    """In the words of `autoplan estimate`, on rank 0."""
    plan, ranks = Plan.from_json(plan_text()), pool(2)
    assert ranks.run(api_jobs.given_warnings, plan) == ranks.run(api_jobs.given_warnings, plan, Cluster.local(2))
    assert ranks.run(api_jobs.given_warnings, plan) == [[], []]
    data = json.loads(plan_text())
    data["made_for"] |= {"autoplan": "0.0.9", "cluster_figures": "0"}
    (said,), other = ranks.run(api_jobs.given_warnings, Plan.from_json(json.dumps(data)))
    assert "it was made by autoplan 0.0.9, this is" in said and other == []
    assert "the figures of its cluster are other ones now; `autoplan estimate PLAN` prices it again" in said
    (said,), _ = ranks.run(api_jobs.given_warnings, plan, Cluster.local(2).with_(memory_gb=1.0))
    assert "it was made by" not in said and "the figures of its cluster are other ones now" in said


@pytest.mark.processes
def test_a_changed_config_is_noticed_without_a_capture(tmp_path: Path) -> None:
    """The parameters are the same; verify='required' also compares the forward."""
    model = models.make_llama()
    plan = plan_here(model, tp=2)
    autoplan.compile(model, plan, tmp_path, example_inputs=BATCH, verify=False)
    found = pool(2).run(api_jobs.given_error, {"program": tmp_path}, {"rms_norm_eps": 0.5})
    assert all("config.rms_norm_eps is 0.5, in the program" in text for text in found)
    ((_, _, capture_line), _) = pool(2).run(api_jobs.given, {"program": tmp_path, "verify": "required"})
    assert capture_line.startswith("capture verified")


def test_a_catalog_graph_is_planned_in_its_own_dtype_only() -> None:
    task = {"seq_len": 4096, "global_batch_size": 16}
    with pytest.raises(PinError, match=r"computes in float16, but the graph of llama-3\.2-1b is one of bfloat16"):
        autoplan.plan("llama-3.2-1b", "1x4xh100-sxm5-80gb", precision="fp16", **task)
    with pytest.raises(PinError, match="compile='inductor' is not known; use True, False or 'auto'"):
        autoplan.plan("llama-3.2-1b", "1x4xh100-sxm5-80gb", compile="inductor", **task)
