"""Every use of a private PyTorch API by the runtime: which one, why, and how versions of torch differ in it.

For torch 2.13 to 2.15; docs/versions.md lists the tests. A row names the versions whose API differs; without a version
all of them are alike. Only this module detects the differences, by inspecting torch itself:
RECEIVES_INTO_FRESH_BUFFERS, `end_of_backward`, `mend_simulated_groups`.

| API | why | by version |
|---|---|---|
| PipelineStage.forward_maybe_with_nosync, backward_maybe_with_nosync, backward_one_chunk, backward_weight_one_chunk, perform_reduce_grad (in stages.py) | torch's schedules must not see the stage's own module: they would tell FSDP never to reduce or reshard before the end of the step, so that ZeRO 2 and 3 would hold whole gradients and ZeRO 3 whole parameters; sends need contiguous tensors of the declared shapes | up to 2.14 outputs of a stage are kept until its backward; 2.15 keeps their GradientEdge once they are sent, and schedules of several stages reduce FSDP modules by start_gradient_reduction instead of perform_reduce_grad (never reached: no module here is one) |
| PipelineStage._setup_forward_recv_info, _setup_backward_recv_info, get_fwd_recv_ops, get_bwd_recv_ops, args_recv_info, grad_recv_info, _RecvInfo (in stages.py) | receive buffers that live from the receive to the backward | up to 2.14 torch allocates them for all micro-batches and never frees them: `_LateBuffers`; 2.15 allocates at the receive and frees them when they are used (_RecvInfo.take_buffer): nothing to do |
| PipelineStage._warmup_forward_vote, _warmup_backward_result (in stages.py) | a rehearsal's rank is given the outcome of the vote, which torch reads from a tensor | |
| _PipelineSchedule._step_microbatches, stage.has_backward, stage.clear_runtime_states (in stages.py) | step() cuts one batch along dim 0; here every micro-batch brings its own keyword arguments | 2.15: step(kwarg_mbs=) does the same in public |
| Tensor._post_accumulate_grad_hooks, Tensor._is_view (in split_backward.py) | a split backward writes .grad itself and calls the hooks that would follow; views cannot be detached in place | |
| fully_shard.state, _state_ctx.all_states, _fsdp_param_groups, post_backward, fsdp_params, _is_hsdp, accumulate_unsharded_grad_if_needed, to_accumulated_grad_if_needed, _root_post_backward_final_callback (in zero.py) | the reductions of a split backward, whose weight gradients come after FSDP's hooks have run | 2.15: the callback needs to know who ends a backward, manual_backward_finalization_active: `end_of_backward` |
| fully_shard.state, _fsdp_param_groups, _reduce_scatter_comm (in exchange.py) | over gloo ZeRO reduces by an exchange; set_custom_reduce_scatter refuses blocks whose experts have a mesh of their own | |
| fsdp._fully_shard._fsdp_common.FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult (in shard_placement.py) | experts under token dispatch have fewer replicas than the rest of their block, so shard_placement_fn gives them their own mesh | |
| fully_shard.state, _fsdp_param_groups, _reset_sharded_params (in autoplan/rehearsal/rank.py) | fake tensors have no address by which FSDP sees that a shard is padded already | |
| _subclasses.fake_tensor.FakeTensorMode.cache_enabled (in autoplan/rehearsal/rank.py) | the key of a cached set_ has its storage, which then never dies | |
| _subclasses.fake_tensor.unset_fake_temporarily | the ranks of a mesh are read in a rehearsal too, where all other tensors are fake | |
| DeviceMesh(_init_backend=False) | a mesh of one rank without a communicator: nothing is sent over it | |
| tensor._dtensor_spec.DTensorSpec, TensorMeta, placement_types._StridedShard (in shards.py) | a DTensor over existing memory, without copies; a dim whose outer factors are not cut | |
| _local_tensor.rank_map, enabled_local_tensor_mode, _c10d._prepare_collective_groups (in mesh.py, convert.py) | ranks that tests simulate in one process | up to 2.14 the last returns (ranks, offsets, offset), which spmd_types 0.3.1 unpacks, in 2.15 only the first two: `mend_simulated_groups` |
| aten._scaled_dot_product_flash_attention, ..._for_cpu, and their backwards (in ring.py) | a part of a ring needs the log-sum-exp, which scaled_dot_product_attention does not return | |
| aten._flash_attention_forward, _fused_sdp_choice (in sdpa.py) | windows, and causal masks that end with the keys, without a mask tensor; torch's choice of kernel | |
| _c10d_functional.all_reduce, all_gather_into_tensor, reduce_scatter_tensor, all_to_all_single, wait_tensor (in functional.py, convert.py) | the Python wrappers return an asynchronous tensor subclass | |
| _C._current_graph_task_id, autograd.graph._engine_run_backward (in convert.py, statistics.py, autoplan/verify/wide.py) | recorded collectives are told apart by forward, backward and recompute; a recompute updates no running statistics; a backward under a TorchFunctionMode, which torch.autograd.backward leaves | |
| _foreach_norm, _foreach_mul_ (in norm.py) | a few kernels for the gradients of all parameters, as in torch.nn.utils.get_total_norm, which adds in the dtype of the gradients | |
| _foreach_copy_, _foreach_add_, _amp_foreach_non_finite_check_and_unscale_ (in precision.py) | a few kernels for the 16-bit copies of all parameters, and for unscaling all gradients, as in torch.amp.GradScaler | |
| _C._SetExcludeDispatchKeyGuard, _C.DispatchKey (`autograd_inside`) | the backward of an operator of our own computes its forward again with torch's derivatives, which a kernel is called without | |
| _assert_async (in experts.py) | an index beyond the experts is refused without a wait for the device | |
| UntypedStorage._cdata (in recompute.py, recorded.py) | tells views of an argument from other values | |
| is_meta in the functions of torch.nn.init, _C.DisableTorchFunction (in values.py) | a function that asks is_meta does nothing on the meta device: its frame is the call that is recorded; replays are seen by no mode | |
| nn.Module._parameters (in precision.py, model_state.py, params.py, capture/passes/cast.py) | a parameter is exchanged for its 16-bit copy in place, without registering it anew | |
| distributed_c10d._get_default_store | the store through which ranks learn where the others answer | |
| TCPStore's client connection (/proc/self/fd) | its calls wait forever for a stopped host; they raise once it is shut down | |
| distributed_c10d.default_pg_timeout, default_pg_nccl_timeout, _set_pg_timeout | groups of a DeviceMesh take torch's default timeout (gloo: 30 minutes), not the default group's; gloo's sends and receives keep the timeout their group was made with | |
| ProcessGroup.bound_device_id | the device that the caller's group was made with (device_id=) | |
| distributed.rendezvous.rendezvous | the store from torchrun's variables before there is a group: ranks agree on devices first, since NCCL's first communicator hangs or dies if two ranks share a device or one has none | |
| ProcessGroup.abort, ProcessGroupNCCL._group_start, _group_end, distributed_c10d._world.pg_names | aborts the NCCL communicators from the thread that knows of a failure, while the main thread waits for a kernel that never ends; torch's own tables, which the main thread reads, stay. After `abort` torch's watchdog ignores their errors, so that it does not end the process (ProcessGroupNCCL::Watchdog::runLoop, terminateProcessGroup_) | |
| _symmetric_memory.enable_symm_mem_for_group, _inductor.config._micro_pipeline_tp (in compiled.py) | torch's async TP: for named groups inductor splits a matrix product and the gather before it, or the reduce-scatter after it, into pieces that overlap | |
| cuda._utils._nvrtc_compile, _cuda_load_module (in compile_cuda) | a kernel of our own without a compiler on the machine; torch.cuda._compile_kernel, which is both, asks for the folder of a CUDA toolkit even if the text includes nothing | |
| _guards.TracingContext, distributed_c10d._resolve_process_group (in ring.py, convert.py, exchange.py) | a ring of sends and receives is one operator of a compiled graph, which takes the name of its group | |
| _guards.detect_fake_mode, ShapeEnv.create_unbacked_symint, ignore_fresh_unbacked_symbols, fx.experimental.proxy_tensor.get_proxy_mode (new_size, ignored_sizes) | experts are a node of a compiled graph, inside which rows have sizes that depend on values | |
| ProcessGroup.group_desc | tells the groups that autoplan made from the caller's | |
| distributed_c10d._abort_process_group | closes the connections of a failing rank at once, so that its peers do not wait for the timeout; over gloo it leaves them open | |
| gloo's sockets (/proc/self/fd, /proc/self/fdinfo; in connections.py) | closes the connections of a failing rank whose process lives on: gloo's abort and shutdown do nothing | |

A torch upgrade reads this table first; `make versions TORCH=...` runs the tests that cover each row on another version
(experiments/compatibility/versions.py).
"""  # noqa: E501

