"""Parity helpers: compile a plan once, run its program on all ranks, and compare with one device.

Two ways to run: `run_simulated` (LocalTensorMode: every rank in this process with real numerics) and `train_job` (a job
for real processes, see harness.py). The reference is the program of one device; that it equals the eager model is
tested by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import models
import pytest
import torch
from harness import pool

from autoplan.api import _aliases, _not_in
from autoplan.capture.export import capture
from autoplan.capture.passes.cast import computing_in
from autoplan.codegen.program import Program, compile_program
from autoplan.config.precision import executed_precision
from autoplan.cost_models.hardware.cluster import Cluster, Device, Level
from autoplan.ir.graph import ModelGraph
from autoplan.program.autocast import of_precision
from autoplan.runtime.convert import CollectiveRecord, record_collectives
from autoplan.runtime.model import ParallelModel
from autoplan.runtime.shards import ParameterShard, held_indices
from autoplan.runtime.spec import ProgramSpec
from experiments.shared import simulated
from experiments.shared.default_plans import make_plan, read_pins
from experiments.shared.simulated import SimulatedStep, fake_group

SEQ = 16
TARGET = 12  # tokens of the target of an encoder-decoder


@dataclass(frozen=True)
class Case:
    """One point of the matrix."""

    family: str = "llama"  # llama | llama-tied | gpt (tied) | gpt-untied | mistral | qwen2-mixed (windows) | ...
    dp: int = 1
    tp: int = 1
    pp: int = 1
    zero: int = 0
    recompute: str = "none"
    num_micro_batches: int = 1
    stages: tuple[int, ...] | None = None
    labels: str = "equal"  # equal | unequal
    dropout: float = 0.0
    prices: str = "bandwidth"  # bandwidth: sequence parallelism pays; latency: fewer messages pay
    ep: int = 1
    cp: int = 1
    schedule: str = "1F1B"
    precision: str = "native"
    zero_replicas: int = 1
    virtual: int = 1  # stages per rank of the pipeline
    context_method: str | tuple[tuple[str, str], ...] | None = None  # of all blocks, or by block; None: gather
    compile: str | None = None  # backend of torch.compile
    etp: int | None = None  # None: as tp
    micro_batches_of: int = 1  # of one device: dp of the plan whose micro-batches, all ranks together, it computes
    offload: str = "none"  # optimizer | parameters | activations, joined by +

    @property
    def world(self) -> int:
        return self.dp * self.cp * self.tp * self.pp

    @property
    def pins(self) -> dict[str, Any]:
        pins: dict[str, Any] = {
            "dp": self.dp,
            "tp": self.tp,
            "pp": self.pp,
            "zero_stage": self.zero,
            "recompute": self.recompute,
            "num_micro_batches": self.num_micro_batches,
            "state_slack": 1.0,  # shard all that can be, so that small models exercise it
        }
        if self.stages is not None:
            pins["stages"] = self.stages
        if self.ep > 1:
            pins["ep"] = self.ep
        if self.cp > 1:
            pins["cp"] = self.cp
        if self.context_method is not None:
            given = self.context_method
            pins["context_method"] = given if isinstance(given, str) else dict(given)
        if self.etp is not None:
            pins["etp"] = self.etp
        if self.offload != "none":
            pins["offload"] = self.offload
            if "activations" in self.offload:
                del pins["recompute"]
        if self.zero_replicas > 1:
            pins["zero_replicas"] = self.zero_replicas
        if self.schedule != "1F1B":
            pins["schedule"] = self.schedule
        if self.virtual > 1:
            pins["virtual_stages"] = self.virtual
        return pins

    def __str__(self) -> str:
        parts = [
            self.family,
            f"dp{self.dp}",
            f"tp{self.tp}",
            f"pp{self.pp}",
            f"zero{self.zero}",
            f"m{self.num_micro_batches}",
            self.prices,
        ]
        parts += [self.schedule] * (self.schedule != "1F1B") + [f"v{self.virtual}"] * (self.virtual > 1)
        parts += [f"compile-{self.compile}"] * (self.compile is not None)
        parts += [f"ep{self.ep}"] * (self.ep > 1) + [f"cp{self.cp}"] * (self.cp > 1)
        if self.context_method is not None:
            given = self.context_method
            parts += [given if isinstance(given, str) else "-".join(f"{b}-{m}" for b, m in given)]
        parts += [f"etp{self.etp}"] * (self.etp is not None)
        parts += [f"replicas{self.zero_replicas}"] * (self.zero_replicas > 1)
        parts += [f"offload-{self.offload}"] * (self.offload != "none")
        parts += [self.precision] * (self.precision != "native")
        parts += [self.recompute] * (self.recompute != "none") + [self.labels] * (self.labels != "equal")
        parts += ["-".join(map(str, self.stages))] if self.stages else []
        return "_".join([*parts, *([f"drop{self.dropout}"] if self.dropout else [])])


MOE = {
    "mixtral": models.make_mixtral,
    "mixtral-of-two": functools.partial(models.make_mixtral, 2),  # fewer experts than replicas of them
    "qwen3-moe": models.make_qwen3_moe,
    "deepseek": models.make_deepseek,
    "mixtral-aux": functools.partial(models.make_mixtral, **models.ROUTER_LOSS),
    "qwen3-moe-aux": functools.partial(models.make_qwen3_moe, **models.ROUTER_LOSS),
    "mixtral-padded-aux": functools.partial(models.make_mixtral, **models.ROUTER_LOSS),
}


LOSSES = {
    "gpt-balanced-aux": models.balanced_loss,
    "gpt-summed": models.summed_loss,
    "gpt-penalty": models.mean_and_penalty,
}
SPECIAL_ATTENTION = {"sinks": models.make_sinks, "chunks": models.make_chunked, "sides": models.make_two_sided}
ENCODER_DECODER = {"encdec": models.make_encoder_decoder, "t5": models.make_t5, "bart": models.make_bart}


def is_hf(family: str) -> bool:
    """True for Hugging Face models, which bring their loss."""
    return not family.startswith("gpt") and family not in ("encdec", "skips")


def make_model(family: str, dropout: float) -> torch.nn.Module:
    if family in MOE:
        return MOE[family]()
    if family.removesuffix("-padded") in ENCODER_DECODER:
        return ENCODER_DECODER[family.removesuffix("-padded")]()
    if family == "bert-padded":
        return models.make_bert()
    if family == "skips":
        return models.make_skips()
    if family == "gpt-switch":
        return models.make_switch()
    if family == "gpt-detached":
        return models.make_detached()
    if family == "gpt-balanced-aux":
        return models.make_balanced()
    if family in ("mistral", "mistral-padded", "mistral-packed", "mistral-left", "qwen2-mixed"):
        return models.make_windowed(mixed=family == "qwen2-mixed")
    if family.split("-")[0] in SPECIAL_ATTENTION:
        return SPECIAL_ATTENTION[family.split("-")[0]]()
    if family == "gemma2":
        return models.make_gemma2()
    if family in ("bloom", "mpt"):
        return models.make_bloom(dropout) if family == "bloom" else models.make_mpt()
    if family.startswith("llama"):
        model = models.make_llama(tie_word_embeddings=family == "llama-tied", attention_dropout=dropout)
        if family == "llama-frozen":
            for name in ("model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"):
                model.get_parameter(name).requires_grad_(False)
        return model
    return models.make_gpt(dropout=dropout, tied=family == "gpt")


@functools.cache
def graph_of(family: str, dropout: float, precision: str = "native") -> ModelGraph:
    batch = names_of(family, models.token_batch(2, SEQ))
    loss = None if is_hf(family) else LOSSES.get(family, models.gpt_loss)
    compute, model = executed_precision(precision).captured, make_model(family, dropout)
    with computing_in(model, None if compute is None else getattr(torch, compute)):
        return of_precision(capture(model, batch, loss), executed_precision(precision), "cpu")


def names_of(family: str, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    kind = family.removesuffix("-padded")
    if kind in ENCODER_DECODER:
        ids, labels = batch["input_ids"], batch["labels"][:, :TARGET].contiguous()
        if kind != family:
            source, target = (
                models.with_documents({"input_ids": x, "labels": x}, packed=False, left=left)["attention_mask"]
                for x, left in ((ids, False), (labels, True))
            )
            return {"input_ids": ids, "labels": labels, "attention_mask": source, "decoder_attention_mask": target}
        if is_hf(family):
            return {"input_ids": ids, "labels": labels}
        return {"source": ids, "target": ids.flip(1)[:, :TARGET].contiguous(), "labels": labels}
    if family.split("-")[1:2] in (["padded"], ["packed"], ["left"]):
        return models.with_documents(batch, packed="packed" in family, left="left" in family)
    return batch if is_hf(family) else {"ids": batch["input_ids"], "labels": batch["labels"]}


def cluster_of(world: int, prices: str) -> Cluster:
    link = Level(0.0 if prices == "bandwidth" else 1e-3, 1e9, "made up")
    return Cluster(1, world, Device("made up", 1e12, 1e9, 1 << 30, "made up"), link, "cpu")


@functools.cache
def _compiled(
    family: str,
    dropout: float,
    pins: tuple[tuple[str, Any], ...],
    methods: tuple[tuple[str, str], ...],
    world: int,
    prices: str,
    precision: str,
) -> Program:
    config = read_pins({**dict(pins), **({"context_method": dict(methods)} if methods else {})}, world)
    graph = graph_of(family, dropout, precision)
    env = {"b": 2, "s": SEQ, "t": TARGET}
    _, layouts, _ = make_plan(graph, cluster_of(world, prices), config, env, precision)
    return compile_program(graph, layouts)


def compiled(case: Case) -> Program:
    methods = case.context_method if isinstance(case.context_method, tuple) else ()
    pins = tuple(sorted((k, v) for k, v in case.pins.items() if not (methods and k == "context_method")))
    return _compiled(case.family, case.dropout, pins, methods, case.world, case.prices, case.precision)


def full_tensors(case: Case, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model = make_model(case.family, case.dropout)
    params = {n: p.detach().to(dtype) for n, p in model.named_parameters()}
    buffers = {n: b.detach().to(dtype) if b.is_floating_point() else b.detach() for n, b in model.named_buffers()}
    return params, buffers


def global_batch(case: Case, step: int = 0, samples: int = 12) -> dict[str, torch.Tensor]:
    """12 samples: divisible by dp x micro-batches up to 2 x 6, 4 x 3.

    Unequal: half of the samples have few valid labels.
    """
    batch = models.token_batch(samples, SEQ, seed=10 + step)
    if case.labels == "unequal":
        g = torch.Generator().manual_seed(99 + step)
        keep = torch.linspace(0.05, 1.0, samples)[:, None]
        batch["labels"][torch.rand(samples, SEQ, generator=g) > keep] = -100
        batch["labels"][0] = -100  # a sample without any
    batch = names_of(case.family, batch)
    if case.micro_batches_of > 1:  # micro-batch i is micro-batch i of every rank
        order = torch.arange(samples).view(case.micro_batches_of, case.num_micro_batches, -1).transpose(0, 1).flatten()
        batch = {n: x[order] for n, x in batch.items()}
    return batch


def part_of(batch: Mapping[str, torch.Tensor], index: int, parts: int) -> dict[str, torch.Tensor]:
    size = next(iter(batch.values())).shape[0] // parts
    return {k: v[index * size : (index + 1) * size] for k, v in batch.items()}


def one_device(case: Case) -> Case:
    """The reference of a plan: in one micro-batch, or where the loss couples the samples of one in the same ones."""
    single = Case(family=case.family, dropout=case.dropout, labels=case.labels)
    if not case.family.endswith("-aux"):
        return single
    return replace(single, num_micro_batches=case.num_micro_batches, micro_batches_of=case.dp)


def reference(
    case: Case, dtype: torch.dtype = torch.float64, batch: Mapping[str, torch.Tensor] | None = None
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and full gradients of one device."""
    single = one_device(case)
    program = compiled(single)
    params, buffers = full_tensors(single, dtype)
    with fake_group(1):
        pm = ParallelModel(
            program.spec, program.sources, params, buffers, dtype=dtype, num_micro_batches=single.num_micro_batches
        )
        loss = pm.step(batch if batch is not None else global_batch(single))
        return loss.item(), {n: g.clone() for n, g in pm.gradients().items()}


