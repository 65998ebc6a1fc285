"""A whole training run, from the time of one step: days, money, energy, and the cost of failures.

    run = whole_run(step_time_s, tokens_per_step, 15e12, cluster, state_bytes=5.6e12, busy=0.8)
    run.days, run.usd, run.kwh                                       # as if nothing ever failed
    run.goodput.share, run.days_with_failures, run.usd_with_failures

Figures that are not in model, plan or catalog are in FIGURES: a default with its source, always tagged assumed, and the
legal range of a value that replaces it (`Assumptions.of({"mtbf_device_days": 1500})`). Unknown results are None, with a
note.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from autoplan.config.keys import check_names
from autoplan.config.numbers import Range, scaled
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.quantity import Quantity, Tag
from autoplan.errors import PinError
from autoplan.units import GB

DAY_S = 86400.0
_MAX_EXPONENT = 50.0  # of Daly's model: beyond it a failure practically always comes before the next checkpoint


@dataclass(frozen=True)
class AssumptionRecord:
    """An assumption of a whole run: its meaning, default (None: not known), source and legal range."""

    what: str
    default: Quantity | None
    source: str
    legal: Range


def _assumed(low: float, mid: float, high: float) -> Quantity:
    return Quantity(low, mid, high, Tag.ASSUMED)


FIGURES: dict[str, AssumptionRecord] = {
    "mtbf_device_days": AssumptionRecord(
        "mean days until one device (with its share of host and network) stops the job",
        _assumed(567.0, 54 * 16384 / 419, 3419.0),
        "419 unexpected interruptions in 54 days on 16,384 H100 (Dubey et al., Llama 3, 2024, table 5); low: about 105 "
        "restarts in 2 months on 992 A100 (Zhang et al., OPT, 2022); high: 2.34 failures per 1,000 "
        "node-days of 8 A100 (Kokolis et al., 2025, cluster RSC-2)",
        Range(1e-3, 1e7, "days"),
    ),
    "restart_s": AssumptionRecord(
        "seconds from a failure until training goes on from the last checkpoint",
        _assumed(300.0, 600.0, 1800.0),
        "less than 10 minutes to detect and diagnose (Jiang et al., MegaScale, 2024); low and high are assumed: half, "
        "and 3 times as long",
        Range(0, 1e7, "s"),
    ),
    "storage_gb_s": AssumptionRecord(
        "GB/s at which the whole cluster writes a checkpoint; training waits for it",
        None,  # scales with the cluster: _STORAGE_PER_DEVICE
        "2 TB/s sustained and 7 TB/s peak for 16,384 devices (Dubey et al., Llama 3, 2024, section 3.3.1), in "
        "proportion to the devices; low is assumed: a quarter",
        Range(1e-6, 1e9, "GB/s"),
    ),
    "power_w": AssumptionRecord(
        "stated power of one device",
        None,  # the catalog's
        "data sheet of the device (hardware catalog)",
        Range(0, 1e6, "W"),
    ),
    "busy_share": AssumptionRecord(
        "share of a device's stated power that it draws while it computes",
        _assumed(0.7, 0.9, 1.0),
        "assumed; with host_share it gives the 7.8 kW (76 % of the rated 10.2 kW) of 8 x H100 that compute-bound "
        "training draws (Newkirk et al., 2025)",
        Range(0, 1),
    ),
    "waiting_share": AssumptionRecord(
        "share of a device's stated power that it draws while it waits for others or for data",
        _assumed(0.2, 0.4, 0.7),
        "assumed: between an idle device and a busy one",
        Range(0, 1),
    ),
    "host_share": AssumptionRecord(
        "power of host, network and fans per device, as a share of the device's stated power",
        _assumed(0.1, 0.48, 0.82),
        "low: 330 W per 300 W V100 in all (Patterson et al., 2021); high: 10.2 kW rated for 8 x 700 W (DGX "
        "H100 data sheet); middle: what the measured 7.8 kW leave (Newkirk et al., 2025)",
        Range(0, 100),
    ),
    "pue": AssumptionRecord(
        "power of the data centre per power of its computers",
        _assumed(1.09, 1.2, 1.56),
        "low: Google's fleet; middle: Jean Zay (Luccioni et al., BLOOM, 2023); high: mean of the industry (Uptime "
        "Institute survey, 2024)",
        Range(1, 10),
    ),
    "usd_per_kwh": AssumptionRecord(
        "price of electricity, if it is paid separately from the devices",
        None,
        "no default: it differs by site",
        Range(0, 1e3, "US dollars"),
    ),
}
# Dubey et al. 2024, section 3.3.1: see storage_gb_s.
_STORAGE_PER_DEVICE = _assumed(2e12 / 16384 / 4, 2e12 / 16384, 7e12 / 16384)


@dataclass(frozen=True)
class Assumptions:
    """Values of FIGURES by name; values in `given` replace the defaults."""

    given: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def of(given: Mapping[str, object] | None, where: str = "assume") -> Assumptions:
        """Check and return the given values; `where` starts every error message.

        Raises: PinError for a name that is not in FIGURES or a value out of its range.
        """
        values: dict[str, float] = {}
        check_names(given or {}, FIGURES, where, "name")
        for name, value in (given or {}).items():
            figure = FIGURES[name]
            values[name] = float(figure.legal.check(value, f"{where}: {name}"))
        return Assumptions(values)

    def get(self, name: str) -> Quantity | None:
        """Return the given value, without a spread, else the default; None if there is no default."""
        if name in self.given:
            value = self.given[name]
            return _assumed(value, value, value)
        return FIGURES[name].default

    def value(self, name: str) -> Quantity:
        """Return the given value or the default. Raises PinError if there is neither."""
        found = self.get(name)
        if found is None:
            raise PinError(f"{name} has no default: {FIGURES[name].what} must be given")
        return found


@dataclass(frozen=True)
class Goodput:
    """The effect of failures. `share` of the time is spent on steps that are kept.

    Attributes:
        mtbf_s: Mean seconds between failures of the whole job.
        checkpoint_s: Seconds to write a checkpoint.
        restart_s: Seconds from a failure until training continues.
        interval_s: Seconds of training between two checkpoints, the optimum by Daly (2006).
    """

    share: Quantity
    mtbf_s: Quantity
    checkpoint_s: Quantity
    restart_s: Quantity
    interval_s: Quantity


@dataclass(frozen=True)
class Run:
    """A whole training run: days, US dollars if the cluster has a price, kWh if the power is known.

    `days`, `usd` and `kwh` are without failures; the values with failures are None if `goodput` is.

    Attributes:
        usd_energy: Price of the kWh, if one is given; not part of `usd`.
        notes: The unknowns, with reasons.
        endless: True if failures may come faster than progress, so that time and money with them have no bound.
    """

    tokens: float
    days: Quantity
    usd: Quantity | None
    kwh: Quantity | None = None
    usd_energy: Quantity | None = None
    goodput: Goodput | None = None
    notes: tuple[str, ...] = ()
    endless: bool = False

    def _with_failures(self, ideal: Quantity | None) -> Quantity | None:
        if ideal is None or self.goodput is None:
            return None
        share = self.goodput.share
        tag = max(ideal.tag, share.tag)
        return Quantity(ideal.low / share.high, ideal.mid / share.mid, ideal.high / share.low, tag)

    @property
    def days_with_failures(self) -> Quantity | None:
        """Days until the tokens are trained on, including failures, restarts and checkpoints."""
        return self._with_failures(self.days)

    @property
    def usd_with_failures(self) -> Quantity | None:
        """US dollars of `days_with_failures`."""
        return self._with_failures(self.usd)

    @property
    def kwh_with_failures(self) -> Quantity | None:
        """kWh of `days_with_failures`: lost time draws as much power as training."""
        return self._with_failures(self.kwh)

    @property
    def num_failures(self) -> float | None:
        """The expected number of failures."""
        days = self.days_with_failures
        return None if days is None or self.goodput is None else days.mid * DAY_S / self.goodput.mtbf_s.mid


def whole_run(
    step_time_s: Quantity,
    tokens_per_step: float,
    tokens: float,
    cluster: Cluster,
    *,
    state_bytes: float | None = None,
    busy: float = 1.0,
    assumptions: Assumptions | None = None,
) -> Run:
    """Return the time, money and energy to train on `tokens` tokens at a constant step time.

    Args:
        state_bytes: Bytes of a checkpoint, all ranks together; None: not known, and so the goodput is not known.
        busy: Share of a step in which devices compute; in the rest they wait.
    """
    known = assumptions if assumptions is not None else Assumptions()
    days = step_time_s * (tokens / tokens_per_step / DAY_S)
    usd = None
    if cluster.price is not None:
        usd = days * (24 * cluster.paid_devices * cluster.price.usd_per_device_hour)
    notes: list[str] = []
    if tokens < tokens_per_step:
        notes.append(f"{scaled(tokens)} tokens are less than one step, which has {scaled(tokens_per_step)} tokens")
    if cluster.idle_nodes:
        notes.append(f"money is of all {cluster.paid_devices:,} devices, energy of the {cluster.num_devices:,} in use")
    watts = device_watts(cluster, busy, known)
    kwh = usd_energy = None
    if watts is None:
        notes.append(
            f"energy is not known: no source states the power of {cluster.device.name}; give power_w, in W per device"
        )
    else:
        if "power_w" in cluster.unverified and "power_w" not in known.given:
            notes.append(f"no source confirms the power of {cluster.device.name} in the catalog, and so its energy")
        kwh = times(days, watts * (24 * cluster.num_devices / 1000))
        price = known.get("usd_per_kwh")
        usd_energy = None if price is None else times(kwh, price)
    found = goodput_of(cluster, state_bytes, known)
    if found is None:
        notes.append(_unknown_goodput(cluster, state_bytes))
    endless = found is not None and found.share.low <= 0
    if found is not None and endless:
        notes.append(
            f"failures may come faster than progress: the job fails every {found.mtbf_s.low:.0f} to "
            f"{found.mtbf_s.high:.0f} s, a restart takes {found.restart_s.low:.0f} to {found.restart_s.high:.0f} s; "
            "time and money with failures have no bound"
        )
        found = None
    return Run(tokens, days, usd, kwh, usd_energy, found, tuple(notes), endless)


def _unknown_goodput(cluster: Cluster, state_bytes: float | None) -> str:
    if state_bytes is None:
        return "goodput is not known: the size of a checkpoint is not known"
    return (
        f"goodput is not known: the published failures are those of accelerators, not of {cluster.device.name}; give "
        "mtbf_device_days"
    )


def times(a: Quantity, b: Quantity) -> Quantity:
    """Return the product of two quantities that are not below 0: low times low, high times high."""
    return Quantity(a.low * b.low, a.mid * b.mid, a.high * b.high, max(a.tag, b.tag))


def device_watts(cluster: Cluster, busy: float, assumptions: Assumptions) -> Quantity | None:
    """Return the average power of one device, with its share of host, network and cooling; None if it is not known.

    Args:
        busy: Share of the time in which it computes.
    """
    stated = assumptions.given.get("power_w", cluster.device.power_w)
    if stated is None:
        return None
    drawn = assumptions.value("busy_share") * busy + assumptions.value("waiting_share") * (1.0 - busy)
    return times(drawn + assumptions.value("host_share"), assumptions.value("pue")) * stated


def daly_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Return the seconds of training between checkpoints that lose the least time.

    Source: Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, 2006, equation 37; to
    first order Young's sqrt(2 checkpoint mtbf).
    """
    if checkpoint_s >= 2 * mtbf_s:
        return mtbf_s
    x = checkpoint_s / (2 * mtbf_s)
    return math.sqrt(2 * checkpoint_s * mtbf_s) * (1 + math.sqrt(x) / 3 + x / 9) - checkpoint_s


