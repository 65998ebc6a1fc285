"""The command line: answers, JSON, exit codes. Small catalog models, so that a search takes a second."""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from command_line import PLAIN, ROOT, TASK, one_line_error, run, shell
from typer.testing import CliRunner

import autoplan
from autoplan.catalog import load_model, names
from autoplan.cli import app
from autoplan.config import numbers
from autoplan.config.choices import OPTIONS, choice_words, option_data, option_texts, options_of
from autoplan.config.parallel import (
    OVERLAPS,
    Attention,
    Dispatcher,
    FusedLoss,
    Launch,
    Mode,
    ParallelConfig,
    Reruns,
    RunOptions,
    Sends,
)
from autoplan.config.planning import SCREEN_LIMIT_S, SearchSettings
from autoplan.config.precision import PRECISIONS
from autoplan.cost_models.constants import Constants
from autoplan.cost_models.hardware.catalog import entries
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.errors import InfeasibleError, PinError
from autoplan.report.arguments import read_pin_words, read_vary
from autoplan.report.commands import estimate_command
from autoplan.search.planner import PlanRequest, estimate_config, search_plan
from autoplan.sweeps.label import plan_label
from autoplan.sweeps.whatif import VARIED, points, whatif

# -- plan --------------------------------------------------------------------------------------------------------------


def test_estimate_shows_what_is_on_the_host() -> None:
    """And a host that is too small is named; a plan prints the command that prices it again."""
    words = ("estimate", "gpt2", "--cluster", "1x2xh100-sxm5-80gb", *TASK[3:], "--zero", "3")
    result = run(*words, "--offload", "activations+parameters")
    assert result.exit_code == 0 and "offload parameters" in result.stdout
    assert "state on the host" in result.stdout and "activations on the host" in result.stdout
    assert "copies to the host and back" in result.stdout
    assert "128 GB of host memory per device are assumed, not verified" in " ".join(result.stdout.split())
    found = json.loads(run(*words, "--offload", "optimizer", "--json").stdout)
    assert found["plan"]["offload"] == ["optimizer"] and found["estimate"]["host_memory_capacity_bytes"] == 128e9
    assert found["estimate"]["host_memory_bytes"][0]["state"]["mid"] > 0
    small = ("estimate", "gpt2", "--cluster", "1x2xh100-sxm5-80gb@host_memory_gb=0.1", *TASK[3:])
    result = run(*small, "--offload", "optimizer")
    assert result.exit_code == 3 and "device's share of the memory is 0.1 GB (@host_memory_gb)" in " ".join(
        result.stderr.split()
    )
    result = run("plan", *TASK, "--pin", "tp=1,offload=optimizer")
    assert result.exit_code == 0 and "--offload optimizer" in " ".join(result.stdout.split())
    result = run(*words, "--offload", "weights")
    assert result.exit_code == 2 and "use none, or some of activations, optimizer, parameters" in " ".join(
        result.stderr.split()
    )


def test_plan_answers_first_with_units_and_evidence() -> None:
    result = run("plan", *TASK, "--tokens", "300B", "--top", "2", "--verbose")
    assert result.exit_code == 0, result.stderr
    out = result.stdout
    order = ["autoplan 0.1.0 - gpt2", "Evidence: compute assumed", "BEST", "memory per device, GB", "step time"]
    order += ["candidates: ", "Price: h100-sxm5-80gb $6.88 per device and hour, AWS", "Next: autoplan estimate gpt2"]
    assert [out.index(text) for text in order] == sorted(out.index(text) for text in order)
    assert re.search(r"step [\d.]+ ms \([\d.]+ to [\d.]+\)", out) and "tokens/s per device" in out
    assert re.search(r"300 B tokens: [\d.]+ d \(.*\), \$[\d,.]+k? \(", out)
    words = " ".join(out.split())
    assert re.search(r"with failures: [\d.]+ d \(.*?\), \$[\d,.]+k? \(.*?\); goodput 99\.9\d %", words)
    assert re.search(r"energy: [\d,.]+ [kM]Wh \(.*?\), with failures", words) and "mtbf_device_days 2,112" in words
    assert all(len(line) <= 110 for line in out.splitlines())
    assert "\x1b[" not in out


