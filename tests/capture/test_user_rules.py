"""`autoplan.rule`: how an operator of a user can be split, in one line."""

from __future__ import annotations

from typing import Any

import custom_ops
import pytest
import torch
from harness import pool
from torch import nn

import autoplan
from autoplan.capture.export import capture
from autoplan.errors import CaptureError, RuleError


def test_the_rule_is_that_of_the_node() -> None:
    graph = capture(custom_ops.Model(), {"x": torch.zeros(2, 6, 16)}, custom_ops.loss)
    rules = {
        n.attrs["call"].split("(")[0]: n.attrs["rule"]
        for b in graph.blocks.values()
        for n in b.nodes
        if n.op == "function"
    }
    assert rules == {
        "torch.ops.autoplan_tests.centred.default": "[*b,i!] -> [*b,i!]",
        "torch.ops.autoplan_tests.gated.default": "[*b] * [*b] -> [*b]",
    }


def test_two_ranks_split_operators_of_a_user() -> None:
    for loss, gradients, source in pool(2).run(custom_ops.errors, {"tp": 2}, timeout_s=180):
        assert loss < 1e-12 and gradients < 1e-10
        assert "torch.ops.autoplan_tests.gated.default(" in source and ", 'tp'" in source


def halved(name: str, line: str, function: Any) -> Any:
    """An operator of one tensor with a rule."""
    op = torch.library.custom_op(f"autoplan_tests::{name}", mutates_args=())(function)
    op.register_fake(lambda x: torch.empty_like(x))
    op.register_autograd(lambda ctx, grad: grad)
    return autoplan.rule(line)(op)


class One(nn.Module):
    def __init__(self, op: Any) -> None:
        super().__init__()
        self.linear, self.op = nn.Linear(8, 8), op

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.op(self.linear(x))
        return out


def flipped(x: torch.Tensor) -> torch.Tensor:
    return x.flip(-1)


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("wrong", "[*b,i] -> [*b,i]", r"autoplan_tests\.wrong\.default: its rule .* splits 'i', but halves"),
        ("ranks", "[b,i!] -> [b,i!]", r"autoplan_tests\.ranks\.default: .* names 2 dims of an operand that has 3"),
        ("many", "[*b], [*b] -> [*b]", r"is for 2 tensors; the operator is given 1"),
    ],
)
def test_a_rule_that_does_not_hold_is_refused(name: str, line: str, message: str) -> None:
    model = One(halved(name, line, flipped))
    with pytest.raises(CaptureError, match=message):
        capture(model, {"x": torch.zeros(2, 6, 8)}, custom_ops.loss)


def test_what_is_no_rule_and_no_operator_is_refused() -> None:
    with pytest.raises(RuleError, match="has no '->'"):
        autoplan.rule("[*b,i!]")
    with pytest.raises(RuleError, match=r"autoplan\.rule is given function, not an operator"):
        autoplan.rule("[*b] -> [*b]")(flipped)
    with pytest.raises(RuleError, match="labels with @ are for operators of autoplan"):
        autoplan.rule("[*b,i@special] -> [*b,i@special]")
