"""Context parallelism: what can be cut along the sequence, what the program then says and sends, what is refused."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import models
import pytest
import torch
from context_jobs import attention_job, saved_job
from harness import pool
from parity import Case, compiled, global_batch, worst
from torch import nn

from autoplan.api import plan_program
from autoplan.capture.export import capture
from autoplan.codegen.check import check_program
from autoplan.config.context_methods import read_method
from autoplan.cost_models.hardware.cluster import Cluster, Device, Level
from autoplan.errors import PinError
from autoplan.ir.graph import ModelGraph
from autoplan.ops.batch import context_obstacle
from autoplan.ops.saved import OpFacts, TensorFacts, extra_bytes, kept
from autoplan.program.megatron_kernels import Kernels, rule_of
from autoplan.runtime.parts import Part, Pattern, attend, attend_backward
from autoplan.runtime.ring import parts_of
from autoplan.runtime.spec import evaluate_terms
from autoplan.search.planner import search_plan
from autoplan.search.request import PlanRequest

SEQ = 16


def cluster(devices: int) -> Cluster:
    return Cluster(1, devices, Device("made up", 1e12, 1e9, 1 << 30, "made up"), Level(1e-6, 1e9, "made up"), "cpu")


@lru_cache(maxsize=8)
def graph(kind: str) -> ModelGraph:
    if kind.startswith("gpt"):
        batch = models.token_batch(2, SEQ)
        model = models.make_gpt(dropout=0.25 if kind == "gpt-dropout" else 0.0)
        return capture(model, {"ids": batch["input_ids"], "labels": batch["labels"]}, models.gpt_loss)
    makes = {"llama": models.make_llama, "mixtral": models.make_mixtral, "deepseek": models.make_deepseek}
    make = {**makes, "windows": functools.partial(models.make_windowed, mixed=True)}[kind]
    return capture(make(), models.token_batch(2, SEQ))


class Mixing(nn.Module):
    """A layer in which tokens see each other other than by attention."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.table, self.head, self.how = nn.Embedding(32, 8), nn.Linear(8, 32), how

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        if self.how == "mean over tokens":
            x = x - x.mean(1, keepdim=True)
        elif self.how == "softmax over tokens":
            x = x * x.softmax(1)
        elif self.how == "mean, then squared":
            return self.head(x).mean((0, 1)).square()
        return self.head(x)


