"""Shapes of published decoders: what a row's dimensions say, and what stands for those that it leaves blank.

    shapes = Shapes(rows)
    found = shapes.read(row)       # ShapeMatch: the shape, others that it may be, and what was assumed

Blank dimensions follow from the published number of parameters where there is one: of the usual values those whose
count comes nearest. Else they are those of the row's era, and the next usual ones widen the interval.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoplan.config.adapters import ALL_LINEAR
from autoplan.config.adapters import Adapters as Adapters
from autoplan.errors import AutoplanError
from experiments.published import defaults as tables
from experiments.published import reading
from experiments.published.defaults import Framework, find
from experiments.published.reading import era_of
from experiments.published.table import Row, Unstated


@dataclass(frozen=True)
class Kind:
    """What the dimensions alone do not say. `latent`: attention with compressed keys; `q_rank`, `kv_rank`: to how many
    dimensions its queries and its keys and values are compressed."""

    gated: bool
    tied: bool
    head_dim: int
    latent: bool = False
    q_rank: int | None = None
    expert_every: int = 1
    kv_rank: int = reading.LATENT["kv_lora_rank"]


@dataclass(frozen=True)
class Shape:
    """Dimensions of a decoder. `num_experts` 0: dense. `first_dense`: layers without experts at the start.

    `adapters`: all that is trained, or None; `family`: of reading.FAMILIES, or ""; `predicting`: how many of the layers
    predict tokens after the next, behind the last of the others.
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
    family: str = ""
    predicting: int = 0

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
        c = reading.LATENT
        queries = self.heads * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
        q = h * queries if k.q_rank is None else k.q_rank * (h + queries)
        up = k.kv_rank * self.heads * (c["qk_nope_head_dim"] + c["v_head_dim"])
        return q + h * (k.kv_rank + c["qk_rope_head_dim"]) + up + self.heads * c["v_head_dim"] * h

    def config(self) -> dict[str, Any]:
        """Return the fields of a Hugging Face config with these dimensions."""
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
            groups, chosen = reading.ROUTING_GROUPS.get(self.family, (1, 1))
            return {
                **common,
                **experts,
                **reading.LATENT,
                "model_type": "deepseek_v3",
                "q_lora_rank": k.q_rank,
                "kv_lora_rank": k.kv_rank,
                "n_routed_experts": self.num_experts,
                "n_shared_experts": self.shared_ffn // self.expert_ffn,
                "first_k_dense_replace": self.first_dense,
                "n_group": groups,
                "topk_group": chosen,
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


@dataclass(frozen=True)
class ShapeMatch:
    """What a row trained. `others`: what it may be, too, where it leaves dimensions blank; `assumed`: those.

    `notes`: in which way it is not what the row says.
    """

    shape: Shape
    others: tuple[Shape, ...] = ()
    assumed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class Shapes:
    """Shapes of rows. What the dimensions leave open follows from the published number of parameters: the kind of
    decoder that comes nearest to it. Rows without a number (models cut to a few layers) take the kind that another
    row with the same layer has, else what is usual."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._kinds: dict[tuple[int, ...], Kind] = {}
        for row in rows:
            try:
                if row["params_b"]:
                    found = self.read(row)
                    if "params_b" not in found.assumed:
                        self._kinds.setdefault(self._layer(found.shape), found.shape.kind)
            except AutoplanError:
                continue  # says so again when this row is priced

    def of(self, row: Row) -> Shape:
        """Return the likeliest shape. Raises: as `read`."""
        return self.read(row).shape

    def read(self, row: Row) -> ShapeMatch:
        """The shape of a row. Raises: Unstated if dimensions are missing that nothing usual stands for, Unpriced for
        numbers that no decoder has."""
        candidates, blank = _candidates(row)
        published = row.positive("params_b")
        if published is None:
            found = [
                replace(s, kind=self._kinds.get(self._layer(s)) or _usual_kind(row, s)) for s in _one_by_one(candidates)
            ]
            match = ShapeMatch(found[0], tuple(found[1:]), blank)
        else:
            match = _fitted(row, candidates, blank, published * 1e9)
        predicting = row.noted("mtp_layers")
        if not predicting and row["params_b"]:
            era = era_of(row["source"], row["notes"], row["gpu"])
            predicting = tables.mtp_layers(row.framework, era, row["model"])
        if predicting:
            match = _with_layers(match, predicting)
        adapters = _adapters(row)
        if adapters is None:
            return match
        shapes = [replace(s, adapters=adapters) for s in (match.shape, *match.others)]
        return replace(match, shape=shapes[0], others=tuple(shapes[1:]))

    @staticmethod
    def _layer(s: Shape) -> tuple[int, ...]:
        return s.hidden, s.ffn, s.heads, s.kv_heads, s.vocab, s.num_experts, s.expert_ffn, s.shared_ffn


def _with_layers(match: ShapeMatch, predicting: int) -> ShapeMatch:
    """With layers that predict the tokens after the next, behind the others, which the published number leaves out."""
    shapes = (match.shape, *match.others)
    first, *others = (replace(s, layers=s.layers + predicting, predicting=predicting) for s in shapes)
    note = f"with {'a layer' if predicting == 1 else f'{predicting} layers'} for tokens after the next"
    return replace(match, shape=first, others=tuple(others), notes=(*match.notes, note))


# a shape, and by which options of the blank fields it came about
_Candidate = tuple[Shape, tuple[int, ...]]


def _candidates(row: Row) -> tuple[list[_Candidate], tuple[str, ...]]:
    """Return what the dimensions may be, the likeliest first, and which of them are blank."""
    hidden, layers, positions = row.needed("hidden"), row.needed("layers"), row.needed("seq_len")
    experts = row.count("moe_experts") or 0
    era = era_of(row["source"], row["notes"], row["gpu"])
    many = experts >= reading.MANY_EXPERTS
    topks = [row.needed("moe_topk")] if row["moe_topk"] else list(reading.TOP_K_OF_EXPERTS[many]) if experts else [0]
    moe_ffn, shared = (row.noted("moe_ffn"), row.noted("shared_ffn")) if experts else (0, 0)
    first_dense = row.noted("first_dense_layers") if experts else 0
    family = find(reading.FAMILIES, row["model"]) or "" if experts else ""
    if family in reading.SHARED_AS_ROUTED:
        shared = shared or moe_ffn
    all_heads = [row.needed("heads")] if row["heads"] else [hidden // d for d in reading.HEAD_DIMS if hidden % d == 0]
    if not all_heads:
        raise Unstated("heads is not stated")
    if row["ffn_hidden"]:
        ffns = [row.needed("ffn_hidden")]
    elif moe_ffn:  # dense layers as wide as what a token sees of experts, as in DeepSeek-V3 (18432 = 9 x 2048)
        ffns = [moe_ffn * topks[0] + shared]
    else:
        ffns = _usual_ffns(hidden, era)
    kv_stated, vocabs = row.count("kv_heads"), _vocabs(row, era)
    names = ("heads", "ffn_hidden", "vocab", "moe_topk")
    blank = [name for name in names if not row[name] and (name != "moe_topk" or experts)]
    blank += [] if kv_stated else ["kv_heads"]
    out = []
    for (i, heads), (j, ffn), (k, vocab), (n, top_k) in itertools.product(
        enumerate(all_heads), enumerate(ffns), enumerate(vocabs), enumerate(topks)
    ):
        # a gated layer of the same size has 8/3 h; 4 h exactly is the ungated layer of the first transformer
        gated = ffn != 4 * hidden or experts > 0
        size = reading.LAYER_WEIGHTS * layers * hidden**2
        for m, kv_heads in enumerate([kv_stated] if kv_stated else _usual_kv_heads(heads, era, gated, size)):
            shape = Shape(
                layers=layers,
                hidden=hidden,
                ffn=ffn,
                heads=heads,
                kv_heads=kv_heads,
                vocab=vocab,
                positions=positions,
                num_experts=experts,
                top_k=top_k,
                expert_ffn=(moe_ffn or ffn) if experts else 0,
                shared_ffn=shared,
                first_dense=first_dense,
                kind=Kind(gated, not gated and kv_heads == heads, hidden // heads),
                family=family,
            )
            out.append((shape, (i, j, k, n, m)))
    out.sort(key=lambda found: sum(found[1]))  # stable: the fewer unusual choices, the likelier
    return out, tuple(blank)


def _one_by_one(candidates: Sequence[_Candidate]) -> list[Shape]:
    """The likeliest shape, and those of which one blank field is another: the next usual value of each."""
    return [shape for shape, choices in candidates if sum(choices) <= 1]


def _fitted(row: Row, candidates: Sequence[_Candidate], blank: tuple[str, ...], published: float) -> ShapeMatch:
    """Those whose parameters come nearest to the published number: usual kinds first, then any kind."""

    def off(shape: Shape) -> float:
        return shape.num_params / published - 1

    if len(candidates) == 1:
        shape = candidates[0][0]
        nearest = _nearest(row, shape, published)
        if abs(off(nearest)) <= reading.PARAMS_TOLERANCE:
            return ShapeMatch(nearest, (), blank)
        usual = replace(shape, kind=_usual_kind(row, shape))
        more = _experts_from(usual, published) if shape.num_experts and not row.noted("moe_ffn") else None
        if more is not None and abs(off(more)) <= reading.PARAMS_TOLERANCE:
            note = f"experts without a size are priced with an inner size of {more.expert_ffn}, as params_b says"
            return ShapeMatch(more, (), (*blank, "moe_ffn"), (note,))
        said = (
            f"the dimensions give {off(nearest):+.0%} of the published number of parameters at best: params_b is left"
        )
        others = () if nearest == usual else (nearest,)
        return ShapeMatch(usual, others, (*blank, "params_b"), (said,))
    for kinds in (False, True):
        found = [_nearest(row, s, published) if kinds else replace(s, kind=_usual_kind(row, s)) for s, _ in candidates]
        least = min(abs(off(s)) for s in found)
        if kinds or least < (reading.USUAL_WITH_EXPERTS if found[0].num_experts else reading.USUAL):
            break
    near = list(dict.fromkeys(s for s in found if abs(off(s)) <= least + reading.ROUNDED))
    if least <= reading.PARAMS_TOLERANCE:
        return ShapeMatch(near[0], tuple(near[1:3]), blank)
    note = f"usual dimensions give {off(near[0]):+.0%} of the published number of parameters at best: params_b is left"
    return ShapeMatch(near[0], tuple(near[1:3]), (*blank, "params_b"), (note,))


def _nearest(row: Row, shape: Shape, published: float) -> Shape:
    """The kind of decoder that comes nearest to the published number: the usual one if it is near enough."""
    found = [replace(shape, kind=kind) for kind in _kinds(shape)]

    def off(candidate: Shape) -> float:
        return candidate.num_params / published - 1

    if _usual_kind(row, shape).latent:  # of many small experts, too few parameters are attention's to tell
        likely = min((s for s in found if s.kind.latent), key=lambda s: abs(off(s)))
        if abs(off(likely)) < reading.USUAL_WITH_EXPERTS:
            return likely
    usual = found[0].kind == shape.kind  # else the size of a head is none that is used with experts
    if usual and abs(off(found[0])) < (reading.USUAL_WITH_EXPERTS if shape.num_experts else reading.USUAL):
        return found[0]
    return min(found, key=lambda s: abs(off(s)))


def _experts_from(shape: Shape, published: float) -> Shape | None:
    """With experts of the inner size that the published number leaves for them, in steps of 64; None below one step."""
    without = replace(shape, expert_ffn=0).num_params
    step = replace(shape, expert_ffn=64).num_params - without
    steps = round((published - without) / step)
    return replace(shape, expert_ffn=64 * steps) if steps >= 1 else None


def _usual_ffns(hidden: int, era: float) -> list[int]:
    """Inner sizes, the likeliest first: 4 h, 3.5 h and 8/3 h up to the next multiple of 256."""
    sizes = [4 * hidden, 7 * hidden // 2, math.ceil(8 * hidden / 3 / 256) * 256]
    return sizes if era < reading.GATED_SINCE else [*sizes[1:], sizes[0]]


def _usual_kv_heads(heads: int, era: float, gated: bool, size: float) -> list[int]:
    """Numbers of key-value heads, the likeliest first (reading.GROUPED)."""
    grouped, since, large, large_since = reading.GROUPED
    first = gated and (era >= since or (era >= large_since and size >= large))
    order = [grouped, heads] if first else [heads, grouped]
    return [n for n in dict.fromkeys((*order, *reading.KV_HEADS)) if n <= heads and heads % n == 0]


def _usual_kind(row: Row, shape: Shape) -> Kind:
    """Where nothing says what kind of layer it is: latent attention with many experts, in frameworks that know it, or
    where it explains the number of heads."""
    latent = replace(shape.kind, latent=True, q_rank=reading.LATENT_Q_RANKS[0], head_dim=reading.LATENT["v_head_dim"])
    if shape.num_experts and (kv_rank := row.noted("kv_lora_rank")):
        return replace(latent, q_rank=row.noted("q_lora_rank") or None, kv_rank=kv_rank)
    least, since = reading.LATENT_EXPERTS
    if re.search(reading.LATENT_NAMES, row["model"], re.IGNORECASE):
        least = 1
    known = row.framework in reading.LATENT_FRAMEWORKS and era_of(row["source"], row["notes"], row["gpu"]) >= since
    narrow = row.framework is Framework.OTHER and shape.kind.head_dim < min(reading.HEAD_DIMS)
    if not (known or narrow) or shape.num_experts < least or shape.kv_heads != shape.heads:
        return shape.kind
    return latent


def _vocabs(row: Row, era: float) -> list[int]:
    """As stated, else of the framework's usual tokenizer, or its era's, and then of the others."""
    if row["vocab"]:
        return [row.needed("vocab")]
    of_era = next(size for since, size in reversed(reading.TOKENIZERS) if era >= since)
    framework = tables.VOCAB.get(row.framework)
    multiple = 1 if framework is None else tables.VOCAB_MULTIPLE * (row.count("tp") or 1)
    sizes = dict.fromkeys((framework or of_era, of_era, *(size for _, size in reading.TOKENIZERS)))
    return [math.ceil(size / multiple) * multiple for size in sizes]


def _adapters(row: Row) -> Adapters | None:
    """Return the adapters that a row trains, with the rank and layers of its words (`LoRA rank 16 of all projections`),
    else those of its framework."""
    said = f"{row['flags']} {row['model']} {row['notes']}"
    if not re.search(r"\bLoRA\b", said, re.IGNORECASE):
        return None
    rank, layers = tables.ADAPTERS.get(row.framework, tables.USUAL_ADAPTERS)
    if (stated := re.search(r"\bLoRA rank (\d+)", said)) is not None:
        rank = int(stated.group(1))
    if re.search(r"\bLoRA[^;]* all projections", said):
        layers = (ALL_LINEAR,)
    return Adapters(rank, layers)


def _kinds(shape: Shape) -> list[Kind]:
    """Return what a shape may be, the usual kind first."""
    usual, moe = shape.kind, shape.num_experts > 0
    dims = list(dict.fromkeys((usual.head_dim, *reading.HEAD_DIMS)))
    if moe and usual.head_dim not in reading.HEAD_DIMS:
        dims.remove(usual.head_dim)
    every = reading.EXPERT_EVERY if moe else (1,)
    gated = (True,) if moe else (usual.gated, not usual.gated)
    ties = (usual.tied, not usual.tied)
    plain = [Kind(g, tie, dim, expert_every=n) for n, g, dim, tie in itertools.product(every, gated, dims, ties)]
    latent = moe and shape.kv_heads == shape.heads
    ranks = itertools.product(reading.LATENT_Q_RANKS, ties) if latent else ()
    return plain + [Kind(True, tie, reading.LATENT["v_head_dim"], True, rank) for rank, tie in ranks]
