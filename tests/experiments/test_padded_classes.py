"""Padded batches of the classes of transformers (experiments.compatibility.padding), and a program that they expose."""

from __future__ import annotations

import models
import pytest
import torch
from parity import fake_group

from autoplan.capture.frontend import hf_attention
from experiments.compatibility import hf_classes, padding
from experiments.compatibility.one_by_one import EQUAL, WRONG
from experiments.compatibility.padding import LEFT, RIGHT, Padding


def test_a_batch_is_padded_on_its_sides() -> None:
    model, length = models.make_t5(), 12
    batch = models.token_batch(padding.SAMPLES, length)
    names = padding.INPUTS["both masks"].of(model)
    assert names is not None
    for counts in (False, True):
        out = padding.padded(model, batch, names, Padding(RIGHT, LEFT, counts, has_empty=True))
        source, target = out["attention_mask"], out["decoder_attention_mask"]
        assert source.sum(1).tolist() == target.sum(1).tolist() == [12, 9, 4, 0]
        assert source[1].tolist() == target[1].flip(0).tolist() == [1] * 9 + [0] * 3
        for name, mask, on_padding in (
            ("input_ids", source, model.config.pad_token_id),
            ("labels", target, model.config.pad_token_id if counts else -100),
        ):
            assert torch.equal(out[name][mask == 1], batch[name][mask == 1])
            assert (out[name][mask == 0] == on_padding).all()
    assert len(set(padding.paddings(True, True))) == 9 and len(set(padding.paddings(False, False))) == 3
    decoder = models.make_llama()
    sets = {name for name, inputs in padding.INPUTS.items() if inputs.of(decoder) is not None}
    assert sets == {"tokens alone", "mask", "mask, positions, types"}


def test_a_program_that_is_wrong_before_the_first_token_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A query that sees no token attends to its like. A first valid token is predicted from such a query."""
    monkeypatch.setattr(padding, "INPUTS", {n: padding.INPUTS[n] for n in ("tokens alone", "mask")})
    (of,) = hf_classes.classes(["causal"], "^LlamaForCausalLM$")
    with fake_group(1):
        row = hf_classes.examine(of)
        monkeypatch.setattr(hf_attention, "values_unseen", lambda value, _: value)
        other = hf_classes.examine(of)
    assert row.outcome == EQUAL and {outcome for _, outcome in row.parity} == {EQUAL} and not row.is_defect
    found = dict(other.parity)
    assert other.outcome == EQUAL and found["mask"] == WRONG and found["tokens alone"] == EQUAL and other.is_defect
    assert "first padding left, labels ignored" in other.why


def test_batches_that_are_finite_in_float32_alone_are_compared_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of padding alone: Gemma 2 computes a softmax in float32 of the least number of float64."""
    monkeypatch.setattr(padding, "INPUTS", {"mask": padding.INPUTS["mask"]})
    (of,) = hf_classes.classes(["causal"], "^Gemma2ForCausalLM$")
    with fake_group(1):
        row = hf_classes.examine(of)
    assert (row.outcome, row.why, dict(row.parity)) == (EQUAL, "", {"mask": EQUAL})
