"""Primus of AMD: its YAML experiments, read as flags of Megatron-LM or as fields of torchtitan.

An experiment names a framework, presets of a module and of a model, and overrides. What presets say otherwise than the
framework itself is data here (primus/configs of August 2026); presets of the user are not read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from autoplan.exporters.python_values import UNKNOWN
from autoplan.exporters.record import Recognised, Values
from autoplan.exporters.syntax import Yaml, flat
from autoplan.exporters.trainer_kinds import ADAPTERS

PRIMUS = "own.primus"  # the framework of an experiment
_MODULES = ("pre_trainer", "post_trainer", "sft_trainer")
_VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::(?P<usual>[^{}]*))?\}")
# primus/configs/modules/megatron: trainer_base, pre_trainer, sft_trainer; models/megatron: language_model, *_base
_MEGATRON: Mapping[str, Any] = {
    **{"bf16": True, "micro_batch_size": 2, "global_batch_size": 128, "seq_length": 4096, "sequence_parallel": True},
    **{"use_flash_attn": True, "moe_token_dispatcher_type": "alltoall"},
}
_MEGATRON_OF: Mapping[str, Mapping[str, Any]] = {
    "pre_trainer.yaml": {"global_batch_size": 16, "seq_length": 1024, "use_distributed_optimizer": True},
    "sft_trainer.yaml": {"micro_batch_size": 1, "seq_length": 2048},
}
# Presets of models with expert_model_parallel_size: 8
_SPREAD = (
    *("deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "glm5", "gpt_oss_20B", "gpt_oss_120B", "llama4_17B16E"),
    *("llama4_17B128E", "minimax_m2.5"),
)
_OF_MEGATRON = {  # names of its values -> flags
    **{"fp8": "fp8_format", "fp4": "fp4_format"},
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
}
_FP4_FORMAT = {"fp4_format": "e2m1"}
# Values of which false is a flag
_REVERSED = {
    "gradient_accumulation_fusion": "no_gradient_accumulation_fusion",
    "overlap_p2p_comm": "no_overlap_p2p_communication",
}
# Values with which Primus replaces what Megatron does -> the flag that is not known then
_REPLACES = {
    **dict.fromkeys(("patch_zero_bubble", "patch_primus_pipeline"), "num_virtual_stages_per_pipeline_rank"),
    "decoder_pipeline_manual_split_list": "pipeline_model_parallel_layout",
    "recompute_layer_ids": "recompute_num_layers",
}
# primus/configs/modules/torchtitan/pre_trainer.yaml
_TORCHTITAN: Mapping[str, Any] = {
    **{"activation_checkpoint.mode": "none", "compile.enable": True, "compile.components": ["model", "loss"]},
    **{"training.local_batch_size": 8, "training.seq_len": 2048, "training.mixed_precision_reduce": "float32"},
}


_OWN_DATA = ("training.mock_data",)
_RENAMED = {"training.batch_size": "training.local_batch_size"}  # torchtitan until June 2025


def _megatron(said: Values, preset: str, model: str) -> dict[str, Any]:
    """Return an experiment as flags; false is a flag that is not given.

    Raises: Recognised for models that are no language models of layers with attention.
    """
    kind = said.get("model_type", "gpt")
    if kind != "gpt":
        raise Recognised(f"model_type={kind} of Primus is not priced; nearest: model_type=gpt")
    spread = {"expert_model_parallel_size": 8} if model.removesuffix(".yaml") in _SPREAD else {}
    values = {**_MEGATRON, **_MEGATRON_OF.get(preset, {}), **spread, **said}
    out: dict[str, Any] = {}
    for name, value in values.items():
        known = name.removeprefix(UNKNOWN)
        new = _OF_MEGATRON.get(known, known)
        if known in _REVERSED and value is False:
            out[_REVERSED[known]] = True
        elif known in _REPLACES and value not in (None, False):
            out[f"{UNKNOWN}{_REPLACES[known]}"] = f"{known}={value}"
        elif value not in (None, False) and known not in _REVERSED and not known.startswith("lora."):
            out[f"{UNKNOWN}{new}" if name != known else new] = _FP4_FORMAT.get(new, value)
    if values.get("tensor_model_parallel_size") == 1 or not values.get("sequence_parallel"):
        out.pop("sequence_parallel", None)
    else:
        out["sequence_parallel"] = True
    if values.get("enable_primus_turbo") and values.get("use_turbo_deepep"):
        out |= {"moe_token_dispatcher_type": "flex", "moe_enable_deepep": True}
    if values.get("lora.enabled"):
        targets = values.get("lora.target_modules")
        rank = values.get("lora.dim", 32)
        known_targets = targets is None or set(_LINEAR) <= set(targets)
        out[ADAPTERS if known_targets else f"{UNKNOWN}{ADAPTERS}"] = (
            f"lora:{rank}:all-linear" if known_targets else targets
        )
    return out


_LINEAR = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def _torchtitan(said: Values, preset: str, model: str) -> dict[str, Any]:
    """Return an experiment as fields; presets of models in 8 bits are called so."""
    said = {_RENAMED.get(path, path): value for path, value in said.items() if path not in _OWN_DATA}
    narrow = "-fp8" in model or said.get("primus_turbo.use_turbo_float8_linear")
    return {**_TORCHTITAN, **({"model.converters": ["quantize.linear.float8"]} if narrow else {}), **said}


_AS: Mapping[str, Callable[[Values, str, str], dict[str, Any]]] = {"megatron": _megatron, "torchtitan": _torchtitan}


def _resolved(value: object) -> tuple[object, bool]:
    """Return a value with the defaults of its variables, and whether it is known."""
    if isinstance(value, list):
        return value, True
    if not isinstance(value, str) or "$" not in value:
        return value, True
    if any(match["usual"] is None for match in _VARIABLE.finditer(value)):
        return value, False
    text = _VARIABLE.sub(lambda match: match["usual"], value)
    try:
        return (yaml.safe_load(text), True) if "$" not in text else (text, False)
    except yaml.YAMLError:
        return text, True


@dataclass(frozen=True)
class PrimusYaml:
    """An experiment whose framework is this one; nothing for another file.

    Attributes:
        framework: `megatron` or `torchtitan`.
    """

    framework: str
    suffix: str = ".yaml"

    def read(self, text: str, where: str) -> dict[str, Any]:
        """Return the values by path of the framework.

        Raises:
            PinError: for a file that is not YAML.
            Recognised: for an experiment of a framework that is not read.
        """
        data = Yaml().read(text, where)
        frameworks = {name: data.get(f"modules.{name}.framework") for name in _MODULES}
        module = next((name for name, value in frameworks.items() if isinstance(value, str)), None)
        if module is None:
            return {}
        framework = str(frameworks[module])
        if framework not in _AS:
            raise Recognised(
                f"{where} is an experiment of Primus for {framework}, which is not read; nearest: {', '.join(_AS)}"
            )
        if framework != self.framework:
            return {}
        start, said = f"modules.{module}.overrides.", dict[str, Any]()
        for path, given in data.items():
            if path.startswith(start) and not path.endswith("sink_level"):
                value, known = _resolved(given)
                name = path.removeprefix(start)
                said |= (
                    flat(value, f"{name}.")
                    if isinstance(value, dict)
                    else {name if known else f"{UNKNOWN}{name}": value}
                )
        preset, model = (str(data.get(f"modules.{module}.{name}", "")) for name in ("config", "model"))
        return {PRIMUS: framework, **_AS[framework](said, preset, model)}
