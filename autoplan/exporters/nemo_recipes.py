"""Recipes of NeMo 2.0 in Python, turned into values by the names of Megatron Bridge, which succeeded it.

    recipe = llm.llama3_8b.pretrain_recipe(num_nodes=2, performance_mode=True)
    recipe.trainer.strategy.tensor_model_parallel_size = 4

What a recipe says by itself is data with its source, `profiles/recipes/nemo.json`; the script changes it. A recipe that
is made of its parts (`run.Partial(llm.pretrain, trainer=...)`) has the defaults of MegatronStrategy.
"""

from __future__ import annotations

import ast
import difflib
import json
import re
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from typing import Any

from autoplan.exporters.python_expressions import path_of
from autoplan.exporters.python_file import read_made
from autoplan.exporters.python_values import BY_FUNCTION, UNKNOWN, maker_of
from autoplan.exporters.record import Document, Recognised, TargetRule, Values

_OF_PARTS = ("pretrain", "finetune", "train")  # functions of nemo.collections.llm that a Partial is of
_RECIPES = ("pretrain_recipe", "finetune_recipe")
_CALLBACK = "trainer.callbacks.MegatronCommOverlapCallback"
_PLUGINS, _STRATEGY = "trainer.plugins", "trainer.strategy"
# Arguments of a recipe -> path
_ARGUMENTS = {"num_nodes": "trainer.num_nodes", "num_gpus_per_node": "trainer.devices"}
# Sections of a recipe -> what is not known of Bridge's if something unknown makes them
_SECTIONS: Mapping[str, tuple[str, ...]] = {
    "trainer": ("model", "ddp", "mixed_precision", "comm_overlap"),
    "data": ("train", "model.seq_length"),
    "optim": ("optimizer", "ddp.use_distributed_optimizer"),
    "model": (
        *(f"model.recompute_{name}" for name in ("granularity", "modules")),
        *("model.moe_token_dispatcher_type", "model.cross_entropy_loss_fusion"),
    ),
}
# Paths of a recipe and of Bridge's ConfigContainer; the longest that fits counts
_RENAMED = {
    "trainer.num_nodes": "nemo.num_nodes",
    "trainer.devices": "nemo.devices",
    "peft": "nemo.peft",
    f"{_STRATEGY}.ddp": "ddp",
    f"{_STRATEGY}.num_distributed_optimizer_instances": "ddp.num_distributed_optimizer_instances",
    _STRATEGY: "model",
    "model.config": "model",
    "data.micro_batch_size": "train.micro_batch_size",
    "data.global_batch_size": "train.global_batch_size",
    "data.seq_length": "model.seq_length",
    _CALLBACK: "comm_overlap",
    "trainer.callbacks": "nemo.callbacks",
    _PLUGINS: "mixed_precision",
    f"{_PLUGINS}.fp8_params": "mixed_precision.fp8_param_gather",
    "optim.config.use_distributed_optimizer": "ddp.use_distributed_optimizer",
    "optim.config": "optimizer",
}
# What a plugin of MegatronMixedPrecision is in Bridge: (kind of precision, recipe of 8 bits)
_PRESETS = {
    ("bf16", ""): "bf16_mixed",
    ("16", ""): "fp16_mixed",
    ("bf16", "delayed"): "bf16_with_fp8_delayed_scaling_mixed",
    ("bf16", "tensorwise"): "bf16_with_fp8_current_scaling_mixed",
    ("bf16", "blockwise"): "bf16_with_fp8_subchannel_scaling_mixed",
    ("bf16", "mxfp8"): "bf16_with_mxfp8_mixed",
    ("32", ""): "MixedPrecisionConfig",
}
# Functions of nemo/collections/llm/recipes/precision/mixed_precision.py -> what they set
_BF16 = {"precision": "bf16-mixed", "grad_reduce_in_fp32": True}
_BF16_FP8 = {**_BF16, "fp8": "hybrid", "fp8_param_gather": True}
_PLUGIN_FUNCTIONS: Mapping[str, Mapping[str, Any]] = {
    "bf16_mixed": _BF16,
    "fp16_mixed": {"precision": "16-mixed", "grad_reduce_in_fp32": False},
    "bf16_with_fp8_mixed": {**_BF16_FP8, "fp8_recipe": "delayed"},
    "bf16_with_mxfp8_mixed": {**_BF16_FP8, "fp8_recipe": "mxfp8"},
    "bf16_with_fp8_current_scaling_mixed": {**_BF16_FP8, "fp8_recipe": "tensorwise"},
    "bf16_with_fp8_subchannel_scaling_mixed": {**_BF16_FP8, "fp8_recipe": "blockwise", "fp8_param_gather": False},
}
_IMPORT = re.compile(r"^\s*(from|import)\s+nemo\.collections(\.llm\b|\s+import\b.*\bllm\b)", re.MULTILINE)
_IDLE_CALLS = re.compile(r"(nemo_)?run\.|fdl\.|llm\.import_ckpt")  # calls that take a recipe and leave it as it is
# Of scripts/performance/helpers.py, which gives a recipe degrees, batch and precision
_SETS_DEGREES, _DEGREES = "set_primary_perf_configs", re.compile(r"_size$|num_nodes$|devices$|plugins")


