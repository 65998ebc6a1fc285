"""Capture: an nn.Module and an example batch become a ModelGraph (`export.capture`).

`frontend`: trace the module by torch.export.
`ops`, `translate`: turn its ATen operations into IR nodes, by the records of the ops.
`trace`: the flat graph that this gives.
`passes`: rewrite the flat graph.
`layers`: cut it into blocks and calls.
`export`: the whole chain. `source`: the same from a name, a path or a factory.
"""
