"""Layers that predict the tokens after the next: the graph computes what a module with them computes."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, pad
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedModel,
)

from autoplan.capture.export import capture
from autoplan.catalog import built_model, describe_model, load_model, usual_run
from autoplan.config.adapters import read_adapters
from autoplan.errors import AutoplanError, GraphError
from autoplan.ir.graph import ModelGraph, check
from autoplan.program.adapters import with_adapters
from autoplan.program.facts import layer_calls
from autoplan.program.multi_token import LOSS_WEIGHT, num_mtp_layers, with_mtp
from autoplan.verify.one_device import bind_params, compile_one_device, load_stage, run_one_device

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS = {
    "llama": LlamaConfig(**SMALL, intermediate_size=48, num_key_value_heads=2),
    "gpt2": GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    ),
    "mixtral": MixtralConfig(**SMALL, intermediate_size=48, num_key_value_heads=2, num_local_experts=4),
    "deepseek": DeepseekV3Config(
        **SMALL,
        intermediate_size=48,
        moe_intermediate_size=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        v_head_dim=8,
        qk_nope_head_dim=8,
    ),
}


class _Layer(nn.Module):
    """DeepSeek-V3's module of one depth, with a layer and norms like those of a model."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        body = model.base_model
        layers, norm = (body.h, body.ln_f) if hasattr(body, "h") else (body.layers, body.norm)
        self.enorm, self.hnorm, self.final_norm = (copy.deepcopy(norm) for _ in range(3))
        self.layer = copy.deepcopy(layers[-1])
        width = model.get_input_embeddings().weight.shape[1]
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        for p in self.parameters():
            nn.init.normal_(p, std=0.2)


def _loss(model: PreTrainedModel, more: nn.ModuleList, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """What the module computes: the loss of the next token, and those of the tokens after it."""
    kept: list[tuple[tuple[object, ...], Mapping[str, object], torch.Tensor]] = []
    body = model.base_model
    last = (body.h if hasattr(body, "h") else body.layers)[-1]

    def keep(module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object], out: object) -> None:
        kept.append((args[1:], kwargs, out if isinstance(out, torch.Tensor) else out[0]))  # type: ignore[index]

    hook = last.register_forward_hook(keep, with_kwargs=True)
    total = model(input_ids=ids, labels=labels, use_cache=False).loss
    hook.remove()
    ((args, kwargs, hidden),) = kept
    for depth, module in enumerate(more, 1):
        later = pad(ids, (0, depth))[:, depth:]
        embedded = model.get_input_embeddings()(later)
        if hasattr(body, "wpe"):
            embedded = embedded + body.wpe(torch.arange(ids.shape[1]))
        both = torch.cat([module.enorm(embedded), module.hnorm(hidden)], -1)
        out = module.layer(module.eh_proj(both), *args, **kwargs)
        hidden = out if isinstance(out, torch.Tensor) else out[0]
        logits = model.get_output_embeddings()(module.final_norm(hidden))
        wanted = pad(labels, (0, depth + 1), value=-100)[:, depth + 1 :]
        total = total + LOSS_WEIGHT / len(more) * cross_entropy(logits.flatten(0, 1), wanted.flatten())
    return total


def _tensors(graph: ModelGraph, model: PreTrainedModel, more: nn.ModuleList) -> dict[str, nn.Parameter]:
    """The module's parameters by their names in the graph."""
    theirs = dict(model.named_parameters(remove_duplicate=False))
    for depth, module in enumerate(more):
        for name, p in module.named_parameters():
            name = name.replace("final_norm.", f"final_norm.{_norm(model)}.")
            for norm in ("enorm", "hnorm"):
                name = name.replace(f"{norm}.", f"{norm}.{_norm(model)}.")
            theirs[f"mtp.{depth}.{name}"] = p
    assert set(graph.params) <= set(theirs)
    return {name: theirs[name] for name in graph.params}


def _norm(model: PreTrainedModel) -> str:
    return "transformer.ln_f" if hasattr(model.base_model, "h") else "model.norm"


def _model(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIGS[kind], experts_implementation="eager").double()
    for p in model.parameters():
        nn.init.normal_(p, std=0.2)
    return model


