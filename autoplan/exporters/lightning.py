"""Lightning: a Trainer with its strategy (DistributedDataParallel, FSDP, tensor parallelism, or DeepSpeed)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autoplan.errors import PinError
from autoplan.exporters.fms_fsdp import FMS, FmsFlags, is_of_fms, read_fms
from autoplan.exporters.launching import processes
from autoplan.exporters.litgpt import LITGPT, LITGPT_RULES, LitgptYaml, is_of_litgpt, read_litgpt
from autoplan.exporters.nemo_recipes import is_script
from autoplan.exporters.record import (
    Document,
    Field,
    Target,
    TargetRule,
    Values,
    base_of,
    derived,
    micro_batches,
    of_replicas,
)
from autoplan.exporters.scripts import Code, Name, PythonCall
from autoplan.exporters.setup import Setup
from autoplan.exporters.trainer_kinds import OWN_RULES, read_own_adapters, read_own_length


@dataclass(frozen=True)
class _TrainerCall(PythonCall):
    """A file that makes a Trainer of Lightning; those of NeMo, which are of Megatron, are of another target."""

    def read(self, text: str, where: str) -> dict[str, Any]:
        """Return the values by path; the path of a value that is not a literal begins with `?`."""
        return {} if is_script(text) else super().read(text, where)


_S = "strategy."
_SHARDING = {(3, False): "FULL_SHARD", (2, False): "SHARD_GRAD_OP", (3, True): "HYBRID_SHARD"}
_STAGES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "HYBRID_SHARD": 3, "NO_SHARD": 0}
_DEEPSPEED_TEXTS = {f"deepspeed_stage_{n}": n for n in (1, 2, 3)}


def strategy(setup: Setup) -> str:
    """Return the class of the strategy."""
    c = setup.config
    if c.tp > 1:
        return "ModelParallelStrategy"
    if c.zero_stage == 1 or c.offload == ("optimizer",):
        return "DeepSpeedStrategy"
    return "FSDPStrategy" if c.zero_stage else "DDPStrategy"


def _write(setup: Setup) -> Values:
    c, kind = setup.config, strategy(setup)
    out: dict[str, Any] = {"strategy": Name(kind)}
    if kind == "ModelParallelStrategy":
        return {**out, _S + "data_parallel_size": c.dp, _S + "tensor_parallel_size": c.tp}
    if kind == "DeepSpeedStrategy":
        out |= {_S + "stage": c.zero_stage, _S + "overlap_comm": setup.options.overlap_zero}
        out |= {_S + "offload_optimizer": True} if c.offload else {}
        return out | ({_S + "offload_parameters": True} if "parameters" in c.offload and c.zero_stage == 3 else {})
    if kind == "FSDPStrategy":
        hybrid = c.zero_replicas > 1
        out[_S + "sharding_strategy"] = _SHARDING.get((c.zero_stage, hybrid), "FULL_SHARD")
        out |= {_S + "device_mesh": (c.zero_replicas, c.num_shards)} if hybrid else {}
        out |= {_S + "cpu_offload": True} if c.offload == ("parameters",) else {}
        out[_S + "auto_wrap_policy"] = Code("{layer}")  # without it the whole model is one unit, gathered at once
    return out


def _mesh(document: Document) -> list[int] | None:
    mesh = document.get(_S + "device_mesh")
    if mesh is None:
        return None
    if not isinstance(mesh, list | tuple) or len(mesh) != 2:
        raise PinError(f"device_mesh={mesh!r} must be (replicas, shards), for example (2, 8)", ("zero_replicas",))
    return [int(n) for n in mesh]


def _read_fsdp(document: Document, kind: str) -> Values:
    name = str(document.get(_S + "sharding_strategy") or "FULL_SHARD")
    if name not in _STAGES:
        raise PinError(f"sharding_strategy={name!r} is not known; use {', '.join(_STAGES)}", ("zero_stage",))
    mesh = _mesh(document) if name.startswith("HYBRID") else None
    copies = mesh[0] if mesh else document.count("num_nodes") if name.startswith("HYBRID") else 1
    held_all = document.get(_S + "cpu_offload") is True or kind == "fsdp_cpu_offload"
    return {
        "zero_stage": _STAGES[name],
        "zero_replicas": copies,
        "offload": ("parameters",) if held_all else (),
    }


def _read(document: Document, found: Values) -> Values:
    kind = str(document.get("strategy") or "auto").rpartition(".")[2]
    devices = document.task.num_devices or document.count("num_nodes") * document.count("devices", 0, (-1,))
    tp = document.count(_S + "tensor_parallel_size") if kind == "ModelParallelStrategy" else 1
    out: dict[str, Any] = {"tp": tp, "offload": (), "zero_replicas": 1}
    out |= {"dp": devices // tp} if devices else {}
    if kind in ("DeepSpeedStrategy", "deepspeed") or kind in _DEEPSPEED_TEXTS:
        held = [bool(document.get(f"{_S}offload_{name}")) for name in ("parameters", "optimizer")]
        out["offload"] = ("parameters",) if held[0] else ("optimizer",) if held[1] else ()
        overlap = document.get(_S + "overlap_comm")
        out |= {"overlap_zero": overlap is not False, "overlap_gather": False}
        return {**out, "zero_stage": _DEEPSPEED_TEXTS.get(kind, document.count(_S + "stage", 2, (0,)))}
    if kind in ("FSDPStrategy", "fsdp", "fsdp_cpu_offload"):
        return {**out, **_read_fsdp(document, kind)}
    if kind == "ModelParallelStrategy":
        return {name: value for name, value in out.items() if name not in ("zero_replicas", "offload")}
    return {**out, "zero_stage": 0}


def _read_steps(document: Document, found: Values) -> Values:
    if is_of_litgpt(document) or is_of_fms(document):
        return {}
    steps = document.count("accumulate_grad_batches")
    out = {"num_micro_batches": steps}
    if "dp" in found and "micro_batch_size" in found:
        out["global_batch_size"] = steps * found["dp"] * found["micro_batch_size"]
    return out


_PRECISIONS = {"bf16": "bf16-mixed", "fp16": "16-mixed", "fp32": "32-true", "native": "bf16-true"}


_REPLICAS = ("auto", "ddp", "ddp_find_unused_parameters_true", "DDPStrategy")


def _read_precision(document: Document, found: Values) -> Values:
    known: dict[Any, str] = {word: name for name, word in _PRECISIONS.items()}
    known |= {"transformer-engine": "fp8", "bf16": "bf16", "16": "fp16", 16: "fp16", "32": "fp32", 32: "fp32"}
    kind = str(document.get("strategy") or "auto").rpartition(".")[2]
    replicas = kind in _REPLICAS and not is_of_litgpt(document) and not is_of_fms(document)
    return {"precision": of_replicas(str(document.word("precision", known, "fp32")), document, replicas)}


def _world(document: Document, found: Values) -> str | None:
    nodes, devices = document.count("num_nodes"), document.get("devices")
    total = document.task.num_devices
    if not isinstance(devices, int) or not total or nodes * devices == total:
        return None
    near = f"num_nodes={document.task.num_nodes}, devices={document.task.devices_per_node}"
    return f"num_nodes x devices = {nodes * devices}, but the cluster has {total} devices; nearest: {near}"


def _stack(document: Document) -> str:
    if is_of_fms(document):
        return "torch-fsdp"
    return "deepspeed" if "eep" in str(document.get("strategy")) else "torch-eager"


LIGHTNING = Target(
    name="lightning",
    about="a Python function that returns a Trainer with its strategy",
    stack="torch-eager",
    files=(
        (
            0.0,
            _TrainerCall(
                (
                    *("", "", "def trainer(layer, **settings):"),
                    '    """A Trainer that runs the plan. Yours: layer, the class of the model\'s layers."""',
                ),
                "Trainer",
                {
                    "Trainer": "lightning.pytorch",
                    **dict.fromkeys(
                        ("DDPStrategy", "FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy"),
                        "lightning.pytorch.strategies",
                    ),
                },
            ),
        ),
    ),
    fields=(
        Field(
            (),
            lambda s: {
                "num_nodes": max(1, s.task.num_nodes),
                "devices": s.config.num_devices // max(1, s.task.num_nodes),
            },
            lambda d, found: {},
        ),
        Field(
            ("tp", "dp", "zero_stage", "zero_replicas", "offload", "overlap_zero", "overlap_gather"),
            _write,
            _read,
        ),
        Field(
            ("num_micro_batches", "global_batch_size"),
            lambda s: {"accumulate_grad_batches": s.config.num_micro_batches},
            _read_steps,
        ),
        derived(micro_batches, "num_micro_batches"),
        Field(
            ("precision",),
            lambda s: {"precision": _PRECISIONS.get(base_of(s.precision), "bf16-mixed")},
            _read_precision,
        ),
        derived(read_own_length, "seq_len"),
        derived(read_own_adapters, "adapters"),
        derived(
            read_litgpt,
            *("zero_stage", "zero_replicas", "micro_batch_size", "num_micro_batches", "global_batch_size", "recompute"),
            *("reruns", "mode", "attention", "reduce_once", "seq_len"),
        ),
        derived(
            read_fms,
            *("zero_replicas", "micro_batch_size", "num_micro_batches", "global_batch_size", "recompute", "mode"),
            "seq_len",
        ),
    ),
    also=(LitgptYaml(), FmsFlags()),
    marks_also=(LITGPT, FMS),
    marks=("strategy", "accumulate_grad_batches", "devices"),
    launch=lambda setup, file, year: (
        ["python train.py"]
        if setup.task.num_nodes <= 1
        else [f"srun --nodes {setup.task.num_nodes} --ntasks-per-node {setup.task.devices_per_node} python train.py"]
    ),
    elsewhere={
        "micro_batch_size": "the DataLoader (batch_size)",
        "seq_len": "the data",
        "zero_stage": "configure_model (fully_shard on device_mesh['data_parallel'])",
        "zero_replicas": "configure_model",
        "offload": "configure_model (CPUOffloadPolicy)",
        "recompute": "the strategy or the model (FSDPStrategy(activation_checkpointing_policy={Layer}))",
        "mode": "the module (torch.compile)",
        "attention": "the model",
    },
    cannot={
        "mode": "fused kernels are in the code of the model; torch.compile makes others",
        "pp": "Lightning has no pipelines",
        "schedule": "Lightning has no pipelines",
        "virtual_stages": "Lightning has no pipelines",
        "cp": "Lightning has no context parallelism",
        "ep": "Lightning has no expert parallelism",
        "zero_stage": "strategies are DDP (0), DeepSpeed (1), SHARD_GRAD_OP (2), FULL_SHARD and HYBRID_SHARD (3)",
        "zero_replicas": "HYBRID_SHARD replicates ZeRO 3",
        "offload": "FSDP offloads everything, DeepSpeed the optimizer, and parameters with ZeRO 3",
        "precision": "a Trainer has one precision, and does not say how gradients are kept",
        "overlap_gather": "overlap_comm of DeepSpeed overlaps the gradients alone",
        "sequence_parallel": "a property of configure_model",
        "overlap": "a property of configure_model",
    },
    stack_of=_stack,
    rules=(TargetRule(_world), TargetRule(processes), *OWN_RULES, *LITGPT_RULES),
)
