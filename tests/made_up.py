"""Made-up published rows: a small Llama on two nodes with everything stated, and what differs from it."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from experiments.published.rows import Shapes, interpret
from experiments.published.table import COLUMNS, Row

# a small Llama on one node, everything stated
LLAMA = {
    "id": "a",
    "campaign": "made-up",
    "source": "NVIDIA/Megatron-LM",
    "trust": "A",
    "model": "some",
    "params_b": "",
    "layers": "16",
    "hidden": "2048",
    "ffn_hidden": "8192",
    "heads": "32",
    "kv_heads": "8",
    "vocab": "128256",
    "seq_len": "4096",
    "gpu": "H100",
    "gpu_mem_gb": "80",
    "n_gpus": "16",
    "gpus_per_node": "8",
    "internode": "IB 400 Gb/s per GPU",
    "tp": "1",
    "pp": "1",
    "vpp": "1",
    "dp": "16",
    "cp": "1",
    "zero_stage": "1",
    "micro_batch": "1",
    "global_batch": "64",
    "recompute": "none",
    "precision": "BF16",
    "step_time_s": "0.5",
}
QWEN = {
    "layers": "48",
    "hidden": "2048",
    "ffn_hidden": "6144",
    "kv_heads": "4",
    "vocab": "151936",
    "moe_experts": "128",
    "moe_topk": "8",
    "params_b": "30.5",
    "notes": "moe_ffn=768 shared_ffn=0 first_dense_layers=0",
}


def row(line: int = 2, **fields: str) -> Row:
    return Row(line, {c: {**LLAMA, **fields}.get(c, "") for c in COLUMNS})


def case_of(**fields: str) -> Any:
    r = row(**fields)
    return interpret(r, Shapes([r]))


def write_csv(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows({c: {**LLAMA, **r}.get(c, "") for c in COLUMNS} for r in rows)
    return path
