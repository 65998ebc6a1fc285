"""How many devices a run needs: the fewest that meet a deadline, and the least money.

    found = size(request, 15e12, 30, kinds=["h100", "p5.48xlarge"], budget_usd=2e6)
    found.fewest.nodes, found.cheapest.run.usd, [(p.num_devices, p.days) for p in found.kinds[0].points]

For each kind of device, plans are searched at numbers of nodes that are doubled until the deadline is met, and then
halved in between. A number is tried once. Between tried numbers the days are assumed to fall with more nodes; the next
smaller legal number below the answer was tried if `Kind.adjacent` is True, and `Kind.proved` says whether searches that
found no plan in time were stopped before they could tell. Days and money include failures and
checkpoints, where they are known.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autoplan.catalog import active_params
from autoplan.config.numbers import digits, without_numpy
from autoplan.cost_models.hardware import catalog
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.quantity import Quantity
from autoplan.cost_models.whole_run import DAY_S, Assumptions, Run
from autoplan.errors import PinError
from autoplan.search.certificate import how_searched
from autoplan.search.planner import PlanRequest, search_plan
from autoplan.search.request import space_of
from autoplan.sweeps.whatif import Point, RunTask, check_tokens, point_of, run_of

SEARCH_S = 30.0  # seconds for the plan of one number of nodes
_GUESS = 0.4  # share of the peak that a first guess of the number of nodes assumes
_MOST_DEVICES = 2**18
_MOST_BISECTED = 6  # plans between the last number that is too small and the first that meets the deadline
_MOST_NEAR = 8  # legal numbers that are looked for in place of one that is illegal
_NO_GAIN = 2  # doublings without fewer days after which more nodes are not tried


@dataclass(frozen=True)
class SizePoint:
    """A number of nodes, its plan and its run. `run` is None if there is no plan: `point.status` says why."""

    nodes: int
    num_devices: int
    point: Point
    run: Run | None

    @property
    def whole_days(self) -> Quantity | None:
        """Days with failures, else without; None without a plan, and where failures may come faster than progress."""
        return self._of("days_with_failures", "days")

    @property
    def whole_usd(self) -> Quantity | None:
        """US dollars of `whole_days`; None also without a price."""
        return self._of("usd_with_failures", "usd")

    @property
    def days(self) -> float | None:
        """Expected days (`whole_days`)."""
        return None if self.whole_days is None else self.whole_days.mid

    @property
    def usd(self) -> float | None:
        """Expected US dollars (`whole_usd`)."""
        return None if self.whole_usd is None else self.whole_usd.mid

    def is_ruled_out(self, deadline_days: float, budget_usd: float | None) -> bool:
        """Return True if no plan of this number of nodes can meet both: its search proves it, or nothing fits, or
        failures come faster than progress."""
        if self.days is None:
            endless = self.run is not None and self.run.endless
            return endless or self.point.status in ("does not fit", "illegal")
        least = 1.0 if self.point.certificate is None else 1.0 - self.point.certificate.gap
        too_dear = budget_usd is not None and self.usd is not None and self.usd * least > budget_usd
        return too_dear or self.days * least > deadline_days

    def _of(self, *names: str) -> Quantity | None:
        if self.run is None or self.run.endless:
            return None
        return next((v for name in names if (v := getattr(self.run, name)) is not None), None)

    def meets(self, deadline_days: float, budget_usd: float | None) -> bool:
        """Return True if it is known to be in time, and within the budget if there is one."""
        in_time = self.days is not None and self.days <= deadline_days
        return in_time and (budget_usd is None or (self.usd is not None and self.usd <= budget_usd))

    def meets_surely(self, deadline_days: float, budget_usd: float | None) -> bool:
        """Return True if it also meets both at the high ends of its intervals."""
        days, usd = self.whole_days, self.whole_usd
        in_time = days is not None and days.high <= deadline_days
        return in_time and (budget_usd is None or (usd is not None and usd.high <= budget_usd))


@dataclass(frozen=True)
class Kind:
    """One kind of device or instance: all points that were planned, by number of nodes.

    Attributes:
        name: as it was given.
        fewest: the point with the fewest nodes that meets the deadline and the budget; None if no point does.
        cheapest: the point with the least money among those that meet both; None also without prices.
        surest: the planned point with the fewest nodes that meets both also at the high ends of its intervals.
        adjacent: True if the next smaller legal number of nodes below `fewest` was tried.
        proved: True if every smaller number that was tried is proved to be too slow or too dear; False: its search was
            stopped.
        reason: why no point meets them.
    """

    name: str
    points: tuple[SizePoint, ...]
    fewest: SizePoint | None
    cheapest: SizePoint | None
    adjacent: bool
    reason: str = ""
    proved: bool = True
    surest: SizePoint | None = None


@dataclass(frozen=True)
class Size:
    """The answer for all kinds of devices. `interrupted`: Ctrl-C ended it, so that points or kinds are missing."""

    request: PlanRequest
    tokens: float
    deadline_days: float
    budget_usd: float | None
    kinds: tuple[Kind, ...]
    assumptions: Assumptions = field(default_factory=Assumptions)
    interrupted: bool = False

    @property
    def fewest(self) -> SizePoint | None:
        """The point with the fewest devices of all kinds; None if no kind meets the deadline and the budget."""
        found = [k.fewest for k in self.kinds if k.fewest is not None]
        return min(found, key=lambda p: p.num_devices, default=None)

    @property
    def proved(self) -> bool:
        """True if no number of nodes of any kind with fewer devices than `fewest` can meet both.

        Every one that was planned is proved not to, and no legal number was left out next to the fewest of a kind.
        """
        if not all(k.adjacent for k in self.kinds if k.fewest is not None):
            return False
        most = math.inf if self.fewest is None else self.fewest.num_devices
        tried = (p for k in self.kinds for p in k.points if p.num_devices < most)
        return all(p.is_ruled_out(self.deadline_days, self.budget_usd) for p in tried)

    @property
    def cheapest(self) -> SizePoint | None:
        """The point with the least money of all kinds; None without prices, or if no kind meets them."""
        found = [k.cheapest for k in self.kinds if k.cheapest is not None]
        return min(found, key=_money, default=None)

    @property
    def surest(self) -> SizePoint | None:
        """The point with the fewest devices of all kinds that meets both at the high ends of its intervals, too."""
        found = [k.surest for k in self.kinds if k.surest is not None]
        return min(found, key=lambda p: p.num_devices, default=None)


def _money(point: SizePoint) -> float:
    return math.inf if point.usd is None else point.usd


def nodes_of(text: str, nodes: int = 1) -> Cluster:
    """Return nodes of a kind: the usual nodes of a device (`h100`), or a cloud instance, with overrides (`@price=2`).

    Raises: PinError for a name that is neither, or not unique, and for a number of nodes.
    """
    name, at, overrides = text.strip().partition("@")
    name = name.strip()
    if re.search(r"(^|,)\s*nodes\s*=", overrides):
        raise PinError(f"{text!r}: the number of nodes follows from the deadline; leave out nodes=")
    if name in catalog.instances() or not catalog.device_ids(name):
        return Cluster.parse(f"{nodes}x{name}{at}{overrides}")
    entry = catalog.entry(name)
    return Cluster.parse(f"{nodes}x{entry.devices_per_node}x{entry.id}{at}{overrides}")


def read_kinds(text: str) -> list[str]:
    """Return the kinds of a list with commas: `h100@nic=400,price=2,gb200`."""
    return [part.strip() for part in re.split(r",(?!\s*[A-Za-z_]+\s*=)", text) if part.strip()]


def size(
    request: PlanRequest,
    tokens: float,
    deadline_days: float,
    *,
    kinds: Sequence[str | Cluster] = (),
    budget_usd: float | None = None,
    assumptions: Mapping[str, float] | None = None,
    seconds: float = SEARCH_S,
    search: Callable[[PlanRequest], Any] = search_plan,
    told: Callable[[str, int], None] = lambda kind, nodes: None,
) -> Size:
    """Return the fewest devices, and the least money, that train on so many tokens in time.

    Args:
        request: the task; its cluster is the kind if `kinds` is empty, whatever its number of nodes.
        kinds: devices, instances or clusters (`nodes_of`).
        budget_usd: money that the run may cost.
        assumptions: of the whole run, as `whatif` takes them.
        seconds: time limit of the search at one number of nodes.
        search: plans one request, as `search_plan` does.
        told: called before each search, with the kind and the number of nodes.

    Raises: PinError for tokens, a deadline or a budget that is not above 0, and for an unknown kind.

    Example:
        >>> from autoplan import Cluster, PlanRequest, load_model, size
        >>> request = PlanRequest(load_model("gpt2"), Cluster.parse("1xh100"), 1024, 16, pins={"tp": 1, "pp": 1})
        >>> found = size(request, tokens=10e9, deadline_days=1)
        >>> found.fewest is not None
        True
    """
    tokens, deadline_days, budget_usd = without_numpy((tokens, deadline_days, budget_usd))
    check_tokens(tokens)
    for name, value in (("deadline_days", deadline_days), ("budget_usd", budget_usd)):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and 0 < value < math.inf):
            raise PinError(f"{name}={value!r} must be a number above 0")
    run = RunTask(tokens, Assumptions.of(assumptions))
    made = [(k if isinstance(k, str) else str(k), nodes_of(k) if isinstance(k, str) else k) for k in kinds]
    asked = replace(request, time_limit_s=seconds, top=1, patient=False)
    found = []
    for name, cluster in made or [(request.cluster.device.name, request.cluster)]:
        if cluster.fabric is not None:
            raise PinError(f"the number of nodes of {cluster} follows from its fabric; name a device or an instance")
        if cluster.device_type == "cpu" and cluster.num_nodes == 1:
            raise PinError(f"{name} is this machine, of which there is one; name a device or an instance")
        sizer = _Sizer(replace(asked, cluster=cluster), run, deadline_days, budget_usd, search)
        found.append(sizer.kind(name, told))
        if sizer.interrupted:
            break
    return Size(request, tokens, deadline_days, budget_usd, tuple(found), run.assumptions, sizer.interrupted)


class _Sizer:
    """Plans of one kind of device, each number of nodes once."""

    def __init__(
        self,
        request: PlanRequest,
        run: RunTask,
        deadline_days: float,
        budget_usd: float | None,
        search: Callable[[PlanRequest], Any],
    ) -> None:
        self.request, self.run, self.search = request, run, search
        self.deadline_days, self.budget_usd = deadline_days, budget_usd
        self.points: dict[int, SizePoint] = {}
        self.told: Callable[[int], None] = lambda nodes: None
        self.legal: dict[int, bool] = {}
        self.interrupted = False

    def kind(self, name: str, told: Callable[[str, int], None]) -> Kind:
        """Return all that was found of this kind."""
        self.told = lambda nodes: told(name, nodes)
        adjacent = False
        try:
            first = self._in_time()
            adjacent = first is not None and self._bisect(first)
            if first is not None:
                self._rung(2 * min(n for n in self.points if self._quick(n)))  # the next point of the curve
            if first is not None and self.budget_usd is not None:
                adjacent = self._within_budget(adjacent)
        except KeyboardInterrupt:
            self.interrupted = True
        points = tuple(self.points[n] for n in sorted(self.points))
        meeting = [p for p in points if self._meets(p)]
        priced = [p for p in meeting if p.usd is not None]
        return Kind(
            name,
            points,
            min(meeting, key=lambda p: p.nodes, default=None),
            min(priced, key=lambda p: (_money(p), p.nodes), default=None),
            adjacent,
            "" if meeting else self._reason(points),
            all(
                p.is_ruled_out(self.deadline_days, self.budget_usd)
                for p in points
                if not meeting or p.nodes < meeting[0].nodes
            ),
            next((p for p in points if p.meets_surely(self.deadline_days, self.budget_usd)), None),
        )

    def _meets(self, point: SizePoint) -> bool:
        return point.meets(self.deadline_days, self.budget_usd)

    def _in_time(self) -> int | None:
        """Double the nodes from a guess until the deadline is met, or halve them until it is not.

        Return a number that meets it and whose half does not, or is 0; None if there is none. More money than the
        budget does not count here: fewer nodes may cost less, but take longer.
        """
        guess = n = self._guess()
        idle, best, found = 0, math.inf, None
        while not self._quick(rung := self._rung(n)):
            days = self._at(rung).days or math.inf
            idle, best = (0, days) if days < best else (idle + (days < math.inf), min(best, days))
            n *= 2
            if n * self.request.cluster.devices_per_node > _MOST_DEVICES or idle >= _NO_GAIN or self._is_endless(rung):
                break
        else:
            found, guess = rung, n
        if found is None and best < math.inf:
            return None
        n = guess
        while n > 1:
            n //= 2
            rung = self._rung(n)
            if self._quick(rung):
                found = rung if found is None else min(found, rung)
            elif self._at(rung).point.status != "illegal":
                break
        return found

    def _rung(self, n: int) -> int:
        """Return a number of nodes, planned: n, or if it is illegal a legal one between its half and its double.

        Of those whose devices batch, node and layers divide, it is the nearest; n if none of them is legal.
        """
        model, per_node = self.request.facts.model, self.request.cluster.devices_per_node
        if self._at(n).point.status != "illegal" or model is None:
            return n
        divided = self.request.global_batch_size * model.num_layers * per_node
        near = [m for m in range(n // 2 + 1, 2 * n) if m != n and divided % (m * per_node) == 0]
        near.sort(key=lambda m: (abs(math.log(m / n)), m))
        found = next((m for m in near[:_MOST_NEAR] if self._is_legal(m)), n)
        _ = self._at(found)
        return found

    def _is_endless(self, n: int) -> bool:
        run = self._at(n).run
        return run is not None and run.endless

    def _quick(self, n: int) -> bool:
        """Return True if a number of nodes is in time."""
        days = self._at(n).days
        return days is not None and days <= self.deadline_days

    def _guess(self) -> int:
        """Return a power of two of nodes that would meet the deadline at a usual share of the peak."""
        c = self.request.cluster
        flops = 6.0 * active_params(self.request.graph) * (self.run.tokens or 0.0)
        needed = flops / (_GUESS * c.device.peak_flops * c.devices_per_node * self.deadline_days * DAY_S)
        most = max(1, _MOST_DEVICES // c.devices_per_node)
        return 1 << min(max(0, math.ceil(math.log2(max(needed, 1.0)))), most.bit_length() - 1)

    def _bisect(self, high: int) -> bool:
        """Look for fewer nodes than `high` that are in time. Return True if the next smaller legal number is not."""
        tried = (n for n, p in self.points.items() if n < high and p.point.status != "illegal")
        low = max(tried, default=0)  # not in time, or 0
        for _ in range(_MOST_BISECTED):
            between = self._legal_near((low + high) // 2, low, high)
            if between is None:
                return True
            if self._quick(between):
                high = between
            else:
                low = between
        return self._legal_near((low + high) // 2, low, high) is None

    def _within_budget(self, adjacent: bool) -> bool:
        """Look for fewer nodes that are in time and within the budget, next to the fewest that are.

        Return True if the next smaller legal number is too slow or too dear; `adjacent` if none meets both.
        """
        for _ in range(_MOST_BISECTED):
            fewest = min((n for n, point in self.points.items() if self._meets(point)), default=None)
            if fewest is None:
                return adjacent
            below = self._legal_near(fewest - 1, 0, fewest)
            if below is None or below in self.points:
                return True
            _ = self._at(below)
        return False

    def _legal_near(self, wanted: int, low: int, high: int) -> int | None:
        """Return the legal number of nodes between two others, without both, that is nearest to the wanted one."""
        for n in sorted(range(low + 1, high), key=lambda n: (abs(n - wanted), n)):
            if self._is_legal(n):
                return n
        return None

    def _is_legal(self, n: int) -> bool:
        if n not in self.legal:
            try:
                found = space_of(replace(self.request, cluster=self.request.cluster.with_(nodes=n))).candidates
            except PinError:
                found = ()
            self.legal[n] = bool(found)
        return self.legal[n]

    def _at(self, n: int) -> SizePoint:
        """Return the plan of a number of nodes, which is searched once."""
        if n not in self.points:
            self.told(n)
            cluster = self.request.cluster.with_(nodes=n)
            try:
                _ = cluster.levels
                point = point_of(replace(self.request, cluster=cluster), self.search)
            except PinError as error:
                point = Point({}, None, None, "illegal", str(error))
            run = None
            if point.planned is not None and point.request is not None:
                run = run_of(point.planned.estimate, point.request, self.run)
            self.points[n] = SizePoint(n, cluster.num_devices, point, run)
        if self.points[n].point.interrupted:
            raise KeyboardInterrupt
        return self.points[n]

    def _reason(self, points: Sequence[SizePoint]) -> str:
        """Return why no point meets the deadline and the budget."""
        timely = [p for p in points if p.days is not None and p.days <= self.deadline_days]
        if timely:
            costs = [p.usd for p in timely if p.usd is not None]
            if not costs:
                return "no price is known (--devices KIND@price=USD per device and hour)"
            return f"in time it costs at least ${min(costs):,.0f}"
        if any(p.run is not None and p.run.endless for p in points):
            return "failures may come faster than progress, so that no time can be said"
        known = [p for p in points if p.days is not None]
        if not known:
            return points[-1].point.reason if points else "no number of nodes was tried"
        best = min(known, key=lambda p: p.days or math.inf)
        return f"the fewest days found are {digits(best.days or 0)}, with {best.num_devices:,} devices"


def size_rows(found: Size) -> list[dict[str, object]]:
    """Return all points as flat rows: the curve of devices against days, money and MFU, for each kind."""
    out: list[dict[str, object]] = []
    for kind in found.kinds:
        for p in kind.points:
            estimate = None if p.point.planned is None else p.point.planned.estimate
            out.append(
                {
                    "kind": kind.name,
                    "nodes": p.nodes,
                    "num_devices": p.num_devices,
                    "status": p.point.status,
                    "days": p.days,
                    "usd": p.usd,
                    **_ends("days", p.whole_days),
                    **_ends("usd", p.whole_usd),
                    "mfu": None if estimate is None else estimate.mfu,
                    "step_time_s": None if estimate is None else estimate.step_time_s.mid,
                    "tokens_per_s": None if estimate is None else estimate.tokens_per_s,
                    "goodput": None if p.run is None or p.run.goodput is None else p.run.goodput.share.mid,
                    "in_time": p.days is not None and p.days <= found.deadline_days,
                    "meets": p.meets(found.deadline_days, found.budget_usd),
                    "meets_surely": p.meets_surely(found.deadline_days, found.budget_usd),
                    **how_searched(p.point.certificate),
                    "reason": p.point.reason,
                }
            )
    return out


def _ends(name: str, found: Quantity | None) -> dict[str, object]:
    """Return both ends of an interval as columns."""
    return {f"{name}_{end}": getattr(found, end, None) for end in ("low", "high")}
