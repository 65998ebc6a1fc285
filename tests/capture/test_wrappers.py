"""Models inside something: any module around Hugging Face models, adapters on frozen weights, torch.compile."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
import wrapped
from harness import pool

from autoplan.capture.export import capture
from autoplan.errors import CaptureError
from autoplan.ops.batch import batch_obstacle
from autoplan.verify.check import verify_whole
from autoplan.verify.runs import VerifyTask


@pytest.mark.parametrize("name", list(wrapped.MAKERS))
def test_the_graph_is_the_module(name: str) -> None:
    """Loss and all gradients in float64; the capture leaves the model as it was."""
    model, batch = wrapped.MAKERS[name](), wrapped.batch_for(name)
    before = [dict(vars(m)) for m in model.modules()]
    graph = capture(model, batch)
    assert [dict(vars(m)) for m in model.modules()] == before
    assert len(graph.blocks) < len(graph.calls)  # equal layers are captured once
    outcome = verify_whole(VerifyTask(model, graph, batch), limit_s=60.0)
    assert outcome.done, outcome.text


@pytest.mark.parametrize("name", ["inside", "chained"])
def test_attention_inside_a_module_is_one_op(name: str) -> None:
    """No mask of s x s, no keys and values that are handed out: as in the Hugging Face model itself."""
    graph = capture(wrapped.MAKERS[name](), wrapped.batch_for(name))
    ops = [n.op for b in graph.blocks.values() for n in b.nodes]
    plain = [n.op for b in capture(models.make_llama(), models.token_batch(2, 16)).blocks.values() for n in b.nodes]
    assert set(ops) <= set(plain)


def test_rows_before_every_sample_split_with_the_batch() -> None:
    assert batch_obstacle(capture(wrapped.MAKERS["prompted"](), wrapped.batch_for("prompted"))) is None


def test_only_the_adapters_are_trained() -> None:
    graph = capture(wrapped.low_rank(), models.token_batch(2, 16))
    trained = {name.rsplit(".", 1)[1] for name, p in graph.params.items() if p.trainable}
    assert trained == {"a", "b"}


@pytest.mark.parametrize("name", ["low-rank", "chained", "compiled"])
def test_two_ranks_train_what_is_inside(name: str) -> None:
    for loss, gradients, different in pool(2).run(wrapped.errors, name, {"tp": 2}, timeout_s=180):
        assert loss < 1e-7 and gradients < 1e-7  # Llama computes norms and rotations in float32
        assert different == []


def test_the_config_of_an_inner_model_stays_as_it_was() -> None:
    model = wrapped.MAKERS["inside"]()
    model.lm.config.use_cache = True
    capture(model, models.token_batch(2, 16))
    assert model.lm.config.use_cache is True


def test_a_result_with_two_numbers_has_no_loss() -> None:
    class Two(wrapped.Inside):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
            logits, loss = super().forward(input_ids, labels)
            return loss, logits.mean()

    with pytest.raises(CaptureError, match="returned no loss"):
        capture(Two(models.make_llama()), models.token_batch(2, 16))