import contextlib
import os
import socket
import stat
import time
import warnings
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.stage import _RecvInfo

from autoplan.runtime import connections
from autoplan.runtime.lives import of_this_life

# True if torch allocates receive buffers at the receive and frees them when they are used.
RECEIVES_INTO_FRESH_BUFFERS = hasattr(_RecvInfo, "take_buffer")


def compile_cuda(source: str, name: str, capability: tuple[int, int]) -> Any:
    """Compile a kernel without headers by NVRTC, and load it on the current device.

    Returns: a function of `grid`, `block` and `args`, where an int is passed as C's int and a float as its double.
    Raises: RuntimeError, OSError, ImportError, AttributeError: NVRTC or the driver is missing, or refuses it.
    """
    from torch.cuda._utils import _cuda_load_module

    return _cuda_load_module(compile_cubin(source, name, capability), [name])[name]  # type: ignore[index]


def compile_cubin(source: str, name: str, capability: tuple[int, int]) -> bytes:
    """Compile a kernel without headers by NVRTC; needs no GPU. Raises as `compile_cuda`."""
    from torch.cuda._utils import _nvrtc_compile
    from torch.utils import cpp_extension

    toolkit = cpp_extension.CUDA_HOME
    cpp_extension.CUDA_HOME = toolkit or os.devnull  # where torch looks for headers, or refuses to compile
    try:
        code, _ = _nvrtc_compile(source, name, f"{capability[0]}{capability[1]}")
    finally:
        cpp_extension.CUDA_HOME = toolkit
    return code


