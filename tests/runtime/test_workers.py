"""What the workers of a pool begin with."""

import pytest
from failing_jobs import frozen_and_loaded
from harness import Pool


@pytest.mark.processes
def test_workers_begin_with_what_most_jobs_import_and_never_look_through_it():
    with Pool(1) as workers:
        ((frozen, loaded),) = workers.run(frozen_and_loaded)
    assert frozen > 100_000 and loaded
