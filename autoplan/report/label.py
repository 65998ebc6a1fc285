"""A plan in one line: `pp2 dp8 tp4 zero1 mbs1 x128 recompute 3/32`, of the layers; and what its price rests on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from autoplan.config.parallel import ParallelConfig
from autoplan.cost_models.quantity import Tag
from autoplan.cost_models.time.price import Estimate
from autoplan.schedules.schedule import num_copies


def recompute_label(config: ParallelConfig, estimate: Estimate | None = None) -> str:
    """`none`, `full`, `selective`, `3/32` of the layers in full, or of a mapping `mlp 22/32, full 3/32`."""
    if isinstance(config.recompute, str):
        return config.recompute
    if isinstance(config.recompute, tuple):
        again = sum(config.recompute)
        if not again:
            return "none"
        return f"{again}{_of_layers(config, estimate)}"
    counts = Counter(how for how in config.recompute.values() if how != "none")
    return ", ".join(f"{how} {n}{_of_layers(config, estimate)}" for how, n in counts.items()) or "none"


def _of_layers(config: ParallelConfig, estimate: Estimate | None) -> str:
    held = sum(stage.num_layers for stage in estimate.stages) if estimate is not None else 0
    total = held // num_copies(config.schedule)
    return f"/{total}" if total else ""


def methods_text(given: str | Mapping[str, str]) -> str:
    """`ring`, or by block `layer=ring,layer1=ulysses` where they differ."""
    if isinstance(given, str):
        return given
    names = set(given.values())
    return names.pop() if len(names) == 1 else ",".join(f"{block}={name}" for block, name in sorted(given.items()))


def plan_label(config: ParallelConfig, estimate: Estimate | None = None) -> str:
    """Degrees above 1, then what is always there; 1F1B goes without saying."""
    c = config
    degrees = [("tp", c.tp), ("cp", c.cp), ("pp", c.pp), ("dp", c.dp), ("ep", c.ep)]
    parts = [f"{name}{size}" for name, size in degrees if size > 1]
    if c.context_method is not None:
        parts = [f"{p} {methods_text(c.context_method)}" if p.startswith("cp") else p for p in parts]
    if c.ep > 1 and c.etp is not None and c.etp != c.tp:
        parts.append(f"etp{c.etp}")
    if c.dp * c.cp > 1:
        parts.append(f"zero{c.zero_stage}" + (f"-replicas{c.zero_replicas}" if c.zero_replicas > 1 else ""))
    parts.append(f"mbs{c.micro_batch_size} x{c.num_micro_batches}")
    if c.virtual_stages > 1:
        parts.append(f"vpp{c.virtual_stages}")
    again = recompute_label(c, estimate)
    if again != "none":
        parts.append(f"recompute {again}")
    if c.offload:
        parts.append(f"offload {'+'.join(c.offload)}")
    if c.schedule != "1F1B":
        parts.append(c.schedule)
    return " ".join(parts)


def evidence_label(estimate: Estimate) -> str:
    """`compute fitted, communication assumed, memory exact`: the weakest evidence of each."""
    comm = [q.tag for name, q in estimate.breakdown.items() if name.endswith("_comm") and q.mid > 0]
    memory = max((q.tag for s in estimate.stages for q in s.memory.values()), default=Tag.EXACT)
    parts = [f"compute {estimate.breakdown['compute'].tag}"] if "compute" in estimate.breakdown else []
    return ", ".join([*parts, f"communication {max(comm)}" if comm else "no communication", f"memory {memory}"])