@lru_cache(maxsize=1)
def _table() -> Mapping[str, Any]:
    """Return the recipes, their defaults, and the month of their release."""
    found: Mapping[str, Any] = json.loads(
        files("autoplan.profiles").joinpath("recipes", "nemo.json").read_text(encoding="utf-8")
    )
    return found


def month() -> str:
    """Return the month of the release that the recipes are of."""
    return str(_table()["month"])


def is_recipe(values: Values) -> bool:
    """Return True for values of a recipe of NeMo 2."""
    return "nemo.recipe" in values


def is_script(text: str) -> bool:
    """Return True for a script that imports NeMo's collection of language models."""
    return _IMPORT.search(text) is not None


def read_recipe(text: str, where: str) -> dict[str, Any] | None:
    """Return the values of a script that makes a recipe of NeMo 2, by Bridge's paths; None for any other file.

    Raises: Recognised for a script of NeMo 2 whose recipe cannot be read, with its line.
    """
    if not is_script(text):
        return None
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return None  # the reader of Bridge names it
    places = _imported(tree)
    made_by, given = read_made(text, where, (*_RECIPES, *_OF_PARTS))
    if not made_by:
        raise _unread(tree, where)
    first, dot, rest = made_by.partition("(")[0].partition(".")
    name = f"{places.get(first, first)}{dot}{rest}"
    given = {path: value for path, value in given.items() if not _is_idle_call(path, value)}
    function = maker_of(name)
    base = _of_any() if function in _OF_PARTS else _of_recipe(name.split("."), given, where)
    if any(path.startswith(f"{UNKNOWN}{_SETS_DEGREES}(") for path in given):
        base = {f"{UNKNOWN}{p}" if _DEGREES.search(p) else p: base[p] for p in base}
        base |= {path: f"{_SETS_DEGREES}(...)" for path in base if path.startswith(UNKNOWN)}
    values = _with_presets({**base, **_without_arguments(given)}, given)
    return {**_renamed(values), "nemo.recipe": ".".join(name.split(".")[-2:])}


def _imported(tree: ast.Module) -> dict[str, str]:
    """Return what the names that a file imports stand for: `llm` -> `nemo.collections.llm`."""
    out: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            out |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            out |= {alias.asname or alias.name.partition(".")[0]: alias.name for alias in node.names if alias.asname}
            out |= {
                alias.name.partition(".")[0]: alias.name.partition(".")[0] for alias in node.names if not alias.asname
            }
    return out


