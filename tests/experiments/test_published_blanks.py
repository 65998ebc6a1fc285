"""experiments/published/shapes.py and published_words.py: blank dimensions, offloading, words of other tools."""

from __future__ import annotations

from typing import Any

import pytest
from made_up import case_of, row

from autoplan.catalog import load_model
from autoplan.config.parallel import Dispatcher
from experiments.published import validate as tool
from experiments.published.reading import era_of
from experiments.published.shapes import Kind, Shapes
from experiments.published.words import HALF, OnHost, chunks_of, offload_of, recompute_of

LLAMA_8B = {"layers": "32", "hidden": "4096", "ffn_hidden": "14336", "heads": "32", "vocab": "128256"}
LLAMA_70B = {"layers": "80", "hidden": "8192", "ffn_hidden": "28672", "heads": "64", "vocab": "128256"}
LLAMA2_7B = {"layers": "32", "hidden": "4096", "ffn_hidden": "11008", "heads": "32", "vocab": "32000"}
GPT3 = {"layers": "96", "hidden": "12288", "ffn_hidden": "49152", "heads": "96", "vocab": "51200"}
OLD, NEW = {"source": "SC21"}, {"source": "NVIDIA-NeMo/Megatron-Bridge docs"}


def shapes_of(**fields: str) -> Any:
    r = row(**fields)
    return Shapes([r]).read(r)


@pytest.mark.parametrize(
    ("dims", "params_b", "kv_heads"),
    [(LLAMA_8B, "8", 8), (LLAMA_70B, "70.6", 8), (LLAMA_70B, "70", 8), (LLAMA2_7B, "6.7", 32), (GPT3, "175", 96)],
)
def test_blank_key_value_heads_are_those_of_the_published_number(
    dims: dict[str, str], params_b: str, kv_heads: int
) -> None:
    for when in (OLD, NEW):  # whatever the default of the era
        found = shapes_of(**dims, **when, kv_heads="", params_b=params_b)
        assert found.shape.kv_heads == kv_heads and "kv_heads" in found.assumed
    stated = shapes_of(**dims, kv_heads=str(kv_heads), params_b=params_b)
    assert (stated.shape, stated.assumed, stated.others) == (found.shape, (), ())


@pytest.mark.parametrize(
    ("dims", "when", "first", "second"),
    [
        (LLAMA_8B, NEW, 8, 32),
        (LLAMA2_7B, {"source": "LLaMA paper"}, 32, 8),  # 2023, small
        (LLAMA_70B, {"source": "LLaMA paper"}, 8, 64),  # 2023, large
        (LLAMA_70B, OLD, 64, 8),
        (GPT3, NEW, 96, 8),  # an inner size of 4 h
    ],
)
def test_blank_key_value_heads_without_a_number_are_those_of_the_era(
    dims: dict[str, str], when: dict[str, str], first: int, second: int
) -> None:
    found = shapes_of(**dims, **when, kv_heads="", params_b="")
    assert (found.shape.kv_heads, [s.kv_heads for s in found.others]) == (first, [second])
    assert found.assumed == ("kv_heads",)
    case = case_of(**dims, **when, kv_heads="", params_b="")
    assert "kv_heads" in case.assumed
    assert [s.shape.kv_heads for s in case.task.settings if s.shape is not None] == [second]


def test_other_blank_dimensions_are_assumed_and_said() -> None:
    found = shapes_of(**{**LLAMA_8B, **NEW, "ffn_hidden": "", "vocab": "", "heads": ""}, kv_heads="8", params_b="8.03")
    shape = found.shape
    assert (shape.heads, shape.ffn, shape.vocab, shape.kv_heads) == (32, 14336, 128256, 8)
    assert set(found.assumed) == {"heads", "ffn_hidden", "vocab"}
    old = shapes_of(**{**GPT3, **OLD, "ffn_hidden": ""}, kv_heads="96", params_b="")
    assert old.shape.ffn == 4 * 12288 and old.shape.kind == Kind(False, True, 128)
    assert [s.ffn for s in old.others] == [43008] and old.assumed == ("ffn_hidden",)
    blog = case_of(vocab="", source="a blog", kv_heads="8")
    assert blog.task.shape.vocab == 32000 and "vocab" in blog.assumed  # LLaMA's: of an H100 nothing later is known
    assert [s.shape.vocab for s in blog.task.settings if s.shape is not None] == [50257]
    few = shapes_of(moe_experts="8", moe_topk="", notes="moe_ffn=8192")
    assert few.shape.top_k == 2 and "moe_topk" in few.assumed and [s.top_k for s in few.others] == [4]


