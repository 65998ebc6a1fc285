"""Experts over the sub-axes of dp, cp and tp: which degrees fold, the ranks they make, what is priced and checked."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from typing import Any

import models
import parity
import pytest
import spmd_types
import torch
from harness import pool
from parity import Case, Trained, assert_trains_as_one_device, compiled, trained, worst

from autoplan.capture.export import capture
from autoplan.codegen.check import check_program
from autoplan.codegen.program import Program, compile_program
from autoplan.config.mesh import ParallelDims, folds
from autoplan.config.parallel import ParallelConfig
from autoplan.cost_models.costs import Costs
from autoplan.cost_models.hardware.cluster import Cluster, Device, Level
from autoplan.cost_models.network.groups import mesh_groups
from autoplan.errors import InfeasibleError, LayoutError, PinError
from autoplan.ir.graph import Block, ModelGraph, Node, Value
from autoplan.ir.layout import Axis, Mesh
from autoplan.ir.symbols import Expr
from autoplan.plans.record import searched_plan
from autoplan.program.expert_degrees import ExpertDegrees
from autoplan.program.op_costs import OpCosts
from autoplan.program.parallel_dims import parallel_dims
from autoplan.program.problem import IntraSettings, build_problem
from autoplan.program.token_dispatch import travelled_bytes
from autoplan.program.token_dispatch_layouts import with_token_dispatch
from autoplan.runtime.experts import experts
from autoplan.runtime.spec import evaluate_terms
from autoplan.search.planner import search_plan
from autoplan.search.request import PlanRequest
from experiments.shared.default_plans import make_plan, read_pins

SEQ = 16


@lru_cache(maxsize=2)
def graph(kind: str = "mixtral") -> ModelGraph:
    make = {"mixtral": models.make_mixtral, "llama": models.make_llama}[kind]
    return capture(make(), models.token_batch(2, SEQ))


def cluster(devices: int) -> Cluster:
    return Cluster(1, devices, Device("made up", 1e12, 1e9, 1 << 30, "made up"), Level(1e-6, 1e9, "made up"), "cpu")


def index_on(mesh: Mesh, name: str, rank: int) -> int:
    """Index of a rank along an axis or group, as the runtime counts: sub-axes major to minor."""
    index = 0
    for atom in mesh.atoms(name):
        at = [a.name for a in mesh.axes].index(atom)
        stride = math.prod(a.size for a in mesh.axes[at + 1 :])
        index = index * mesh.axes[at].size + rank // stride % mesh.axes[at].size
    return index


DEGREES = [
    (dp, cp, tp, ep, etp)
    for dp, cp, tp, ep, etp in itertools.product((1, 2, 4), (1, 2), (1, 2, 4, 6), (1, 2, 3, 4, 8), (1, 2, 4))
    if folds(dp, cp, tp, ep, etp) and ParallelConfig(dp=dp, cp=cp, tp=tp, ep=ep, etp=etp).spreads_experts
]


@pytest.mark.parametrize("split", [False, True])
def test_folded_ranks_are_those_that_are_priced(split: bool) -> None:
    """Size and stride of every group, also where layouts have two sub-axes of tp (few key-value heads)."""
    checked = 0
    for dp, cp, tp, ep, etp in DEGREES:
        tensor = (Axis("tp0", 2), Axis("tp1", tp // 2)) if split and tp % 4 == 0 else (Axis("tp", tp),)
        c = ParallelConfig(pp=2, dp=dp, cp=cp, tp=tp, ep=ep, etp=etp)
        mesh, priced = ParallelDims(c, tensor, True).mesh, mesh_groups(c, [("tp", tp)])
        ranks = c.num_devices
        assert mesh.num_devices == ranks
        names = {n: n for n in ("pp", "dp", "tp", "ep")} | {"edp": "expert_replicas"}
        names |= {"cp": "cp"} if cp > 1 else {}
        names |= {"etp": "etp"} if etp > 1 else {}
        for name, known in names.items():
            size, stride = priced[known].size, priced[known].stride
            assert mesh.size(name) == size, (c, name)
            assert [index_on(mesh, name, r) for r in range(ranks)] == [r // stride % size for r in range(ranks)]
        places = {a.name: i for i, a in enumerate(mesh.axes)}
        for members in mesh.groups.values():  # torch sorts the ranks of a group
            assert [places[m] for m in members] == sorted(places[m] for m in members)
        checked += 1
    assert checked > 50


@pytest.mark.parametrize(
    ("degrees", "legal"),
    [((4, 1, 2, 4, 1), True), ((4, 1, 2, 8, 2), False), ((1, 1, 6, 4, 1), False), ((2, 3, 1, 2, 1), False)],
)
def test_what_does_not_fold(degrees: tuple[int, int, int, int, int], legal: bool) -> None:
    """2 x 3 ranks of dp and cp have no sub-axis of 2 neighbours."""
    assert folds(*degrees) is legal


def test_products_of_methods_leave_fewer_sub_axes() -> None:
    """4 ranks of experts among 6 of cp: 2 x 2 of groups and neighbours of cp=12, but not of 4 x 3."""
    assert folds(1, 12, 1, 4, 1, 1) and folds(1, 12, 1, 4, 1, 2) and not folds(1, 12, 1, 4, 1, 3)
    config = ParallelConfig(cp=12, ep=4, context_method="ulysses3xring4")
    dims = parallel_dims(graph(), config)
    with pytest.raises(PinError, match=r"ep=4 does not fold into dp x cp x tp with cp=12 as groups of 3"):
        _ = dims.mesh


def test_names_of_sub_axes() -> None:
    mesh = ParallelDims(ParallelConfig(dp=4, tp=2, ep=4, etp=1), (Axis("tp", 2),), True).mesh
    assert [(a.name, a.size) for a in mesh.axes if a.size > 1] == [("edp", 2), ("dp1", 2), ("tp", 2)]
    assert dict(mesh.groups) == {"dp": ("edp", "dp1"), "ep": ("dp1", "tp")}
    assert (mesh.canonical("ep"), mesh.canonical("tp")) == ("ep", "tp")
    within = ParallelDims(ParallelConfig(dp=4, tp=1, ep=2), (Axis("tp", 1),), True).mesh
    assert [(a.name, a.size) for a in within.axes if a.size > 1] == [("edp", 2), ("ep", 2)]
    over = ParallelDims(ParallelConfig(dp=1, cp=2, ep=2), (Axis("tp", 1),), True).mesh
    assert over.canonical("ep") == "cp"
    product = ParallelDims(ParallelConfig(cp=8, ep=4, context_method="ulysses2xring4"), (), True).mesh
    assert [(a.name, a.size) for a in product.axes if a.size > 1] == [("cpr0", 2), ("cpr1", 2), ("cpu", 2)]
    wanted = {"cpr": ("cpr0", "cpr1"), "cp": ("cpr0", "cpr1", "cpu"), "ep": ("cpr1", "cpu")}
    assert {name: product.groups[name] for name in wanted} == wanted
    plain = parallel_dims(graph(), ParallelConfig(dp=2, tp=2)).mesh
    assert "ep" not in plain.groups and all(a.name != "ep" for a in plain.axes)


@pytest.mark.parametrize(
    ("pins", "devices", "why"),
    [
        ({"tp": 4, "ep": 2, "etp": 2}, 8, r"pin etp=2: .* over all of tp=4; .* etp=1 or 4, or tp=2 with dp=4$"),
        ({"tp": 2, "ep": 4}, 4, r"pin ep=4 x etp=2 does not divide dp x cp x tp = 4, .* ep=2, or etp=1$"),
        ({"ep": 8}, 8, r"pin ep=8 does not divide the 4 experts; nearest legal: ep=4$"),
    ],
)
def test_degrees_that_cannot_run_say_why(pins: dict[str, int], devices: int, why: str) -> None:
    with pytest.raises(PinError, match=why):
        make_plan(graph(), cluster(devices), read_pins(pins, devices), {"b": 2, "s": SEQ})
    with pytest.raises(PinError, match=r"pin ep=2: .* has no experts; nearest legal: ep=1$"):
        make_plan(graph("llama"), cluster(2), read_pins({"ep": 2}, 2), {"b": 2, "s": SEQ})


def test_a_sequence_that_tp_cannot_split_has_no_layout() -> None:
    """Tokens of its own for every rank: an odd sequence is refused by name, not sent twice."""
    axes = parallel_dims(graph(), ParallelConfig(tp=2)).layout_axes
    problem = build_problem(graph(), IntraSettings(axes, Costs(cluster(2)), {"b": 2, "s": 15}))
    with pytest.raises(InfeasibleError, match=r"experts: the sequence cannot be split over tensor parallelism"):
        with_token_dispatch(problem, graph(), 1.02)


@pytest.mark.parametrize(("cp", "tp", "ep", "etp"), [(1, 2, 2, 1), (1, 2, 2, 2), (2, 2, 4, 1), (1, 4, 4, 1)])
def test_what_is_priced_is_what_the_program_does(cp: int, tp: int, ep: int, etp: int) -> None:
    """Every collective of a micro-batch, with its bytes, in both passes; of experts' weights nothing over tp."""
    devices = max(ep * etp, cp * tp)
    dp = devices // (cp * tp)
    pins = {"dp": dp, "cp": cp, "tp": tp, "ep": ep, "etp": etp, "pp": 1, "num_micro_batches": 1}
    r = PlanRequest(
        graph(),
        cluster(devices),
        SEQ,
        2 * dp,
        pins,
        precision="native",
        memory_risk=0.5,
        equal_within=0.0,
        gap=0.0,
        executed=True,
    )
    found = search_plan(r)
    priced = found.plans[0].point.workload
    program = compile_program(graph(), searched_plan(graph(), found.plans[0], found.certificate, "made up")[1])
    env = {"b": 2, "s": SEQ // cp}
    for call in ("model.layers.0", "model.layers.2"):
        block = next(b for names, blocks in zip(priced.unit_calls, priced.units, strict=True)
                     for n, b in zip(names, blocks, strict=True) if n == call)  # fmt: skip
        assumed = Counter((w.kind, w.phase, w.num_bytes) for w in priced.blocks[block].comms if w.per == "micro_batch")
        runs = Counter(
            (e.kind, e.phase, float(evaluate_terms(e.bytes, env)))
            for e in program.spec.ledger
            if e.call == call and e.per == "micro_batch" and not e.what.endswith(" counts")
        )
        assert sum(n for (kind, *_), n in runs.items() if kind == "all_to_all") >= (4 if etp == 1 else 8)
        assert assumed == runs
        for weights in ("gate_up", "down"):
            assert not any(weights in w.what for w in priced.blocks[block].comms)
            assert not any(weights in e.what for e in program.spec.ledger)


@pytest.mark.parametrize("ep", [2, 4])
def test_tokens_that_others_have_too_do_not_type_check(ep: int) -> None:
    """Negative control: indices that are whole on every rank beside tokens that are split."""
    program = compiled(Case("mixtral", dp=ep // 2, tp=2, ep=ep, etp=1))
    check_program(program.spec, program.sources, sequence=SEQ)
    ((name, text),) = program.sources.items()
    (line,) = {x for x in text.splitlines() if " = experts(" in x}
    index = line.split("experts(")[1].split(",")[1].strip()
    whole = f"all_gather({index}, 'tp', 0, dst=R)[: {index}.shape[0]]"  # those of the first rank, for all
    wrong = text.replace(line, line.replace(f" {index},", f" {whole},"))
    with pytest.raises(
        spmd_types.SpmdTypeError, match=r"experts: indices are not V on .*, over which experts are spread"
    ):
        check_program(program.spec, {name: wrong}, sequence=SEQ)


def test_layouts_of_another_plan_are_not_emitted() -> None:
    """Experts where tp has them, on a mesh over which they are spread: refused by codegen, not run."""
    _, layouts, _ = make_plan(graph(), cluster(2), read_pins({"tp": 2}, 2), {"b": 2, "s": SEQ})
    mesh = parallel_dims(graph(), ParallelConfig(tp=2, ep=2, etp=1)).mesh
    with pytest.raises(LayoutError, match=r"token dispatch needs a layout with different tokens on every rank"):
        compile_program(graph(), replace(layouts, mesh=mesh))


def test_split_experts_need_a_dispatch() -> None:
    x, index, w = torch.zeros(2, 4), torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 1)
    with pytest.raises(ValueError, match=r"experts: split over 'etp', which needs token dispatch"):
        experts(x, index, w, torch.zeros(1, 6, 4), torch.zeros(1, 4, 3), activation="silu", gated=True, inner="etp")


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*torch.distributed._functional_collectives.*:FutureWarning")
def test_gradients_of_spread_experts_are_not_summed_over_tp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with the reduction of weights that all of tp uses, gradients are mixed with other experts'."""
    case = Case("mixtral", tp=2, ep=2, etp=1)
    program = compiled(case)

    def change(p: Any) -> Any:
        return replace(p, reduce_axes=("tp",)) if any(s.axis == "ep" for s in p.shards) else p

    stages = tuple(replace(s, params=tuple(map(change, s.params))) for s in program.spec.stages)
    want: Trained = trained(case, "float64", 1, "sgd")
    wrong = Program(replace(program.spec, stages=stages), program.sources)
    monkeypatch.setattr(parity, "compiled", lambda _: wrong)
    got = trained(case, "float64", 1, "sgd")
    error, name = worst(got.gradients, want.gradients)
    assert error > 1e-3 and ".experts." in name


def kept_job(rank: int, world: int, inner: bool) -> int:
    """Bytes that autograd keeps of experts to which tokens travel, inputs and weights not counted; all ranks alike."""
    from autoplan.runtime.mesh import AxisMesh, use_mesh

    tokens, h, f, num = 8, 6, 5, 4
    axes = [("edp", 1), ("ep", world // 2 if inner else world), ("etp", 2 if inner else 1)]
    mesh = AxisMesh(axes, device_type="cpu")
    ep = mesh.size("ep")
    shapes = ((tokens, h), (tokens, 2), (num // ep, 2 * f, h), (num // ep, h, f))
    x, weights, first, down = (torch.ones(s, dtype=torch.float64, requires_grad=True) for s in shapes)
    index = torch.tensor([[0, 1], [2, 3], [1, 2], [3, 0]] * 2)
    given = {t.untyped_storage().data_ptr() for t in (x, weights, first, down)}
    kept: dict[int, int] = {}
    alive = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        alive.append(t)  # so that no place is used twice
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with use_mesh(mesh), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        experts(
            x, index, weights, first, down, activation="silu", gated=True, dispatch="ep", inner="etp" if inner else None
        )
    return sum(n for p, n in kept.items() if p not in given)


@pytest.mark.processes
@pytest.mark.parametrize(("world", "inner"), [(2, False), (4, True), (4, False)])
def test_what_travelling_rows_keep_is_what_runs(world: int, inner: bool) -> None:
    """Evenly spread tokens: what the table says of experts (rows' places and first product), and the rows beside."""
    ep, etp = (world // 2, 2) if inner else (world, 1)
    block = Block(
        "layer",
        (),
        (),
        (),
        (),
        (Node("out", "experts", ("x", "index", "weights", "up", "down"), ("out",), {"top_k": 2, "num_experts": 4}),),
        {
            "x": Value("x", (Expr.of(8), Expr.of(6)), "float64", True),
            "weights": Value("weights", (Expr.of(8), Expr.of(2)), "float64", True),
        },
    )
    works = OpCosts(graph(), (), {"b": 1, "s": SEQ})
    beside = travelled_bytes(block, block.nodes[0], works, ExpertDegrees(ep, etp, executed=True))
    rows = 8 * 2
    table = etp * rows * (8 + 2 * 5 * 8)  # of all parts' rows the place and the first product
    assert pool(world).run(kept_job, inner) == [table + beside] * world


@pytest.mark.processes
@pytest.mark.parametrize("zero", range(4))
def test_whole_experts_beside_split_layers_where_data_is_not_parallel(zero: int) -> None:
    """Every tp rank has all experts for its own tokens: they have replicas, all other parameters have none."""
    assert_trains_as_one_device(Case("mixtral", tp=2, ep=1, etp=1, zero=zero))
