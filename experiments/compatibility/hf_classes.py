"""Every Hugging Face class that learns from tokens: is the captured program's loss the module's, or is it refused?

    python -m experiments.compatibility.hf_classes [--mappings causal seq2seq masked] [--only REGEX]
        [--write docs/hf_classes.md]

Each class of the installed transformers is built from its default config, made small, and captured; the program of one
device runs on one batch and is compared with the module: loss and every gradient. A class is one of

    equal        loss and gradients are the module's
    refused      an AutoplanError, by name
    wrong        other numbers: a bug of autoplan
    crashed      another exception, no answer in time, a process that died: a bug of autoplan
    not run      transformers cannot build it from a small config, or its module does not learn from tokens alone

A class runs in a process of its own, forked from one that has imported everything, and is ended after `--timeout-s`.
Exits with an error if a class is wrong or crashed.
"""

from __future__ import annotations

import argparse
import inspect
import json
import multiprocessing
import os
import re
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import transformers
from transformers.models.auto import modeling_auto

from autoplan.api import plan_program
from autoplan.capture.export import capture
from autoplan.cost_models.hardware.cluster import Cluster, Device, Link
from autoplan.errors import AutoplanError
from autoplan.runtime.model import ParallelModel

MAPPINGS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING",
}
BATCH, SEQ, TARGET, VOCAB = 2, 16, 12, 96
MOST_PARAMETERS = 20_000_000
# (loss, gradients), relative; most models in float64 have parts in float32
TOLERANCES = {torch.float64: (1e-6, 1e-4), torch.float32: (1e-5, 2e-3)}
OUTCOMES = ("equal", "refused", "wrong", "crashed", "not run")

# Sizes of a small model, by what configs call them. Names that a config does not have are skipped.
HIDDEN, HEADS, LAYERS, INNER = 32, 4, 2, 48
_SIZES: dict[str, int] = {
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "src_vocab_size", "tgt_vocab_size"), VOCAB),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "d_embed", "embedding_size"), HIDDEN),
    **dict.fromkeys(("word_embed_proj_dim", "attention_hidden_size", "lru_width", "width", "n_embed"), HIDDEN),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"), LAYERS),
    **dict.fromkeys(("decoder_layers", "num_decoder_layers", "num_encoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), HEADS),
    **dict.fromkeys(("decoder_attention_heads", "mamba_n_heads", "linear_num_value_heads"), HEADS),
    **dict.fromkeys(("mamba_d_head", "mamba_d_state", "linear_key_head_dim", "linear_value_head_dim"), 16),
    "linear_num_key_heads": HEADS // 2,
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), HEADS // 2),
    **dict.fromkeys(("head_dim", "d_kv", "kv_channels", "attention_head_dim", "global_head_dim"), HIDDEN // HEADS),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "rotary_dim"), HIDDEN // HEADS),
    "qk_head_dim": 2 * HIDDEN // HEADS,
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner"), INNER),
    **dict.fromkeys(("inner_dim", "ffn_hidden_size", "hidden_dim", "mlp_dim", "block_ff_dim"), INNER),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), HIDDEN),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts"), 4
    ),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), HIDDEN // 2),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_source_positions"), 4 * SEQ
    ),
    **dict.fromkeys(("max_target_positions", "seq_length", "max_sequence_length"), 4 * SEQ),
    **dict.fromkeys(("sliding_window", "attention_window_size"), SEQ // 2),
    **dict.fromkeys(("image_size",), 16),
}
_TOKENS = re.compile(r"_token_(id|index)$|^(bos|eos|pad|sep|cls|mask|unk)_(id|idx|index)$")


@dataclass(frozen=True)
class Row:
    """What became of one class."""

    mapping: str
    name: str
    outcome: str
    why: str = ""
    loss: float | None = None
    error: float | None = None  # worst gradient, relative to its largest element
    seconds: float = 0.0