def useful_share(interval_s: float, checkpoint_s: float, restart_s: float, mtbf_s: float) -> float:
    """Return the share of the time that is kept when failures are random, also during checkpoints and restarts.

    Source: Daly 2006, equation 20. 0 if failures practically always come before the next checkpoint.
    """
    if restart_s / mtbf_s + (interval_s + checkpoint_s) / mtbf_s > _MAX_EXPONENT:
        return 0.0
    lost = math.exp(restart_s / mtbf_s) * math.expm1((interval_s + checkpoint_s) / mtbf_s)
    return interval_s / (mtbf_s * lost)


def goodput_of(cluster: Cluster, state_bytes: float | None, assumptions: Assumptions) -> Goodput | None:
    """Return the share of useful time at the best checkpoint interval; None if the state or failure rate is not known.

    The low end combines frequent failures, slow storage and slow restarts; the high end the opposite.
    """
    if state_bytes is None or (cluster.device_type == "cpu" and "mtbf_device_days" not in assumptions.given):
        return None
    num = cluster.num_devices
    mtbf = assumptions.value("mtbf_device_days") * (DAY_S / num)
    speed = assumptions.get("storage_gb_s")
    bytes_per_s = _STORAGE_PER_DEVICE * num if speed is None else speed * GB
    checkpoint = Quantity(
        state_bytes / bytes_per_s.high, state_bytes / bytes_per_s.mid, state_bytes / bytes_per_s.low, bytes_per_s.tag
    )
    restart = assumptions.value("restart_s")

    def share(checkpoint_s: float, restart_s: float, mtbf_s: float) -> float:
        return useful_share(daly_interval_s(checkpoint_s, mtbf_s), checkpoint_s, restart_s, mtbf_s)

    shares = Quantity(
        share(checkpoint.high, restart.high, mtbf.low),
        share(checkpoint.mid, restart.mid, mtbf.mid),
        share(checkpoint.low, restart.low, mtbf.high),
        Tag.ASSUMED,
    )
    ends = [daly_interval_s(c, m) for c in (checkpoint.low, checkpoint.high) for m in (mtbf.low, mtbf.high)]
    interval = Quantity(min(ends), daly_interval_s(checkpoint.mid, mtbf.mid), max(ends), Tag.ASSUMED)
    return Goodput(shares, mtbf, checkpoint, restart, interval)


# Kaplan et al., Scaling laws for neural language models, 2020: equations 1.5 (loss of N parameters after D tokens) and
# 1.4 (critical batch at a loss), constants of 1.1, 1.2 and 1.4. Fitted to dense models of up to 1.5 B parameters.
_N_C, _ALPHA_N = 8.8e13, 0.076
_D_C, _ALPHA_D = 5.4e13, 0.095
_B_STAR, _ALPHA_B = 2e8, 0.21
CRITICAL_BATCH_SOURCE = "Kaplan et al. 2020, eq. 1.4 and 1.5"


def critical_batch_tokens(num_params: float, tokens: float) -> float:
    """Return the critical batch, in tokens per step: beyond it, larger batches save few steps.

    At it, training takes twice the least steps and twice the least tokens (McCandlish et al., 2018). It is computed at
    the last loss of the run, where it is largest. Only the order of magnitude counts: it is extrapolated far beyond the
    models that the law was fitted to, and later work (Zhang et al., 2024) finds that it depends on the tokens alone.
    """
    loss = ((_N_C / num_params) ** (_ALPHA_N / _ALPHA_D) + _D_C / tokens) ** _ALPHA_D
    return float(_B_STAR / loss ** (1 / _ALPHA_B))
