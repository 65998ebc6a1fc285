"""Steps of Llama 3.1 8B with Megatron's kernels on H100, for tests of what a step costs."""

from __future__ import annotations

from functools import lru_cache

from autoplan.catalog import load_model
from autoplan.config.parallel import Mode, ParallelConfig, RunOptions
from autoplan.config.precision import precision_of
from autoplan.cost_models.constants import Constants
from autoplan.cost_models.costs import Costs
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.time.estimate import Estimate
from autoplan.cost_models.work import BlockWork, Workload
from autoplan.program.megatron_kernels import Kernels
from autoplan.program.op_costs import OpCosts
from autoplan.program.parallel_dims import parallel_dims
from autoplan.program.problem import IntraSettings, build_problem
from autoplan.program.workload import workload
from autoplan.search.estimate import estimate_config
from autoplan.search.intra import solve
from autoplan.search.request import PlanRequest

NODE = Cluster.parse("1x8xh100-sxm5-80gb")
NODES = Cluster.parse("8x8xh100-sxm5-80gb")


def estimate(
    config: ParallelConfig, cluster: Cluster = NODE, options: RunOptions | None = None, model: str = "llama-3.1-8b",
    mode: Mode = Mode.FUSED, constants: Constants | None = None, seq_len: int = 4096,
) -> Estimate:  # fmt: skip
    """Return the estimate of a configuration; its batch is that of its micro-batches."""
    batch = config.dp * config.micro_batch_size * config.num_micro_batches
    request = PlanRequest(
        load_model(model), cluster, seq_len, batch, mode=mode, options=options or RunOptions(),
        constants=constants or Constants.shipped(),
    )  # fmt: skip
    return estimate_config(request, config).estimate


@lru_cache(maxsize=8)
def fused_workload(model: str, tp: int = 1, precision: str = "bf16") -> Workload:
    """Return the work of a rank of a node."""
    graph = load_model(model)
    axes = parallel_dims(graph, ParallelConfig(tp=tp)).layout_axes
    env, dtypes = {"b": 1, "s": 1024}, precision_of(precision)
    settings = IntraSettings(axes, Costs(NODE, mode=Mode.FUSED), env, 4, 1.02, dtypes)
    works = OpCosts(graph, axes, env, precision=dtypes, device_type="cuda", kernels=Kernels(Mode.FUSED))
    return workload(graph, solve(build_problem(graph, settings)).selection, works)


def layer_of(work: Workload) -> BlockWork:
    """Return the block of the first unit that is a layer."""
    return next(work.blocks[unit[marked.index(True)]] for unit, marked in zip(work.units, work.is_layer, strict=True))
