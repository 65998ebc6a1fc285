"""The classes that transformers maps to a kind of model: is the captured program's loss the module's, or is it refused?

Each class of the installed transformers is built from its default config, made small, and captured; the program of one
device runs on one batch and is compared with the module: loss and every gradient. A class is one of

    equal        loss and gradients are the module's
    refused      an AutoplanError, by name
    wrong        other numbers: a bug of autoplan
    crashed      another exception, no answer in time, a process that died: a bug of autoplan
    not run      transformers cannot build it from a small config, or its module does not learn from such a batch alone

A class that is equal, and takes tokens, is then given padded batches (`padding`): for every set of inputs of
`padding.INPUTS` it is captured from one batch, and its program runs on batches of all ways to pad.
"""

from __future__ import annotations

import copy
import inspect
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers.models.auto import modeling_auto

from autoplan.api import plan_program
from autoplan.capture.export import capture
from autoplan.capture.frontend.buffers import all_buffers
from autoplan.capture.frontend.lengths import lengths_of
from autoplan.cost_models.hardware.cluster import Cluster, Device, Level
from autoplan.errors import AutoplanError
from autoplan.ir.graph import ModelGraph
from autoplan.runtime.model import ParallelModel
from experiments.compatibility import padding
from experiments.compatibility.one_by_one import CRASHED, EQUAL, NOT_RUN, REFUSED, WRONG, Row, Task, crash, short

MAPPINGS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "sequence": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
}
_CLASSIFIERS = ("image", "sequence")
BATCH, SEQ, TARGET, VOCAB, CLASSES = padding.SAMPLES, 16, 12, 96, 4
MOST_PARAMETERS = 20_000_000
# (loss, gradients), relative; most models in float64 have parts in float32
TOLERANCES = {torch.float64: (1e-6, 1e-4), torch.float32: (1e-5, 2e-3)}

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
    **dict.fromkeys(("n_group", "n_groups", "topk_group", "num_expert_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), HIDDEN // 2),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_source_positions"), 4 * SEQ
    ),
    **dict.fromkeys(("max_target_positions", "seq_length", "max_sequence_length"), 4 * SEQ),
    **dict.fromkeys(("sliding_window", "attention_window_size"), SEQ // 2),
    **dict.fromkeys(("image_size",), 32),
}
# Values of configs that belong together, or have no default, by `model_type`.
_OWN: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        **{"head_dim": 8, "num_key_value_heads": HEADS, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
        **{"n_group": 1, "topk_group": 1, "n_routed_experts": 4},
    },
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": HEADS, "mamba_d_head": 16},
    "gemma3n_text": {
        **{"num_kv_shared_layers": 0, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8},
        **{"layer_types": ["sliding_attention", "full_attention"], "activation_sparsity_pattern": [0.5, 0.0]},
        **{"laurel_rank": 8, "intermediate_size": INNER},
    },
    "gemma4_text": {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "position_embedding_type": "rope"},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lilt": {"hidden_size": 48},  # by 6 for the sides of boxes, too
    "luke": {"entity_vocab_size": VOCAB, "entity_emb_size": HIDDEN},
    "mistral4": {"num_key_value_heads": HEADS},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"attention_hidden_size": 2 * HIDDEN, "attention_head_dim": 16, "layers_block_type": ["mamba", "hybrid"]},
}
# Lists with one value per stage of a model of images: widths (scaled so that the first is HIDDEN), and layers.
_WIDTHS = ("hidden_sizes", "embed_dims", "encoder_hidden_sizes", "neck_hidden_sizes", "dims")
_DEPTHS = ("depths", "num_blocks_per_stage")
# What a config with such lists derives from them or gives per stage.
_STAGED = frozenset(
    ("num_layers", "num_hidden_layers", "num_stages", "embed_dim", "hidden_size", "num_attention_heads")
)
_TOKENS = re.compile(r"_token_(id|index)$|^(bos|eos|pad|sep|cls|mask|unk)_(id|idx|index)$")


