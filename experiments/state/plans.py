"""Small models and the plans under which their trainings are saved and loaded."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autoplan.api import _aliases, _not_in
from autoplan.capture.export import capture
from autoplan.capture.frontend.buffers import all_buffers
from autoplan.capture.passes.cast import computing_in
from autoplan.codegen.program import compile_program
from autoplan.config.precision import executed_precision
from autoplan.cost_models.hardware.cluster import Cluster, Device, Level
from autoplan.ir.graph import ModelGraph
from autoplan.runtime.model import OptimizerFactory, ParallelModel
from autoplan.runtime.spec import ProgramSpec
from experiments.shared.default_plans import make_plan, read_pins

SEQ = 16
BATCH = 12  # samples of a step: divisible by 2 and 4 data-parallel ranks with 1 to 3 micro-batches
VOCABULARY = 102

# No dim of these models is a multiple of 4, so that ZeRO over 4 ranks cuts all of them unevenly.
DENSE = dict(
    vocab_size=VOCABULARY,
    hidden_size=30,
    intermediate_size=46,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=10,
    max_position_embeddings=64,
)


class Block(nn.Module):
    """A layer with dropout, and running statistics of its own."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 46), nn.Linear(46, dim)
        self.drop = nn.Dropout(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


class Dropping(nn.Module):
    """A language model of such layers."""

    def __init__(self, dim: int = 30) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(4))
        self.head = nn.Linear(dim, VOCABULARY)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


