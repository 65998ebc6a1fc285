"""The dim on which `fully_shard` cuts each parameter, and the ranks that it cuts it over."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

_MOST_PADDING = 1 / 8  # of a parameter: more than this costs more than the copies that shards of another dim need


def shard_dim(shape: Sequence[int], ranks: int) -> int:
    """Return the dim on which a parameter is sharded over `ranks` ranks.

    `fully_shard` pads dim 0 to whole shards: 4 local experts over 32 ranks would take 8 times their bytes. Then it is
    the first dim that divides evenly, if there is one. On a dim other than 0 every gather and reduction copies the
    parameter once more, between the shards' order and its own.
    """
    padded = -(-shape[0] // ranks) * ranks
    if padded <= (1 + _MOST_PADDING) * shape[0]:
        return 0
    return next((dim for dim, size in enumerate(shape) if size and size % ranks == 0), 0)


def placement(mesh: DeviceMesh) -> Callable[[nn.Parameter], Shard]:
    """Return a placement function for ``fully_shard`` over ``mesh``, whose last dim are the ranks to shard over."""
    return lambda parameter: Shard(shard_dim(parameter.shape, mesh.size(-1)))


def placement_apart(
    mesh: DeviceMesh, apart: Sequence[nn.Parameter], apart_mesh: DeviceMesh
) -> Callable[[nn.Parameter], Any]:
    """Return a placement function for ``fully_shard``: ``apart`` over ``apart_mesh``, the others over ``mesh``."""
    # Private torch API (see private.py): a mesh per parameter; torch exports only the placement.
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult

    def info(over: DeviceMesh) -> FSDPMeshInfo:
        hybrid = over.ndim == 2
        return HSDPMeshInfo(over, shard_mesh_dim=1, replicate_mesh_dim=0) if hybrid else FSDPMeshInfo(over, 0)

    mine = {id(p) for p in apart}
    elsewhere, usual = ((info(over), placement(over)) for over in (apart_mesh, mesh))

    def place(parameter: nn.Parameter) -> Any:
        found, placed = elsewhere if id(parameter) in mine else usual
        return ShardPlacementResult(placed(parameter), found)

    return place
