"""Batches that do not fit: one ValueError, the same on all ranks, and the job goes on."""

from __future__ import annotations

import batch_jobs
import pytest
import torch
from harness import pool
from parity import Case, compiled

from autoplan.runtime import agree

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed._functional_collectives.*:FutureWarning")

CASE = Case("deepseek", dp=2, tp=2, num_micro_batches=2)

SAYS = {
    "keys": "the batch has input_ids; this program takes input_ids, labels",
    "no tensor": "labels is a list, not a tensor",
    "dtype": "input_ids is torch.float32; the program was captured with int64",
    "no mapping": "the batch is a tuple; give a mapping of input_ids, labels to tensors",
    "samples": "a batch of 1 cannot be cut into 2 micro-batches; use 2 samples",
    "shapes": "labels has shape (6, 14); with b=6, s=16 this program takes (6, 16)",
    "dims": "labels has shape (16,); this program takes 2 dims",
    "odd length": "a sequence of 15 tokens cannot be cut evenly over tp=2; nearest: 14 or 16",
    "nothing": "the batch has no samples; give 2 or a multiple",
    "row": "input_ids has -7 at [0, 0], but model.embed_tokens.weight has 96 rows: give 0 to 95",
    "no_grad": "step() runs a backward; call it outside torch.no_grad() and torch.inference_mode()",
}


@pytest.mark.processes
@pytest.mark.parametrize(
    "faulty", [pytest.param(None, marks=pytest.mark.slow, id="on all ranks"), pytest.param(3, id="on one rank")]
)
def test_a_batch_that_does_not_fit_is_one_error_and_the_job_goes_on(faulty: int | None) -> None:
    program = compiled(CASE)
    args = (CASE, program.spec.to_json(), dict(program.sources), faulty)
    results = pool(4).run(batch_jobs.batches, *args, timeout_s=120)
    said = results[0][0]
    assert all(r == results[0] for r in results)
    for name, text in SAYS.items():
        assert said[name].startswith("AgreedValueError: ") and text in said[name], name
        assert ("rank 3: " in said[name]) == (faulty == 3), name
    losses = results[0][1]
    assert len(set(losses)) == 1  # nothing of the bad batches went into the good steps
    if faulty is not None:
        assert said["unlike its peers, between two comparisons"] == "accepted"  # the negative control
        for name, what in (("unlike its peers", "its contents"), ("another length than its peers", "its contents")):
            assert f"another batch ({what}) on rank 3 than rank 2 (data rank 1)" in said[name], said[name]


@pytest.mark.processes
def test_settings_of_one_rank_are_one_error_and_the_job_goes_on() -> None:
    """No rank waits for another; the comparison is a part of the exchange in which a step settles its batches."""
    case = Case("gpt", dp=2)
    program = compiled(case)
    found = pool(2).run(batch_jobs.settings, case, program.spec.to_json(), dict(program.sources), timeout_s=60)
    other = "AgreedValueError: rank 1 was given another {} than rank 0: {}. It must be the same on all ranks. If an"
    clipped = "clip_grad_norm_ of the step before"
    arguments = "max_norm={}, norm_type={}, error_if_nonfinite=False"
    says = {
        "no number": (clipped, f"{arguments.format('nan', 2)} and {arguments.format(1, 2)}"),
        "no order": (clipped, f"{arguments.format(1, -1)} and {arguments.format(1, 'inf')}"),
        "another number": (clipped, f"{arguments.format(0.5, 2)} and {arguments.format(1, 2)}"),
        "another order": (clipped, f"{arguments.format(1, 'inf')} and {arguments.format(1, 3)}"),
        "learning rate": ("lr of group 0 of the optimizer", "0.2 and 0.1"),
        "seed": ("seed", "1 and 0"),
        "momentum": ("betas of group 0 of the optimizer", "0.8, 0.99 and 0.9, 0.999"),
    }
    for name, (first, second, third) in found[0].items():
        wrong = {"no number": "max_norm=nan", "no order": "norm_type=-1"}.get(name)
        assert found[1][name][0].startswith(f"AgreedValueError: {wrong}" if wrong else first), name
        assert (first == "accepted") == (name != "no number anywhere"), name
        assert second == found[1][name][1] and third == found[1][name][2] == "accepted", name
        assert second.startswith(other.format(*says[name])) if name in says else second == "accepted", (name, second)


def test_problems_are_listed_with_their_ranks() -> None:
    assert agree.listed(["x", "x"]) == "x"
    assert agree.listed([None, "x", None, "y", "y", "y"]) == "rank 1: x; ranks 3-5: y"
    assert agree.ranks_text([0, 1, 3, 5, 6, 7]) == "ranks 0, 1, 3, 5-7"


def test_a_fingerprint_of_a_sparse_tensor_is_that_of_its_values() -> None:
    """A buffer of OpenAI's Whisper is sparse."""
    x = torch.tensor([[0.0, 2.0], [0.0, 0.0]])
    assert agree.fingerprint({"x": x.to_sparse()}) == agree.fingerprint({"x": x})
    assert agree.fingerprint({"x": (2 * x).to_sparse()}) != agree.fingerprint({"x": x})


def test_a_fingerprint_sees_every_kind_of_difference() -> None:
    x = {"ids": torch.arange(12).reshape(3, 4), "mask": torch.ones(3, 4)}
    same = agree.fingerprint({k: v.clone() for k, v in x.items()})
    assert agree.fingerprint(x) == same < 1 << 62
    others = [
        {**x, "ids": x["ids"].flip(0)},
        {**x, "ids": x["ids"].t().contiguous().reshape(3, 4)},
        {**x, "ids": x["ids"].reshape(4, 3)},
        {**x, "ids": x["ids"].int()},
        {**x, "mask": x["mask"] * (1 + 1e-7)},
        {"ids": x["ids"]},
        {"ids": x["mask"], "mask": x["ids"]},
    ]
    assert all(agree.fingerprint(other) != same for other in others)
    outline = agree.fingerprint(x, num_elements=0)
    assert agree.fingerprint(others[0], num_elements=0) == outline != agree.fingerprint(others[2], num_elements=0)
    large = torch.zeros(10_000)
    seen = agree.fingerprint({"w": large}, num_elements=100)
    large[5_000] = 1
    assert agree.fingerprint({"w": large}, num_elements=100) != seen