def test_experts_without_a_size_have_that_of_the_published_number() -> None:
    # OLMoE: 64 experts of 1,024, of which the row states an inner size of a dense layer
    fields = {"layers": "16", "hidden": "2048", "ffn_hidden": "8192", "heads": "16", "kv_heads": "16", "vocab": "50304"}
    found = shapes_of(**fields, moe_experts="64", moe_topk="8", params_b="6.9", source="x")
    assert found.shape.expert_ffn == 1024 and "moe_ffn" in found.assumed and "1024" in found.notes[0]


def test_a_number_of_parameters_that_the_dimensions_do_not_give_is_left_and_said() -> None:
    found = case_of(params_b="70")
    assert found.task.shape == case_of(params_b="").task.shape
    assert "params_b" in found.assumed and "of the published number of parameters" in found.notes[0]


# -- offloading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "choices"),
    [
        ({}, [OnHost()]),
        ({"flags": "optimizer CPU offload none"}, [OnHost()]),
        ({"notes": "MP mode PURE; activation CPU offload False; x"}, [OnHost()]),
        ({"notes": "offloading did not help"}, [OnHost()]),
        ({"notes": "activation CPU offload True"}, [OnHost((), True)]),
        ({"notes": "activation offloading required"}, [OnHost(), OnHost((), True)]),
        ({"flags": "optimizer CPU offload 100%"}, [OnHost(("optimizer",))]),
        ({"flags": "optimizer CPU offload 75%"}, [OnHost(("optimizer",)), OnHost()]),
        ({"flags": "optimizer CPU offload 25%"}, [OnHost(), OnHost(("optimizer",))]),
        ({"flags": "optimizer CPU offload 0%"}, [OnHost()]),
        ({"flags": "optimizer CPU offload 100% + overlap"}, [OnHost(("optimizer",)), OnHost()]),
        ({"flags": "DeepSpeed ZeRO-Offload"}, [OnHost(("optimizer",))]),
        ({"flags": "ZeRO-Infinity", "zero_stage": "3"}, [OnHost(("parameters",))]),
        ({"flags": "activation offload; optimizer offload"}, [OnHost(("optimizer",), True)]),
        ({"recompute": "offload"}, [OnHost((), True)]),
        ({"zero_stage": "3 (FSDP + CPU offload)"}, [OnHost(("parameters",))]),
        ({"flags": "FSDP CPU offload", "zero_stage": "0"}, [OnHost(("optimizer",))]),  # nothing is sharded
        ({"flags": "CPU offload"}, [OnHost(("optimizer",)), OnHost((), True)]),
        ({"flags": "CPU offload", "zero_stage": "3"}, [OnHost(("parameters",)), OnHost((), True)]),
    ],
)
def test_what_is_offloaded_is_read_from_words(fields: dict[str, str], choices: list[OnHost]) -> None:
    stage = int((fields.get("zero_stage") or "1")[0])
    assert list(offload_of(row(**fields), stage, 16).choices) == choices
    case = case_of(**fields)
    first = case.task.settings[0].config
    assert first.offload == choices[0].state and (first.recompute == "offload") == choices[0].activations
    assert ("offload" in case.assumed) == (len(choices) > 1)


def test_offloading_is_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = load_model("llama-3.2-1b")
    monkeypatch.setattr(tool, "graph_of", lambda shape: graph)
    here, there = tool.result_of(case_of()), tool.result_of(case_of(flags="optimizer CPU offload 100%"))
    assert not there.reason and there.predicted_s > here.predicted_s and there.predicted_bytes < here.predicted_bytes
    part = tool.result_of(case_of(flags="optimizer CPU offload 50%"))
    assert (part.low_s, part.high_s) == (min(here.low_s, there.low_s), max(here.high_s, there.high_s))
    # no catalog knows the host link of a TPU: what it takes without, and said
    tpu = {"gpu": "TPU v5p", "gpu_mem_gb": "95", "gpus_per_node": "4", "flags": "activation offload"}
    found = tool.result_of(case_of(**tpu))
    assert not found.reason and "offload" in found.assumed and "no speed of the host link" in found.notes[-1]


# -- precisions, recompute, schedules ----------------------------------------------------------------------------------


