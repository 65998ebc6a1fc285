"""Jobs of test_whole.py that run on several processes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from harness import worker_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from autoplan.runtime import whole

CPU = torch.device("cpu")


def there_and_back(rank: int, world: int, bucket_bytes: int) -> dict[str, bool]:
    before, whole.HOST_BUCKET_BYTES = whole.HOST_BUCKET_BYTES, bucket_bytes
    try:
        mesh = worker_mesh((world,), ("dp",))
        found, own = {}, True
        for name, shape, dim in (("even", (8, 3), 0), ("uneven", (6, 5), 0), ("columns", (3, 10), 1)):
            full = torch.arange(float(shape[0] * shape[1])).reshape(shape)
            sharded = distribute_tensor(full, mesh, [Shard(dim)])
            found[name] = torch.equal(whole.of_shards(sharded.to_local(), sharded, CPU), full)
            own = own and torch.equal(whole.own_shard(full, sharded), sharded.to_local())
        value = torch.full((37,), float(rank))
        whole.broadcast_whole(value, 2, CPU)
        for dtype in (torch.int16, torch.uint16, torch.float8_e4m3fn):  # neither gloo nor NCCL sends them
            shapes = [(2, 3)] * (world - 1) + [(1, 3)]
            parts = [torch.full(shape, 2 * i + 1).to(dtype) for i, shape in enumerate(shapes)]
            gathered = whole.gather(parts[rank], shapes, dist.group.WORLD, CPU)
            found[str(dtype)] = all(torch.equal(a.float(), b.float()) for a, b in zip(gathered, parts, strict=True))
            bits = parts[rank].reshape(-1)[:3].clone()
            whole.broadcast_whole(bits, 2, CPU)
            found[str(dtype)] &= bits.dtype == dtype and torch.equal(bits.float(), torch.full((3,), 5.0))
        dist.barrier()
        return {**found, "own": own, "brought": torch.equal(value, torch.full((37,), 2.0))}
    finally:
        whole.HOST_BUCKET_BYTES = before
