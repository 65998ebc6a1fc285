"""The stock way to run Hugging Face's Llama tensor-parallel: `parallelize_module` plans, and a count of collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

VARIANTS = ("TP", "TP shared", "TP+SP", "TP+SP+loss")
"""TP: each column-parallel linear reduces its own input gradient, as in PyTorch's tutorial. TP shared: the linears of a
block share one replicated input. SP: norms and residuals sharded on the sequence. loss: vocabulary-parallel loss."""


def llama_plan(num_layers: int, variant: str) -> dict[str, ParallelStyle]:
    """Module path -> style for a LlamaForCausalLM."""
    sp, vocabulary = "SP" in variant, "loss" in variant
    between: Any = Shard(1) if sp else Replicate()
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "lm_head": ColwiseParallel(
            input_layouts=between,
            output_layouts=Shard(-1) if vocabulary else Replicate(),
            use_local_output=not vocabulary,
        ),
    }
    if sp:
        plan["model.norm"] = SequenceParallel()
    for i in range(num_layers):
        layer = f"model.layers.{i}."
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[layer + name] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[layer + name] = RowwiseParallel(output_layouts=between)
        if sp:
            plan[layer + "input_layernorm"] = plan[layer + "post_attention_layernorm"] = SequenceParallel()
        if variant != "TP":
            plan[layer + "self_attn"] = PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": between},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            )
            plan[layer + "mlp"] = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))
    return plan


def make_step(
    model: nn.Module, mesh: DeviceMesh, variant: str, batch: Mapping[str, torch.Tensor]
) -> Callable[[], torch.Tensor]:
    """Parallelise `model` in place; a function that runs forward and backward and returns the loss."""
    parallelize_module(model, mesh, llama_plan(len(cast(Any, model).model.layers), variant))
    # Under sequence parallelism HF would count positions of the local part.
    positions = torch.arange(batch["input_ids"].shape[1]).unsqueeze(0)

    def step() -> torch.Tensor:
        for p in model.parameters():
            p.grad = None
        around: AbstractContextManager[Any] = loss_parallel() if "loss" in variant else nullcontext()
        with around:
            loss = model(**batch, position_ids=positions, use_cache=False).loss
            torch.autograd.backward(loss)
        whole: torch.Tensor = loss.full_tensor() if isinstance(loss, DTensor) else loss
        return whole.detach()

    return step


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole gradients by name (a collective)."""
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in gradients.items()}


_RESULT = -1
# operator -> (kind, which argument is the whole tensor on one rank)
_KINDS = {
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_reduce_": ("all_reduce", 0),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", _RESULT),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0),
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::allgather_": ("all_gather", 0),
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::reduce_scatter_": ("reduce_scatter", 1),
    "c10d::alltoall_": ("all_to_all", 1),
    "c10d::alltoall_base_": ("all_to_all", 1),
}
_NOT_COUNTED = ("wait_tensor", "barrier", "_wrap_tensor_autograd")
# Bytes that each of n ranks sends, as multiples of (n - 1) / n times the whole tensor's.
_TRAFFIC = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}


class CollectiveCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count what is executed inside: `calls` and `sent` (bytes each rank sends) by (phase, kind).

    Unlike the runtime's own record it lets DTensor unfold into its collectives first. RuntimeError for a collective it
    does not know.
    """

    def __init__(self, world: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.world = world
        self.calls: Counter[tuple[str, str]] = Counter()
        self.sent: Counter[tuple[str, str]] = Counter()
        self.backward = False  # from its first op to the end of the step: deferred reductions belong to it

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        # -1 unless the autograd engine runs this thread (private, torch 2.13)
        self.backward = self.backward or torch._C._current_graph_task_id() != -1
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("_c10d_functional", "c10d", "_dtensor"):
            name = func._schema.name
            if not any(word in name for word in _NOT_COUNTED):
                self._add(name, args, result)
        return result

    def _add(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        if name not in _KINDS:
            raise RuntimeError(f"collective {name} is not in the table of this experiment")
        kind, index = _KINDS[name]
        leaves = tree_leaves(result if index == _RESULT else args[index])
        size = sum(x.nbytes for x in leaves if isinstance(x, torch.Tensor))
        phase = "backward" if self.backward else "forward"
        self.calls[phase, kind] += 1
        self.sent[phase, kind] += _TRAFFIC[kind] * size * (self.world - 1) // self.world

    def total(self, phase: str) -> tuple[int, int]:
        """(number, bytes sent by each rank) of a phase."""
        return (
            sum(n for (p, _), n in self.calls.items() if p == phase),
            sum(n for (p, _), n in self.sent.items() if p == phase),
        )