def test_a_precision_that_the_planner_lacks_is_priced_by_the_nearest() -> None:
    tpu = {"gpu": "TPU v5p", "gpu_mem_gb": "95", "gpus_per_node": "4"}
    whole, either = case_of(**tpu, precision="INT8").task, case_of(**tpu, precision="INT8/BF16 (see config)")
    assert whole.precision == "fp8" and [s.precision for s in whole.settings[1:]] == ["bf16"]
    peaks = whole.cluster.device.peak_flops_by_dtype
    assert peaks["float8"] == peaks["int8"] > 0
    assert either.task.precision == "bf16" and either.task.settings[1].precision == "fp8"
    assert "precision" in either.assumed
    unknown = case_of(precision="posit")
    assert unknown.task.precision == "bf16" and "precision=posit is not known" in unknown.notes[0]
    old = case_of(precision="FP8", gpu="A100", gpu_mem_gb="80").task
    assert old.precision == "fp8" and [(s.precision, s.instead) for s in old.last] == [("bf16", ("precision",))]


def test_recompute_of_other_tools() -> None:
    for words, how in (("True", "full"), ("full", "full"), ("uniform", "full"), ("False", "none"), ("off", "none")):
        assert recompute_of(row(recompute=words), ()) == (how,)
    assert (
        recompute_of(row(recompute="offload"), ()) == ("none",)
        and "recompute" not in case_of(recompute="offload").assumed
    )
    assert "vpp" not in case_of(schedule="interleaved (VP=2)", vpp="", pp="2", dp="8").assumed
    assert "vpp" in case_of(schedule="interleaved", vpp="", pp="2", dp="8").assumed
    assert recompute_of(row(recompute="selective (op)"), ()) == ("products",)
    assert recompute_of(row(recompute="selective (2)"), ())[0] == HALF
    assert recompute_of(row(recompute="selective (mlp)"), ()) == ("modules:mlp",)
    assert recompute_of(row(recompute="selective (ffn)"), ()) == ("selective", "none", "full")


@pytest.mark.parametrize(
    ("words", "stage"),
    [("ZeRO-1", 1), ("stage 2", 2), ("ZeRO stage 3", 3), ("HSDP", 3), ("FSDP2", 3), ("DDP", 0), ("none", 0)],
)
def test_stages_of_zero_in_other_words(words: str, stage: int) -> None:
    case = case_of(zero_stage=words)
    assert case.task.settings[0].config.zero_stage == stage and "zero_stage" not in case.assumed


TITAN = {"source": "pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md", "zero_stage": "3 (FSDP2)"}


def test_torchtitan_in_a_pipeline_keeps_what_it_gathers_and_has_as_many_micro_batches_as_stages() -> None:
    """Its defaults at the end of 2024: reshard_after_forward = not pp_enabled, n_microbatches = pp, 2 stages a rank."""
    piped = {**TITAN, "pp": "2", "dp": "8", "micro_batch": "", "global_batch": "64"}
    found = case_of(**piped)
    first = found.task.settings[0].config
    assert (first.zero_stage, first.micro_batch_size, first.num_micro_batches) == (1, 4, 2)
    assert {"zero_stage", "micro_batch"} <= set(found.assumed)  # the others are priced, too
    assert {s.config.zero_stage for s in found.task.settings} == {1, 3}
    assert case_of(**piped | {"schedule": "Interleaved 1F1B", "vpp": ""}).task.settings[0].config.virtual_stages == 2
    later = piped | {"source": "pytorch/torchtitan benchmarks/llama3_h100_202506_torchtitan.md"}
    assert case_of(**later).task.settings[0].config.micro_batch_size == 1
    flat = case_of(**TITAN).task.settings
    assert {s.config.zero_stage for s in flat} == {3}  # every other layer's are gathered again in the backward


def test_chunks_that_are_not_stated_are_even() -> None:
    """126 layers on 16 stages: 8 chunks a rank with a layer less at both ends, not 7 of one or two."""
    usual = {"pp": "16", "dp": "1", "tp": "1", "schedule": "interleaved", "vpp": "", "global_batch": "64"}
    assert chunks_of(row(**usual), "Interleaved1F1B", 126, 16) == (8, 1)
    assert chunks_of(row(**usual), "Interleaved1F1B", 96, 8) == (12, 1)
    assert chunks_of(row(**usual), "Interleaved1F1B", 61, 16) == (3, 1)  # none is even
    assert chunks_of(row(**usual | {"vpp": "4"}), "Interleaved1F1B", 126, 16) == (4,)
    assert chunks_of(row(**usual | TITAN), "Interleaved1F1B", 126, 16) == (2, 1)