@pytest.mark.parametrize("depths", [1, 2])
@pytest.mark.parametrize("kind", CONFIGS)
def test_the_graph_computes_what_the_module_computes(kind: str, depths: int) -> None:
    model = _model(kind)
    more = nn.ModuleList(_Layer(model) for _ in range(depths)).double()
    ids = torch.randint(0, 64, (2, 12))
    labels = ids.clone()
    labels[1, 4:7] = -100  # labels that do not count
    graph = with_mtp(capture(model, {"input_ids": ids, "labels": labels}), depths)
    check(graph)
    assert ModelGraph.from_json(graph.to_json()) == graph

    ours = _tensors(graph, model, more)
    wanted = torch.autograd.grad(_loss(model, more, ids, labels), list(ours.values()), allow_unused=True)
    compiled = compile_one_device(graph)
    stage = load_stage(compiled.text)
    buffers = dict(model.named_buffers())
    for depth, module in enumerate(more):
        buffers |= {f"mtp.{depth}.{name}": b for name, b in module.named_buffers()}
    bind_params(stage, compiled.program, ours, {n: buffers[n] for n in graph.buffers})
    loss = run_one_device(stage, compiled.graph, {"input_ids": ids, "labels": labels}, torch.float64)
    got = torch.autograd.grad(loss, list(ours.values()), allow_unused=True)

    assert loss.item() == pytest.approx(_loss(model, more, ids, labels).item(), rel=1e-6)
    for name, mine, theirs in zip(ours, got, wanted, strict=True):
        if theirs is None:
            assert mine is None or not mine.any(), name
        else:
            assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-7), name


def test_deepseek_v3_has_the_published_layer() -> None:
    """14 billion parameters more (README of the model), of which embedding and head are the model's own."""
    graph = load_model("deepseek-v3")
    made = with_mtp(graph, 1)
    embedding_and_head = 2 * 129280 * 7168
    assert made.num_params - graph.num_params + embedding_and_head == pytest.approx(14e9, rel=0.05)
    assert num_mtp_layers(graph) == 0 and num_mtp_layers(made) == 1
    assert layer_calls(made) == [*layer_calls(graph), "mtp.0"]
    assert made.tied_params.keys() == {"model.embed_tokens.weight"}


def test_what_cannot_have_such_layers_is_refused_by_what_is_missing() -> None:
    graph = load_model("deepseek-v3")
    with pytest.raises(GraphError, match="deepseek-v3@mtp=1: it has 1 such layers"):
        with_mtp(with_mtp(graph, 1), 1)
    with pytest.raises(GraphError, match="bert-large: head has more than a norm before its logits"):
        with_mtp(load_model("bert-large"), 1)
    with pytest.raises(GraphError, match="t5-11b: head does not read one hidden state"):
        with_mtp(load_model("t5-11b"), 1)


def test_adapters_leave_the_head_of_every_depth_out() -> None:
    graph = load_model("gpt2@mtp=2")
    for text in ("qlora:4:all-linear", "lora:4:c_attn,c_fc"):
        made = with_adapters(graph, read_adapters(text))
        check(made)
        trained = [name for name, p in made.params.items() if p.trainable]
        assert any(name.startswith("mtp.1.layer.attn") for name in trained)
        assert not any("wte" in name or "lm_head" in name for name in trained)


def test_a_model_is_named_with_its_further_layers() -> None:
    assert load_model("deepseek-v3@mtp=1") == with_mtp(load_model("deepseek-v3"), 1)
    assert load_model("deepseek-ai/DeepSeek-V3@mtp=2").name == "deepseek-v3@mtp=2"
    assert load_model("gpt2@mtp=0") == load_model("gpt2")
    assert usual_run("deepseek-v3@mtp=1") == usual_run("deepseek-v3")
    assert describe_model("deepseek-v3@mtp=1").num_layers == 62
    with pytest.raises(AutoplanError, match=r"no module has the layers that @mtp adds.*compile gpt2, or name a module"):
        built_model("gpt2@mtp=1")
    for text, said in (
        ("gpt2@mtp=x", "mtp='x'"),
        ("gpt2@mtp=-1", "mtp='-1'"),
        ("gpt2@mpt=1", "mpt.*mtp"),
        ("gpt2@mtp", "gpt2@mtp=1"),
        ("gpt9@mtp=1", "gpt"),
    ):
        with pytest.raises(AutoplanError, match=said):
            load_model(text)
