"""What a rehearsal counts as alive."""

from __future__ import annotations

import gc

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autoplan.rehearsal.watch import Watch


def test_a_storage_at_the_address_of_a_freed_one_that_was_left_out_counts() -> None:
    watch = Watch()
    with FakeTensorMode(), watch:
        whole = {f"w{i}": torch.empty(64) for i in range(100)}
        watch.leave_out(whole)
        before = watch.live_bytes
        view = whole["w0"][:32]
        del whole
        gc.collect()
        kept = [torch.empty(64) for _ in range(400)]
        more = watch.live_bytes - before
    assert view.untyped_storage().nbytes() == 4 * 64
    # all that is new, and not what was left out, of which one still lives
    assert more == len(kept) * 4 * 64 - 99 * 4 * 64
