"""Steps of Llama 3.1 8B with Megatron's kernels on H100, for tests of what a step costs."""

from __future__ import annotations

from autoplan.catalog import load_model
from autoplan.config.parallel import Mode, ParallelConfig, RunOptions
from autoplan.cost_models.constants import Constants
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.time.estimate import Estimate
from autoplan.search.estimate import estimate_config
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
