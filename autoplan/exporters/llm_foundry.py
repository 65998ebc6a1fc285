"""llm-foundry of MosaicML, which trains with Composer: its YAML file."""

from __future__ import annotations

from typing import Any

from autoplan.config.adapters import Adapters
from autoplan.config.parallel import Attention, FusedLoss, Mode
from autoplan.config.recompute import FULL, NONE
from autoplan.errors import PinError
from autoplan.exporters.record import (
    Document,
    Field,
    Target,
    TargetRule,
    Values,
    base_of,
    constant,
    data_parallel,
    derived,
    micro_batches,
    of_model,
    precision_word,
    run_number,
)
from autoplan.exporters.setup import Setup
from autoplan.exporters.sharding_words import SHARDING_CANNOT, read_hybrid, read_strategy, strategy_word
from autoplan.exporters.syntax import ReferringYaml

_F, _MICRO, _BATCH = "fsdp_config.", "device_train_microbatch_size", "global_train_batch_size"
_STRATEGY, _REPLICAS = f"{_F}sharding_strategy", f"{_F}data_parallel_replicate_degree"
_WORDS = {"amp_bf16": "bf16", "amp_fp16": "fp16", "amp_fp8": "fp8", "fp32": "fp32"}
_REENTRANT, _PEFT = f"{_F}activation_checkpointing_reentrant", "model.peft_config"


def _write_sharding(setup: Setup) -> Values:
    c = setup.config
    out: dict[str, Any] = {_STRATEGY: strategy_word(setup)}
    if c.zero_replicas > 1 and c.zero_stage:
        out[_REPLICAS] = c.zero_replicas
    return out | ({f"{_F}cpu_offload": True} if c.offload == ("parameters",) else {})


def _read_sharding(document: Document, found: Values) -> Values:
    """Without `fsdp_config` the model is in DistributedDataParallel."""
    usual = "FULL_SHARD" if document.has("fsdp_config") else "NO_SHARD"
    return read_strategy(document, _STRATEGY, usual)


def _read_batch(document: Document, found: Values) -> Values:
    micro, batch = document.get(_MICRO), document.count(_BATCH) if document.has(_BATCH) else 0
    out = {"global_batch_size": batch} if batch else {}
    if micro in (None, "auto"):
        return out
    if isinstance(micro, float) and not micro.is_integer():
        raise PinError(
            f"{_MICRO}={micro} is a part of a sequence, which is not priced; nearest: 1", ("micro_batch_size",)
        )
    size = int(micro) if isinstance(micro, float) else document.count(_MICRO)
    here = batch // found["dp"] if "dp" in found else 0  # a micro-batch is no larger than a device's part of the batch
    return {**out, "micro_batch_size": min(size, here) if here else size}


def _write_recompute(setup: Setup) -> Values:
    out: dict[str, Any] = {f"{_F}activation_checkpointing": setup.any_recompute != NONE}
    whole = str(setup.options.reruns_in(setup.mode)) == "whole"
    return out | ({_REENTRANT: whole} if setup.any_recompute != NONE else {})


def _read_recompute(document: Document, found: Values) -> Values:
    if not document.get(f"{_F}activation_checkpointing"):
        return {"recompute": NONE}
    return {"recompute": FULL, "reruns": "needed" if document.get(_REENTRANT) is False else "whole"}


def _write_precision(setup: Setup) -> Values:
    word = {base: word for word, base in _WORDS.items()}.get(base_of(setup.precision), "amp_bf16")
    return {"precision": word}


def _read_precision(document: Document, found: Values) -> Values:
    return {"precision": precision_word(document.word("precision", _WORDS, "bf16"), False)}


def _hugging_face(document: Document) -> bool:
    return str(document.get("model.name") or "").startswith("hf_")


def _write_attention(setup: Setup) -> Values:
    """What MPT does by itself is not written: other models have no such names."""
    unfused = setup.options.attention_in(setup.mode) is Attention.UNFUSED
    return {"model.attn_config.attn_impl": "torch"} if unfused else {}


def _read_attention(document: Document, found: Values) -> Values:
    given = document.get("model.attn_config.attn_impl")
    if given is None:
        return {"attention": "flash2"}  # MPT's default, and PyTorch's kernel of Hugging Face's models
    return {"attention": document.word("model.attn_config.attn_impl", {"flash": "flash2", "torch": "unfused"})}


_LOSSES = {FusedLoss.FLASH: "fused_crossentropy", FusedLoss.TORCH: "torch_crossentropy"}


def _read_loss(document: Document, found: Values) -> Values:
    """MPT's loss is one kernel unless it says otherwise; that of Hugging Face's models is PyTorch's."""
    given = document.get("model.loss_fn")
    if given is None:
        return {"fused_loss": str(FusedLoss.TORCH if _hugging_face(document) else FusedLoss.FLASH)}
    return {"fused_loss": document.word("model.loss_fn", {word: str(kind) for kind, word in _LOSSES.items()})}


