"""Models of packages that PyPI has, untouched and small, for the table of families (docs/model_zoo.md).

    pip install timm torchvision x-transformers litgpt torchtitan peft vit-pytorch open_clip_torch diffusers
    python -m experiments.compatibility.model_zoo depth --only "^(timm|torchvision|litgpt)"

torchvision has to fit the build of torch: its wheels of PyPI go with torch's wheels of PyPI (CUDA), not with the CPU
build. A package that is not installed is said to be `not run`, and never fails a run.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from experiments.compatibility.architectures.vision import CLASSES, IMAGE

VOCAB, DIM, HEADS, LAYERS, INNER, LONGEST = 96, 32, 4, 2, 48, 64
TOKENS, IMAGES, OUTPUT = "tokens", "images", "output"


@dataclass(frozen=True)
class Packaged:
    """A model of a package.

    Attributes:
        package: the name under which pip knows it.
        make: returns the module; imports the package.
        kind: TOKENS (logits of every token), IMAGES (logits of every image), or OUTPUT (its output has `loss`).
        takes: the name of the input of its forward.
    """

    package: str
    name: str
    make: Callable[[], nn.Module]
    kind: str
    takes: str


def _of(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _called(path: str, **arguments: Any) -> nn.Module:
    made: nn.Module = _of(path)(**arguments)
    return made


def _convnext_tv() -> nn.Module:
    block = _of("torchvision.models.convnext.CNBlockConfig")
    made: nn.Module = _of("torchvision.models.ConvNeXt")([block(16, 32, 2), block(32, None, 2)], num_classes=CLASSES)
    return made


def _resnet_tv(block: str) -> nn.Module:
    made: nn.Module = _of("torchvision.models.ResNet")(
        _of(f"torchvision.models.resnet.{block}"), [2, 2, 1, 1], num_classes=CLASSES
    )
    return made


def _x(attn: str = "Decoder", **layers: Any) -> nn.Module:
    inner = _of(f"x_transformers.{attn}")(dim=DIM, depth=LAYERS, heads=HEADS, attn_dim_head=DIM // HEADS, **layers)
    made: nn.Module = _of("x_transformers.TransformerWrapper")(num_tokens=VOCAB, max_seq_len=LONGEST, attn_layers=inner)
    return made


def _litgpt(name: str, **changes: Any) -> nn.Module:
    small = {"n_layer": LAYERS, "n_embd": DIM, "n_head": HEADS, "padded_vocab_size": VOCAB, "vocab_size": VOCAB}
    config = _of("litgpt.Config").from_name(name, block_size=LONGEST, **small, **changes)
    made: nn.Module = _of("litgpt.GPT")(config)
    return made


def _titan(package: str) -> nn.Module:
    registry = importlib.import_module(f"torchtitan.models.{package}").model_registry
    made: nn.Module = registry("debugmodel", attn_backend="flex").model.build()
    return made


def _lora() -> nn.Module:
    transformers = importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        intermediate_size=INNER,
    )
    lora = _of("peft.LoraConfig")(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    made: nn.Module = _of("peft.get_peft_model")(transformers.LlamaForCausalLM(config), lora)
    return made


_TIMM: dict[str, dict[str, Any]] = {
    "vision_transformer.VisionTransformer": {"img_size": IMAGE, "patch_size": 8, "embed_dim": DIM, "depth": LAYERS},
    "eva.Eva": {"img_size": IMAGE, "patch_size": 8, "embed_dim": DIM, "depth": LAYERS, "use_rot_pos_emb": True},
    "mlp_mixer.MlpMixer": {"img_size": IMAGE, "patch_size": 8, "embed_dim": DIM, "num_blocks": LAYERS},
    "swin_transformer.SwinTransformer": {
        "img_size": IMAGE,
        "patch_size": 2,
        "window_size": 2,
        "embed_dim": DIM,
        "depths": (2, 2),
        "num_heads": (2, 4),
        "drop_path_rate": 0.0,
    },
    "beit.Beit": {"img_size": IMAGE, "patch_size": 8, "embed_dim": DIM, "depth": LAYERS, "use_rel_pos_bias": True},
    "cait.Cait": {"img_size": IMAGE, "patch_size": 8, "embed_dim": DIM, "depth": LAYERS},
    "xcit.Xcit": {"img_size": IMAGE, "patch_size": 8, "embed_dim": DIM, "depth": LAYERS},
}
_WITH_HEADS = ("vision_transformer", "eva", "beit", "cait", "xcit")

_TORCHVISION: dict[str, dict[str, Any]] = {
    "VisionTransformer": {
        "image_size": IMAGE,
        "patch_size": 8,
        "num_layers": LAYERS,
        "num_heads": HEADS,
        "hidden_dim": DIM,
        "mlp_dim": INNER,
    },
    "SwinTransformer": {
        "patch_size": [2, 2],
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": [2, 2],
        "stochastic_depth_prob": 0.0,
    },
    "MobileNetV2": {"width_mult": 0.25, "dropout": 0.0},
    "DenseNet": {"growth_rate": 8, "block_config": (2, 2), "num_init_features": 16},
}

_VIT_PYTORCH: dict[str, dict[str, Any]] = {
    "ViT": {"image_size": IMAGE, "patch_size": 8, "dim": DIM, "depth": LAYERS, "heads": HEADS, "mlp_dim": INNER},
    "SimpleViT": {"image_size": IMAGE, "patch_size": 8, "dim": DIM, "depth": LAYERS, "heads": HEADS, "mlp_dim": INNER},
}

_X: dict[str, dict[str, Any]] = {
    "absolute": {},
    "rotary, SwiGLU": {"rotary_pos_emb": True, "ff_swish": True, "ff_glu": True, "use_rmsnorm": True},
    "ALiBi": {"alibi_pos_bias": True},
    "T5 bias": {"rel_pos_bias": True},
    "flash": {"attn_flash": True},
    "grouped keys": {"attn_kv_heads": 2},
}

_LITGPT: dict[str, tuple[str, dict[str, Any]]] = {
    "pythia": ("pythia-14m", {}),
    "Llama 3.1": ("Llama-3.1-8B", {"n_query_groups": 2, "intermediate_size": INNER}),
    "Gemma 2": ("Gemma-2-2b", {"n_query_groups": 2, "intermediate_size": INNER, "head_size": 8}),
    "Gemma 3": ("Gemma-3-1b-it", {"n_query_groups": 2, "intermediate_size": INNER, "head_size": 8}),
    "Mixtral": ("Mixtral-8x7B-v0.1", {"n_query_groups": 2, "moe_intermediate_size": INNER, "n_expert": 4}),
    "Qwen 3": ("Qwen3-0.6B", {"n_query_groups": 2, "intermediate_size": INNER, "head_size": 8}),
    "phi-2": ("phi-2", {"intermediate_size": INNER}),
    "OLMo 2": ("OLMo-2-1124-7B", {"n_query_groups": 2, "intermediate_size": INNER}),
}


def models() -> list[Packaged]:
    """Return every model of a package."""
    out = []
    for block in ("BasicBlock", "Bottleneck"):
        out.append(Packaged("torchvision", f"torchvision ResNet, {block}", partial(_resnet_tv, block), IMAGES, "x"))
    out.append(Packaged("torchvision", "torchvision ConvNeXt", _convnext_tv, IMAGES, "x"))
    for name, sizes in _TORCHVISION.items():
        path = f"torchvision.models.{name}"
        make = partial(_called, path, **sizes, num_classes=CLASSES)
        out.append(Packaged("torchvision", f"torchvision {name}", make, IMAGES, "x"))
    for name, sizes in _TIMM.items():
        heads = {"num_heads": HEADS} if name.startswith(_WITH_HEADS) else {}
        made = partial(_called, f"timm.models.{name}", **sizes, **heads, num_classes=CLASSES)
        out.append(Packaged("timm", f"timm {name.split('.')[-1]}", made, IMAGES, "x"))
    for name, sizes in _VIT_PYTORCH.items():
        made = partial(_called, f"vit_pytorch.{name}", **sizes, num_classes=CLASSES)
        out.append(Packaged("vit-pytorch", f"vit-pytorch {name}", made, IMAGES, "img"))
    for name, settings in _X.items():
        out.append(Packaged("x-transformers", f"x-transformers, {name}", partial(_x, **settings), TOKENS, "x"))
    for name, (config, changes) in _LITGPT.items():
        out.append(Packaged("litgpt", f"litgpt {name}", partial(_litgpt, config, **changes), TOKENS, "idx"))
    out.append(Packaged("torchtitan", "torchtitan llama3", partial(_titan, "llama3"), TOKENS, "tokens"))
    out.append(Packaged("peft", "peft LoRA on Llama", _lora, OUTPUT, "input_ids"))
    return out