def small_values(config: Any, without: frozenset[str]) -> dict[str, Any]:
    """Return values of a config's attributes that make the model small; those of its sub-configs under their names.

    Left out are the names in `without`; 'None' in it: sizes that are None by default are set, too.
    """
    out: dict[str, Any] = {}
    given = {k: v for k, v in config.to_dict().items() if k not in without}
    if any(name in given for name in _DEPTHS):
        given = {k: v for k, v in given.items() if k not in _STAGED | {"num_heads"}}
    aliases = {k: v for k, v in getattr(config, "attribute_map", {}).items() if k not in given}
    layers = next(filter(None, map(given.get, ("num_hidden_layers", "n_layer", "n_layers", "num_layers"))), None)
    for name, value in given.items():
        if name in getattr(config, "sub_configs", {}):
            sub = getattr(config, name)
            out[name] = small_values(sub, without) if isinstance(sub, transformers.PreTrainedConfig) else value
            continue
        is_list = isinstance(value, (list, tuple))
        small = _small_list(name, list(value), layers, without) if is_list else _small_value(name, value, without)
        out |= {} if small is None else {name: small}
    if isinstance(given.get("window_size"), int) and "image_size" in given:  # no stage may be smaller than a window
        out |= {"window_size": 2, "image_size": 64}
    if {"expand", "num_heads", "head_dim"} <= out.keys() | {"expand"} & given.keys():  # heads of an expanded width
        out |= {"head_dim": out["hidden_size"] * given["expand"] // out["num_heads"]}
    for alias, name in aliases.items():
        if alias in _SIZES and name not in out and isinstance(given.get(name), int):
            out[name] = min(given[name], _SIZES[alias])
    return out | _OWN.get(config.model_type, {})


def _small_value(name: str, value: Any, without: frozenset[str]) -> Any:
    """Return a small value of an attribute; None to leave it as it is."""
    if name in _SIZES and value is None:
        return _SIZES[name] if "None" in without else None
    if name in _SIZES and isinstance(value, int) and not isinstance(value, bool):
        return min(value, _SIZES[name])
    if isinstance(value, float) and ("drop" in name or name.endswith(("pdrop", "jitter_noise"))):
        return 0.0
    return 1 if _TOKENS.search(name) and isinstance(value, int) and value >= VOCAB else None


def _small_list(name: str, value: list[Any], layers: int | None, without: frozenset[str]) -> list[Any] | None:
    """Return a small list; None to leave it as it is. `layers`: of the config, which may have one value for each."""
    if name in _WIDTHS and "widths" not in without:
        return [v * HIDDEN // value[0] for v in value]
    if name in _DEPTHS:
        return [min(v, 1) for v in value]
    if "drop" in name and all(isinstance(v, float) for v in value):
        return [0.0] * len(value)
    if layers is None or len(value) != layers:
        return None
    kinds = [str(v) for v in value]
    first = [v for i, v in enumerate(value) if kinds[i] not in kinds[:i]]
    return first[:LAYERS] if len(first) > 1 else value[:LAYERS]


# Names of _SIZES that are left out, one set after the other, until the module runs.
_KV = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num")
_HEAD = ("head_dim", "d_kv", "kv_channels", "attention_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
VARIANTS = ((), _KV, _HEAD, (*_KV, *_HEAD), ("sliding_window",), ("None",), ("widths",))


def small_config(config_class: type, without: frozenset[str]) -> Any:
    """A config with small sizes, without those named in `without`: key-value heads in it are then as many as heads."""
    default = config_class()
    values = small_values(default, without)
    values |= {name: HEADS for name in _KV if name in without and isinstance(getattr(default, name, None), int)}
    config = config_class(**values)
    for of in {id(c): c for c in (config, config.get_text_config())}.values():
        for name in ("pad_token_id", "decoder_start_token_id"):
            if getattr(of, name, None) is None:
                setattr(of, name, 0)
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "eager"  # the others know no float64
    return config


@dataclass(frozen=True)
class Class:
    """A class of transformers. `attention`: the implementation to use; None: its default."""

    mapping: str
    name: str
    config_name: str
    attention: str | None = None

    @property
    def model_class(self) -> Any:
        return getattr(transformers, self.name)

    @property
    def config_class(self) -> Any:
        return getattr(self.model_class, "config_class", None) or getattr(transformers, self.config_name)


def build(of: Class, without: frozenset[str]) -> torch.nn.Module:
    """Return the module with values that make attention matter: fan-in scaled weights, biases that are not zero."""
    model_class, config = of.model_class, small_config(of.config_class, without)
    if of.mapping in _CLASSIFIERS:
        config.num_labels = CLASSES
    if hasattr(config, "is_decoder") and model_class.__name__.endswith(("CausalLM", "LMHeadModel")):
        config.is_decoder = True
    if of.attention is not None:
        config._attn_implementation = of.attention
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


def batch_of(model: torch.nn.Module, mapping: str, size: int = BATCH) -> dict[str, torch.Tensor]:
    """Return the inputs and labels of a batch.

    Returns:
        pixel_values [size, channels, height, width], or input_ids [size, SEQ] without special tokens (an
        encoder-decoder that classifies needs the last one to be the end of the sequence); labels [size] of a
        classifier, else [size, SEQ], of an encoder-decoder [size, TARGET].
    """
    generator = torch.Generator().manual_seed(1)
    config = model.config.get_text_config()
    two = getattr(model.config, "is_encoder_decoder", False)
    classes = torch.randint(CLASSES, (size,), generator=generator)
    if mapping == "image":
        return {
            "pixel_values": _images(model.config, size, generator).to(next(model.parameters()).dtype),
            "labels": classes,
        }
    special = {v for k, v in config.to_dict().items() if _TOKENS.search(k) and isinstance(v, int)}
    known = int(getattr(config, "vocab_size", VOCAB))
    allowed = torch.tensor([i for i in range(min(known, VOCAB)) if i not in special])
    ids = allowed[torch.randint(len(allowed), (size, SEQ), generator=generator)]
    if mapping == "sequence":
        if two:
            ids[:, -1] = config.eos_token_id
        return {"input_ids": ids, "labels": classes}
    labels = allowed[torch.randint(len(allowed), (size, SEQ), generator=generator)]
    return {"input_ids": ids, "labels": labels[:, :TARGET].contiguous() if two else labels}


def _images(config: Any, number: int, generator: torch.Generator) -> torch.Tensor:
    """Return images of the size that a config, or its config of images, names; of 32 x 32 if it names none."""
    config = getattr(config, "vision_config", config)
    size = getattr(config, "image_size", 32)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = getattr(config, "num_channels", 3)
    return torch.randn(number, channels, height, width, generator=generator, dtype=torch.float64)


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


def reference(of: Class, size: int = BATCH) -> Reference:
    """Return the first variant that builds and runs, in float64 if it can, with a batch of `size` samples.

    Raises:
        Exception: what the first variant raised.
    """
    failure: Exception | None = None
    for without in map(frozenset, VARIANTS):
        for dtype in TOLERANCES:
            try:
                model = build(of, without).to(dtype)
                batch = batch_of(model, of.mapping, size)
                return Reference(model, batch, *eager(model, batch), dtype)
            except Exception as exc:  # whatever transformers says
                failure = failure or exc
    assert failure is not None
    raise failure


def program(model: torch.nn.Module, batch: Mapping[str, torch.Tensor], graph: ModelGraph) -> ParallelModel:
    """Return the captured program on one device."""
    device = Device("made up", 1e12, 1e9, 1 << 36, "made up")
    cluster = Cluster(1, 1, device, Level(0.0, 1e9, "made up"), "cpu")
    length, target = lengths_of(graph, model, batch)
    pins = {"num_micro_batches": 1, "recompute": "none"}
    _, compiled = plan_program(graph, cluster, pins, BATCH, length, target_len=target)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return ParallelModel(
        compiled.spec,
        compiled.sources,
        dict(model.named_parameters()),
        dict(all_buffers(model)),
        num_micro_batches=1,
    )


def compare(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> tuple[float, str]:
    """Return the largest difference of a gradient, relative to its largest element, and its name.

    A gradient that only the module has counts as zero in the program. One that is below float32's rounding of the
    model's largest gradient on both sides is zero (the scale of what a norm divides by it, in modules with parts in
    float32), and is not compared.
    """
    worst, name = 0.0, ""
    zero = torch.finfo(torch.float32).eps * max((float(g.abs().max()) for g in want.values() if g.numel()), default=0.0)
    for key, grad in want.items():
        if grad.numel() == 0:
            continue
        expected = grad.double()
        found = got[key].double() if key in got else torch.zeros_like(expected)
        if float(expected.abs().max()) <= zero and float(found.abs().max()) <= zero:
            continue
        error = float((found - expected).abs().max() / (expected.abs().max() + 1e-12))
        worst, name = max((worst, name), (error if error == error else float("inf"), key))
    return worst, name


def difference(pm: ParallelModel, truth: Reference) -> tuple[str, float]:
    """Run a step. Return what is wrong with it ("" if nothing), and the worst gradient's error."""
    loss = float(pm.step(dict(truth.batch)))
    loss_tolerance, gradient_tolerance = TOLERANCES[truth.dtype]
    if not abs(loss - truth.loss) <= loss_tolerance * abs(truth.loss):
        return f"loss {loss:.6f} instead of {truth.loss:.6f}", 0.0
    worst, name = compare(pm.gradients(), truth.gradients)
    return (f"gradient of {name} off by {worst:.1e}" if worst > gradient_tolerance else ""), worst


def examine(of: Class) -> Row:
    """Return what became of one class."""

    def row(outcome: str, why: str, loss: float | None = None, error: float | None = None) -> Row:
        return Row(of.mapping, of.name, outcome, why, loss, error, capture_s=capture_s)

    capture_s: float | None = None
    try:
        truth = reference(of)
        again, _ = eager(truth.model, truth.batch)
    except Exception as exc:  # whatever transformers says
        return row(NOT_RUN, short(exc))
    if again != truth.loss:
        return row(NOT_RUN, f"its loss is random: {truth.loss:.6f}, then {again:.6f}")
    truth.model.zero_grad()
    no_gradient = [n for n, p in truth.model.named_parameters() if n not in truth.gradients]
    start = time.perf_counter()
    try:
        graph = capture(truth.model, truth.batch)
        capture_s = time.perf_counter() - start
        pm = program(truth.model, truth.batch, graph)
        why, error = difference(pm, truth)
    except AutoplanError as exc:
        return row(REFUSED, short(exc), truth.loss)
    except Exception as exc:
        return row(CRASHED, crash(exc), truth.loss)
    if why:
        return row(WRONG, why, truth.loss, error)
    count = f"{len(no_gradient)} parameter{'s get' if len(no_gradient) > 1 else ' gets'} no gradient"
    found = row(EQUAL, count if no_gradient else "", truth.loss, error)
    return found if of.mapping == "image" else _with_padding(found, truth, pm)


def _with_padding(row: Row, truth: Reference, plain: ParallelModel) -> Row:
    """Return the row of a class with what became of its padded batches.

    Batches on which the module's numbers are not finite in float64 are compared in float32: where padding hides all
    keys from a query, some modules compute a softmax in float32 of the least number of float64, which is NaN.

    Args:
        plain: the program for tokens and labels alone.
    """
    cases, reasons = [], [row.why] if row.why else []
    ways = tuple(padding.paddings(_has_two(truth.model), truth.batch["labels"].dim() > 1))
    for name, inputs in padding.INPUTS.items():
        names = inputs.of(truth.model)
        if names is None:
            continue
        found = _examine_padded(truth, names, ways, None if names else plain)
        if found.left and found.outcome in (EQUAL, NOT_RUN) and truth.dtype is torch.float64:
            in_float32 = replace(truth, model=copy.deepcopy(truth.model).float(), dtype=torch.float32)
            other = _examine_padded(in_float32, names, found.left)
            if other.outcome != NOT_RUN or found.outcome == NOT_RUN:
                found = replace(other, why=f"{other.why} (float32)" if other.why else "")
        cases.append((name, found.outcome))
        if found.why:
            reasons.append(f"{name}: {found.why}")
    return replace(row, why="; ".join(reasons), parity=tuple(cases))


def _has_two(model: torch.nn.Module) -> bool:
    return bool(getattr(model.config, "is_encoder_decoder", False))


@dataclass(frozen=True)
class _Padded:
    """What became of padded batches. `left`: the ways to pad on which the module's own numbers are not finite."""

    outcome: str
    why: str
    left: tuple[padding.Padding, ...]


def _examine_padded(
    truth: Reference, names: Sequence[str], ways: Sequence[padding.Padding], pm: ParallelModel | None = None
) -> _Padded:
    """Return what became of some ways to pad a batch with these inputs.

    Args:
        pm: the program; None: captured here from the first of the batches.
    """
    first = padding.padded(truth.model, truth.batch, names, ways[0])
    truths, failure = {}, "the module's loss or gradients are not finite"
    for way in ways:
        batch = padding.padded(truth.model, truth.batch, names, way)
        try:
            loss, gradients = eager(truth.model, batch)
        except Exception as exc:  # whatever transformers says
            failure = short(exc)
            continue
        if all(bool(x.isfinite().all()) for x in (torch.tensor(loss), *gradients.values())):
            truths[way] = replace(truth, batch=batch, loss=loss, gradients=gradients)
    truth.model.zero_grad()
    left = tuple(way for way in ways if way not in truths)
    if not truths:
        return _Padded(NOT_RUN, failure, left)
    try:
        pm = pm or program(truth.model, first, capture(truth.model, first))
        wrong = {way: why for way, of in truths.items() if (why := difference(pm, of)[0])}
    except AutoplanError as exc:
        return _Padded(REFUSED, short(exc), left)
    except Exception as exc:
        return _Padded(CRASHED, crash(exc), left)
    if not wrong:
        return _Padded(EQUAL, "", left)
    way, why = next(iter(wrong.items()))
    return _Padded(WRONG, f"{len(wrong)} of {len(truths)} batches, first {way}: {why}", left)


def classes(mappings: Sequence[str], only: str, attention: str | None = None) -> list[Class]:
    """Return the classes of some mappings whose names match `only`, every class once."""
    found: dict[str, Class] = {}
    for mapping in mappings:
        names = getattr(modeling_auto, f"{MAPPINGS[mapping]}_NAMES")
        for kind, models in names.items():
            config = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES.get(kind)
            for model in (models,) if isinstance(models, str) else models:
                if config is not None and re.search(only, model):
                    found.setdefault(model, Class(mapping, model, config, attention))
    return list(found.values())


def tasks(mappings: Sequence[str], only: str, attention: str | None = None) -> list[Task]:
    """Return the examination of every class that `classes` finds."""
    return [Task(c.mapping, c.name, partial(examine, c)) for c in classes(mappings, only, attention)]
