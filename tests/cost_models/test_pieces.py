"""Collectives of tensor parallelism behind pieces of products: what hides, what small pieces cost, where it pays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoplan.catalog import load_model
from autoplan.config.parallel import Mode, ParallelConfig, RunOptions
from autoplan.cost_models.costs import Costs
from autoplan.cost_models.hardware.cluster import Cluster, Group
from autoplan.cost_models.quantity import Quantity, Tag
from autoplan.cost_models.time.pieces import Pieces, piece_of, pieces_of
from autoplan.cost_models.work import BlockWork, OpWork
from autoplan.ops.saved import TensorFacts
from autoplan.search.estimate import Planned, estimate_config
from autoplan.search.request import PlanRequest

NODE = Cluster.parse("1x8xh100-sxm5-80gb")
IN_PIECES = RunOptions(overlap=frozenset({"tp"}))


def priced(options: RunOptions, seq_len: int = 8192) -> Planned:
    request = PlanRequest(load_model("llama-3.1-8b"), NODE, seq_len, 4, mode=Mode.COMPILED, options=options)
    return estimate_config(request, ParallelConfig(tp=8, num_micro_batches=4))


def device_of(found: Planned) -> float:
    """The seconds of a step in which nobody waits for the host, as it does for small products."""
    parts = found.estimate.breakdown
    return sum(q.mid for name, q in parts.items() if name != "launch")


def layer_of(found: Planned) -> BlockWork:
    work = found.point.workload
    return next(work.blocks[unit[marked.index(True)]] for unit, marked in zip(work.units, work.is_layer, strict=True))


def test_a_collective_shows_beyond_a_share_and_beyond_its_products() -> None:
    def seconds(mid: float) -> Quantity:
        return Quantity.spread(mid, 0.0, Tag.ASSUMED)

    pieces = Pieces(hides=seconds(3.0), adds=seconds(0.5))
    assert pieces.shown_s(seconds(4.0), 0.5).mid == pytest.approx(2.0 + 0.5)  # the share binds
    assert pieces.shown_s(seconds(10.0), 0.5).mid == pytest.approx(7.0 + 0.5)  # the products bind


def test_a_piece_is_a_part_of_the_rows_with_all_weights() -> None:
    x, w, y = (TensorFacts(shape, "bfloat16", True) for shape in ((1, 8192, 4096), (512, 4096), (1, 8192, 512)))
    whole = OpWork("linear", (x, w), (y,), (), 2.0 * 8192 * 4096 * 512, float(x.num_bytes + w.num_bytes + y.num_bytes))
    piece = piece_of(whole, 8)
    assert piece.inputs[0].shape == (1, 1024, 4096) and piece.outputs[0].shape == (1, 1024, 512)
    assert piece.inputs[1] is w and piece.flops == whole.flops / 8
    assert piece.moved_bytes == piece.inputs[0].num_bytes + w.num_bytes + piece.outputs[0].num_bytes
    costs = Costs(NODE, mode=Mode.COMPILED, options=IN_PIECES)
    assert 8 * costs.forward_s(piece).mid > costs.forward_s(whole).mid


def test_what_hides_is_what_a_compiler_takes_apart() -> None:
    """Of a layer of Llama: two gathers and two reduce-scatters; backwards only those with one product beside them."""
    found = priced(IN_PIECES)
    layer = layer_of(found)
    beside = [(c.kind, c.phase, [layer.ops[i].op for i in c.products]) for c in layer.comms if c.products]
    forward = [(kind, len(ops)) for kind, phase, ops in beside if phase == "forward"]
    backward = [(kind, len(ops)) for kind, phase, ops in beside if phase == "backward"]
    assert sorted(forward) == [("all_gather", 2), ("all_gather", 3), ("reduce_scatter", 1), ("reduce_scatter", 1)]
    assert backward == [("all_gather", 1), ("all_gather", 1)]  # sums of two and three gradients are scattered otherwise
    assert all(op == "linear" for *_, ops in beside for op in ops)


def test_the_price_of_async_tp() -> None:
    """By hand, from the same layer without it."""
    plain, hidden = priced(RunOptions()), priced(IN_PIECES)
    assert hidden.estimate.breakdown["tp_comm"].mid < plain.estimate.breakdown["tp_comm"].mid
    assert hidden.estimate.step_time_s.mid < plain.estimate.step_time_s.mid
    layer = layer_of(hidden)
    costs = Costs(NODE, mode=Mode.COMPILED, options=IN_PIECES)
    share, less = costs.constants.tp_hidden, 0.0
    for c in layer.comms:
        if c.products:
            sent = costs.collective_s(c.kind, c.num_bytes, Group(8, 1)).mid
            whole = sum(costs.forward_s(layer.ops[i]).mid for i in c.products)
            cut = 8 * sum(costs.forward_s(piece_of(layer.ops[i], 8)).mid for i in c.products)
            less += min(share * sent, cut * 7 / 8) - max(0.0, cut - whole)
    saved = plain.estimate.breakdown["tp_comm"].mid - hidden.estimate.breakdown["tp_comm"].mid
    assert saved > 0.9 * 32 * 4 * less > 0  # the head's gather hides, too
    assert saved < 1.2 * 32 * 4 * less


def test_small_products_lose_more_than_they_hide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoplan.search.layouts.host_send_s", lambda costs: 0.0)  # else layouts without gathers
    plain, hidden = (device_of(priced(options, seq_len=256)) for options in (RunOptions(), IN_PIECES))
    assert hidden > plain


def test_nothing_is_taken_apart_in_other_modes() -> None:
    """Megatron's overlap is a fitted share; op by op nothing finds pieces."""
    layer = layer_of(priced(IN_PIECES))
    axes = (("tp", 8),)
    costs = Costs(NODE, mode=Mode.COMPILED, options=IN_PIECES)
    assert len(pieces_of(layer, axes, costs)) == 6
    assert pieces_of(layer, (("tp", 1),), costs) == {}
    for other in (replace(costs, mode=Mode.FUSED), replace(costs, options=RunOptions())):
        assert pieces_of(layer, axes, other) == {}
