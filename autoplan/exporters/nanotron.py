"""nanotron: the sections of its YAML file that a plan decides."""

from __future__ import annotations

from typing import Any

from autoplan.config.precision import GRADIENTS_16
from autoplan.config.recompute import FULL, NONE
from autoplan.exporters.launching import srun
from autoplan.exporters.record import (
    Document,
    Field,
    Target,
    TargetRule,
    Values,
    base_of,
    of_model,
    precision_word,
    run_number,
    same,
)
from autoplan.exporters.setup import Setup
from autoplan.exporters.syntax import Yaml

_P, _T, _C = "parallelism.", "tokens.", "model.model_config."
_ENGINES = {"1F1B": "1f1b", "GPipe": "afab"}
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def _write_engine(setup: Setup) -> Values:
    name = setup.config.schedule
    return {_P + "pp_engine": _ENGINES.get(name, "1f1b")}


def _read_engine(document: Document, found: Values) -> Values:
    known = {word: name for name, word in _ENGINES.items()}
    return {"schedule": document.word(_P + "pp_engine", known, "GPipe") if found["pp"] > 1 else "1F1B"}


def _write_tensor(setup: Setup) -> Values:
    scatter = setup.options.sequence_parallel
    overlapped = scatter and "tp" in setup.options.overlap and setup.config.tp > 1
    return {
        _P + "tp_mode": "REDUCE_SCATTER" if scatter else "ALL_REDUCE",
        _P + "tp_linear_async_communication": overlapped,
    }


def _read_tensor(document: Document, found: Values) -> Values:
    modes = {"reduce_scatter": True, "all_reduce": False}
    mode = document.get(_P + "tp_mode")
    scatter = modes[str(mode).lower()] if str(mode).lower() in modes else document.word(_P + "tp_mode", modes, False)
    return {
        "sequence_parallel": scatter or found["tp"] == 1,
        "overlap": ["tp"] if document.get(_P + "tp_linear_async_communication") else [],
    }


def _write_batch(setup: Setup) -> Values:
    c = setup.config
    return {_T + "micro_batch_size": c.micro_batch_size, _T + "batch_accumulation_per_replica": c.num_micro_batches}


def _read_batch(document: Document, found: Values) -> Values:
    micro, steps = document.count(_T + "micro_batch_size"), document.count(_T + "batch_accumulation_per_replica")
    batch = micro * steps * found["dp"]
    return {"micro_batch_size": micro, "num_micro_batches": steps, "global_batch_size": batch}


def _write_precision(setup: Setup) -> Values:
    wide = GRADIENTS_16 not in setup.precision
    dtype = _DTYPES.get(base_of(setup.precision), "bfloat16")
    return {"model.dtype": dtype, "optimizer.accumulate_grad_in_fp32": wide}


def _read_precision(document: Document, found: Values) -> Values:
    base = document.word("model.dtype", {word: name for name, word in _DTYPES.items()}, "fp32")
    wide = document.get("optimizer.accumulate_grad_in_fp32")
    return {"precision": precision_word(base, not (True if wide is None else wide))}


def _world(document: Document, found: Values) -> str | None:
    used, devices = 1, document.task.num_devices
    for name in ("dp", "tp", "pp", "cp"):
        used *= found[name]
    if not devices or used == devices:
        return None
    near = max(1, devices // (used // found["dp"]))
    return f"dp x tp x pp x cp = {used}, but there are {devices} devices; nearest: parallelism.dp={near}"


def _sections(setup: Setup) -> dict[str, Any]:
    c = setup.config
    return {"optimizer.zero_stage": c.zero_stage if c.zero_stage <= 1 else 1}


def _launch(setup: Setup, file: str, year: float) -> list[str]:
    *head, line = srun(setup, ["run_train.py", "--config-file", file])
    return [*head, f"CUDA_DEVICE_MAX_CONNECTIONS=1 {line}"]


NANOTRON = Target(
    name="nanotron",
    about="the sections parallelism, tokens, optimizer and model of its YAML file",
    stack="nanotron",
    files=((0.0, Yaml()),),
    fields=(
        same(_P + "dp", "dp", always=True),
        same(_P + "tp", "tp", always=True),
        same(_P + "pp", "pp", always=True),
        same(_P + "context_parallel_size", "cp"),
        Field(("schedule",), _write_engine, _read_engine),
        Field(("sequence_parallel", "overlap"), _write_tensor, _read_tensor),
        Field(
            ("recompute",),
            lambda s: {_P + "recompute_layer": s.any_recompute != NONE},
            lambda d, found: {"recompute": FULL if d.get(_P + "recompute_layer") else NONE},
        ),
        run_number(_T + "sequence_length", "seq_len"),
        Field(("micro_batch_size", "num_micro_batches", "global_batch_size"), _write_batch, _read_batch),
        Field(("zero_stage",), _sections, lambda d, found: {"zero_stage": d.count("optimizer.zero_stage", 0)}),
        Field(("precision",), _write_precision, _read_precision),
    ),
    marks=(_P + "dp", _P + "tp"),
    launch=_launch,
    elsewhere={"attention": "the model"},
    cannot={
        "ep": "its mesh is tp x cp x dp x pp = all devices, without room for expert_parallel_size",
        "etp": "experts are split as tp",
        "schedule": "pp_engine is 1f1b or afab",
        "virtual_stages": "a rank holds one stage",
        "stages": "nanotron cuts stages by its own estimate of cost",
        "zero_stage": "optimizer.zero_stage is 0 or 1",
        "zero_replicas": "ZeRO shards over all of dp",
        "context_method": "a setting of the model's attention",
        "offload": "nanotron keeps everything on the device",
        "precision": "model.dtype is bfloat16, float16 or float32",
        "recompute": "recompute_layer is for all layers",
        "mode": "nanotron runs PyTorch modules one by one",
    },
    rules=(
        TargetRule(_world),
        of_model("decoder_layers", _C + "num_hidden_layers"),
        of_model("hidden_size", _C + "hidden_size"),
        of_model("num_heads", _C + "num_attention_heads"),
    ),
)
