"""Capture: an nn.Module and an example batch become a ModelGraph (`export.capture`).

`frontend` traces the module by torch.export, `translate` turns ATen into IR nodes by the table of `ops`, `passes`
rewrite that `trace`, `layers` cuts it into blocks and calls. `source` starts from a name, a path or a factory.
"""
