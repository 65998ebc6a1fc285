"""experiments/published/validate.py: how published rows are read, priced and summed up, on made-up rows."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from made_up import QWEN, case_of, row, write_csv

from autoplan.catalog import load_model
from autoplan.config.parallel import Attention, Dispatcher, Mode
from autoplan.errors import AutoplanError
from autoplan.ir.graph import ModelGraph
from autoplan.search.estimate import estimate_config
from autoplan.stacks.records import Framework
from experiments.published import validate as tool
from experiments.published.reading import Formula
from experiments.published.rows import (
    Adapters,
    Kind,
    Shape,
    Shapes,
    cluster_of,
    flops_per_token,
)
from experiments.published.table import COLUMNS, Unmeasured, Unpriced, Unstated, read_rows


@pytest.fixture
def catalog_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shipped graph in place of captured ones: these tests are about what is done with it."""
    graph = load_model("llama-3.2-1b")
    monkeypatch.setattr(tool, "graph_of", lambda shape: graph)


# -- reading -----------------------------------------------------------------------------------------------------------


def test_a_file_without_a_column_or_with_a_word_for_a_number_is_refused_by_name(tmp_path: Path) -> None:
    bad = tmp_path / "bad.csv"
    bad.write_text("id,campaign\n1,2\n")
    with pytest.raises(AutoplanError, match="no column source, trust"):
        read_rows(bad)
    plain = tmp_path / "plain.csv"
    plain.write_text(
        ",".join(c for c in COLUMNS if c != "campaign") + "\nsome_runs_017" + "," * (len(COLUMNS) - 2) + "\n"
    )
    assert read_rows(plain)[0]["campaign"] == "some_runs"
    with pytest.raises(AutoplanError, match="cannot be read"):
        read_rows(tmp_path / "none.csv")
    with pytest.raises(AutoplanError, match=r"line 7: layers='many' is not a number"):
        Shapes([row(), row(layers="many")]).of(row(line=7, layers="many"))
    assert row(global_batch="1,024", step_time_s="~5.2").number("global_batch") == 1024


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"gpu": "H100", "gpu_mem_gb": "50"}, "no device H100 with 50 GB is known; H100 is known with 80 GB"),
        ({"gpu": "MI999"}, "no device MI999 in the catalog; it has v100-sxm2-16gb"),
        ({"global_batch": "8"}, "dp=16 is more than the global batch of 8"),
        ({"tp": "2.5"}, "tp=2.5: must be a whole number"),
        ({"tp": "-1"}, "tp=-1: must be a whole number"),
        ({"layers": "0"}, "layers=0: must be at least 1"),
        ({"params_b": "0"}, "params_b=0: must be above 0"),
        ({"gpu_mem_gb": "-80"}, "gpu_mem_gb=-80: must be above 0"),
    ],
)
def test_what_is_stated_but_cannot_be_priced_says_why(fields: dict[str, str], why: str) -> None:
    with pytest.raises(Unpriced, match=why) as error:
        case_of(**fields)
    assert not isinstance(error.value, Unstated)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"hidden": ""}, "hidden is not stated"),
        ({"gpu": ""}, "gpu is not stated"),
        ({"tp": "", "dp": ""}, "tp is not stated"),
        ({"tp": "", "pp": "", "dp": "", "zero_stage": "FSDP/sharding per submission"}, "tp is not stated"),
        ({"dp": "", "tp": "3"}, "dp is not stated"),  # does not follow
        ({"tp": "3", "dp": "4"}, "the degrees are those of 12 devices, not 16"),
        ({"dp": "8", "global_batch": "24"}, "the degrees are those of 8 devices, not 16"),
        ({"hidden": "", "precision": "INT8", "gpu": "?"}, "hidden is not stated"),  # whatever else there is
    ],
)
def test_what_no_planner_could_price_is_told_apart(fields: dict[str, str], why: str) -> None:
    with pytest.raises(Unstated, match=why):
        case_of(**fields)


def test_a_blank_degree_follows_from_the_devices() -> None:
    def degrees(**fields: str) -> tuple[int, ...]:
        c = case_of(**fields).task.settings[0].config
        return c.tp, c.pp, c.cp, c.dp

    assert degrees(dp="", tp="2") == (2, 1, 1, 8)
    assert degrees(tp="", cp="2", dp="4") == (2, 1, 2, 4)
    assert degrees(dp="", tp="", pp="", cp="", zero_stage="FSDP (see recipe)") == (1, 1, 1, 16)
    assert degrees(tp="2", dp="4") == (2, 1, 1, 8)  # contradicts the 16 devices
    assert {"dp", "cp"} <= set(case_of(dp="", cp="").assumed)


