"""Records of stacks (profiles/stacks): read strictly, complete, and consistent with what they say they can do."""

import copy
import json
import re
from importlib.resources import files

import pytest

from autoplan.config.parallel import Launch, Sends
from autoplan.config.precision import precision_of
from autoplan.config.recompute import recompute_kind
from autoplan.errors import PinError
from autoplan.stacks.like import read_like
from autoplan.stacks.records import Framework, stack, stack_of, stacks, stacks_of_frameworks, version_of, year_of

BRIDGE = json.loads(files("autoplan.profiles").joinpath("stacks/megatron-bridge.json").read_text(encoding="utf-8"))


def test_every_framework_of_published_rows_has_one_record() -> None:
    assert set(stacks_of_frameworks()) == set(Framework)


@pytest.mark.parametrize("name", stacks())
def test_defaults_are_among_what_a_stack_can_do(name: str) -> None:
    found = stacks()[name]
    newest = found.eras[-1].can
    assert set(found.kernels.modes) <= set(newest.modes)
    assert {recompute_kind(how).name for how in found.kernels.recompute} <= set(newest.recompute)
    assert set(found.kernels.zero_stages) <= set(newest.zero_stages)
    assert newest.schedules
    assert found.kernels.source and newest.source and all(era.source for era in found.eras)
    for change in found.changes:
        re.compile(change.matches)
    for precision in newest.precisions:
        precision_of(precision)


def test_an_era_holds_until_the_next_and_changes_depend_on_device_and_precision() -> None:
    found = stack("megatron-bridge")
    assert found.options_at(year_of("25.06"), "H100", "BF16").launch is Launch.ASYNC
    assert found.options_at(year_of("25.09"), "H100", "BF16").launch is Launch.GRAPHS
    assert not found.options_at(year_of("26.08"), "GB300", "BF16").fused_experts
    assert found.options_at(year_of("26.08"), "GB300", "MXFP8").fused_experts
    # recipes that differ by model: what its file in Megatron Bridge says, on that device
    at = year_of("26.04"), "H100", "BF16"
    assert "ep" in found.options_at(*at, "Qwen3_235B_a22B").overlap
    assert "ep" not in found.options_at(*at, "qwen3-30b-a3b").overlap
    assert found.options_at(*at, "qwen3-30b-a3b").launch is Launch.ROUTER_GRAPHS
    assert found.options_at(*at, "llama-3.1-70b").launch is Launch.ASYNC
    assert found.recompute_at(*at, "GPT OSS 120B") == ("modules:layernorm,moe_act",)
    assert found.recompute_at(*at, "a model") == found.recompute_at(*at) == found.kernels.recompute
    assert not found.experts_whole(year_of("25.06")) and found.experts_whole(year_of("25.09"))


def test_nemo_launched_without_cudnns_attention_until_24_07() -> None:
    """NVTE_FUSED_ATTN=0 of NeMo-Framework-Launcher to 24.07 and of some recipes of NVIDIA/dgxc-benchmarking later."""
    found = stack("megatron-bridge")

    def attention(version: str, model: str = "") -> str:
        return str(found.options_at(year_of(version), "H100", "FP8", model).attention)

    assert [attention(v) for v in ("24.01", "24.05", "24.07", "24.09", "24.11")] == ["flash2"] * 3 + ["fused"] * 2
    assert [attention(v, "Grok 1 314b") for v in ("24.11", "25.04", "25.05")] == ["flash2", "flash2", "fused"]
    assert [attention(v, "NeMo Megatron") for v in ("24.11", "25.02")] == ["flash2", "fused"]
    assert [attention(v, "Nemotron4 340b") for v in ("24.11", "25.03", "25.04")] == ["flash2", "flash2", "fused"]
    assert attention("24.11", "Nemotron4 15b") == attention("24.11", "Llama 3.1 405b") == "fused"
    # keys of 192 and values of 128: no fused kernel on Blackwell before Transformer Engine 2.5
    deepseek = [found.options_at(year_of(v), "GB200", "BF16", "Deepseek V3").attention for v in ("25.05", "25.09")]
    assert deepseek == ["unfused", "fused"]
    again = [found.recompute_at(year_of(v), "GB200", "BF16", "Deepseek V3")[0] for v in ("25.05", "25.07")]
    assert again == ["selective", "none"]


