"""Models from a config.json: the class and sizes it names, dropout, recurrences that are found."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from command_line import one_line_error, run
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import autoplan.capture.export
from autoplan.api import plan_program
from autoplan.capture.export import capture
from autoplan.capture.frontend.config_file import model_from_config
from autoplan.capture.frontend.inputs import LossFn, LossModule
from autoplan.capture.frontend.recurrences import find_scans
from autoplan.capture.source import _example
from autoplan.catalog import load_model
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.errors import CaptureError
from autoplan.ir.graph import ModelGraph

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 128, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
GPT2 = {  # as published, with fewer layers
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "embd_pdrop": 0.1,
    "resid_pdrop": 0.1, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 128, "vocab_size": 128,
}  # fmt: skip
BERT = {
    "model_type": "bert", "architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1,
    "hidden_dropout_prob": 0.1, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_hidden_layers": 2, "max_position_embeddings": 128, "type_vocab_size": 2, "vocab_size": 128,
}  # fmt: skip
T5 = {
    "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "dropout_rate": 0.1, "d_ff": 128, "d_kv": 16,
    "d_model": 64, "num_heads": 4, "num_layers": 2, "vocab_size": 128, "is_encoder_decoder": True,
    "decoder_start_token_id": 0, "pad_token_id": 0, "n_positions": 128,
}  # fmt: skip


SEQUENCES = "LlamaForSequenceClassification"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("AUTOPLAN_CACHE", str(cache))


def written(tmp_path: Path, config: Mapping[str, Any]) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def estimated(path: str, *more: str) -> Any:
    return run("estimate", path, "-c", "1x4xh100-sxm5-80gb", "--seq", "128", "--gbs", "8", *more)


# -- dropout -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [GPT2, BERT, T5], ids=["gpt2", "bert", "t5"])
def test_a_config_with_dropout_is_planned_as_it_runs(config: dict[str, Any], tmp_path: Path) -> None:
    """Dropout inside attention too: the price is that of the graph that the door executes."""
    path = written(tmp_path, config)
    graph = load_model(path)
    found = [n for b in graph.blocks.values() for n in b.nodes]
    assert {n.attrs["p"] for n in found if n.op in ("dropout", "dropped_attention")} == {0.1}
    named = {n.op for n in found}
    assert "dropped_attention" in named and not named & {"attention", "softmax"}
    assert ModelGraph.from_json(graph.to_json()) == graph == load_model(path)  # the second time from the cache
    model = model_from_config(config, "test")
    assert capture(model, _example(model)) == graph
    assert json.loads(estimated(path, "--json").stdout)["model"]["notes"] == list(graph.notes)


def test_a_config_of_an_image_model(tmp_path: Path) -> None:
    """Its example is images with a label each; its initial values, which look at what they drew, are left out."""
    config = {
        "model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 32, "image_size": [16, 32],
        "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3, "patch_size": 8, "num_channels": 3,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    graph = load_model(written(tmp_path, config))
    assert [str(d) for d in graph.values["pixel_values"].shape] == ["b", "3", "16", "32"]
    assert graph.inputs[:2] == ("pixel_values", "labels") and graph.call_counts()["layer"] == 3
    settings = transformers.ViTConfig(**{k: v for k, v in config.items() if k != "architectures"})
    model = transformers.ViTForImageClassification(settings)
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == {n: p.shape for n, p in graph.params.items()}
    assert transformers.PreTrainedModel.initialize_weights.__qualname__ == "PreTrainedModel.initialize_weights"


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.used(x)
        return out


def unused() -> tuple[nn.Module, dict[str, torch.Tensor], LossFn]:
    return Unused(), {"x": torch.zeros(4, 8)}, lambda out, batch: out.square().mean()


def test_notes_of_a_graph_are_told() -> None:
    """In the reports of the command line, their JSON, and the plan of `parallelize`."""
    note = "unused.weight does not influence the loss, so it gets no gradient and no update, as in PyTorch"
    model = f"{__name__}:unused"
    assert f"Note: Unused: {note}" in " ".join(estimated(model).stdout.split())
    data = json.loads(estimated(model, "--json").stdout)
    fixed, *others = data["model"]["notes"]
    assert "its inputs have a fixed size" in fixed and others == [note]
    plan = plan_program(load_model(model), Cluster.parse("local:1"), {}, 2, 1)[0]
    assert f"note: {note}" in str(plan) and json.loads(plan.to_json())["program"]["notes"] == [note]


# -- sizes and classes -------------------------------------------------------------------------------------------------


def test_sizes_are_not_guessed(tmp_path: Path) -> None:
    line = one_line_error(estimated(written(tmp_path, {"model_type": "llama"})), 2)
    assert "hidden_size, num_hidden_layers, num_attention_heads, intermediate_size, vocab_size are missing" in line
    meant = json.loads("{" + line.partition("write them: ")[2] + "}")
    model_from_config({"model_type": "llama", **meant}, "test")  # what it says works
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size"):
        with pytest.raises(CaptureError, match=f"test: {name} is missing"):
            model_from_config({k: v for k, v in LLAMA.items() if k != name}, "test")
    model_from_config(LLAMA, "test")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"max_position_embeddings": -1}, "max_position_embeddings=-1 is not a size of a model; it must be at least 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 is not a size of a model"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers=10000000 is not a size of a model; it must be at most"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 is not"),
        ({"hidden_size": -64}, "hidden_size=-64 is not"),
        ({"vocab_size": 0}, "vocab_size=0 is not"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide num_attention_heads=4; nearest: 2"),
    ],
)
def test_sizes_that_no_model_can_have_are_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(CaptureError, match=re.escape(f"file: {said}")):
        model_from_config({**LLAMA, **change}, "file")


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        ({"model_type": "gpt2", "n_embd": 64, "n_head": 4, "vocab_size": 128}, "n_layer"),
        ({"model_type": "t5", "d_model": 64, "num_layers": 2, "vocab_size": 128}, "num_heads"),
        (
            {"model_type": "gemma3", "text_config": {k: v for k, v in LLAMA.items() if k != "hidden_size"}},
            "hidden_size",
        ),
    ],
)
def test_sizes_have_the_names_of_their_class(config: dict[str, Any], missing: str) -> None:
    if "text_config" in config:  # of models of several parts, those of the language model are looked at
        config = config | {"text_config": {k: v for k, v in config["text_config"].items() if v is not None}}
    with pytest.raises(CaptureError, match=f"{missing} is missing"):
        model_from_config(config, "test")


def test_a_size_under_another_name_is_given() -> None:
    """Bloom's published configs say n_embed; the shared names work for every class."""
    bloom = {"model_type": "bloom", "n_embed": 128, "n_layer": 3, "n_head": 4, "vocab_size": 256}
    assert model_from_config(bloom, "test").config.hidden_size == 128
    shared = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 64}
    assert model_from_config({"model_type": "gpt2", **shared}, "test").config.n_embd == 32