def test_micro_batches_that_do_not_divide_the_batch_are_rounded() -> None:
    c = case_of(micro_batch="3", step_time_s="", tokens_per_s_per_gpu="1000")
    assert (c.task.settings[0].config.num_micro_batches, c.task.global_batch_size) == (1, 48)  # of 64 / 48
    assert "global_batch" in c.assumed and c.measured_s == 48 * 4096 / (1000 * 16)  # a rate, of what is priced


def test_devices_are_spread_evenly_over_nodes_and_a_blank_precision_is_the_devices_own() -> None:
    cluster = cluster_of(row(n_gpus="12"))
    assert (cluster.num_nodes, cluster.devices_per_node) == (2, 6)
    assert case_of(precision="").task.precision == "bf16" and "precision" in case_of(precision="").assumed
    # which Megatron sums in 16 bits, unlike bf16
    assert case_of(precision="", gpu="V100", gpu_mem_gb="32").task.precision == "fp16-grad16"


def test_a_blank_micro_batch_vocabulary_or_node_is_the_frameworks() -> None:
    blank = case_of(micro_batch="")
    assert [s.config.micro_batch_size for s in blank.task.settings] == [1, 2, 4] and "micro_batch" in blank.assumed
    assert [s.config.num_micro_batches for s in blank.task.settings] == [4, 2, 1]
    assert case_of(micro_batch="", flags="MaxText").task.settings[0].config.micro_batch_size == 4  # at once
    gathered = case_of(micro_batch="", zero_stage="3").task.settings
    assert [s.config.micro_batch_size for s in gathered] == [4, 2, 1]  # as few as the batch allows
    assert case_of(micro_batch="", flags="2 microbatches").task.settings[0].config.micro_batch_size == 2
    c = case_of(vocab="", tp="2", dp="8")
    assert c.task.shape.vocab == 50432 == 197 * 256 and "vocab" in c.assumed
    assert cluster_of(row(gpus_per_node="")).devices_per_node == 8


@pytest.mark.parametrize(
    ("gpu", "memory", "name", "gigabytes"),
    [
        ("NVIDIA H100-SXM5-80GB", "80", "h100-sxm5-80gb", 80),
        ("H100", "94", "h100-sxm5-80gb", 94),
        ("Tensor Core A100", "40", "a100-sxm4-40gb", 40),
        ("L40S", "", "l40s-48gb", 48),
        ("AMD Instinct MI300X", "192", "mi300x-192gb", 192),
        ("TPU-v5p", "95", "tpu-v5p", 95),
        ("B300", "288", "b300-sxm-288gb", 288),
    ],
)
def test_a_device_is_found_however_it_is_spelled(gpu: str, memory: str, name: str, gigabytes: float) -> None:
    device = cluster_of(row(gpu=gpu, gpu_mem_gb=memory)).device
    assert device.name == name and device.memory_bytes == pytest.approx(gigabytes * 1e9, rel=0.1)


@pytest.mark.parametrize(
    ("words", "vpp", "schedule"),
    [
        ("", "1", "1F1B"),
        ("1F1B-interleaved", "2", "Interleaved1F1B"),
        ("GPipe", "1", "GPipe"),
        ("zero-bubble", "1", "ZB-H1"),
        ("ZBB", "2", "InterleavedZeroBubble"),
        ("ZBV", "2", "ZBV"),
        ("DualPipeV", "2", "DualPipeV"),
        ("DualPipe", "", "DualPipe"),
        ("DualPipe", "2", "DualPipe"),  # two chunks per rank, but one of its own
        ("Dual-Pipe V", "", "DualPipeV"),
        ("ZBV", "", "ZBV"),
        ("ZBVZeroBubble", "", "ZBV"),
        ("zb-h1", "", "ZB-H1"),
        ("zero bubble", "", "ZB-H1"),
        ("interleaved 1F1B (VP=2)", "", "Interleaved1F1B"),
        ("VPP", "4", "Interleaved1F1B"),
        ("interleaved", "2", "Interleaved1F1B"),
        ("Interleaved1F1B", "2", "Interleaved1F1B"),
        ("ScheduleInterleavedZeroBubble", "2", "InterleavedZeroBubble"),
        ("non-interleaved 1F1B", "", "1F1B"),
        ("V-half", "", "ZBV"),
        ("heard of nowhere", "1", "1F1B"),
    ],
)
def test_schedules_are_the_planners(words: str, vpp: str, schedule: str) -> None:
    assert case_of(schedule=words, vpp=vpp, pp="2", dp="8").task.settings[0].config.schedule == schedule
    assert case_of(schedule=words, vpp=vpp).task.settings[0].config.schedule == "1F1B"  # without a pipeline