def _unread(tree: ast.Module, where: str) -> Recognised:
    """Return the error of a script of NeMo that makes no recipe that can be read, with the line of what trains."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    words = (*_RECIPES, *_OF_PARTS)
    named = next((n for n in calls if (path_of(n.func) or ast.unparse(n.func)).rpartition(".")[2] in words), None)
    said = "makes no recipe" if named is None else f"{ast.unparse(named)[:80]} (line {named.lineno}) is not kept"
    return Recognised(
        f"{where} is a script of NeMo 2, and {said}; nearest: recipe = llm.llama3_8b.pretrain_recipe(...), or "
        "recipe = run.Partial(llm.pretrain, model=..., trainer=..., data=...), under a name"
    )


def _is_idle_call(path: str, value: Any) -> bool:
    return value == BY_FUNCTION and _IDLE_CALLS.match(path.removeprefix(UNKNOWN)) is not None


def _of_recipe(name: list[str], given: Values, where: str) -> dict[str, Any]:
    """Return what a recipe says by itself, for the arguments that it is given."""
    recipes, recipe = _table()["recipes"], name[-2] if len(name) > 1 else ""
    if recipe not in recipes:
        near = difflib.get_close_matches(recipe, recipes, 3, 0.4)
        known = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(recipes)}"
        raise Recognised(
            f"{where}: the recipe {recipe or '.'.join(name)!r} of NeMo is not known; {known}, or run.Partial("
            "llm.pretrain, model=..., trainer=..., data=...)"
        )
    for argument in ("performance_mode", "peft_scheme", "packed_sequence"):
        if f"{UNKNOWN}{argument}" in given:
            text = given[f"{UNKNOWN}{argument}"]
            raise Recognised(f"{where} does not decide {argument}={text}; nearest: {argument} as a value")
    kind, rows = name[-1].removesuffix("_recipe"), recipes[recipe]
    fast = bool(given.get("performance_mode"))
    words = [kind]
    if kind == "finetune":
        scheme, packed = str(given.get("peft_scheme", "lora")).lower(), given.get("packed_sequence")
        words += ["lora" if scheme == "dora" else scheme, *["packed"] * (fast if packed is None else bool(packed))]
    row = rows.get(" ".join([*words, *["performance"] * fast]))
    if row is None:
        said = f"{' '.join(words)}{' performance' * fast}"
        raise Recognised(f"{where}: the recipe {recipe} of NeMo has no {said}; nearest: {', '.join(rows)}")
    return {**_table()["defaults"], **row}


def _of_any() -> dict[str, Any]:
    """Return what the classes of models say, whatever makes the recipe."""
    return {path: value for path, value in _table()["defaults"].items() if path in _OF_CLASSES}


def _without_arguments(given: Values) -> dict[str, Any]:
    """Return the values of a script by the paths of a recipe: arguments of its function are at the places they set."""
    out: dict[str, Any] = {}
    for path, value in given.items():
        mark, name = (UNKNOWN, path.removeprefix(UNKNOWN)) if path.startswith(UNKNOWN) else ("", path)
        if name in _ARGUMENTS:
            out[mark + _ARGUMENTS[name]] = value
        elif name == "seq_length" and value is not None:
            out[f"{mark}data.seq_length"] = value
        elif "." in name or name == "peft" or (mark and (value == BY_FUNCTION or name in _SECTIONS)):
            out[path] = value
    return out


def _with_presets(values: dict[str, Any], given: Values) -> dict[str, Any]:
    """Return values in which objects that the script assigns replace what the recipe has at their places."""
    unknown = {path.removeprefix(UNKNOWN) for path in values if path.startswith(UNKNOWN)}
    out = {path: value for path, value in values.items() if path not in unknown or path in given}
    for path in (_PLUGINS, f"{_STRATEGY}.ddp", _STRATEGY, "trainer.callbacks", "peft", *_SECTIONS):
        if path in given or f"{UNKNOWN}{path}" in given:  # another object
            out = {p: v for p, v in out.items() if not p.startswith(f"{path}.") or p in given}
    plugin = maker_of(str(given.get(_PLUGINS, "")))
    if plugin in _PLUGIN_FUNCTIONS:
        out.pop(f"{UNKNOWN}{_PLUGINS}", None)
        out = {**{f"{_PLUGINS}.{name}": v for name, v in _PLUGIN_FUNCTIONS[plugin].items()}, **out}
    if maker_of(str(given.get("optim", ""))).startswith("distributed_fused_adam"):
        out.pop(f"{UNKNOWN}optim", None)
        out.setdefault("optim.config.use_distributed_optimizer", True)
    *_, recipe, function = ["", *str(given.get("model", "")).split(".")]
    if function == "model" and recipe in _table()["recipes"]:  # `model()` of a recipe
        out.pop(f"{UNKNOWN}model", None)
        rows = _table()["recipes"][recipe]
        of_model = next(iter(rows.values()))
        out |= {path: value for path, value in of_model.items() if path in _OF_CLASSES and path not in out}
    return out


# What the rows of the table have of the class of the model
_OF_CLASSES = (
    *("model.config.moe_token_dispatcher_type", "model.config.cross_entropy_fusion_impl"),
    "model.config.cross_entropy_loss_fusion",
)


def _renamed(values: Values) -> dict[str, Any]:
    """Return the values of a recipe by the paths of Megatron Bridge."""
    out: dict[str, Any] = {}
    for path, value in values.items():
        mark, name = (UNKNOWN, path.removeprefix(UNKNOWN)) if path.startswith(UNKNOWN) else ("", path)
        if mark and name in _SECTIONS:
            out |= {f"{UNKNOWN}{each}": value for each in _SECTIONS[name]}
            continue
        start = max((each for each in _RENAMED if name == each or name.startswith(f"{each}.")), key=len, default=None)
        if start is None:
            out |= {path: value} if mark else {}
        elif name != start or start not in (_STRATEGY, f"{_STRATEGY}.ddp", "model.config", _PLUGINS, "optim.config"):
            out[f"{mark}{_RENAMED[start]}{name.removeprefix(start)}"] = value
        elif mark:  # a section that something unknown sets
            out[f"{mark}{_RENAMED[start]}"] = value
    return _as_bridge(out, values)


def _as_bridge(out: dict[str, Any], values: Values) -> dict[str, Any]:
    """Return the values with what Bridge says in another way, and the defaults that NeMo has and Bridge has not."""
    fsdp = out.pop("model.fsdp", None)
    if fsdp is None:
        out.pop("ddp.data_parallel_sharding_strategy", None)  # of Megatron-FSDP alone
    elif fsdp == "megatron":
        out["ddp.use_megatron_fsdp"] = True
    else:
        raise Recognised(f"{_STRATEGY}.fsdp={fsdp!r} has no price; known: None, 'megatron'")
    if f"{UNKNOWN}mixed_precision" not in out:
        out |= _precision(out, str(values.get(f"{_PLUGINS}.precision", "32")))
    out.pop("mixed_precision.precision", None)
    if f"{UNKNOWN}nemo.callbacks" in out:
        out[f"{UNKNOWN}comm_overlap"] = out.pop(f"{UNKNOWN}nemo.callbacks")
    elif f"{UNKNOWN}comm_overlap" not in out:
        out |= _overlaps(out, values)
    if "nemo.callbacks.DeepEPCallback" in out:
        out["model.moe_token_dispatcher_type"] = "flex"
    for name in ("expert_capacity_factor", "pad_expert_input_to_capacity"):
        value = out.get(f"nemo.callbacks.MegatronTokenDropCallback.moe_{name}")
        if "nemo.callbacks.MegatronTokenDropCallback" in out:
            out[f"model.moe_{name}"] = (1.0 if "factor" in name else True) if value is None else value
    return out


def _precision(out: Values, precision: str) -> dict[str, Any]:
    """Return what a plugin of MegatronMixedPrecision is in Bridge."""
    kind = re.sub(r"(-mixed|-true)$", "", precision).replace("fp", "")
    narrow = str(out.get("mixed_precision.fp8_recipe") or "delayed") if out.get("mixed_precision.fp8") else ""
    if (kind, narrow) not in _PRESETS:
        raise Recognised(f"{_PLUGINS}: precision={precision!r} with fp8_recipe={narrow!r} has no price")
    return {
        "mixed_precision": _PRESETS[kind, narrow],
        "mixed_precision.fp8_param_gather": bool(out.get("mixed_precision.fp8_param_gather")),
        **({"mixed_precision.fp32": True} if kind == "32" else {}),
    }


def _overlaps(out: dict[str, Any], values: Values) -> dict[str, Any]:
    """Return what MegatronCommOverlapCallback makes of its arguments; without it there is only that of `ddp`."""
    of_ddp = ("overlap_grad_reduce", "overlap_param_gather")
    out.pop("comm_overlap", None)
    default: dict[str, Any] = {"tp_comm_overlap": False, "overlap_p2p_comm": False}
    if any(path.startswith(_CALLBACK) for path in values):
        default["overlap_p2p_comm"] = bool(values.get(f"{_STRATEGY}.virtual_pipeline_model_parallel_size"))
        default |= dict.fromkeys(of_ddp, True)
        for name in of_ddp:
            out.pop(f"ddp.{name}", None)
    else:
        out |= {f"ddp.{name}": out.get(f"ddp.{name}", False) for name in of_ddp}
    given = {name: out.get(f"comm_overlap.{name}") for name in default}
    split = [values.get(f"{_STRATEGY}.{name}") for name in ("sequence_parallel", "tensor_model_parallel_size")]
    if split[0] in (None, False) or split[1] == 1:  # the callback turns it off
        given["tp_comm_overlap"] = False
    return {f"comm_overlap.{name}": default[name] if value is None else value for name, value in given.items()}


def _devices(document: Document, found: Values) -> str | None:
    """The recipe starts as many processes as it says."""
    if not is_recipe(document.values):
        return None
    counts = [document.values.get(f"nemo.{name}") for name in ("num_nodes", "devices")]
    task = document.task
    if not all(isinstance(count, int) for count in counts) or not task.num_devices:
        return None
    if counts == [task.num_nodes, task.devices_per_node]:
        return None
    near = f"num_nodes={task.num_nodes}, num_gpus_per_node={task.devices_per_node}"
    return (
        f"the recipe is for {counts[0]} x {counts[1]} devices, but the cluster has {task.num_devices}; nearest: {near}"
    )


def _adapters(document: Document, found: Values) -> str | None:
    peft = document.values.get("nemo.peft")
    if peft is None:
        return None
    return f"peft={maker_of(str(peft))} is not read (give --adapters): all weights are taken as trained"


_AFTER_DEEPEP = 10.0  # compute capability that DeepEPCallback does not know


def _deep_ep(document: Document, found: Values) -> str | None:
    device = document.task.hardware
    late = device is not None and (device.compute_capability or 0) >= _AFTER_DEEPEP
    if "nemo.callbacks.DeepEPCallback" not in document.values or not late:
        return None
    return f"DeepEPCallback does nothing on {document.task.device}; give --dispatcher alltoall"


RULES = (TargetRule(_devices), TargetRule(_adapters, warns=True), TargetRule(_deep_ep, warns=True))
