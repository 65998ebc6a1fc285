"""A user's measured training steps, and the price of a planned step at other constants.

    - name: tp4                                 # optional; a YAML list of such steps
      model: llama-3.1-8b                       # as on the command line; so are the next three
      cluster: 1x8xh100-sxm5-80gb
      seq_len: 8k
      global_batch_size: 128                    # sequences
      step_time_s: 9.1                          # measured
      precision: bf16                           # optional from here on
      mode: fused
      options: {attention: fused, launch: graphs, overlap: [tp]}    # any of RunOptions, by its name
      degrees: {tp: 4, recompute: full}         # omitted ones: as in `autoplan estimate`
      group: tuesday                            # steps that err together count once; omitted: each by itself

Files that a file names are looked for beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autoplan.calibration.fit import MeasuredStep
from autoplan.catalog import load_model
from autoplan.config.choices import options_of, read_mode
from autoplan.config.keys import check_keys
from autoplan.config.numbers import is_finite, read_count
from autoplan.config.parallel import ParallelConfig
from autoplan.config.precision import precision_of
from autoplan.cost_models.constants import Constants
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.hardware.cluster_file import read_yaml
from autoplan.cost_models.profile import Profile
from autoplan.cost_models.time.blocks import op_times
from autoplan.cost_models.time.breakdown import estimated
from autoplan.cost_models.time.price import Pricer
from autoplan.cost_models.time.step_class import step_class
from autoplan.cost_models.work import Workload
from autoplan.errors import AutoplanError, PinError
from autoplan.report.degrees import checked_config
from autoplan.search.estimate import ends_apart, estimate_config, recompute_counts, units_of
from autoplan.search.request import PlanRequest, check_measured_on
from autoplan.sweeps.capacity import beside
from autoplan.sweeps.whatif import check_sweep

_NEEDED = ("model", "cluster", "seq_len", "global_batch_size", "step_time_s")
_OPTIONAL = ("name", "group", "precision", "mode", "options", "degrees")


@dataclass(frozen=True)
class PlannedStep:
    """A configuration with its layout, found once: everything that a price at other constants needs."""

    request: PlanRequest
    config: ParallelConfig
    workload: Workload

    @staticmethod
    def of(request: PlanRequest, config: ParallelConfig) -> PlannedStep:
        """Plan a step with the layout that is best at the request's constants. Raises what `estimate_config` raises."""
        found = estimate_config(request, config)
        return PlannedStep(request, found.config, found.point.workload)

    def step_s(self, constants: Constants) -> float:
        """Return the seconds of one step at `constants`. Layout, stages and recompute stay as they are."""
        pricer, chunks, recompute = self._at(constants)
        return pricer.step_s(chunks, recompute)

    def step_class(self, constants: Constants) -> str:
        """Return the class of the step at `constants`, with its family of devices (`class_of_step`)."""
        pricer, chunks, recompute = self._at(constants)
        found = estimated(pricer, chunks, recompute)
        return step_class(self.workload, pricer.device, found.breakdown, found.step_time_s.mid)

    def _at(self, constants: Constants) -> tuple[Pricer, tuple[int, ...], tuple[int, ...]]:
        """Return the pricer of the step at `constants`, its chunks, and the recomputed layers of each."""
        request = replace(self.request, constants=constants)
        costs, config = request.costs, self.config
        times = op_times(self.workload, costs)
        pricer = Pricer(self.workload, config, costs, precision_of(request.precision), times)
        chunks = units_of(config.stages or (), ends_apart(request.graph, config))
        return pricer, chunks, recompute_counts(pricer, config, chunks)


@dataclass(frozen=True)
class Measured:
    """A step of the file, planned and measured."""

    step: MeasuredStep
    planned: PlannedStep


def read_steps(path: str | Path, constants: Constants, profile: Profile | None = None) -> list[Measured]:
    """Return the steps of a file, with layouts found at `constants`.

    Raises:
        PinError: names the file, the step, the field and what would work.
    """
    where = f"steps file {path}"
    data = read_yaml(path, where)
    if not isinstance(data, list) or not data:
        raise PinError(f"{where} must be a list of at least one step, each with {', '.join(_NEEDED)}")
    folder = Path(path).parent
    models: dict[str, Any] = {}
    out: list[Measured] = []
    for i, item in enumerate(data):
        at = f"{where}: step {i + 1}"
        if not isinstance(item, Mapping):
            raise PinError(f"{at}: {item!r} must be a mapping with the keys {', '.join(_NEEDED)}")
        try:
            out.append(_measured(item, i, folder, models, constants, profile))
        except AutoplanError as error:
            raise PinError(f"{at}: {error}") from error
    names = [m.step.name for m in out]
    for name in names:
        if names.count(name) > 1:
            raise PinError(f"{where}: {names.count(name)} steps have the name {name!r}; give each its own")
    return out


def _measured(
    item: Mapping[Any, Any],
    index: int,
    folder: Path,
    models: dict[str, Any],
    constants: Constants,
    profile: Profile | None,
) -> Measured:
    check_keys(item, _NEEDED, _OPTIONAL)
    given = {key: value for key, value in item.items() if value is not None}
    seconds = given["step_time_s"]
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not is_finite(seconds) or seconds <= 0:
        raise PinError(f"step_time_s={seconds!r} must be a number of seconds above 0")
    seq_len, batch = _count("seq_len", given["seq_len"]), _count("global_batch_size", given["global_batch_size"])
    check_sweep(seq_len, batch)
    cluster = Cluster.parse(beside(_text("cluster", given["cluster"]), folder, (".yaml", ".yml")))
    check_measured_on(profile, cluster, f"the cluster {cluster}")
    mode = read_mode(given.get("mode", "eager"))
    precision = precision_of(str(given.get("precision", "bf16"))).name
    degrees = given.get("degrees", {})
    if not isinstance(degrees, Mapping):
        raise PinError(f"degrees={degrees!r} must be a mapping, for example {{tp: 4, pp: 2}}")
    options = options_of(given.get("options"))
    model = beside(_text("model", given["model"]), folder, (".json",))
    if model not in models:
        models[model] = load_model(model)
    request = PlanRequest(
        graph=models[model],
        cluster=cluster,
        seq_len=seq_len,
        global_batch_size=batch,
        precision=precision,
        mode=mode,
        options=options,
        constants=constants,
        profile=profile,
    )
    config = checked_config(request, degrees)
    name = str(given.get("name", f"step {index + 1}"))
    step = MeasuredStep(name, str(given.get("group", name)), float(seconds))
    return Measured(step, PlannedStep.of(request, config))


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise PinError(f"{name}={value!r} must be text, as on the command line")
    return value


def _count(name: str, value: object) -> Any:
    return read_count(value, name) if isinstance(value, str) else value


def functions(measured: Sequence[Measured]) -> list[Callable[[Constants], float]]:
    """Return the price of each step, for `fit.priced_by`."""
    return [m.planned.step_s for m in measured]
