"""The command that a plan proposes next prices that very plan: the same seconds and bytes, to the last digit."""

import json
import re
import shlex
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import pytest
from command_line import TASK, one_line_error, run

from autoplan.catalog import load_model
from autoplan.config.choices import CHOICES, PINS, config_data
from autoplan.config.parallel import Mode, ParallelConfig, RunOptions
from autoplan.config.recompute import recompute_of_text, recompute_text
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.profile import Profile
from autoplan.cost_models.whole_run import Assumptions
from autoplan.errors import PinError
from autoplan.program.facts import layer_calls
from autoplan.report import commands, data, text
from autoplan.search.planner import PlanRequest, estimate_config, search_plan
from autoplan.sweeps.whatif import RunTask

ONE, TWO = "1x8xh100-sxm5-80gb", "2x8xh100-sxm5-80gb"


def asked(model: str, cluster: str, seq_len: int, batch: int, **more: Any) -> PlanRequest:
    return PlanRequest(load_model(model), Cluster.parse(cluster), seq_len, batch, **more)


def priced(*words: str) -> dict[str, Any]:
    result = run(*words, "--json")
    assert result.exit_code in (0, 3), result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def plain(what: dict[str, Any]) -> Any:
    return json.loads(json.dumps(what))


SEARCHED = {
    "recompute by region": ("llama-3.2-1b", f"{ONE}@memory_gb=13", 4096, 64, {"pp": 1, "tp": 1}),
    "uneven stages, V schedule, by region": ("llama-3.2-1b", f"{ONE}@memory_gb=9", 4096, 32, {"pp": 4, "tp": 2}),
    "offload": ("llama-3.2-1b", f"1x2x{ONE[4:]}@memory_gb=10,host_memory_gb=200", 2048, 8, {"pp": 2}),
    "zero replicas": ("llama-3.2-1b", TWO, 4096, 64, {"zero_replicas": 2, "zero_stage": 3, "tp": 1, "pp": 1}),
    "context": ("llama-3.2-1b", ONE, 16384, 8, {"cp": 4, "tp": 1, "pp": 1}),
}


@pytest.mark.parametrize("name", SEARCHED)
def test_what_a_plan_prints_next_prices_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    model, cluster, seq_len, batch, pins = SEARCHED[name]
    request = asked(model, cluster, seq_len, batch, pins=pins)
    result = search_plan(request)
    best = result.plans[0]
    text.plan_text(text.console(), model, cluster, request, result, RunTask(3e11, Assumptions({"pue": 1.25})))
    shown = capsys.readouterr().out.replace("\\\n", " ")
    (line,) = re.findall(r"Next: (autoplan estimate .*)", shown)
    words = shlex.split(line)[1:]
    again = priced(*words)
    whole = data.estimate_data(best.estimate)
    assert {**again["estimate"], "run": None} == plain(whole)
    assert again["estimate"]["run"]["tokens"] == 3e11 and again["plan"]["stages"] == list(best.config.stages or ())
    if name != "zero replicas" and name != "context":
        assert any(flag in words for flag in ("--recompute", "--offload"))
        for flag in ("--recompute", "--offload"):  # negative: without them it is another plan
            if flag in words:
                k = words.index(flag)
                assert (
                    priced(*words[:k], *words[k + 2 :])["estimate"]["memory_bytes"] != again["estimate"]["memory_bytes"]
                )