def small_values(config: Any, without: frozenset[str]) -> dict[str, Any]:
    """Values of a config's attributes that make the model small; those of its sub-configs under their names.

    Left out are the names in `without`; 'None' in it: sizes that are None by default are set, too.
    """
    out: dict[str, Any] = {}
    given = {k: v for k, v in config.to_dict().items() if k not in without}
    aliases = {k: v for k, v in getattr(config, "attribute_map", {}).items() if k not in given}
    layers = next((given[n] for n in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") if n in given), None)
    for name, value in given.items():
        if name in getattr(config, "sub_configs", {}):
            sub = getattr(config, name)
            out[name] = small_values(sub, without) if isinstance(sub, transformers.PreTrainedConfig) else value
        elif name in _SIZES and value is None and "None" in without:
            out[name] = _SIZES[name]
        elif name in _SIZES and isinstance(value, int) and not isinstance(value, bool):
            out[name] = min(value, _SIZES[name]) if value else value
        elif isinstance(value, float) and ("drop" in name or name.endswith(("pdrop", "jitter_noise"))):
            out[name] = 0.0
        elif _TOKENS.search(name) and isinstance(value, int) and value >= VOCAB:
            out[name] = 1
        elif isinstance(value, list) and layers is not None and len(value) == layers:
            kinds = list(dict.fromkeys(map(str, value)))
            out[name] = [v for i, v in enumerate(value) if str(v) not in list(map(str, value[:i]))][:LAYERS]
            out[name] = out[name] if len(kinds) > 1 else value[:LAYERS]
    for alias, name in aliases.items():
        if alias in _SIZES and name not in out and isinstance(given.get(name), int):
            out[name] = min(given[name], _SIZES[alias])
    return out


# Names of _SIZES that are left out, one set after the other, until the module runs.
_KV = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num")
_HEAD = ("head_dim", "d_kv", "kv_channels", "attention_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
VARIANTS = ((), _KV, _HEAD, (*_KV, *_HEAD), ("sliding_window",), ("None",))


def small_config(config_class: type, without: frozenset[str]) -> Any:
    """A config with small sizes, without those named in `without`: key-value heads in it are then as many as heads."""
    default = config_class()
    values = small_values(default, without)
    values |= {name: HEADS for name in _KV if name in without and isinstance(getattr(default, name, None), int)}
    config = config_class(**values)
    for name in ("pad_token_id", "decoder_start_token_id"):
        if getattr(config, name, None) is None:
            setattr(config, name, 0)
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "eager"  # the others know no float64
    return config


def build(model_class: Any, config_class: Any, attention: str | None, without: frozenset[str]) -> torch.nn.Module:
    """The module with values that make attention matter: fan-in scaled weights, biases that are not zero."""
    config = small_config(getattr(model_class, "config_class", None) or config_class, without)
    if hasattr(config, "is_decoder") and model_class.__name__.endswith(("CausalLM", "LMHeadModel")):
        config.is_decoder = True
    if attention is not None:
        config._attn_implementation = attention
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size:,} parameters: no small config found")
    torch.manual_seed(0)
    model: torch.nn.Module = model_class(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1 and p.is_floating_point():
                p.normal_(0, p.shape[-1] ** -0.5)
            elif p.is_floating_point():
                p.add_(torch.randn_like(p) * 0.1)
    model.tie_weights()
    return model.train()


def batch_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Tokens that are no special ones, and labels (a source and a target for encoder-decoders)."""
    generator = torch.Generator().manual_seed(1)
    config = model.config.get_text_config()
    special = {v for k, v in config.to_dict().items() if _TOKENS.search(k) and isinstance(v, int)}
    size = int(getattr(config, "vocab_size", VOCAB))
    allowed = torch.tensor([i for i in range(min(size, VOCAB)) if i not in special])
    ids = allowed[torch.randint(len(allowed), (BATCH, SEQ), generator=generator)]
    labels = allowed[torch.randint(len(allowed), (BATCH, SEQ), generator=generator)]
    two = getattr(model.config, "is_encoder_decoder", False)
    return {"input_ids": ids, "labels": labels[:, :TARGET].contiguous() if two else labels}


def eager(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the module itself."""
    model.zero_grad()
    takes = inspect.signature(model.forward).parameters
    loss = model(**batch, **({"use_cache": False} if "use_cache" in takes else {})).loss
    loss.backward()
    return float(loss.detach()), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@dataclass(frozen=True)
class Reference:
    """A module that runs, and what it computes."""

    model: torch.nn.Module
    batch: Mapping[str, torch.Tensor]
    loss: float
    gradients: Mapping[str, torch.Tensor]
    dtype: torch.dtype


def reference(model_class: Any, config_class: Any, attention: str | None) -> Reference:
    """The first variant that builds and runs, in float64 if it can. Raises what the first variant raised."""
    failure: Exception | None = None
    for without in map(frozenset, VARIANTS):
        for dtype in TOLERANCES:
            try:
                model = build(model_class, config_class, attention, without).to(dtype)
                batch = batch_of(model)
                return Reference(model, batch, *eager(model, batch), dtype)
            except Exception as exc:  # whatever transformers says
                failure = failure or exc
    assert failure is not None
    raise failure


def program(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the captured program on one device."""
    graph = capture(model, batch)
    device = Device("made up", 1e12, 1e9, 1 << 36, "made up")
    cluster = Cluster(1, 1, device, Link(0.0, 1e9, "made up"), "cpu")
    lengths = [x.shape[1] for x in batch.values()]
    target = lengths[1] if lengths[1] != lengths[0] else None
    pins = {"num_micro_batches": 1, "recompute": "none"}
    _, compiled = plan_program(graph, cluster, pins, BATCH, lengths[0], target_len=target)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    pm = ParallelModel(
        compiled.spec,
        compiled.sources,
        dict(model.named_parameters()),
        dict(model.named_buffers()),
        num_micro_batches=1,
    )
    loss = float(pm.step(dict(batch)))
    return loss, {n: g.clone() for n, g in pm.gradients().items()}


def examine(model_class: type, config_class: type, attention: str | None) -> tuple[str, str, Any, Any]:
    """(outcome, why, loss, worst gradient error) of one class."""
    try:
        of = reference(model_class, config_class, attention)
        again, _ = eager(of.model, of.batch)
    except Exception as exc:  # whatever transformers says
        return "not run", _short(exc), None, None
    want_loss, want = of.loss, of.gradients
    if again != want_loss:
        return "not run", f"its loss is random: {want_loss:.6f}, then {again:.6f}", None, None
    of.model.zero_grad()
    frozen = [p.requires_grad_(False) for n, p in of.model.named_parameters() if n not in want]
    note = f"{len(frozen)} parameters that get no gradient are frozen" if frozen else ""
    try:
        loss, got = program(of.model, of.batch)
    except AutoplanError as exc:
        return "refused", _short(exc), want_loss, None
    except Exception as exc:
        where = [f for f in traceback.extract_tb(exc.__traceback__) if "/autoplan/" in f.filename][-1:]
        at = "".join(f" ({Path(f.filename).name}:{f.lineno})" for f in where)
        return "crashed", _short(exc) + at, want_loss, None
    loss_tolerance, gradient_tolerance = TOLERANCES[of.dtype]
    if not abs(loss - want_loss) <= loss_tolerance * abs(want_loss):
        return "wrong", f"loss {loss:.6f} instead of {want_loss:.6f}", want_loss, None
    worst, name = 0.0, ""
    for key, grad in want.items():
        if key not in got:
            if float(grad.abs().max()) > 0:
                return "wrong", f"no gradient of {key}", want_loss, None
            continue
        error = float((got[key].double() - grad.double()).abs().max() / (grad.double().abs().max() + 1e-12))
        worst, name = max((worst, name), (error, key))
    if not worst <= gradient_tolerance:
        return "wrong", f"gradient of {name} off by {worst:.1e}", want_loss, worst
    return "equal", note, want_loss, worst


def _short(exc: BaseException) -> str:
    text = " ".join(str(exc).split())
    text = text if isinstance(exc, AutoplanError) else f"{type(exc).__name__}: {text}"
    return text if len(text) <= 220 else text[:217] + "..."


def _child(pipe: Connection, model_name: str, config_name: str, attention: str | None) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    warnings.simplefilter("ignore")
    try:
        found = examine(getattr(transformers, model_name), getattr(transformers, config_name), attention)
    except BaseException as exc:
        found = ("crashed", _short(exc), None, None)
    pipe.send(found)
    pipe.close()
    os._exit(0)


def run_all(
    todo: Sequence[tuple[str, str, str]],
    workers: int,
    timeout_s: float,
    attention: str | None,
    done: Callable[[Row], None],
) -> None:
    """Calls `done` with the row of every class as soon as it is known; at most `workers` processes at a time."""
    context = multiprocessing.get_context("fork")
    waiting, running = list(todo)[::-1], {}
    while waiting or running:
        while waiting and len(running) < workers:
            task = waiting.pop()
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(there, *task[1:], attention), daemon=True)
            process.start()
            there.close()
            running[here] = (task, process, time.monotonic())
        for pipe in cast(list[Connection], wait(list(running), timeout=0.5)):
            task, process, start = running.pop(pipe)
            try:
                found = pipe.recv()
            except EOFError:
                found = ("crashed", "its process died", None, None)
            process.join()
            done(Row(task[0], task[1], *found, seconds=time.monotonic() - start))
        for pipe, (task, process, start) in list(running.items()):
            if time.monotonic() - start > timeout_s:
                del running[pipe]
                process.kill()
                process.join()
                done(Row(task[0], task[1], "crashed", f"no answer in {timeout_s:g} s", seconds=timeout_s))


def _progress(row: Row) -> None:
    print(f"{row.outcome:8s} {row.name:45s} {row.seconds:5.1f} s  {row.why}", flush=True)


def classes(mappings: Sequence[str], only: str) -> list[tuple[str, str, str]]:
    """(mapping, model class, config class), every model class once."""
    found: dict[str, tuple[str, str, str]] = {}
    for mapping in mappings:
        names = getattr(modeling_auto, f"{MAPPINGS[mapping]}_NAMES")
        for kind, model in names.items():
            config = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES.get(kind)
            if config is not None and re.search(only, model):
                found.setdefault(model, (mapping, model, config))
    return list(found.values())


def as_markdown(rows: Sequence[Row]) -> str:
    """The table of docs/hf_classes.md."""
    lines = [
        "# Hugging Face classes",
        "",
        "Generated by `python -m experiments.compatibility.hf_classes --write docs/hf_classes.md`: which classes of "
        f"transformers {transformers.__version__}, built",
        f"small from their default config, compute in the captured program (one process, torch {torch.__version__}, "
        "CPU) the loss and the gradients of the",
        "module (equal), which are refused, and why. `not run`: transformers does not build them small, or they do not "
        "learn from tokens alone.",
        "",
        "| mapping | " + " | ".join(OUTCOMES) + " |",
        "|---|" + "---|" * len(OUTCOMES),
    ]
    for mapping in dict.fromkeys(r.mapping for r in rows):
        counts = Counter(r.outcome for r in rows if r.mapping == mapping)
        lines.append(f"| {mapping} | " + " | ".join(str(counts[o]) for o in OUTCOMES) + " |")
    absent = len({c[1] for c in classes(list(MAPPINGS), "")} - {r.name for r in rows})
    if absent:
        lines += ["", f"{absent} further classes of the three mappings were not tried in this run."]
    lines += ["", "| class | mapping | outcome | why |", "|---|---|---|---|"]
    for row in sorted(rows, key=lambda r: (list(MAPPINGS).index(r.mapping), r.name)):
        why = row.why.replace("|", "\\|").replace("<", "&lt;")
        lines.append(f"| {row.name} | {row.mapping} | {row.outcome} | {why} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mappings", nargs="+", choices=list(MAPPINGS), default=list(MAPPINGS))
    parser.add_argument("--only", default="", help="a regular expression over class names")
    parser.add_argument("--attention", choices=("eager", "sdpa"), help="attention of the module; default: its own")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--timeout-s", type=float, default=90.0, help="of one class")
    parser.add_argument("--json", type=Path, help="where to write the rows; classes in it already are not run again")
    parser.add_argument("--write", type=Path, help="where to write the table")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    chosen = classes(args.mappings, args.only)
    known = json.loads(args.json.read_text()) if args.json and args.json.exists() else []
    found = {row.name: row for row in (Row(**fields) for fields in known)}

    def done(row: Row) -> None:
        found[row.name] = row
        _progress(row)
        if args.json:
            args.json.write_text(json.dumps([asdict(r) for r in found.values()], indent=1))

    run_all([c for c in chosen if c[1] not in found], args.workers, args.timeout_s, args.attention, done)
    rows = [found[c[1]] for c in chosen]
    counts = Counter(r.outcome for r in rows)
    print(f"{len(rows)} classes: " + ", ".join(f"{counts[o]} {o}" for o in OUTCOMES))
    if args.write:
        args.write.write_text(as_markdown(rows))
    return 1 if counts["wrong"] or counts["crashed"] else 0


if __name__ == "__main__":
    sys.exit(main())
