"""Build the model that a Hugging Face config.json describes: its class, with the sizes that it gives.

Nothing is guessed. Sizes that a config leaves to the defaults of its class, and a class that transformers does not have
or that has no loss, are errors that name the missing key or class and the nearest one.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autoplan.errors import CaptureError

# The sizes of a model, by the names that all config classes share (`attribute_map` holds a class's own names).
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
# Sizes with their least values; a model of experts alone, or of mixers, has no inner size, and one of latents no head.
_LEAST = dict.fromkeys((*_SIZES, "num_key_value_heads", "head_dim", "max_position_embeddings"), 1)
_LEAST |= {"intermediate_size": 0, "head_dim": 0}
_MOST_LAYERS = 10_000
_LABELS = {  # tables of `modeling_auto` -> number of dims of their labels: 1 per sequence, 2 per token
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": 2,
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": 2,
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": 2,
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES": 2,
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": 1,
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES": 1,
}


def model_from_config(config: Mapping[str, Any], where: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Build the model of a Hugging Face config.json on fake tensors of `dtype`.

    Returns:
        An instance of the first class of `architectures`; without that key the causal language model of the config's
        `model_type`, or its encoder-decoder.

    Raises:
        CaptureError: names `where` and the missing key, the unknown class, or why transformers cannot build it.
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING:
        near = difflib.get_close_matches(str(kind), list(CONFIG_MAPPING), 1)
        hint = f"; nearest: {near[0]}" if near else ""
        raise CaptureError(f"{where}: model_type {kind!r} is not an architecture of the installed transformers{hint}")
    _check_values(config, {}, where)
    try:
        settings = CONFIG_MAPPING[kind].from_dict(dict(config))
    except Exception as exc:  # config classes of transformers raise errors of any type
        raise CaptureError(f"{where}: transformers cannot read it: {exc}") from exc
    _check_sizes(config, settings, where)
    inner = settings.get_text_config()
    _check_values(vars(inner), inner.attribute_map, where)
    cls = _named_class(config, settings, where)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), _without_values(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Initializing zero-element tensors")  # n_shared_experts = 0
            if cls is None:
                auto: Any = AutoModelForSeq2SeqLM if settings.is_encoder_decoder else AutoModelForCausalLM
                made: nn.Module = auto.from_config(settings, dtype=dtype)
            else:
                made = cls._from_config(settings, dtype=dtype)
    except Exception as exc:  # constructors of transformers raise errors of any type
        name = "a causal language model or encoder-decoder" if cls is None else cls.__name__
        raise CaptureError(f"{where}: transformers cannot build {name} from it: {exc}") from exc
    return made


@contextmanager
def _without_values() -> Iterator[None]:
    """Leave out the initial values of transformers' models: fake tensors have none, and some draws look at theirs."""
    from transformers import PreTrainedModel

    original = PreTrainedModel.initialize_weights
    PreTrainedModel.initialize_weights = lambda self: None
    try:
        yield
    finally:
        PreTrainedModel.initialize_weights = original


def label_dims(model: nn.Module) -> int:
    """Return the number of dims of the labels of a transformers model: 1 (one per sequence) or 2 (one per token)."""
    from transformers.models.auto import modeling_auto

    for table, dims in _LABELS.items():
        named = getattr(modeling_auto, table).values()
        if any(type(model).__name__ in ([n] if isinstance(n, str) else n) for n in named):
            return dims
    return 2


def _check_sizes(config: Mapping[str, Any], settings: Any, where: str) -> None:
    """Raise CaptureError for sizes that the file does not give and that do not follow from those it gives."""
    try:
        usual = type(settings)()
    except Exception:  # a class without defaults for all arguments cannot guess a size
        return
    inner, default, given = settings.get_text_config(), usual.get_text_config(), config
    for name in type(settings).sub_configs:
        if getattr(settings, name, None) is inner and inner is not settings:
            where, given = f"{where}: {name}", config.get(name) or {}
    missing, written = {}, default.to_dict()
    for name in _SIZES:
        own = inner.attribute_map.get(name, name)
        value = written.get(own)
        # a size that differs from the default was given by another name, or follows from other sizes
        if isinstance(value, int) and own not in given and name not in given and getattr(inner, own, None) == value:
            missing[own] = value
    if missing:
        raise CaptureError(
            f"{where}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing, and the size of a model is "
            f"not guessed; if the defaults of {type(inner).__name__} are meant, write them: "
            + ", ".join(f'"{name}": {value}' for name, value in missing.items())
        )


def _check_values(given: Mapping[str, Any], own_names: Mapping[str, str], where: str) -> None:
    """Raise CaptureError for a size that no model can have, which classes of transformers take or fail with later.

    Args:
        own_names: names of the class for the names that all classes share.
    """
    for name, least in _LEAST.items():
        own = own_names.get(name, name)
        value, most = given.get(own), _MOST_LAYERS if name == "num_hidden_layers" else math.inf
        if isinstance(value, int) and not isinstance(value, bool) and not least <= value <= most:
            allowed = f"at least {least}" if value < least else f"at most {most:,}"
            raise CaptureError(f"{where}: {own}={value} is not a size of a model; it must be {allowed}")
    heads, groups = (given.get(own_names.get(n, n)) for n in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
        near = min((n for n in range(1, heads + 1) if heads % n == 0), key=lambda n: abs(n - groups))
        raise CaptureError(
            f"{where}: num_key_value_heads={groups} does not divide num_attention_heads={heads}; nearest: {near}"
        )


def _named_class(config: Mapping[str, Any], settings: Any, where: str) -> Any:
    """Return the first class of `architectures`; None if there is no such key."""
    import transformers

    named = config.get("architectures")
    if not named:
        return None
    name = named[0] if isinstance(named, list) else named
    found = getattr(transformers, name, None) if isinstance(name, str) else None
    if found is None:
        why = "is not a class of the installed transformers"
    elif getattr(found, "config_class", None) is not type(settings):
        why = f"is not a class of model_type {settings.model_type!r}"
    elif not _has_loss(found):
        why = "has no loss to train with"
    else:
        return found
    known = {n.lower(): n for n in _classes_with_loss(settings)}
    close = difflib.get_close_matches(str(name).lower(), known, 1, 0.0)
    nearest = f'; nearest: "architectures": ["{known[close[0]]}"]' if close else ""
    raise CaptureError(f"{where}: architectures: {name!r} {why}{nearest}")


def _classes_with_loss(settings: Any) -> list[str]:
    """Return the names of the transformers classes that take a config like this one and return a loss."""
    try:
        module = importlib.import_module(type(settings).__module__.replace("configuration_", "modeling_"))
    except ImportError:  # its classes are in another module: there is nothing to suggest
        return []
    found = vars(module).items()
    return [name for name, c in found if getattr(c, "config_class", None) is type(settings) and _has_loss(c)]


def _has_loss(cls: Any) -> bool:
    forward = getattr(cls, "forward", None)
    return forward is not None and "labels" in inspect.signature(forward).parameters
