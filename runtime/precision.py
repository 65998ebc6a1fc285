"""Mixed precision: float32 parameters, forward and backward in 16 bits.

The optimizer, `state_dict` and `load_state_dict` see float32 parameters, the *masters*. The emitted modules compute
with copies of them in the compute dtype, made when a step begins. Norms, tables and the loss are in the dtype that the
captured graph gives them. Per step of M micro-batches and data-parallel ranks:

| gradients | summed over micro-batches | summed over ranks | what the optimizer sees |
|---|---|---|---|
| float32 | in float32, each micro-batch's as it comes out of the backward | in float32 | float32 |
| 16 bits (`-grad16`) | ZeRO 0, 1: in 16 bits; ZeRO 2, 3: as float32 shards | in 16 bits | float32 |

ZeRO 1 to 3 leave this to `fully_shard` (its MixedPrecisionPolicy): shards are the masters, the gathered parameter is
the 16-bit copy, and a backward that does not reduce adds to a float32 tensor (`FSDPParam.unsharded_accumulated_grad`).
All other parameters use `Copies` of this module. Sources: Micikevicius et al., Mixed Precision Training, 2018, section
3.1 (masters), 3.2 (scaling); Megatron-LM's `main_grad` (sums in float32).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from autoplan.runtime.compression import Compression, PowerSGD
from autoplan.runtime.norm import alike
from autoplan.runtime.params import local_of
from autoplan.runtime.spec import ParamSpec, ProgramSpec

MASTER = torch.float32
COMPUTE = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes in which a program computes and sums gradients.

    Attributes:
        compute: dtype of parameters and activations in forward and backward; float32: the masters themselves are used.
        gradients: dtype of gradient sums over micro-batches and ranks: float32, or `compute`.
        autocast: dtype that the program casts operands of products to, as torch.autocast does; None: no casts.

    Raises:
        ValueError: another dtype.
    """

    compute: torch.dtype
    gradients: torch.dtype = MASTER
    autocast: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.compute not in COMPUTE:
            raise ValueError(f"cannot compute in {self.compute}; use {', '.join(map(str, COMPUTE))}")
        if self.gradients not in (MASTER, self.compute):
            raise ValueError(f"gradients in {self.gradients} with {self.compute}; use {MASTER} or {self.compute}")

    @staticmethod
    def of(spec: ProgramSpec) -> MixedPrecision | None:
        """Return the mixed precision of a program; None if it computes in the dtypes of its parameters."""
        if spec.compute_dtype is None:
            return None
        gradients = getattr(torch, spec.gradient_dtype) if spec.gradient_dtype is not None else MASTER
        casts = None if spec.autocast_dtype is None else getattr(torch, spec.autocast_dtype)
        return MixedPrecision(getattr(torch, spec.compute_dtype), gradients, casts)

    @property
    def scales_loss(self) -> bool:
        """True for float16: gradients below 2^-24 are lost without a scaled loss. Others have float32's exponents."""
        return torch.float16 in (self.compute, self.autocast)

    def stored(self, spec: ParamSpec, given: torch.dtype) -> torch.dtype:
        """Return the dtype in which a parameter is stored between steps; `given`: its dtype in the model.

        An untrained parameter needs no master and keeps the given dtype. A parameter that the model uses in another
        dtype than `compute` is stored in that dtype, without a copy.
        """
        dtype: torch.dtype = getattr(torch, spec.dtype)
        if dtype != self.compute:
            return dtype
        return MASTER if spec.trainable else given

    def policies(self, params: Iterable[ParamSpec]) -> dict[str, MixedPrecisionPolicy]:
        """Return the policies for `fully_shard` by block, for the blocks with parameters that have 16-bit copies.

        Inputs are not cast: the graph defines the dtype of every value.

        Raises:
            ValueError: a block with parameters of several dtypes, which `fully_shard` would cast alike.
        """
        copied: dict[str, set[str]] = {}
        for p in params:
            copied.setdefault(p.block, set()).add(p.dtype)
        out = {}
        for block, dtypes in copied.items():
            if not any(getattr(torch, d) == self.compute != MASTER for d in dtypes):
                continue
            if len(dtypes) > 1:
                raise ValueError(
                    f"block {block!r} computes with parameters in {', '.join(sorted(dtypes))}: fully_shard casts all "
                    "of a block; use ZeRO 0"
                )
            out[block] = MixedPrecisionPolicy(self.compute, self.gradients, cast_forward_inputs=False)
        return out


ParamPlace = tuple[ParamSpec, nn.Module]  # a use of a parameter, and the block that holds it


@dataclass
class _Copy:
    master: nn.Parameter
    copy: nn.Parameter
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    source: torch.Tensor | None = None  # its values, if the master has no memory