def loss_of(logits: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy of the labels."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def make_model(family: str) -> nn.Module:
    """Return a model with the same random weights in every process."""
    from transformers import (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
        MixtralConfig,
        MixtralForCausalLM,
    )

    torch.manual_seed(0)
    model: nn.Module
    if family == "dropout":
        return Dropping()
    if family in ("mixtral", "few experts"):
        experts = 4 if family == "mixtral" else 2
        model = MixtralForCausalLM(MixtralConfig(**DENSE, num_local_experts=experts, num_experts_per_tok=2))
    elif family == "deepseek":
        sizes = {k: v for k, v in DENSE.items() if k != "head_dim"}
        model = DeepseekV3ForCausalLM(
            DeepseekV3Config(
                **sizes, q_lora_rank=10, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=10,
                n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1, n_shared_experts=1,
                moe_intermediate_size=22, first_k_dense_replace=1,
            )
        )  # fmt: skip
    else:
        model = LlamaForCausalLM(LlamaConfig(**DENSE, tie_word_embeddings=family == "tied"))
    return model


def samples(first: int, num: int) -> dict[str, torch.Tensor]:
    """Return the samples `first` to `first + num` of an endless stream, each a function of its index."""
    rows = []
    for index in range(first, first + num):
        g = torch.Generator().manual_seed(1000 + index)
        rows.append(torch.randint(0, VOCABULARY, (2, SEQ), generator=g))
    ids, labels = torch.stack(rows).unbind(1)
    return {"input_ids": ids.contiguous(), "labels": labels.contiguous()}


OPTIMIZERS: Mapping[str, tuple[type[torch.optim.Optimizer], Mapping[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, dict(lr=1e-2, foreach=False)),
    "SGD with momentum": (torch.optim.SGD, dict(lr=0.1, momentum=0.9)),
    "Adagrad": (torch.optim.Adagrad, dict(lr=1e-2)),
    "NAdam": (torch.optim.NAdam, dict(lr=1e-3)),
    "RMSprop": (torch.optim.RMSprop, dict(lr=1e-3, momentum=0.5)),
}


def make_optimizer(name: str) -> OptimizerFactory:
    """Return an optimizer with two groups of parameters."""
    kind, options = OPTIMIZERS[name]

    def make(parameters: Any) -> torch.optim.Optimizer:
        given = list(parameters)
        groups = [
            {"params": [p for p in given if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in given if p.dim() <= 1], "weight_decay": 0.0},
        ]
        return kind(groups, **options)

    return make


@dataclass(frozen=True)
class Training:
    """What is trained: the model, its precision, the optimizer, and the plans, by name; `beside`: the checkpoint is
    written while the training goes on."""

    family: str = "llama"
    precision: str = "native"
    optimizer: str = "AdamW"
    plans: tuple[str, ...] = ()
    beside: bool = False

    def __str__(self) -> str:
        more = [x for x in (self.precision, self.optimizer) if x not in ("native", "AdamW")]
        return ", ".join([self.family, *more, *["written beside the steps"] * self.beside])


PLANS: Mapping[str, Mapping[str, Any]] = {
    "one rank": {},
    "dp2": {"dp": 2, "zero_stage": 0},
    "dp4": {"dp": 4, "zero_stage": 0},
    "ZeRO 1, dp2": {"dp": 2, "zero_stage": 1},
    "ZeRO 1, dp4": {"dp": 4, "zero_stage": 1},
    "ZeRO 2, dp3": {"dp": 3, "zero_stage": 2},
    "ZeRO 3, dp2": {"dp": 2, "zero_stage": 3},
    "ZeRO 3, dp4": {"dp": 4, "zero_stage": 3},
    "hybrid ZeRO, dp4": {"dp": 4, "zero_stage": 3, "zero_replicas": 2},
    "tp2": {"tp": 2},
    "tp2, ZeRO 3, dp2": {"tp": 2, "dp": 2, "zero_stage": 3},
    "pp2": {"pp": 2, "num_micro_batches": 2},
    "pp4": {"pp": 4, "num_micro_batches": 4},
    "pp2, interleaved": {"pp": 2, "schedule": "Interleaved1F1B", "virtual_stages": 2, "num_micro_batches": 2},
    "pp2, tp2": {"pp": 2, "tp": 2, "num_micro_batches": 2},
    "pp2, ZeRO 2, dp2": {"pp": 2, "dp": 2, "zero_stage": 2, "num_micro_batches": 3},
    "cp2": {"cp": 2, "context_method": "ring"},
    "cp2, ZeRO 3, dp2": {"cp": 2, "dp": 2, "zero_stage": 3},
    "optimizer on the host, dp2": {"dp": 2, "zero_stage": 1, "offload": "optimizer"},
    "parameters on the host, dp2": {"dp": 2, "zero_stage": 3, "offload": "parameters"},
    "ep2": {"dp": 2, "ep": 2, "zero_stage": 0},
    "ep2, ZeRO 3, dp4": {"dp": 4, "ep": 2, "zero_stage": 3},
    "ep2 over tp": {"tp": 2, "ep": 2, "etp": 1},
    "ep2, etp2": {"dp": 2, "tp": 2, "ep": 2, "etp": 2},
    "ep2, pp2": {"dp": 2, "ep": 2, "pp": 2, "zero_stage": 1, "num_micro_batches": 2},
}
_NO_EXPERTS = tuple(name for name in PLANS if not name.startswith("ep"))
_SOME = ("one rank", "ZeRO 3, dp4", "tp2", "pp2")
_THREE = ("one rank", "ZeRO 3, dp4", "pp2, tp2")

TRAININGS = (
    Training("llama", plans=_NO_EXPERTS),
    Training("tied", plans=(*_SOME, "ZeRO 1, dp2", "pp2, tp2", "pp2, ZeRO 2, dp2", "tp2, ZeRO 3, dp2")),
    Training("mixtral", plans=("one rank", "ep2", "ep2, ZeRO 3, dp4", "ep2 over tp", "ep2, etp2", "ep2, pp2", "tp2")),
    Training("deepseek", plans=("one rank", "ep2, ZeRO 3, dp4", "ep2, pp2", "tp2")),
    Training("dropout", plans=(*_SOME, "dp2", "pp2, tp2")),
    Training("llama", "bf16", plans=(*_SOME, "dp2", "optimizer on the host, dp2", "ZeRO 1, dp4")),
    Training("llama", "fp16", plans=("one rank", "ZeRO 1, dp2", "pp2")),
    *(Training("llama", optimizer=o, plans=_THREE) for o in OPTIMIZERS if o != "AdamW"),
    Training("llama", "bf16", "NAdam", plans=_THREE, beside=True),
    *(Training("llama", "fp16", o, plans=_THREE) for o in OPTIMIZERS if o != "AdamW"),
    Training("dropout", "bf16", plans=(*_SOME, "dp2")),
    Training("dropout", "fp16", plans=(*_THREE, "dp2")),
)


@dataclass(frozen=True)
class Cell:
    """A training that is saved under one plan and goes on under another."""

    training: Training
    saved: str
    loaded: str

    def __str__(self) -> str:
        return f"{self.training}: {self.saved} -> {self.loaded}"


def all_cells() -> Iterator[Cell]:
    """Every pair of plans of every training."""
    for training in TRAININGS:
        for saved, loaded in itertools.product(training.plans, repeat=2):
            yield Cell(training, saved, loaded)


def world_of(plan: str) -> int:
    """Return the number of ranks of a plan."""
    pins = PLANS[plan]
    return int(pins.get("dp", 1) * pins.get("tp", 1) * pins.get("pp", 1) * pins.get("cp", 1))


@dataclass(frozen=True)
class Job:
    """Everything that a rank needs to run a plan; the same for all ranks, and picklable."""

    training: Training
    plan: str
    spec_json: str
    sources: dict[str, str]
    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    aliases: dict[str, tuple[str, ...]]
    extra: dict[str, Any] = field(default_factory=dict)

    def program(self) -> ParallelModel:
        """The program of this rank, with parameters that no checkpoint has."""
        native = self.training.precision == "native"
        spec = ProgramSpec.from_json(self.spec_json)
        return ParallelModel(
            spec,
            self.sources,
            self.parameters,
            self.buffers,
            num_micro_batches=int(PLANS[self.plan].get("num_micro_batches", 1)),
            optimizer=make_optimizer(self.training.optimizer),
            seed=17,
            dtype=torch.float64 if native else None,
            aliases=self.aliases,
            extra_state=self.extra,
        )


@functools.cache
def _graph(family: str, precision: str) -> ModelGraph:
    model, compute = make_model(family), executed_precision(precision).compute
    with computing_in(model, None if compute is None else getattr(torch, compute)):
        return capture(model, samples(0, 2), loss_of if family == "dropout" else None)


@functools.cache
def job_of(training: Training, plan: str) -> Job:
    """Capture, plan and compile in this process."""
    world = world_of(plan)
    model, graph = make_model(training.family), _graph(training.family, training.precision)
    made_up = Cluster(1, world, Device("made up", 1e12, 1e9, 1 << 30, "made up"), Level(0.0, 1e9, "made up"), "cpu")
    config = read_pins({"state_slack": 1.0, **PLANS[plan]}, world)
    _, layouts, _ = make_plan(graph, made_up, config, {"b": 2, "s": SEQ, "t": SEQ}, training.precision)
    program = compile_program(graph, layouts)
    dtype = torch.float64 if training.precision == "native" else torch.float32
    parameters = {n: p.detach().to(dtype) for n, p in model.named_parameters()}
    buffers = {n: b.to(dtype) if b.is_floating_point() else b for n, b in all_buffers(model)}
    return Job(
        training,
        plan,
        program.spec.to_json(),
        dict(program.sources),
        parameters,
        buffers,
        _aliases(model),
        _not_in(program.spec, model, {**parameters, **buffers}),
    )
