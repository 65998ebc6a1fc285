"""A made-up workload of equal layers with round numbers, and a cluster that it runs on."""

from __future__ import annotations

from typing import Any

from autoplan.cost_models.hardware.cluster import Cluster, Device, Level
from autoplan.cost_models.work import BlockWork, OpWork, ParamWork, Workload
from autoplan.ops.saved import TensorFacts

SAVED, TRANSIENT, PARAMS, SENT = 1000.0, 40.0, 60, 8.0
GRADS = 4.0 * PARAMS
TIED = ParamWork("w", PARAMS, "float32", True)


def layer(name: str = "layer", expert: bool = False) -> BlockWork:
    x, w = TensorFacts((8, 8), "float32", True), TensorFacts((PARAMS // 4, 4), "float32", True)
    op = OpWork("linear", (x, w), (x,), (), 1e6, 1e3)
    return BlockWork(name, (op,), (), (ParamWork(f"{name}.weight", PARAMS, "float32", True, expert),))


def workload(num_layers: int = 4, **kw: Any) -> Workload:
    n = num_layers
    zeros, block = (0.0,) * n, kw.pop("block", layer())
    values: dict[str, Any] = {
        "model": "made up", "axes": (), "blocks": {block.name: block}, "units": ((block.name,),) * n,
        "unit_calls": tuple((f"layer{i}",) for i in range(n)), "layers": (True,) * n, "is_layer": ((True,),) * n,
        "free": (), "cut_bytes": (SENT,) * (n - 1), "unit_saved": (SAVED,) * n, "unit_selective": (SAVED,) * n,
        "unit_kept": (10.0,) * n, "unit_transient": (TRANSIENT,) * n, "unit_recompute_transient": zeros, "tied": (),
        "free_saved": 0.0, "tokens": 8.0, "model_flops": 1e6, "micro_batch_size": 1, "seq_len": 8,
    }  # fmt: skip
    return Workload(**{**values, **kw})


def cluster(devices: int, per_node: int = 0) -> Cluster:
    device = Device("made up", 1e12, 1e11, 1 << 40, "made up")
    if per_node:
        return Cluster.parse(f"{devices // per_node}x{per_node}xh100-sxm5-80gb")
    return Cluster(1, devices, device, Level(1e-6, 1e10, "made up"), "cpu")