def test_adapters_are_all_that_is_trained() -> None:
    c = case_of(flags="NeMo; LoRA", zero_stage="1")
    assert c.task.shape.adapters == Adapters(16, ("q_proj", "k_proj", "v_proj"))
    assert c.task.settings[0].config.zero_stage == 0  # nothing to shard
    assert case_of(notes="LoRA", source="x").task.shape.adapters == Adapters(8, ("q_proj", "v_proj"))
    named = case_of(flags="Hugging Face Trainer; LoRA rank 64 of all projections", source="x")
    assert named.task.shape.adapters == Adapters(64, ("all-linear",)) and named.framework is Framework.TRANSFORMERS
    assert case_of().task.shape.adapters is None
    alone = {"flags": "Hugging Face Trainer; LoRA", "source": "x", "zero_stage": "", "dp": "1", "tp": "1", "pp": "1"}
    assert case_of(**alone, n_gpus="1", global_batch="8").task.settings[0].config.zero_stage == 0
    all_of_it = {**alone, "flags": "Hugging Face Trainer"}
    assert case_of(**all_of_it, n_gpus="1", global_batch="8").task.settings[0].config.zero_stage == 3


@pytest.mark.parametrize(
    ("source", "framework", "precision"),
    [
        ("Aleph-Alpha/layouts data/x.xlsx", Framework.ALEPH_ALPHA, "bf16-grad16"),
        ("KempnerInstitute/KempnerForge x.md:1", Framework.KEMPNER, "native"),
        ("foundation-model-stack/fms-fsdp README.md:16", Framework.FSDP, "bf16-grad16"),
        ("Modalities/modalities x.md:1", Framework.FSDP, "bf16-grad16"),
    ],
)
def test_frameworks_are_known_by_their_sources(source: str, framework: Framework, precision: str) -> None:
    found = case_of(source=source, flags="as torchtitan: torch.compile", precision="BF16")
    assert (found.framework, found.task.precision) == (framework, precision)


@pytest.mark.parametrize(
    ("flags", "mode"),
    [("torch.compile", Mode.COMPILED), ("no torch.compile", Mode.EAGER), ("without compile; AsyncTP", Mode.COMPILED)],
)
def test_what_is_not_compiled_is_eager(flags: str, mode: Mode) -> None:
    assert case_of(source="pytorch/torchtitan", flags=flags).task.settings[0].mode is mode


def test_a_run_without_memory_is_priced_and_not_compared() -> None:
    c = case_of(step_time_s="", notes="OOM (does not fit 80 GB)")
    assert c.row.out_of_memory and math.isnan(c.measured_s)
    assert not case_of(notes="OOM with two").row.out_of_memory  # it has a time
    c = case_of(step_time_s="", peak_mem_gb="60", mem_kind="allocated GB")
    assert math.isnan(c.measured_s) and c.memory[1] == 60e9 and not c.row.out_of_memory


def test_what_the_dimensions_leave_open_follows_from_the_number_of_parameters() -> None:
    assert case_of(**QWEN).task.shape.kind == Kind(True, False, 128)  # 2,048 / 32 heads would be 64
    gpt = {"hidden": "4096", "ffn_hidden": "16384", "kv_heads": "32", "vocab": "51200", "layers": "24"}
    assert case_of(**gpt, params_b="5.0").task.shape.kind == Kind(False, True, 128)
    deepseek = {
        "layers": "61",
        "hidden": "7168",
        "ffn_hidden": "18432",
        "heads": "128",
        "kv_heads": "128",
        "vocab": "129280",
        "moe_experts": "256",
        "moe_topk": "8",
        "notes": "moe_ffn=2048 shared_ffn=2048 first_dense_layers=3; x",
    }
    whole = row(**deepseek, params_b="671.0")
    latent = Kind(True, False, 128, True, 1536)
    assert Shapes([whole]).of(whole).kind == latent
    # a model cut to 4 layers has no number: its layer is that of the whole one
    part = row(**{**deepseek, "layers": "4", "notes": "moe_ffn=2048 shared_ffn=2048 first_dense_layers=1"})
    shape = Shapes([part, whole]).of(part)
    assert (shape.kind, shape.layers, shape.first_dense) == (latent, 4, 1)