def test_the_space_is_shown_where_it_is_asked_for() -> None:
    words = ("plan", *TASK, "--top", "2")
    short, long = (run(*words, *more).stdout for more in ((), ("--verbose",)))
    assert re.search(r"^ +proved the best of [\d,]+ candidates", short, flags=re.MULTILINE)
    assert "the space:" not in short and "the space: all devices are used" in long
    assert re.search(r"candidates: \d+ illegal, \d+ too big, [\d,]+ bounded out, \d+ solved(, \d+ left open)? in", long)
    assert re.search(r"time: .*bounds \d", " ".join(long.split()))


def test_plan_as_json_is_the_documented_schema() -> None:
    result = run("plan", *TASK, "--top", "3", "--tokens", "1B", "--json")
    data = json.loads(result.stdout)
    assert data["schema"] == 1 and data["status"] == "ok"
    wanted = "pp dp cp tp ep zero_stage micro_batch_size num_micro_batches schedule virtual_stages recompute stages"
    assert set(wanted.split()) <= set(data["plan"])
    plan, estimate, certificate = data["plan"], data["estimate"], data["certificate"]
    assert plan["pp"] * plan["dp"] * plan["cp"] * plan["tp"] == 4 == data["cluster"]["num_devices"]
    assert plan["dp"] * plan["micro_batch_size"] * plan["num_micro_batches"] == 16
    assert sum(plan["stages"]) == 12 == data["model"]["num_layers"]
    step = estimate["step_time_s"]
    assert 0 < step["low"] <= step["mid"] <= step["high"] and step["evidence"] == "assumed"
    assert estimate["tokens_per_s"] == pytest.approx(16 * 1024 / step["mid"])
    assert len(estimate["memory_bytes"]) == plan["pp"]
    assert estimate["memory_bytes"][0]["parameters"]["mid"] > 0
    assert sum(q["mid"] for q in estimate["breakdown_s"].values()) == pytest.approx(step["mid"], rel=0.01)
    parts = [certificate[k] for k in ("illegal", "too_big", "bounded_out", "solved", "open")]
    assert certificate["considered"] == sum(parts) and certificate["gap"] >= 0 and certificate["restrictions"]
    assert estimate["run"]["days"]["mid"] == pytest.approx(1e9 / (16 * 1024) * step["mid"] / 86400)
    assert estimate["run"]["usd"]["mid"] == pytest.approx(estimate["run"]["days"]["mid"] * 24 * 4 * 6.88)
    whole = estimate["run"]
    assert whole["kwh"]["evidence"] == "assumed" and 0 < whole["goodput"]["share"]["mid"] < 1
    kept = whole["days"]["mid"] / whole["days_with_failures"]["mid"]
    assert kept == pytest.approx(whole["goodput"]["share"]["mid"]) and whole["usd_energy"] is None
    assert "table 5" in whole["assumptions"]["mtbf_device_days"]["source"] and whole["notes"] == []
    assert whole["critical_batch_tokens"] > 16 * 1024 and "Kaplan" in whole["critical_batch_source"]
    times = [p["estimate"]["step_time_s"]["mid"] for p in data["alternatives"]]
    assert len(times) == 2 and [step["mid"], *times] == sorted([step["mid"], *times])


def test_pins_are_kept() -> None:
    data = json.loads(run("plan", *TASK, "--pin", "tp=2,zero_stage=3", "--pin", "pp=2", "--json").stdout)
    assert (data["plan"]["tp"], data["plan"]["pp"], data["plan"]["zero_stage"]) == (2, 2, 3)
    assert data["request"]["pins"] == {"tp": 2, "zero_stage": 3, "pp": 2}
    data = json.loads(run("plan", *TASK, "--pin", "pp=2", "--pin", "stages=5,7", "--json").stdout)
    assert data["plan"]["stages"] == [5, 7]


