"""torchtitan: a Python configuration, and TOML for versions before March 2026, with the names of each version."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from autoplan.config.parallel import Dispatcher, Launch, Mode
from autoplan.config.recompute import BY_OPERATION, FULL, NONE, every_nth, layers_on_ranks
from autoplan.errors import PinError
from autoplan.exporters.launching import srun
from autoplan.exporters.primus import PRIMUS, PrimusYaml
from autoplan.exporters.record import (
    METHODS_BY_ROTATE,
    ROTATE_METHODS,
    Document,
    Field,
    Target,
    TargetRule,
    Values,
    derived,
    micro_batches,
    near_multiples,
    run_number,
    same,
    switch,
)
from autoplan.exporters.scripts import Name, Python
from autoplan.exporters.setup import Setup
from autoplan.exporters.syntax import Toml
from autoplan.names import base_model
from autoplan.schedules.schedule import SCHEDULES, chunks_of_ranks
from autoplan.stacks.records import year_of

RELEASE_2 = year_of("25.10")  # 0.2.0: section compile, stages by their modules, experts over ranks
PYTHON = year_of("26.03")  # TOML became dataclasses on 2026-02-23 (pull request 2386, after release 0.2.2)
GRAPHS = year_of("26.08")  # CUDA graphs became the default on 2026-08-13 (pull request 3559)
_P = "parallelism."
_SPLIT = _P + "pipeline_parallel_split_points"
# Classes of torch.distributed.pipelining, which torchtitan looks up by name (get_schedule_class). Of two schedules of
# one class the later has several stages per rank, as torchtitan asks for.
_BY_CLASS = {record.torch_class: name for name, record in SCHEDULES.items() if record.torch_class is not None}
_SCHEDULES = {name: torch_class.removeprefix("Schedule") for torch_class, name in _BY_CLASS.items()}

# -- stages ------------------------------------------------------------------------------------------------------------


def _parts(stages: tuple[int, ...], last: str) -> list[list[str]]:
    """Return the modules of every stage; `last`: the name of the output layer."""
    out, at = [], 0
    for size in stages:
        out.append([f"layers.{k}" for k in range(at, at + size)])
        at += size
    out[0].insert(0, "tok_embeddings")
    out[-1] += ["norm", last]
    return out


def split(layers: int, chunks: int, first_less: int, last_less: int) -> tuple[int, ...]:
    """Return the layers per stage that torchtitan chooses (distributed/pipeline_parallel.py).

    Embedding and output count as layers, and the first stages get what remains. Raises: PinError if a stage is empty.
    """
    each, more = divmod(layers + first_less + last_less, chunks)
    sizes = [each + (k < more) for k in range(chunks)]
    sizes[0] -= first_less
    sizes[-1] -= last_less
    if min(sizes) < 0:
        raise PinError(
            f"{layers} layers do not fill {chunks} stages; nearest: {layers} stages", ("pp", "virtual_stages")
        )
    return tuple(sizes)


def _write_stages(last: str) -> Callable[[Setup], Values]:
    def write(setup: Setup) -> Values:
        c = setup.config
        if c.pp == 1 or c.schedule not in _SCHEDULES:
            return {}
        out: dict[str, Any] = {_P + "pipeline_parallel_schedule": _SCHEDULES[c.schedule]}
        stages = setup.stages
        return out | ({_P + "module_fqns_per_model_part": _parts(stages, last)} if stages else {})

    return write


def _write_split_points(setup: Setup) -> Values:
    """The first layers of all stages but the first, as release 0.1.0 has them."""
    out, stages = dict(_write_stages("output")(setup)), setup.stages
    if out.pop(_P + "module_fqns_per_model_part", None) is not None and stages:
        out[_SPLIT] = [f"layers.{sum(stages[:k])}" for k in range(1, len(stages))]
    return out


def _stages_between(points: list[str], layers: int) -> tuple[int, ...]:
    """Return the layers per stage between split points. PinError for a point that is no layer."""
    try:
        at = [0, *(int(str(point).removeprefix("layers.")) for point in points), layers]
    except ValueError:
        raise PinError(f"{_SPLIT}={points} must name layers, for example layers.4", ("stages",)) from None
    return tuple(b - a for a, b in itertools.pairwise(at))


def _read_stages(document: Document, found: Values) -> Values:
    pp, layers = found["pp"], len(document.task.layers)
    if pp == 1:
        document.seen.add(_P + "pipeline_parallel_schedule")
        return {"schedule": "1F1B", "virtual_stages": 1, "stages": None}
    names = {name.lower(): ours for ours, name in _SCHEDULES.items()}
    name = str(document.get(_P + "pipeline_parallel_schedule")).lower()
    if name not in names:
        known = ", ".join(_SCHEDULES.values())
        raise PinError(f"pipeline_parallel_schedule={name!r} has no price; known: {known}", ("schedule",))
    schedule = names[name]
    points = document.get(_SPLIT)
    if points and layers:
        stages = _stages_between(points, layers)
        if len(stages) % pp:
            raise PinError(f"{_SPLIT} gives {len(stages)} stages, no multiple of pp={pp}", ("pp",))
        return {"schedule": schedule, "virtual_stages": len(stages) // pp, "stages": stages}
    parts = document.get(_P + "module_fqns_per_model_part")
    if parts:
        if len(parts) % pp:
            raise PinError(f"module_fqns_per_model_part has {len(parts)} parts, no multiple of pp={pp}", ("pp",))
        stages = tuple(sum(str(module).startswith("layers.") for module in part) for part in parts)
        return {"schedule": schedule, "virtual_stages": len(parts) // pp, "stages": stages}
    virtual = 1 if SCHEDULES[schedule].virtual_stages[0] == 1 else 2
    ends = [document.count(f"{_P}pipeline_parallel_{end}_stage_less_layers", 1, (0,)) for end in ("first", "last")]
    per_stage = document.get(_P + "pipeline_parallel_layers_per_stage")
    if per_stage and layers:
        chunks = -(-(layers + sum(ends)) // per_stage)
        if chunks % pp:
            raise PinError(
                f"pipeline_parallel_layers_per_stage={per_stage} gives {chunks} stages, no multiple of pp={pp}"
            )
        virtual = chunks // pp
    stages_read = split(layers, pp * virtual, ends[0], ends[1]) if layers else None
    return {"schedule": schedule, "virtual_stages": virtual, "stages": stages_read}


# -- data parallelism, ZeRO, batch -------------------------------------------------------------------------------------


def _write_data(setup: Setup) -> Values:
    c = setup.config
    out: dict[str, Any] = {}
    if c.zero_stage == 0 or c.num_shards == 1:
        # fully_shard shards over cp too, so that without shards there is no context parallelism
        out = {_P + "data_parallel_replicate_degree": c.dp, _P + "data_parallel_shard_degree": 1}
    else:
        out = {_P + "data_parallel_replicate_degree": c.zero_replicas}
        out[_P + "data_parallel_shard_degree"] = c.dp // c.zero_replicas
        # without pipelines the default reshards; "always" has no CUDA graphs
        kept = {1: "never", 3: "always" if c.pp > 1 else "default"}
        out |= {_P + "fsdp_reshard_after_forward": kept[c.zero_stage]} if c.zero_stage in kept else {}
    return out


def _read_data(document: Document, found: Values) -> Values:
    replicas = document.count(_P + "data_parallel_replicate_degree")
    shards = document.count(_P + "data_parallel_shard_degree", -1)
    used = replicas * found["cp"] * found["tp"] * found["pp"]
    devices = document.task.num_devices
    if shards == -1:
        if not devices:
            return {}
        if devices % used:
            near = near_multiples(used, devices)
            raise PinError(
                f"dp_replicate x cp x tp x pp = {used} does not divide the {devices} devices; nearest: {near} devices",
                ("dp", "tp", "pp", "cp"),
            )
        shards = devices // used
    kept = {"never": 1, "always": 3, "default": 1 if found["pp"] > 1 else 3}
    stage = document.word(_P + "fsdp_reshard_after_forward", kept, kept["default"])
    if shards * found["cp"] == 1:
        return {"dp": replicas, "zero_stage": 0, "zero_replicas": 1}
    return {"dp": replicas * shards, "zero_stage": stage, "zero_replicas": replicas}


def _world(document: Document, found: Values) -> str | None:
    devices, used = document.task.num_devices, 1
    for name in ("dp", "tp", "pp", "cp"):
        used *= found.get(name, 1)
    if not devices or used == devices:
        return None
    return f"dp_replicate x dp_shard x cp x tp x pp = {used}, but there are {devices} devices; nearest: dp_shard = -1"


def _at_once(document: Document, found: Values) -> int | None:
    """Return the micro-batches of one run of the pipeline; None without a pipeline."""
    if found["pp"] == 1:
        return None
    if document.year >= PYTHON:
        return document.count(_P + "num_pp_microbatches")
    return document.count("training.local_batch_size", 8) // document.count(_P + "pipeline_parallel_microbatch_size")


def _fills(document: Document, found: Values) -> str | None:
    at_once, total = _at_once(document, found), found.get("num_micro_batches", 0)
    if at_once is None or not total or total % at_once == 0:
        return None
    return f"a pipeline of {at_once} micro-batches does not divide the {total} of a rank's batch; nearest: {total}"


def _drains(document: Document, found: Values) -> str | None:
    at_once, total = _at_once(document, found), found.get("num_micro_batches", 0)
    if at_once is None or at_once == total or total % at_once:
        return None
    return f"the pipeline fills and drains {total // at_once} times a step, which the price does not know"


def _write_batch(setup: Setup) -> Values:
    """Batches in sequences, as TOML has them."""
    c, t = setup.config, "training."
    local = c.micro_batch_size * (c.num_micro_batches if c.pp > 1 else 1)
    out = {t + "local_batch_size": local, t + "global_batch_size": setup.global_batch_size}
    return out | ({_P + "pipeline_parallel_microbatch_size": c.micro_batch_size} if c.pp > 1 else {})


def _read_batch(document: Document, found: Values) -> Values:
    local = document.count("training.local_batch_size", 8)
    size = document.count(_P + "pipeline_parallel_microbatch_size") if found["pp"] > 1 else local
    if local % size:
        raise PinError(f"local_batch_size={local} is not a multiple of pipeline_parallel_microbatch_size={size}")
    batch = document.count("training.global_batch_size", -1)
    if batch == -1:
        batch = local * found["dp"] if "dp" in found else 0
    return {"micro_batch_size": size, **({"global_batch_size": batch} if batch else {})}


def _write_tokens(setup: Setup) -> Values:
    """Batches in tokens, as Python has them; all micro-batches of a pipeline run at once."""
    c, t, length = setup.config, "training.", setup.seq_len
    out = {
        t + "num_tokens_per_microbatch_per_dp_rank": c.micro_batch_size * length,
        t + "num_tokens_per_train_step": setup.global_batch_size * length,
        t + "max_context_length": length,
    }
    return out | ({_P + "num_pp_microbatches": c.num_micro_batches} if c.pp > 1 else {})


def _read_tokens(document: Document, found: Values) -> Values:
    t = "training."
    length = document.count(t + "max_context_length", 2048)
    tokens, step = (document.count(t + f"num_tokens_per_{n}", -1) for n in ("microbatch_per_dp_rank", "train_step"))
    if step == -1 and "dp" in found:
        step = tokens * found["dp"] * (document.count(_P + "num_pp_microbatches") if found["pp"] > 1 else 1)
    for name, number in (("microbatch_per_dp_rank", tokens), ("train_step", step)):
        if number != -1 and number % length:
            near = near_multiples(length, number)
            raise PinError(f"num_tokens_per_{name}={number} is not a multiple of {length} tokens; nearest: {near}")
    batch = {"global_batch_size": step // length} if step != -1 else {}
    return {"seq_len": length, "micro_batch_size": max(1, tokens // length), **batch}


# -- experts, recompute, precision -------------------------------------------------------------------------------------


def _write_experts(setup: Setup) -> Values:
    return {_P + "expert_parallel_degree": setup.config.ep} if setup.config.ep > 1 else {}


def _read_experts(document: Document, found: Values) -> Values:
    ep = document.count(_P + "expert_parallel_degree")
    # experts take ranks of tp too: ep is made of dp_shard, cp and tp (distributed/parallel_dims.py)
    return {"ep": ep, "etp": 1 if ep > 1 else found["tp"]}


def _write_split_experts(setup: Setup) -> Values:
    c = setup.config
    return {**_write_experts(setup), **({_P + "expert_tensor_parallel_degree": c.expert_tp} if c.ep > 1 else {})}


def _read_split_experts(document: Document, found: Values) -> Values:
    out = _read_experts(document, found)
    etp = document.count(_P + "expert_tensor_parallel_degree")
    if out["ep"] > 1 and etp not in (1, found["tp"]):
        raise PinError(f"expert_tensor_parallel_degree={etp} must be 1 or tp={found['tp']}; nearest: 1", ("etp",))
    return {**out, "etp": etp} if out["ep"] > 1 else out


_MODES = {NONE: "none", BY_OPERATION: "selective", FULL: "full"}


def _layers_on_ranks(c: Mapping[str, Any], layers: int) -> list[list[int]] | None:
    """Return the layers of every rank in the order in which it builds them; None if stages are not known."""
    if c["pp"] == 1:
        return [list(range(layers))]
    if not c["stages"]:
        return None
    return layers_on_ranks(c["stages"], chunks_of_ranks(c["schedule"], c["pp"], c["virtual_stages"]))


def _write_toml_recompute(setup: Setup) -> Values:
    c, again = setup.config, setup.recompute
    where = {"pp": c.pp, "stages": setup.stages, "schedule": c.schedule, "virtual_stages": c.virtual_stages}
    ranks = None if isinstance(again, str) else _layers_on_ranks(where, len(setup.task.layers))
    number = None if ranks is None else every_nth(again, ranks)
    if number is not None:
        return {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": str(number)}
    kind = setup.any_recompute if setup.any_recompute in _MODES else FULL
    out: dict[str, Any] = {"activation_checkpoint.mode": _MODES[kind]}
    return out | ({"activation_checkpoint.selective_ac_option": "op"} if kind == BY_OPERATION else {})


def _read_toml_recompute(document: Document, found: Values) -> Values:
    """Selective is by operation, or every Nth layer that a rank builds in full (_apply_layer_sac)."""
    known = {**{word: kind for kind, word in _MODES.items()}, "memory_budget": BY_OPERATION}
    kind = document.word("activation_checkpoint.mode", known)
    option = str(document.get("activation_checkpoint.selective_ac_option"))
    if document.get("activation_checkpoint.mode") != "selective" or option == "op":
        return {"recompute": kind}
    if not option.isdigit():
        raise PinError(f"selective_ac_option={option!r} is not known; use op, or a number of layers", ("recompute",))
    layers = document.task.layers
    ranks = _layers_on_ranks(found, len(layers)) if layers else None
    if int(option) <= 1 or ranks is None:
        return {"recompute": FULL} if int(option) <= 1 else {}
    again = {k for held in ranks for at, k in enumerate(held, 1) if at % int(option) == 0}
    return {"recompute": {name: FULL for k, name in enumerate(layers) if k in again} or NONE}


def _write_backend(setup: Setup) -> Values:
    names = {Dispatcher.ALL_TO_ALL: "standard", Dispatcher.FLEX: "deepep"}
    given = setup.options.dispatcher
    return {_P + "expert_parallel_comm_backend": names[given]} if setup.config.ep > 1 and given in names else {}


def _read_backend(document: Document, found: Values) -> Values:
    known = {"standard": "alltoall", "deepep": "flex"}
    return {"dispatcher": document.word(_P + "expert_parallel_comm_backend", known)}


def _write_python_recompute(setup: Setup) -> Values:
    kind = setup.any_recompute if setup.any_recompute in _MODES else FULL
    classes = {NONE: None, BY_OPERATION: Name("SelectiveAC.Config()"), FULL: Name("FullAC.Config()")}
    return {"activation_checkpoint": classes[kind]}


def _read_python_recompute(document: Document, found: Values) -> Values:
    if not document.has("activation_checkpoint"):
        return {"recompute": BY_OPERATION}  # what the shipped configurations have
    known = {"SelectiveAC.Config": BY_OPERATION, "FullAC.Config": FULL, "MemoryBudgetAC.Config": BY_OPERATION}
    value = document.get("activation_checkpoint")
    return {"recompute": NONE if value is None else document.word("activation_checkpoint", known)}


def _write_precision(setup: Setup) -> Values:
    return {"training.mixed_precision_param": "float32" if setup.precision == "fp32" else "bfloat16"}


def _write_converters(prefix: str) -> Callable[[Setup], Values]:
    """Converters to 8 bits: `prefix` of their names and sections, empty before release 0.2.0."""

    def write(setup: Setup) -> Values:
        out = dict(_write_precision(setup))
        if setup.precision == "fp8":
            out["model.converters"] = [f"{prefix}float8"]
            out[f"{prefix}float8.enable_fsdp_float8_all_gather"] = setup.options.narrow_gather
        if setup.precision == "mxfp8":
            out["model.converters"] = [f"{prefix}mx"]
        return out

    return write


def _read_precision(document: Document, found: Values) -> Values:
    wide = document.get("training.mixed_precision_param") == "float32"
    return {"precision": "fp32"} if wide else {"precision": "bf16"}


def _read_converters(document: Document, found: Values) -> Values:
    given = document.get("model.converters") or []
    name = next(
        (o for word, o in (("mx", "mxfp8"), ("float8", "fp8")) if {word, f"quantize.linear.{word}"} & set(given)), None
    )
    if name is None:
        return _read_precision(document, found)
    gathers = (f"{prefix}float8.enable_fsdp_float8_all_gather" for prefix in ("quantize.linear.", ""))
    gather = any([bool(document.get(path)) for path in gathers])
    return {"precision": name, **({"narrow_gather": gather} if name == "fp8" else {})}


_NARROW = {"MXFP8LinearConverter": "mxfp8", "Float8LinearConverter": "fp8"}  # converters of components/quantization


def _read_spec(document: Document, found: Values) -> Values:
    given = [str(each).partition(".")[0] for each in document.get("model_spec.converters") or []]
    if "NVFP4LinearConverter" in given:
        raise PinError(f"NVFP4LinearConverter has no price; known: {', '.join(_NARROW)}", ("precision",))
    narrow = next((ours for name, ours in _NARROW.items() if name in given), None)
    return _read_precision(document, found) if narrow is None else {"precision": narrow}


def _read_mode(document: Document, found: Values) -> Values:
    parts = document.get("compile.components")
    whole = parts is None or "model" in parts
    return {"mode": "compiled" if document.get("compile.enable") and whole else "eager"}


def _read_first_mode(document: Document, found: Values) -> Values:
    return {"mode": "compiled" if document.get("training.compile") else "eager"}


def _switch_mode(path: str, read: Callable[[Document, Values], Values], **when: float) -> Field:
    """Return the field that compiles the model."""
    return Field(("mode",), lambda s: {path: s.mode is Mode.COMPILED}, read, **when)


def _write_method(setup: Setup) -> Values:
    method = ROTATE_METHODS.get(setup.context_method or "")
    return {_P + "context_parallel_rotate_method": method} if method else {}


def _read_method(document: Document, found: Values) -> Values:
    path = _P + "context_parallel_rotate_method"
    return {"context_method": document.word(path, METHODS_BY_ROTATE) if found["cp"] > 1 else None}


def _async_tp(path: str, **when: float) -> Field:
    def write(setup: Setup) -> Values:
        used = setup.config.tp > 1 and "tp" in setup.options.overlap and setup.mode is Mode.COMPILED
        return {path: True} if used else {}

    def read(document: Document, found: Values) -> Values:
        return {"overlap": ["tp"] if document.get(path) else []}

    return Field(("overlap",), write, read, **when)


_CAPTURED = "training.disable_cuda_graphs"


def _write_graphs(setup: Setup) -> Values:
    c, without = setup.config, setup.options.launch in (Launch.ASYNC, Launch.BLOCKING)
    return {_CAPTURED: without or c.pp * c.ep > 1}


def _read_graphs(document: Document, found: Values) -> Values:
    return {"launch": "async" if document.get(_CAPTURED) else "graphs"}


def _captured(document: Document, found: Values) -> str | None:
    """Return what forward and backward in one CUDA graph exclude (trainer.py, _validate_cuda_graphs)."""
    if document.year < GRAPHS or document.get(_CAPTURED):
        return None
    always = document.get(_P + "fsdp_reshard_after_forward") == "always"
    what = "pipelines" if found["pp"] > 1 else "fsdp_reshard_after_forward=always" if always else None
    return None if what is None else f"CUDA graphs exclude {what}; nearest: disable_cuda_graphs=True"


def _captured_experts(document: Document, found: Values) -> str | None:
    if document.year < GRAPHS or document.get(_CAPTURED) or found["ep"] == 1:
        return None
    return (
        "CUDA graphs need a dispatcher without synchronization (HybridEP with non_blocking_capacity_factor, "
        "MinimalAsyncEP), which model_spec decides; nearest: disable_cuda_graphs=True"
    )


_OFFLOAD = Field(
    ("offload",),
    lambda s: {"training.enable_cpu_offload": True} if s.config.offload == ("parameters",) else {},
    lambda d, found: {"offload": ("parameters",) if d.get("training.enable_cpu_offload") else ()},
)
_OLD: Mapping[str, Any] = {"until": PYTHON}
_FIRST: Mapping[str, Any] = {"until": RELEASE_2}
_SECOND: Mapping[str, Any] = {"since": RELEASE_2, "until": PYTHON}
_NEW: Mapping[str, Any] = {"since": PYTHON}
_STAGES = ("schedule", "virtual_stages", "stages")
_EXPERTS = ("ep", "etp")

# -- files -------------------------------------------------------------------------------------------------------------

# Shipped configurations of the catalog's models (torchtitan/models/*/config_registry.py)
_BASES = {
    **{f"llama-3.1-{size}": ("llama3", f"llama3_{size}") for size in ("8b", "70b", "405b")},
    **{f"qwen3-{size}": ("qwen3", f"qwen3_{size.replace('.', '_')}") for size in ("0.6b", "1.7b", "14b", "32b")},
    "qwen3-30b-a3b": ("qwen3", "qwen3_30b_a3b"),
    "deepseek-v3": ("deepseek_v3", "deepseek_v3_671b"),
    **{f"gpt-oss-{size}": ("gpt_oss", f"gpt_oss_{size}") for size in ("20b", "120b")},
}
# Those whose model_spec multiplies in 8 bits -> the name of the model in model_registry, which gives it without
_NARROW_BASES = {"llama-3.1-405b": "405B"}
_EIGHT_BITS = 8.9  # the least compute capability with products in 8 bits (Float8LinearConverter)


def function_name(setup: Setup) -> str:
    """Return the name of the function: the model and its degrees, as torchtitan names its recipes."""
    c = setup.config
    parts = [f"{n}{getattr(c, n)}" for n in ("pp", "dp", "cp", "tp", "ep") if getattr(c, n) > 1]
    model = "".join(ch if ch.isalnum() else "_" for ch in setup.task.model.lower()) or "model"
    return "_".join([model if model[0].isalpha() else f"m{model}", *parts])


def _head(setup: Setup, values: Values) -> tuple[list[str], str]:
    family, name = _BASES.get(base_model(setup.task.model), ("", "base"))
    plain, device = _NARROW_BASES.get(base_model(setup.task.model)), setup.task.hardware
    if plain and device is not None and (device.compute_capability or _EIGHT_BITS) < _EIGHT_BITS:
        family, name, plain = "", "base", None  # the shipped one cannot even be called there
    recompute = str(values.get("activation_checkpoint")).partition(".")[0]
    lines = [f"from torchtitan.distributed.activation_checkpoint import {recompute}"] if recompute != "None" else []
    if not family:
        lines.append("from my_configs import base  # yours: returns the Trainer.Config of the model, with its data")
    else:
        lines += [f"from torchtitan.models.{family} import model_registry"] if plain else []
        lines.append(f"from torchtitan.models.{family}.config_registry import {name}")
    lines += [
        "",
        "",
        f"def {function_name(setup)}():",
        f'    """{setup.task.model or "The model"} as autoplan planned it."""',
    ]
    spec = [f'    config.model_spec = model_registry("{plain}")  # without its 8-bit products'] if plain else []
    return [*lines, f"    config = {name}()", *spec], "config"


def _launch(setup: Setup, file: str, year: float) -> list[str]:
    if year < PYTHON:
        return srun(setup, ["-m", "torchtitan.train", "--job.config_file", file])
    module = file.rpartition("/")[2].removesuffix(".py")
    return srun(setup, ["-m", "torchtitan.train", "--module", module, "--config", function_name(setup)])


# Written in both syntaxes, since a Python configuration changes one that has values of its own
_BASE = {
    **{f"{_P}{name}_parallel_degree": 1 for name in ("tensor", "pipeline", "context", "expert")},
    **dict.fromkeys((_P + "module_fqns_per_model_part", _P + "pipeline_parallel_layers_per_stage")),
    _P + "fsdp_reshard_after_forward": "default",
    "training.enable_cpu_offload": False,
    "compile.enable_async_tensor_parallel": False,
    "compile.components": ["model", "loss"],  # some shipped configurations compile the loss alone
}

TORCHTITAN = Target(
    name="torchtitan",
    about="a Python function that returns a configuration; TOML before 26.03",
    stack="torchtitan",
    files=((0.0, Toml()), (PYTHON, Python(_head, {}))),
    also=(PrimusYaml("torchtitan"),),
    marks_also=(PRIMUS,),
    version_in=lambda values: "26.02" if PRIMUS in values else None,
    fields=(
        same(_P + "tensor_parallel_degree", "tp"),
        same(_P + "pipeline_parallel_degree", "pp"),
        same(_P + "context_parallel_degree", "cp"),
        Field(("dp", "zero_stage", "zero_replicas"), _write_data, _read_data),
        run_number("training.seq_len", "seq_len", **_OLD),
        Field(("micro_batch_size", "global_batch_size"), _write_batch, _read_batch, **_OLD),
        Field(("seq_len", "micro_batch_size", "global_batch_size"), _write_tokens, _read_tokens, **_NEW),
        derived(micro_batches, "num_micro_batches"),
        Field(_STAGES, _write_split_points, _read_stages, **_FIRST),
        Field(_STAGES, _write_stages("output"), _read_stages, **_SECOND),
        Field(_STAGES, _write_stages("lm_head"), _read_stages, **_NEW),
        Field(_EXPERTS, lambda s: {}, lambda d, found: {"ep": 1, "etp": found["tp"]}, **_FIRST),
        Field(_EXPERTS, _write_split_experts, _read_split_experts, **_SECOND),
        Field(_EXPERTS, _write_experts, _read_experts, **_NEW),
        Field(("dispatcher",), _write_backend, _read_backend, since=year_of("25.12"), until=PYTHON),
        Field(("recompute",), _write_toml_recompute, _read_toml_recompute, **_OLD),
        Field(("recompute",), _write_python_recompute, _read_python_recompute, **_NEW),
        _OFFLOAD,
        Field(("precision", "narrow_gather"), _write_converters(""), _read_converters, **_FIRST),
        Field(("precision", "narrow_gather"), _write_converters("quantize.linear."), _read_converters, **_SECOND),
        Field(("precision",), _write_precision, _read_spec, **_NEW),
        _switch_mode("training.compile", _read_first_mode, **_FIRST),
        _switch_mode("compile.enable", _read_mode, since=RELEASE_2),
        Field(("context_method",), _write_method, _read_method, **_OLD),
        _async_tp(_P + "enable_async_tensor_parallel", **_OLD),
        _async_tp("compile.enable_async_tensor_parallel", **_NEW),
        switch(_P + "enable_sequence_parallel", "sequence_parallel", lambda s: s.options.sequence_parallel, **_NEW),
        Field(("launch",), _write_graphs, _read_graphs, since=GRAPHS),
    ),
    marks=(
        *(_P + "tensor_parallel_degree", _P + "data_parallel_shard_degree", _P + "pipeline_parallel_degree"),
        *("training.num_tokens_per_microbatch_per_dp_rank", "training.max_context_length"),
    ),
    launch=_launch,
    cannot={
        "virtual_stages": "stages follow from the layers of each, which must divide the model's",
        "precision": "8 bits are converters of the model (Float8LinearConverter.Config, MXFP8LinearConverter.Config)",
        "zero_stage": "fully_shard keeps gathered parameters or frees them (ZeRO 1 or 3), and shards over cp too",
        "schedule": "torchtitan has the classes of torch.distributed.pipelining, with two or more stages per rank",
        "ep": "experts are spread over ranks since 25.10 (release 0.2.0)",
        "etp": "experts take ranks of tp: whole experts with ep, split ones without",
        "recompute": "one kind for all layers: none, products or full; in TOML also every Nth layer of a rank",
        "launch": "one CUDA graph of forward and backward, without pipelines and experts over ranks, since 26.08",
        "offload": "fully_shard offloads parameters, gradients and optimizer together",
        "attention": "a setting of the model (attn_backend)",
        "context_method": "a setting of PyTorch's context parallelism",
        "dispatcher": "a setting of the model",
        "overlap": "torchtitan overlaps tensor parallelism if it compiles",
    },
    rules=(
        *(TargetRule(_world), TargetRule(_fills), TargetRule(_captured)),
        *(TargetRule(_drains, warns=True), TargetRule(_captured_experts, warns=True)),
    ),
    base=_BASE,
)