def run_simulated(
    case: Case,
    dtype: torch.dtype = torch.float64,
    sources: Mapping[str, str] | None = None,
    records: list[CollectiveRecord] | None = None,
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and full gradients of a plan, all dp x tp ranks in this process, pipeline stages one after the other.

    `records` receives the collectives that really ran.
    """
    batch = global_batch(case)
    denominator = float(sum(part["labels_valid"] for part in count_parts(case, batch)))
    step = SimulatedStep(*full_tensors(case, dtype), batch, case.num_micro_batches, denominator, dtype)
    return simulated.run_simulated(compiled(case), step, sources, records)


def count_parts(case: Case, batch: Mapping[str, torch.Tensor]) -> list[dict[str, int]]:
    labels = batch["labels"]
    # HF decoders shift: the first label of a sample is never a target
    if is_hf(case.family) and case.family not in ENCODER_DECODER:
        labels = labels[:, 1:]
    return [{"labels_valid": int((labels != -100).sum())}]


def worst(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> tuple[float, str]:
    """Largest difference relative to the largest element of each parameter, and which."""
    assert set(got) == set(want), set(got) ^ set(want)
    out = (0.0, "")
    for name, w in want.items():
        e = ((got[name].double() - w.double()).abs().max() / (w.double().abs().max() + 1e-30)).item()
        out = max(out, (e, name))
    return out


# -- real processes ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """What a rank reports."""

    losses: tuple[float, ...]
    gradients: dict[str, torch.Tensor]
    norm: float
    parameters: dict[str, torch.Tensor]
    ledger: list[tuple[str, str, int, str]]


def model_of(
    case: Case, spec_json: str, sources: dict[str, str], dtype: torch.dtype, optimizer: Any = None
) -> ParallelModel:
    """The program of a case on this rank, with the state that its model has."""
    spec, model = ProgramSpec.from_json(spec_json), make_model(case.family, case.dropout)
    params, buffers = full_tensors(case, dtype)
    return ParallelModel(
        spec,
        sources,
        params,
        buffers,
        num_micro_batches=case.num_micro_batches,
        optimizer=optimizer,
        dtype=dtype if case.precision == "native" else None,
        aliases=_aliases(model),
        extra_state=_not_in(spec, model, {**params, **buffers}),
        compile=case.compile,
    )


def train_job(
    rank: int,
    world: int,
    case: Case,
    spec_json: str,
    sources: dict[str, str],
    dtype_name: str,
    num_steps: int,
    optimizer: str,
) -> Trained | None:
    """`num_steps` steps on this rank; rank 0 reports the losses, the first gradients and the final parameters."""
    make = {
        "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
        "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=False),
    }[optimizer]
    model = make_model(case.family, case.dropout)
    params = dict(model.named_parameters())
    pm = model_of(case, spec_json, sources, getattr(torch, dtype_name), make)
    losses, gradients, norm, records = [], {}, 0.0, []
    for step in range(num_steps):
        batch = part_of(global_batch(case, step), pm.data_rank, pm.data_world)
        if step == 0:
            with record_collectives(pm.mesh) as records:
                loss = pm.step(batch)
            gradients = pm.gradients()
            norm = float(pm.clip_grad_norm_(0.5))
        else:
            loss = pm.step(batch)
            pm.clip_grad_norm_(0.5)
        losses.append(loss.item())
        assert pm.optimizer is not None
        pm.optimizer.step()
    state = pm.state_dict()
    for name, p in pm.named_parameters():  # what a DTensor says it holds is what it holds
        if isinstance(p, ParameterShard):
            held = held_indices(p.shape, p.device_mesh, p.placements)
            assert torch.equal(p._local_tensor.to(state[name]), state[name][torch.meshgrid(*held, indexing="ij")]), name
    other = {n: t + 1 if n in params else t for n, t in state.items()}
    for name, values in _aliases(model).items():
        other |= dict.fromkeys(values, other[name])
    pm.load_state_dict(other)  # of whatever ranks hold it in parts
    assert all(torch.equal(t, other[n]) for n, t in pm.state_dict().items())
    if rank != 0:
        return None
    return Trained(tuple(losses), gradients, norm, state, [(r.kind, r.axis, r.bytes, r.phase) for r in records])


def trained(case: Case, dtype: str = "float64", num_steps: int = 3, optimizer: str = "adamw") -> Trained:
    """What rank 0 of real processes reports."""
    program = compiled(case)
    args = (case, program.spec.to_json(), dict(program.sources), dtype, num_steps, optimizer)
    return next(r for r in pool(case.world).run(train_job, *args, timeout_s=120) if r is not None)


def train_reference(case: Case, dtype: torch.dtype, num_steps: int, optimizer: str) -> Trained:
    """The same on one device, in this process."""
    single = case if case.world == 1 else one_device(case)
    program = compiled(single)
    with fake_group(1):
        out = train_job(
            0,
            1,
            single,
            program.spec.to_json(),
            dict(program.sources),
            str(dtype).removeprefix("torch."),
            num_steps,
            optimizer,
        )
    assert out is not None
    return out


def assert_trains_as_one_device(case: Case) -> None:
    """Losses, gradients and clip norm of the first step, keys and values of `state_dict` after three AdamW steps with
    clipping: real processes against one device, in float64."""
    got, want = trained(case), train_reference(case, torch.float64, 3, "adamw")
    assert got.losses == pytest.approx(want.losses, rel=1e-12)
    error, name = worst(got.gradients, want.gradients)
    assert error < 1e-12, name
    assert got.norm == pytest.approx(want.norm, rel=1e-11)
    assert sorted(got.parameters) == state_keys(case.family)
    floating = {n: p for n, p in want.parameters.items() if p.is_floating_point()}
    # AdamW divides by the root of the second moment: where a gradient is nearly zero it amplifies rounding
    assert worst({n: got.parameters[n] for n in floating}, floating)[0] < 1e-9


def spread_out(cases: Iterable[Any], every: int = 3, unpack: bool = False, all_every: int = 1) -> list[Any]:
    """Parameters of a test: one of `every` in make test, all in make test-all.

    Args:
        cases: arguments, or `pytest.param`s. unpack: each is a tuple of several arguments. all_every: only one of so
            many in make test-all, the others in make exhaustive.
    """

    def of(case: Any, i: int) -> Any:
        marks = (pytest.mark.exhaustive,) if i % all_every else (pytest.mark.slow,) if i % every else ()
        if hasattr(case, "marks"):
            return pytest.param(*case.values, marks=(*case.marks, *marks), id=case.id)
        return pytest.param(*case, marks=marks) if unpack else pytest.param(case, marks=marks)

    return [of(case, i) for i, case in enumerate(cases)]


def state_keys(family: str) -> list[str]:
    model = make_model(family, 0.0)
    return sorted({*model.state_dict(), *(x for v in _aliases(model).values() for x in v)})


def settled_bytes(num_data_ranks: int) -> int:
    """Return the bytes of the all-reduce in which all ranks agree on a step's batches, with one loss denominator."""
    return 8 * (3 + 4 * num_data_ranks)
