"""What a rehearsal counts as alive."""

from __future__ import annotations

import gc

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autoplan.rehearsal.rank import FakeMode
from autoplan.rehearsal.watch import Watch
from autoplan.runtime.recompute import Offloads


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


def test_offloaded_activations_die_on_fake_tensors() -> None:
    """torch's cache of fake operations would keep every storage that came back."""

    def live(mode: FakeTensorMode) -> tuple[int, int]:
        watch = Watch()
        with mode, watch:
            weights = [torch.empty(64, 64, requires_grad=True) for _ in range(4)]
            offloads, x = Offloads(), torch.empty(256, 64)
            before = watch.live_bytes
            for weight in weights:
                with offloads.open([weight], follows=True):
                    x = torch.sin((x @ weight)[1:])[1:]  # views, which are found again by set_
            loss = x.sum()
            del x
            held = watch.live_bytes - before
            loss.backward()
            del loss
            gc.collect()
            return held, watch.live_bytes - before - sum(w.nbytes for w in weights)

    held, left = live(FakeMode())
    # on the host: of every block its input (the result of the one before) and its product
    assert held < 9 * 256 * 64 * 4 + 64 and left <= 0
    held_in_cache, left_in_cache = live(FakeTensorMode())
    assert held_in_cache > held and left_in_cache > 4 * 256 * 64 * 4  # negative control
