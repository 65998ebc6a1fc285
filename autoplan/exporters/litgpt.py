"""litgpt of Lightning: its YAML files of pre-training and fine-tuning, read as what they make of Lightning's Fabric.

What a command of litgpt does is data here, as of litgpt/pretrain.py and litgpt/finetune of August 2026: on several
devices FSDP shards inside of nodes (`pretrain`) or over all devices (`finetune_full`), and `fully_shard` does so beside
adapters (`finetune_lora`). Layers are checkpointed in fine-tuning on several devices, and compiled in pre-training.
Gradients are sent in the last micro-batch. A file says which command it is for by the fields that it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoplan.config.adapters import Adapters
from autoplan.exporters.record import Document, Recognised, TargetRule, Values
from autoplan.exporters.syntax import Yaml
from autoplan.exporters.trainer_kinds import ADAPTERS, LENGTH

LITGPT, _MICRO, _BATCH, _LEN = "own.litgpt", "own.micro_batch_size", "own.global_batch_size", "own.seq_len"
_OPTIMIZER, _HEAD = "own.optimizer", "own.lora_head"


@dataclass(frozen=True)
class _Command:
    """A command of litgpt: the fields that only its files have, its defaults, and what it makes of several devices."""

    marks: tuple[str, ...]
    micro: int
    batch: int
    strategy: Mapping[str, Any]
    recompute: str
    mode: str = "eager"


_FSDP = {"strategy": "FSDPStrategy"}
_COMMANDS: Mapping[str, _Command] = {  # the first one that has a field of the file counts
    "finetune_lora": _Command(
        ("lora_r", "lora_query", "lora_value"), 1, 16, {"strategy": "ModelParallelStrategy"}, "full"
    ),
    "finetune_full": _Command(("checkpoint_dir",), 1, 16, _FSDP, "full"),
    "pretrain": _Command(
        ("model_name", "model_config", "initial_checkpoint_dir", "tokenizer_dir"),
        *(4, 512, {**_FSDP, "strategy.sharding_strategy": "HYBRID_SHARD"}, "none", "compiled"),
    ),
}
# Fields of adapters -> layers, and whether they have one where nothing is said
_ADAPTED: Mapping[str, tuple[tuple[str, ...], bool]] = {
    "lora_query": (("q_proj",), True),
    "lora_key": (("k_proj",), False),
    "lora_value": (("v_proj",), True),
    "lora_projection": (("o_proj",), False),
    "lora_mlp": (("gate_proj", "up_proj", "down_proj"), False),
}
_TAKEN = ("devices", "num_nodes", "precision", "lora_r", "lora_head", "quantize")
_IDLE = (  # sections and fields that change neither time nor memory
    *("data", "eval", "log", "model_config", "model_name", "checkpoint_dir", "initial_checkpoint_dir", "out_dir"),
    *("tokenizer_dir", "logger_name", "seed", "resume", "access_token", "lora_alpha", "lora_dropout", "train"),
    "optimizer",
)


class LitgptYaml(Yaml):
    """A YAML file of litgpt, by the paths of Lightning's Trainer and, for what that does not have, below `own.`."""

    def read(self, text: str, where: str) -> dict[str, Any]:
        """Return the values by path; none for a file of something else.

        Raises: Recognised for frozen weights in 8 bits, and for adapters that are no products of low rank.
        """
        stated = super().read(text, where)
        values = {path: value for path, value in stated.items() if value not in (None, {})}
        command = next((name for name, c in _COMMANDS.items() if any(mark in values for mark in c.marks)), None)
        trains = any(path in values for path in ("train.micro_batch_size", "train.global_batch_size"))
        if command is None or not trains or not any(path in values for path in ("data.class_path", "eval.max_iters")):
            return {}
        if command == "finetune_full" and "quantize" in stated:  # only commands with frozen weights have it
            raise Recognised(f"{where} is of finetune_adapter, which is not priced; nearest: a file of finetune_lora")
        c = _COMMANDS[command]
        out: dict[str, Any] = {LITGPT: command, "precision": values.get("precision", "bf16-mixed")}
        out |= {_MICRO: values.get("train.micro_batch_size", c.micro)}
        out |= {_BATCH: values.get("train.global_batch_size", c.batch)}
        out |= _devices(command, values)
        if "train.max_seq_length" in values:
            out[_LEN if command == "pretrain" else LENGTH] = values["train.max_seq_length"]
        if command == "finetune_lora":
            out[ADAPTERS] = _adapters(values, where)
        out[_OPTIMIZER] = str(values.get("optimizer.class_path", values.get("optimizer", ""))).rpartition(".")[2]
        out[_HEAD] = values.get("lora_head", False)
        return out | {path: value for path, value in values.items() if not _is_known(path)}


