"""The degrees over which experts are spread, for layers whose tokens travel to their experts."""

from __future__ import annotations

from dataclasses import dataclass

from autoplan.config.parallel import Dispatcher


@dataclass(frozen=True)
class ExpertDegrees:
    """Experts over `ep` ranks, each expert over `etp` ranks, folded from dp * cp * tp.

    Attributes:
        executed: the layout was solved for these degrees and runs as it is (`token_dispatch_layouts`): no conversion is
            rerouted, and rows travel over etp as over ep.
    """

    ep: int = 1
    etp: int = 1
    dispatcher: Dispatcher = Dispatcher.ALL_TO_ALL
    executed: bool = False

    def dispatches(self, tp: int) -> bool:
        """Return True if tokens travel to experts; False if experts are split over tp like the rest of the layer."""
        return self.ep > 1 or self.etp != tp


@dataclass(frozen=True)
class Spread:
    """An axis of `ways` ranks that splits factor `position` of tensor dim `dim` of a parameter of experts."""

    axis: str
    ways: int
    dim: int
    position: int
