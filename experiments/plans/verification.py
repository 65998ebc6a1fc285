"""What does it cost to verify a capture, beside the capture itself, and how exactly do graph and module agree?

    python -m experiments.plans.verification [--family llama ...] [--rounds 3] [--json FILE]

Small models of several families, built from a config with random weights, captured and verified as `parallelize` does
without its caches. `capture s` and `verify s` are medians of processor time; `size` is what was run; `error` is the
largest difference of a gradient, relative to its largest element (of gradients that are zero but for rounding, to 1e-4
of the largest element of all). Families of published sizes have no values, and fewer layers of them are verified: the
time includes capturing these.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch import nn

from autoplan.capture.export import capture
from autoplan.errors import CaptureError
from autoplan.verify import check
from autoplan.verify.check import LIMIT_S, choose_sizes, verify_whole
from autoplan.verify.one_device import compile_one_device, load_stage
from autoplan.verify.runs import VerifyTask, copies_of, run_graph, run_module
from autoplan.verify.sample import draw_batch
from autoplan.verify.shallow import verify_shallow
from experiments.shared.measure import describe, environment, make_console, run_command, write_json

_SMALL: dict[str, Any] = dict(
    vocab_size=96, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=48,
    max_position_embeddings=2048,
)  # fmt: skip
_MOE = {**_SMALL, "num_key_value_heads": 4}


def _hf(name: str, settings: Mapping[str, Any]) -> nn.Module:
    import transformers

    head = {"T5": "ForConditionalGeneration"}.get(name, "ForCausalLM")
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, f"{name}{head}")(getattr(transformers, f"{name}Config")(**settings))
    return model


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: _hf("Llama", _SMALL),
    "mixtral": lambda: _hf("Mixtral", {**_MOE, "num_local_experts": 4}),
    "t5": lambda: _hf(
        "T5", {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
               "dropout_rate": 0.0, "decoder_start_token_id": 0}
    ),
    "deepseek-v3": lambda: _hf(
        "DeepseekV3", {**_MOE, "moe_intermediate_size": 24, "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
                       "num_experts_per_tok": 2, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 12,
                       "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 10}
    ),
    "megatron-bert": lambda: _hf(
        "MegatronBert", {**_SMALL, "is_decoder": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    ),
}  # fmt: skip
DEEP: dict[str, Callable[[], nn.Module]] = {
    "llama-7b": lambda: _hf("Llama", {}),
    "mixtral-8x7b": lambda: _hf("Mixtral", {}),
    "deepseek-v3-671b": lambda: _hf("DeepseekV3", {}),
}


@dataclass(frozen=True)
class Row:
    """One family."""

    family: str
    capture_s: float
    verify_s: float
    size: str
    error: float | None
    outcome: str


def _error(task: VerifyTask) -> tuple[str, float]:
    """Sizes that were run, and the largest relative difference of a gradient."""
    sizes, _ = choose_sizes(task, LIMIT_S)
    if sizes is None:
        return "", float("nan")
    tensors, batch = copies_of(task.model), draw_batch(task.graph, task.example, sizes)
    want = run_module(task, tensors, batch).gradients
    compiled = compile_one_device(task.graph)
    got = run_graph(task, load_stage(compiled.text), compiled, tensors, batch).gradients
    whole = max(float(g.abs().max()) for g in want.values())
    worst = max(float((got[n] - g).abs().max()) / max(float(g.abs().max()), 1e-4 * whole) for n, g in want.items())
    return ", ".join(f"{n}={v}" for n, v in sorted(sizes.items())), worst


def _measure(family: str, rounds: int) -> Row:
    deep = family in DEEP
    with torch.device("meta" if deep else "cpu"):
        model = (DEEP | FAMILIES)[family]()
    model.train()
    ids = torch.zeros(2, 2048, dtype=torch.long)
    example = {"input_ids": ids, "labels": ids}
    captures, verifies, said = [], [], ""
    for _ in range(rounds):
        begin = time.process_time()
        task = VerifyTask(model, capture(model, example), example)
        middle = time.process_time()
        try:
            outcome = verify_shallow(task, LIMIT_S) if deep else verify_whole(task)
            said = ("verified " if outcome.done else "not verified: ") + outcome.text
        except CaptureError as exc:
            said = f"wrong: {exc}".split(". The first value")[0]
        captures.append(middle - begin)
        verifies.append(time.process_time() - middle)
    size, error = ("", None) if deep or said.startswith("wrong") else _error(task)
    return Row(family, statistics.median(captures), statistics.median(verifies), size, error, said)


def main(
    family: Annotated[list[str] | None, typer.Option(help="families; all by default")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    json: Annotated[Path | None, typer.Option()] = None,
) -> None:
    """Measure and print a table."""
    warnings.filterwarnings("ignore")
    chosen = family or [*FAMILIES, *DEEP]
    unknown = [f for f in chosen if f not in FAMILIES | DEEP]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is not one of {', '.join(FAMILIES | DEEP)}")
    console = make_console()
    env = environment()
    console.print(describe(env))
    rows = [_measure(f, rounds) for f in chosen]
    table = Table("family", "capture s", "verify s", "size", "error", "outcome")
    for r in rows:
        error = "" if r.error is None else f"{r.error:.1e}"
        table.add_row(r.family, f"{r.capture_s:.2f}", f"{r.verify_s:.2f}", r.size, error, r.outcome)
    console.print(table)
    console.print(f"tolerance {check.TOLERANCE:g}")
    write_json(json, "verification", env, [asdict(r) for r in rows])


if __name__ == "__main__":
    run_command(main)
