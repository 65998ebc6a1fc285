"""Adapters: low-rank products that are trained beside frozen weights, as people write them.

    lora:16                   rank 16, beside the layers that PEFT takes by default (queries and values)
    lora:16:q_proj,v_proj     beside the linear layers of these names
    qlora:16:all-linear       beside all linear layers but the head, whose frozen weights are stored in 4 bits

Sources: Hu et al., LoRA, 2021; Dettmers et al., QLoRA, 2023.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from autoplan.errors import PinError

ALL_LINEAR = "all-linear"
# 4 bits, and the constants of blocks of 64 elements: 8 bits each, and 32 bits for 256 of them (QLoRA, section 3, double
# quantization: 0.127 bits per parameter)
PACKED_BYTES = (4 + 8 / 64 + 32 / (64 * 256)) / 8
# Where PEFT puts adapters if no names are given, by what a model calls its layers
# (peft.utils.constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING); the first that a model has
USUAL_TARGETS = (
    ("q_proj", "v_proj"),
    ("query", "value"),
    ("q_lin", "v_lin"),
    ("q", "v"),
    ("qkv_proj",),
    ("query_key_value",),
    ("c_attn",),
    ("Wqkv",),
)
_KINDS = {"lora": False, "qlora": True}
_EXAMPLE = "write lora:16, lora:16:q_proj,v_proj or qlora:16:all-linear"


@dataclass(frozen=True)
class Adapters:
    """Low-rank products beside frozen linear layers.

    Attributes:
        rank: the inner size of the products.
        targets: names of these layers in the model's modules, or `all-linear`; empty: those that PEFT takes by default.
        packed: True if the frozen weights of all linear layers but the head are stored in 4 bits (QLoRA).
    """

    rank: int
    targets: tuple[str, ...] = ()
    packed: bool = False

    def __str__(self) -> str:
        names = f":{','.join(self.targets)}" if self.targets else ""
        return f"{'qlora' if self.packed else 'lora'}:{self.rank}{names}"


def read_adapters(text: str) -> Adapters:
    """Return the adapters of a text. Raises: PinError that shows what works."""
    found = re.fullmatch(r"([a-z]+):(\d+)(?::([\w.,\s-]+))?", text.strip())
    if found is None or found.group(1) not in _KINDS or int(found.group(2)) < 1:
        raise PinError(f"adapters {text!r}: {_EXAMPLE}")
    names = tuple(name.strip() for name in (found.group(3) or "").split(",") if name.strip())
    if ALL_LINEAR in names and len(names) > 1:
        raise PinError(f"adapters {text!r}: {ALL_LINEAR} stands for all names; leave out the others")
    return Adapters(int(found.group(2)), names, _KINDS[found.group(1)])