LAYERS = tuple(layer_calls(load_model("llama-3.2-1b")))
GIVEN: dict[str, tuple[PlanRequest, ParallelConfig]] = {
    "by layer": (
        asked("llama-3.2-1b", ONE, 2048, 32),
        ParallelConfig(dp=4, pp=2, num_micro_batches=8, stages=(9, 7), recompute={LAYERS[0]: "full", LAYERS[8]: "mlp"}),
    ),
    "per stage": (
        asked("llama-3.2-1b", ONE, 2048, 32),
        ParallelConfig(dp=4, pp=2, num_micro_batches=8, stages=(9, 7), recompute=(3, 0)),
    ),
    "several chunks": (
        asked("llama-3.2-1b", ONE, 2048, 32),
        ParallelConfig(
            dp=2, pp=4, num_micro_batches=16, schedule="Interleaved1F1B", virtual_stages=2,
            stages=(1, 3, 2, 2, 2, 2, 2, 2),
        ),
    ),
    "experts": (
        asked("mixtral-8x7b", TWO, 2048, 64),
        ParallelConfig(dp=8, tp=2, ep=4, etp=1, zero_stage=3, num_micro_batches=8, recompute="selective"),
    ),
    "executed experts": (
        asked("mixtral-8x7b", TWO, 2048, 64, executed=True),
        ParallelConfig(dp=8, tp=2, ep=4, etp=1, zero_stage=3, num_micro_batches=8),
    ),
    "context by block": (
        asked("llama-3.2-1b", ONE, 16384, 8),
        ParallelConfig(dp=2, cp=4, num_micro_batches=4, context_method={"layer": "ulysses2xring2"}),
    ),
    "options": (
        asked(
            "llama-3.2-1b", ONE, 2048, 32, precision="fp8", mode=Mode.FUSED,
            options=RunOptions(overlap=frozenset(("tp",)), sequence_parallel=False),
        ),
        ParallelConfig(dp=4, tp=2, zero_stage=2, num_micro_batches=8, recompute="modules:mlp", offload=("optimizer",)),
    ),
    "slack": (
        asked("llama-3.2-1b", ONE, 2048, 32),
        ParallelConfig(dp=2, tp=4, num_micro_batches=16, state_slack=2.0, recompute="offload"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GIVEN)
def test_a_configuration_comes_back_from_its_command(name: str) -> None:
    request, config = GIVEN[name]
    planned = estimate_config(request, config)
    cluster = ONE if request.cluster.num_nodes == 1 else TWO
    words = commands.estimate_command(request.graph.name, cluster, request, planned.config)
    again = priced(*words[1:])
    assert again["estimate"] == plain(data.estimate_data(planned.estimate))
    same = {"recompute": None, "context_method": None}  # by name and by block they are written differently
    assert again["plan"] | same == plain(config_data(planned.config) | same)


def test_every_field_of_a_plan_has_its_words() -> None:
    """A degree that is added without words for the command would be lost in it silently."""
    assert tuple(f.name for f in fields(ParallelConfig)) == PINS
    assert [record.name for record in CHOICES if not record.help] == ["num_micro_batches"]  # what the batch leaves


def test_recompute_by_layer_is_read_as_it_is_written() -> None:
    mapping = {
        LAYERS[0]: "full",
        LAYERS[1]: "full",
        LAYERS[2]: "none",
        LAYERS[5]: "attention+norms",
        LAYERS[15]: "full",
    }
    written = recompute_text(mapping, LAYERS)
    assert written == "0-1=full,5=attention+norms,15=full"
    assert recompute_of_text(written, LAYERS) == {name: how for name, how in mapping.items() if how != "none"}
    assert recompute_of_text("head=full,3=mlp", LAYERS) == {"head": "full", LAYERS[3]: "mlp"}
    assert recompute_text({"head": "full", LAYERS[3]: "mlp"}, LAYERS) == "head=full,3=mlp"
    assert [recompute_text(r, LAYERS) for r in ("full", (3, 0), (0, 0), {})] == ["full", "3,0", "none", "none"]
    for text_, message in (
        ("14-16=full", "14-16 must be layers from 0 to 15; nearest legal: 14-15=full"),
        ("99=mlp", "nearest legal: 15-15=mlp"),
        ("0-3=full,2=mlp", "each layer once"),
        ("0=", "not LAYERS=CHOICE"),
        ("0=most", "recompute='most' is not supported"),
    ):
        with pytest.raises(PinError, match=re.escape(message)):
            recompute_of_text(text_, LAYERS)
    line = one_line_error(
        run("estimate", "gpt2", "-c", ONE, "--seq", "1k", "--gbs", "8", "--recompute", "9-12=full"), 2
    )
    assert line.endswith("nearest legal: 9-11=full")


def test_long_commands_break_between_words() -> None:
    """A word with a blank in it stays whole: a shell reads the lines as the words that they were made of."""
    words = ["autoplan", "estimate", "my models/config.json", "--cluster", "a b c.yaml", *(["--flag", "value"] * 20)]
    lines = commands.wrapped(words, 40)
    assert shlex.split("\n".join(lines).replace("\\\n", "")) == words and len(lines) > 5
    assert all(line.endswith(" \\") for line in lines[:-1]) and max(map(len, lines)) <= 42


def test_mfu_is_given_with_attention_in_full_and_causal() -> None:
    """6 N + 12 L h s per token, and with half of its second term; at long sequences they are far apart."""
    cluster, graph = Cluster.parse(ONE), load_model("llama-3.2-1b")
    for seq_len in (2048, 262144):
        request = PlanRequest(graph, cluster, seq_len, 8)
        e = estimate_config(request, ParallelConfig(dp=8, recompute="full")).estimate
        attention = 12 * 16 * 2048 * seq_len
        products = 6 * graph.num_params  # the head is tied to the embedding, which is looked up: counted once
        assert e.mfu_causal / e.mfu == pytest.approx((products + attention / 2) / (products + attention), rel=0.01)
        shown = text.mfu_text(e)
        assert f"MFU {100 * e.mfu:.0f} % (attention counted in full" in shown
        assert f"{100 * e.mfu_causal:.0f} % (causal: half of it" in shown
        assert data.estimate_data(e)["mfu_causal"] == e.mfu_causal
    assert text.mfu_text(replace(e, mfu_causal=e.mfu)) == f"MFU {100 * e.mfu:.0f} %"  # negative: nothing is masked
    out = run("estimate", "llama-3.2-1b", "-c", ONE, "--seq", "2k", "--gbs", "8").stdout
    assert "(attention counted in full" in out and "(causal: half of it" in out


def test_mfu_of_a_measured_machine_is_of_its_fastest_product() -> None:
    """The figures of `local` are assumed; 0.05 TFLOP/s of a core are less than half of what was measured."""
    words = ("estimate", "gpt2", "--cluster", "local", "--precision", "fp32", "--seq", "256", "--gbs", "8", "--json")
    profile = Profile.load("cpu-2core-gloo-w2")
    found = json.loads(run(*words, "--profile", profile.name).stdout)["estimate"]
    graph, fastest = load_model("gpt2"), profile.product_flops["float32"]
    flops = 8 * 256 * (6 * graph.num_params + 12 * 12 * 768 * 256)
    assert found["mfu"] == pytest.approx(flops / found["step_time_s"]["mid"] / fastest, rel=0.01)
    assert fastest > 2 * Cluster.local(1).device.peak_flops and 0.5 < found["mfu"] < 1
    assumed = json.loads(run(*words).stdout)["estimate"]
    assert assumed["mfu"] == pytest.approx(flops / assumed["step_time_s"]["mid"] / 50e9, rel=0.01)


def test_what_goes_on_keeps_the_whole_run() -> None:
    """Money and days are asked again by every command that can answer them."""
    run_of_task = RunTask(1e9, Assumptions({"pue": 1.25}))
    request = asked("gpt2", ONE, 1024, 64)
    made = (
        commands.plan_command("gpt2", ONE, request, run_of_task),
        commands.explain_words("gpt2", ONE, request, run_of_task),
        commands.whatif_command("gpt2", ONE, request, "nodes=1,2", run_of_task),
    )
    for words in made:
        k = words.index("--tokens")
        assert words[k : k + 4] == ["--tokens", "1B", "--assume", "pue=1.25"]
    shown = run("estimate", *TASK, "--tokens", "1B").stdout.replace("\\\n", " ")
    (line,) = re.findall(r"Next: (autoplan plan .*)", shown)
    assert shlex.split(line)[-2:] == ["--tokens", "1B"]


def test_a_sweep_that_is_proposed_keeps_to_what_runs() -> None:
    request = asked("gpt2", ONE, 1024, 64, executed=True)
    assert "--runnable" in commands.whatif_command("gpt2", ONE, request, "nodes=1,2")


@pytest.mark.parametrize("precision", ["bf16", "bf16-grad32", "bf16-grad16", "fp8", "fp8-grad32"])
@pytest.mark.parametrize("like", ["megatron-bridge", "torchtitan", "megatron-lm"])
def test_the_task_of_a_stack_is_proposed_with_its_precision(like: str, precision: str) -> None:
    """Gradients in 32 bits where the stack has 16: without the suffix the command was about other gradients."""
    request = asked("llama-3.2-1b", ONE, 4096, 64, like=like, precision=precision)
    words = commands.plan_command("llama-3.2-1b", ONE, request)
    given = dict(pairwise(words))
    again = asked("llama-3.2-1b", ONE, 4096, 64, like=given["--like"], precision=given["--precision"])
    assert again.precision == request.precision and again.mode is request.mode