def _read_adapters(document: Document, found: Values) -> Values:
    if not document.has(_PEFT) or document.get(f"{_PEFT}.r") is None:
        return {}
    kind = str(document.get(f"{_PEFT}.peft_type") or "LORA").upper()
    names = document.get(f"{_PEFT}.target_modules") or []
    if kind != "LORA" or not isinstance(names, list | str):
        raise PinError(f"{_PEFT}.peft_type={kind} is not priced; nearest: LORA with names of layers", ("adapters",))
    targets = (names,) if isinstance(names, str) else tuple(map(str, names))
    return {"adapters": str(Adapters(document.count(f"{_PEFT}.r", 8), targets, False))}


def _unpriced(document: Document, found: Values) -> str | None:
    kind = str(document.get("optimizer.name") or "decoupled_adamw")
    listed = [] if "adam" in kind else [f"optimizer.name={kind} (the state of AdamW is priced)"]
    words = {
        f"{_F}activation_cpu_offload": "kept inputs go to the host",
        f"{_F}te_checkpoint_wrapper": "another checkpoint",
        f"{_F}keep_low_precision_grads": "gradients in 16 bits",
        "model.ffn_config.ffn_type": "experts are those of the model",
    }
    listed += [f"{path}={document.get(path)} ({why})" for path, why in words.items() if document.get(path)]
    return f"not priced: {', '.join(listed)}" if listed else None


def _has_micro(document: Document, found: Values) -> str | None:
    if document.get(_MICRO) != "auto" or found.get("micro_batch_size"):
        return None
    return f"{_MICRO}=auto is found by trying; give --mbs"


def _launch(setup: Setup, file: str, year: float) -> list[str]:
    nodes, devices = max(1, setup.task.num_nodes), max(1, setup.task.devices_per_node)
    more = f" --world_size {nodes * devices} --node_rank $SLURM_NODEID --master_addr $HEAD_NODE" if nodes > 1 else ""
    return [f"composer --nproc {devices}{more} train.py {file}"]


LLM_FOUNDRY = Target(
    name="llm-foundry",
    about="values of the YAML file of llm-foundry's train.py",
    stack="composer",
    files=((0.0, ReferringYaml(inside="parameters")),),
    fields=(
        derived(data_parallel, "dp"),
        Field(("zero_stage",), _write_sharding, _read_sharding),
        derived(lambda d, found: read_hybrid(d, found, _STRATEGY, _REPLICAS), "zero_replicas"),
        derived(
            lambda d, found: {"offload": ("parameters",) if d.get(f"{_F}cpu_offload") else ()},
            "offload",
        ),
        Field(
            ("micro_batch_size", "global_batch_size"),
            lambda s: {_BATCH: s.global_batch_size, _MICRO: s.config.micro_batch_size},
            _read_batch,
        ),
        derived(micro_batches, "num_micro_batches"),
        run_number("max_seq_len", "seq_len"),
        Field(
            ("recompute", "reruns"),
            _write_recompute,
            _read_recompute,
        ),
        Field(("precision",), _write_precision, _read_precision),
        Field(("attention",), _write_attention, _read_attention),
        Field(
            ("fused_loss",),
            lambda s: {} if s.options.fused_loss is FusedLoss.FLASH else {"model.loss_fn": _LOSSES[FusedLoss.TORCH]},
            _read_loss,
        ),
        Field(
            ("mode",),
            lambda s: {"compile_config.mode": "default"} if s.mode is Mode.COMPILED else {},
            lambda d, found: {"mode": "compiled" if d.has("compile_config") else "eager"},
        ),
        Field(
            ("expandable_segments",),
            lambda s: {"expandable_segments": s.options.expandable_segments},
            lambda d, found: {"expandable_segments": d.get("expandable_segments") is not False},
        ),
        derived(_read_adapters, "adapters"),
        constant(f"{_F}mixed_precision", "PURE"),
    ),
    marks=(f"{_F}mixed_precision", _REENTRANT, "train_loader.name"),
    launch=_launch,
    cannot={
        **SHARDING_CANNOT,
        "zero_replicas": "HYBRID_SHARD replicates shards",
        "offload": "cpu_offload moves parameters, gradients and optimizer together",
        "attention": "attn_impl is flash or torch",
        "fused_loss": "loss_fn is fused_crossentropy or torch_crossentropy",
    },
    rules=(
        TargetRule(_has_micro),
        TargetRule(_unpriced, warns=True),
        of_model("decoder_layers", "model.n_layers"),
        of_model("hidden_size", "model.d_model"),
        of_model("num_heads", "model.n_heads"),
    ),
)