def test_the_next_command_prices_the_same_plan() -> None:
    """A round trip: what `plan` prints as the next command gives the plan's own step time."""
    request = PlanRequest(load_model("gpt2"), Cluster.parse(TASK[2]), 1024, 16, {"pp": 2, "recompute": "full"})
    best = search_plan(request).plans[0]
    words = estimate_command("gpt2", TASK[2], request, best.config)
    data = json.loads(run(*words[1:], "--json").stdout)
    assert data["estimate"]["step_time_s"]["mid"] == pytest.approx(best.estimate.step_time_s.mid)
    assert data["plan"]["stages"] == list(best.config.stages or ())


BAD = [
    (("plan", "gtp2", *TASK[1:]), "unknown model 'gtp2'; did you mean gpt2"),
    (("plan", "nowhere/config.json", *TASK[1:]), "no file nowhere/config.json"),
    (("plan", "gpt2", "--cluster", "12xh100", *TASK[3:]), "for example 2x8xh100-sxm5-80gb"),
    (("plan", *TASK, "--pin", "tp=3"), "pin tp=3 does not divide the 4 devices; nearest legal: tp=2 or 4"),
    (("plan", *TASK, "--pin", "pt=2"), "unknown pin 'pt'"),
    (("plan", *TASK, "--pin", "tp"), "not name=value"),
    (("plan", *TASK, "--pin", "tp=2", "--pin", "tp=4"), "given twice"),
    (("plan", *TASK, "--pin", "stages=a,b"), "whole numbers separated by commas"),
    (("plan", *TASK, "--mode", "turbo"), "use eager, fused, compiled"),
    (("plan", *TASK, "--precision", "int4"), "'int4' is not known; use native, bf16"),
    (("plan", *TASK, "--precision", ""), "precision '' is not known; use native, bf16"),
    (("plan", *TASK, "--like", "torchtitan", "--precision", ""), "precision '' is not known; use native, bf16"),
    (("plan", *TASK, "--mode", ""), "mode '' is not known; use eager"),
    (("estimate", *TASK, "--pp", "2", "--schedule", "gpipe"), "nearest legal: schedule='GPipe'"),
    (("plan", *TASK, "--dispatcher", "deep"), "dispatcher 'deep' is not known; use alltoall, flex, flex_fp8"),
    (("estimate", *TASK, "--timeline", "nowhere/t.json"), "cannot write nowhere/t.json: there is no folder nowhere"),
    (("whatif", *TASK, "--vary", "tp=1", "--csv", "nowhere/w.csv"), "cannot write nowhere/w.csv: there is no folder"),
    (("profile", "--write-cluster", "nowhere/c.yaml"), "cannot write nowhere/c.yaml: there is no folder nowhere"),
    (("plan", *TASK, "--profile", "nobody"), "profile 'nobody' is not known"),
    (("plan", *TASK, "--tokens", "lots"), "--tokens 'lots' must be a number above 0"),
    (("plan", *TASK, "--assume", "pue=1.1"), "give its size too, for example --tokens 300B"),
    (("plan", *TASK, "--tokens", "1B", "--assume", "pue"), "--assume 'pue' is not name=number"),
    (("estimate", *TASK, "--tokens", "1B", "--assume", "pue=20"), "--assume: pue=20.0 must be a number from 1 to 10"),
    (
        ("whatif", *TASK, "--vary", "tp=1", "--tokens", "1B", "--assume", "mtbf=1"),
        "unknown name 'mtbf'; did you mean 'mtbf_device_days'?",
    ),
    (("plan", *TASK[:4], "0", *TASK[5:]), "--seq-len '0' must be a number above 0, with k, M, B or T for powers of"),
    (("plan", *TASK, "--tokens", "1t"), "--tokens '1t' must be a number above 0, with k, M, B or T for thousands to"),
    (("plan", *TASK[:6], "1.5"), "--global-batch-size '1.5' must be a whole number"),
    (("estimate", *TASK, "--tp", "3"), "does not divide the 4 devices"),
    (("estimate", *TASK, "--dp", "2"), "nearest legal: dp=4"),
    (("estimate", *TASK, "--micro-batch-size", "3"), "nearest legal: micro_batch_size=2 or 4"),
    (("estimate", *TASK, "--zero", "4"), "use 0, 1, 2 or 3"),
    (("estimate", *TASK, "--recompute", "some"), "use none, selective, full"),
    (("estimate", *TASK, "--schedule", "2F2B"), "use GPipe, 1F1B"),
    (("estimate", *TASK, "--virtual-stages", "2"), "needs a pipeline"),
    (("estimate", *TASK, "--pp", "0"), "pp=0: must be"),
    (("whatif", *TASK, "--vary", "nodes"), "not name=values"),
    (("whatif", *TASK, "--vary", "color=1"), "vary: unknown name 'color'; known: nodes"),
    (("whatif", *TASK, "--vary", "nodes=8..2"), "write 2..8"),
    (("whatif", *TASK, "--vary", "nodes=1", "--vary", "nodes=2"), "given twice"),
    (("plan", *TASK[:6], "1e12"), "global_batch_size=1000000000000 must be a whole number from 1 to 10,000,000"),
    (("plan", *TASK, "--time-limit", "inf"), "time_limit_s=inf must be a finite number"),
    (("plan", "gpt2", "--cluster", "1x4xh100-sxm5-80gb@memory_gb=1e308", *TASK[3:]), "from 1e-09 to 1e+06 GB"),
    (("estimate", *TASK, "--etp", "0"), "etp=0: must be"),
    (("estimate", *TASK, "--ep=-1"), "ep=-1: must be"),
    (("estimate", *TASK, "--virtual-stages", "0"), "virtual_stages=0: must be"),
    (("whatif", *TASK, "--vary", "seq_len=1e12"), "seq_len=1e12: 1e12 must be a whole number"),
    (("hw", "show", "a100"), "device 'a100' may be a100-sxm4-40gb or a100-sxm4-80gb; write one of them"),
]