def mixing(how: str) -> ModelGraph:
    ids = torch.zeros(2, SEQ, dtype=torch.long)

    def loss(out: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if how == "mean, then squared":
            return out.sum()
        return torch.nn.functional.cross_entropy(out.flatten(0, 1), batch["labels"].flatten())

    return capture(Mixing(how), {"ids": ids, "labels": ids}, loss)


@pytest.mark.parametrize("kind", ["llama", "gpt", "gpt-dropout", "mixtral", "deepseek"])
def test_decoders_can_be_cut(kind: str) -> None:
    assert context_obstacle(graph(kind)) is None


@pytest.mark.parametrize(
    ("how", "op"), [("mean over tokens", "sub"), ("softmax over tokens", "softmax"), ("mean, then squared", "square")]
)
def test_what_mixes_tokens_is_refused_by_name(how: str, op: str) -> None:
    """A mean over the tokens of a part is not that of the sequence; alone, without mixing, the model can be cut."""
    found = context_obstacle(mixing(how))
    assert found is not None and "cannot be computed for a part of the sequence" in found
    assert found.startswith((op, "mean")), found
    assert context_obstacle(mixing("not at all")) is None


@pytest.mark.parametrize(
    ("kind", "devices", "seq_len", "pins", "why"),
    [
        ("llama", 4, 18, {"cp": 2}, r"seq_len=18 cannot be cut into 4 equal chunks over cp=2; .*=16 or 20, or cp=1$"),
        ("llama", 4, SEQ, {"cp": 8}, r"pin cp=8 does not divide the 4 devices; nearest legal: cp=4$"),
        ("llama", 4, SEQ, {"cp": 0}, r"pin cp=0: must be a whole number of at least 1"),
        ("llama", 4, SEQ, {"context_method": "ring"}, r"'ring' needs cp to be pinned too; nearest legal: cp=2$"),
        ("llama", 4, SEQ, {"cp": 2, "context_method": "rings"}, r"'rings' is not known; use gather, ring, uly"),
        ("llama", 4, SEQ, {"cp": 4, "context_method": "ulysses2xring4"},
         r"is not a method over cp=4 ranks; nearest legal: context_method='gather' or 'ring' or 'ulysses' or"),
        ("llama", 4, SEQ, {"cp": 2, "tp": 2, "context_method": {"layers": "ring"}},
         r"names 'layers', which is not a block with attention; use layer;"),
        ("windows", 4, SEQ, {"cp": 2, "context_method": {"layer": "ring"}}, r"leaves out .*; give a method for every"),
        ("llama", 8, 32, {"cp": 8, "context_method": "ulysses"},
         r"8 ranks of ulysses do not divide the 4 attention heads of a rank at .*: context_method='gather' or 'ring'"),
        ("llama", 8, SEQ, {"cp": 4, "tp": 2, "context_method": "ulysses"},
         r"4 ranks of ulysses do not divide the 2 attention heads of a rank at .*: context_method='gather' or 'ring'"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_says_why(kind: str, devices: int, seq_len: int, pins: dict[str, Any], why: str) -> None:
    with pytest.raises(PinError, match=why):
        search_plan(PlanRequest(graph(kind), cluster(devices), seq_len, 8, pins, precision="native", executed=True))


def test_a_pinned_program_cuts_once_and_gathers_keys() -> None:
    pins = {"cp": 2, "tp": 2, "context_method": "gather"}
    plan, program = plan_program(graph("llama"), cluster(4), pins, 8, SEQ)
    assert (plan.config.cp, plan.config.dp) == (2, 1) and " cp=2 " in str(plan)
    assert "cp = 1" not in plan.certificate["restrictions"]
    ((_, text),) = program.sources.items()
    assert text.count("context_part(") == 4  # token ids, labels, cosines and sines
    assert text.count("gather='cp'") == 1 and "s = context_length(s, 'cp')" in text
    check_program(program.spec, program.sources, sequence=SEQ)
    assert "context" not in plan_program(graph("llama"), cluster(4), {"tp": 2}, 8, SEQ)[1].sources["stage0.py"]


def blocks_of(kind: str) -> list[str]:
    """Blocks with attention, those with windows first."""
    found = {b.name: n for b in graph(kind).blocks.values() for n in b.nodes if n.op == "attention"}
    return sorted(found, key=lambda name: found[name].attrs.get("window") is None)


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("ring", "ring='cp')"),
        ("ulysses", "ulysses='cp')"),
        ("ulysses2xring2", "ulysses='cpu', ring='cpr')"),
        ("ulysses2xgather2", "ulysses='cpu', gather='cpr')"),
    ],
)
def test_the_text_says_the_method(method: str, says: str) -> None:
    cp = 4 if "x" in method else 2
    pins = {"cp": cp, "tp": 2 if cp == 2 else 1, "context_method": method}
    plan, program = plan_program(graph("llama"), cluster(4), pins, 8, SEQ)
    (text,) = program.sources.values()
    assert text.count(says) == 1 and f"cp={cp} ({method})" in str(plan)
    assert plan.config.context_method == {"layer": method}
    check_program(program.spec, program.sources, sequence=SEQ)


def test_memory_of_activations_is_shared_out() -> None:
    """Half of what a whole sequence keeps, and the keys and values of the other half."""
    held = {}
    for cp in (1, 2):
        pins = {"cp": cp, "tp": 1, "pp": 1, "recompute": "none", "num_micro_batches": 1}
        pins |= {"context_method": "gather"} if cp > 1 else {}
        r = PlanRequest(graph("llama"), cluster(2), SEQ, 2 // cp, pins, precision="native", executed=True)
        held[cp] = search_plan(r).plans[0].point.workload.unit_saved
    assert 0.5 < sum(held[2]) / sum(held[1]) < 0.75


def pairs_of(part: Part) -> float:
    """Return the pairs of tokens that a part computes; a causal pair of tokens with themselves counts as half."""
    rows, columns = part.queries[1] - part.queries[0], part.keys[1] - part.keys[0]
    return rows * columns / (2 if part.kind == "causal" else 1)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_half_of_all_pairs_are_computed_the_same_on_every_rank(ranks: int) -> None:
    """2 c of the 4 c pairs of chunks that a rank's queries make with all keys; all of them without a causal mask."""
    for causal, want in ((True, 2 * ranks), (False, 4 * ranks)):
        for index in range(ranks):
            parts = [p for source in range(ranks) for p in parts_of(index, source, ranks, 2 * 4, Pattern(causal))]
            assert sum(map(pairs_of, parts)) == 4 * 4 * want


def seen_by(how: Pattern, num_tokens: int) -> torch.Tensor:
    """Return [s, s], 1 where a query sees a key."""
    tokens = torch.arange(num_tokens)
    distance = tokens[:, None] - tokens[None]
    seen = (distance >= -(0 if how.causal else how.ahead or 0)) & (distance < (how.window or num_tokens))
    if how.chunk is not None:
        seen &= tokens[:, None] // how.chunk == tokens[None] // how.chunk
    return seen.long()


@pytest.mark.parametrize(
    "how",
    [
        *(Pattern(True, window=window) for window in (1, 2, 4, 5, 9, 12, 100)),
        *(Pattern(True, chunk=chunk) for chunk in (1, 2, 4, 5, 9, 12, 100)),
        *(Pattern(False, window=window, ahead=ahead) for window, ahead in ((1, 0), (2, 1), (5, 4), (9, 3), (100, 12))),
    ],
    ids=lambda how: f"window={how.window} ahead={how.ahead} chunk={how.chunk}",
)
def test_parts_cover_what_a_pattern_shows(how: Pattern) -> None:
    """Every pair of tokens that the mask shows is in exactly one part, and no other is; far chunks are left out."""
    ranks, length = 4, 4
    whole = torch.zeros(2 * ranks * length, 2 * ranks * length, dtype=torch.int64)
    num_pairs = 0
    for index in range(ranks):
        places = [torch.arange(length) + x * length for x in range(2 * ranks)]
        for source in range(ranks):
            here, there = (torch.cat((places[x], places[2 * ranks - 1 - x])) for x in (index, source))
            for part in parts_of(index, source, ranks, 2 * length, how):
                num_pairs += 1
                rows, columns = here[slice(*part.queries)], there[slice(*part.keys)]
                distance = torch.arange(len(rows))[:, None] - torch.arange(len(columns))[None]
                seen = {"full": distance > -len(columns), "causal": distance >= 0}.get(part.kind)
                if seen is None:
                    distance += part.offset
                    seen = (distance >= -part.ahead) & (distance < part.window)
                whole[rows[:, None], columns[None]] += seen
    assert torch.equal(whole, seen_by(how, 2 * ranks * length))
    if (how.chunk or how.window or 0) <= length and (how.ahead or 0) < length:
        assert num_pairs <= (3 if how.ahead else 4 if how.chunk else 2) * 2 * ranks  # of 36 that a causal mask shows


def test_plain_products_are_what_the_kernel_computes() -> None:
    """Forward and backward of one part, for the same scores; grouped heads, a value head of another size."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, h, 6, d, dtype=torch.float64) for h, d in ((4, 8), (2, 8), (2, 6), (4, 6)))
    causal, band = Part((0, 6), (0, 6), "causal"), Part((0, 6), (0, 6), "band", 0, 6)
    out, lse = attend(q, k, v, causal, 0.3)
    for got, want in zip(attend(q, k, v, band, 0.3), (out, lse), strict=True):
        assert (got - want).abs().max() < 1e-14
    found = (attend_backward(grad, q, k, v, out, lse, part, 0.3) for part in (causal, band))
    for got, want in zip(*found, strict=True):
        assert (got - want).abs().max() < 1e-13


PATTERNS: list[dict[str, Any]] = [
    {"causal": True},
    {"causal": False},
    *({"causal": True, "window": window} for window in (1, 5, 9)),
    *({"causal": True, "chunk": chunk} for chunk in (1, 5, 8, 13)),
    *({"causal": False, "window": window, "ahead": ahead} for window, ahead in ((1, 0), (3, 2), (4, 9), (40, 1))),
]
DROPPED: list[dict[str, Any]] = [
    {"causal": True, "dropout_p": 0.3},
    {"causal": False, "dropout_p": 0.3},
    {"causal": True, "dropout_p": 0.3, "window": 5},
]
_MESHES: dict[int, tuple[tuple[str, int], ...]] = {2: (("cp", 2),), 4: (("cpr", 2), ("cpu", 2))}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("world", "how"),
    [
        (2, {"gather": "cp"}),
        (4, {"ring": "cp"}),
        (4, {"ulysses": "cpu", "ring": "cpr"}),
        *(
            pytest.param(world, how, marks=pytest.mark.slow)
            for world, how in [
                (2, {"ring": "cp"}),
                (2, {"ulysses": "cp"}),
                (4, {"ulysses": "cp"}),
                (4, {"ulysses": "cpu", "gather": "cpr"}),
            ]
        ),
    ],
)
def test_attention_over_processes(world: int, how: dict[str, str]) -> None:
    """Grouped heads (fewer key-value heads than ranks, too), a value head of another size; causal or not, windows and
    chunks smaller and larger than a rank's, dropout: output and gradients of whole sequences."""
    for sizes in ((16, 4, 2, 8, 8), (48, 4, 4, 10, 6)):
        for pattern in (*PATTERNS, *DROPPED):
            found = pool(world).run(attention_job, _MESHES[world], how, sizes, pattern, "float64")
            assert max(map(max, found)) < 1e-13, (sizes, pattern)


@pytest.mark.processes
def test_a_ring_in_half_precision() -> None:
    """Sums over its steps are wide: as near to float64 as the kernel of one device."""
    (ring, one) = (
        max(map(max, pool(2).run(attention_job, _MESHES[2], how, (64, 4, 2, 8, 8), PATTERNS[0], "bfloat16")))
        for how in ({"ring": "cp"}, {"gather": "cp"})
    )
    assert 1e-4 < ring < 2 * one


@pytest.mark.processes
@pytest.mark.parametrize("sizes", [(64, 4, 2, 8, 8), (64, 4, 1, 8, 8), (64, 4, 4, 12, 8)])
@pytest.mark.parametrize(
    ("method", "how", "p"),
    [
        ("ring", {"ring": "cp"}, 0.0),
        ("ulysses", {"ulysses": "cp"}, 0.0),
        ("ulysses2xring2", {"ulysses": "cpu", "ring": "cpr"}, 0.0),
        ("ring", {"ring": "cp"}, 0.3),
        ("gather", {"gather": "cp"}, 0.3),
        ("ulysses2xring2", {"ulysses": "cpu", "ring": "cpr"}, 0.3),
    ],
)
def test_attention_keeps_what_is_predicted(method: str, how: dict[str, str], p: float, sizes: tuple[int, ...]) -> None:
    """To the byte: parts of one rank and the log-sum-exp, whatever the length of the sequence; with dropout also the
    counters that its mask is drawn from, of every head and token."""
    world = 4 if "x" in method else 2
    s, heads, groups, d, e = sizes
    q, k, v, out = (
        TensorFacts((2, h, s // world, n), "float32", True)
        for h, n in ((heads, d), (groups, d), (groups, e), (heads, e))
    )
    op, attrs = ("dropped_attention", {"causal": True, "p": p}) if p else ("attention", {"causal": True})
    facts = OpFacts(op, attrs, (q, k, v), (out,))
    rule = rule_of(facts, Kernels(context=world, method=read_method(method, world)))
    assert rule is not None
    tensors = {"x0": q, "x1": k, "x2": v, "y0": out}
    want = sum(tensors[name].num_bytes for name in kept(facts, rule)) + sum(extra_bytes(facts, rule))
    found = pool(world).run(saved_job, _MESHES[world], how, sizes, p)
    assert set(found) == {want}


METHODS = {
    "ring": {"send_recv": 24},  # of 4 layers, 2 micro-batches: once forward, keys and gradients backward
    "gather": {"all_gather": 16, "reduce_scatter": 16},  # keys and values
    "ulysses": {"all_to_all": 64},  # queries, keys, values, output; both ways
    "ulysses2xring2": {"all_to_all": 64, "send_recv": 24},
    "ulysses2xgather2": {"all_to_all": 64, "all_gather": 16, "reduce_scatter": 16},
}


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*torch.distributed._functional_collectives.*:FutureWarning")
@pytest.mark.parametrize("method", METHODS)
def test_ledger_over_processes(method: str) -> None:
    """Both passes, as many bytes as the program says; and the gradients of one device."""
    from parity_matrix import wanted
    from test_parity_processes import trained

    case = Case("llama", cp=4 if "x" in method else 2, num_micro_batches=2, context_method=method)
    got, spec = trained(case, "float64", 1, "adamw"), compiled(case).spec
    size = next(iter(global_batch(case).values())).shape[0] // case.num_micro_batches
    want: Counter[tuple[str, str, int, str]] = Counter()
    for e in spec.ledger:
        if e.axis in ("cp", "cpr", "cpu"):
            num_bytes = 2 * evaluate_terms(e.bytes, {"b": size, "s": SEQ // case.cp})  # captured in float32
            want[e.kind, e.axis, num_bytes, e.phase] += case.num_micro_batches
    kinds = Counter(kind for kind, *_ in want.elements())
    assert kinds == METHODS[method]
    assert Counter(r for r in got.ledger if r[1] in ("cp", "cpr", "cpu") and r[0] != "all_reduce") == want
    assert worst(got.gradients, wanted("llama", 0.0, "equal").gradients)[0] < 1e-12


@pytest.mark.processes
def test_blocks_with_methods_of_their_own() -> None:
    """Windows by a ring, the other layers by Ulysses and a ring: equal to one device."""
    from parity_matrix import wanted
    from test_parity_processes import trained

    windowed, plain = blocks_of("windows")
    methods = {windowed: "ring", plain: "ulysses2xring2"}
    case = Case("qwen2-mixed", cp=4, context_method=tuple(methods.items()))
    text = compiled(case).sources["stage0.py"]
    assert text.count("window=7, ring='cp')") == 1 and text.count("ulysses='cpu', ring='cpr')") == 1
    got, want = trained(case, "float64", 1, "adamw"), wanted("qwen2-mixed", 0.0, "equal")
    assert worst(got.gradients, want.gradients)[0] < 1e-12


@pytest.mark.processes
@pytest.mark.parametrize(
    "case",
    [
        Case("gpt-untied", cp=2, tp=2, dropout=0.25, context_method="gather"),
        Case("llama", cp=4, dropout=0.25, context_method="ulysses2xring2", num_micro_batches=2),
        pytest.param(Case("llama", cp=2, dp=2, dropout=0.25, context_method="ring"), marks=pytest.mark.slow),
        Case("bloom", cp=2, tp=2, dropout=0.25, context_method="ring"),
    ],
    ids=str,
)
def test_dropout_and_alibi_over_cut_sequences(case: Case) -> None:
    """Dropout of tokens, whose parts tp cuts once more, and of attention's probabilities; biases of keys: equal to one
    device."""
    from parity_matrix import wanted
    from test_parity_processes import trained

    got, want = trained(case, "float64", 1, "adamw"), wanted(case.family, case.dropout, "equal")
    assert worst(got.gradients, want.gradients)[0] < 1e-12
