"""The sums of gradients of parameters that several stages of a pipeline use."""

from __future__ import annotations

from autoplan.config.parallel import Mode, ParallelConfig
from autoplan.cost_models.costs import Costs
from autoplan.cost_models.hardware.cluster import Group
from autoplan.cost_models.memory.parameters import ParameterMemory
from autoplan.cost_models.quantity import Quantity
from autoplan.cost_models.work import TiedParam, Workload
from autoplan.schedules.schedule import ranks_of_chunks


def tied_sums_s(
    workload: Workload, config: ParallelConfig, costs: Costs, memory: ParameterMemory
) -> list[tuple[TiedParam, Quantity]]:
    """Return the trained parameters that several units use, with the seconds of summing a gradient over two ranks.

    Emitted programs sum what ZeRO leaves of a gradient (`runtime.tied`), Megatron whole gradients
    (`_allreduce_embedding_grads` of core/distributed/finalize_model_grads.py).
    """
    c, out = config, list[tuple[TiedParam, Quantity]]()
    homes = ranks_of_chunks(c.schedule, c.pp, c.virtual_stages)
    group = Group(2, max(1, abs(homes[-1] - homes[0])) * c.stage_ranks)
    for tied in workload.tied if c.pp > 1 else ():
        if tied.param.trainable and tied.first != tied.last:
            states = memory.of(tied.param)
            size = states.whole or states.gradients if costs.mode is Mode.FUSED else states.reduced
            out.append((tied, costs.collective_s("all_reduce", size, group)))
    return out