@pytest.mark.parametrize(
    ("config", "built"),
    [
        (
            LLAMA | {"architectures": ["LlamaForSequenceClassification", "LlamaForCausalLM"]},
            "LlamaForSequenceClassification",
        ),
        (LLAMA | {"architectures": ["LlamaForTokenClassification"]}, "LlamaForTokenClassification"),
        (BERT, "BertForMaskedLM"),
        (BERT | {"architectures": ["BertLMHeadModel"]}, "BertLMHeadModel"),
        (T5, "T5ForConditionalGeneration"),
        ({k: v for k, v in T5.items() if k != "architectures"}, "T5ForConditionalGeneration"),
        (LLAMA, "LlamaForCausalLM"),
    ],
)
def test_the_class_that_a_config_names_is_built(config: dict[str, Any], built: str) -> None:
    assert type(model_from_config(config, "test")).__name__ == built


def test_a_classifier_of_sequences_has_a_label_per_sequence() -> None:
    def labels(name: str) -> tuple[int, ...]:
        return tuple(_example(model_from_config(BERT | {"architectures": [name]}, "test"))["labels"].shape)

    assert labels("BertForSequenceClassification") == (2,)
    assert labels("BertForMaskedLM") == labels("BertForTokenClassification") == (2, 128)


@pytest.mark.parametrize(
    ("name", "why", "near"),
    [
        ("LLaMAForCausalLM", "is not a class of the installed transformers", "LlamaForCausalLM"),
        ("LlamaModel", "has no loss to train with", "LlamaForCausalLM"),
        ("BertForMaskedLM", "is not a class of model_type 'llama'", "LlamaForCausalLM"),
    ],
)
def test_a_class_that_cannot_be_built_names_one_that_can(name: str, why: str, near: str) -> None:
    with pytest.raises(CaptureError, match=re.escape(f"'{name}' {why}; nearest: ")) as caught:
        model_from_config(LLAMA | {"architectures": [name]}, "test")
    (named,) = re.findall(r'nearest: "architectures": \["(\w+)"\]', str(caught.value))
    model_from_config(LLAMA | {"architectures": [named]}, "test")
    assert named.startswith("Llama") and (near == named or name == "BertForMaskedLM" or name == "LlamaModel")


