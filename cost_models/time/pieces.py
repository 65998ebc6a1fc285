"""Collectives of tensor parallelism behind pieces of the products beside them: async TP of torch's compiler.

A gather and the products that read it run as one piece per rank: while the rows of one rank are multiplied, those of
the next one arrive. A product and the reduce-scatter of its result run the same way (Wang et al., Overlap communication
with dependent computation via decomposition, ASPLOS 2023; torch/_inductor/fx_passes/micro_pipeline_tp.py). The first
piece has nothing to arrive behind, and small pieces multiply more slowly than the whole product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from autoplan.config.parallel import Mode
from autoplan.cost_models.costs import Costs
from autoplan.cost_models.quantity import Quantity, total
from autoplan.cost_models.work import BlockWork, CommWork, OpWork


@dataclass(frozen=True)
class Pieces:
    """Seconds of the products beside a collective: of those that others may hide behind, and what cutting adds."""

    hides: Quantity
    adds: Quantity

    def shown_s(self, sent: Quantity, share: float) -> Quantity:
        """Return the seconds that a collective of `sent` seconds adds to a pass if at most a `share` of it hides."""
        by_share, by_time = sent.less(sent * share), sent.less(self.hides)
        low, mid, high = (max(getattr(by_share, w), getattr(by_time, w)) for w in ("low", "mid", "high"))
        return Quantity(low, mid, high, max(by_share.tag, by_time.tag)) + self.adds


def takes_apart(costs: Costs) -> bool:
    """Return True if overlap of tensor parallelism means pieces of products: with compiled blocks, which find them.

    In fused modes it means Megatron's user buffers, whose fitted share (`Constants.tp_hidden`) has all effects in it.
    """
    return costs.mode is Mode.COMPILED and "tp" in costs.options.overlap


def pieces_of(block: BlockWork, axes: Sequence[tuple[str, int]], costs: Costs) -> Mapping[CommWork, Pieces]:
    """Return the pieces of every collective of a block that has products beside it; empty if nothing is taken apart.

    The product of a gradient is as large as that of the forward, whose price is taken for both.

    Args:
        axes: the sub-axes of tensor parallelism with their sizes.
    """
    if not takes_apart(costs):
        return {}
    sizes = {**dict(axes), "tp": prod(size for _, size in axes)}
    out = {}
    for c in block.comms:
        ranks, products = sizes.get(c.axis, 1), [block.ops[i] for i in c.products]
        if ranks == 1 or not products:
            continue
        whole = total([costs.forward_s(op) for op in products])
        cut = total([costs.forward_s(piece_of(op, ranks)) * float(ranks) for op in products])
        out[c] = Pieces(cut * ((ranks - 1) / ranks), cut.beyond(whole))
    return out


def piece_of(product: OpWork, count: int) -> OpWork:
    """Return the product of one of `count` equal parts of the rows. Its weights are read whole."""
    rows, out = product.inputs[0], product.outputs[0]
    at = max(range(len(rows.shape) - 1), key=lambda i: (rows.shape[i] % count == 0, rows.shape[i]))

    def part(shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:at], -(-shape[at] // count), *shape[at + 1 :])

    less = (rows.num_bytes + out.num_bytes) * (1 - 1 / count)
    return replace(
        product,
        inputs=(replace(rows, shape=part(rows.shape)), *product.inputs[1:]),
        outputs=(replace(out, shape=part(out.shape)), *product.outputs[1:]),
        flops=product.flops / count,
        moved_bytes=max(product.moved_bytes - less, product.moved_bytes / count),
    )
