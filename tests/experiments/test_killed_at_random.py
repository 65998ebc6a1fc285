"""The verdict on a life whose ranks were all killed: each of its parts is seen."""

from __future__ import annotations

import pytest

from experiments.state.killed_at_random import wrong

TRUTH = {1: 4.0, 2: 3.0, 3: 2.0}


def test_a_life_that_goes_on_is_right() -> None:
    assert wrong("begin at 1\nstep 2: loss 3.0\nsaved 2\nstep 3: loss 2.0000000000000004\n", TRUTH, 1) == []
    assert wrong("", TRUTH, 2) == []  # killed before it began


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("begin at 1\nstep 2: loss 3.0\n", "begins at 1, and 2 was saved"),
        ("begin at 2\nstep 2: loss 3.0\n", "its steps are not those that follow"),
        ("begin at 2\nstep 3: loss 2.00000000001\n", "step 3: 2.00000000001, not 2.0"),
    ],
)
def test_what_is_lost_or_other_is_named(text: str, said: str) -> None:
    assert wrong(text, TRUTH, 2) == [said]