MANY_EXPERTS = {"moe_experts": "32", "moe_topk": "4", "kv_heads": "32", "ffn_hidden": "4096"}
TESTS = {"source": "NVIDIA/Megatron-LM tests/functional_tests/test_cases/moe/a/golden_values.json"}


def test_many_experts_without_grouped_queries_have_latent_attention() -> None:
    """Where neither a number of parameters nor another row says otherwise, and the framework knows it by then."""
    found = case_of(**MANY_EXPERTS, **TESTS).task
    assert found.shape.kind == Kind(True, False, 128, True, 1536)
    assert found.settings[0].options.attention is Attention.UNFUSED  # deterministic
    other = case_of(**MANY_EXPERTS, source="NVIDIA-NeMo/Megatron-Bridge skills/a", params_b="").task
    assert other.shape.kind.latent and other.settings[0].options.attention is Attention.FUSED
    assert other.precision == "bf16-grad16-mom16" and found.precision == "bf16"
    for more in ({"kv_heads": "8"}, {"moe_experts": "8"}, {"source": "x", "gpu": "A100"}):
        assert not case_of(**{**MANY_EXPERTS, **TESTS, **more}).task.shape.kind.latent
    plain = case_of(**TESTS).task
    assert plain.settings[0].options.attention is Attention.FUSED and not plain.shape.kind.latent


def test_fine_tuning_of_nemo_packs_short_documents() -> None:
    nemo = {"source": "NVIDIA/NeMo docs/source/performance", "notes": "NeMo 24.07; SFT"}
    assert case_of(**nemo).task.settings[0].options.document_len == 200
    assert case_of(**{**nemo, "notes": "NeMo 24.07; pretrain"}).task.settings[0].options.document_len is None
    mock = {"source": "NVIDIA-NeMo/Megatron-Bridge docs", "notes": "container 26.06; SFT"}
    assert case_of(**mock).task.settings[0].options.document_len is None


def test_what_zero_moves_overlaps_where_the_framework_does_it_or_the_row_says_so() -> None:
    def overlaps(**fields: str) -> bool:
        return bool(case_of(**fields).task.settings[0].options.overlap_zero)

    assert not overlaps() and overlaps(flags="overlap-grad-reduce=True; overlap-param-gather=True")
    assert overlaps(source="NVIDIA-NeMo/Megatron-Bridge docs") and overlaps(source="mosaicml/llm-foundry")


def test_no_run_is_older_than_its_device() -> None:
    page = {"source": "NVIDIA/NeMo docs/source/performance/performance_long_sequence.md"}  # of 2024 for H100
    first = [case_of(gpu=gpu, gpu_mem_gb="", **page).task.settings[0].options.attention for gpu in ("H100", "B200")]
    assert first == [Attention.FLASH2, Attention.FUSED]


def test_who_dispatches_tokens_is_what_the_flags_say() -> None:
    def dispatcher(flags: str) -> Dispatcher:
        return case_of(source="NVIDIA/Megatron-LM", flags=flags).task.settings[0].options.dispatcher

    assert dispatcher("") is dispatcher("moe-token-dispatcher-type=alltoall") is Dispatcher.ALL_TO_ALL
    for flags in (
        "DeepEP",
        "EP over HybridEP; SP",
        "moe-token-dispatcher-type=flex; x=1",
        "token_dispatcher_type: flex",
    ):
        assert dispatcher(flags) is Dispatcher.FLEX, flags
    usual = {"source": "NVIDIA-NeMo/Megatron-Bridge docs", "notes": "container 26.02"}  # FLEX unless they say otherwise
    for flags in ("no DeepEP", "DeepEP off", "alltoall dispatcher"):
        assert case_of(flags=flags, **usual).task.settings[0].options.dispatcher is Dispatcher.ALL_TO_ALL, flags