class Copies:
    """Copies, in the compute dtype, of the parameters that `fully_shard` does not hold.

    Between steps the blocks hold the masters. `in_place` puts the copies there, with the masters' present values.
    Gradients that a backward leaves in a copy's `.grad` are added to the master's at once (float32 sums), or when
    `collect` is called (16-bit sums).

    Args:
        places: every use of every parameter; a parameter that several blocks share has one copy.
        precision: the mixed precision of the program.
    """

    def __init__(self, places: Iterable[ParamPlace], precision: MixedPrecision) -> None:
        self.precision = precision
        self._at_once = precision.gradients == MASTER
        found: dict[int, _Copy] = {}
        direct: set[int] = set()
        for spec, block in places:
            master = block.get_parameter(spec.attr)
            computed = getattr(torch, spec.dtype)
            if isinstance(master, DTensor) or master.dtype == computed:
                direct.add(id(master))
                continue
            if id(master) not in found:
                copy = nn.Parameter(master.detach().to(computed), requires_grad=master.requires_grad)
                found[id(master)] = _Copy(master, copy)
                if self._at_once and master.requires_grad:
                    copy.register_post_accumulate_grad_hook(_adder(master))  # type: ignore[no-untyped-call]
            found[id(master)].places.append((block, spec.attr))
        self._copies, self._of_master = list(found.values()), found
        # ids of masters that no block computes with
        self.unused: frozenset[int] = frozenset(found) - direct

    def __len__(self) -> int:
        return len(self._copies)

    def leaf(self, master: nn.Parameter) -> nn.Parameter:
        """Return the leaf that receives a master's gradient: its copy, whose hooks pass it on, or the master."""
        found = self._of_master.get(id(master))
        return master if found is None else found.copy

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the blocks compute with copies of the masters' present values inside the context."""
        self.refresh()
        self._put(lambda c: c.copy)
        try:
            yield
        finally:
            self._put(lambda c: c.master)

    def _put(self, which: Any) -> None:
        for c in self._copies:
            for block, attr in c.places:
                block._parameters[attr] = which(c)

    def refresh(self) -> None:
        """Copy the values of the masters, rounded."""
        # from pinned memory only the computing stream waits, not the host, and the device rounds
        _copy([(c.copy, c.master if c.source is None else c.source) for c in self._copies])

    def read_from(self, sources: Mapping[int, torch.Tensor]) -> None:
        """Let `refresh` read the values of masters, keyed by id, from elsewhere (`autoplan.runtime.offload`)."""
        for c in self._copies:
            c.source = sources.get(id(c.master))

    def collect(self) -> None:
        """Add the gradients that backwards left in the copies to the masters' gradients.

        Called after the reduction over ranks of 16-bit sums, and for schedules that write `.grad` without autograd's
        hooks.
        """
        made, given = [], []
        with torch.no_grad():
            for c in self._copies:
                grad, c.copy.grad = c.copy.grad, None
                if grad is None:
                    continue
                if c.master.grad is None:
                    c.master.grad = torch.empty_like(grad, dtype=c.master.dtype)
                    made.append((c.master.grad, grad))
                else:
                    given.append((c.master.grad, grad))
        _copy(made)
        for sums, gradients in _alike_pairs(given):
            torch._foreach_add_(sums, gradients)

    def drop_gradients(self) -> None:
        """Drop gradients left by an interrupted step."""
        for c in self._copies:
            c.copy.grad = None


