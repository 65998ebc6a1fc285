"""A setup: a configuration and its run, as all targets write and read it, and its values in one form.

values(setup)       # by name; what makes no difference has one form, so that equal setups have equal values
recompute_per_layer(config, layers)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from autoplan.config.choices import CHOICES, OPTIONS, option_data
from autoplan.config.context_methods import methods_text, read_method
from autoplan.config.parallel import Dispatcher, Mode, ParallelConfig, RunOptions
from autoplan.config.precision import precision_of
from autoplan.config.recompute import FULL, NONE, read_recompute
from autoplan.config.settings import VARIED_SETTINGS
from autoplan.cost_models.hardware.catalog import CatalogEntry, entries
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.ir.graph import ModelGraph
from autoplan.program.facts import expert_counts, latent_attention, layer_calls, model_sizes, num_mtp_layers
from autoplan.schedules.schedule import PLAIN_SCHEDULE
from autoplan.search.request import PlanRequest

# A configuration without these would be another one: an export that cannot write them is refused.
ESSENTIAL = (
    *("pp", "tp", "cp", "ep", "etp", "schedule", "virtual_stages", "zero_stage", "zero_replicas", "offload"),
    *("micro_batch_size", "seq_len", "global_batch_size", "dp", "num_micro_batches"),  # those that follow come last
)
# The number of layers for tokens after the next, as Megatron, Megatron Bridge and MaxText call it
MTP_SETTING = "mtp_num_layers"
# A name of every value of a setup
SETUP_NAMES = (*(c.name for c in CHOICES), *OPTIONS, *VARIED_SETTINGS)


@dataclass(frozen=True)
class Task:
    """The model and the devices that a setup is for.

    Attributes:
        layers: names of the model's layers, in model order; empty if the model is not known.
        num_experts: 0 for a model without experts.
        latent: True for a model with latent attention.
        num_mtp: how many of the layers, the last ones, predict tokens after the next.
        hidden_size, num_heads: 0 if not known, or not the same everywhere.
        num_nodes, devices_per_node: 0 if the cluster is not known.
    """

    model: str = ""
    layers: tuple[str, ...] = ()
    num_experts: int = 0
    latent: bool = False
    num_mtp: int = 0
    hidden_size: int = 0
    num_heads: int = 0
    device: str = ""
    num_nodes: int = 0
    devices_per_node: int = 0

    @classmethod
    def of(cls, request: PlanRequest) -> Task:
        """Return the task of a request."""
        return cls.known(request.graph, request.cluster)

    @classmethod
    def known(cls, graph: ModelGraph | None = None, cluster: Cluster | None = None) -> Task:
        """Return the task of a model and a cluster, of which either may not be known."""
        found: dict[str, Any] = {}
        if graph is not None:
            found |= {"model": graph.name, "layers": tuple(layer_calls(graph)), "latent": latent_attention(graph)}
            found |= {"num_experts": max(expert_counts(graph), default=0), "num_mtp": num_mtp_layers(graph)}
            found |= model_sizes(graph)
        if cluster is not None:
            found |= {"device": cluster.device.name, "num_nodes": cluster.num_nodes}
            found |= {"devices_per_node": cluster.devices_per_node}
        return cls(**found)

    @property
    def decoder_layers(self) -> int:
        """The number of layers without those that predict tokens after the next, as most frameworks count them."""
        return len(self.layers) - self.num_mtp

    @property
    def hardware(self) -> CatalogEntry | None:
        """What the catalog knows about the device; None if it is not in it."""
        return entries().get(self.device)

    @property
    def num_devices(self) -> int:
        """All devices; 0 if the cluster is not known."""
        return self.num_nodes * self.devices_per_node


@dataclass(frozen=True)
class Setup:
    """A configuration and its run.

    Attributes:
        left: settings that most files do not hold (adapters, the length of target sequences), each as `name=value`
            with the place where the user sets it.
    """

    task: Task
    config: ParallelConfig
    options: RunOptions
    mode: Mode
    precision: str
    seq_len: int
    global_batch_size: int
    left: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, request: PlanRequest, config: ParallelConfig) -> Setup:
        """Return the setup of a configuration for a request."""
        run = (request.options, request.mode, request.precision, request.seq_len, request.global_batch_size)
        said = (("adapters", "the model, or its PEFT settings"), ("target_len", "the data"))
        known = ((name, getattr(request, name), place) for name, place in said)
        left = tuple((f"{name}={value}", place) for name, value, place in known if value is not None)
        return cls(Task.of(request), config, *run, left)

    @property
    def adapters(self) -> str | None:
        """The adapters as autoplan writes them; None if all weights are trained."""
        return next((said.partition("=")[2] for said, _ in self.left if said.startswith("adapters=")), None)

    @property
    def num_chunks(self) -> int:
        """Parts that the pipeline cuts the model into."""
        return self.config.pp * self.config.virtual_stages

    @property
    def stages(self) -> tuple[int, ...] | None:
        """Layers per chunk; None without a pipeline, and if they are left to the planner."""
        if self.num_chunks == 1:
            return None
        layers = len(self.task.layers)
        if self.config.stages is not None:
            return self.config.stages
        return (layers // self.num_chunks,) * self.num_chunks if layers and layers % self.num_chunks == 0 else None

    @property
    def recompute(self) -> str | tuple[str, ...]:
        """The recompute choice of all layers, or of each layer where they differ."""
        return recompute_per_layer(self.config, self.task.layers, self.stages)

    @property
    def context_method(self) -> str | None:
        """The method of context parallelism that all blocks share; None without cp or if they differ.

        A searched plan names the method of each block.
        """
        given = self.config.context_method
        if self.config.cp == 1 or given is None:
            return None
        text = methods_text(given)
        return None if "=" in text else text

    @property
    def any_recompute(self) -> str:
        """One choice for all layers that keeps no more than the setup: full where layers differ."""
        return self.recompute if isinstance(self.recompute, str) else FULL


def recompute_per_layer(
    config: ParallelConfig, layers: Sequence[str], stages: tuple[int, ...] | None
) -> str | tuple[str, ...]:
    """Return the recompute choice of all layers if they share one, else that of each layer.

    Layers per stage are the first ones of each stage, as `autoplan.plan` and Megatron count them.
    """
    given = config.recompute
    if isinstance(given, str):
        return str(read_recompute(given))
    if isinstance(given, Mapping):
        each = tuple(given.get(name, NONE) for name in layers)
    else:
        cut = stages if stages is not None and len(stages) == len(given) else (len(layers),)
        if len(cut) != len(given):
            return NONE if not any(given) else tuple(str(n) for n in given)
        each = tuple(FULL if k < n else NONE for n, size in zip(given, cut, strict=True) for k in range(size))
    return each[0] if len(set(each)) == 1 else each


def values(setup: Setup) -> dict[str, Any]:
    """Return every value by name. What makes no difference to the setup has the default, so that equals are equal."""
    c, run = setup.config, {**option_data(setup.options), "mode": str(setup.mode), "precision": setup.precision}
    out: dict[str, Any] = {f.name: getattr(c, f.name) for f in fields(c)}
    shards = c.num_shards if c.zero_stage else 1
    if shards == 1:
        out |= {"zero_stage": 0, "zero_replicas": 1}
    out["etp"] = c.expert_tp if setup.task.num_experts else 1
    if c.pp == 1:
        out |= {"schedule": PLAIN_SCHEDULE, "virtual_stages": 1}
    out |= {"stages": setup.stages, "recompute": setup.recompute, "offload": tuple(c.offload)}
    method = None if c.cp == 1 or c.context_method is None else methods_text(c.context_method)
    out["context_method"] = method
    run |= {"seq_len": setup.seq_len, "global_batch_size": setup.global_batch_size}
    return out | run | _run_values(setup, out["zero_stage"], method)


def _has_ring(config: ParallelConfig) -> bool:
    given = config.context_method or ""
    names = [given] if isinstance(given, str) else given.values()
    return any(read_method(name, config.cp).is_ring for name in names)


def _recomputes_whole_layers(setup: Setup) -> bool:
    given = setup.recompute
    return any(how == FULL or how.isdigit() for how in ((given,) if isinstance(given, str) else given))


def _run_values(setup: Setup, zero: int, method: str | None) -> dict[str, Any]:
    """Return the options with those that make no difference at their defaults."""
    c, o = setup.config, setup.options
    overlaps = {
        "tp": c.tp > 1,
        "ep": c.ep > 1,
        "pp": c.pp > 1 and c.virtual_stages > 1,
        "cp": c.cp > 1 and (method is None or _has_ring(c)),
    }
    matmul = precision_of(setup.precision).matmul or ""
    return _run_values_of_zero(setup, zero) | {
        "attention": str(o.attention_in(setup.mode)),
        "overlap": sorted(name for name in o.overlap if overlaps[name]),
        "dispatcher": str(o.dispatcher if c.ep > 1 else Dispatcher.ALL_TO_ALL),
        "sequence_parallel": o.sequence_parallel or c.tp == 1,
        "fused_experts": o.fused_experts and setup.task.num_experts > 0,
        "narrow_gather": o.narrow_gather and matmul.startswith("float8") and zero > 0,
        "reruns": str(o.reruns_in(setup.mode)) if _recomputes_whole_layers(setup) else None,
    }


def _run_values_of_zero(setup: Setup, zero: int) -> dict[str, Any]:
    c, o = setup.config, setup.options
    once = zero in (1, 2)  # what is sent once per step
    overlap = o.overlap_zero or not (once or (zero == 0 and c.dp * c.cp > 1 and setup.mode is Mode.FUSED))
    return {
        "overlap_zero": overlap,
        "overlap_gather": o.overlap_gather or not (overlap and once),
        "zero_by_tensor": o.zero_by_tensor and zero == 3,
        "host_sums": o.host_sums and bool(c.offload) and zero > 0,
        "reduce_once": o.reduce_once and zero >= 2 and c.num_micro_batches > 1,
        "whole_sums": o.whole_sums and zero == 1,
        "all_reduced": o.all_reduced and zero == 1,
    }
