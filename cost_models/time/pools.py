"""The time and memory of a plan whose stages run on several kinds of devices.

    pricer = PooledPricer((on_h100, on_a100), pools=(0, 0, 1), across=(costs, others))    # stage 2 runs on A100s
    pricer.step_s(chunks, recompute)

Every stage is priced by the Pricer of its pool, which is that of a cluster of its devices alone, with as many of them
as there are in all pools; the schedule is simulated with the times of all stages. Between two pools a send takes as
long as on the slower of their networks. A stage lies in one pool, and every rank holds one chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoplan.config.parallel import ParallelConfig
from autoplan.cost_models.costs import Costs
from autoplan.cost_models.hardware.parts import Group
from autoplan.cost_models.time.price import Pricer, ranges_of
from autoplan.cost_models.time.simulation import ChunkTimes, Timeline, simulate, step_of
from autoplan.cost_models.work import Workload
from autoplan.schedules.schedule import actions


class PooledPricer:
    """The prices of one workload on stages of several pools.

    Args:
        pricers: one per pool, of the same workload under the same configuration.
        pools: the pool of every stage, by its index in `pricers`.
        across: costs on the network between a pool and others, one per pool.
    """

    def __init__(self, pricers: Sequence[Pricer], pools: Sequence[int], across: Sequence[Costs]) -> None:
        self.pricers: tuple[Pricer, ...] = tuple(pricers)
        self.pools: tuple[int, ...] = tuple(pools)
        self.across: tuple[Costs, ...] = tuple(across)
        self._across_s: dict[tuple[int, int, str], float] = {}
        self.config: ParallelConfig = pricers[0].config
        self.workload: Workload = pricers[0].workload
        self.num_units: int = pricers[0].num_units
        if len(self.pools) != self.config.pp or self.config.virtual_stages != 1:
            raise ValueError(
                f"{len(self.pools)} stages with a pool, for a plan of pp={self.config.pp} with one chunk each"
            )

    def of(self, stage: int) -> Pricer:
        """Return the prices of a stage."""
        return self.pricers[self.pools[stage]]

    def chunk_times(self, chunks: Sequence[int], recompute: Sequence[int], which: str = "mid") -> list[ChunkTimes]:
        """Return the durations of every stage in one scenario (`low`, `mid`, `high`)."""
        return [self.of(s).times_of(units, recompute[s], which) for s, units in enumerate(ranges_of(chunks))]

    def sends_s(self, chunks: Sequence[int], which: str = "mid") -> list[float]:
        """Return the seconds of a send at every boundary of two stages."""
        out = []
        for stage, units in enumerate(ranges_of(chunks)[:-1]):
            here, there, last = self.pools[stage], self.pools[stage + 1], units.stop - 1
            if here == there:
                out.append(self.pricers[here].hop_s(stage, last, which))
            else:
                out.append(max(self._sent_across_s(pool, last, which) for pool in (here, there)))
        return out

    def _sent_across_s(self, pool: int, unit: int, which: str) -> float:
        """Return the seconds of a send after a unit between two ranks that share only the outermost level."""
        key = pool, unit, which
        if key not in self._across_s:
            costs = self.across[pool]
            inner = costs.cluster.levels[:-1]
            group = Group(2, inner[-1].size if inner else 1)
            sent = costs.sent_s(self.workload.cut_bytes[unit], group, self.pricers[pool].groups["tp"])
            self._across_s[key] = getattr(sent, which)
        return self._across_s[key]

    def timeline(
        self, chunks: Sequence[int], recompute: Sequence[int], which: str = "mid", *, events: bool = False
    ) -> Timeline:
        """Return the simulation of one step, without what follows the last action."""
        c, lag = self.config, self.sends_s(chunks, which)
        times = self.chunk_times(chunks, recompute, which)
        table, transfer = actions(c.schedule, c.pp, c.num_micro_batches, 1), self.pricers[0].costs.transfer(c)
        return simulate(table, times, lag, lag, transfer=transfer, events=events)

    def step_s(self, chunks: Sequence[int], recompute: Sequence[int], which: str = "mid") -> float:
        """Return the seconds of one step in one scenario."""
        timeline = self.timeline(chunks, recompute, which)
        after = [self.of(s).after_pipeline(units, which) for s, units in enumerate(ranges_of(chunks))]
        return step_of(timeline.rank_end_s, after, max(p.fixed_s for p in self.pricers))
