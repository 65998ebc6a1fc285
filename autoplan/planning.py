"""Planning in code: `autoplan.plan` and `autoplan.compile`. No process group, and a cluster that need not be here.

plan = autoplan.plan(model, "64x8xh100-sxm5-80gb", example_inputs=batch, global_batch_size=1024)
Path("plan.json").write_text(plan.to_json())       # the command line reads it, and parallelize(model, plan=...)
autoplan.compile(model, plan, "program", example_inputs=batch)     # the program of every rank, in a folder
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from autoplan.captured import captured, model_facts
from autoplan.codegen.program import Layouts, Program, compile_program
from autoplan.config.adapters import read_adapters
from autoplan.config.choices import option_data
from autoplan.config.kernels import ASYNC_TP, AUTO, COMPILE
from autoplan.config.keys import check_count, check_kind
from autoplan.config.numbers import without_numpy
from autoplan.config.parallel import Mode, RunOptions
from autoplan.config.pins import Pins
from autoplan.config.planning import SearchWords, check_search_words, tolerances_of
from autoplan.config.precision import precision_of
from autoplan.config.settings import check_setting
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.profile import Profile
from autoplan.errors import AutoplanError, CaptureError, PinError
from autoplan.ir.graph import ModelGraph
from autoplan.plans.differences import differences_text, graph_differences
from autoplan.plans.document import graph_of_text, plain
from autoplan.plans.folder import buffer_texts, write_program
from autoplan.plans.layouts import check_executed, layouts_of, solved_again
from autoplan.plans.record import Plan, searched_plan
from autoplan.program.adapters import with_adapters
from autoplan.program.autocast import of_precision
from autoplan.program.facts import Facts
from autoplan.program.legality import check_pins
from autoplan.runtime.spec import ProgramSpec
from autoplan.runtime.timeouts import timeout_of
from autoplan.search.layout_store import LayoutStore
from autoplan.search.planner import PlanRequest, search_plan
from autoplan.units import DEVICE_TYPES

if TYPE_CHECKING:
    import torch
    from torch import nn

    from autoplan.capture.frontend.inputs import LossFn

_T = TypeVar("_T")


def plan(
    model: nn.Module | Path | str,
    cluster: Cluster | Path | str,
    *,
    example_inputs: Mapping[str, torch.Tensor] | None = None,
    loss_fn: LossFn | None = None,
    seq_len: int | None = None,
    target_len: int | None = None,
    global_batch_size: int | None = None,
    pins: Mapping[str, Any] | None = None,
    profile: Profile | Path | str | None = None,
    precision: str = "native",
    compile: bool | str = COMPILE,
    async_tp: bool | str = ASYNC_TP,
    verify: bool | str = True,
    top: int = 1,
    **search: Unpack[SearchWords],
) -> Plan:
    """Plan how to train `model` on `cluster`, which need not be this machine. Needs no processes and no devices.

    `parallelize(model, plan=...)` runs the plan on that cluster, `compile` writes its program beforehand, and the
    command line reads `plan.to_json()` in place of a model.

    Args:
        model: an ordinary module, or a text as the command line takes it (a name of the catalog, a Hugging Face
            config.json, `package.module:factory`), for which seq_len and global_batch_size are needed.
        cluster: a Cluster, or its text: nodes x devices per node x device (`8x8xh100-sxm5-80gb`), `local:4`, a file.
        example_inputs, loss_fn, pins, precision, verify: as `parallelize` takes them.
        seq_len, target_len: tokens per sequence; None: those of the example.
        global_batch_size: samples per step over all data-parallel ranks; None: as in `parallelize`.
        profile: measured times: a Profile, or the name or path of one. None: the figures of the cluster.
        compile: True: blocks run through torch.compile; False: no; 'auto': on CUDA, if that has the lower price.
        async_tp: as `parallelize` takes it.
        top: how many plans are searched; the others are in the text of the plan (`alternatives`) and its figures.
        **search: settings of the search: time_limit_s, memory_risk, equal_within, gap, cache
            (`autoplan.config.planning.SearchSettings`).

    Returns:
        The plan, one that autoplan's own runtime executes.

    Raises:
        AutoplanError: PinError, CaptureError, NothingFits and others.

    Example:
        >>> import autoplan
        >>> plan = autoplan.plan("gpt2", "2xh100", seq_len=1024, global_batch_size=16, pins={"pp": 1})
        >>> plan.config.dp * plan.config.tp, plan.num_devices
        (2, 2)
    """
    check_search_words(search, "plan")
    seq_len, target_len, top = without_numpy((seq_len, target_len, top))
    where = Cluster.of(cluster)
    check_count("top", top)
    facts = Facts(where.num_devices, device_type=where.device_type, async_tp=async_tp, compile=compile)
    check_pins(Pins(pins or {}), facts)
    known = Profile.of(profile)
    task = captured(model, example_inputs, loss_fn, precision, verify)
    if seq_len is None and task.seq_len is None:
        raise PinError("seq_len is needed for a model that is given by name")
    if global_batch_size is None and not task.batch:
        raise PinError("global_batch_size is needed for a model that is given by name")
    pins = dict(pins or {})
    for name, length in (("seq_len", seq_len), ("target_len", target_len)):
        if length is not None:
            check_setting(name, length)
    batch = global_batch(global_batch_size, pins, where.num_devices, task.batch)

    def made(compiled: bool, in_pieces: bool, so_far: SoFar) -> tuple[Plan, Layouts]:
        request = PlanRequest(
            task.graph,
            where,
            seq_len or task.seq_len or 1,
            batch,
            pins,
            precision=precision,
            profile=known,
            profile_file=str(profile) if isinstance(profile, Path | str) else None,
            mode=Mode.COMPILED if compiled else Mode.EAGER,
            options=options_of_way(in_pieces),
            executed=True,
            target_len=target_len or task.target_len,
            top=top,
            **(so_far if top == 1 else replace(so_far, step_s=math.inf)).asked(in_pieces),  # other plans may be slower
            **search,
        )
        return planned(request, task.name, None if isinstance(cluster, Cluster) else str(cluster))

    compile = True if async_tp is True else compile
    cuda = where.device_type == "cuda"
    best = cheapest_program(made, ways_to_run(compile, async_tp, where.device_type, cuda, where.peers))
    return replace(best[0], capture=task.verified)


def compile(
    model: nn.Module | Path | str,
    plan: Plan | Path | str,
    out: Path | str,
    *,
    example_inputs: Mapping[str, torch.Tensor] | None = None,
    loss_fn: LossFn | None = None,
    verify: bool | str = True,
) -> Program:
    """Write the program of every rank of a plan into the folder `out`, on any machine.

    `parallelize(model, program=out)` runs it on the plan's cluster without a capture or a search. The folder holds one
    Python module per pipeline stage, `program.json`, `plan.json`, and `fingerprint.json`, by which the model is
    recognised (autoplan.plans.folder).

    Args:
        model: the module, or its text as `autoplan.plan` takes it.
        plan: a Plan, or the file of one.
        example_inputs, loss_fn, verify: as `parallelize` takes them.

    Returns: the program.
    Raises:
        AutoplanError: the model is not the one that the plan was made for (names what differs), or autoplan's runtime
            does not execute the plan.

    Example:
        >>> import torch, autoplan
        >>> model, batch = torch.nn.Linear(8, 8), {"input": torch.ones(4, 8)}
        >>> def loss_fn(output, batch):
        ...     return output.square().mean()
        >>> plan = autoplan.plan(model, "local:2", example_inputs=batch, loss_fn=loss_fn, global_batch_size=8)
        >>> program = autoplan.compile(model, plan, "program", example_inputs=batch, loss_fn=loss_fn)
    """
    check_kind("plan", plan, Plan | str | PathLike, "an autoplan.Plan, or the path of its file")
    check_kind("out", out, str | PathLike, "the path of a folder")
    given = plan if isinstance(plan, Plan) else Plan.read(plan)
    task = captured(model, example_inputs, loss_fn, given.precision, verify)
    graph = graph_for_plan(given, task.graph)
    ready, layouts = ready_plan(given, graph)
    ready = replace(ready, capture=task.verified or ready.capture)
    program = compile_program(graph, layouts)
    write_program(Path(out), ready, program, buffer_texts(graph), model_facts(model, loss_fn))
    return program


def compile_command(model: str, plan: Path, out: Path) -> ProgramSpec:
    """Run `autoplan compile`: as `compile`, with modules of the current folder."""
    from autoplan.report.request import import_from_here

    import_from_here()
    return compile(model, plan, out).spec


def check_kinds(
    plan: object, paths: Mapping[str, object], param_groups: object, check: object, timeout_s: float | None
) -> None:
    """Raise PinError for arguments of `parallelize` of another type. `paths`: those that are paths, by name."""
    for name, value in paths.items():
        check_kind(name, value, str | PathLike | None, "the path of a folder")
    check_kind("plan", plan, Plan | str | PathLike | None, "an autoplan.Plan, or the path of its file")
    check_kind("check", check, bool, "True or False")
    if param_groups is not None and not callable(param_groups):
        check_kind("param_groups", param_groups, Mapping, "{pattern: settings}, or a function of name and shape")
    try:
        timeout_of(timeout_s)
    except ValueError as exc:
        raise PinError(str(exc)) from None


# -- search ------------------------------------------------------------------------------------------------------------


def planned(request: PlanRequest, name: str | None = None, cluster: str | None = None) -> tuple[Plan, Layouts]:
    """Search. Return the plan with its text's sections, and its layouts.

    Args:
        name, cluster: the texts that name the model and the cluster on the command line, if there are any.
    """
    from autoplan.report.data import Unnamed, evidence_of, plan_report

    found = search_plan(request)
    request, best = found.request, found.plans[0]
    evidence = evidence_of(request)
    plan, layouts = searched_plan(request.graph, best, found.certificate, evidence, request.precision)
    asked = asked_of(request, name, cluster)
    document = plan_report(request, found, asked=asked, unnamed=Unnamed() if name is None else None)
    kept = {n: v for n, v in document.items() if n not in ("plan", "program", "certificate")}
    return replace(plan, compiled=request.mode is Mode.COMPILED, document=kept), layouts


def asked_of(request: PlanRequest, name: str | None, cluster: str | None) -> dict[str, Any]:
    """Return the arguments of the command that asks the same, as a plan file keeps them.

    A cluster that no text describes is left out: the command line then asks for one.
    """
    usual = option_data(RunOptions())
    given = {
        "model": name or request.graph.name,
        "cluster": cluster or cluster_text(request.cluster),
        "seq_len": str(request.seq_len),
        "global_batch_size": str(request.global_batch_size),
        "target_len": None if request.target_len is None else str(request.target_len),
        "precision": request.precision,
        "mode": str(request.mode),
        "profile": request.profile_file,
        "constants": request.constants_file,
        "pin": plain(dict(request.pins)) or None,
        **tolerances_of(request),
        "runnable": request.executed or None,
        **{n: v for n, v in option_data(request.options).items() if v != usual[n]},
    }
    return {n: value for n, value in given.items() if value is not None}


def cluster_text(cluster: Cluster) -> str | None:
    """Return a text that `Cluster.parse` reads as exactly this cluster; None if there is none."""
    given = ",".join(f"{name}={value!r}" for name, value in cluster.given)
    count = f"{cluster.num_nodes}x{cluster.devices_per_node}x{cluster.device.name}"
    for base in (f"local:{cluster.num_devices}", count):
        text = f"{base}@{given}" if given else base
        try:
            if Cluster.parse(text) == cluster:
                return text
        except PinError:  # not a text of this cluster
            continue
    return None


def plan_program(
    graph: ModelGraph,
    cluster: Cluster,
    pins: Mapping[str, Any],
    global_batch_size: int,
    seq_len: int,
    profile: Profile | None = None,
    compiled: bool = False,
    target_len: int | None = None,
    precision: str = "native",
    async_tp: bool = False,
    so_far: SoFar | None = None,
) -> tuple[Plan, Program]:
    """Search and compile in this process: everything after the capture of the graph. Needs no process group.

    Args:
        compiled: True if blocks will run through torch.compile.
        precision: the precision that the graph was captured for.
        async_tp: True if compiled blocks will hide collectives of tensor parallelism behind pieces of products.
        so_far: what is known of other ways to run the blocks.

    Raises: as `search_plan`; NotFasterError if no step is shorter than the best so far.
    """
    request = PlanRequest(
        graph,
        cluster,
        seq_len,
        global_batch_size,
        pins,
        precision=precision,
        profile=profile,
        mode=Mode.COMPILED if compiled else Mode.EAGER,
        options=options_of_way(async_tp),
        executed=True,
        target_len=target_len,
        **(so_far or SoFar()).asked(async_tp),
    )
    plan, chosen = planned(request)
    return plan, compile_program(request.graph, chosen)  # with the casts of its precision


_Way = tuple[bool, bool]  # how blocks run: compiled, and with async TP


def ways_to_run(
    compile: bool | str, async_tp: bool | str, device_type: str, compiles: bool, devices: int
) -> list[_Way]:
    """Return how blocks may run, as pairs (compiled, async TP): one, or several where the price decides.

    Args:
        compile, async_tp: as `parallelize` takes them.
        compiles: True if blocks may be compiled by default.
        devices: devices that read each other's memory; with one there is nothing to hide.
    """
    modes: tuple[bool, ...] = (bool(compile),)
    if compile == AUTO:
        modes = (False, True) if compiles else (False,)
    pieces: tuple[bool, ...] = (async_tp is True,)
    if async_tp == AUTO and device_type == "cuda" and devices > 1 and compile in (True, AUTO, "inductor"):
        pieces = (False, True)
    return [(compiled, split) for compiled in modes for split in pieces if compiled or not split]


def options_of_way(async_tp: bool) -> RunOptions:
    """Return the options of a run: with async TP, collectives of tensor parallelism overlap with computing."""
    return RunOptions(overlap=frozenset({"tp"} if async_tp else ()))


@dataclass(frozen=True)
class SoFar:
    """What the searches for all ways to run the blocks know of each other.

    Attributes:
        step_s: the shortest step so far; infinite for the first search.
        layouts: what they share.
    """

    step_s: float = math.inf
    layouts: LayoutStore = field(default_factory=LayoutStore)

    def asked(self, async_tp: bool) -> dict[str, Any]:
        """Return the arguments of a request for faster plans.

        Without tensor parallelism there is nothing that async TP hides: such plans take as long as they do without.
        """
        least_tp = 2 if async_tp and self.step_s < math.inf else 1
        return {"below_s": self.step_s, "least_tp": least_tp, "layouts": self.layouts}


def cheapest_program(made: Callable[[bool, bool, SoFar], tuple[Plan, _T]], ways: Sequence[_Way]) -> tuple[Plan, _T]:
    """Return the program with the lowest price of a step, of `made(compiled, async_tp, so_far)` for all `ways`.

    Only programs with a shorter step than the best one so far matter.
    Ways that cannot be planned are left out: pins such as regions of recompute do not allow compiled blocks, and some
    models fit only with them. If none can be planned, the error of the first is raised.
    """
    refused: AutoplanError | None = None
    best: tuple[Plan, _T] | None = None
    so_far = SoFar()
    for way in ways:
        try:
            found = made(*way, so_far)
        except AutoplanError as exc:
            refused = refused or exc
            continue
        step_s = math.inf if found[0].estimate is None else found[0].estimate.step_time_s.mid
        if best is None or step_s < so_far.step_s:
            best, so_far = found, replace(so_far, step_s=step_s)
    if best is None:
        raise refused or AutoplanError("nothing was planned")
    return best


def global_batch(given: int | None, pins: Mapping[str, Any], world: int, example_batch: int) -> int:
    """Return the global batch: the given one, or the number of examples times the devices that may be data-parallel
    ranks. Raises PinError for a given one that is illegal."""
    if given is not None:
        batch: int = without_numpy(given)
        check_setting("global_batch_size", batch)
        return batch
    ranks = pins.get("dp") or max(1, world // (pins.get("tp", 1) * pins.get("pp", 1) * pins.get("cp", 1)))
    parts = pins.get("num_micro_batches", 1) * pins.get("micro_batch_size", 1)
    return int(ranks * max(1, example_batch // parts) * parts)


# -- plans that are given ----------------------------------------------------------------------------------------------


def graph_for_plan(plan: Plan, graph: ModelGraph) -> ModelGraph:
    """Return a captured graph as it runs in the precision of a plan: with the casts of autocast if it has them.

    They differ by the type of device; those of the plan's graph count.
    """
    found = [of_precision(graph, precision_of(plan.precision), kind) for kind in DEVICE_TYPES]
    return next((made for made in found if made.content_hash == plan.graph_hash), found[-1])


def ready_plan(plan: Plan, graph: ModelGraph) -> tuple[Plan, Layouts]:
    """Return a plan that was written down with its layouts for `graph`, after a check that it was made for it.

    Raises:
        CaptureError: the graph is another one; names the first blocks, parameters or sizes that differ.
        InfeasibleError: parts of the plan have a price only.
        LayoutError, PinError: the plan does not fit the graph, or its layouts are open and cannot be solved again.
    """
    _check_graph(plan, graph)
    check_executed(plan)
    if plan.layout:
        return plan, layouts_of(plan, graph)
    from autoplan.report.plan_file import PlanFile
    from autoplan.report.written import written_of

    request = PlanFile(written_of(plan.to_data(), Path("the plan"))).request
    return solved_again(plan, replace(request, graph=graph))


def _check_graph(plan: Plan, graph: ModelGraph) -> None:
    if graph.content_hash == plan.graph_hash:
        return
    then = graph_of_plan(plan)
    found = ["no graph of the plan's model is at hand to say what"] if then is None else graph_differences(then, graph)
    if found:
        raise CaptureError(
            f"the plan was made for another model than {graph.name}: {differences_text(found)}; plan this model (with "
            "pins=plan.pins for the same degrees)"
        )


def graph_of_plan(plan: Plan) -> ModelGraph | None:
    """Return the graph that a plan was made for; None if its model cannot be found here under its name."""
    from autoplan.catalog import load_model

    asked = plan.document.get("asked", {})
    text, name, adapters = plan.document.get("graph"), asked.get("model"), asked.get("adapters")
    if text is not None:
        return graph_of_text(text, plan.graph_hash, f"the plan of {plan.model}")
    if name is None:
        return None
    try:
        graph = load_model(name)
        graph = graph if adapters is None else with_adapters(graph, read_adapters(adapters))
        graph = graph_for_plan(plan, graph)
    except (CaptureError, AutoplanError):
        return None
    return graph if graph.content_hash == plan.graph_hash else None


def check_world(plan: Plan, world: int) -> None:
    """Raise PinError for a plan of another number of processes."""
    if plan.num_devices != world:
        degrees = " ".join(f"{name}={size}" for name, size in plan.axes if size > 1) or "one device"
        raise PinError(
            f"the plan is for {plan.num_devices} devices ({degrees}), and this job has {world} processes; start "
            f"{plan.num_devices} processes, or plan for {world} devices: autoplan.plan(model, cluster, "
            "pins=...) or `autoplan plan` makes a plan, autoplan.compile or `autoplan compile` its program"
        )


def check_as_planned(plan: Plan, size: int | None, precision: str, compile: bool | str) -> None:
    """Raise PinError for arguments of `parallelize` that a given plan decides otherwise. `size`: of the batch."""
    if size is not None and size != plan.global_batch_size:
        raise PinError(f"global_batch_size={size}, but the plan is for {plan.global_batch_size}; leave it out")
    if precision not in ("native", plan.precision):
        raise PinError(f"precision={precision!r}, but the plan is for {plan.precision!r}; leave it out")
    if compile != AUTO and bool(compile) != plan.compiled:
        how = "with compiled blocks" if plan.compiled else "without compiled blocks"
        raise PinError(f"compile={compile!r}, but the plan was made {how}; leave it out")