@pytest.mark.parametrize(
    ("name", "version", "model", "loss"),
    [
        ("megatron-lm", "26.08", "llama-3.1-70b", "no"),
        ("megatron-lm", "25.09", "Qwen3-235B-A22B", "online"),
        ("megatron-lm", "26.08", "Qwen3-235B-A22B", "compiled"),
        ("megatron-bridge", "24.05", "LLAMA3-8B", "no"),
        ("megatron-bridge", "24.07", "LLAMA3-8B", "compiled"),
        ("megatron-bridge", "24.07", "LLAMA2-7B", "no"),
        ("megatron-bridge", "24.09", "LLAMA2-7B", "compiled"),
        ("megatron-bridge", "24.07", "Nemotron-340B", "no"),
        ("megatron-bridge", "24.11", "Nemotron4 340b", "compiled"),
        ("megatron-bridge", "24.11", "GPT3-175B", "no"),
        ("megatron-bridge", "25.02", "Llama3 8b Finetuning LORA", "no"),
        ("megatron-bridge", "25.05", "Grok1 314b", "online"),
        ("megatron-bridge", "26.08", "llama-3.1-70b", "online"),
        ("megatron-bridge", "26.08", "DeepSeekV4 Flash", "compiled"),
        ("megatron-bridge", "25.09", "Llama 3.1 405B (MLPerf v5.1, NVIDIA)", "compiled"),
        ("megatron-bridge", "25.09", "Llama 2 70B LoRA (MLPerf v5.1, NVIDIA)", "no"),
        ("megatron-bridge-library", "26.08", "Qwen3-30B-A3B", "online"),
        ("torch-eager", "26.08", "llama-3.1-8b", "no"),
        ("torchtitan", "25.08", "llama-3.1-8b", "torch"),
        ("torchtitan", "26.08", "llama-3.1-8b", "no"),
    ],
)
def test_kernels_of_the_loss_differ_by_release_and_model(name: str, version: str, model: str, loss: str) -> None:
    assert stack(name).options_at(year_of(version), "H100", "BF16", model).fused_loss == loss


def test_recipes_of_nemo_2_that_capture_cuda_graphs() -> None:
    found, at = stack("megatron-bridge"), year_of("25.05")
    assert found.options_at(at, "GB200", "FP8", "Grok1 314b").launch is Launch.FULL_GRAPHS
    assert found.options_at(at, "H100", "FP8", "LLAMA4 Maverick 400b").launch is Launch.GRAPHS
    for device, precision, model in (
        ("H100", "FP8", "Grok1 314b"),
        ("H100", "BF16", "LLAMA4 Maverick 400b"),
        ("GB200", "FP8", "LLAMA4 maverick 400b"),
    ):
        assert found.options_at(at, device, precision, model).launch is Launch.ASYNC


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("eraz",), [], "unknown key 'eraz'; did you mean 'eras'"),
        (("eras", 0, "optoins"), {}, "did you mean 'options'"),
        (("eras", 0, "options", "launhc"), "graphs", "unknown option 'launhc'"),
        (("eras", 0, "options", "launch"), "graph", "launch 'graph' is not known; use async"),
        (("eras", 0, "since"), 2020.0, "must begin with since=0.0"),
        (("eras", 1, "options", "overlap"), ["cp", "pp", "tp"], "state what is new"),
        (("eras", 1, "options", "sends"), None, "sends is null in the era before; state what is new"),
        (("can", "schedules"), ["1F1BB"], "did you mean '1F1B'"),
        (("can", "zero_stages"), [4], "zero_stages of 4 is not known"),
        (("kernels", "modes"), ["fuse"], "did you mean 'fused'"),
        (("frameworks",), ["NeMo"], "NeMo, Megatron Bridge"),
        (("default_version",), "new", "write YY.MM"),
        (("equal_stages",), 1, "must be of type bool"),
        (("gradients_16", "when"), "alwais", "did you mean 'always'"),
        (("changes", 0, "recompute"), ["fulll"], "recompute of 'fulll' is not known; did you mean 'full'"),
        (("changes", 0, "recompute"), ["modules:mlps"], "did you mean mlp"),
    ],
)
def test_a_faulty_record_is_refused_by_the_nearest_name(path: tuple[object, ...], value: object, message: str) -> None:
    data = copy.deepcopy(BRIDGE)
    at = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(PinError, match=re.escape(message)):
        stack_of(data, "x.json")


