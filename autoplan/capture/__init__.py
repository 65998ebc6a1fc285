"""Capture: an nn.Module and an example batch become a ModelGraph (`export.capture`).

`export`: the whole chain, from a module to a graph.
`frontend`: trace the module by torch.export.
`layers`: cut the flat graph into blocks and calls.
`ops`: one ATen op as IR ops, by the records of the ops.
`passes`: rewrite the flat graph before it is cut.
`source`: start from a config.json or a factory function.
`trace`: the flat graph as IR nodes.
`translate`: turn the ATen graph into a trace.
"""