@pytest.mark.parametrize(("words", "message"), BAD, ids=[" ".join(w[:1] + w[7:]) or m for w, m in BAD])
def test_bad_input_is_one_line_and_exit_code_2(words: tuple[str, ...], message: str) -> None:
    assert message in one_line_error(run(*words), 2)


def test_nothing_fits_says_what_would() -> None:
    words = ("plan", "gpt2", "--cluster", "1x1xh100-sxm5-80gb@memory_gb=2", *TASK[3:])
    result = run(*words, "--json")
    line = one_line_error(result, 3)
    assert "nothing fits" in line and "stage 0" in line and "a device has 2.0 GB" in line and "it fits" in line
    data = json.loads(result.stdout)
    assert data["status"] == "infeasible" and data["stage"] == 0 and data["term"]
    assert data["needed_bytes"] > data["available_bytes"] == 2e9 and "fits" in data["cheapest_change"]
    fitting = shlex.split(line.partition("Other ways to train it: ")[2])
    assert fitting[:5] == ["autoplan", "fit", *words[1:4]]
    answer = run(*fitting[1:], "--no-ways")  # it can be copied
    assert answer.exit_code == 3 and "NO, it does not fit" in answer.stdout


# -- estimate ----------------------------------------------------------------------------------------------------------


def test_estimate_of_one_configuration() -> None:
    words = ("estimate", *TASK, "--tp", "2", "--pp", "2", "--recompute", "full", "--stages", "5,7")
    data = json.loads(run(*words, "--json").stdout)
    plan = data["plan"]
    assert (plan["dp"], plan["tp"], plan["pp"], plan["num_micro_batches"]) == (1, 2, 2, 16)
    assert plan["stages"] == [5, 7] and plan["recompute"] == "full" and "certificate" not in data
    assert [s["num_recomputed"] for s in data["estimate"]["stages"]] == [5, 7]
    text = run(*words).stdout
    assert "PLAN  tp2 pp2 mbs1 x16 recompute full" in text and "stage 1" in text
    assert all(len(line) <= 110 for line in text.splitlines())


