"""Degrees of Megatron's setups that are more than a number: ZeRO, cut sequences, experts; also Megatron-DeepSpeed's."""

from __future__ import annotations

from typing import Any

from autoplan.config.context_methods import GATHER, RING, ULYSSES, read_method
from autoplan.config.parallel import Dispatcher
from autoplan.errors import PinError
from autoplan.exporters.megatron_stages import At
from autoplan.exporters.record import Document, Field, Values, same
from autoplan.exporters.setup import Setup

EXPERT_TP = "expert_tensor_parallel_size"
_STRATEGIES = {1: "optim", 2: "optim_grads", 3: "optim_grads_params", 0: "no_shard"}


def zero_field(at: At, checkpoint: str) -> Field:
    """Return the field of ZeRO. `checkpoint`: name of the option for the optimizer's checkpoint format."""

    def write(setup: Setup) -> Values:
        stage, copies = setup.config.zero_stage, setup.config.zero_replicas
        out: dict[str, Any] = {at("use_distributed_optimizer"): True} if stage else {}
        if stage >= 2:
            out |= {at("use_megatron_fsdp"): True, at("data_parallel_sharding_strategy"): _STRATEGIES[stage]}
            out[at(checkpoint)] = "fsdp_dtensor"  # the only format that Megatron-FSDP takes
        return out | ({at("num_distributed_optimizer_instances"): copies} if copies > 1 and stage else {})

    def read(document: Document, found: Values) -> Values:
        copies = document.count(at("num_distributed_optimizer_instances"))
        if document.has(at("zero_stage")) or document.has(at(DEEPSPEED_CONFIG)):  # of Megatron-DeepSpeed
            return {"zero_stage": _stage_of_deepspeed(at, document), "zero_replicas": copies}
        if document.get(at("use_torch_fsdp2")):  # fully_shard, over all of dp
            return {
                "zero_stage": 2 if document.get(at("torch_fsdp2_no_reshard_after_forward")) else 3,
                "zero_replicas": 1,
            }
        if document.get(at("use_megatron_fsdp")) or document.get(at("use_custom_fsdp")):  # its name until July 2025
            stages = {word: stage for stage, word in _STRATEGIES.items()}
            strategy = document.get(at("data_parallel_sharding_strategy")) or "optim_grads_params"
            if strategy not in stages:
                raise PinError(f"data_parallel_sharding_strategy={strategy!r} is not known; use {', '.join(stages)}")
            return {"zero_stage": stages[strategy], "zero_replicas": copies}
        return {"zero_stage": int(bool(document.get(at("use_distributed_optimizer")))), "zero_replicas": copies}

    return Field(("zero_stage", "zero_replicas"), write, read)


DEEPSPEED_CONFIG = "deepspeed_config"


def _stage_of_deepspeed(at: At, document: Document) -> int:
    """Return the ZeRO stage of Megatron-DeepSpeed: that of its file, which it passes to DeepSpeed, else of the flag.

    A file that is not there is mostly written by the script itself, with the same stage.
    """
    stage = f"{at(DEEPSPEED_CONFIG)}.zero_optimization.stage"
    if stage in document.values:
        return document.count(stage, 0)
    if not document.has(at("zero_stage")):
        name = document.get(at(DEEPSPEED_CONFIG))
        near = "its path from here, or --zero-stage"
        raise PinError(f"{DEEPSPEED_CONFIG}={name} is not found; nearest: {near}", ("zero_stage",))
    return document.count(at("zero_stage"), 0)


def context_degree(at: At) -> Field:
    """Return the field of the context-parallel degree."""
    new, of_deepspeed = at("context_parallel_size"), at("ds_sequence_parallel_size")

    def read(document: Document, found: Values) -> Values:
        return {"cp": document.count(of_deepspeed if document.has(of_deepspeed) else new)}

    return Field(("cp",), same(new, "cp").write, read)


def context_field(at: At) -> Field:
    """Return the field of how attention reads the keys of a cut sequence."""
    types = {RING: "p2p", ULYSSES: "a2a", GATHER: "all_gather"}

    def write(setup: Setup) -> Values:
        name = setup.context_method
        if name is None:
            return {}
        method = read_method(name, setup.config.cp)
        if method.is_product:
            sizes = [method.ulysses, method.ranks]
            if not method.is_ring:
                return {}
            return {at("cp_comm_type"): "a2a+p2p", at("hierarchical_context_parallel_sizes"): sizes}
        return {at("cp_comm_type"): types[method.name]}

    def read(document: Document, found: Values) -> Values:
        if found["cp"] == 1:
            return {"context_method": None}
        if document.has(at("ds_sequence_parallel_size")):
            return {"context_method": ULYSSES}
        given = document.get(at("cp_comm_type")) or "p2p"
        given = given[0] if isinstance(given, list) and len(set(given)) == 1 else given
        if given == "a2a+p2p":
            ulysses, ranks = document.get(at("hierarchical_context_parallel_sizes")) or (1, found["cp"])
            return {"context_method": f"ulysses{ulysses}xring{ranks}"}
        known = {word: name for name, word in types.items()} | {"allgather": "gather"}
        if given not in known:
            raise PinError(
                f"cp_comm_type={given!r} has no price; known: {', '.join(known)}, a2a+p2p", ("context_method",)
            )
        return {"context_method": known[given]}

    return Field(("context_method",), write, read)


def experts_field(at: At) -> Field:
    """Return the field of degrees and kernels of experts."""

    def write(setup: Setup) -> Values:
        if not setup.task.num_experts:
            return {}
        c = setup.config
        out: dict[str, Any] = {at("expert_model_parallel_size"): c.ep, at(EXPERT_TP): c.expert_tp}
        out[at("moe_grouped_gemm")] = True
        flex = setup.options.dispatcher is not Dispatcher.ALL_TO_ALL
        out[at("moe_token_dispatcher_type")] = "flex" if flex else "alltoall"
        if flex:
            device = setup.task.hardware
            backend = "hybridep" if device is not None and device.joins_nodes else "deepep"
            out[at("moe_flex_dispatcher_backend")] = backend
        return out | ({at("use_transformer_engine_op_fuser"): True} if setup.options.fused_experts else {})

    def read(document: Document, found: Values) -> Values:
        if not document.task.num_experts:
            return {"ep": 1, "etp": found["tp"]}
        of_deepspeed = at("moe_expert_parallel_size")
        if document.has(of_deepspeed):
            split = bool(document.get(at("enable_expert_tensor_parallelism")))
            return {"ep": document.count(of_deepspeed), "etp": found["tp"] if split else 1}
        etp = document.get(at(EXPERT_TP))
        out: dict[str, Any] = {"ep": document.count(at("expert_model_parallel_size"))}
        fused = document.get(at("use_transformer_engine_op_fuser"))
        if etp or not document.partial:
            out["etp"] = etp or found["tp"]
        if fused is not None or not document.partial:
            out["fused_experts"] = bool(fused)
        kind = document.values.get(at("moe_token_dispatcher_type"))
        document.seen.add(at("moe_token_dispatcher_type"))
        if kind == "allgather":
            raise PinError("moe_token_dispatcher_type='allgather' has no price; known: alltoall, flex", ("dispatcher",))
        return out | ({} if kind is None else {"dispatcher": kind})

    return Field(("ep", "etp", "dispatcher", "fused_experts"), write, read)