def share_memory(group: dist.ProcessGroup) -> None:
    """Let the ranks of a group read each other's memory, which async TP needs; the first use is a collective."""
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    with warnings.catch_warnings():  # "no need to call it", but inductor still asks whether somebody did
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(group.group_name)


@contextlib.contextmanager
def autograd_inside() -> Iterator[None]:
    """Record derivatives inside the kernel of an operator, also where a mode of dispatch calls it."""
    keys = torch._C.DispatchKey
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        for key in (keys.AutogradFunctionality, keys.AutogradOther, keys.ADInplaceOrView):
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
        yield


def in_graph() -> bool:
    """Return True while torch.compile traces a function, so that the operations called make a graph."""
    return torch._guards.TracingContext.try_get() is not None


def new_size() -> Any:
    """Return a size of a traced operator's result that no compiler knows: what values decide when the graph runs.

    `torch.library.get_ctx().new_dynamic_size` refuses unless a setting of dynamo's allows it for the whole process.
    """
    mode = torch._guards.detect_fake_mode()
    assert mode is not None and mode.shape_env is not None
    size = mode.shape_env.create_unbacked_symint()
    torch._check(size >= 0)  # type: ignore[no-untyped-call]
    return size


@contextlib.contextmanager
def ignored_sizes() -> Iterator[None]:
    """Let operators of sizes that depend on values run inside a node of a graph.

    When dynamo makes the node it sees only the results of the node, and would miss these sizes among them. AOTAutograd,
    which looks into the node, keeps them.
    """
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = torch._guards.detect_fake_mode()
    if mode is None or mode.shape_env is None or get_proxy_mode() is not None:
        yield
        return
    with mode.shape_env.ignore_fresh_unbacked_symbols():
        yield


def group_named(name: str) -> dist.ProcessGroup:
    """Return the process group with this name, which operators of a graph take in its place."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined,arg-type]


def end_of_backward(root: Any) -> None:
    """Run the end of a backward of `root`, the FSDP state of a root module, that autograd's engine does not know of."""
    context = root._state_ctx
    if getattr(context, "manual_backward_finalization_active", False) is None:
        context.manual_backward_finalization_active = False  # as the hooks before a backward set it
    root._root_post_backward_final_callback()


def mend_simulated_groups() -> None:
    """Let spmd_types simulate ranks if torch describes their groups by two values instead of three."""
    from spmd_types import _local

    groups = _local._prepare_collective_groups
    if getattr(groups, "gives_three", False):
        return

    def three(group: Any) -> tuple[Any, ...]:
        ranks, offsets, *rest = groups(group)
        return ranks, offsets, rest[0] if rest else min(dist.get_process_group_ranks(group))

    three.gives_three = True  # type: ignore[attr-defined]
    _local._prepare_collective_groups = three  # type: ignore[assignment]


def default_store() -> Store:
    """Return the key-value store that the default process group was made with."""
    store = dist.distributed_c10d._get_default_store()
    assert isinstance(store, Store)
    return store


OWN = "autoplan_"  # prefix of the descriptions of groups that are made here


def default_group() -> dist.ProcessGroup:
    """Return the process group of all ranks."""
    return dist.distributed_c10d._get_default_group()


def form_groups(groups: Sequence[Sequence[int]], name: str) -> dist.ProcessGroup | None:
    """Return the one of these disjoint groups that has this rank; None if none has. All ranks pass the same groups.

    If the default group is bound to a device, all groups are split off its communicator at once (`split_group`): one by
    one, every rank would take part in forming every group.
    """
    description = OWN + name
    if bound_device() is not None:
        return dist.split_group(split_ranks=[list(g) for g in groups], group_desc=description)
    with connections.noted():
        made = [dist.new_group(list(ranks), group_desc=description) for ranks in groups]
    return next((group for group, ranks in zip(made, groups, strict=True) if dist.get_rank() in ranks), None)


