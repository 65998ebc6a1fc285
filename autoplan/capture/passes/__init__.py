"""Passes that rewrite the trace before it is cut.

`batch_size`: means over the batch, computed micro-batch by micro-batch. `hoist`: sums carried from layer to layer.
`coupled`: losses of routers. `cast`: the module in another dtype, before it is traced.
"""