def test_words_that_say_nothing_are_the_default_and_said() -> None:
    case = case_of(zero_stage="sharded somehow", schedule="new", pp="2", dp="8")
    assert {"zero_stage", "schedule"} <= set(case.assumed)
    assert [n.split(" is not known")[0] for n in case.notes] == ["zero_stage=sharded somehow", "schedule=new"]
    schedules = [s.config.schedule for s in case.task.settings]
    assert schedules[0] == "1F1B" and "ZB-H1" in schedules
    micro = case_of(micro_batch="8")
    assert micro.task.settings[0].config.micro_batch_size == 4 and "micro_batch" in micro.assumed
    assert "micro_batch=8 is priced as 4" in micro.notes[0]
    dense = case_of(ep="8")
    assert dense.task.settings[0].config.ep == 1 and "no experts" in dense.notes[0]


def test_a_schedule_that_refuses_the_degrees_is_priced_as_the_nearest_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = load_model("llama-3.2-1b")
    monkeypatch.setattr(tool, "graph_of", lambda shape: graph)
    few = {"pp": "4", "dp": "4", "global_batch": "16", "schedule": "DualPipe"}  # 4 micro-batches, 8 are needed
    found = tool.result_of(case_of(**few))
    assert not found.reason and "schedule" in found.assumed and "at least 2 micro-batches per stage" in found.notes[-1]
    plain = tool.result_of(case_of(**{**few, "schedule": "1F1B"}))
    assert found.predicted_s == plain.predicted_s
    enough = tool.result_of(case_of(**{**few, "global_batch": "64"}))
    assert not enough.reason and "schedule='DualPipe'" in enough.setting and not enough.notes


def test_a_preprint_dates_its_runs() -> None:
    said = {source: era_of(source, "", "H100") for source in ("arXiv 2412.19437", "arXiv 2205.05198", "a talk, 2205")}
    assert said["arXiv 2412.19437"] == pytest.approx(2024.66, abs=0.01)
    assert said["arXiv 2205.05198"] == 2021.5  # known, and some months before its number
    assert said["a talk, 2205"] == era_of("", "", "H100")  # that of the device
    assert era_of("arXiv 2104.04473", "", "GB200") == 2025.0  # no run is older than its device


# arXiv 2412.19437: sections 2 and 4.2 (dimensions, batch), 3.1 and 3.2 (cluster, degrees, DualPipe), table 1: 180,000
# hours of H800 per 10^12 tokens
DEEPSEEK_V3 = {
    "source": "arXiv 2412.19437",
    "params_b": "671",
    "layers": "61",
    "hidden": "7168",
    "ffn_hidden": "18432",
    "heads": "128",
    "kv_heads": "128",
    "vocab": "129280",
    "moe_experts": "256",
    "moe_topk": "8",
    "gpu": "H800",
    "n_gpus": "2048",
    "pp": "16",
    "vpp": "",
    "dp": "128",
    "ep": "64",
    "global_batch": "15360",
    "precision": "FP8",
    "schedule": "DualPipe",
    "flags": "DeepEP",
    "recompute": "",
    "step_time_s": str(180e3 * 3600 / 1e12 * 15360 * 4096 / 2048),
}


def test_deepseek_v3_is_priced_from_its_report() -> None:
    """No size of its experts, heads narrower than any usual: latent attention, and the experts that params_b leaves.
    DualPipe runs their exchanges beside computing. 21.1 s, measured 19.9 (the mean of the whole run)."""
    case = case_of(**DEEPSEEK_V3)
    assert case.task.shape.kind.latent and "moe_ffn" in case.assumed
    assert abs(case.task.shape.expert_ffn - 2048) <= 64
    options = case.task.settings[0].options
    assert options.overlap == {"ep"} and options.dispatcher is Dispatcher.FLEX
    found = tool.result_of(case)
    assert found.predicted_s == pytest.approx(float(DEEPSEEK_V3["step_time_s"]), rel=0.1)
    exposed = tool.result_of(case_of(**DEEPSEEK_V3 | {"schedule": "1F1B"})).predicted_s
    assert exposed > 1.15 * found.predicted_s
