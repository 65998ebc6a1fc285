"""Programs that the fuzzer found (experiments.compatibility.fuzz), made small: equal to the module, or refused."""

from __future__ import annotations

import re

import pytest

from experiments.compatibility.fuzz.examine import examine
from experiments.compatibility.fuzz.plans import FuzzPlan
from experiments.compatibility.fuzz.programs import HEAD, FuzzProgram

TERM = "loss = (out[0] if isinstance(out, tuple) else out).square().mean()"
ENTROPY = 'loss = F.cross_entropy(out.flatten(0, 1), batch["labels"].flatten())'
SPLIT = (FuzzPlan(tp=2), FuzzPlan(dp=2, num_micro_batches=2))


def program(body: str, loss: str = TERM, init: str = "") -> FuzzProgram:
    """A module whose forward takes `x` and `ids`, and starts with `h = self.embed(ids) + x`."""
    lines = [
        "class Model(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        "        self.embed = nn.Embedding(16, 8)",
        "        self.head = nn.Linear(8, 16, bias=False)",
        *(f"        {line}" for line in init.splitlines()),
        "",
        "    def forward(self, x, ids, mask):",
        "        h = self.embed(ids) + x",
        *(f"        {line}" for line in body.splitlines()),
        "",
        "def loss_fn(out, batch):",
        *(f"    {line}" for line in loss.splitlines()),
        "    return loss",
    ]
    return FuzzProgram(HEAD + "\n".join(lines) + "\n", ("x", "ids", "mask", "labels", "u"))