def group_alone(world_size: int) -> dist.ProcessGroup:
    """Return a group of this rank alone. If the default group is bound to a device, all ranks must ask together."""
    if bound_device() is not None:
        found = form_groups([[rank] for rank in range(world_size)], "alone")
        assert found is not None
        return found
    alone: dist.ProcessGroup = dist.new_group(
        [dist.get_rank()], use_local_synchronization=True, group_desc=OWN + "alone"
    )
    return alone


def mesh_without_group(device_type: str, rank: int, name: str) -> DeviceMesh:
    """Return a mesh of one rank that is only asked for its size."""
    return DeviceMesh(device_type, [rank], mesh_dim_names=(name,), _init_backend=False)


def same_ranks(one: DeviceMesh, other: DeviceMesh) -> bool:
    """Return True if two meshes have the same ranks in the same places, also while all other tensors are fake."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        return torch.equal(one.mesh, other.mesh)


def bound_device() -> torch.device | None:
    """Return the device that the default process group was made with; None if it was made without one."""
    found: torch.device | None = dist.distributed_c10d._get_default_group().bound_device_id
    return found


class Meeting(NamedTuple):
    """The meeting point of the ranks of a job: their store, the rank of this process and the number of ranks."""

    store: Store
    rank: int
    world: int


def rendezvous(timeout: timedelta) -> Meeting:
    """Return store, rank and world size from torchrun's variables, with a store of this life of the job."""
    from torch.distributed.rendezvous import rendezvous as handler

    store, rank, world = next(handler("env://", timeout=timeout))
    store.set_timeout(timeout)
    return Meeting(PrefixStore("default_pg", of_this_life(store, rank, world, timeout)), rank, world)


def gpu_id(device: torch.device) -> str:
    """Return an identifier that tells a GPU from all others, on any host and whatever its number there."""
    return str(torch.cuda.get_device_properties(device).uuid)


def store_endpoint(store: Store) -> tuple[str, int] | None:
    """Return host and port of the TCPStore behind the default process group's store; None if it is another kind."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, TCPStore) else None


def break_store(store: Store) -> None:
    """Shut down this process's connections to the store's host, so that a call waiting for it raises DistError.

    torch's client waits for a stopped process without any timeout, and has no call that ends the wait.
    """
    endpoint = store_endpoint(store)
    folder = Path("/proc/self/fd")
    if endpoint is None or not folder.is_dir():
        return
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.stat(folder / name).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.getpeername()[1] == endpoint[1]:
                    connection.shutdown(socket.SHUT_RDWR)


def set_timeout(timeout: timedelta) -> None:
    """Set the timeout of collectives in the default process group and in every later group."""
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        setattr(dist.distributed_c10d, name, timeout)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Set timeout is now only supported")
        dist.distributed_c10d._set_pg_timeout(timeout)


def nccl_groups() -> list[dist.ProcessGroup]:
    """Return the process groups with NCCL communicators, in the order in which torch ends them."""
    names = dict(dist.distributed_c10d._world.pg_names)
    return [g for g in sorted(names, key=lambda g: names[g], reverse=True) if _nccl_of(g) is not None]


def abort_communicators(groups: Sequence[dist.ProcessGroup]) -> None:
    """End all running and waiting NCCL work on this rank's device. Works from any thread, and more than once.

    Afterwards an NCCL kernel whose peers do not come has ended, with arbitrary results, and the next collective raises
    DistBackendError.
    """
    backend: Any = _nccl_of(groups[0])
    backend._group_start()  # as in `_abort_process_group`: otherwise one communicator's abort may wait for another's
    try:
        for group in groups:
            group.abort()
    finally:
        backend._group_end()


def _nccl_of(group: dist.ProcessGroup) -> Any:
    """Return the NCCL backend of a group; None if it has none."""
    if "cuda:nccl" not in dist.distributed_c10d._world.pg_backend_config.get(group, "").split(","):
        return None
    return group._get_backend(torch.device("cuda"))


def device_settles(within_s: float) -> bool:
    """Return True if the work queued on the current device ends within this time, or if no device is in use."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return True
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    end = time.monotonic() + within_s
    event.record()
    while not event.query():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def give_back_groups(everything: bool) -> None:
    """Destroy the process groups of this process: all of them, or only those that autoplan made."""
    if everything:
        dist.destroy_process_group()
        return
    for group in reversed(list(dist.distributed_c10d._world.pg_names)):  # in one order on all ranks
        if group.group_desc.startswith(OWN):
            dist.destroy_process_group(group)


def abort_process_groups() -> None:
    """Close this rank's connections without waiting for other ranks. Afterwards no collective works in this process."""
    dist.distributed_c10d._abort_process_group()
