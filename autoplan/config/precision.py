"""Precisions: the dtypes of computation, and the bytes per parameter of gradients and optimizer state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from autoplan.errors import PinError
from autoplan.units import DTYPE_BYTES

ONE_SCALE = "float8"  # the dtype of products in 8 bits with a scale per tensor
MASTER_BYTES = 4  # per element of the float32 master of a 16-bit parameter
_SHORT = {None: "native", "bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True)
class Precision:
    """The dtypes of computation and the bytes per parameter.

    Attributes:
        compute: The dtype of activations and weights in the forward. None: the model's own dtypes.
        grad_bytes: Bytes of gradient per local parameter element. None: as the parameter.
        state_bytes: Optimizer bytes per element (AdamW moments, masters). None: two moments in the parameter's dtype.
        matmul: The dtype of matrix products, if it differs from `compute`.
        master_bytes: Bytes per element that `state_bytes` counts for masters.
        autocast: The 16-bit dtype that torch.autocast casts the operands of products to; parameters and the residual
            stream are `compute`. None: no autocast.
    """

    name: str
    compute: str | None = None
    grad_bytes: float | None = None
    state_bytes: float | None = None
    matmul: str | None = None
    master_bytes: float = MASTER_BYTES
    autocast: str | None = None

    @property
    def products(self) -> str | None:
        """The dtype of matrix products. None: that of the model's own parameters."""
        return self.matmul or self.autocast or self.compute

    @property
    def captured(self) -> str | None:
        """The dtype in which a module is captured: casts of autocast are added to a graph in its 16 bits."""
        return self.autocast or self.compute

    @property
    def gradients(self) -> str | None:
        """The dtype in which gradients are summed over micro-batches and ranks. None: the dtype of the parameter."""
        if self.grad_bytes is None or self.compute is None:
            return None
        return self.compute if self.grad_bytes == DTYPE_BYTES[self.compute] else "float32"

    @property
    def has_masters(self) -> bool:
        """True if parameters are used in 16 bits and stored in float32, which `state_bytes` counts."""
        return self.compute is not None and DTYPE_BYTES[self.compute] < MASTER_BYTES

    @property
    def compute_name(self) -> str:
        """The name of the precision that computes everything in `compute`."""
        return _SHORT[self.compute]


# Mixed precision as Megatron-LM and torchtitan run it: gradients accumulate in fp32; AdamW holds two fp32 moments and a
# fp32 master copy (2 + 4 + 12 bytes per parameter, Rajbhandari et al., ZeRO, 2020, section 3.1 with fp32 gradients).
PRECISIONS: dict[str, Precision] = {
    "native": Precision("native"),
    "bf16": Precision("bf16", "bfloat16", 4.0, 12.0),
    "fp16": Precision("fp16", "float16", 4.0, 12.0),
    "fp32": Precision("fp32", "float32", 4.0, 8.0),
    # torch.autocast around a model of float32 parameters, as transformers' Trainer, accelerate and Lightning run mixed
    # precision with DDP: no masters; gradients and both moments of AdamW in float32 (4 + 4 + 8 bytes per parameter)
    "bf16-autocast": Precision("bf16-autocast", "float32", 4.0, 8.0, autocast="bfloat16"),
    "fp16-autocast": Precision("fp16-autocast", "float32", 4.0, 8.0, autocast="float16"),
    "fp8": Precision("fp8", "bfloat16", 4.0, 12.0, matmul=ONE_SCALE),
    # MXFP8: a scale per 32 elements, along the dim that a product sums over (OCP Microscaling Formats, 2023)
    "mxfp8": Precision("mxfp8", "bfloat16", 4.0, 12.0, matmul="float8_block32"),
    # NVFP4: operands of products in layers are 4 bits with a scale per 16 elements (NVIDIA, Pretraining LLMs with
    # NVFP4, 2025; Megatron-Bridge's bf16_with_nvfp4_mixed: parameters stay bf16 and are gathered as bf16, and no layer
    # is exempt)
    "fp4": Precision("fp4", "bfloat16", 4.0, 12.0, matmul="float4"),
}


