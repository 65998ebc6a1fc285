"""Operations that the database of PyTorch's tests found (experiments.compatibility.torch_ops), in small programs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autoplan.capture.export import capture
from autoplan.errors import CaptureError
from autoplan.ir.graph import ModelGraph
from experiments.compatibility.fuzz.examine import examine
from experiments.compatibility.fuzz.plans import FuzzPlan
from experiments.compatibility.fuzz.programs import HEAD, FuzzProgram
from experiments.compatibility.fuzz.scope import CAPTURED

PLANS = (FuzzPlan(tp=2, layout=1), FuzzPlan(dp=2))


def program(body: str, init: str = "") -> FuzzProgram:
    """A module whose forward takes `x` [b, s, 8], scaled by `self.w` [8]."""
    lines = [
        "class Model(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        "        self.w = nn.Parameter(torch.linspace(-0.9, 0.8, 8))",
        *(f"        {line}" for line in init.splitlines()),
        "",
        "    def forward(self, x):",
        "        h = x * self.w",
        f"        return {body}",
        "",
        "def loss_fn(out, batch):",
        "    return out.square().mean()",
    ]
    return FuzzProgram(HEAD + "\n".join(lines) + "\n", ("x",))


TABLE = "self.table = nn.Parameter(torch.randn(8, 8))"
EQUAL = {
    "one part of a tensor": ("h.chunk(1, -1)[0] * h.split(8, -1)[0] + torch.meshgrid(self.w, indexing='ij')[0]", ""),
    "one element as a number": ("h + self.w.mean(0, keepdim=True).reshape(())", ""),
    "a vector transposed": ("h * self.w.t()", ""),
    "an index smaller than its tensor": (
        "h + self.table.gather(1, self.places).mean(0) + self.table.scatter(1, self.places, 0.5).mean(0)",
        "self.table = nn.Parameter(torch.randn(8, 8))\nself.register_buffer('places', torch.randint(8, (4, 8)))",
    ),
    "an index of a number": ("h + self.w[0].gather(0, self.zero)", "self.register_buffer('zero', torch.tensor(0))"),
    "products with a vector": (
        "h @ self.w + torch.matmul(self.w, h.mT) * (self.w @ self.w) + (h @ self.table @ self.w)",
        TABLE,
    ),
    "a loss that looks at its variance": (
        "h + F.gaussian_nll_loss(h, x, self.w[:1].square() * h.square(), full=True, eps=0.4, reduction='none')"
        " + F.gaussian_nll_loss(h, x, self.w.square().mean() * x[..., 0].square(), eps=0.4, reduction='none')",
        "",
    ),
    "places in memory that are in order": ("h + self.table.t().contiguous().as_strided((3, 8), (8, 1)).mean(0)", TABLE),
    "a conjugate that is pending": ("h + torch.view_as_real(torch.fft.ifft(h).resolve_conj()).sum(-1)", ""),
    "lengths of vectors that are zero": (
        "F.normalize(h * self.mask, dim=-1) + torch.linalg.norm(self.w * self.mask[0])"
        " + (h * self.mask).norm(3, dim=-1, keepdim=True)",
        "self.register_buffer('mask', torch.zeros(1, 1))",
    ),
    "counts of real numbers": ("h * (torch.histc(self.w, 4, -1, 1) / 3).square().sum()", ""),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_to_the_module(name: str) -> None:
    outcome = examine(program(*EQUAL[name]), PLANS, "2")
    assert not outcome.refused and len(outcome.equal) == 3 and outcome.num_splits


def test_a_trial_is_not_misled_by_one_draw() -> None:
    """A mask with one True in a row takes the first row of the source, which halves of both give as well."""
    tensors = "\n".join(f"self.{name} = nn.Parameter(torch.randn(6, 6))" for name in ("table", "source"))
    init = f"{tensors}\nself.register_buffer('chosen', torch.arange(6) % 2 == 0)"
    body = "h + self.table.masked_scatter(self.chosen, self.source).square().mean()"
    assert examine(program(body, init), PLANS, "2").num_splits


def test_a_trial_does_not_read_past_a_half() -> None:
    body = "torch.as_strided_scatter(h, self.w[:1], (1,), (1,), 0)"
    ((where, why),) = examine(program(body), PLANS, "2").refused
    assert "dp 2" in where and "as_strided_scatter" in why


def test_matrices_that_must_be_definite_are_split_by_samples() -> None:
    body = "torch.cholesky(h.mT @ h + 9 * torch.eye(8, dtype=h.dtype))"
    outcome = examine(program(body), PLANS, "2")
    assert not outcome.refused and len(outcome.equal) == 3


def test_results_without_a_derivative_are_known() -> None:
    """The mean and the reciprocal deviation that a layer norm keeps have none."""
    found = program("sum(torch.native_layer_norm(h, (8,), None, None, 1e-5))")
    graph = capture(found.model(), found.batch(CAPTURED), found.loss_fn)
    norms = [(b, n) for b in graph.blocks.values() for n in b.nodes if "layer_norm" in n.attrs.get("call", "")]
    ((block, node),) = norms
    assert [block.values[name].requires_grad for name in node.outputs] == [True, False, False]


REFUSED = {
    "a value that Python reads": (
        "h if torch.equal(h, h) else x",
        r"py:\d+ .*aten\.equal\.default needs the values of its tensors",
    ),
    "places in memory": ("h.mT.as_strided((2, 3), (3, 1)).sum() * h", r"as_strided.*; give it x\.contiguous\(\)"),
    "halves of the batch": ("torch.cat(h.vsplit(2), 1)", r"takes batches of a multiple of 2 samples only"),
    "one size of a batch that is another": ("2 * h if x.shape[0] != 3 else h", r"py:\d+ .*fixes dim 0 to 3"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_words(name: str) -> None:
    body, why = REFUSED[name]
    found = program(body)
    with torch.random.fork_rng(), pytest.raises(CaptureError, match=why):
        capture(found.model(), found.batch(CAPTURED), found.loss_fn)


def test_constants_of_complex_numbers_have_a_text_form() -> None:
    """A table of turns that no buffer holds, as that of Nucleus-Image."""
    batch = {"input": torch.randn(2, 3, 8), "target": torch.randn(2, 3, 8)}
    graph = capture(torch.nn.Linear(8, 8), batch, lambda found, b: (found - b["target"]).square().mean())
    name, block = next((n, b) for n, b in graph.blocks.items() if b.nodes)
    node = replace(block.nodes[0], attrs={**block.nodes[0].attrs, "values": (1j, 0.5 - 2j, 1.0)})
    changed = replace(graph, blocks={**graph.blocks, name: replace(block, nodes=(node, *block.nodes[1:]))})
    assert ModelGraph.from_json(changed.to_json()) == changed
