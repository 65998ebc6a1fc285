"""Where the elements of a tensor stand, for dropout: over a mesh of 2 dp x 2 tp x 2 cp ranks; and generators."""

from autoplan.runtime.random_bits import Factor

INDICES: dict[str, tuple[Factor, ...]] = {
    "flat": ((3000, 3000, ()),),
    "batch": ((3, 3, "batch"), (5, 5, ()), (7, 7, ())),
    "batch inside": ((9, 9, ()), (4, 4, "batch"), (8, 8, ())),
    "sharded": ((2, 2, "batch"), (3, 6, ("cp",)), (4, 8, ("tp",))),
    "sharded twice": ((2, 8, ("cp", "tp")), (3, 3, "batch"), (1, 1, ()), (5, 10, ("tp",)), (2, 2, ())),
    "empty": ((0, 0, "batch"), (4, 4, ())),
}
GENERATORS = [(0, 0, 0), (-(2**62), 10**6, 10**5), (2**63 - 1, 3, 1)]