def test_an_estimate_that_does_not_fit_is_shown_and_is_exit_code_3() -> None:
    result = run("estimate", "gpt2", "--cluster", "1x4xh100-sxm5-80gb@memory_gb=2", *TASK[3:])
    assert "DOES NOT FIT" in result.stdout
    assert re.search(r"does not fit: stage 0 needs .* its largest term is", one_line_error(result, 3))


# -- run options, constants --------------------------------------------------------------------------------------------

EVERYTHING = RunOptions(
    Attention.FLASH1,
    Launch.GRAPHS,
    frozenset({"tp", "ep"}),
    Dispatcher.FLEX_FP8,
    False,
    True,
    True,
    True,
    fused_loss=FusedLoss.COMPILED,
    overlap_zero=False,
    document_len=256,
    overlap_gather=False,
    zero_by_tensor=True,
    whole_sums=True,
    sends=Sends.SPLIT,
    zero_bucket=1000,
    expandable_segments=True,
    fused_accumulation=False,
    reruns=Reruns.WHOLE,
    whole_losses=True,
    fused_norms=True,
    wide_sums=True,
    all_reduced=True,
    reduce_once=True,
    module_hooks=True,
    host_sums=True,
)  # nothing of it is a default


def test_every_run_option_is_shown_and_comes_back() -> None:
    """What is given on the command line is in the text, in the JSON, and in the command that comes next."""
    assert all(getattr(EVERYTHING, f.name) != f.default for f in fields(RunOptions))
    model, words = ("llama-3.2-1b", *TASK[1:]), tuple(choice_words(EVERYTHING))
    result = run("estimate", *model, "--tp", "2", *words)
    text = " ".join(result.stdout.replace("\\", "").split())
    assert "flash1 attention, graphs launch, overlap of ep and tp, flex_fp8 dispatcher, no sequence parallelism" in text
    assert "compiled loss, whole losses, fused norms, ZeRO not overlapped, ZeRO 3 by tensor" in text
    assert "whole sums of gradients, gradients reduced in 32 bits, gradients all-reduced" in text
    assert "gradients reduced once, hooks around every module, gradients summed on the host, buckets of 1000" in text
    assert "expandable segments, gradients added apart from products, split sends" in text
    assert "documents of 256 tokens" in text, text
    assert text.endswith(" ".join(words)) and "weights gathered in 8 bits" not in text  # bf16
    request = json.loads(run("estimate", *model, "--tp", "2", *words, "--json").stdout)["request"]
    assert options_of({name: request[name] for name in OPTIONS}) == EVERYTHING
    swept = json.loads(run("whatif", *model, "--vary", "tp=2", *words, "--json").stdout)
    assert options_of({name: swept["request"][name] for name in OPTIONS}) == EVERYTHING
    assert swept["vary"] == {"tp": [2]} and swept["status"] == "ok"
    plain = json.loads(run("estimate", *TASK, "--json").stdout)["request"]
    assert options_of({**{name: plain[name] for name in OPTIONS}, "attention": None}) == RunOptions()
    assert choice_words(RunOptions()) == [] and options_of(option_data(EVERYTHING)) == EVERYTHING
    assert option_texts(RunOptions(overlap_gather=False)) == ["gathers of ZeRO not overlapped"]
    narrow = RunOptions(narrow_gather=True)
    assert option_texts(narrow) == option_texts(narrow, "mxfp8") == ["weights gathered in 8 bits"]
    assert option_texts(narrow, "bf16-grad16") == []


