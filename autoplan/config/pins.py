"""Pins: choices that are fixed. They are checked once, on entry, and passed on as one record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, overload

from autoplan.config.choices import check_values
from autoplan.config.keys import check_kind
from autoplan.config.numbers import without_numpy
from autoplan.config.offload import state_offload, with_offload
from autoplan.config.parallel import ParallelConfig
from autoplan.config.recompute import NONE, read_recompute
from autoplan.schedules.schedule import PLAIN_SCHEDULE, SCHEDULES


class Pins(Mapping[str, Any]):
    """The fixed choices by name, as they were given. Offloaded activations are also pinned as `recompute`."""

    __slots__ = ("_values",)

    def __init__(self, given: Mapping[str, Any] | None = None) -> None:
        """Check and store the given pins.

        Raises: PinError for a name or value that is illegal for every model and cluster.
        """
        given = given or {}
        check_kind("pins", given, Mapping, "a mapping from names to values, {'tp': 8}")
        plain = {name: without_numpy(value) for name, value in given.items()}
        check_values(plain)
        self._values = dict(with_offload(plain))

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Pins({self._values!r})"

    def __hash__(self) -> int:
        return hash(tuple(self._values))

    @property
    def recompute(self) -> str | dict[str, str] | None:
        """The recompute pin in canonical form; None if it is not pinned."""
        return read_recompute(self._values["recompute"]) if "recompute" in self._values else None

    @property
    def _recompute(self) -> str | dict[str, str] | tuple[int, ...]:
        """The recompute pin in canonical form, or the number of layers per stage."""
        given = self._values.get("recompute", NONE)
        return given if isinstance(given, tuple) and isinstance(given[0], int) else read_recompute(given)

    @property
    def stages(self) -> tuple[int, ...] | None:
        """The number of layers per stage; None if it is not pinned."""
        stages = self._values.get("stages")
        return None if stages is None else tuple(stages)

    @property
    def schedule(self) -> tuple[str, int]:
        """(schedule, virtual stages per rank); if only one is pinned, the other has the value that it requires."""
        virtual_stages = self._values.get("virtual_stages", 1)
        schedule = self._values.get("schedule", PLAIN_SCHEDULE if virtual_stages == 1 else "Interleaved1F1B")
        fewest = SCHEDULES[schedule].virtual_stages[0]
        return schedule, virtual_stages if "virtual_stages" in self._values else fewest

    @property
    def config(self) -> ParallelConfig:
        """The pinned choices, with defaults for the others."""
        forms = {"recompute": self._recompute, "stages": self.stages, "offload": state_offload(self._values)}
        return ParallelConfig(**{**self._values, **{name: forms[name] for name in forms if name in self._values}})

    def completed(self, num_devices: int, global_batch_size: int | None = None) -> ParallelConfig:
        """Return the configuration of the pins and of the choices that follow from them.

        dp defaults to all remaining devices; the schedule to 1F1B, or to the interleaved schedule with virtual stages;
        the stages per rank to the fewest that the schedule needs; other degrees and ZeRO to their defaults. The result
        may be illegal.

        Args:
            global_batch_size: Determines the number of micro-batches. None: 1 without a pipeline, 2 * pp with one.
        """
        pinned = self.config
        schedule, virtual_stages = self.schedule
        dp, num = pinned.dp, pinned.num_micro_batches
        if "dp" not in self._values:
            dp = max(1, num_devices // (pinned.tp * pinned.pp * pinned.cp))
        if global_batch_size is not None:
            num = max(1, global_batch_size // (dp * pinned.micro_batch_size))
        elif "num_micro_batches" not in self._values and pinned.pp > 1:
            num = 2 * pinned.pp
        return pinned.but(dp=dp, num_micro_batches=num, schedule=schedule, virtual_stages=virtual_stages)


class PinsField:
    """A field of a dataclass that is given as a mapping and read as Pins; the dataclass checks it (`Pins(given)`)."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Mapping[str, Any]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> Pins: ...

    def __get__(self, instance: object | None, owner: type) -> Mapping[str, Any]:
        return Pins() if instance is None else instance.__dict__[self._name]

    def __set__(self, instance: object, given: Mapping[str, Any]) -> None:
        instance.__dict__[self._name] = given
