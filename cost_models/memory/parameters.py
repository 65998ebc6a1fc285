"""The memory of a parameter on a rank: itself, its gradient and its optimizer state, under every kind of sharding."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from operator import attrgetter

from autoplan.config.offload import PARAMETERS, of_states
from autoplan.config.parallel import Mode, ParallelConfig, RunOptions, scatters_each, sums_in_32_bits
from autoplan.config.precision import MASTER_BYTES, Precision
from autoplan.cost_models.hardware.parts import Device
from autoplan.cost_models.network.groups import replica_counts
from autoplan.cost_models.work import ParamWork
from autoplan.units import dtype_bytes


@dataclass(frozen=True)
class States:
    """Bytes on a rank of parameters and their gradients and optimizer state.

    Attributes:
        stored: Parameters between steps.
        gathered: Parameters that ZeRO gathers.
        gradients: Gradients after all backwards.
        optimizer: Optimizer state.
        whole: A gradient before it is scattered.
        first: Gradients after the first backward.
        reduced: Gradients that ZeRO has reduced: what is left of them until the optimizer step.
        host: The part of all this that is in host memory.
    """

    stored: float = 0.0
    gathered: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    whole: float = 0.0
    first: float = 0.0
    reduced: float = 0.0
    host: float = 0.0

    @staticmethod
    def total(parts: Iterable[States]) -> States:
        """Return the sum, term by term."""
        columns = zip(*map(_TERMS, parts), strict=True)
        return States(*(sum(column, 0.0) for column in columns))


# Compute capabilities of devices whose 8-bit products read the transposed weight as it is stored: Transformer Engine,
# transformer_engine/pytorch/utils.py, is_non_tn_fp8_gemm_supported. Others store the transposed weight, too: 2 bytes.
_READ_TRANSPOSED = (10.0, 12.0)


def stores_8_bits(device: Device, mode: Mode, options: RunOptions) -> bool:
    """Return True if weights of products with one scale take 1 byte per element: Megatron's --fp8-param-gather."""
    first, beyond = _READ_TRANSPOSED
    reads = device.compute_capability is not None and first <= device.compute_capability < beyond
    return mode is Mode.FUSED and options.narrow_gather and reads


_PLAIN = RunOptions()
_TERMS = attrgetter(*(f.name for f in fields(States)))
NO_STATES = States()


class ParameterMemory:
    """The states of the parameters of a rank at the degrees of `config`. They are proportional to their elements.

    Attributes:
        shares: ranks that hold one copy between them, of parameters and (True) of those of experts.
        scatters: every backward leaves sharded gradients (`scatters_each`).
        wide: whole gradients are kept in 32 bits, in which they are reduced (`sums_in_32_bits`).
        narrow: weights of products in 8 bits are stored in 8 bits if an optimizer state that is sharded has masters
            of them (see `stores_8_bits`).
    """

    def __init__(
        self,
        config: ParallelConfig,
        precision: Precision,
        megatron: bool,
        options: RunOptions = _PLAIN,
        narrow: bool = False,
    ) -> None:
        self.narrow: bool = narrow and config.zero_stage > 0
        self.whole_sums: bool = options.whole_sums and config.zero_stage == 1
        self.scatters: bool = scatters_each(config, options)
        self.wide: bool = sums_in_32_bits(config, options)
        self.config = config
        self.precision = precision
        self.megatron = megatron
        self.shares: dict[bool, int] = replica_counts(config)

    def of(self, p: ParamWork) -> States:
        """Return the states of a parameter."""
        c, n, width = self.config, float(p.num_elements), 1.0 if p.narrow and self.narrow else p.width
        share = self.shares[p.expert] if c.zero_stage else 1
        masters = self._has_master(p) and share > 1 and not self.megatron
        stored = n * (MASTER_BYTES if masters else width) / (1 if self.whole_always else share)
        gathered = n * width if share > 1 and not self.whole_always else 0.0
        found = States(stored, gathered)
        if p.trainable:
            grad = n * (p.width if self.precision.grad_bytes is None else self.precision.grad_bytes)
            # gradient shards of fully_shard are as wide as its parameters
            shard = (n * MASTER_BYTES if masters else grad) / share
            if self.whole_sums:
                grad += n * p.width
            if self.wide and share > 1:
                grad = n * MASTER_BYTES
            found = States(
                stored,
                gathered,
                shard if self.scatters else grad,
                self._optimizer_bytes(p, masters) / share,
                grad if share > 1 else 0.0,
                shard if self.scatters_first else grad,
                shard,
            )
        return self._offloaded_states(p, share, masters, found) if of_states(c.offload) else found

    def _optimizer_bytes(self, p: ParamWork, sharded_masters: bool) -> float:
        """Return the optimizer state of a parameter before ZeRO, without masters that are stored as its shards."""
        n = float(p.num_elements)
        state = n * (2 * dtype_bytes(p.dtype) if self.precision.state_bytes is None else self.precision.state_bytes)
        return state - n * self.precision.master_bytes if sharded_masters else state

    def _offloaded_states(self, p: ParamWork, share: int, sharded_masters: bool, device: States) -> States:
        """Return the states of a parameter under the configuration's offload. `device`: the states without offload."""
        by_policy = PARAMETERS in self.config.offload and share > 1  # fully_shard keeps its shards on the host
        stored = 0.0 if by_policy and not self.whole_always else device.stored
        if not p.trainable:
            return replace(device, stored=stored, host=device.stored - stored)
        # parameters and gradients as the optimizer takes them, and its state (which includes separate masters)
        shown = MASTER_BYTES if self._has_master(p) else dtype_bytes(p.dtype)
        counted = self._has_master(p) and not sharded_masters
        state = self._optimizer_bytes(p, sharded_masters)
        host = (state + float(p.num_elements) * shown * (1 if counted else 2)) / share
        kept, first, reduced = device.gradients, device.first, device.reduced
        if by_policy:
            kept = 0.0 if self.scatters else kept
            first = 0.0 if self.scatters_first else first
            reduced = 0.0
        return replace(device, stored=stored, gradients=kept, optimizer=0.0, first=first, reduced=reduced, host=host)

    @property
    def whole_always(self) -> bool:
        """True if parameters are whole between steps, whatever ZeRO shards."""
        return self.megatron and self.config.zero_stage < 3

    @property
    def scatters_first(self) -> bool:
        """True if the first backward of a step leaves sharded gradients."""
        return self.scatters or (self.config.num_micro_batches == 1 and not self.megatron)

    def _has_master(self, p: ParamWork) -> bool:
        """Return True for a 16-bit copy of a float32 parameter. Untrained 16-bit parameters need no master."""
        return self.precision.has_masters and p.dtype == self.precision.compute and p.trainable
