"""What users' scripts do, and what they are told: optimizers that cannot be made, numbers outside of a table."""

from __future__ import annotations

import functools
import warnings

import pytest
import script_jobs
import torch
from harness import pool

from autoplan.runtime.shards import ForeignUseError

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed._functional_collectives.*:FutureWarning")


@pytest.mark.processes
@pytest.mark.parametrize("where", [[0, 1], [1]], ids=str)
def test_an_error_of_the_optimizer_is_the_users_own_and_the_job_goes_on(where: list[int]) -> None:
    own = "Muon only supports 2D parameters whereas we found a parameter with size"
    for rank, (said, loss) in enumerate(pool(2).run(script_jobs.own_errors, where)):
        assert said.startswith(f"ValueError: {own}" if rank in where else "AgreedValueError: rank 1: optimizer: ")
        assert own in said and loss > 0


@pytest.mark.processes
def test_layers_that_return_views_warn_of_nothing() -> None:
    """FSDP warns of views, which only an in-place operation would break; emitted text has none."""
    assert pool(2).run(script_jobs.warned_of, {"dp": 2, "zero_stage": 3}) == [[], []]


@pytest.mark.processes
def test_numbers_outside_of_a_table_are_refused_by_the_name_of_their_input() -> None:
    """A table that ranks of tensor parallelism share has zeros for them."""
    for said, losses in pool(2).run(script_jobs.outside, {"tp": 2}):
        assert (
            said[::2]
            == said[1::2]
            == [
                "ids has 32 at [2, 3], but embed.weight has 32 rows: give 0 to 31",
                "ids has -1 at [2, 3], but embed.weight has 32 rows: give 0 to 31",
                "labels has 99 at [2, 3], but the loss has 32 classes: give 0 to 31, or -100 to ignore one",
            ]
        )
        assert len(losses) == 2 and min(losses) > 0


@pytest.mark.processes
@pytest.mark.parametrize("pins", [{"tp": 2}, {"dp": 2}], ids=str)
def test_a_gradient_of_an_input(pins: dict[str, int]) -> None:
    """Ranks of tp would have parts of it, without an error; data-parallel ranks have it."""
    wanted = "accepted" if "dp" in pins else "input requires a gradient, and the ranks that share a sample would have"
    assert all(said.startswith(wanted) for said in pool(2).run(script_jobs.asked, pins))


@pytest.mark.usefixtures("one_process")
def test_steps_in_the_closure_of_an_update_are_no_second_step() -> None:
    pm = script_jobs.program({}, functools.partial(torch.optim.LBFGS, lr=0.1, max_iter=3))
    assert pm.optimizer is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            pm.optimizer.step(lambda: pm.step(script_jobs.batch_of(4)))
        pm.step(script_jobs.batch_of(4))
    with pytest.warns(UserWarning, match="a second step without an update"):
        pm.step(script_jobs.batch_of(4))


@pytest.mark.usefixtures("one_process")
def test_a_state_of_another_optimizer_is_refused_with_what_to_load() -> None:
    pm = script_jobs.program({}, script_jobs.sgd)
    assert pm.optimizer is not None
    other = script_jobs.sgd([torch.nn.Parameter(torch.zeros(2))])
    with pytest.raises(ForeignUseError, match=r"has 1 parameters, and this rank 9: pm\.optimizer takes what"):
        pm.optimizer.load_state_dict(other.state_dict())