def test_options_of_a_mapping_say_what_is_wrong() -> None:
    assert options_of({"overlap": "tp, cp", "launch": None}).overlap == {"tp", "cp"}
    for data, says in (
        ({"lunch": 1}, "unknown option 'lunch'; did you mean 'launch'? known: attention, launch, overlap, dispatcher"),
        ({"fused_experts": "yes"}, "fused_experts='yes' must be true or false"),
        ({"overlap": 3}, "overlap=3 must be a list of tp, ep, pp, cp"),
        ({"overlap": ["dp"]}, "overlap of 'dp' is not known; use tp, ep, pp, cp"),
        ({"launch": 3}, "launch 3 is not known; use async"),
        ([], "must be a mapping"),
    ):
        with pytest.raises(PinError, match=re.escape(says)):
            options_of(data)


def test_a_layout_that_needs_sequence_parallelism_says_so() -> None:
    line = one_line_error(run("estimate", *TASK, "--tp", "2", "--no-sequence-parallel"), 3)
    assert "no layout of gpt2 exists at tp=2 without sequence parallelism" in line and "or use tp=1" in line


def test_whatif_in_python_takes_options_and_constants(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[PlanRequest] = []

    def search(request: PlanRequest) -> Any:
        seen.append(request)
        raise InfeasibleError("too big")

    monkeypatch.setattr("autoplan.sweeps.whatif.points", lambda base, vary: points(base, vary, search))
    file = tmp_path / "c.json"
    file.write_text('{"constants": {"memory_share": 0.7}}')
    given: list[tuple[Any, Any]] = [(EVERYTHING, str(file)), ({"launch": "graphs"}, Constants()), (None, None)]
    for options, constants in given:
        whatif("gpt2", TASK[2], 1024, 16, vary={"tp": [1]}, options=options, constants=constants)
    assert [r.options for r in seen] == [EVERYTHING, RunOptions(launch=Launch.GRAPHS), RunOptions()]
    assert [r.constants.memory_share for r in seen[:2]] == [0.7, Constants().memory_share]
    assert [r.constants_file for r in seen] == [str(file), None, None] and seen[2].constants == Constants.shipped()


def test_help_names_all_that_there_is() -> None:
    helps = {name: " ".join(run(name, "--help").stdout.split()) for name in ("plan", "estimate", "whatif")}
    for text in helps.values():
        assert all(re.search(rf"\b{re.escape(name)}\b", text) for name in (*PRECISIONS, "bf16-grad16"))
        assert f"separated by commas: {', '.join(OVERLAPS)}" in text
        assert all(f"--{name.replace('_', '-')}" in text for name in OPTIONS), text
    assert all(re.search(rf"\b{name}\b", helps["whatif"]) for name in VARIED)


def test_help_cuts_no_sentence_off_and_names_the_defaults_that_hold() -> None:
    for words in ((), ("hw",)):
        text = run(*words, "--help").stdout
        assert "..." not in text.removeprefix(text.splitlines()[0]) and "Other:" not in text
    asked = ("plan", "explain", "whatif", "fit", "check")
    shown = {name: " ".join(run(name, "--help").stdout.split()) for name in asked}
    limits = [re.findall(r"default: ([\d.]+); x>=0", shown[name])[-1] for name in asked[:3]]
    assert list(map(float, limits)) == [SCREEN_LIMIT_S, SCREEN_LIMIT_S, SearchSettings.time_limit_s]
    assert [name for name, text in shown.items() if "usual run" in text] == list(asked[:3])


def test_waiting_for_the_host_is_a_term_in_words() -> None:
    assert "waiting for the host" in run("estimate", *TASK, "--launch", "blocking").stdout


@pytest.mark.parametrize("words", [("calibrate", "s.yaml"), ("profile", "--model", "mine:make")])
def test_models_are_found_where_the_user_stands(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found: list[bool] = []

    def command(*_: object) -> Any:
        found.append(str(tmp_path) in sys.path)
        return lambda: None

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("autoplan.calibration.command.calibrate_command", command)
    monkeypatch.setattr("autoplan.profiler.command.profile_command", command)
    assert CliRunner().invoke(app, list(words), env=PLAIN).exit_code == 0 and found == [True]


# -- the rest ----------------------------------------------------------------------------------------------------------


def test_catalogs() -> None:
    listed = run("models").stdout
    assert all(name in listed for name in names())
    devices = run("hw", "list").stdout
    assert all(name in devices for name in entries())
    shown = run("hw", "show", "mi300x-192gb").stdout
    assert "64 to one peer" in shown and "scaleout_gbit_s_per_device" in shown and "stas00/ml-engineering" in shown
    data = json.loads(run("hw", "show", "h100-sxm5-80gb", "--json").stdout)
    assert data["device"]["peak_flops"]["bfloat16"] == 989e12
    assert "AWS" in {i["provider"] for i in data["device"]["instances"]}
    for words in (("p5.48xlarge",), ("h100",)):  # an instance, and a device as people write it
        assert json.loads(run("hw", "show", *words, "--json").stdout) == data
    assert {m["name"] for m in json.loads(run("models", "--json").stdout)["models"]} == set(names())
    for text in (listed, devices, shown):
        assert all(len(line) <= 110 for line in text.splitlines())


def test_labels() -> None:
    config = ParallelConfig(dp=4, tp=2, pp=2, zero_stage=1, num_micro_batches=8)
    assert plan_label(config) == "tp2 pp2 dp4 zero1 mbs1 x8"
    odd = replace(config, cp=2, ep=4, etp=1, recompute=(3, 0), schedule="GPipe", virtual_stages=2)
    assert plan_label(odd) == "tp2 cp2 pp2 dp4 ep4 etp1 zero1 mbs1 x8 vpp2 recompute full 3 GPipe"
    assert plan_label(ParallelConfig()) == "mbs1 x1"


@pytest.mark.parametrize(
    ("text", "value"),
    [("8k", 8192), ("300", 300), ("1_000", 1000), ("2K", 2048), ("1M", 1024**2), ("1.5k", 1536)],
)
def test_counts(text: str, value: int) -> None:
    assert numbers.read_count(text, "x") == value


def test_what_is_varied() -> None:
    assert read_vary(["nic=100..400", "gbs=1k,2k", "zero_stage=0,3"]) == {
        "nic": [100, 200, 400],
        "global_batch_size": [1024, 2048],
        "zero_stage": [0, 3],
    }
    clusters = read_vary(["cluster=local:2@memory_gb=8,price=1,local:4"])["cluster"]
    assert clusters == ["local:2@memory_gb=8,price=1", "local:4"]
    assert read_pin_words(["stages=1,2,tp=2", "state_slack=1.5"]) == {"stages": (1, 2), "tp": 2, "state_slack": 1.5}


def test_numbers() -> None:
    assert numbers.read_number("1M", "x") == 1e6 and numbers.read_number("1M", "x", binary=True) == 2**20
    assert numbers.read_number("300B", "x") == 3e11 and numbers.read_number("15T", "x") == 1.5e13
    assert numbers.read_series("100..1600", "x", whole=True, binary=False) == [100, 200, 400, 800, 1600]
    assert numbers.read_series("1..10,3", "x", whole=True, binary=True) == [1, 2, 4, 8, 10, 3]
    assert numbers.read_series("8k,128k", "x", whole=True, binary=True) == [8192, 131072]
    for bad in ("", "-1", "0", "1x", "nan", "1e999k"):
        with pytest.raises(PinError, match="must be a"):
            numbers.read_count(bad, "x")
    assert [numbers.digits(v) for v in (1.7, 63.51, 1234.5, 0.01234, 0, 9.999)] == [
        "1.70", "63.5", "1,234", "0.0123", "0", "10.0"
    ]  # fmt: skip
    assert [numbers.dollars(v) for v in (0.5, 87, 562_000, 1_240_000)] == ["$0.50", "$87", "$562k", "$1.24M"]
    assert [numbers.scaled(v) for v in (8.03e9, 131_000, 12, 999_900)] == ["8.03 B", "131 k", "12", "1 M"]
    assert [numbers.percent(v) for v in (0.47, 0.003, 0, 0.0001)] == ["47 %", "0.3 %", "0 %", "<0.1 %"]
    assert numbers.days(26.61) == "26.6 d" and numbers.days(0.5) == "12.0 h"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("plan", *TASK, "--json"), 0),
        (("plan", "gtp2", *TASK[1:]), 2),
        (("plan", "gpt2"), 2),
        (("plan", "gpt2", "--cluster", "1x1xh100-sxm5-80gb@memory_gb=1", *TASK[3:]), 3),
    ],
)
def test_exit_codes_of_the_process(words: tuple[str, ...], code: int) -> None:
    done = shell(*words)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr and bool(done.stdout) == (code == 0)
    if code:
        assert done.stderr.count("rror: ") == 1
    else:
        assert json.loads(done.stdout)["plan"] and not done.stderr


