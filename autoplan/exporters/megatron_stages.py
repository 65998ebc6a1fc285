"""Stages and recompute as Megatron has them: layouts, chunks per rank, first layers of every stage."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from autoplan.config.recompute import FULL, MODULES, NONE, OFFLOAD, SELECTIVE, leading, modules_choice, modules_of
from autoplan.errors import PinError
from autoplan.exporters.record import Document, Values, near_parts
from autoplan.exporters.setup import Setup
from autoplan.stacks.like import equal_stages

At = Callable[[str], str]

# -- stages ------------------------------------------------------------------------------------------------------------


def layout_text(stages: tuple[int, ...], num_mtp: int = 0) -> str:
    """Return Megatron's layout string of layers per stage: `Et*3|t*4L`.

    Args:
        num_mtp: how many of the layers, the last ones, predict tokens after the next: `Et*3|t*3mL`.
    """
    parts, left = list[str](), num_mtp
    for count in reversed(stages):
        later = min(left, count)
        left -= later
        decoders = count - later
        parts.insert(0, (f"t*{decoders}" if decoders > 1 else "t" * decoders) + "m" * later)
    return "|".join(["E" + parts[0], *parts[1:-1], parts[-1] + "L"])


def layout_stages(text: str, num_mtp: int = 0) -> tuple[int, ...]:
    """Return the layers per stage of a layout string. PinError if it is none.

    Args:
        num_mtp: layers of the model that predict tokens after the next, which the letter m stands for; a model without
            them leaves these letters out.
    """
    unrolled = text.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):  # as pipeline_parallel_layer_layout.py unrolls them
        unrolled = re.sub(pattern, lambda x: x.group(1) * int(x.group(2)), unrolled)
    if not re.fullmatch(r"[EtmL|]+", unrolled):
        raise PinError(
            f"pipeline_model_parallel_layout={text!r} has other letters than E, t, m and L; for example Ett|ttL"
        )
    return tuple(stage.count("t") + (stage.count("m") if num_mtp else 0) for stage in unrolled.split("|"))


def write_stages(at: At, virtual: str) -> Callable[[Setup], Values]:
    """Return what writes the pipeline layout; equal stages need only the option `virtual`."""

    def write(setup: Setup) -> Values:
        stages, v = setup.stages, setup.config.virtual_stages
        num_mtp = setup.task.num_mtp
        if stages is not None and len(set(_without(stages, num_mtp))) > 1:
            return {at("pipeline_model_parallel_layout"): layout_text(stages, num_mtp)}
        return {at(virtual): v} if v > 1 else {}

    return write


def _without(stages: tuple[int, ...], num_mtp: int) -> tuple[int, ...]:
    """Return the decoder layers per stage where the layers that predict tokens after the next are in the last stage,
    as Megatron puts them if no layout says otherwise; the stages as they are elsewhere."""
    *others, last = stages
    return (*others, last - num_mtp) if last >= num_mtp else stages


def read_stages(at: At, virtual: str) -> Callable[[Document, Mapping[str, Any]], Values]:
    """Return what reads schedule, chunks per rank and stages from the pipeline options."""

    def read(document: Document, found: Values) -> Values:
        pp, layers, num_mtp = found["pp"], document.task.decoder_layers, document.task.num_mtp
        layout = document.get(at("pipeline_model_parallel_layout"))
        if layout is not None:
            stages = layout_stages(re.sub(r"[\\'\"]", "", str(layout)), num_mtp)  # of a text that a shell reads again
            if len(stages) % pp:
                raise PinError(
                    f"pipeline_model_parallel_layout has {len(stages)} stages, no multiple of pp={pp}", ("pp",)
                )
            return _chunked(len(stages) // pp, stages if len(stages) > 1 else None)
        v = document.count(at(virtual))
        per_chunk = document.get(at("num_layers_per_virtual_pipeline_stage"))
        if per_chunk is not None and layers:
            if layers % (pp * per_chunk):
                raise PinError(
                    f"num_layers_per_virtual_pipeline_stage={per_chunk} x pp={pp} does not divide the {layers} layers; "
                    + (
                        f"nearest: {near_parts(layers // pp, per_chunk)} layers"
                        if layers % pp == 0
                        else f"nearest: pp={near_parts(layers, pp)}"
                    ),
                    ("virtual_stages", "pp"),
                )
            v = layers // (pp * per_chunk)
        cut = _uneven(document, at, layers, pp, v) if layers and pp * v > 1 else None
        return _chunked(v, cut if cut is None else (*cut[:-1], cut[-1] + num_mtp))

    return read


def _chunked(virtual: int, stages: tuple[int, ...] | None) -> Values:
    schedule = "1F1B" if virtual == 1 else "Interleaved1F1B"
    return {"virtual_stages": virtual, "schedule": schedule, "stages": stages}


def _uneven(document: Document, at: At, layers: int, pp: int, virtual: int) -> tuple[int, ...] | None:
    """Return the layers per stage that flags of the first and the last rank of the pipeline give, or equal ones.

    A rank cuts its layers into equal stages (`get_num_layers_to_build` of core/transformer/transformer_block.py).
    """
    chunks = pp * virtual
    names = ("decoder_{}_pipeline_num_layers", "num_layers_in_{}_pipeline_stage")
    first, last = (
        next((n for n in (document.get(at(name.format(end))) for name in names) if n is not None), None)
        for end in ("first", "last")
    )
    ends = [bool(document.get(at(f"account_for_{end}_in_pipeline_split"))) for end in ("embedding", "loss")]
    if first is None and last is None:
        return _equal(layers, chunks, ends, document.partial, document.task.num_mtp)
    return _by_rank(layers, pp, virtual, first, last)


def _equal(layers: int, chunks: int, ends: list[bool], partial: bool, num_mtp: int) -> tuple[int, ...] | None:
    """Return equal layers per stage. `ends`: whether the embedding and the loss count as layers."""
    if (layers + sum(ends)) % chunks and partial:
        found = equal_stages(layers + num_mtp, chunks, 1, num_mtp)  # as the stack cuts them
        return found if found is None else (*found[:-1], found[-1] - num_mtp)
    if (layers + sum(ends)) % chunks:
        raise PinError(
            f"{layers + sum(ends)} layers{' with embedding and loss' if any(ends) else ''} do not split into "
            f"{chunks} equal stages; nearest: {near_parts(layers + sum(ends), chunks)} stages, or uneven ones by "
            "pipeline_model_parallel_layout",
            ("pp", "virtual_stages"),
        )
    each = (layers + sum(ends)) // chunks
    return (each - ends[0], *(each,) * (chunks - 2), each - ends[1])


def _by_rank(layers: int, pp: int, virtual: int, first: int | None, last: int | None) -> tuple[int, ...]:
    """Return the layers per stage from those of the first and the last rank; the others have equally many."""
    left, inner = layers - (first or 0) - (last or 0), pp - (first is not None) - (last is not None)
    if inner < 0 or (left != 0 if inner == 0 else left <= 0 or left % inner):
        raise _not_cut(layers, pp, first, last)
    middle = (left // inner,) * inner if inner else ()
    ranks = (*(() if first is None else (first,)), *middle, *(() if last is None else (last,)))
    uneven = next((n for n in ranks if n % virtual), None)
    if uneven is not None:
        near = " or ".join(str(n) for n in (uneven // virtual * virtual, -(-uneven // virtual) * virtual) if n)
        raise PinError(
            f"{uneven} layers of a rank do not split into its {virtual} virtual stages; nearest: {near} layers",
            ("virtual_stages",),
        )
    return tuple(n // virtual for n in ranks) * virtual


def _not_cut(layers: int, chunks: int, first: int | None, last: int | None) -> PinError:
    """Return the error for layers of the first or last stage that leave the other stages unequal."""
    given = [n for n in (first, last) if n is not None]
    inner, each = chunks - len(given), max(1, round(layers / chunks))
    rest = layers - each * inner
    ends = "first and the last" if len(given) > 1 else "first" if last is None else "last"
    these = "these together" if len(given) > 1 else "this"
    near = (
        f"{each} layers in each of the others and {rest} in {these}"
        if rest >= len(given) and inner > 0
        else "fewer stages"
    )
    return PinError(
        f"{layers - sum(given)} layers do not split into the {inner} stages beside {' and '.join(map(str, given))} "
        f"layers in the {ends}; nearest: {near}",
        ("pp",),
    )


# -- recompute ---------------------------------------------------------------------------------------------------------


def _most_leading(kinds: tuple[str, ...], stages: tuple[int, ...]) -> int:
    """Return the first layers of every stage that hold all layers with recompute."""
    most, at = 0, 0
    for size in stages:
        part = kinds[at : at + size]
        most = max([most, *(k + 1 for k, kind in enumerate(part) if kind != NONE)])
        at += size
    return most


# Modules whose inputs go to the host; together they hold nearly all of a layer with experts. There is none for the two
# products of a dense MLP. The fraction of modules in forward order is of first layers in every chunk of the pipeline
# (pipeline_parallel/fine_grained_activation_offload.py, post_warmup_callback).
_HEAVY = ("qkv_linear", "core_attn", "attn_proj", "expert_fc1", "moe_act")
_OFFLOADED = ("attn_norm", *_HEAVY[:3], "mlp_norm", *_HEAVY[3:])


def _write_fine_grained(at: At, setup: Setup) -> Values:
    """Return the offload of as many first layers of every stage; nothing if the setup has no such one."""
    kind, stages = setup.recompute, setup.stages or (len(setup.task.layers),)
    each = (kind,) * sum(stages) if isinstance(kind, str) else kind
    if OFFLOAD not in each or not setup.task.num_experts or sum(stages) != len(each):
        return {}
    count = leading(each, stages, OFFLOAD)
    if count is None:
        return {}
    out = {at("fine_grained_activation_offloading"): True, at("offload_modules"): list(_OFFLOADED)}
    return out | ({at("activation_offload_fraction"): count / max(stages)} if count < max(stages) else {})


def _read_fine_grained(at: At, document: Document, found: Mapping[str, Any]) -> Values | None:
    """Return the layers whose modules are offloaded; None for a few modules of them, which have no price."""
    switch, modules = at("fine_grained_activation_offloading"), at("offload_modules")
    if not document.values.get(switch) or not set(_HEAVY) <= set(document.values.get(modules) or ()):
        return None
    document.seen.update((switch, modules))
    share = document.get(at("activation_offload_fraction"))
    layers, chunks = document.task.layers, found["pp"] * found["virtual_stages"]
    stages = found.get("stages") or ((len(layers) // chunks,) * chunks)
    held: dict[str, str] = {}
    first = 0
    for size in stages:
        count = size if share is None else round(float(share) * size)
        held |= dict.fromkeys(layers[first : first + count], OFFLOAD)
        first += size
    return {"recompute": (held or NONE) if layers else OFFLOAD}


def write_recompute(at: At) -> Callable[[Setup], Values]:
    """Return what writes the recompute options."""

    def write(setup: Setup) -> Values:
        kind = setup.recompute
        one = kind if isinstance(kind, str) else ""
        if one == NONE:
            return {}
        if one == SELECTIVE or modules_of(one):
            modules = list(modules_of(one)) or ["core_attn"]
            return {at("recompute_granularity"): "selective", at("recompute_modules"): modules}
        layers = len(setup.task.layers)
        if OFFLOAD in ((one,) if one else kind) and setup.config.pp == 1 and layers > 1:
            held = min(layers - 1, layers if one else sum(k == OFFLOAD for k in kind))
            if one or leading(tuple(kind), (layers,), OFFLOAD) is not None:
                return {at("cpu_offloading_num_layers"): held}
        if fine := _write_fine_grained(at, setup):
            return fine
        full = {at("recompute_granularity"): "full", at("recompute_method"): "uniform", at("recompute_num_layers"): 1}
        stages = setup.stages or (layers,)
        if one or sum(stages) != len(kind):
            return full
        return full | {at("recompute_method"): "block", at("recompute_num_layers"): _most_leading(tuple(kind), stages)}

    return write


def _read_offload(at: At, document: Document, found: Mapping[str, Any]) -> Values:
    """Return the layers whose activations wait on the host: modules of them, or whole first layers."""
    if (fine := _read_fine_grained(at, document, found)) is not None:
        return fine
    off = document.get(at("cpu_offloading")) is False  # a setting of Bridge; Megatron-LM's flag turns it on
    held = 0 if off else document.count(at("cpu_offloading_num_layers"), 0)
    return {"recompute": NONE if not held else dict.fromkeys(document.task.layers[:held], OFFLOAD) or OFFLOAD}


def recompute_reader(at: At) -> Callable[[Document, Mapping[str, Any]], Values]:
    """Return what reads recompute, of the whole model or by block, from the recompute options."""

    def read(document: Document, found: Values) -> Values:
        layers = document.task.layers
        granularity = document.get(at("recompute_granularity"))
        if granularity is None and document.get(at("recompute_activations")):
            granularity = "selective"
        if granularity is None and document.get(at("checkpoint_activations")):  # before Megatron-LM 3.0
            return {"recompute": FULL}
        old = granularity is None and document.get(at("activations_checkpoint_method")) is not None  # its last year
        method, number = at("recompute_method"), at("recompute_num_layers")
        if old:
            granularity = "full"
            method, number = at("activations_checkpoint_method"), at("activations_checkpoint_num_layers")
        if granularity is None:
            return _read_offload(at, document, found)
        if granularity == "selective":
            given = document.get(at("recompute_modules")) or ["core_attn"]
            modules = given if isinstance(given, list) else [given]
            unknown = [m for m in modules if m not in MODULES]
            if unknown:
                raise PinError(
                    f"recompute_modules={unknown[0]!r} has no price; known: {', '.join(MODULES)}", ("recompute",)
                )
            return {"recompute": SELECTIVE if modules == ["core_attn"] else modules_choice(modules)}
        if document.get(method) != "block":
            return {"recompute": FULL}
        count = document.count(number, 1, (0,))
        chunks = found["pp"] * found["virtual_stages"]
        stages = found.get("stages") or ((len(layers) // chunks or count,) * chunks)
        return {"recompute": tuple(min(count, size) for size in stages)}

    return read
