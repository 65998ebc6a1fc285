"""States: the semantics of nn.Module.load_state_dict, the same on all ranks; models that differ between ranks."""

from __future__ import annotations

import batch_jobs
import pytest
from harness import pool
from parity import Case, compiled

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed._functional_collectives.*:FutureWarning")


@pytest.mark.processes
@pytest.mark.parametrize(
    "case", [Case("deepseek", tp=2), Case("deepseek", pp=2), Case("deepseek", dp=2, zero=3)], ids=str
)
def test_a_state_is_loaded_whole_or_not_at_all(case: Case) -> None:
    program = compiled(case)
    results = pool(2).run(batch_jobs.states, case, program.spec.to_json(), dict(program.sources), timeout_s=120)
    said = results[0][0]
    assert results[1][0] == said and all(r[1] for r in results) and all(r[2] < 2e-5 for r in results)
    assert said["missing"].startswith("AgreedRuntimeError: Error(s) in loading state_dict for DeepseekV3ForCausalLM")
    assert 'Missing key(s) in state_dict: "model.embed_tokens.weight"' in said["missing"]
    assert "e_score_correction_bias" in said["missing buffer"] and "Missing key(s)" in said["missing buffer"]
    assert 'Unexpected key(s) in state_dict: "lm_haed.weight"' in said["unexpected"]
    assert "size mismatch for model.embed_tokens.weight: the state has (3,), the model" in said["shape"]
    assert "rank 1: " in said["shape on one rank"] and "size mismatch" in said["shape on one rank"]
    assert "is a list, not a tensor" in said["no tensor"]
    assert "rank 1 was given another state than rank 0" in said["another state on one rank"]
    assert "e_score_correction_bias differs" in said["another buffer on one rank"]
    missing, total = (int(n) for n in said["loose"].split()[:3:2])
    assert missing == total - 1 and said["loose"].endswith("unexpected ['more']")


@pytest.mark.processes
def test_models_that_differ_between_ranks_are_one_error() -> None:
    first, second = pool(2).run(batch_jobs.other_models, timeout_s=120)
    assert first == second
    assert "the ranks have different models: model.embed_tokens.weight is float32[" in first[0]
    assert "on rank 0 and float32[" in first[0] and "on rank 1" in first[0]
    assert float(first[1]) > 0  # and the job goes on