# -- recurrences -------------------------------------------------------------------------------------------------------

RECURRENT = {
    **dict.fromkeys(("mamba", "falcon_mamba", "jamba", "zamba"), "mamba_selective_scan"),
    **dict.fromkeys(("mamba2", "zamba2", "bamba", "falcon_h1", "nemotron_h"), "mamba2_chunk_scan"),
    "rwkv": "rwkv_linear_attention", "recurrent_gemma": "RecurrentGemmaRglru._rnn_scan",
    "qwen3_next": "torch_chunk_gated_delta_rule", "kimi_linear": "chunk_kimi_delta_attention",
}  # fmt: skip


def _with_published_sizes(kind: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    settings = transformers.CONFIG_MAPPING[kind]()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16)
        example = {name: torch.zeros(2, 2048, dtype=torch.long) for name in ("input_ids", "labels")}
    return model, example


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", RECURRENT)
def test_a_recurrence_is_found_before_it_is_traced(kind: str) -> None:
    """By what its layers do, of the default (published) sizes."""
    model, example = _with_published_sizes(kind)
    found = find_scans(model, LossModule(model, tuple(example), None), example)
    assert [scan.name for scan in found] == [RECURRENT[kind]]


@pytest.mark.filterwarnings("ignore")
def test_a_recurrence_in_a_forward_is_refused_before_it_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    def traced(*_: object, **__: object) -> None:
        raise AssertionError("was traced")

    monkeypatch.setattr("autoplan.capture.export._capture", traced)
    with pytest.raises(
        CaptureError, match=r"MiniMaxLightningAttention.*only a recurrence that is a function of tensors"
    ):
        capture(*_with_published_sizes("minimax"))


@pytest.mark.parametrize("config", [LLAMA, BERT, T5, GPT2], ids=["llama", "bert", "t5", "gpt2"])
def test_what_is_no_recurrence_is_traced(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: layers of attention pass, and leave no hook behind."""
    seen: list[str] = []

    def traced(wrapper: LossModule, *_: object, **__: object) -> None:
        seen.append(type(wrapper.model).__name__)

    monkeypatch.setattr(autoplan.capture.export, "_capture", traced)
    model = model_from_config(config, "test")
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    with FakeTensorMode(allow_non_fake_inputs=True):
        example = {name: torch.zeros(2, 128, dtype=torch.long) for name in ("input_ids", "labels")}
    with pytest.raises(CaptureError, match="exchange tensors that are neither arguments nor results"):
        capture(model, example)
    assert seen == [type(model).__name__] * 2
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert not any("forward" in vars(m) for m in model.modules())


def test_sequences_beyond_the_positions_of_a_config_are_told(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    for length in ("128", "256"):
        words = ("estimate", str(path), "--cluster", "h100", "--seq-len", length, "--gbs", "1", "--json")
        (notes,) = [json.loads(run(*words).stdout)["model"]["notes"]]
        assert any("names 128 positions, and sequences have 256 tokens" in note for note in notes) is (length == "256")


def test_images_of_one_size_have_no_sequence_length(tmp_path: Path) -> None:
    """A larger --seq-len gave more tokens per second of the same steps, and so fewer days and less money."""
    vit = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 16, "patch_size": 8}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**vit, **sizes}))
    words = ("estimate", str(path), "--cluster", "h100", "--seq-len", "4k", "--gbs", "8", "--json")
    (note,) = json.loads(run(*words).stdout)["model"]["notes"]
    assert "inputs have a fixed size: a sequence length of 4,096 changes no step" in note