def test_what_was_run_before_2022_is_read_with_its_own_defaults() -> None:
    """Megatron-LM's README of 2020 takes torch's DistributedDataParallel, which reduces beside the backward; gradients
    of fp16 are summed in fp16, of bf16 in 32 bits. DeepSpeed's pipelines reduce at the end."""
    old = {"source": "NVIDIA/Megatron-LM git history images/tables", "precision": "FP16 mixed", "gpu": "A100"}

    def first(**fields: str) -> tuple[str, bool]:
        task = case_of(**{**old, **fields}).task
        return task.precision, task.settings[0].options.overlap_zero

    assert first() == ("fp16-grad16", True)
    assert first(source="SC21 table 1") == ("fp16-grad16", False)
    assert first(precision="BF16", source="SC21") == ("bf16", False)
    assert first(source="bigscience-workshop/bigscience", precision="BF16") == ("bf16", False)
    assert first(source="vTrain", flags="Megatron-DeepSpeed") == ("fp16-grad16", False)
    spread = {"source": "SC21 table 2", "flags": "DeepSpeed ZeRO-3", "gpu": "A100", "zero_stage": "3"}
    assert case_of(**spread).task.settings[0].options.zero_by_tensor
    assert not case_of(**spread | {"source": "vTrain"}).task.settings[0].options.zero_by_tensor


def test_scales_per_block_are_a_precision_of_their_own_where_devices_multiply_by_them() -> None:
    def precision(words: str, **fields: str) -> str:
        return str(case_of(precision=words, **fields).task.precision)

    b200 = {"gpu": "B200", "gpu_mem_gb": "180"}
    assert precision("MXFP8", **b200) == "mxfp8" and precision("FP8-CS", **b200) == "fp8"
    assert precision("FP8 fine-grained (32x32 on Blackwell, 128x128/1x128 on H100)") == "fp8"


def test_neither_the_name_of_the_model_nor_the_campaign_nor_the_measurement_changes_what_is_priced() -> None:
    a = case_of(**QWEN, recompute="")
    b = case_of(**QWEN, recompute="", id="z", campaign="other", model="GPT", step_time_s="99", trust="C")
    assert replace(a, row=b.row, measured_s=99.0) == b


@pytest.mark.parametrize(
    ("text", "gbit_s"),
    [
        ("IB NDR 400 Gb/s per GPU (DGX)", 400),
        ("IB 4x100 Gb/s per node", 50),
        ("Omni-Path 4x100 Gb/s per node", 17),  # what NCCL reaches of it
        ("RoCE 1600 Gb/s per node (200 Gb/s per GPU)", 200),
        ("8x 200 Gb/s RoCE per node", 200),
        ("", 400),  # the catalog's
    ],
)
def test_the_network_is_the_one_that_the_row_states(text: str, gbit_s: float) -> None:
    assert cluster_of(row(internode=text)).levels[-1].bytes_per_s == gbit_s * 1e9 / 8


def test_a_blank_field_is_read_by_the_frameworks_default_and_leaves_alternatives() -> None:
    stated = case_of()
    assert (len(stated.task.settings), stated.assumed, stated.task.settings[0].mode) == (1, (), Mode.FUSED)
    blank = case_of(recompute="", zero_stage="1, optimizer shard group=8")
    assert blank.assumed == ("recompute",)
    found = [(s.config.zero_stage, s.config.recompute) for s in blank.task.settings]
    assert found == [(1, "none"), (1, "selective")]
    assert case_of(source="mosaicml/llm-foundry").task.settings[0].mode is Mode.EAGER
    assert case_of(flags="MaxText/JAX", zero_stage="FSDP (degree 8)").task.settings[0].config.zero_stage == 3


def test_modules_computed_again_and_shard_groups_are_what_the_row_says() -> None:
    found = case_of(recompute="selective (mlp, core_attn)").task.settings
    assert [s.config.recompute for s in found] == ["modules:core_attn,mlp"]
    assert case_of(recompute="selective (core_attn)").task.settings[0].config.recompute == "selective"
    assert case_of(recompute="selective (every other layer)").task.settings[0].config.recompute != "selective"
    stated = case_of().task.settings[0].config
    ranks = stated.dp * stated.cp
    groups = {
        "1, optimizer shard group=2": ranks // 2,
        "1, optimizer shard group=all DP": 1,
        "FSDP (degree 8)": ranks // 8,
        "FSDP (degree unspecified)": 1,
    }
    for words, copies in groups.items():
        assert case_of(zero_stage=words).task.settings[0].config.zero_replicas == copies, words
    of_recipe = case_of(zero_stage="FSDP (degree unspecified)", source="NVIDIA/dgxc-benchmarking paxml/README_5b.md:49")
    assert of_recipe.task.settings[0].config.zero_replicas == ranks // 8