AUTOCAST = "-autocast"  # how the names of precisions with torch.autocast end
# Gradients kept and reduced in 16 bits: `grad_reduce_in_fp32=False`, which NVIDIA's performance recipes set.
GRADIENTS_16 = "-grad16"
# Both moments of AdamW kept in 16 bits beside a float32 master copy (DeepSeek-V3, arXiv 2412.19437, section 3.3.3;
# Megatron's --use-precision-aware-optimizer with --exp-avg-dtype bf16). Priced, not executed.
MOMENTS_16 = "-mom16"
# Of a float32 master only the 16 bits that its bfloat16 parameter lacks (`store_param_remainders` of Apex's
# DistributedFusedAdam, apex/contrib/optimizers/distributed_fused_adam.py, and of Transformer Engine's FusedAdam since
# 2.1). Priced, not executed.
REMAINDERS_16 = "-rem16"


class PrecisionName(NamedTuple):
    """The parts of the name of a precision: its base, and what else is kept in 16 bits."""

    base: str
    gradients_16: bool = False
    moments_16: bool = False
    remainders_16: bool = False

    @property
    def name(self) -> str:
        """The base with the suffixes, in the order of the fields."""
        suffixes = zip((GRADIENTS_16, MOMENTS_16, REMAINDERS_16), self[1:], strict=True)
        return self.base + "".join(suffix for suffix, kept in suffixes if kept)


def read_precision(name: str) -> PrecisionName:
    """Return the parts of a name; the base is not checked.

    >>> read_precision("bf16-grad16")
    PrecisionName(base='bf16', gradients_16=True, moments_16=False, remainders_16=False)
    """
    kept = []
    for suffix in (REMAINDERS_16, MOMENTS_16, GRADIENTS_16):
        kept.append(name.endswith(suffix))
        name = name.removesuffix(suffix)
    return PrecisionName(name, *reversed(kept))


def precision_of(name: str) -> Precision:
    """Return the precision with this name.

    The suffixes GRADIENTS_16, MOMENTS_16 and REMAINDERS_16, in this order, narrow gradients, moments and masters that
    are otherwise wider.

    Raises: PinError that names the known precisions.
    """
    parts = read_precision(name) if isinstance(name, str) else PrecisionName("")
    plain, narrow, short, split = parts
    base = PRECISIONS.get(plain)
    if base is None or ((narrow or short or split) and (base.grad_bytes is None or base.compute == "float32")):
        known = ", ".join(PRECISIONS)
        raise PinError(f"precision {name!r} is not known; use {known}, or bf16{GRADIENTS_16} for 16-bit gradients")
    if narrow:
        base = replace(base, name=name, grad_bytes=2.0)
    if short:
        base = replace(base, name=name, state_bytes=MASTER_BYTES + 2 * 2.0)
    if not split:
        return base
    if base.compute != "bfloat16":
        raise PinError(
            f"precision {name!r}: only a bfloat16 parameter is the upper half of its float32 master; nearest: "
            f"{parts._replace(remainders_16=False).name}"
        )
    half = MASTER_BYTES - DTYPE_BYTES[base.compute]
    wide = base.state_bytes or 0.0
    return replace(base, name=name, state_bytes=wide - MASTER_BYTES + half, master_bytes=half)


def executed_precision(name: str) -> Precision:
    """Return the precision with this name if the runtime executes it. Raises PinError if it is only priced."""
    reason = precision_obstacle(name)
    if reason is not None:
        raise PinError(reason)
    return precision_of(name)


def precision_obstacle(name: str) -> str | None:
    """Return the reason why the runtime does not execute the precision with this name, or None if it does."""
    found = precision_of(name)
    if found.matmul is not None:
        known = ", ".join(n for n, p in PRECISIONS.items() if p.matmul is None)
        return (
            f"precision {name!r} is priced, but not executed: products in {found.matmul} have no kernel here; use "
            f"{known}, or bf16{GRADIENTS_16} for 16-bit gradients; nearest: {found.compute_name}"
        )
    parts = read_precision(name)
    if parts.remainders_16:
        return (
            f"precision {name!r} is priced, but not executed: masters of the optimizer are float32 here; nearest: "
            f"{parts._replace(moments_16=False, remainders_16=False).name}"
        )
    if parts.moments_16:
        return (
            f"precision {name!r} is priced, but not executed: moments of the optimizer are float32 here; nearest: "
            f"{parts._replace(moments_16=False).name}"
        )
    return None
