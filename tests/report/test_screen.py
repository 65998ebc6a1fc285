"""The first screen of `autoplan plan`: its text at two widths, its defaults, and the commands it ends with."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import ROOT, one_line_error, run, shell
from made_up_plans import CERTIFICATE, OWN, REQUEST, SPLIT, STOPPED, golden, shown

from autoplan import catalog
from autoplan.config.choices import option_texts
from autoplan.config.kernels import Launch
from autoplan.config.parallel import ParallelConfig, RunOptions
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.errors import AutoplanError, PinError
from autoplan.report.screen import Answer, first_screen, verdict, words_of_plan
from autoplan.search.planner import SearchResult
from autoplan.sweeps.explain import Setting
from autoplan.sweeps.whatif import RunTask

GAINS = (
    Setting("nic", "network between nodes, Gbit/s per device", 400.0, 800.0, 0.041),
    Setting("precision", "precision", "bf16", "fp8", 0.38),
)
EQUALS = ((ParallelConfig(dp=4, zero_stage=3, micro_batch_size=16), 0.1),)
RESULT = SearchResult((OWN, SPLIT), CERTIFICATE, REQUEST, EQUALS)
ANSWER = Answer("gpt2", "4xh100@price=2", REQUEST, RESULT, RunTask(3e11), ("seq_len",), True, GAINS)


@pytest.mark.parametrize("width", [80, 120])
def test_the_first_screen(width: int) -> None:
    text = shown(lambda out: first_screen(out, ANSWER), width)
    golden(f"screen_{width}.txt", text)
    assert max(map(len, text.splitlines())) <= width and len(text.splitlines()) <= 40


def test_options_that_change_the_price_are_on_the_screen() -> None:
    graphs = replace(REQUEST, options=RunOptions(launch=Launch.GRAPHS))
    text = shown(lambda out: first_screen(out, replace(ANSWER, request=graphs)), 120)
    assert f"bf16, eager, {', '.join(option_texts(graphs.options))}\n" in text and option_texts(graphs.options)


def test_the_readme_shows_this_screen() -> None:
    """Its figures are of the day they were made; the lines are those of today."""

    def labels(text: str) -> list[str]:
        return re.findall(r"^(?:autoplan|[A-Za-z]+(?: good)?)(?=:? )", text, flags=re.MULTILINE)

    (shown_there,) = re.findall(r"```text\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert labels(shown_there) == labels(shown(lambda out: first_screen(out, ANSWER), 80))
    assert max(map(len, shown_there.splitlines())) <= 80


def test_several_stages_have_a_bar_each() -> None:
    """The bar of the fuller stage is longer, and a high end above the limit ends at the limit."""
    (stage,) = OWN.estimate.stages
    full = replace(stage, index=1, memory={"activations": replace(stage.memory["activations"], mid=60e9, high=90e9)})
    planned = replace(OWN, estimate=replace(OWN.estimate, stages=(stage, full)))
    text = shown(lambda out: first_screen(out, replace(ANSWER, result=replace(RESULT, plans=(planned,)))), 80)
    first, second = re.findall(r"stage \d \[(.*)\|\]", text)
    assert len(first) == len(second) and first.count("#") == round(len(first) / 4)
    assert second.count("#") == round(len(first) * 3 / 4) and " " not in second


@pytest.mark.parametrize(
    ("certificate", "words"),
    [
        (CERTIFICATE, "proved the best of 1,362 candidates"),
        (STOPPED, "the best found among 1,362 candidates, 1,361 undecided (stopped by time limit)"),
        (replace(STOPPED, gap=1.0), "the bounds of this search do not say how close it is to the best"),
    ],
)
def test_verdicts(certificate: object, words: str) -> None:
    """A bound that says nothing is no fault of the plan: no gap of 100 % is printed."""
    said = verdict(certificate, RESULT)  # type: ignore[arg-type]
    assert words in said and "100 %" not in said and "the simplest of 2 equally fast ones" in said
    assert ("25 %" in said) == (certificate is STOPPED)


def test_a_plan_in_words() -> None:
    config = ParallelConfig(dp=2, tp=4, pp=4, virtual_stages=2, schedule="Interleaved1F1B", zero_stage=1)
    assert words_of_plan(config, 12) == (
        "tensor parallel over 4 devices; 4 pipeline stages of 2 parts each (Interleaved1F1B); 2 replicas; "
        "optimizer state sharded (ZeRO 1); 1 micro-batch of 1 per replica"
    )


@pytest.mark.parametrize(
    ("recompute", "words"),
    [
        ("none", ""),
        ("full", "; recompute full"),
        ("offload", "; activations on the host"),
        (
            {"a": "full", "b": "offload", "c": "offload", "d": "mlp+norms"},
            "; recompute full 1/4, mlp+norms 1/4 layers; activations of 2/4 layers on the host",
        ),
        ({"a": "offload", "b": "none"}, "; activations of 1/4 layers on the host"),
    ],
)
def test_what_layers_do_for_their_backward_in_words(recompute: object, words: str) -> None:
    """A layer that sends its activations to the host is not recomputed."""
    config = ParallelConfig(recompute=recompute, offload=("optimizer",))  # type: ignore[arg-type]
    assert words_of_plan(config, 4) == f"1 micro-batch of 1 per replica{words}; on the host: optimizer"


def test_what_is_not_given_is_the_models_usual_run() -> None:
    """And the commands that the screen ends with give the same numbers as the short one."""
    words = ("plan", "gpt2", "--cluster", "4xh100", "--pin", "tp=1", "--pin", "micro_batch_size=16")
    shown = run(*words).stdout
    data = json.loads(run(*words, "--json").stdout)
    usual = catalog.usual_run("gpt2")
    assert usual is not None
    assert (data["request"]["seq_len"], data["request"]["global_batch_size"]) == (
        usual.seq_len,
        usual.global_batch_size,
    )
    assert "1,024 tokens x 512 sequences (usual for this model)" in shown and "300 B tokens (usual):" in shown
    estimate, explain, whatif = (shlex.split(c) for c in re.findall(r"autoplan .*", shown.replace("\\\n", " ")[20:]))
    again = json.loads(run(*estimate[1:], "--json").stdout)
    assert again["estimate"] == data["estimate"]
    assert {**again["plan"], "recompute": [0]} == data["plan"]  # "none" in other words
    assert explain[1:3] == ["explain", "gpt2"] and explain.count("--pin") == 2
    nodes = whatif.index("--vary") + 1
    row, *_ = json.loads(run(*whatif[1:nodes], "nodes=1", "--json").stdout)["rows"]
    assert row["step_time_s"] == data["estimate"]["step_time_s"]["mid"]


def test_a_fine_tuning_run_has_no_usual_tokens() -> None:
    words = ("plan", "gpt2", "--cluster", "1xh100", "--gbs", "8", "--pin", "micro_batch_size=8", "--adapters", "lora:8")
    assert "no usual number of tokens is known" in run(*words).stdout
    assert "bf16, eager, adapters lora:8, pinned micro_batch_size=8" in " ".join(run(*words).stdout.split())


def test_a_model_without_a_usual_run_needs_the_flags(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(catalog.configs()["gpt2"]["config"]))
    line = one_line_error(run("plan", str(config), "--cluster", "4xh100"), 2)
    assert "--seq-len is missing" in line
    assert "unknown model 'gtp2'; did you mean gpt2" in one_line_error(run("plan", "gtp2", "--cluster", "4xh100"), 2)


def test_usual_runs_are_whole_and_have_a_source() -> None:
    for name in catalog.names():
        usual = catalog.usual_run(name)
        assert usual is not None and usual.source, name
        assert 2**17 <= usual.seq_len * usual.global_batch_size <= 2**26, name
        assert ("tokens not published;" in usual.source) == (usual.tokens is None), name
        assert usual.tokens is None or 1e11 <= usual.tokens <= 5e13, name


def test_devices_that_fill_nodes_are_nodes() -> None:
    assert Cluster.parse("64xh100") == Cluster.parse("8x8xh100") and Cluster.parse("8xh100").num_nodes == 1
    with pytest.raises(PinError, match="2x8xh100-sxm5-80gb"):
        Cluster.parse("12xh100")
    with pytest.raises(AutoplanError):
        catalog.usual_run("nobody-7b")


def test_piped_output_keeps_to_columns() -> None:
    done = shell("plan", "gpt2", "--cluster", "4xh100", "--pin", "tp=1", COLUMNS="60")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert (
        max(len(line) for line in lines if not line.startswith("      autoplan")) <= 62 and "\x1b[" not in done.stdout
    )