def test_stages_are_equal_and_interleaved_where_the_row_says_so() -> None:
    degrees = {"pp": "4", "dp": "4", "global_batch": "64"}
    assert case_of(**degrees).task.settings[0].config.stages == (4, 4, 4, 4)
    assert case_of(**degrees, layers="14").task.settings[0].config.stages == (3, 4, 4, 3)  # embedding and head count
    ends = case_of(**degrees, layers="14", vpp="2").task.settings[0].config
    assert ends.stages == (1, 2, 2, 2, 2, 2, 2, 1)
    alone = (
        case_of(**degrees, layers="14", vpp="4").task.settings[0].config
    )  # a chunk of the embedding, one of the head
    assert alone.stages == (0, *(1,) * 14, 0)
    config = case_of(**degrees, vpp="2").task.settings[0].config
    assert (config.schedule, config.virtual_stages, config.stages) == ("Interleaved1F1B", 2, None)


def test_experts_are_split_as_far_as_their_degree_leaves_ranks() -> None:
    def etps(**degrees: str) -> list[int | None]:
        case = case_of(**{**QWEN, "tp": "2", "dp": "8", **degrees})
        return [s.config.etp for s in case.task.settings]

    assert etps(ep="8") == [None, 1]
    assert etps(ep="16") == [1]  # tp times ep is more than all ranks
    assert etps(tp="1", dp="16", ep="16") == [None]


def test_seconds_come_from_tokens_or_from_arithmetic_as_the_row_counts_it() -> None:
    assert case_of(tokens_per_s_per_gpu="1").measured_s == 0.5  # seconds first
    assert case_of(step_time_s="", tokens_per_s_per_gpu="10000").measured_s == 64 * 4096 / (10000 * 16)
    c = case_of(step_time_s="", tflops_per_gpu="200", tflops_kind="hardware (SC21 96Blsh^2 formula)")
    h, n = 2048, 16
    flops = 96 * n * h * h * (1 + 4096 / (6 * h) + 128256 / (16 * n * h))
    assert c.measured_s == pytest.approx(64 * 4096 * flops / (200e12 * 16))
    full, half = (flops_per_token(f, c.task.shape, 4096) for f in (Formula.FULL_ATTENTION, Formula.CAUSAL_ATTENTION))
    assert full - half == 6 * n * h * 4096
    for fields in ({}, {"tflops_per_gpu": "200", "tflops_kind": "as reported"}):
        c = case_of(step_time_s="", **fields)
        assert math.isnan(c.measured_s) and "nothing measured that gives seconds" in c.unmeasured


def test_memory_is_read_in_the_unit_and_of_the_stage_that_the_row_says() -> None:
    assert case_of(peak_mem_gb="2", mem_kind="torch max allocated GiB").memory[1] == 2 * 2**30
    kind, size = case_of(peak_mem_gb="2", mem_kind="torch max_memory_allocated, GB=1e9, logged by LAST rank").memory
    assert (kind.last_stage, kind.comparable, size) == (True, True, 2e9)
    assert not case_of(peak_mem_gb="2", mem_kind="nvidia-smi, GB, max over nodes").memory[0].comparable
    assert case_of().memory is None
    for fields, why in (
        ({"mem_kind": "unheard of"}, "mem_kind 'unheard of' does not say"),
        ({}, "mem_kind 'blank' does not say"),
        ({"peak_mem_gb": "-2", "mem_kind": "allocated GB"}, "peak_mem_gb=-2 is not above 0"),
    ):
        with pytest.raises(Unmeasured, match=why):
            _ = case_of(**{"peak_mem_gb": "2", **fields}).memory


# -- pricing -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("catalog_graph")
def test_the_first_reading_is_the_price_and_the_others_widen_its_interval() -> None:
    stated, blank = case_of(), case_of(recompute="")
    a, b = tool.result_of(stated), tool.result_of(blank)
    setting = stated.task.settings[0]
    step = estimate_config(tool.request_of(stated.task, setting), setting.config).estimate.step_time_s
    assert (a.predicted_s, a.low_s, a.high_s) == (step.mid, step.low, step.high)
    assert (b.predicted_s, b.low_s, b.assumed) == (a.predicted_s, a.low_s, ("recompute",))
    assert b.high_s > a.high_s
    assert a.measured_s == 0.5 and a.error == a.predicted_s / 0.5 - 1 and math.isnan(a.measured_bytes)