def test_an_era_states_what_differs_from_the_one_before() -> None:
    data = copy.deepcopy(BRIDGE)
    data["changes"] = []
    options = ({"sends": "split", "attention": "flash1"}, {"attention": "flash2"}, {"sends": None, "overlap": ["cp"]})
    data["eras"] = [{"since": float(k), "source": "x", "options": each} for k, each in enumerate(options)]
    first, second, third = (era.options for era in stack_of(data, "x.json").eras)
    assert (first.sends, second.sends, third.sends) == (Sends.SPLIT, Sends.SPLIT, Sends.WHOLE)
    assert (first.attention, second.attention, third.attention) == ("flash1", "flash2", "flash2")
    assert first.overlap == second.overlap != third.overlap


def test_a_missing_key_and_an_unknown_stack_are_named() -> None:
    with pytest.raises(PinError, match=r"x\.json: about is missing"):
        stack_of({key: value for key, value in BRIDGE.items() if key != "about"}, "x.json")
    with pytest.raises(PinError, match="did you mean 'megatron-bridge'"):
        stack("megatron-brigde")


def test_bloom_summed_in_16_bits_until_deepspeed_had_its_bf16_optimizer() -> None:
    found = stack("bigscience")
    before, after = year_of("22.02"), year_of("22.03")
    assert [found.in_16_bits("bf16", False, year) for year in (before, after)] == ["bf16-grad16", "bf16"]
    assert found.in_16_bits("fp16", False, after) == "fp16-grad16"
    options = [found.options_at(year, "A100", "BF16") for year in (before, after)]
    assert [o.whole_sums for o in options] == [False, True]
    assert all(o.sends is Sends.SERIAL and not o.sequence_parallel for o in options)
    lm = stack("megatron-lm")
    sent = [lm.options_at(year_of(v), "A100", "BF16").sends for v in ("20.12", "22.06", "23.02", "23.04")]
    assert sent == [Sends.WHOLE, Sends.SPLIT, Sends.SPLIT, Sends.WHOLE]


def test_what_is_without_masters_is_said_once() -> None:
    automodel = stack("automodel")
    year = year_of("26.08")
    assert [automodel.in_16_bits(p, False, year) for p in ("bf16", "fp16", "native")] == ["native", "fp16", "native"]
    like = read_like("automodel")
    assert like.precision(latent=False) == "native"
    assert like.but(precision="bf16-grad32").precision(latent=False) == "bf16"
    assert [s.name for s in stacks().values() if s.native_since is not None] == [
        "automodel",
        "kempnerforge",
        "torchtune",
    ]
    assert stack("torch-fsdp").in_16_bits("bf16", False, year) == "bf16-grad16"


def test_gradients_are_reduced_once_where_the_source_says_no_sync() -> None:
    found = {s.name for s in stacks().values() if s.options_at(year_of("26.08"), "H100", "BF16").reduce_once}
    assert found == {"accelerate", "automodel", "kempnerforge"}
    assert stack("deepspeed").options_at(2023.9, "A100", "BF16").module_hooks


def test_products_add_gradients_in_megatron_since_february_2022_and_never_with_deepspeed() -> None:
    def adds(name: str, version: str) -> bool:
        return stack(name).options_at(year_of(version), "A100", "BF16").fused_accumulation

    assert [adds("megatron-lm", v) for v in ("20.06", "21.06", "22.02", "22.03", "26.08")] == [False] * 3 + [True] * 2
    engines = ("bigscience", "megatron-deepspeed", "internevo", "automodel")
    assert not any(adds(name, version) for name in engines for version in ("22.01", "22.03", "24.06", "26.08"))
    assert adds("megatron-bridge", "26.08")


def test_versions_are_dates() -> None:
    assert [version_of(year_of(text)) for text in ("26.08", "2021.3", "24.12")] == ["26.08", "21.03", "24.12"]
    for text in ("26", "26.13", "v2.2", "08.26"):
        with pytest.raises(PinError, match="write YY"):
            year_of(text)
