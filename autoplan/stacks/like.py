"""`--like NAME[@VERSION]`: the settings of a stack for a run, and what the stack can do.

like = read_like("megatron-bridge@26.08", {"launch": "async"})       # what was given overrides the stack
like.options("h100-sxm5-80gb"), like.mode, like.precision(latent=False), like.can
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autoplan.config.choices import option_data, options_of, read_mode
from autoplan.config.parallel import Mode, RunOptions
from autoplan.config.precision import precision_of, read_precision
from autoplan.config.recompute import recompute_of_text
from autoplan.config.settings import setting
from autoplan.errors import PinError
from autoplan.names import did_you_mean
from autoplan.schedules.schedule import PLAIN_SCHEDULE
from autoplan.stacks.records import Abilities, Era, KeptGathered, Stack, stack, within_layers, year_of

GRADIENTS_32 = "-grad32"  # suffix of a precision: gradients in 32 bits where the stack has 16
_PLAIN = setting("precision").default  # if none is given
_WORDS = {"fp4": "NVFP4"}  # precisions whose name in the records of changes is another


@dataclass(frozen=True)
class Like:
    """A stack at a version, and what was given beside it.

    Attributes:
        given: options of RunOptions by name, `mode` and `precision`, which override the stack.
        device, model: what the settings are asked for, because some recipes differ by them; "" if that is not known.
    """

    stack: Stack
    version: str
    given: Mapping[str, Any] = field(default_factory=dict, hash=False)
    device: str = ""
    model: str = ""

    def __post_init__(self) -> None:
        for choice, value in (("mode", self.mode), ("precision", self._base)):
            able: tuple[str, ...] = getattr(self.can, f"{choice}s")
            if value not in able:
                raise PinError(
                    f"{choice}={str(value)!r}: {self.name} cannot; nearest: {able[0]}; it can {', '.join(able)}"
                )

    @property
    def name(self) -> str:
        """NAME@VERSION."""
        return f"{self.stack.name}@{self.version}"

    @property
    def year(self) -> float:
        """The year of the version, with decimals."""
        return year_of(self.version)

    @property
    def era(self) -> Era:
        """The defaults of the version."""
        return self.stack.era_at(self.year)

    @property
    def can(self) -> Abilities:
        """The abilities of the version."""
        return self.era.can

    @property
    def mode(self) -> Mode:
        """The given mode, or that of the stack."""
        return read_mode(self.given.get("mode") or self.stack.kernels.modes[0])

    @property
    def _base(self) -> str:
        """The precision without what is kept in 16 bits."""
        name = str(self.given.get("precision") or _PLAIN).replace(GRADIENTS_32, "")
        precision_of(name)
        return read_precision(name).base

    @property
    def mtp_layers(self) -> int:
        """Layers for tokens after the next that the stack adds to the model."""
        return self.stack.mtp_layers_at(self.year, self.model)

    def precision(self, latent: bool) -> str:
        """Return the precision with what the stack keeps in 16 bits, unless a suffix says it.

        Args:
            latent: True for a model with latent attention, of which some stacks keep the moments in 16 bits.
        """
        given, base = str(self.given.get("precision") or _PLAIN), self._base
        return self.stack.in_16_bits(base, latent, self.year) if given == base else given.replace(GRADIENTS_32, "")

    def precision_word(self, precision: str, latent: bool) -> str:
        """Return what has to be given beside the stack to get a precision: with a suffix if the stack has less bits."""
        alone = replace(self, given={"precision": precision}).precision(latent)
        return precision if alone == precision else precision + GRADIENTS_32

    def on(self, device: str, model: str) -> Like:
        """Return a copy for a device of the catalog and a model."""
        return replace(self, device=device, model=model)

    @property
    def _where(self) -> tuple[float, str, str, str]:
        return self.year, self.device.upper(), _WORDS.get(self._base, self._base).upper(), self.model

    def defaults(self, device: str) -> RunOptions:
        """Return the options of the stack on a device of the catalog."""
        return self.stack.options_at(*replace(self, device=device)._where)

    def options(self, device: str) -> RunOptions:
        """Return the options of the stack on a device of the catalog, overridden by those that were given."""
        usual = option_data(self.defaults(device))
        return options_of({**usual, **{name: v for name, v in self.given.items() if name in usual and v is not None}})

    def but(self, **given: Any) -> Like:
        """Return a copy with other values given; None changes nothing."""
        return replace(self, given={**self.given, **{name: v for name, v in given.items() if v is not None}})

    def degrees(
        self, given: Mapping[str, Any], num_experts: int, stage_ranks: int, layers: Sequence[str]
    ) -> dict[str, Any]:
        """Return `given` completed by the stack's defaults of ZeRO, recompute, schedule, experts and stages.

        Args:
            given: choices of ParallelConfig by name; those that are missing follow from the stack.
            layers: names of the model's layers, in model order.
            stage_ranks: devices of a pipeline stage; experts are split as tp or whole, whichever they leave ranks for.
        """
        out = dict(given)
        kernels, kept = self.stack.kernels, self.stack.kept_gathered
        tp, pp = (int(out.get(name) or 1) for name in ("tp", "pp"))
        if "zero_stage" not in out:
            keeps = (pp > 1 and KeptGathered.PIPELINES in kept) or (num_experts > 0 and KeptGathered.EXPERTS in kept)
            stage = kernels.zero_stages[0]
            out["zero_stage"] = 1 if stage == 3 and keeps else stage
        if "recompute" not in out:
            again = self.stack.recompute_at(*self._where, out["zero_stage"])[0]
            out["recompute"] = recompute_of_text(within_layers(again, len(layers)), layers)
        out |= self._schedule(given, pp)
        if num_experts and tp > 1 and "etp" not in out:
            ep, usual = int(out.get("ep") or 1), (1, None) if self.stack.experts_whole(self.year) else (None, 1)
            found = next((etp for etp in usual if stage_ranks % (ep * (etp or tp)) == 0), None)
            out |= {} if found is None else {"etp": found}
        return out

    def _schedule(self, given: Mapping[str, Any], pp: int) -> dict[str, str]:
        """Return the schedule of a stack that does not run the plain one, if none is given; empty otherwise."""
        if pp == 1 or given.get("schedule") is not None or PLAIN_SCHEDULE in self.can.schedules:
            return {}
        return {} if int(given.get("virtual_stages") or 1) > 1 else {"schedule": self.can.schedules[0]}

    def texts(self, device: str) -> list[str]:
        """Return the values that were given against the stack, as `name=value (the stack: value)`."""
        usual = {**option_data(self.defaults(device)), "mode": str(self.stack.kernels.modes[0])}
        now = {**option_data(self.options(device)), "mode": str(self.mode)}
        return [f"{n}={now[n]} ({self.stack.name}: {v})" for n, v in usual.items() if now[n] != v]


def equal_stages(layers: int, pp: int, virtual_stages: int, num_mtp: int = 0) -> tuple[int, ...] | None:
    """Return equal chunks; where they do not divide, embedding and head count as layers.

    These are Megatron's account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split. None (the
    planner's balance) without a pipeline, where several chunks are equal, or where neither divides.

    Args:
        layers: all layers.
        num_mtp: those of them, the last ones, that predict tokens after the next: they are in the last chunk, with as
            many fewer others as full chunks before it leave, as in DeepSeek-V3's layouts of Megatron Bridge
            (recipes/deepseek/h100/deepseek_v3.py; `Et|(tt|)*30mL` of perf_recipes, whose first chunk is short, too).
    """
    chunks = pp * virtual_stages
    if num_mtp and pp > 1:
        each = -(-(layers - num_mtp) // chunks)
        last = layers - num_mtp - each * (chunks - 1)
        found = (each + min(0, last), *(each,) * (chunks - 2), max(0, last) + num_mtp)
        return None if found[0] <= 0 or (virtual_stages > 1 and len(set(found)) == 1) else found
    if pp == 1 or (virtual_stages > 1 and layers % chunks == 0):
        return None
    if layers % chunks == 0:
        return (layers // chunks,) * chunks
    if (layers + 2) % chunks == 0:
        inner = (layers + 2) // chunks
        return (inner - 1, *(inner,) * (chunks - 2), inner - 1)
    return None


def read_like(text: str, given: Mapping[str, Any] | None = None) -> Like:
    """Return the stack of `NAME` or `NAME@VERSION` with what is given beside it; values of None are not given.

    Raises: PinError for an unknown stack or version, and for a mode or precision that the stack cannot do.
    """
    if not isinstance(text, str):
        raise PinError(f"like={text!r} must be the name of a stack, for example megatron-bridge@26.08")
    name, at, version = text.partition("@")
    found = stack(name)
    if at and not version:
        raise PinError(
            f"like={text!r} has no version after @; {did_you_mean(version, [era.version for era in found.eras])}"
        )
    year = year_of(version or found.default_version)
    said = {n: v for n, v in (given or {}).items() if v is not None}
    return Like(found, f"{int(year) % 100:02d}.{int((year % 1) * 12) + 1:02d}", said)
