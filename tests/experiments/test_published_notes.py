"""experiments/published: what notes and names of rows say beyond their columns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from made_up import QWEN, case_of

from autoplan.config.parallel import Attention, Dispatcher, Launch
from autoplan.stacks.records import Framework
from experiments.published.reading import STATED_BY_SOURCE, doubt_of, stated_by
from experiments.published.results import Result, doubt_text, summary_of
from experiments.published.summary import markdown

MOE = {**QWEN, "ep": "8", "flags": "", "recompute": "", "gpu_mem_gb": ""}
SIZES = QWEN["notes"]
BRIDGE = "NVIDIA-NeMo/Megatron-Bridge docs"
CARD = "NVIDIA-NeMo/Megatron-Bridge examples/model_verification_cards"


def options_of(notes: str = "", **fields: str) -> Any:
    return case_of(**{**MOE, "notes": f"{SIZES}; {notes}", **fields}).task.settings[0].options


@pytest.mark.parametrize(("notes", "overlaps"), [
    ("EP overlap on (A2A_OVERLAP=1)", True), ("cross-node EP, +1f1b A2A overlap", True),
    ("TE graphs; EP overlap", True), ("EP overlap off", False), ("", False),
])  # fmt: skip
def test_notes_say_whether_exchanges_of_experts_overlap(notes: str, overlaps: bool) -> None:
    assert ("ep" in options_of(notes).overlap) is overlaps
    assert "ep" not in options_of(notes, flags="DeepEP; A2A_OVERLAP=0").overlap
    usual = {"source": BRIDGE, "model": "Qwen3_235B_a22B"}  # a recipe that overlaps, where the row says nothing else
    assert ("ep" in options_of(f"container 26.04; {notes}", **usual).overlap) is (notes != "EP overlap off")


@pytest.mark.parametrize(("words", "launch"), [
    ("CUDA graphs (TE)", Launch.GRAPHS), ("HybridEP; TE graphs", Launch.GRAPHS),
    ("TE CUDA graphs moe_router+moe_preprocess", Launch.ROUTER_GRAPHS),
    ("TE CUDA graphs (attn, mamba)", Launch.GRAPHS), ("full-iteration CUDA graph", Launch.FULL_GRAPHS),
])  # fmt: skip
def test_notes_and_flags_say_what_graphs_hold(words: str, launch: Launch) -> None:
    assert options_of(words).launch is options_of(flags=words).launch is launch
    assert options_of().launch is Launch.ASYNC


def test_dispatchers_are_read_and_dropped_tokens_travel_all_to_all() -> None:
    assert options_of("intra-node EP, A2A dispatcher", flags="A2A").dispatcher is Dispatcher.ALL_TO_ALL
    assert options_of("HybridEP permute fusion").dispatcher is Dispatcher.FLEX
    assert options_of(flags="DeepEP", notes="A2A dispatcher").dispatcher is Dispatcher.FLEX  # flags come first
    recipe = {"source": BRIDGE, "gpu": "GB200", "precision": "MXFP8"}
    assert options_of("container 26.02", **recipe).dispatcher is Dispatcher.FLEX
    dropped = options_of("container 26.02; (tokendrop)", model="Qwen3 (tokendrop)", **recipe)
    assert dropped.dispatcher is Dispatcher.ALL_TO_ALL and dropped.launch is Launch.FULL_GRAPHS


def test_fine_tuning_of_mlperf_attends_over_whole_sequences() -> None:
    tuned = {"source": "mlcommons/training_results_v5.0", "flags": "LoRA", "gpu": "MI300X", "gpu_mem_gb": "192",
             "precision": "FP8", "recompute": "", "notes": "NeMo"}  # fmt: skip
    cases = [case_of(**tuned, model=f"Llama 2 70B LoRA{by}").task.settings[0] for by in (" (MLPerf v5.0, AMD)", "")]
    assert [setting.options.document_len for setting in cases] == [None, 200]
    assert cases[0].again == "0-20=full"  # the submission's ACL=21 on this device


def test_a_noted_day_says_which_optimizer_bloom_had() -> None:
    bloom = {"source": "bigscience-workshop/bigscience chronicles-prequel.md:1", "pp": "2", "dp": "2", "gpu": "A100",
             "tp": "4", "sp": "0", "n_gpus": "16", "precision": "BF16"}  # fmt: skip
    days = {day: case_of(**bloom, notes=f"date {day}; after PCIe/NUMA fix").task for day in ("02-27", "02-28")}
    assert [task.precision for task in days.values()] == ["bf16-grad16", "bf16"]
    assert [task.settings[0].options.whole_sums for task in days.values()] == [False, True]
    # with ZeRO 0 in its file, this optimizer shards its state all the same
    zero = [case_of(**{**bloom, "zero_stage": "0"}, notes=f"date {day}").task.settings[0].config for day in days]
    assert [config.zero_stage for config in zero] == [0, 1]


@pytest.mark.parametrize(("notes", "etps"), [("ETP=1", [1]), ("ETP=4", [None]), ("", [None, 1]), ("ETP=3", [None])])
def test_how_experts_are_split_is_noted(notes: str, etps: list[int | None]) -> None:
    settings = case_of(**{**MOE, "tp": "4", "dp": "4", "ep": "4", "notes": f"{SIZES}; {notes}"}).task.settings
    assert list(dict.fromkeys(s.config.etp for s in settings)) == etps


def test_a_card_of_a_performance_recipe_is_read_as_that_recipe() -> None:
    fields = {**MOE, "source": CARD, "gpu": "GB300", "precision": "MXFP8", "model": "qwen3-30b-a3b"}
    library = case_of(**{**fields, "notes": SIZES})
    recipe = case_of(**{**fields, "notes": f"{SIZES}; performance recipe of release 26.08"})
    assert (library.framework, recipe.framework) == (Framework.BRIDGE_LIBRARY, Framework.NEMO)
    options = recipe.task.settings[0].options
    assert options.launch is Launch.FULL_GRAPHS and options.fused_experts and options.narrow_attention


def test_blank_recompute_is_that_of_the_recipe() -> None:
    fields = {**MOE, "source": BRIDGE, "gpu": "B200", "notes": f"{SIZES}; container 26.04"}
    found = {m: case_of(**{**fields, "model": m}).task.settings for m in ("GPT OSS 120B", "another")}
    assert [s.config.recompute for s in found["GPT OSS 120B"]] == ["modules:layernorm,moe_act"]
    assert found["another"][0].config.recompute == "none"


def test_names_tell_layers_that_dimensions_do_not() -> None:
    llama = case_of(**{**MOE, "model": "LLAMA4 maverick 400b"}).task.shape
    assert llama.shared_ffn == llama.expert_ffn == 768  # in every layer with experts
    assert case_of(**MOE).task.shape.shared_ffn == 0
    recipe = {"source": BRIDGE, "notes": f"{SIZES}; container 26.04"}
    deepseek = case_of(**{**MOE, **recipe, "model": "DeepSeekV3"})
    assert deepseek.task.shape.layers == 49 and "tokens after the next" in " ".join(deepseek.notes)
    assert case_of(**{**MOE, "model": "DeepSeekV3", "source": "a blog"}).task.shape.layers == 48
    few = {**MOE, "moe_experts": "8", "moe_topk": "2", "ep": "2", "kv_heads": "32", "params_b": ""}
    proxy = case_of(**{**few, "source": "Megatron-LM functional_tests", "model": "deepseek_proxy"})
    assert proxy.task.shape.kind.latent
    assert not case_of(**{**few, "source": "Megatron-LM functional_tests"}).task.shape.kind.latent


CASES = "NVIDIA/Megatron-LM tests/functional_tests/test_cases"
TESTED = {**MOE, "layers": "16", "moe_experts": "32", "moe_topk": "4", "kv_heads": "32", "tp": "2", "pp": "2",
          "vpp": "4", "dp": "2", "ep": "4", "n_gpus": "8", "params_b": "", "micro_batch": "4", "global_batch": "32",
          "notes": "", "schedule": "1F1B"}  # fmt: skip


def functional(name: str, **fields: str) -> Any:
    return case_of(**{**TESTED, "source": f"{CASES}/moe/{name}/golden_values_dev_dgx_h100.json", **fields})


def test_the_file_of_a_functional_test_states_what_the_table_has_no_column_for() -> None:
    found = functional("gpt3_mcore_te_tp2_pp2_ep4_etp1_memory_speed")
    shape, setting = found.task.shape, found.task.settings[0]
    assert (shape.expert_ffn, shape.shared_ffn, shape.first_dense) == (1024, 1024, 1)
    assert shape.kind.latent and (shape.kind.q_rank, shape.kind.kv_rank) == (1536, 512)
    assert setting.options.attention is Attention.UNFUSED and setting.config.etp == 1
    # the layer that predicts the token after the next is in the last chunk
    assert (shape.layers, shape.predicting, setting.config.stages) == (17, 1, (2, 2, 2, 2, 2, 2, 2, 3))
    assert "with a layer for tokens after the next" in found.notes
    proxy = functional("deepseek_proxy_fsdp_ep2_fsdp2_ep_overlap", moe_experts="8").task.shape
    assert (proxy.kind.q_rank, proxy.kind.kv_rank, proxy.layers) == (256, 128, 16)
    config = proxy.config()
    assert (config["q_lora_rank"], config["kv_lora_rank"], config["first_k_dense_replace"]) == (256, 128, 1)
    assert proxy.num_params < replace(proxy, kind=replace(proxy.kind, kv_rank=512)).num_params
    # what a row says itself comes first
    assert functional("deepseek_proxy_fsdp_ep2_fsdp2_ep_overlap", notes="moe_ffn=256").task.shape.expert_ffn == 256
    unread = functional("another_test")
    assert unread.row.stated == "" and unread.task.shape.layers == 16 and unread.task.shape.kind.kv_rank == 512
    assert unread.task.settings[0].options.attention is Attention.UNFUSED  # as all that are deterministic


def test_layers_in_a_layout_and_offloading_are_read_from_the_file_of_a_test() -> None:
    offloaded = functional("gpt3_moe_mcore_te_tp2_pp2_ep4_etp1_fine_grained_offloading", layers="15", vpp="")
    config = offloaded.task.settings[0].config
    assert (config.virtual_stages, config.recompute, config.stages) == (4, "offload", None)  # 16 layers, 8 chunks
    assert offloaded.task.shape.first_dense == 3 and config.offload == ()


@pytest.mark.parametrize(("test", "attention"), [
    ("bert/bert_mcore_tp2_pp2", Attention.UNFUSED), ("gpt/gpt3_mcore_te_tp1_pp4_vp1", Attention.UNFUSED),
    ("gpt/gpt3_mcore_tp1_pp2", Attention.UNFUSED), ("gpt/gpt3_mcore_te_tp2_pp2_cp2", Attention.FLASH2),
    ("gpt/gpt3_mcore_te_tp1_pp4_vp1_resume_torch_dist", Attention.FUSED),
    ("mixtral/deepseekv3_proxy_flex_tp1pp4emp16etp1cp1_release", Attention.FUSED),
])  # fmt: skip
def test_the_file_of_a_functional_test_names_the_attention_backend(test: str, attention: Attention) -> None:
    source = f"{CASES}/{test}/golden_values_dev_dgx_h100.json"
    assert case_of(**{**TESTED, "moe_experts": "8", "source": source}).task.settings[0].options.attention is attention


def test_only_sources_that_are_named_state_anything() -> None:
    assert all(pattern.startswith("functional_tests/") for pattern, _ in STATED_BY_SOURCE)
    assert stated_by(BRIDGE) == stated_by("functional_tests") == ""


def test_flags_name_modules_that_are_computed_again_and_sums_apart() -> None:
    again = {**MOE, "recompute": "selective", "flags": "recompute-modules=[layernorm mla_up_proj mlp moe_act]"}
    setting = case_of(**again).task.settings[0]
    assert setting.config.recompute == "modules:layernorm,mla_up_proj,mlp,moe_act"
    assert case_of(**{**again, "flags": ""}).task.settings[0].config.recompute == "selective"
    apart = options_of(flags="no-gradient-accumulation-fusion=True")
    assert not apart.fused_accumulation and options_of().fused_accumulation


def test_steps_that_their_own_source_doubts_are_counted_and_named() -> None:
    folder = "NVIDIA/Megatron-LM tests/functional_tests/test_cases/moe/gpt3_mcore_te_tp2_pp2_ep4_etp1_memory_speed"
    assert "1.1 to 14.7 s" in doubt_of(f"{folder}/golden_values_dev_dgxh100_dgxc.json", "", "")
    assert doubt_of(f"{folder}/golden_values_dev_dgx_h100.json", "", "") == ""
    assert "regression" in doubt_of("", "container 26.06.01; pretrain", "GPT OSS 120B")
    assert doubt_of("", "container 26.06; pretrain", "GPT OSS 120B") == ""
    good = Result("a", "c", "A", "m", "d", "8", predicted_s=1.1, measured_s=1.0)
    bad = replace(good, id="b", predicted_s=0.2, doubt="it waits")
    summary = summary_of([good, bad, replace(good, id="e", campaign="e", predicted_s=1.3)])
    assert summary["macro_mean"] == pytest.approx((0.45 + 0.3) / 2) and summary["doubted"] == {"b": "it waits"}
    assert summary["macro_without_doubted"] == pytest.approx((0.1 + 0.3) / 2)
    table = markdown(summary, {})
    assert "scatter tenfold: b)" in table and "without them is **20.0%**" in table
    assert doubt_text([good]) == [] and doubt_text([good, bad])[1] == "  b (-80%): it waits"