@pytest.mark.usefixtures("catalog_graph")
def test_a_reading_priced_with_the_first_layout_costs_what_it_costs_alone() -> None:
    degrees = {"tp": "2", "pp": "2", "dp": "4", "source": "x", "zero_stage": "", "recompute": ""}
    case = case_of(**degrees)
    first, other = case.task.settings[0], [s for s in case.task.settings if s.mode is case.task.settings[0].mode]
    planned = estimate_config(tool.request_of(case.task, first), first.config)
    assert {(s.config.zero_stage, s.config.recompute) for s in other} >= {(1, "none"), (0, "none"), (1, "full")}
    for setting in other:
        request = tool.request_of(case.task, setting)
        alone = estimate_config(request, setting.config).estimate
        shared = tool.variant(request, planned, first, setting)
        assert shared.step_time_s == alone.step_time_s
        assert shared.peak_memory_bytes == alone.peak_memory_bytes


def test_a_fault_costs_one_row_and_is_shown(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken(shape: Shape) -> ModelGraph:
        raise KeyError("weight")

    monkeypatch.setattr(tool, "graph_of", broken)
    found = tool.result_of(case_of(id="seventh", n_gpus="8", dp="8"))
    assert found.reason == "failed: KeyError: 'weight'" and found.stated and "seventh" in caplog.text


@pytest.mark.usefixtures("catalog_graph")
def test_a_file_is_priced_row_by_row_and_stored(tmp_path: Path) -> None:
    data = write_csv(
        tmp_path / "rows.csv",
        [
            {"id": "one"},
            {"id": "two", "global_batch": "128", "step_time_s": "1.0", "campaign": "second", "trust": "B"},
            {"id": "device", "gpu": "MI999"},
            {"id": "unstated", "layers": ""},
            {"id": "out", "step_time_s": "", "notes": "OOM", "recompute": "full"},
            {"id": "refused", "tp": "3", "dp": "2", "n_gpus": "6", "global_batch": "6"},
        ],
    )
    out = tmp_path / "out.json"
    tool.main(data, out, jobs=1)
    stored = json.loads(out.read_text())
    assert [r["id"] for r in stored["rows"]] == ["one", "two", "device", "unstated", "out", "refused"]
    one, two, device, unstated, out_of_memory, refused = stored["rows"]
    assert one["low"] < one["predicted_step_time_s"] < one["high"] and one["predicted_peak_bytes"] > 1e9
    assert one["measured_step_time_s"] == 0.5 and two["predicted_step_time_s"] > one["predicted_step_time_s"]
    assert "MI999" in device["reason"] and device["predicted_step_time_s"] is None and device["stated"]
    assert "layers" in unstated["reason"] and not unstated["stated"]
    assert out_of_memory["predicted_peak_bytes"] > 1e9 and out_of_memory["measured_step_time_s"] is None
    assert refused["reason"].startswith("refused: ") and "tp=3" in refused["reason"]
    summary = stored["summary"]
    assert [summary["all"][f"num_{n}"] for n in ("rows", "stated", "priced")] == [6, 5, 3]
    # two rows are compared, two are refused; the model is small and fits, which is right of both that ran
    errors = [abs(r["predicted_step_time_s"] / r["measured_step_time_s"] - 1) for r in (one, two)]
    assert summary["all"]["mean_with_unpriced"] == pytest.approx((sum(errors) + 2) / 4)
    ran = {"num_ran": 2, "num_ran_right": 2, "num_out": 1, "num_out_right": 0}
    assert summary["feasibility"] == {**ran, "balanced_accuracy": 0.5}
    assert list(summary["not_stated"]) == ["layers is not stated"] and len(summary["not_priced"]) == 2
    assert set(stored["summary"]["groups"]["campaign"]) == {"made-up", "second"}
    rows = read_rows(data)
    assert [r["id"] for r in tool.chosen(rows, "A", "", 0)] == ["one", "device", "unstated", "out", "refused"]
    assert [r["id"] for r in tool.chosen(rows, "", "", 2)] == ["one", "unstated"]
    with pytest.raises(AutoplanError, match="there is only made-up, second"):
        tool.chosen(rows, "", "third", 0)