def _devices(command: str, values: Values) -> dict[str, Any]:
    """Return the strategy of a command, with the devices and nodes that it states; one device has none."""
    usual = "auto" if command == "pretrain" else 1
    if values.get("devices", usual) in (1, "1") and values.get("num_nodes", 1) == 1:
        return {"strategy": "auto", **({"num_nodes": 1} if "num_nodes" in values else {}), "devices": 1}
    stated = {name: values[name] for name in ("devices", "num_nodes") if name in values}
    return {**_COMMANDS[command].strategy, **stated}


def _is_known(path: str) -> bool:
    return path.partition(".")[0] in _IDLE or path in _TAKEN or path in _ADAPTED


def _adapters(values: Values, where: str) -> str:
    quantize = str(values.get("quantize", "")).removeprefix("bnb.").partition("-")[0]
    if quantize not in ("", "nf4", "fp4"):
        raise Recognised(f"{where}: quantize={values['quantize']} is not priced; nearest: bnb.nf4")
    names = [name for path, (layers, usual) in _ADAPTED.items() if values.get(path, usual) for name in layers]
    return str(Adapters(int(values.get("lora_r", 8)), tuple(names), bool(quantize)))


def is_of_litgpt(document: Document) -> bool:
    """Return True if a file is one of litgpt."""
    return document.has(LITGPT)


def read_litgpt(document: Document, found: Values) -> Values:
    """Return what a command of litgpt makes of its file; nothing for other files."""
    if not is_of_litgpt(document):
        return {}
    command, dp = _COMMANDS[str(document.get(LITGPT))], found.get("dp", 0)
    shards = document.get("strategy") != "auto" and dp != 1
    micro, batch = document.count(_MICRO), document.count(_BATCH)
    out: dict[str, Any] = {"micro_batch_size": micro, "mode": command.mode, "attention": "flash2"}
    out |= {"recompute": command.recompute if shards else "none", "reruns": "needed", "reduce_once": True}
    if not shards or str(document.get("strategy")) == "ModelParallelStrategy":
        out |= {"zero_stage": 3 if shards else 0, "zero_replicas": 1}
    if dp:
        steps = max(1, batch // dp // micro)
        out |= {"num_micro_batches": steps, "global_batch_size": steps * micro * dp}
    return out | ({"seq_len": document.count(_LEN)} if document.has(_LEN) else {})


def _too_few(document: Document, found: Values) -> str | None:
    if not is_of_litgpt(document) or "dp" not in found:
        return None
    least, batch = found["dp"] * document.count(_MICRO), document.count(_BATCH)
    if batch >= least:
        return None
    return f"train.global_batch_size={batch} is less than a micro-batch of every device; nearest: {least}"


def _divides(document: Document, found: Values) -> str | None:
    if not is_of_litgpt(document) or "global_batch_size" not in found:
        return None
    batch, made = document.count(_BATCH), found["global_batch_size"]
    if batch <= made:
        return None
    return f"train.global_batch_size={batch} is {made} in whole micro-batches of every device, which is priced"


def _unpriced(document: Document, found: Values) -> str | None:
    if not is_of_litgpt(document):
        return None
    kind = document.get(_OPTIMIZER)
    listed = [f"optimizer {kind} (the state of AdamW is priced)"] if kind not in ("", "AdamW", "Adam") else []
    listed += ["lora_head (an adapter of the head)"] if document.get(_HEAD) else []
    return f"not priced: {', '.join(listed)}" if listed else None


LITGPT_RULES = (TargetRule(_too_few), TargetRule(_divides, warns=True), TargetRule(_unpriced, warns=True))
