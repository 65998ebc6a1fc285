"""How experts are spread over ranks that tokens travel to."""

from __future__ import annotations

from dataclasses import dataclass

from autoplan.config.parallel import Dispatcher


@dataclass(frozen=True)
class ExpertDegrees:
    """Experts over `ep` ranks, each expert over `etp`. Folded from dp * cp * tp.

    `executed`: the layout was solved for it and is run as it is (`token_dispatch_layouts`), so that nothing is
    rerouted; rows travel over etp as they do over ep.
    """

    ep: int = 1
    etp: int = 1
    dispatcher: Dispatcher = Dispatcher.ALL_TO_ALL
    executed: bool = False

    def dispatches(self, tp: int) -> bool:
        """False if experts are where tensor parallelism has the rest of the layer: then its layout holds for them."""
        return self.ep > 1 or self.etp != tp


@dataclass(frozen=True)
class Spread:
    """An axis of `ways` ranks that splits factor `position` of tensor dim `dim` of a parameter of experts."""

    axis: str
    ways: int
    dim: int
    position: int