EQUAL = {
    "a mean that only the shape of another tensor needs": (
        "with torch.no_grad():\n    scale = h.abs().mean()\nv = torch.zeros_like(h / (scale + 1))\nv.clamp_(-1, 1)\n"
        "return self.head(v + h * 0)",
        ENTROPY,
    ),
    "what no_grad computes, beside a write in place": (
        "with torch.no_grad():\n    v = h * 2\nw = v + 1\npart = w.transpose(1, 2)\npart += 1\nreturn self.head(w)",
        ENTROPY,
    ),
    "padding that cuts as much at the other end": ("return F.pad(h, (-1, 1))", TERM),
    "a shift of the tokens": ("return F.pad(h, (0, 0, 1, -1))", TERM),
    "numbers of no sample, added to every token": ("return h + torch.arange(8)", "loss = out.square().sum()"),
    "what is added to every sample is no penalty": (
        "return self.head(h) + self.w.square()",
        "loss = out.sum()",
        "self.w = nn.Parameter(torch.randn(16))",
    ),
    "a power in place": ("v = h * 1\nv.pow_(2)\nreturn self.head(v + 2)", ENTROPY),
    "layers of whose parameters none is used": (
        "return self.second(self.first(h))",
        TERM,
        "made = lambda self, x: x + torch.tanh(F.softshrink(x, 0.2))\n"
        "Layer = type('Layer', (nn.Sequential,), {'forward': made})\n"
        "self.first, self.second = (Layer(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2))",
    ),
    "a sum along a dim of a tensor without dims": ("return h, h.sum()", f"{TERM} + out[1].sum(-1) * 0.1"),
    "a copy into a new tensor": ("v = torch.zeros_like(h)\nv.copy_(h * 2)\nreturn v", TERM),
    "squeeze of a batch that a micro-batch cuts to one sample": ("return self.head(h.squeeze())", ENTROPY),
    "a term of the inputs alone, divided by the size of the batch": (
        "return self.head(h), x * 3",
        'loss = F.cross_entropy(out[0].flatten(0, 1), batch["labels"].flatten())\n'
        "loss = loss + 0.3 * out[1].abs().sum() / out[1].numel()",
    ),
    "such a term beside a mean over a mask": (
        "return h",
        'm = batch["mask"].double()\nloss = (out.sum(-1) * m).sum() / m.sum() + 0.1 * (m * 3).sum() / m.shape[0]',
    ),
    "a mask divided by its sum": (
        "return h",
        'm = batch["mask"].double()\nloss = (out.sum(-1) * (m / m.sum())).sum()',
    ),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_on_one_device_and_in_parts(name: str) -> None:
    outcome = examine(program(*EQUAL[name]), (*SPLIT, FuzzPlan(dp=4)))
    assert not outcome.skipped and not outcome.refused
    assert len(outcome.equal) == 4


@pytest.mark.parametrize("layout", range(300, 312, 3))
def test_what_the_loss_counts_is_whole_on_every_rank(layout: int) -> None:
    """Layouts by random prices, which would hand over targets that are split over tp."""
    outcome = examine(
        program("return self.head(h)", ENTROPY), (FuzzPlan(tp=2, layout=layout), FuzzPlan(tp=4, layout=layout))
    )
    assert len(outcome.equal) == 3


def test_one_value_may_be_read_in_two_layouts() -> None:
    """Under prices by which one factor of a square is a pending sum and the other one is whole."""
    terms = "loss = out[0].tanh().sum(-1).mean() + (out[1].sum(-1) * batch['mask']).sum() / batch['mask'].sum()"
    body = "h = self.embed(ids)\nreturn h * h + h, h"
    outcome = examine(program(body, terms), (FuzzPlan(tp=2, layout=122), FuzzPlan(tp=4, layout=122)))
    assert len(outcome.equal) == 3


STATEFUL = {
    "a multiple of a size that is a float": "return self.head(h * (1 + 0.1 * h.shape[1])).clamp(max=0.3 * h.shape[1])",
    "and one that a buffer takes": "self.seen.copy_(self.seen + h.shape[0] * 0.1)\nreturn self.head(h / self.seen)",
    "attention of torch's own module whose shares are dropped": "return self.head(self.encoder(h))",
    "a layer that nothing but a buffer reads": (
        "v = self.encoder(h)\nself.seen.lerp_(v.detach().mean((0, 1)), 0.2)\nreturn self.head(self.encoder(h).sin())"
    ),
    "an update without gradients behind an op that nothing reads": (
        "torch.relu(h)\nwith torch.no_grad():\n    self.seen.mul_(0.9).add_(h.mean((0, 1)), alpha=0.1)\n"
        "return self.head(h)"
    ),
    "layers that nothing but their buffers need": (
        "v = h\nfor layer in self.layers:\n    v = layer(v.mT).mT\nreturn self.head(h)"
    ),
    "layers that are attributes, one of them for a buffer alone": (
        "v = self.first(h)\nself.seen.copy_(v.detach().reshape(-1, 8).mean(0))\nreturn self.head(self.second(h))"
    ),
}
LAYER = "nn.TransformerEncoderLayer(8, 2, 16, {}, batch_first=True, norm_first=True)"
STATE = (
    f"self.register_buffer('seen', torch.ones(8))\nself.encoder = {LAYER.format(0.2)}\n"
    "self.layers = nn.ModuleList(nn.Sequential(nn.Conv1d(8, 8, 1), nn.BatchNorm1d(8)) for _ in range(2))\n"
    f"self.first, self.second = {LAYER.format(0.0)}, {LAYER.format(0.0)}"
)


@pytest.mark.parametrize("name", STATEFUL)
def test_draws_and_updates_are_equal(name: str) -> None:
    """On one device the module's, by numbers that both know; in parts those of one device."""
    plans = FuzzPlan(tp=2), FuzzPlan(dp=2, recompute="full")
    outcome = examine(program(STATEFUL[name], ENTROPY, STATE), plans)
    assert len(outcome.equal) == 3 and not outcome.refused


OF_ONE_LENGTH = {
    "half of the sequence": ("return F.glu(h, 1)", ""),
    "a size in a module of PyTorch": (
        "v = torch.relu(self.thin(h.mT).mT)\nreturn torch.relu(v + 2)",
        "self.thin = nn.Conv1d(8, 8, 1, stride=2)",
    ),
}


@pytest.mark.parametrize("name", OF_ONE_LENGTH)
def test_equal_at_the_length_of_the_example(name: str) -> None:
    body, init = OF_ONE_LENGTH[name]
    outcome = examine(program(body, init=init), SPLIT[:1])
    assert not outcome.refused and len(outcome.equal) == 2


REFUSED = {
    "an op that PyTorch cannot run beside in-place ops": (
        "v = torch.std_mean(h, dim=(0, -1), keepdim=True)[1]\nw = v * 1\nw[..., ::2] = v[..., ::2].sin()\n"
        "return h + w + v",
        r"std_mean.*write x = x\.add\(y\) for x\.add_\(y\)",
        "",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    body, why, init = REFUSED[name]
    ((_, text),) = examine(program(body, init=init), SPLIT).refused
    assert re.search(why, text)
