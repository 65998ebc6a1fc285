"""Published training measurements as the planner's input: a model, a cluster, configurations, seconds.

    rows = read_rows(path)
    shapes = Shapes(rows)
    case = interpret(row, shapes)      # Unpriced says why a row cannot be priced

Columns are those of the collection: dimensions of the model, devices, degrees, batch, and what was measured. Nothing of
a row that was measured decides how it is read.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import published_defaults as tables
from published_defaults import Formula, Framework, Memory, find
from published_options import EXPERTS_WHOLE_SINCE, era_of, options_of
from published_table import COLUMNS as COLUMNS
from published_table import Row, Unpriced, Unstated
from published_table import read_rows as read_rows

from autoplan.cost_models.catalog import entry
from autoplan.cost_models.cluster import Cluster
from autoplan.cost_models.config import (
    GRADIENTS_16,
    MOMENTS_16,
    Attention,
    Mode,
    ParallelConfig,
    RunOptions,
    modules_choice,
)
from autoplan.cost_models.errors import AutoplanError

# -- the model ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """What the dimensions alone do not say. `latent`: attention with compressed keys; `q_rank` of its queries."""

    gated: bool
    tied: bool
    head_dim: int
    latent: bool = False
    q_rank: int | None = None
    expert_every: int = 1


@dataclass(frozen=True)
class Adapters:
    """Low-rank products beside frozen linear layers: their rank, and names of those layers in the model's modules."""

    rank: int
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Shape:
    """Dimensions of a decoder. `num_experts` 0: dense. `first_dense`: layers without experts at the start.

    `adapters`: all that is trained, or None.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    positions: int
    num_experts: int
    top_k: int
    expert_ffn: int
    shared_ffn: int
    first_dense: int
    kind: Kind
    adapters: Adapters | None = None

    @property
    def num_params(self) -> int:
        """Parameters of all matrices."""
        tables_of_tokens = 1 if self.kind.tied else 2
        positions = self.positions if self.learned_positions else 0
        return (self.vocab * tables_of_tokens + positions) * self.hidden + self._layer_params(active=False)

    @property
    def learned_positions(self) -> bool:
        """True for the first GPTs: ungated, as many key-value heads as heads."""
        return not self.kind.gated and self.kv_heads == self.heads and self.kind.head_dim * self.heads == self.hidden

    @property
    def matmul_params(self) -> int:
        """Those that one token is multiplied with."""
        return self.vocab * self.hidden + self._layer_params(active=True)

    def _layer_params(self, active: bool) -> int:
        k, h = self.kind, self.hidden
        matrices = 3 if k.gated else 2
        dense = matrices * h * self.ffn
        experts = matrices * h * (self.expert_ffn * (self.top_k if active else self.num_experts) + self.shared_ffn)
        with_experts = len(range(self.first_dense, self.layers, k.expert_every)) if self.num_experts else 0
        return (
            self.layers * self._attention_params()
            + (self.layers - with_experts) * dense
            + with_experts * (experts + h * self.num_experts)
        )

    def _attention_params(self) -> int:
        k, h = self.kind, self.hidden
        if not k.latent:
            return 2 * h * k.head_dim * (self.heads + self.kv_heads)
        c = tables.LATENT
        queries = self.heads * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
        q = h * queries if k.q_rank is None else k.q_rank * (h + queries)
        up = c["kv_lora_rank"] * self.heads * (c["qk_nope_head_dim"] + c["v_head_dim"])
        return q + h * (c["kv_lora_rank"] + c["qk_rope_head_dim"]) + up + self.heads * c["v_head_dim"] * h

    def config(self) -> dict[str, Any]:
        """The fields of a Hugging Face config with these dimensions."""
        k = self.kind
        if self.learned_positions:
            return {
                "model_type": "gpt2",
                "vocab_size": self.vocab,
                "n_positions": self.positions,
                "n_embd": self.hidden,
                "n_inner": self.ffn,
                "n_layer": self.layers,
                "n_head": self.heads,
                "activation_function": "gelu",
                **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
                "tie_word_embeddings": k.tied,
            }
        common = {
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": max(8192, self.positions),
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": k.tied,
        }
        if not k.latent:
            common["head_dim"] = k.head_dim
        if not self.num_experts:
            dense = {"model_type": "llama"} if k.gated else {"model_type": "nemotron", "hidden_act": "relu2"}
            return {**common, **dense}
        experts = {
            "moe_intermediate_size": self.expert_ffn,
            "num_experts_per_tok": self.top_k,
            "norm_topk_prob": True,
        }
        if k.latent:
            return {
                **common,
                **experts,
                **tables.LATENT,
                "model_type": "deepseek_v3",
                "q_lora_rank": k.q_rank,
                "n_routed_experts": self.num_experts,
                "n_shared_experts": self.shared_ffn // self.expert_ffn,
                "first_k_dense_replace": self.first_dense,
                "n_group": 1,
                "topk_group": 1,
            }
        routed = {
            "num_experts": self.num_experts,
            "decoder_sparse_step": k.expert_every,
            "mlp_only_layers": list(range(self.first_dense)),
            "output_router_logits": False,
        }
        if self.shared_ffn:
            shared = {"model_type": "qwen2_moe", "shared_expert_intermediate_size": self.shared_ffn}
            return {**common, **experts, **routed, **shared}
        return {**common, **experts, **routed, "model_type": "qwen3_moe"}


class Shapes:
    """Shapes of rows. What the dimensions leave open follows from the published number of parameters: the kind of
    decoder that comes nearest to it. Rows without a number (models cut to a few layers) take the kind that another
    row with the same layer has, else what is usual."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._kinds: dict[tuple[int, ...], Kind] = {}
        for row in rows:
            try:
                shape = self._stated(row)
                if row["params_b"]:
                    self._kinds.setdefault(self._layer(shape), self._nearest(row, shape).kind)
            except AutoplanError:
                continue  # says so again when this row is priced

    def of(self, row: Row) -> Shape:
        """Unstated if dimensions are missing, Unpriced if they do not give the published number of parameters."""
        stated = self._stated(row)
        if row["params_b"]:
            shape = self._nearest(row, stated)
        else:
            shape = replace(stated, kind=self._kinds.get(self._layer(stated)) or _usual_kind(row, stated))
        return replace(shape, adapters=_adapters(row))

    @staticmethod
    def _layer(s: Shape) -> tuple[int, ...]:
        return s.hidden, s.ffn, s.heads, s.kv_heads, s.vocab, s.num_experts, s.expert_ffn, s.shared_ffn

    @staticmethod
    def _stated(row: Row) -> Shape:
        hidden, ffn, heads = row.needed("hidden"), row.needed("ffn_hidden"), row.needed("heads")
        experts = row.count("moe_experts") or 0
        # a gated layer of the same size has 8/3 h; 4 h exactly is the ungated layer of the first transformer
        gated = ffn != 4 * hidden or experts > 0
        return Shape(
            layers=row.needed("layers"),
            hidden=hidden,
            ffn=ffn,
            heads=heads,
            kv_heads=row.count("kv_heads") or heads,
            vocab=_vocab(row),
            positions=row.needed("seq_len"),
            num_experts=experts,
            top_k=row.needed("moe_topk") if experts else 0,
            expert_ffn=(row.noted("moe_ffn") or ffn) if experts else 0,
            shared_ffn=row.noted("shared_ffn") if experts else 0,
            first_dense=row.noted("first_dense_layers") if experts else 0,
            kind=Kind(gated, not gated and row.count("kv_heads") in (None, heads), hidden // heads),
        )

    @staticmethod
    def _nearest(row: Row, shape: Shape) -> Shape:
        published = (row.number("params_b") or 0.0) * 1e9
        found = [replace(shape, kind=kind) for kind in _kinds(shape)]

        def off(candidate: Shape) -> float:
            return candidate.num_params / published - 1

        if _usual_kind(row, shape).latent:  # of many small experts, too few parameters are attention's to tell
            likely = min((s for s in found if s.kind.latent), key=lambda s: abs(off(s)))
            if abs(off(likely)) < tables.USUAL_WITH_EXPERTS:
                return likely
        usual = found[0].kind == shape.kind  # else the size of a head is none that is used with experts
        if usual and abs(off(found[0])) < (tables.USUAL_WITH_EXPERTS if shape.num_experts else tables.USUAL):
            return found[0]
        best = min(found, key=lambda s: abs(off(s)))
        if abs(off(best)) > tables.PARAMS_TOLERANCE:
            raise Unpriced(f"the dimensions give {off(best):+.0%} of the published number of parameters at best")
        return best


def _usual_kind(row: Row, shape: Shape) -> Kind:
    """Where nothing says what kind of layer it is: latent attention with many experts, in frameworks that know it."""
    least, since = tables.LATENT_EXPERTS
    known = row.framework in tables.LATENT_FRAMEWORKS and era_of(row["source"], row["notes"], row["gpu"]) >= since
    if not known or shape.num_experts < least or shape.kv_heads != shape.heads:
        return shape.kind
    return replace(shape.kind, latent=True, q_rank=tables.LATENT_Q_RANKS[0], head_dim=tables.LATENT["v_head_dim"])


def _vocab(row: Row) -> int:
    """As stated, else that of the framework's usual tokenizer."""
    usual = tables.VOCAB.get(row.framework)
    if row["vocab"] or usual is None:
        return row.needed("vocab")
    multiple = tables.VOCAB_MULTIPLE * (row.count("tp") or 1)
    return math.ceil(usual / multiple) * multiple


def _adapters(row: Row) -> Adapters | None:
    if not re.search(r"\bLoRA\b", f"{row['flags']} {row['model']} {row['notes']}", re.IGNORECASE):
        return None
    return Adapters(*tables.ADAPTERS.get(row.framework, tables.USUAL_ADAPTERS))


def _kinds(shape: Shape) -> list[Kind]:
    """What a shape may be, the usual kind first."""
    usual, moe = shape.kind, shape.num_experts > 0
    dims = list(dict.fromkeys((usual.head_dim, *tables.HEAD_DIMS)))
    if moe and usual.head_dim not in tables.HEAD_DIMS:
        dims.remove(usual.head_dim)
    every = tables.EXPERT_EVERY if moe else (1,)
    gated = (True,) if moe else (usual.gated, not usual.gated)
    ties = (usual.tied, not usual.tied)
    plain = [Kind(g, tie, dim, expert_every=n) for n, g, dim, tie in itertools.product(every, gated, dims, ties)]
    latent = moe and shape.kv_heads == shape.heads
    ranks = itertools.product(tables.LATENT_Q_RANKS, ties) if latent else ()
    return plain + [Kind(True, tie, tables.LATENT["v_head_dim"], True, rank) for rank, tie in ranks]


# -- how it ran --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """One way to read a row: the configuration and how its kernels run."""

    mode: Mode
    config: ParallelConfig
    options: RunOptions


@dataclass(frozen=True)
class _Reading:
    """One choice for every field that rows may leave open."""

    zero_stage: int
    recompute: str
    virtual_stages: int
    etp: int | None
    mode: Mode
    micro_batch: int


@dataclass(frozen=True)
class Task:
    """What is priced: the first setting is the prediction, the others widen its interval. Rows may share one."""

    shape: Shape
    cluster: Cluster
    precision: str
    seq_len: int
    global_batch_size: int
    settings: tuple[Setting, ...]


@dataclass(frozen=True)
class Case:
    """A row as the planner sees it.

    `measured_s`: seconds of one step, from what the row states first of seconds, tokens, arithmetic. `assumed`: fields
    that the row leaves open.
    """

    row: Row
    task: Task
    framework: Framework
    measured_s: float
    assumed: tuple[str, ...]

    @property
    def memory(self) -> tuple[Memory, float] | None:
        """What kind of memory figure the row has, and its bytes; None without one that can be read."""
        kind, size = find(tables.MEMORY, self.row["mem_kind"]), self.row.number("peak_mem_gb")
        return None if kind is None or size is None else (kind, kind.unit * size)


def interpret(row: Row, shapes: Shapes) -> Case:
    """The case of a row. Raises: Unstated for one that no planner could price, Unpriced, AutoplanError for a cluster
    that cannot be."""
    shape, framework, seq_len = shapes.of(row), row.framework, row.needed("seq_len")
    settings, batch, assumed = _settings(row, shape, framework)
    measured_s = _measured_s(row, shape, seq_len, batch)
    if "offload" in row["flags"].lower() and "offload none" not in row["flags"].lower():
        raise Unpriced("offloading to the host is not priced")
    cluster = cluster_of(row)
    usual = "bf16" if "bfloat16" in cluster.device.peak_flops_by_dtype else "fp16"
    precision = find(tables.PRECISIONS, row["precision"]) if row["precision"] else usual
    if precision is None:
        raise Unpriced(f"no precision of the planner for {row['precision']!r}")
    assumed = (*assumed, *(name for name in ("vocab", "precision") if not row[name]))
    blocks = precision == "fp8" and find(tables.FORMATS, row["precision"]) == tables.BLOCKS
    if blocks and "float4" in cluster.device.peak_flops_by_dtype:  # devices that multiply by scales per block
        precision = "mxfp8"
    if framework in tables.GRADIENTS_16 and precision != "fp32":
        precision += GRADIENTS_16
        if shape.kind.latent and framework in tables.MOMENTS_16:
            precision += MOMENTS_16
    task = Task(shape, cluster, precision, seq_len, batch, settings)
    return Case(row, task, framework, measured_s, assumed)


def cluster_of(row: Row) -> Cluster:
    """Catalog hardware, with the network that the row states. Unpriced for a device that the catalog lacks."""
    name, overrides = _device(row)
    count = row.needed("n_gpus")
    nodes = math.ceil(count / (row.count("gpus_per_node") or entry(name).devices_per_node))
    if count % nodes:
        raise Unpriced(f"{count} devices are not spread evenly over {nodes} nodes")
    per_node = count // nodes
    parts = [overrides] if overrides else []
    nic = _nic_gbit_s(row["internode"], per_node)
    if nic is None and entry(name).nic_gbit_s is None:
        nic = tables.USUAL_NIC
    if nic is not None and count > per_node:
        parts.append(f"nic={nic:g}")
    text = f"{nodes}x{per_node}x{name}"
    return Cluster.parse(f"{text}@{','.join(parts)}" if parts else text)


def _device(row: Row) -> tuple[str, str]:
    """Catalog id and overrides: the device of that name whose memory is nearest, the only one if none is stated."""
    if not row["gpu"]:
        raise Unstated("gpu is not stated")
    words = re.sub(tables.NOT_NAMES, " ", row["gpu"], flags=re.IGNORECASE)
    name = " ".join(re.split(r"[\s\-_]+", words.strip(" -_"))).upper()
    sizes = {size: found for (known, size), found in tables.DEVICES.items() if known == name}
    memory = row.number("gpu_mem_gb")
    if memory is None and len(sizes) == 1:
        return next(iter(sizes.values()))
    size = min(sizes, key=lambda s: abs(s - (memory or 0)), default=None)
    if memory is None or size is None or abs(memory / size - 1) > tables.SAME_MEMORY:
        others = f"; it has {name} with {', '.join(map(str, sizes))} GB" if sizes else ""
        raise Unpriced(f"no device {row['gpu']} with {row['gpu_mem_gb'] or '?'} GB in the catalog{others}")
    return sizes[size]


def _nic_gbit_s(text: str, per_node: int) -> float | None:
    """Gbit/s per device, or None where a row does not say."""
    reached = find(tables.REACHED, text) or 1.0
    if (match := re.search(tables.NIC_PER_DEVICE, text)) is not None:
        return float(match.group(1)) * reached
    if (match := re.search(tables.NIC_PER_NODE, text)) is not None:
        return float(match.group(1)) * float(match.group(2)) / per_node * reached
    return None


def _degrees(row: Row) -> tuple[dict[str, int], list[str]]:
    """tp, pp, cp and dp, and which of them were filled in: the one that is blank follows from the devices, cp is 1 as
    in every framework, and what shards all parameters over all devices leaves no other degree. A dp that contradicts
    the devices is read as what they leave. Unstated if degrees are missing, or contradict the devices without it."""
    devices = row.needed("n_gpus")
    stated = {name: row.count(name) for name in ("tp", "pp", "cp", "dp")}
    found = {name: value for name, value in stated.items() if value}
    if not found and re.search(tables.ALL_SHARDED, row["zero_stage"], re.IGNORECASE):
        found = {"tp": 1, "pp": 1}
    found.setdefault("cp", 1)
    rest = math.prod(value for name, value in found.items() if name != "dp")
    missing = [name for name in ("tp", "pp", "dp") if name not in found]
    if missing:
        known = math.prod(found.values())
        if len(missing) > 1 or devices % known:
            raise Unstated(f"{missing[0]} is not stated")
        found[missing[0]] = devices // known
    elif rest * found["dp"] != devices:
        batch = row.count("global_batch")
        if devices % rest or (batch is not None and batch % (devices // rest)):
            raise Unstated(f"the degrees are those of {rest * found['dp']} devices, not {devices}")
        found["dp"] = devices // rest
    return found, [name for name in found if found[name] != stated[name]]


def _micro_batches(row: Row, framework: Framework, dp: int, batch: int) -> tuple[int, ...]:
    """Sequences per micro-batch, the most likely first. Unpriced for more than the batch has."""
    stated = row.count("micro_batch")
    if stated is None and (match := re.search(r"\b(\d+) micro-?batches", row["flags"])) is not None:
        stated = batch // (dp * int(match.group(1)))
    if stated is None and framework in tables.AT_ONCE:
        stated = batch // dp
    if dp * (stated or 1) > batch:
        raise Unpriced(f"dp={dp} x micro-batches of {stated or 1} are more than the global batch of {batch}")
    return (stated,) if stated else tuple(n for n in tables.MICRO_BATCHES if batch % (dp * n) == 0) or (1,)


def _settings(row: Row, shape: Shape, framework: Framework) -> tuple[tuple[Setting, ...], int, tuple[str, ...]]:
    """Every reading of a row, its global batch size, and the fields that were filled in."""
    defaults = tables.DEFAULTS[framework]
    degrees, assumed = _degrees(row)
    tp, pp, cp, dp = (degrees[name] for name in ("tp", "pp", "cp", "dp"))
    ep = row.count("ep") or 1
    batch = row.needed("global_batch")
    micro = _micro_batches(row, framework, dp, batch)
    if batch % (dp * micro[0]):  # no framework runs a part of a micro-batch: the nearest whole number of them
        batch = dp * micro[0] * round(batch / (dp * micro[0]))
        assumed.append("global_batch")
    zero = find(tables.ZERO_STAGES, row["zero_stage"]) if row["zero_stage"] else None
    if zero is None:
        zero = defaults.zero_stages
    if pp > 1 and zero[0] == 2:  # in a pipeline gradients are reduced once per step, not after each micro-batch
        zero = (1, 2)
    if shape.adapters is not None:  # ZeRO 1 and 2 shard what is trained, which is next to nothing
        zero = tuple(dict.fromkeys(0 if stage < 3 else stage for stage in zero))
    recompute = _recompute(row, defaults.recompute)
    virtual = (row.count("vpp") or 1,) if row["vpp"] else _virtual_stages(row, shape, pp)
    era = era_of(row["source"], row["notes"], row["gpu"])
    whole = framework in (Framework.NEMO, Framework.BRIDGE_LIBRARY) and era >= EXPERTS_WHOLE_SINCE
    etps = _expert_tensor_degrees(shape, tp, ep, dp * cp * tp, whole)
    modes = _modes(row, framework)
    choices = {
        "zero_stage": zero,
        "recompute": recompute,
        "vpp": virtual,
        "etp": etps,
        "mode": modes,
        "micro_batch": micro,
    }
    blank = [
        name
        for name in ("zero_stage", "recompute", "vpp", "micro_batch")
        if not row[name] and (name != "vpp" or pp > 1)
    ]
    assumed += [name for name, values in choices.items() if len(values) > 1 or name in blank]
    usual = _Reading(zero[0], recompute[0], virtual[0], etps[0], modes[0], micro[0])
    # one field at a time departs from the usual
    readings = [usual, *(replace(usual, zero_stage=v) for v in zero[1:])]
    readings += [replace(usual, recompute=v) for v in recompute[1:]]
    readings += [replace(usual, virtual_stages=v) for v in virtual[1:]]
    readings += [replace(usual, etp=v) for v in etps[1:]]
    readings += [replace(usual, mode=v) for v in modes[1:]]
    readings += [replace(usual, micro_batch=v) for v in micro[1:]]
    schedule = _schedule(row)
    said = f"{row['flags']} {row['model']}"
    options = options_of(framework, era, said, row["gpu"], row["precision"], row["notes"])
    options = replace(options, sequence_parallel=row["sp"] != "0" or tp == 1)
    if shape.kind.latent and framework in tables.DETERMINISTIC:
        options = replace(options, attention=Attention.UNFUSED)
    settings = []
    for r in readings:
        chunks = r.virtual_stages if pp > 1 else 1
        config = ParallelConfig(
            dp=dp,
            tp=tp,
            pp=pp,
            cp=cp,
            ep=ep,
            etp=r.etp,
            zero_stage=r.zero_stage,
            zero_replicas=_zero_replicas(row, dp * cp) if r.zero_stage else 1,
            micro_batch_size=r.micro_batch,
            num_micro_batches=batch // (dp * r.micro_batch),
            schedule=tables.INTERLEAVED.get(schedule, schedule) if chunks > 1 else schedule,
            virtual_stages=chunks,
            recompute=r.recompute if r.recompute != HALF else tuple(n // 2 for n in _layers(shape.layers, pp * chunks)),
            stages=_stages(shape.layers, pp, chunks),
        )
        settings.append(Setting(r.mode, config, options))
    return tuple(settings), batch, tuple(assumed)


def _expert_tensor_degrees(shape: Shape, tp: int, ep: int, ranks: int, whole: bool) -> tuple[int | None, ...]:
    """As tp (None, Megatron's default) and 1, whichever ep leaves ranks for; no row states it. `whole`: 1 is usual."""
    if not shape.num_experts or tp == 1:
        return (None,)
    usual = (1, None) if whole else (None, 1)
    legal = [etp for etp in usual if ranks % (ep * (etp or tp)) == 0 and shape.expert_ffn % (etp or tp) == 0]
    return tuple(legal) or (None,)


def _zero_replicas(row: Row, ranks: int) -> int:
    """Copies of the sharded state, of a group that is stated and divides the ranks."""
    group = re.search(tables.SHARD_GROUP, row["zero_stage"])
    size = int(group[1]) if group is not None else ranks
    return ranks // size if ranks % size == 0 else 1


def _modes(row: Row, framework: Framework) -> tuple[Mode, ...]:
    """Of the framework; where torchtitan says what it compiles, only that (float8 needs it)."""
    modes = tables.DEFAULTS[framework].modes
    if framework is Framework.TORCHTITAN and not re.search(r"compile|float8|AsyncTP", row["flags"], re.IGNORECASE):
        return tuple(reversed(modes))
    return modes


def _recompute(row: Row, usual: tuple[str, ...]) -> tuple[str, ...]:
    text = row["recompute"]
    if not text:
        return usual
    if re.search(tables.CORE_ATTENTION, text):
        return ("selective",)
    if re.search(tables.EVERY_OTHER, text):
        return (HALF, "selective", "full")
    if (named := re.search(tables.MODULES_AGAIN, text)) is not None:
        return (modules_choice(name.strip() for name in named[1].split(",")),)
    found = find(tables.RECOMPUTE, text)
    return (found,) if found else ("selective", "none", "full")


HALF = "half"  # of every stage's layers, in full


def _layers(layers: int, chunks: int) -> tuple[int, ...]:
    """Layers per chunk, as even as they go: at most as many as any chunk has, where stages are uneven."""
    return (layers // chunks,) * chunks


def _virtual_stages(row: Row, shape: Shape, pp: int) -> tuple[int, ...]:
    """Where it is blank: one if the schedule says so, else also as many as there are layers for."""
    if pp == 1 or row["schedule"] == "1F1B":
        return (1,)
    return tuple(dict.fromkeys((max(1, shape.layers // pp), 1)))


def _schedule(row: Row) -> str:
    """Without a pipeline every schedule is 1F1B."""
    if not row["schedule"] or row.count("pp") == 1:
        return "1F1B"
    found = find(tables.SCHEDULES, row["schedule"])
    if found is None:
        raise Unpriced(f"schedule {row['schedule']} is not priced")
    return found


def _stages(layers: int, pp: int, virtual_stages: int) -> tuple[int, ...] | None:
    """Equal chunks, as all these frameworks cut; where they do not divide, embedding and head count as layers
    (Megatron's account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split).

    None (the planner's balance) without a pipeline, where several chunks are equal, or where neither divides.
    """
    chunks = pp * virtual_stages
    if pp == 1 or (virtual_stages > 1 and layers % chunks == 0):
        return None
    if layers % chunks == 0:
        return (layers // chunks,) * chunks
    if (layers + 2) % chunks == 0:
        inner = (layers + 2) // chunks
        return (inner - 1, *(inner,) * (chunks - 2), inner - 1)
    return None


# -- what was measured -------------------------------------------------------------------------------------------------


def _measured_s(row: Row, shape: Shape, seq_len: int, batch: int) -> float:
    """Seconds of one step of `batch` sequences, NaN of a run that ran out of memory or has only a memory figure.

    Unstated if the row has no result.
    """
    if (seconds := row.number("step_time_s")) is not None:
        return seconds
    devices, tokens = row.needed("n_gpus"), batch * seq_len
    if (rate := row.number("tokens_per_s_per_gpu")) is not None:
        return tokens / (rate * devices)
    tflops, formula = row.number("tflops_per_gpu"), find(tables.TFLOPS, row["tflops_kind"])
    if tflops is None and (row.out_of_memory or row["peak_mem_gb"]):
        return math.nan
    if tflops is None or formula is None:
        raise Unstated("nothing measured that gives seconds")
    return tokens * flops_per_token(formula, shape, seq_len) / (tflops * 1e12 * devices)


def flops_per_token(formula: Formula, shape: Shape, seq_len: int) -> float:
    """Arithmetic of one token in a step as `formula` counts it."""
    layers, hidden = shape.layers, shape.hidden
    width = shape.heads * shape.kind.head_dim
    if formula is Formula.HARDWARE_8N:
        return 8.0 * 12 * layers * hidden**2
    if formula is Formula.HARDWARE:
        return 96.0 * layers * hidden**2 * (1 + seq_len / (6 * hidden) + shape.vocab / (16 * layers * hidden))
    attention = 12.0 if formula is Formula.FULL_ATTENTION else 6.0
    return 6.0 * shape.matmul_params + attention * layers * width * seq_len