def test_a_plan_of_a_catalog_model_loads_no_torch() -> None:
    code = (
        "import sys\nfrom autoplan.cli import app\n"
        f"app({['plan', *TASK]!r}, standalone_mode=False)\n"
        "print('loaded', sorted(m for m in ('torch', 'transformers', 'pandas', 'spmd_types') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded []" and "FITS" in done.stdout


def test_help_and_version_load_no_planner() -> None:
    code = (
        "import sys\nfrom autoplan.cli import app\n"
        "app(['--version'], standalone_mode=False)\n"
        "print(sorted(m for m in sys.modules if m in ('numpy', 'pulp', 'autoplan.search.planner', 'torch')))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == [f"autoplan {autoplan.__version__}", "[]"], done.stderr


def test_colour_only_where_wanted() -> None:
    words = ("hw", "show", "h100-sxm5-80gb")
    assert "\x1b[" not in shell(*words).stdout
    assert "\x1b[" in shell(*words, FORCE_COLOR="1", NO_COLOR="", TERM="xterm").stdout
    assert not re.search(r"\x1b\[[\d;]*3\dm", shell(*words, FORCE_COLOR="1", NO_COLOR="1", TERM="xterm").stdout)


def test_profile_hands_everything_on(monkeypatch: pytest.MonkeyPatch) -> None:
    import autoplan.profiler.command as profiler

    got: list[object] = []
    monkeypatch.setattr(profiler, "profile_command", lambda *args: got.extend(args), raising=False)
    result = CliRunner().invoke(app, ["profile", "here", "--processes", "2", "--budget", "9", "--out", "p.json"])
    assert result.exit_code == 0, result.output
    assert got == ["here", 2, 9.0, None, Path("p.json"), None]


def test_modes_and_precisions_reach_the_planner() -> None:
    graph, cluster = load_model("gpt2"), Cluster.parse(TASK[2])
    request = PlanRequest(graph, cluster, 1024, 16, precision="fp32", mode=Mode.FUSED)
    config = ParallelConfig(dp=4, micro_batch_size=2, num_micro_batches=2)
    expected = estimate_config(request, config).estimate
    words = ("estimate", *TASK, "--mbs", "2", "--precision", "fp32", "--mode", "fused", "--json")
    data = json.loads(run(*words).stdout)
    assert data["estimate"]["step_time_s"]["mid"] == pytest.approx(expected.step_time_s.mid)
    assert data["request"]["precision"] == "fp32" and data["request"]["mode"] == "fused"
