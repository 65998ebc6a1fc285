"""The memory of every pipeline rank.

`ranks`: `MemoryModel`, bytes by term at the fullest moment of a step.
`least`: `LeastMemory`, a lower bound of the fullest rank for many degrees.
`parameters`: `ParameterMemory`, a parameter with its gradient and optimizer state.
`allocator`: fragmentation.
`room`: `Room`, the memory that a plan may take.
`recompute_frontier`: `RecomputeFrontier`, the recompute choices of a stage in the order in which they pay off.
"""
