"""Capture: an nn.Module and an example batch become a ModelGraph (`export.capture`).

`child`: run a function in a forked process.
`draws`: every op that draws random numbers, in terms of few distributions.
`decompose`: ops in terms of others: autoplan's forms, and PyTorch's decompositions.
`export`: the whole chain, from a module to a graph.
`frontend`: trace the module by torch.export.
`generic`: pure ops without a record, split as trials show.
`layers`: cut the flat graph into blocks and calls.
`ops`: one ATen op as IR ops, by the records of the ops.
`passes`: rewrite the flat graph before it is cut.
`rules`: rules that users give their own ops.
`source`: start from a config.json or a factory function.
`trace`: the flat graph as IR nodes.
`translate`: turn the ATen graph into a trace.
"""
