"""--like: the settings of a stack, what was given against it, and what it cannot do."""

import dataclasses
from typing import Any

import pytest
from command_line import run

from autoplan.catalog import load_model
from autoplan.config.choices import option_data
from autoplan.config.parallel import Dispatcher, FusedLoss, Launch, Mode, ParallelConfig, RunOptions
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.search.planner import estimate_config
from autoplan.search.request import PlanRequest, space_of
from autoplan.stacks.like import equal_stages, read_like
from autoplan.stacks.limits import beyond
from autoplan.stacks.records import stacks, within_layers
from autoplan.sweeps.capacity import task_of
from autoplan.sweeps.whatif import points

TASK = ("llama-3.2-1b", "--cluster", "8xh100-sxm5-80gb", "--seq-len", "4k", "--global-batch-size", "64")


def request(**given: object) -> PlanRequest:
    graph, cluster = load_model("llama-3.2-1b"), Cluster.parse("8xh100-sxm5-80gb")
    return PlanRequest(graph, cluster, 4096, 64, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", stacks())
def test_every_version_of_every_stack_has_a_price(name: str) -> None:
    for era in stacks()[name].eras:
        version = "19.06" if era.version == "oldest" else era.version
        precision = next(p for p in ("bf16", "fp16") if p in era.can.precisions)
        asked = request(like=f"{name}@{version}", precision=precision)
        config = ParallelConfig(dp=8, num_micro_batches=8, zero_stage=era.can.zero_stages[0])
        assert estimate_config(asked, config).estimate.step_time_s.mid > 0


def test_a_stack_is_the_same_as_its_settings_given_one_by_one() -> None:
    like = request(like="megatron-bridge@25.11")
    plain = request(mode=Mode.FUSED, precision="bf16-grad16", options=like.options)
    config = ParallelConfig(dp=4, tp=2, num_micro_batches=16)
    prices = [estimate_config(r, config).estimate.step_time_s for r in (like, plain)]
    assert like.options.launch is Launch.GRAPHS and prices[0] == prices[1]


def test_what_is_given_overrides_the_stack_and_is_said() -> None:
    like = read_like("megatron-bridge@25.11", {"launch": "async", "mode": None, "precision": "bf16-grad32"})
    assert like.options("h100-sxm5-80gb").launch is Launch.ASYNC
    assert like.precision(latent=False) == "bf16"
    assert like.texts("h100-sxm5-80gb") == ["launch=async (megatron-bridge: graphs)"]


@pytest.mark.parametrize(("name", "latent", "precision"), [
    ("megatron-bridge@26.08", True, "bf16-grad16-mom16-rem16"), ("megatron-bridge@26.08", False, "bf16-grad16"),
    ("megatron-bridge@24.09", False, "bf16-grad16-rem16"), ("megatron-bridge@24.12", False, "bf16-grad16"),
    ("megatron-lm@25.06", True, "bf16"), ("torchtitan", False, "bf16"),
])  # fmt: skip
def test_precisions_are_narrowed_as_the_stack_does(name: str, latent: bool, precision: str) -> None:
    assert read_like(name).precision(latent) == precision
    assert read_like("megatron-lm@24.06", {"precision": "fp16"}).precision(False) == "fp16-grad16"
    bridge = read_like("megatron-bridge@26.08", {"precision": "fp8"})
    assert bridge.precision(True) == "fp8-grad16-mom16"  # masters of 8-bit parameters are whole
    assert bridge.but(precision="bf16-grad32-rem16").precision(True) == "bf16-rem16"


def test_layers_whose_activations_a_recipe_leaves_on_the_host() -> None:
    """Megatron Bridge's recipes of Llama 3 70B with Megatron-FSDP: 20 of 80 layers in FP8, 30 in bf16, else none."""
    layers = [f"layers.{k}" for k in range(80)]

    def of(stage: int, precision: str, given: str = "megatron-bridge@26.04") -> Any:
        like = read_like(given, {"precision": precision}).on("gb300-nvl72", "llama-3.1-70b")
        return like.degrees({"zero_stage": stage}, 0, 64, layers)["recompute"]

    assert of(3, "fp8") == dict.fromkeys(layers[:20], "offload")
    assert of(3, "bf16") == dict.fromkeys(layers[:30], "offload")
    assert of(1, "fp8") == of(3, "mxfp8") == of(3, "fp8", "megatron-bridge@25.07") == "none"
    del layers[12:]  # a smaller model of that name: all but the last, which Megatron keeps on the device
    assert of(3, "fp8") == dict.fromkeys(layers[:11], "offload")
    assert [within_layers(how, 1) for how in ("0-39=offload", "0-39=full", "full")] == ["none", "0-0=full", "full"]


@pytest.mark.parametrize("name", ["accelerate", "megatron-lm@23.10", "torchtitan", "deepspeed", "composer"])
def test_a_search_looks_at_what_the_stack_can_do_and_at_all_of_it(name: str) -> None:
    asked = request(like=name)
    can = read_like(name).can
    found = set(space_of(asked).candidates)

    def able(c: ParallelConfig) -> bool:
        degrees = all(getattr(c, n) in (None, 1) or n in can.degrees for n in ("tp", "pp", "cp", "ep", "etp"))
        zero = c.dp * c.cp == 1 or c.zero_stage in can.zero_stages
        within = all(beyond(limit, c, 0) is None for limit in can.limits)
        return degrees and zero and within and (c.pp == 1 or c.schedule in can.schedules)

    free = dataclasses.replace(asked, like=None)
    assert found == {c for c in space_of(free).candidates if able(c)}


@pytest.mark.parametrize(("given", "message"), [
    (("--like", "megatron-lm@23.10", "--zero", "2"), "zero_stage=2: megatron-lm@23.10 cannot; it can 0, 1; nearest"),
    (("--like", "accelerate@25.01", "--tp", "2"), "tp=2: accelerate@25.01 cannot"),
    (("--like", "accelerate", "--recompute", "selective"), "nearest legal: recompute='full' or 'none'"),
    (("--like", "accelerate", "--recompute", "0-3=full"), "accelerate@26.08 cannot; it can one choice for all layers"),
    (("--like", "megatron-lm", "--pp", "2", "--schedule", "ZBV"), "it can 1F1B, Interleaved1F1B"),
    (("--like", "megatron-lm", "--schedule", "ZB-H1"), "it can 1F1B, Interleaved1F1B; nearest legal: schedule='1F1B'"),
    (("--like", "megatron-lm", "--mode", "eager"), "mode='eager': megatron-lm@26.08 cannot; nearest: fused"),
    (("--like", "composer", "--precision", "fp4"), "precision='fp4': composer@24.06 cannot; nearest: bf16"),
    (("--like", "megatron"), "stack 'megatron' is not known; did you mean 'megatron-bridge'"),
    (("--like", "composer@new"), "write YY.MM"),
    (("--like", "composer@"), "has no version after @"),
])  # fmt: skip
def test_what_a_stack_cannot_do_is_refused_by_name(given: tuple[str, ...], message: str) -> None:
    result = run("estimate", *TASK, *given)
    assert result.exit_code == 2 and message in " ".join(result.stderr.split())


def test_the_report_says_whose_settings_hold() -> None:
    assert "--like NAME" in run("estimate", *TASK).stdout
    text = " ".join(run("estimate", *TASK, "--like", "megatron-lm@24.06", "--fused-loss", "online").stdout.split())
    assert "Settings: of megatron-lm@24.06" in text and "given instead: fused_loss=online (megatron-lm: no)" in text


def test_equal_stages() -> None:
    assert equal_stages(32, 4, 1) == (8, 8, 8, 8)
    assert equal_stages(30, 4, 1) == (7, 8, 8, 7)
    # layers for tokens after the next: layouts of DeepSeek-V3 in Megatron Bridge, by stages and stages per rank
    for pp, virtual, stages in (
        (4, 1, (16, 16, 16, 14)),
        (8, 1, (*(8,) * 7, 6)),
        (4, 4, (*(4,) * 15, 2)),
        (8, 4, (1, *(2,) * 30, 1)),
    ):
        assert equal_stages(62, pp, virtual, 1) == stages
    assert equal_stages(17, 2, 4, 1) == (2, 2, 2, 2, 2, 2, 2, 3) and equal_stages(62, 1, 1, 1) is None
    assert equal_stages(5, 4, 1, 1) == (1, 1, 1, 2) and equal_stages(6, 8, 1, 1) is None
    assert equal_stages(32, 1, 1) is None and equal_stages(32, 4, 2) is None and equal_stages(33, 4, 1) is None


def test_without_a_stack_nothing_changes() -> None:
    assert request().options == RunOptions() and request().mode is Mode.EAGER
    assert option_data(request(like="torch-eager").options) == option_data(RunOptions())


def test_sweeps_take_the_settings_of_each_device_and_capacity_files_take_a_stack() -> None:
    base = request(like="megatron-bridge@25.11", pins={"tp": 1, "pp": 1, "micro_batch_size": 1, "zero_stage": 1})
    found = list(points(base, {"cluster": ["8xh100-sxm5-80gb", "2x4xgb200-nvl72@nic=400"]}))
    assert [p.request.options.dispatcher for p in found if p.request] == [Dispatcher.ALL_TO_ALL, Dispatcher.FLEX]
    data = {"models": "gpt2", "clusters": "8xh100-sxm5-80gb", "tokens": "1B", "seq_len": 1024, "global_batch_size": 8}
    task = task_of({**data, "like": "megatron-lm@24.06", "fused_loss": "online"}, "x")
    assert task.like is not None and task.mode == (Mode.FUSED,)
    assert task.like.options("h100-sxm5-80gb").fused_loss is FusedLoss.ONLINE
