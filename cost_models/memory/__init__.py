"""The memory of every pipeline rank.

`ranks`: `MemoryModel`, bytes by term at the fullest moment of a step.
`recompute_frontier`: `RecomputeFrontier`, the recompute choices of a stage in the order in which they pay off.
"""