def _alike_pairs(
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
) -> Iterable[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Group pairs of tensors by devices and dtypes: one kernel works on many pairs that are alike."""
    groups: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for a, b in pairs:
        first, second = groups.setdefault((a.device, a.dtype, b.device, b.dtype), ([], []))
        first.append(a)
        second.append(b)
    return groups.values()


def _copy(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second tensor of every pair to the first, rounded to its dtype."""
    with torch.no_grad():
        for to, source in _alike_pairs(pairs):
            torch._foreach_copy_(to, source, non_blocking=True)


def _adder(master: nn.Parameter) -> Any:
    return lambda copy: _add(master, copy)


def _add(master: nn.Parameter, copy: nn.Parameter) -> None:
    grad, copy.grad = copy.grad, None
    if master.grad is None:
        master.grad = grad.to(master.dtype)  # type: ignore[union-attr]  # called where there is one
    else:
        master.grad.add_(grad)  # type: ignore[arg-type]  # rounds once, to float32


# -- loss scaling -----------------------------------------------------------------------------------------------------


class _ScaledGradient(torch.autograd.Function):
    """Identity whose gradient is multiplied by the scale, so that the reported loss does not change."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.scale, None


@dataclass
class LossScaler:
    """Dynamic scaling of the loss for float16: like `torch.amp.GradScaler`, but for all ranks of a program together.

    `ParallelModel.step` scales the loss, unscales the gradients, and decides: if any rank of the whole job has a
    gradient that is not finite, the gradients of all ranks are dropped, so that `optimizer.step()` changes nothing
    anywhere (torch's optimizers leave out parameters without a gradient, with their state and weight decay).

    Attributes:
        scale: the factor of the next loss. Set it on all ranks alike, or not at all.
        growth_factor, backoff_factor, growth_interval: as in torch.amp.GradScaler, with its defaults.
        skipped: True if the last step was dropped.
        num_skipped: number of dropped steps.
    """

    scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    growth_tracker: int = 0
    skipped: bool = False
    num_skipped: int = 0

    def __post_init__(self) -> None:
        if not self.scale > 0 or not self.growth_factor > 1 or not 0 < self.backoff_factor < 1:
            raise ValueError(
                f"scale={self.scale} must be above 0, growth_factor={self.growth_factor} above 1, and "
                f"backoff_factor={self.backoff_factor} between 0 and 1"
            )
        if self.growth_interval < 1:
            raise ValueError(f"growth_interval={self.growth_interval} must be at least 1")

    def scaled(self, output: Any) -> Any:
        """Return the output of the last stage, with its gradient multiplied by `scale` in the backward."""
        if isinstance(output, torch.Tensor):
            return _ScaledGradient.apply(output, self.scale)  # type: ignore[no-untyped-call]
        return (_ScaledGradient.apply(output[0], self.scale), *output[1:])  # type: ignore[no-untyped-call]

    def unscale_(
        self, parameters: Iterable[nn.Parameter], device: torch.device, num_ranks: int, overflows: bool | None = None
    ) -> None:
        """Divide the gradients of this rank by the scale, or drop those of all ranks alike; then adapt the scale.

        A collective over all ranks of the job, of one number.

        Args:
            overflows: its outcome, for a rank without the others; None: read it.
        """
        mine = [p for p in parameters if p.grad is not None]
        with torch.no_grad():
            found = [torch.zeros((), device=device)]
            for same in alike(local_of(p.grad) for p in mine):  # type: ignore[arg-type]  # there is one
                here, factor = (torch.full((), x, device=same[0].device) for x in (0.0, 1.0 / self.scale))
                torch._amp_foreach_non_finite_check_and_unscale_(same, here, factor)
                found.append(here.to(device, non_blocking=True))
            bad = torch.stack(found).amax()
        if num_ranks > 1:
            dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        self._update(bool(bad) if overflows is None else overflows)
        if self.skipped:
            for p in mine:
                p.grad = None

    def _update(self, overflow: bool) -> None:
        # as torch._amp_update_scale_, whose states these must match
        self.skipped = overflow
        if overflow:
            self.num_skipped += 1
            self.scale *= self.backoff_factor
            self.growth_tracker = 0
            return
        self.growth_tracker += 1
        if self.growth_tracker == self.growth_interval:
            grown = self.scale * self.growth_factor
            self.scale = grown if grown < float("inf") else self.scale
            self.growth_tracker = 0

    def state_dict(self) -> dict[str, float | int]:
        """Return the state in the form of torch.amp.GradScaler's; the same on every rank."""
        return {
            "scale": self.scale,
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": self.growth_tracker,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of this class or of torch.amp.GradScaler. Raises KeyError that names a missing entry."""
        for name in self.state_dict():
            if name not in state:
                raise KeyError(f"the state of the loss scaler has no {name!r}")
        self.scale = float(state["scale"])
        self.growth_factor, self.backoff_factor = float(state["growth_factor"]), float(state["backoff_factor"])
        self.growth_interval, self.growth_tracker = int(state["growth_interval"]), int(state["_growth_tracker"])
        self.__post_init__()


def active_autocast() -> str | None:
    """Return why nothing is captured or run here: a torch.autocast region of the caller; None outside of one."""
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            return (
                f"a torch.autocast({kind!r}) region is active: the program would not cast as it does; leave it, and "
                "pass precision='bf16-autocast', which makes the same casts, or 'bf16' to autoplan.parallelize"
            )
    return None


def check_precision(
    spec: ProgramSpec, precision: MixedPrecision | None, dtype: torch.dtype | None, compression: Compression | None
) -> None:
    """Raise ValueError for arguments that a mixed-precision program does not take."""
    if precision is None:
        return
    if dtype is not None:
        raise ValueError(f"dtype={dtype}: this program computes in {spec.compute_dtype} whatever its parameters are")
    if precision.scales_loss and isinstance(compression, PowerSGD):
        raise ValueError(
            "PowerSGD with fp16: the compression error of one step is added to the next, whose loss scale may "
            "differ; use bf16"
        )
